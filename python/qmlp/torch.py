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

# No `from __future__ import annotations`: torch reads the signatures of custom ops.
from typing import Any, Optional

try:
    import torch
except ImportError as error:
    raise ImportError("qmlp.torch needs torch: pip install torch") from error

from . import _arrays, _ops, _torch_calls
from ._weights import PackedWeight, _by_number

_backend = _arrays.torch_backend()

_BLOCK = 1024


def _number(weight: PackedWeight) -> int:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"weight is a {type(weight).__name__}, needs a PackedWeight: qmlp.pack")
    return weight._number


def _weight(number: int) -> PackedWeight:
    weight = _by_number.get(number)
    if weight is None:
        raise RuntimeError(f"packed weight {number} is gone: keep it alive as long as its graph")
    return weight


def _refuse_tangents(op: str, *arrays: Optional[torch.Tensor]) -> None:
    """For a custom op that was called itself: below autograd only dual levels still show them."""
    if _backend.tangent(*arrays):
        raise NotImplementedError(_arrays.no_forward_mode(op))


def _shape(op: str, x: torch.Tensor, first: PackedWeight, last: PackedWeight) -> torch.Tensor:
    torch._check(x.dim() >= 1 and x.shape[-1] == first.K,
                 lambda: f"{op}: x is {list(x.shape)}, needs [..., {first.K}]")
    torch._check(x.device.type == first.device.partition(":")[0],
                 lambda: f"{op}: x is on {x.device}, the weight on {first.device}: need one device")
    return x.new_empty((*x.shape[:-1], last.N))


@torch.library.custom_op(
    "qmlp::quantized_linear", mutates_args=(),
    schema="(Tensor x, int weight, Tensor? linear_bias, Tensor? residual) -> Tensor")
def _linear(
    x: torch.Tensor,
    weight: int,
    linear_bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
) -> torch.Tensor:
    _refuse_tangents("quantized_linear", x, linear_bias, residual)
    packed = _weight(weight)
    result = _torch_calls.linear(x, packed, linear_bias, residual, None)
    if result is None:
        result = _ops._linear(_backend, x, packed, linear_bias, residual, None)
    return result


@_linear.register_fake
def _(x, weight, linear_bias, residual):
    packed = _weight(weight)
    return _shape("quantized_linear", x, packed, packed)


@torch.library.custom_op(
    "qmlp::fused_swiglu", mutates_args=(),
    schema="(Tensor x, int weight, Tensor? gate_bias, Tensor? up_bias) -> Tensor")
def _swiglu(
    x: torch.Tensor,
    weight: int,
    gate_bias: Optional[torch.Tensor],
    up_bias: Optional[torch.Tensor],
) -> torch.Tensor:
    _refuse_tangents("fused_swiglu", x, gate_bias, up_bias)
    packed = _weight(weight)
    result = _torch_calls.swiglu(x, packed, gate_bias, up_bias, None, None)
    if result is None:
        result = _ops._swiglu(_backend, x, packed, None, gate_bias, up_bias, None, None)
    return result


@_swiglu.register_fake
def _(x, weight, gate_bias, up_bias):
    packed = _weight(weight)
    return _shape("fused_swiglu", x, packed, packed)


@torch.library.custom_op(
    "qmlp::fused_mlp", mutates_args=(),
    schema="(Tensor x, int gate_up, int down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, "
           "Tensor? residual) -> Tensor")
def _mlp(
    x: torch.Tensor,
    gate_up: int,
    down: int,
    gate_bias: Optional[torch.Tensor],
    up_bias: Optional[torch.Tensor],
    down_bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
) -> torch.Tensor:
    _refuse_tangents("fused_mlp", x, gate_bias, up_bias, down_bias, residual)
    first, last = _weight(gate_up), _weight(down)
    result = _torch_calls.mlp(x, first, last, gate_bias, up_bias, down_bias, residual, None)
    if result is None:
        result = _ops._mlp(_backend, x, first, last, gate_bias, up_bias, down_bias, residual, None)
    return result


@_mlp.register_fake
def _(x, gate_up, down, gate_bias, up_bias, down_bias, residual):
    return _shape("fused_mlp", x, _weight(gate_up), _weight(down))


# Gradients. The decoded weight is the op's own answer to the unit matrix, so that no other way to
# decode is needed and a graph can hold the backward pass.


def _times_weight(grad: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """grad[..., N] times the decoded weight [N, K]."""
    number = _number(weight)
    flat = grad.reshape(-1, weight.N)
    columns = []
    for begin in range(0, weight.K, _BLOCK):
        rows = torch.arange(begin, min(begin + _BLOCK, weight.K), device=grad.device)
        unit = (rows[:, None] == torch.arange(weight.K, device=grad.device)).to(grad.dtype)
        columns.append(flat @ _linear(unit, number, None, None).T)
    return torch.cat(columns, -1).reshape(*grad.shape[:-1], weight.K)


def _bias_grad(grad: torch.Tensor, N: int) -> torch.Tensor:
    return grad.reshape(-1, N).sum(0)


def _swiglu_grads(ctx: Any, grad: torch.Tensor, weight: PackedWeight) -> tuple:
    """Of x, gate_bias and up_bias; None where not asked for."""
    x, gate_bias, up_bias = ctx.saved_tensors
    halves = [weight._half(i) for i in range(2)]
    gate = _run_linear(x, _number(halves[0]), gate_bias, None).float()
    up = _run_linear(x, _number(halves[1]), up_bias, None).float()
    wide = grad.float()
    sigmoid = torch.sigmoid(gate)
    to_gate = (wide * up * sigmoid * (1 + gate * (1 - sigmoid))).to(grad.dtype)
    to_up = (wide * gate * sigmoid).to(grad.dtype)
    to_x = None
    if ctx.wants_x:
        to_x = _times_weight(to_gate, halves[0]) + _times_weight(to_up, halves[1])
    return (to_x, None if gate_bias is None else _bias_grad(to_gate, weight.N),
            None if up_bias is None else _bias_grad(to_up, weight.N))


def _linear_setup(ctx, inputs, output):
    _, number, linear_bias, residual = inputs
    ctx.weight = _weight(number)  # the object: it lives until the backward pass has run
    ctx.has = (linear_bias is not None, residual is not None)


def _linear_backward(ctx, grad):
    wants_x, _, wants_bias, wants_residual = ctx.needs_input_grad
    return (_times_weight(grad, ctx.weight) if wants_x else None,
            None,
            _bias_grad(grad, grad.shape[-1]) if wants_bias and ctx.has[0] else None,
            grad if wants_residual and ctx.has[1] else None)


def _swiglu_setup(ctx, inputs, output):
    x, number, gate_bias, up_bias = inputs
    ctx.weight = _weight(number)
    ctx.save_for_backward(x, gate_bias, up_bias)


def _swiglu_backward(ctx, grad):
    ctx.wants_x = ctx.needs_input_grad[0]
    to_x, to_gate_bias, to_up_bias = _swiglu_grads(ctx, grad, ctx.weight)
    return to_x, None, to_gate_bias, to_up_bias


def _mlp_setup(ctx, inputs, output):
    x, gate_up, down, gate_bias, up_bias, down_bias, residual = inputs
    ctx.gate_up, ctx.down = _weight(gate_up), _weight(down)
    ctx.has = (down_bias is not None, residual is not None)
    ctx.save_for_backward(x, gate_bias, up_bias)


def _mlp_backward(ctx, grad):
    needs = ctx.needs_input_grad
    ctx.wants_x = needs[0]
    inner = (None, None, None)
    if needs[0] or needs[3] or needs[4]:
        inner = _swiglu_grads(ctx, _times_weight(grad, ctx.down), ctx.gate_up)
    to_x, to_gate_bias, to_up_bias = inner
    return (to_x, None, None, to_gate_bias, to_up_bias,
            _bias_grad(grad, grad.shape[-1]) if needs[5] and ctx.has[0] else None,
            grad if needs[6] and ctx.has[1] else None)


_linear.register_autograd(_linear_backward, setup_context=_linear_setup)
_swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_setup)
_mlp.register_autograd(_mlp_backward, setup_context=_mlp_setup)


# torch.func. The autograd of a custom op does not work inside torch.func.grad and its kin, an
# autograd.Function does; it is not for torch.compile, which sees through it.


def _function(name: str, op: Any, setup: Any, derivative: Any) -> Any:
    """A custom op as an autograd.Function."""

    class Function(torch.autograd.Function):
        generate_vmap_rule = True
        setup_context = staticmethod(setup)
        backward = staticmethod(derivative)

        @staticmethod
        def forward(*args):
            return op(*args)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(_arrays.no_forward_mode(name))

    return Function


def _wants_grad(array: Any) -> bool:
    """At any level of the transforms."""
    while isinstance(array, torch.Tensor):
        if array.requires_grad:
            return True
        array = _backend.below(array)
    return False


def _chosen(op: Any, function: Any) -> Any:
    def run(*args: Any) -> torch.Tensor:
        if (not torch.compiler.is_compiling() and _backend.transform() is not None
                and any(map(_wants_grad, args))):
            return function.apply(*args)
        return op(*args)

    return run


_run_linear = _chosen(_linear, _function("quantized_linear", _linear, _linear_setup, _linear_backward))
_run_swiglu = _chosen(_swiglu, _function("fused_swiglu", _swiglu, _swiglu_setup, _swiglu_backward))
_run_mlp = _chosen(_mlp, _function("fused_mlp", _mlp, _mlp_setup, _mlp_backward))


def _register_vmap(op: Any, rows: tuple[int, ...]) -> None:
    """A batch of x and of the residual (`rows`, places among the arguments) is more rows; biases of
    their own for each element of the batch take a call for each. torch 2.4 cannot be told."""

    def batched(info: Any, in_dims: tuple, *args: Any) -> tuple[torch.Tensor, int]:
        size = info.batch_size
        if any(dim is not None and i not in rows for i, dim in enumerate(in_dims)):
            results = [op(*(arg if dim is None else arg.select(dim, element)
                            for arg, dim in zip(args, in_dims))) for element in range(size)]
            return torch.stack(results), 0
        folded = list(args)
        for i in rows:
            if in_dims[i] is not None:
                folded[i] = args[i].movedim(in_dims[i], 0)
            elif args[i] is not None:
                folded[i] = args[i].expand(size, *args[i].shape)
        return op(*folded), 0

    if hasattr(op, "register_vmap"):
        op.register_vmap(batched)


_register_vmap(_linear, (0, 3))
_register_vmap(_swiglu, (0,))
_register_vmap(_mlp, (0, 6))


def _refuse_outputs(op: str, *outputs: Any) -> None:
    if any(output is not None for output in outputs):
        raise ValueError(f"{op}: out and gate_tap cannot be given where torch traces the call, needs a "
                         "new result")


def _linear_op(x, weight, linear_bias, residual, out=None):
    _refuse_outputs("quantized_linear", out)
    return _run_linear(x, _number(weight), linear_bias, residual)


def _swiglu_op(x, weight, gate_bias, up_bias, gate_tap=None, out=None):
    _refuse_outputs("fused_swiglu", gate_tap, out)
    return _run_swiglu(x, _number(weight), gate_bias, up_bias)


def _mlp_op(x, gate_up, down, gate_bias, up_bias, down_bias, residual, out=None):
    _refuse_outputs("fused_mlp", out)
    return _run_mlp(x, _number(gate_up), _number(down), gate_bias, up_bias, down_bias, residual)


# For `_ops`, where torch has to see the op itself.
_ops_by_name = {"linear": _linear_op, "swiglu": _swiglu_op, "mlp": _mlp_op}


def quantized_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    linear_bias: Optional[torch.Tensor] = None,
    residual: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """out[..., N] = x[..., K] * w^T (+ linear_bias [N]) (+ residual). As `qmlp.quantized_linear`."""
    _number(weight)
    return _ops.quantized_linear(x, weight, linear_bias=linear_bias, residual=residual)


def fused_swiglu(
    x: torch.Tensor,
    gate_up: PackedWeight,
    *,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """out[..., intermediate] = silu(x * gate^T) * (x * up^T). As `qmlp.fused_swiglu`."""
    _number(gate_up)
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
    _number(gate_up)
    return _ops.fused_mlp(x, gate_up, down, gate_bias=gate_bias, up_bias=up_bias,
                          down_bias=down_bias, residual=residual)


class QuantizedLinear(torch.nn.Module):
    """A linear layer on a packed weight; holds no parameters. `.to(device)` does not move the weight:
    pack it for the device."""

    def __init__(self, weight: PackedWeight, linear_bias: Optional[torch.Tensor] = None) -> None:
        super().__init__()
        _number(weight)
        self.weight = weight
        self.register_buffer("linear_bias", linear_bias)

    @property
    def number(self) -> int:
        """The custom op's weight: that of `weight` as it is now."""
        return _number(self.weight)

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None) -> torch.Tensor:
        """x [..., K] to [..., N], plus the residual if there is one."""
        if torch.compiler.is_compiling():
            return _linear(x, self.number, self.linear_bias, residual)
        return _ops.quantized_linear(x, self.weight, linear_bias=self.linear_bias, residual=residual)

    def extra_repr(self) -> str:
        return repr(self.weight)


class FusedMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)) on packed weights; holds no parameters. `.to(device)` does not move
    the weights: pack them for the device."""

    def __init__(self, gate_up: PackedWeight, down: PackedWeight) -> None:
        super().__init__()
        _number(gate_up), _number(down)
        self.gate_up = gate_up
        self.down = down

    @property
    def numbers(self) -> tuple[int, int]:
        """The custom op's gate_up and down: those of the weights as they are now."""
        return _number(self.gate_up), _number(self.down)

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None) -> torch.Tensor:
        """x [..., hidden] to [..., N], plus the residual if there is one."""
        if torch.compiler.is_compiling():
            return _mlp(x, *self.numbers, None, None, None, residual)
        return _ops.fused_mlp(x, self.gate_up, self.down, residual=residual)

    def extra_repr(self) -> str:
        return f"{self.gate_up!r}, {self.down!r}"


__all__ = ["FusedMLP", "QuantizedLinear", "fused_mlp", "fused_swiglu", "quantized_linear"]
