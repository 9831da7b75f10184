"""The ops as torch custom ops, with their gradients: what torch.compile, autograd and torch.func see."""

# No `from __future__ import annotations`: torch reads the signatures of custom ops.
from typing import Any, Optional

import torch

from . import _arrays, _calls, _torch_calls
from ._weights import PackedWeight, _by_number
from ._words import kind_of

_backend = _arrays.torch_backend()

_BLOCK = 1024


def number_of(weight: PackedWeight, name: str = "weight") -> int:
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"{name} is {kind_of(weight)}, needs a qmlp.PackedWeight: qmlp.pack")
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
def linear(
    x: torch.Tensor,
    weight: int,
    linear_bias: Optional[torch.Tensor],
    residual: Optional[torch.Tensor],
) -> torch.Tensor:
    _refuse_tangents("quantized_linear", x, linear_bias, residual)
    packed = _weight(weight)
    result = _torch_calls.linear(x, packed, linear_bias, residual, None)
    if result is None:
        result = _calls.linear(_backend, x, packed, linear_bias, residual, None)
    return result


@linear.register_fake
def _(x, weight, linear_bias, residual):
    packed = _weight(weight)
    return _shape("quantized_linear", x, packed, packed)


@torch.library.custom_op(
    "qmlp::fused_swiglu", mutates_args=(),
    schema="(Tensor x, int weight, Tensor? gate_bias, Tensor? up_bias) -> Tensor")
def swiglu(
    x: torch.Tensor,
    weight: int,
    gate_bias: Optional[torch.Tensor],
    up_bias: Optional[torch.Tensor],
) -> torch.Tensor:
    _refuse_tangents("fused_swiglu", x, gate_bias, up_bias)
    packed = _weight(weight)
    result = _torch_calls.swiglu(x, packed, gate_bias, up_bias, None, None)
    if result is None:
        result = _calls.swiglu(_backend, x, packed, None, gate_bias, up_bias, None, None)
    return result


@swiglu.register_fake
def _(x, weight, gate_bias, up_bias):
    packed = _weight(weight)
    return _shape("fused_swiglu", x, packed, packed)


@torch.library.custom_op(
    "qmlp::fused_mlp", mutates_args=(),
    schema="(Tensor x, int gate_up, int down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, "
           "Tensor? residual) -> Tensor")
def mlp(
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
        result = _calls.mlp(_backend, x, first, last, gate_bias, up_bias, down_bias, residual, None)
    return result


@mlp.register_fake
def _(x, gate_up, down, gate_bias, up_bias, down_bias, residual):
    return _shape("fused_mlp", x, _weight(gate_up), _weight(down))


# Gradients. The decoded weight is the op's own answer to the unit matrix, so that no other way to
# decode is needed and a graph can hold the backward pass.


def _times_weight(grad: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """grad[..., N] times the decoded weight [N, K]."""
    number = number_of(weight)
    flat = grad.reshape(-1, weight.N)
    columns = []
    for begin in range(0, weight.K, _BLOCK):
        rows = torch.arange(begin, min(begin + _BLOCK, weight.K), device=grad.device)
        unit = (rows[:, None] == torch.arange(weight.K, device=grad.device)).to(grad.dtype)
        columns.append(flat @ linear(unit, number, None, None).T)
    return torch.cat(columns, -1).reshape(*grad.shape[:-1], weight.K)


def _bias_grad(grad: torch.Tensor, N: int) -> torch.Tensor:
    return grad.reshape(-1, N).sum(0)


def _swiglu_grads(ctx: Any, grad: torch.Tensor, weight: PackedWeight) -> tuple:
    """Of x, gate_bias and up_bias; None where not asked for."""
    x, gate_bias, up_bias = ctx.saved_tensors
    halves = [weight._half(i) for i in range(2)]
    gate = _run_linear(x, number_of(halves[0]), gate_bias, None).float()
    up = _run_linear(x, number_of(halves[1]), up_bias, None).float()
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


linear.register_autograd(_linear_backward, setup_context=_linear_setup)
swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_setup)
mlp.register_autograd(_mlp_backward, setup_context=_mlp_setup)


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


_run_linear = _chosen(linear, _function("quantized_linear", linear, _linear_setup, _linear_backward))
_run_swiglu = _chosen(swiglu, _function("fused_swiglu", swiglu, _swiglu_setup, _swiglu_backward))
_run_mlp = _chosen(mlp, _function("fused_mlp", mlp, _mlp_setup, _mlp_backward))


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


_register_vmap(linear, (0, 3))
_register_vmap(swiglu, (0,))
_register_vmap(mlp, (0, 6))


def _refuse_outputs(op: str, *outputs: Any) -> None:
    if any(output is not None for output in outputs):
        raise ValueError(f"{op}: out and gate_tap cannot be given where torch traces the call, needs a "
                         "new result")


def _linear_op(x, weight, linear_bias, residual, out=None):
    _refuse_outputs("quantized_linear", out)
    return _run_linear(x, number_of(weight), linear_bias, residual)


def _swiglu_op(x, weight, gate_bias, up_bias, gate_tap=None, out=None):
    _refuse_outputs("fused_swiglu", gate_tap, out)
    return _run_swiglu(x, number_of(weight, "gate"), gate_bias, up_bias)


def _mlp_op(x, gate_up, down, gate_bias, up_bias, down_bias, residual, out=None):
    _refuse_outputs("fused_mlp", out)
    return _run_mlp(x, number_of(gate_up, "gate_up"), number_of(down, "down"), gate_bias, up_bias,
                    down_bias, residual)


# Where torch has to see the op itself.
ops_by_name = {"linear": _linear_op, "swiglu": _swiglu_op, "mlp": _mlp_op}
