"""The ops as torch custom ops, with shapes for tracing: torch.compile takes them without a graph break.

    packed = qmlp.pack(qmlp.quantize(w), activation="bf16")
    y = qmlp.torch.quantized_linear(x, packed)          # torch.ops.qmlp.quantized_linear
    layer = qmlp.torch.QuantizedLinear(packed)          # a module without parameters

A packed weight enters a graph as a number; whoever runs the graph must keep the weight alive, as a
module does. Not differentiable: use under torch.no_grad() or on frozen layers.
"""

# No `from __future__ import annotations`: torch reads the signatures of custom ops.
import itertools
import weakref
from typing import Optional

try:
    import torch
except ImportError as error:
    raise ImportError("qmlp.torch needs torch: pip install torch") from error

from . import _ops
from ._weights import PackedWeight

_numbers = itertools.count(1)
_number_of: "weakref.WeakKeyDictionary[PackedWeight, int]" = weakref.WeakKeyDictionary()
_by_number: "weakref.WeakValueDictionary[int, PackedWeight]" = weakref.WeakValueDictionary()


def _number(weight: PackedWeight) -> int:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}, needs a PackedWeight: qmlp.pack")
    number = _number_of.get(weight)
    if number is None:
        number = _number_of[weight] = next(_numbers)
        _by_number[number] = weight
    return number


def _weight(number: int) -> PackedWeight:
    weight = _by_number.get(number)
    if weight is None:
        raise RuntimeError(f"packed weight {number} is gone: keep it alive as long as its graph")
    return weight


@torch.library.custom_op("qmlp::quantized_linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    weight: int,
    linear_bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
) -> torch.Tensor:
    return _ops.quantized_linear(x, _weight(weight), linear_bias=linear_bias, residual=residual)


@_linear.register_fake
def _(x, weight, linear_bias, residual):
    return x.new_empty((*x.shape[:-1], _weight(weight).N))


@torch.library.custom_op("qmlp::fused_swiglu", mutates_args=())
def _swiglu(
    x: torch.Tensor,
    weight: int,
    gate_bias: Optional[torch.Tensor],
    up_bias: Optional[torch.Tensor],
) -> torch.Tensor:
    return _ops.fused_swiglu(x, _weight(weight), gate_bias=gate_bias, up_bias=up_bias)


@_swiglu.register_fake
def _(x, weight, gate_bias, up_bias):
    return x.new_empty((*x.shape[:-1], _weight(weight).N))


@torch.library.custom_op("qmlp::fused_mlp", mutates_args=())
def _mlp(
    x: torch.Tensor,
    gate_up: int,
    down: int,
    gate_bias: Optional[torch.Tensor],
    up_bias: Optional[torch.Tensor],
    down_bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
) -> torch.Tensor:
    return _ops.fused_mlp(
        x, _weight(gate_up), _weight(down), gate_bias=gate_bias, up_bias=up_bias,
        down_bias=down_bias, residual=residual)


@_mlp.register_fake
def _(x, gate_up, down, gate_bias, up_bias, down_bias, residual):
    return x.new_empty((*x.shape[:-1], _weight(down).N))


def quantized_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    linear_bias: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """out[..., N] = x[..., K] * w^T (+ linear_bias [N]) (+ residual). As `qmlp.quantized_linear`."""
    return _linear(x, _number(weight), linear_bias, residual)


def fused_swiglu(
    x: torch.Tensor,
    gate_up: PackedWeight,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """out[..., intermediate] = silu(x * gate^T) * (x * up^T). As `qmlp.fused_swiglu`."""
    return _swiglu(x, _number(gate_up), gate_bias, up_bias)


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
    return _mlp(x, _number(gate_up), _number(down), gate_bias, up_bias, down_bias, residual)


class QuantizedLinear(torch.nn.Module):
    """A linear layer on a packed weight; holds no parameters."""

    def __init__(self, weight: PackedWeight, linear_bias: Optional[torch.Tensor] = None) -> None:
        super().__init__()
        self.weight = weight
        self.number = _number(weight)
        self.register_buffer("linear_bias", linear_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] to [..., N]."""
        return _linear(x, self.number, self.linear_bias, None)

    def extra_repr(self) -> str:
        return repr(self.weight)


class FusedMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)) on packed weights; holds no parameters."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.numbers = (_number(gate_up), _number(down))

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None) -> torch.Tensor:
        """x [..., hidden] to [..., N], plus the residual if there is one."""
        return _mlp(x, self.numbers[0], self.numbers[1], None, None, None, residual)

    def extra_repr(self) -> str:
        return f"{self.gate_up!r}, {self.down!r}"


__all__ = ["FusedMLP", "QuantizedLinear", "fused_mlp", "fused_swiglu", "quantized_linear"]
