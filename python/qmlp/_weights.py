"""Quantized weights as files hold them, and packed for the kernels."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Iterator

import numpy

from . import _arrays, _dtypes, _native
from ._arrays import CPU, CUDA
from ._plans import LinearProblem, Plan, QuantSpec, SwigluProblem, _spec_tuple

# Plans of packed weights take calls of any length; workspaces follow the call, not this.
_ANY_M = 1 << 31

# codes, scales and biases, or a dense weight's floats and twice None.
_Parts = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight [N, K] in MLX's affine format: w = scale * code + bias for each group along K.

    codes: uint32 words [..., N, K * bits / 32]; scales and biases: [..., N, K / group_size] of f32,
    f16 or bf16. They may come from a checkpoint, `qmlp.quantize` or `mx.quantize`, and from NumPy,
    torch, or anything with DLPack or the buffer protocol.

    Unpacks as `codes, scales, biases = tensor`. Raises ValueError when shapes contradict each other
    or the format.
    """

    codes: Any
    scales: Any
    biases: Any
    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise ValueError(f"bits is {self.bits}, needs 2, 3, 4, 5, 6 or 8")
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size is {self.group_size}, needs 32, 64 or 128")
        codes, scales, biases = (
            tuple(getattr(part, "shape", ())) for part in (self.codes, self.scales, self.biases)
        )
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
        backend, scales = _arrays.resolve(self.scales)
        return QuantSpec(self.bits, self.group_size, _dtypes.NAMES[backend.dtype(scales)])

    def __iter__(self) -> Iterator[Any]:
        return iter((self.codes, self.scales, self.biases))


def quantize(
    w: Any, *, bits: int = 4, group_size: int = 64, scale_dtype: Any = None
) -> QuantizedTensor:
    """Quantizes weights as MLX's CPU `quantize` does, bit for bit.

    w: [..., N, K] of f32, f16 or bf16, on the CPU. K a multiple of group_size. The arithmetic is in
    f32 whatever w's type; scales and biases are rounded to scale_dtype, by default w's own.

    Returns a QuantizedTensor of arrays of w's library. Raises ValueError for a format or a K outside
    the format, TypeError for other types.
    """
    backend, array = _arrays.resolve(w)
    if array.ndim < 2:
        raise ValueError(f"w is {list(array.shape)}, needs [..., N, K]")
    dtype = backend.dtype(array)
    scale_code = dtype if scale_dtype is None else _dtypes.code_of(scale_dtype)
    *lead, K = (int(n) for n in array.shape)
    N = math.prod(lead)
    spec = QuantSpec(bits, group_size, _dtypes.NAMES[scale_code])
    _native.quant_sizes(N, K, _spec_tuple(spec))
    if spec.is_dense:
        raise ValueError("group_size is 0, needs 32, 64 or 128")
    codes = backend.empty_bytes((*lead, K * bits // 32), array)
    scales = backend.empty((*lead, K // group_size), scale_code, array)
    biases = backend.empty((*lead, K // group_size), scale_code, array)
    _native.quantize(
        backend.to_f32(array).reshape(N, K), N, K, _spec_tuple(spec),
        backend.native(codes), backend.native(scales), backend.native(biases),
    )
    return QuantizedTensor(
        backend.result(codes), backend.result(scales), backend.result(biases), bits, group_size
    )


def dequantize(weight: QuantizedTensor, *, dtype: Any = None) -> Any:
    """The weight [..., N, K]: scale * code + bias, exact, rounded once to dtype.

    dtype: f32, f16 or bf16; by default the type of the scales. Returns an array of the library of
    weight.codes. Raises ValueError when the parts contradict each other.
    """
    backend, codes = _arrays.resolve(weight.codes)
    spec = weight.spec
    code = _dtypes.code_of(spec.scale_dtype if dtype is None else dtype)
    N, K = math.prod(weight.shape[:-1]), weight.K
    out = numpy.empty((N, K), numpy.float32)
    if N and K:
        words, scales, biases = _parts(backend, weight)
        _native.dequantize(words, scales, biases, N, K, _spec_tuple(spec), code, out)
    return backend.result(backend.from_f32(out.reshape(weight.shape), code, codes))


def _parts(backend: Any, weight: QuantizedTensor) -> _Parts:
    """codes, scales and biases as the extension module takes them: contiguous, checked types."""
    codes = backend.codes(_arrays.same_library(backend, weight.codes, "codes"))
    parts = [codes]
    kinds = set()
    for name in ("scales", "biases"):
        part = _arrays.same_library(backend, getattr(weight, name), name)
        kinds.add(backend.dtype(part))
        parts.append(part)
    if len(kinds) != 1:
        raise TypeError("scales and biases have two types, need one")
    words, scales, biases = (backend.native(backend.contiguous(part)) for part in parts)
    return words, scales, biases


class PackedWeight:
    """Weights re-laid for the kernels, with the plan that runs them. Made by `qmlp.pack`.

    Immutable; may be used from several threads at once. One array (a linear layer) or two (gate and
    up of a SwiGLU).
    """

    __slots__ = ("plan", "N", "K", "specs", "activation", "_handle", "_code", "_device",
                 "__weakref__")

    def __init__(self, plan: Plan, handle: Any, N: int, K: int, specs: tuple[QuantSpec, ...],
                 device: tuple[int, int]) -> None:
        self.plan = plan
        self.N = N
        self.K = K
        self.specs = specs
        self.activation = plan.problem.activation
        self._handle = handle
        self._code = _dtypes.code_of(self.activation)
        self._device = device

    @property
    def is_swiglu(self) -> bool:
        """Holds gate and up."""
        return len(self.specs) == 2

    @property
    def nbytes(self) -> int:
        """Bytes that the packed form owns."""
        return self._handle.nbytes()

    @property
    def non_finite(self) -> bool:
        """Some decoded weight is infinite or NaN."""
        return self._handle.non_finite()

    def part(self, index: int) -> PackedWeight:
        """The gate (0) or up (1) half as a linear weight that shares the memory."""
        half = self._handle.part(index)
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
        self._handle.decode_row(row, backend.native(out), self._code)
        return out[0]

    def __repr__(self) -> str:
        formats = " and ".join(str(spec) for spec in self.specs)
        return (f"qmlp.PackedWeight([{self.N}, {self.K}], {formats}, {self.activation}, "
                f"{self.plan.device})")


def pack(
    weight: Any,
    up: Any = None,
    *,
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
    activation: type of x and of the results, "f32", "f16" or "bf16"; by default the type of the
    scales. The other arguments are those of LinearProblem, SwigluProblem and Plan.

    Returns a PackedWeight on the device of the arrays. Raises UnsupportedError when no kernel takes the
    problem, ValueError or TypeError for contradicting shapes and types.
    """
    backend, parts, spec, N, K, where = _source(weight, "weight")
    code = _dtypes.code_of(spec.scale_dtype if activation is None else activation)
    name = _dtypes.NAMES[code]
    device_name = "cpu" if where[0] == CPU else f"cuda:{where[1]}"
    if up is None:
        plan = Plan(
            LinearProblem(N=N, K=K, weight=spec, activation=name, M_max=_ANY_M,
                          accumulation=accumulation, segments=segments),
            device=device_name, force_kernel=force_kernel, force_isa=force_isa)
        handle = _native.pack_linear(plan._handle, where, *parts, N, K, _spec_tuple(spec))
        return PackedWeight(plan, handle, N, K, (spec,), where[:2])
    up_backend, up_parts, up_spec, up_N, up_K, up_where = _source(up, "up")
    if (up_N, up_K) != (N, K):
        raise ValueError(f"gate is [{N}, {K}], up is [{up_N}, {up_K}]: need one shape")
    if up_where[:2] != where[:2]:
        raise ValueError("gate and up are on two devices, need one")
    plan = Plan(
        SwigluProblem(hidden=K, intermediate=N, gate=spec, up=up_spec, activation=name,
                      precision=precision, M_max=_ANY_M, accumulation=accumulation,
                      segments=segments),
        device=device_name, force_kernel=force_kernel, force_isa=force_isa)
    handle = _native.pack_swiglu(plan._handle, where, *parts, _spec_tuple(spec), *up_parts,
                                 _spec_tuple(up_spec), N, K)
    return PackedWeight(plan, handle, N, K, (spec, up_spec), where[:2])


def _source(weight: Any, name: str) -> tuple[Any, _Parts, QuantSpec, int, int, Any]:
    if isinstance(weight, QuantizedTensor):
        if len(weight.shape) != 2:
            raise ValueError(f"{name} is {list(weight.shape)}, needs [N, K]")
        backend, codes = _arrays.resolve(weight.codes)
        return (backend, _parts(backend, weight), weight.spec, weight.N, weight.K,
                backend.device(codes))
    backend, array = _arrays.resolve(weight)
    if array.ndim != 2:
        raise ValueError(f"{name} is {list(array.shape)}, needs [N, K]")
    spec = QuantSpec.dense(_dtypes.NAMES[backend.dtype(array)])
    N, K = (int(n) for n in array.shape)
    return (backend, (backend.native(backend.contiguous(array)), None, None), spec, N, K,
            backend.device(array))


__all__ = ["PackedWeight", "QuantizedTensor", "dequantize", "pack", "quantize", "CUDA"]
