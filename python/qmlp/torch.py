"""The ops as torch custom ops: torch.compile takes them without a graph break, autograd differentiates
them.

    packed = qmlp.pack(qmlp.quantize(w), activation="bf16", device="cuda")
    y = qmlp.torch.quantized_linear(x, packed)
    layer = qmlp.torch.QuantizedLinear(packed)          # a module without parameters

The functions are `qmlp.quantized_linear` and so on: outside of torch.compile they call the library
directly, inside it they are torch.ops.qmlp.quantized_linear and so on. A packed weight enters a graph as
a number of this process; whoever runs the graph must keep the weight alive, as a module does.

Gradients reach x, the linear biases and the residual; a packed weight is frozen. The gradient of x is
the incoming one times the decoded weight, by torch.matmul. The backward pass decodes the weight, a block
of 1024 input features at a time, and for a SwiGLU computes gate and up again. Forward mode is refused.
"""

# No `from __future__ import annotations`, as in `_torch_ops`.
from typing import Optional

try:
    import torch
except ImportError as error:
    raise ImportError("qmlp.torch needs torch: pip install torch") from error

from . import _ops
from ._torch_ops import linear, mlp, number_of
from ._weights import PackedWeight


def quantized_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    linear_bias: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """out[..., N] = x[..., K] * w^T (+ linear_bias [N]) (+ residual). As `qmlp.quantized_linear`."""
    number_of(weight)
    return _ops.quantized_linear(x, weight, linear_bias=linear_bias, residual=residual)


def fused_swiglu(
    x: torch.Tensor,
    gate_up: PackedWeight,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """out[..., intermediate] = silu(x * gate^T) * (x * up^T). As `qmlp.fused_swiglu`."""
    number_of(gate_up, "gate_up")
    return _ops.fused_swiglu(x, gate_up, gate_bias=gate_bias, up_bias=up_bias)


def fused_mlp(
    x: torch.Tensor,
    gate_up: PackedWeight,
    down: PackedWeight,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
    down_bias: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The whole MLP (+ residual). As `qmlp.fused_mlp`."""
    number_of(gate_up, "gate_up")
    return _ops.fused_mlp(x, gate_up, down, gate_bias=gate_bias, up_bias=up_bias,
                          down_bias=down_bias, residual=residual)


class QuantizedLinear(torch.nn.Module):
    """A linear layer on a packed weight; holds no parameters. `.to(device)` does not move the weight:
    pack it for the device."""

    def __init__(self, weight: PackedWeight, linear_bias: Optional[torch.Tensor] = None) -> None:
        super().__init__()
        number_of(weight)
        self.weight = weight
        self.register_buffer("linear_bias", linear_bias)

    @property
    def number(self) -> int:
        """The custom op's weight: that of `weight` as it is now."""
        return number_of(self.weight)

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None) -> torch.Tensor:
        """x [..., K] to [..., N], plus the residual if there is one."""
        if torch.compiler.is_compiling():
            return linear(x, self.number, self.linear_bias, residual)
        return _ops.quantized_linear(x, self.weight, linear_bias=self.linear_bias, residual=residual)

    def extra_repr(self) -> str:
        return repr(self.weight)


class FusedMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)) on packed weights; holds no parameters. `.to(device)` does not move
    the weights: pack them for the device."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        number_of(gate_up, "gate_up"), number_of(down, "down")
        self.gate_up = gate_up
        self.down = down

    @property
    def numbers(self) -> tuple[int, int]:
        """The custom op's gate_up and down: those of the weights as they are now."""
        return number_of(self.gate_up, "gate_up"), number_of(self.down, "down")

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None) -> torch.Tensor:
        """x [..., hidden] to [..., N], plus the residual if there is one."""
        if torch.compiler.is_compiling():
            return mlp(x, *self.numbers, None, None, None, residual)
        return _ops.fused_mlp(x, self.gate_up, self.down, residual=residual)

    def extra_repr(self) -> str:
        return f"{self.gate_up!r}, {self.down!r}"


__all__ = ["FusedMLP", "QuantizedLinear", "fused_mlp", "fused_swiglu", "quantized_linear"]
