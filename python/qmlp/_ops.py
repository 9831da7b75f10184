"""The three ops on arrays of the caller's library."""

from __future__ import annotations

from typing import Any

from . import _arrays, _dtypes, _native
from ._weights import PackedWeight, QuantizedTensor, pack

Weight = PackedWeight | QuantizedTensor


class _Call:
    """The arrays of one call, checked against its weight and each other."""

    def __init__(self, op: str, x: Any, weight: PackedWeight, backend: Any) -> None:
        self.op = op
        self.backend = backend
        self.x = x
        self.code = backend.dtype(x)
        if self.code != weight._code:
            raise TypeError(f"{op}: x is {_dtypes.NAMES[self.code]}, the weight is packed for "
                            f"{weight.activation}")
        if x.ndim == 0 or x.shape[-1] != weight.K:
            raise ValueError(f"{op}: x is {list(x.shape)}, needs [..., {weight.K}]")
        self.device = backend.device(x)
        if self.device[:2] != weight._device:
            raise ValueError(f"{op}: x and the weight are on two devices, need one")
        self.lead = tuple(int(n) for n in x.shape[:-1])
        self.rows = 1
        for n in self.lead:
            self.rows *= n

    def other(self, array: Any, name: str, shape: tuple[int, ...]) -> Any:
        """Another input, of the same library, type, device, and of this shape."""
        if array is None:
            return None
        array = _arrays.same_library(self.backend, array, name)
        if self.backend.dtype(array) != self.code:
            raise TypeError(f"{self.op}: {name} is {_dtypes.NAMES[self.backend.dtype(array)]}, "
                            f"x is {_dtypes.NAMES[self.code]}: need one type")
        if tuple(array.shape) != shape:
            raise ValueError(f"{self.op}: {name} is {list(array.shape)}, needs {list(shape)}")
        if self.backend.device(array)[:2] != self.device[:2]:
            raise ValueError(f"{self.op}: {name} and x are on two devices, need one")
        return array

    def output(self, out: Any, shape: tuple[int, ...]) -> Any:
        if out is None:
            return self.backend.empty(shape, self.code, self.x)
        array = self.other(out, "out", shape)
        if not self.backend.writable(array):
            raise ValueError(f"{self.op}: out is read-only, needs to be writable")
        return array

    def run(self, function: Any, *before: Any, inputs: tuple[Any, ...], out: Any,
            after: tuple[Any, ...] = (), workspace: int = 0) -> None:
        """Calls with views; when an input's strides make no matrix, once more with its copy."""
        backend = self.backend
        scratch = backend.workspace(workspace, self.x)

        def call(x: Any, *others: Any) -> None:
            views = [None if array is None else backend.native(array) for array in others]
            function(*before, backend.native(x), backend.native(out), *views, *after, scratch)

        try:
            call(self.x, *inputs)
        except _native.NeedsCopy:
            try:
                call(backend.contiguous(self.x),
                     *(None if array is None else backend.contiguous(array) for array in inputs))
            except _native.NeedsCopy:
                raise ValueError(f"{self.op}: out has strides that make no matrix, needs "
                                 "contiguous rows one stride apart") from None


def _start(op: str, x: Any, weight: Weight, up: Any = None) -> tuple[_Call, PackedWeight, Any]:
    backend, array = _arrays.resolve(x)
    if isinstance(weight, QuantizedTensor):
        weight = pack(weight, up, activation=_dtypes.NAMES[backend.dtype(array)])
    elif not isinstance(weight, PackedWeight):
        raise TypeError(f"{op}: weight is a {type(weight).__name__}, needs a PackedWeight or a "
                        "QuantizedTensor")
    if weight.is_swiglu != (op != "quantized_linear"):
        raise ValueError(f"{op}: weight holds {len(weight.specs)} arrays, needs "
                         f"{1 if op == 'quantized_linear' else 2}")
    return _Call(op, array, weight, backend), weight, backend


def quantized_linear(
    x: Any, weight: Weight, *, linear_bias: Any = None, residual: Any = None, out: Any = None
) -> Any:
    """out[..., N] = x[..., K] * w^T (+ linear_bias [N]) (+ residual [..., N]), each rounded as
    docs/numerics.md section 4 says.

    x: f32, f16 or bf16, the weight's activation type; any rank from 1. Read in place when its rows
    are contiguous and one stride apart, copied otherwise. weight: from `qmlp.pack`; a
    QuantizedTensor is packed for this call alone, which costs far more than the call.
    out: an array to write into; may be `residual` itself, may not overlap x.

    Returns an array of x's library (or `out`). A row's bits depend on that row and the weight alone,
    not on other rows, threads or the machine. Runs without the GIL. Not differentiable. Raises
    ValueError for shapes, TypeError for types.
    """
    call, weight, backend = _start("quantized_linear", x, weight)
    shape = (*call.lead, weight.N)
    result = call.output(out, shape)
    call.run(
        _native.quantized_linear, weight.plan._handle, weight._handle, call.device, call.code,
        inputs=(call.other(linear_bias, "linear_bias", (weight.N,)),
                call.other(residual, "residual", shape)),
        out=result, workspace=_workspace(call, weight.plan))
    return backend.result(result) if out is None else out


def fused_swiglu(
    x: Any, gate: Weight, up: QuantizedTensor | None = None, *, gate_bias: Any = None,
    up_bias: Any = None, gate_tap: Any = None, out: Any = None
) -> Any:
    """out[..., intermediate] = silu(x * gate^T) * (x * up^T) in one call.

    gate: `qmlp.pack(gate, up)`; or gate and up as two QuantizedTensors, packed for this call alone.
    gate_bias, up_bias: linear biases [intermediate]. gate_tap: receives the gate projection.
    The result has the bits of the separate calls. Otherwise as `quantized_linear`.
    """
    if isinstance(gate, QuantizedTensor) and up is None:
        raise TypeError("fused_swiglu: up is missing, needs a QuantizedTensor beside gate")
    call, weight, backend = _start("fused_swiglu", x, gate, up)
    shape = (*call.lead, weight.N)
    result = call.output(out, shape)
    tap = None if gate_tap is None else call.output(gate_tap, shape)
    call.run(
        _native.fused_swiglu, weight.plan._handle, weight._handle, call.device, call.code,
        inputs=(call.other(gate_bias, "gate_bias", (weight.N,)),
                call.other(up_bias, "up_bias", (weight.N,))),
        out=result, after=(None if tap is None else backend.native(tap),),
        workspace=_workspace(call, weight.plan))
    return backend.result(result) if out is None else out


def fused_mlp(
    x: Any, gate_up: PackedWeight, down: PackedWeight, *, gate_bias: Any = None,
    up_bias: Any = None, down_bias: Any = None, residual: Any = None, out: Any = None
) -> Any:
    """out[..., N] = (silu(x * gate^T) * (x * up^T)) * down^T (+ down_bias) (+ residual).

    gate_up: `qmlp.pack(gate, up)`; down: `qmlp.pack(down)`, for the same activation type. The result
    has the bits of `fused_swiglu` and `quantized_linear` in turn. Otherwise as `quantized_linear`.
    """
    call, gate_up, backend = _start("fused_mlp", x, gate_up)
    if not isinstance(down, PackedWeight) or down.is_swiglu:
        raise TypeError("fused_mlp: down is not a packed linear weight: needs qmlp.pack(down)")
    if down.K != gate_up.N or down.activation != gate_up.activation:
        raise ValueError(f"fused_mlp: down takes {down.K} {down.activation} features, gate and up give "
                         f"{gate_up.N} {gate_up.activation}")
    shape = (*call.lead, down.N)
    result = call.output(out, shape)
    workspace = 0 if call.device[0] == _arrays.CPU else _native.mlp_workspace_bytes(
        gate_up.plan._handle, down.plan._handle, call.rows)
    call.run(
        _native.fused_mlp, gate_up.plan._handle, gate_up._handle, down.plan._handle, down._handle,
        call.device, call.code, gate_up.N,
        inputs=(call.other(gate_bias, "gate_bias", (gate_up.N,)),
                call.other(up_bias, "up_bias", (gate_up.N,)),
                call.other(down_bias, "down_bias", (down.N,)),
                call.other(residual, "residual", shape)),
        out=result, workspace=workspace)
    return backend.result(result) if out is None else out


def _workspace(call: _Call, plan: Any) -> int:
    """Bytes of device scratch; the extension module brings its own on a CPU."""
    return 0 if call.device[0] == _arrays.CPU else plan.workspace_bytes(call.rows)
