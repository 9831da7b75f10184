"""The three ops on arrays of the caller's library."""

from __future__ import annotations

from typing import Any

from . import _arrays, _calls, _torch_calls
from ._calls import Weight
from ._weights import PackedWeight, QuantizedTensor
from ._words import kind_of

# The arrays of a call, in the order in which `_traced` gets them.
_NAMES = {
    "quantized_linear": ("x", "linear_bias", "residual", "out"),
    "fused_swiglu": ("x", "gate_bias", "up_bias", "out", "gate_tap"),
    "fused_mlp": ("x", "gate_bias", "up_bias", "down_bias", "residual", "out"),
}


def _traced(op: str, backend: Any, weight: Any, arrays: tuple[Any, ...], *writes: Any) -> bool:
    """Whether torch has to see the call as an op of its own (`TorchBackend.traced`)."""
    if not backend.traced(*arrays, *writes):
        return False
    for name, array in zip(_NAMES[op], (*arrays, *writes), strict=True):
        if array is not None and not isinstance(array, backend.torch.Tensor):
            raise TypeError(f"{op}: {name} is {kind_of(array)}, x is of torch: give one library's")
    if backend.tangent(*arrays, *writes):
        raise NotImplementedError(_arrays.no_forward_mode(op))
    if not isinstance(weight, PackedWeight):
        raise TypeError(f"{op}: {_calls.WEIGHTS[op]} is {kind_of(weight)}, needs a qmlp.PackedWeight "
                        "where torch traces the call or wants a gradient")
    if any(array is not None for array in writes):
        raise ValueError(f"{op}: out and gate_tap cannot be given where torch traces the call or wants "
                         "a gradient, needs a new result")
    return True


def _custom_op(name: str) -> Any:
    """The function that calls a custom op of torch's, which is made when one is first needed."""
    from . import _torch_ops

    return _torch_ops.ops_by_name[name]


def quantized_linear(
    x: Any, weight: Weight, *, linear_bias: Any = None, residual: Any = None, out: Any = None
) -> Any:
    """out[..., N] = x[..., K] * w^T (+ linear_bias [N]) (+ residual [..., N]), each rounded as
    docs/numerics.md section 4 says.

    x: f32, f16 or bf16, the weight's activation type, on the weight's device; any rank from 1. Read in
    place when its rows are contiguous, aligned and one stride apart, copied otherwise. weight: from
    `qmlp.pack`; a QuantizedTensor is packed for this call alone, which costs far more than the call.
    out: an array to write into; may be `residual` itself, may not overlap x.

    Returns an array of x's library (or `out`). On a CUDA device the call is asynchronous on the
    library's current stream and may be captured in a graph; weight and arrays must live until it has
    run, as for any op of that library. A row's bits depend on that row and the weight alone, not on
    other rows, threads or the machine. Runs without the GIL. Differentiable for torch (qmlp.torch).
    Raises ValueError for shapes and devices, TypeError for types.
    """
    if _torch_calls.compiling():
        return _custom_op("linear")(x, weight, linear_bias, residual, out)
    if type(x) is _torch_calls.Tensor:
        result = _torch_calls.linear(x, weight, linear_bias, residual, out)
        if result is not None:
            return result
    backend, array = _arrays.resolve(x)
    if _traced("quantized_linear", backend, weight, (array, linear_bias, residual), out):
        return _custom_op("linear")(array, weight, linear_bias, residual)
    return _calls.linear(backend, array, weight, linear_bias, residual, out)


def fused_swiglu(
    x: Any, gate: Weight, up: QuantizedTensor | None = None, *, gate_bias: Any = None,
    up_bias: Any = None, gate_tap: Any = None, out: Any = None
) -> Any:
    """out[..., intermediate] = silu(x * gate^T) * (x * up^T) in one call.

    gate: `qmlp.pack(gate, up)`; or gate and up as two QuantizedTensors, packed for this call alone.
    gate_bias, up_bias: linear biases [intermediate]. gate_tap: receives the gate projection.
    gate_tap may not overlap another argument. The result has the bits of the separate calls, unless gate
    and up were packed with precision="wide", which rounds once. Otherwise as `quantized_linear`.
    """
    if up is not None and not isinstance(gate, QuantizedTensor):
        raise TypeError(f"fused_swiglu: up is {kind_of(up)} beside a gate that is {kind_of(gate)}, needs two "
                        "QuantizedTensors or one PackedWeight")
    if _torch_calls.compiling():
        return _custom_op("swiglu")(x, gate, gate_bias, up_bias, gate_tap, out)
    if type(x) is _torch_calls.Tensor:
        result = _torch_calls.swiglu(x, gate, gate_bias, up_bias, gate_tap, out)
        if result is not None:
            return result
    backend, array = _arrays.resolve(x)
    if _traced("fused_swiglu", backend, gate, (array, gate_bias, up_bias), out, gate_tap):
        return _custom_op("swiglu")(array, gate, gate_bias, up_bias)
    return _calls.swiglu(backend, array, gate, up, gate_bias, up_bias, gate_tap, out)


def fused_mlp(
    x: Any, gate_up: PackedWeight, down: PackedWeight, *, gate_bias: Any = None,
    up_bias: Any = None, down_bias: Any = None, residual: Any = None, out: Any = None
) -> Any:
    """out[..., N] = (silu(x * gate^T) * (x * up^T)) * down^T (+ down_bias) (+ residual).

    gate_up: `qmlp.pack(gate, up)`; down: `qmlp.pack(down)`, for the same activation type. The result
    has the bits of `fused_swiglu` and `quantized_linear` in turn. out may overlap x, which has been read
    when it is written. Otherwise as `quantized_linear`.
    """
    if _torch_calls.compiling():
        return _custom_op("mlp")(
            x, gate_up, down, gate_bias, up_bias, down_bias, residual, out)
    if type(x) is _torch_calls.Tensor:
        result = _torch_calls.mlp(x, gate_up, down, gate_bias, up_bias, down_bias, residual, out)
        if result is not None:
            return result
    backend, array = _arrays.resolve(x)
    arrays = (array, gate_bias, up_bias, down_bias, residual)
    if _traced("fused_mlp", backend, gate_up, arrays, out):
        return _custom_op("mlp")(array, gate_up, down, gate_bias, up_bias, down_bias, residual)
    return _calls.mlp(backend, array, gate_up, down, gate_bias, up_bias, down_bias, residual, out)
