"""Quantized weights as files hold them, and packed for the kernels."""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from typing import Any, Iterator

import numpy

from . import _arrays, _dtypes, _native
from ._arrays import CPU, CUDA
from ._errors import OutOfMemoryError, UnsupportedError
from ._plans import (
    _PRECISIONS, Frozen, LinearProblem, Plan, QuantSpec, SwigluProblem, _choice, _spec_tuple, _whole)
from ._words import kind_of, shown

# Plans of packed weights take calls of any length; workspaces follow the call, not this.
_ANY_M = 1 << 31

# Packed weights by the number under which torch's graphs know them.
_numbers = itertools.count(1)
_by_number: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight [N, K] in MLX's affine format: w = scale * code + bias for each group along K.

    codes: uint32 (or int32) words [..., N, K * bits / 32]; scales and biases: [..., N, K / group_size] of f32,
    f16 or bf16. They may come from a checkpoint, `qmlp.quantize` or `mx.quantize`, and from NumPy,
    torch, CuPy, or anything with DLPack or the buffer protocol (a memoryview of as many axes), all three
    on one device.

    Unpacks as `codes, scales, biases = tensor`. Raises ValueError when shapes contradict each other
    or the format.
    """

    codes: Any
    scales: Any
    biases: Any
    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if _whole("bits", self.bits) not in (2, 3, 4, 5, 6, 8):
            raise ValueError(f"bits is {self.bits}, needs 2, 3, 4, 5, 6 or 8")
        if _whole("group_size", self.group_size) not in (32, 64, 128):
            raise ValueError(f"group_size is {self.group_size}, needs 32, 64 or 128")
        codes, scales, biases = (_shape_of(name, getattr(self, name))
                                 for name in ("codes", "scales", "biases"))
        if len(codes) < 2 or len(scales) < 2 or codes[:-1] != scales[:-1] or scales != biases:
            raise ValueError(
                f"codes are {list(codes)}, scales {list(scales)}, biases {list(biases)}: need "
                "[..., N, K * bits / 32] and twice [..., N, K / group_size]"
            )
        words = scales[-1] * self.group_size * self.bits // 32
        if codes[-1] != words:
            raise ValueError(
                f"codes have {codes[-1]} words a row; {scales[-1]} groups of {self.group_size} at "
                f"{self.bits} bits need {words}"
            )

    @property
    def N(self) -> int:
        """Output features."""
        return int(self.codes.shape[-2])

    @property
    def K(self) -> int:
        """Input features."""
        return int(self.scales.shape[-1]) * self.group_size

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., N, K]."""
        return (*(int(n) for n in self.codes.shape[:-1]), self.K)

    @property
    def spec(self) -> QuantSpec:
        """bits, group_size and the type of the scales."""
        backend, scales = _arrays.resolve(self.scales, "scales")
        return QuantSpec(self.bits, self.group_size, _dtypes.NAMES[backend.dtype(scales, "scales")])

    def __iter__(self) -> Iterator[Any]:
        return iter((self.codes, self.scales, self.biases))


def _shape_of(name: str, array: Any) -> tuple[int, ...]:
    try:
        return tuple(array.shape)
    except (AttributeError, TypeError):
        pass
    try:
        return memoryview(array).shape
    except TypeError:
        raise TypeError(f"{name}: {kind_of(array)}, needs an array") from None


def quantize(
    w: Any, *, bits: int = 4, group_size: int = 64, scale_dtype: Any = None
) -> QuantizedTensor:
    """Quantizes weights as MLX's CPU `quantize` does, bit for bit.

    w: [..., N, K] of f32, f16 or bf16. K a multiple of group_size. The arithmetic is in f32 whatever
    w's type; scales and biases are rounded to scale_dtype, by default w's own. The work is done on the
    CPU: weights on a GPU are copied there and the result back, which waits for the device.

    Returns a QuantizedTensor of arrays of w's library, on w's device. Raises ValueError for a format or a
    K outside the format, no rows, and a group with a NaN, an infinity or a span that f32 does not hold;
    TypeError for other types.
    """
    bits, group_size = _whole("bits", bits), _whole("group_size", group_size)
    backend, array = _arrays.resolve(w, "w")
    if array.ndim < 2:
        raise ValueError(f"w is {list(array.shape)}, needs [..., N, K]")
    dtype = backend.dtype(array, "w")
    scale_code = dtype if scale_dtype is None else _dtypes.code_of(scale_dtype, "scale_dtype")
    *lead, K = (int(n) for n in array.shape)
    N = math.prod(lead)
    spec = QuantSpec(bits, group_size, _dtypes.NAMES[scale_code])
    _native.quant_sizes(N, K, _spec_tuple(spec))
    if spec.is_dense:
        raise ValueError("group_size is 0, needs 32, 64 or 128")
    backend.device(array, "w")  # refuses devices that are neither
    _refuse_freed(backend, array, "w")
    codes = backend.host_words((*lead, K * bits // 32))
    scales = backend.host_empty((*lead, K // group_size), scale_code)
    biases = backend.host_empty((*lead, K // group_size), scale_code)
    _native.quantize(
        backend.to_f32(array).reshape(N, K), N, K, _spec_tuple(spec),
        backend.native(codes), backend.native(scales), backend.native(biases),
    )
    made = (backend.result(backend.from_host(part, array)) for part in (codes, scales, biases))
    return QuantizedTensor(*made, bits, group_size)


def dequantize(weight: QuantizedTensor, *, dtype: Any = None) -> Any:
    """The weight [..., N, K]: scale * code + bias, exact, rounded once to dtype.

    dtype: f32, f16 or bf16; by default the type of the scales. Returns an array of the library and on
    the device of weight.codes; the work is done on the CPU, as by `quantize`. Raises ValueError when
    the parts contradict each other.
    """
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"weight is {kind_of(weight)}, needs a qmlp.QuantizedTensor")
    backend, codes = _arrays.resolve(weight.codes, "codes")
    spec = weight.spec
    code = _dtypes.code_of(spec.scale_dtype if dtype is None else dtype)
    N, K = math.prod(weight.shape[:-1]), weight.K
    out = numpy.empty((N, K), numpy.float32)
    if N and K:
        words, scales, biases = map(backend.on_host, _parts(backend, weight))
        _native.dequantize(words, scales, biases, N, K, _spec_tuple(spec), code, out)
    return backend.result(backend.from_f32(out.reshape(weight.shape), code, codes))


def _parts(backend: Any, weight: QuantizedTensor) -> tuple[Any, ...]:
    """codes, scales and biases: contiguous, of checked types, on one device."""
    codes = backend.codes(_arrays.same_library(backend, weight.codes, "codes"))
    parts = [codes]
    kinds = set()
    for name in ("scales", "biases"):
        part = _arrays.same_library(backend, getattr(weight, name), name)
        kinds.add(backend.dtype(part, name))
        parts.append(part)
    if len(kinds) != 1:
        raise TypeError("scales and biases have two types, need one")
    places = {_arrays.device_name(backend.device(part, name))
              for name, part in zip(("codes", "scales", "biases"), parts)}
    if len(places) != 1:
        raise ValueError(f"codes, scales and biases are on {' and '.join(sorted(places))}, need one "
                         "device")
    for name, part in zip(("codes", "scales", "biases"), parts):
        _refuse_freed(backend, part, name)
    return tuple(backend.contiguous(part) for part in parts)


def _refuse_freed(backend: Any, array: Any, name: str) -> None:
    if backend.freed(array):
        raise ValueError(f"{name}: its memory was freed, needs {list(array.shape)} elements")


class PackedWeight(Frozen):
    """Weights re-laid for the kernels, with the plan that runs them. Made by `qmlp.pack`.

    Immutable; may be used from several threads at once; copy.copy and copy.deepcopy give the weight
    itself, and it cannot be pickled. One array (a linear layer) or two (gate and
    up of a SwiGLU). On a CUDA device its memory is the library's own, outside the pools of torch and
    CuPy; freeing it waits for the device.
    """

    __slots__ = ("plan", "N", "K", "specs", "activation", "is_swiglu", "_handle", "_code", "_device",
                 "_ordinal", "_plan", "_number", "_halves", "__weakref__")

    plan: Plan
    N: int
    K: int
    specs: tuple[QuantSpec, ...]
    activation: str
    is_swiglu: bool
    """Holds gate and up."""

    def __init__(self, plan: Plan, handle: Any, N: int, K: int, specs: tuple[QuantSpec, ...],
                 device: tuple[int, int]) -> None:
        self._set(plan=plan, N=N, K=K, specs=specs, activation=plan.problem.activation,
                  is_swiglu=len(specs) == 2)
        self._handle = handle
        self._code = _dtypes.code_of(self.activation)
        self._device = device
        self._ordinal = device[1] if device[0] == CUDA else None
        self._plan = plan._handle
        self._number = next(_numbers)
        self._halves: dict[int, PackedWeight] = {}
        _by_number[self._number] = self

    @property
    def device(self) -> str:
        """"cpu" or "cuda:N"."""
        return _arrays.device_name(self._device)

    @property
    def nbytes(self) -> int:
        """Bytes that the packed form owns."""
        return self._handle.nbytes()

    @property
    def non_finite(self) -> bool:
        """Some decoded weight is infinite or NaN."""
        return self._handle.non_finite()

    def part(self, index: int) -> PackedWeight:
        """The gate (0) or up (1) half as a linear weight, which shares the memory on a CPU and is a copy
        on a CUDA device, where gate and up are interleaved."""
        half = self._handle.part(_whole("index", index))
        problem = self.plan.problem
        if not isinstance(problem, SwigluProblem):
            return self
        linear = LinearProblem(
            N=self.N, K=self.K, weight=self.specs[index], activation=problem.activation,
            M_max=problem.M_max, accumulation=problem.accumulation, segments=problem.segments,
        )
        plan = Plan(linear, device=self.plan.device, force_isa=self.plan.force_isa)
        return PackedWeight(plan, half, self.N, self.K, (self.specs[index],), self._device)

    def decode_row(self, row: int) -> numpy.ndarray:
        """Row `row` [K], decoded and rounded to the activation type, as a NumPy array."""
        backend = _arrays.NumpyBackend()
        out = backend.empty((1, self.K), self._code, None)
        self._handle.decode_row(_whole("row", row, 63), backend.native(out), self._code)
        return out[0]

    def unpack(self, index: int = 0, *, like: Any = None) -> QuantizedTensor:
        """The gate (0) or up (1), or the linear weight (0), as the source held it, bit for bit.

        Returns NumPy arrays, or arrays of like's library on its device. Waits for the device. Raises
        UnsupportedError for a weight whose codes were not kept: a dense one; on a CPU one with groups
        that the fast decoding would not round exactly, which takes 16-bit activations and scales of a
        type with more or smaller values (f32 or bf16 for f16) or near the ends of their range; on a CUDA
        device one with scales of another type than the activation's, or bf16 scales of too wide a range.
        """
        if not 0 <= _whole("index", index) < len(self.specs):
            raise ValueError(f"index is {index}, the weight has {len(self.specs)} parts")
        spec = self.specs[index]
        if spec.is_dense:
            raise UnsupportedError("unpack: the weight is dense, it has no codes")
        backend, like = _arrays.resolve(numpy.empty(0) if like is None else like, "like")
        code = _dtypes.code_of(spec.scale_dtype)
        codes = backend.empty_words((self.N, self.K * spec.bits // 32), like)
        scales, biases = (backend.empty((self.N, self.K // spec.group_size), code, like)
                          for _ in range(2))
        device = backend.device(codes)
        if device[0] == CUDA:
            backend.synchronize(device[1])  # the pools' memory may still be in use on the stream
        _native.unpack_rows(self._handle, index, 0, self.N,
                            *(backend.memory(part)[0] for part in (codes, scales, biases)))
        return QuantizedTensor(*map(backend.result, (codes, scales, biases)), spec.bits,
                               spec.group_size)

    def _half(self, index: int) -> PackedWeight:
        """`part`, the same object for every thread, as long as this weight lives: for gradients."""
        return self._halves.get(index) or self._halves.setdefault(index, self.part(index))

    def __copy__(self) -> PackedWeight:
        return self

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a PackedWeight cannot be pickled: its form is this machine's; save the "
                        "QuantizedTensor (PackedWeight.unpack) and pack it again")

    def __repr__(self) -> str:
        formats = " and ".join(str(spec) for spec in self.specs)
        return (f"qmlp.PackedWeight([{self.N}, {self.K}], {formats}, {self.activation}, "
                f"{self.device})")


def pack(
    weight: Any,
    up: Any = None,
    *,
    device: Any = None,
    activation: Any = None,
    precision: str = "match",
    accumulation: str | None = None,
    segments: int = 0,
    force_kernel: str | None = None,
    force_isa: str | None = None,
) -> PackedWeight:
    """Re-lays a weight for the kernels, once; the arrays may be freed afterwards.

    weight: a QuantizedTensor [N, K], or a float array [N, K] (kept dense).
    up: the second weight of a SwiGLU; `weight` is then its gate, and both are [intermediate, hidden].
    device: "cpu", "cuda:N", "cuda" (which is cuda:0) or a torch.device; by default where the arrays
    are. Arrays on the CPU can be packed for either, arrays on a CUDA device for that device; those never
    pass through the CPU.
    activation: type of x and of the results, "f32", "f16" or "bf16"; by default the type of the
    scales. precision: of a SwiGLU. The other arguments are those of LinearProblem, SwigluProblem and
    Plan.

    Returns a PackedWeight; waits for the device. Raises UnsupportedError when no kernel takes the
    problem, ValueError or TypeError for contradicting shapes and types, DeviceError for a device that
    is not there.
    """
    _choice("precision", precision, _PRECISIONS)
    if up is None and precision != "match":
        raise ValueError(f"precision is {shown(precision)}, which a SwiGLU has: needs 'match' for one weight")
    first = _Source(weight, "weight" if up is None else "gate")
    sources = [first] if up is None else [first, _Source(up, "up")]
    second = sources[-1]
    if second.shape != first.shape:
        raise ValueError(f"gate is {list(first.shape)}, up is {list(second.shape)}: need one shape")
    if second.device != first.device:
        raise ValueError(f"gate is on {_arrays.device_name(first.device)}, up on "
                         f"{_arrays.device_name(second.device)}: need one device")
    where = first.device if device is None else _device_of(device)
    if where != first.device and first.device[0] != CPU:
        raise ValueError(f"weight is on {_arrays.device_name(first.device)}, packing it for {device} "
                         "needs it there or on the cpu")
    code = _dtypes.code_of(first.spec.scale_dtype if activation is None else activation, "activation")
    common: dict[str, Any] = {
        "activation": _dtypes.NAMES[code], "M_max": _ANY_M, "accumulation": accumulation,
        "segments": segments}
    N, K = first.shape
    problem: LinearProblem | SwigluProblem
    if up is None:
        problem = LinearProblem(N=N, K=K, weight=first.spec, **common)
    else:
        problem = SwigluProblem(hidden=K, intermediate=N, gate=first.spec, up=second.spec,
                                precision=precision, **common)
    plan = Plan(problem, device=_arrays.device_name(where), force_kernel=force_kernel,
                force_isa=force_isa)
    stream = first.wait() if first.device[0] == CUDA else 0
    if up is not None and second.device[0] == CUDA:
        second.wait()

    def run() -> Any:
        place = (*where, stream)
        if up is None:
            return _native.pack_linear(plan._handle, place, first.memory(), N, K,
                                       _spec_tuple(first.spec))
        return _native.pack_swiglu(plan._handle, place, first.memory(), _spec_tuple(first.spec),
                                   second.memory(), _spec_tuple(second.spec), N, K)

    try:
        handle = run()
    except OutOfMemoryError:
        # The pools of torch and CuPy may hold what the device lacks.
        if where[0] == CPU or not _arrays.release_caches():
            raise
        handle = run()
    return PackedWeight(plan, handle, N, K, tuple(source.spec for source in sources), where)


class _Source:
    """One array to pack: its format, its parts, where they are."""

    def __init__(self, weight: Any, name: str) -> None:
        if isinstance(weight, QuantizedTensor):
            if len(weight.shape) != 2:
                raise ValueError(f"{name} is {list(weight.shape)}, needs [N, K]")
            self.backend, _ = _arrays.resolve(weight.codes, f"{name}'s codes")
            self.parts = _parts(self.backend, weight)
            self.spec = weight.spec
            self.shape = (weight.N, weight.K)
        else:
            self.backend, array = _arrays.resolve(weight, name, "a qmlp.QuantizedTensor or ")
            if array.ndim != 2:
                raise ValueError(f"{name} is {list(array.shape)}, needs [N, K]")
            self.spec = QuantSpec.dense(_dtypes.NAMES[self.backend.dtype(array, name)])
            _refuse_freed(self.backend, array, name)
            self.parts = (self.backend.contiguous(array),)
            self.shape = (int(array.shape[0]), int(array.shape[1]))
        self.device = self.backend.device(self.parts[0], name)

    def wait(self) -> int:
        """Until the arrays are written. Returns the stream."""
        self.backend.synchronize(self.device[1])
        return self.backend.stream(self.device[1])

    def memory(self) -> tuple[int, ...]:
        """Address and bytes of codes, scales and biases."""
        flat = [number for part in self.parts for number in self.backend.memory(part)]
        return (*flat, *(0,) * (6 - len(flat)))


def _device_of(device: Any) -> tuple[int, int]:
    """From "cpu", "cuda", "cuda:N" or a torch.device."""
    if isinstance(device, str):
        kind, colon, ordinal = device.partition(":")
        known = kind == "cuda" and (ordinal.isdecimal() if colon else True) or device == "cpu"
    else:
        kind, ordinal = getattr(device, "type", None), getattr(device, "index", None)
        if not isinstance(kind, str) or not isinstance(ordinal, (int, type(None))):
            raise TypeError(f"device is {kind_of(device)}, needs a str or a torch.device")
        known = kind in ("cpu", "cuda")
    if not known:
        raise ValueError(f"device is {shown(str(device))}, needs \"cpu\", \"cuda\" or \"cuda:N\"")
    if kind == "cpu":
        return _arrays.HOST
    return (CUDA, _whole("the device's number", int(ordinal or 0)))


__all__ = ["PackedWeight", "QuantizedTensor", "dequantize", "pack", "quantize", "CUDA"]
