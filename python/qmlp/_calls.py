"""The ops on arrays of any library: checked against the weight and each other, then the library's call."""

from __future__ import annotations

from typing import Any

from . import _arrays, _dtypes, _native
from ._weights import PackedWeight, QuantizedTensor, pack
from ._words import kind_of

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
        if backend.freed(x):
            raise ValueError(f"{op}: x's memory was freed, needs {list(x.shape)} elements")
        if self.device != weight._device:
            raise ValueError(f"{op}: x is on {_arrays.device_name(self.device)}, the weight on "
                             f"{weight.device}: need one device")
        self.lead = tuple(int(n) for n in x.shape[:-1])
        self.rows = 1
        for n in self.lead:
            self.rows *= n

    def other(self, array: Any, name: str, shape: tuple[int, ...]) -> Any:
        """Another input, of the same library, type, device, and of this shape."""
        if array is None:
            return None
        array = _arrays.same_library(self.backend, array, name)
        code = self.backend.dtype(array, name)
        if code != self.code:
            raise TypeError(f"{self.op}: {name} is {_dtypes.NAMES[code]}, "
                            f"x is {_dtypes.NAMES[self.code]}: need one type")
        if tuple(array.shape) != shape:
            raise ValueError(f"{self.op}: {name} is {list(array.shape)}, needs {list(shape)}")
        device = self.backend.device(array, name)
        if device != self.device:
            raise ValueError(f"{self.op}: {name} is on {_arrays.device_name(device)}, x on "
                             f"{_arrays.device_name(self.device)}: need one device")
        if self.backend.freed(array):
            raise ValueError(f"{self.op}: {name}'s memory was freed, needs {list(shape)} elements")
        return array

    def output(self, out: Any, name: str, shape: tuple[int, ...]) -> Any:
        if out is None:
            return self.backend.empty(shape, self.code, self.x)
        if self.backend.negated(out):
            raise ValueError(f"{self.op}: {name} has torch's negative bit set, needs a tensor without it")
        array = self.other(out, name, shape)
        if not self.backend.writable(array):
            raise ValueError(f"{self.op}: {name} is read-only, needs to be writable")
        if not self.backend.aligned(array):
            raise ValueError(f"{self.op}: {name} has elements that are not at multiples of their size, "
                             "needs an aligned array")
        self.backend.written(array)
        return array

    def on_cpu(self, function: Any, *handles: Any, sizes: tuple[int, ...] = (),
               inputs: tuple[Any, ...], out: Any, taps: tuple[Any, ...] = ()) -> None:
        """Calls with views; when an input's strides make no matrix, once more with its copy."""
        backend = self.backend

        def view(array: Any) -> Any:
            return backend.native(array if backend.aligned(array) else backend.contiguous(array))

        def call(x: Any, *others: Any) -> None:
            views = [None if array is None else view(array) for array in others]
            function(*handles, self.code, *sizes, view(x), backend.native(out), *views, *taps)

        try:
            call(self.x, *inputs)
        except _native.NeedsCopy:
            try:
                call(backend.contiguous(self.x),
                     *(None if array is None else backend.contiguous(array) for array in inputs))
            except _native.NeedsCopy as error:
                raise self.bad_strides(str(error)) from None

    def bad_strides(self, name: str) -> ValueError:
        return ValueError(f"{self.op}: {name} has strides that make no matrix, needs contiguous rows "
                          "one stride apart")

    def on_cuda(self, function: Any, *handles: Any, N: int, out: Any, biases: tuple[Any, ...],
                matrix: Any = None, written: bool = False, workspace: int) -> None:
        """`matrix`: the residual, or with `written` the gate tap."""
        backend, K = self.backend, int(self.x.shape[-1])
        ordinal = self.device[1]
        x, x_at, x_stride = backend.matrix(self.x, K)
        try:
            _, out_at, out_stride = backend.matrix(out, N, copy=False)
        except _arrays.StridesError:
            raise self.bad_strides("out") from None
        other, other_at, other_stride = None, 0, N
        if matrix is not None:
            try:
                other, other_at, other_stride = backend.matrix(matrix, N, copy=not written)
            except _arrays.StridesError:
                raise self.bad_strides("gate_tap") from None
        held = [None if bias is None else backend.contiguous(bias) for bias in biases]
        scratch = backend.scratch(workspace, self.x) if workspace else None
        function(
            *handles, ordinal, backend.stream(ordinal), self.code, self.rows, N, K, x_at, x_stride,
            out_at, out_stride, *(0 if bias is None else backend.memory(bias)[0] for bias in held),
            other_at, other_stride, 0 if scratch is None else backend.memory(scratch)[0], workspace)
        del x, other, held, scratch  # alive until here: the call has read their addresses


def _start(op: str, backend: Any, array: Any, weight: Weight,
           up: Any = None) -> tuple[_Call, PackedWeight]:
    if isinstance(weight, QuantizedTensor):
        weight = pack(weight, up, activation=_dtypes.NAMES[backend.dtype(array)])
    elif not isinstance(weight, PackedWeight):
        raise TypeError(f"{op}: {WEIGHTS[op]} is {kind_of(weight)}, needs a qmlp.PackedWeight or a "
                        "qmlp.QuantizedTensor")
    if weight.is_swiglu != (op != "quantized_linear"):
        raise ValueError(f"{op}: {WEIGHTS[op]} holds {len(weight.specs)} arrays, needs "
                         f"{1 if op == 'quantized_linear' else 2}")
    return _Call(op, array, weight, backend), weight


# The argument that is a call's first weight.
WEIGHTS = {"quantized_linear": "weight", "fused_swiglu": "gate", "fused_mlp": "gate_up"}


def linear(backend: Any, x: Any, weight: Weight, linear_bias: Any, residual: Any, out: Any) -> Any:
    call, weight = _start("quantized_linear", backend, x, weight)
    shape = (*call.lead, weight.N)
    linear_bias = call.other(linear_bias, "linear_bias", (weight.N,))
    residual = call.other(residual, "residual", shape)
    result = call.output(out, "out", shape)
    if call.device[0] == _arrays.CPU:
        call.on_cpu(_native.quantized_linear, weight._plan, weight._handle,
                    inputs=(linear_bias, residual), out=result)
    else:
        call.on_cuda(_native.cuda_linear, weight._plan, weight._handle, N=weight.N, out=result,
                     biases=(linear_bias,), matrix=residual,
                     workspace=weight._plan.workspace_bytes(call.rows))
    return backend.result(result) if out is None else out


def swiglu(backend: Any, x: Any, gate: Weight, up: Any, gate_bias: Any, up_bias: Any,
           gate_tap: Any, out: Any) -> Any:
    if isinstance(gate, QuantizedTensor) and up is None:
        raise TypeError("fused_swiglu: up is missing, needs a QuantizedTensor beside gate")
    call, weight = _start("fused_swiglu", backend, x, gate, up)
    shape = (*call.lead, weight.N)
    gate_bias = call.other(gate_bias, "gate_bias", (weight.N,))
    up_bias = call.other(up_bias, "up_bias", (weight.N,))
    result = call.output(out, "out", shape)
    tap = None if gate_tap is None else call.output(gate_tap, "gate_tap", shape)
    if call.device[0] == _arrays.CPU:
        call.on_cpu(_native.fused_swiglu, weight._plan, weight._handle, inputs=(gate_bias, up_bias),
                    out=result, taps=(None if tap is None else backend.native(tap),))
    else:
        call.on_cuda(_native.cuda_swiglu, weight._plan, weight._handle, N=weight.N, out=result,
                     biases=(gate_bias, up_bias), matrix=tap, written=True,
                     workspace=weight._plan.workspace_bytes(call.rows))
    return backend.result(result) if out is None else out


def mlp(backend: Any, x: Any, gate_up: PackedWeight, down: PackedWeight, gate_bias: Any,
        up_bias: Any, down_bias: Any, residual: Any, out: Any) -> Any:
    call, gate_up = _start("fused_mlp", backend, x, gate_up)
    if not isinstance(down, PackedWeight):
        raise TypeError(f"fused_mlp: down is {kind_of(down)}, needs a qmlp.PackedWeight: qmlp.pack(down)")
    if down.is_swiglu:
        raise ValueError(f"fused_mlp: down holds {len(down.specs)} arrays, needs 1")
    if down.activation != gate_up.activation:
        raise TypeError(f"fused_mlp: down is packed for {down.activation}, gate and up for "
                        f"{gate_up.activation}: need one type")
    if down.K != gate_up.N:
        raise ValueError(f"fused_mlp: down takes {down.K} features, gate and up give {gate_up.N}")
    if down._device != gate_up._device:
        raise ValueError(f"fused_mlp: down is on {down.device}, gate and up on {gate_up.device}: need "
                         "one device")
    shape = (*call.lead, down.N)
    biases = (call.other(gate_bias, "gate_bias", (gate_up.N,)),
              call.other(up_bias, "up_bias", (gate_up.N,)),
              call.other(down_bias, "down_bias", (down.N,)))
    residual = call.other(residual, "residual", shape)
    result = call.output(out, "out", shape)
    handles = (gate_up._plan, gate_up._handle, down._plan, down._handle)
    if call.device[0] == _arrays.CPU:
        call.on_cpu(_native.fused_mlp, *handles, sizes=(gate_up.N,), inputs=(*biases, residual),
                    out=result)
    else:
        call.on_cuda(_native.cuda_mlp, *handles, N=down.N, out=result, biases=biases,
                     matrix=residual,
                     workspace=_native.mlp_workspace_bytes(gate_up._plan, down._plan, call.rows))
    return backend.result(result) if out is None else out
