"""Problems, what takes them, and plans."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

from . import _dtypes, _native
from ._errors import InvalidArgumentError
from ._words import kind_of, shown

_ACCUMULATIONS = {None: 0, "f32": 1, "tensor": 2}
_PRECISIONS = {"match": 0, "wide": 1}
_LONGEST_NAME = 80  # longer than any name; so that messages can hold it


def _choice(name: str, value: Any, choices: dict[Any, int]) -> int:
    if not isinstance(value, (str, type(None))) or value not in choices:
        words = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {shown(value)}, needs one of {words}")
    return choices[value]


def _whole(name: str, value: Any, bits: int = 31) -> int:
    """A number that the extension module takes. What it means is the library's to check."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}, needs a whole number") from None
    if not -1 << bits <= number < 1 << bits:
        raise InvalidArgumentError(f"{name} is {shown(number)}, needs a number of at most {bits} bits")
    return number


def _text(name: str, value: Any) -> str:
    """A name for the C interface, in ASCII, where text ends at a NUL and none means the default."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {kind_of(value)}, needs a str")
    if not value or "\0" in value or not value.isascii() or len(value) > _LONGEST_NAME:
        raise InvalidArgumentError(f"{name} is {shown(value)}, needs a name")
    return value


class Frozen:
    """An object whose public attributes are set once, by `_set`."""

    __slots__ = ()

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} is immutable, its {name} cannot be set")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable, its {name} cannot be deleted")


@dataclasses.dataclass(frozen=True, slots=True)
class QuantSpec:
    """How a weight is stored: affine with bits 2, 3, 4, 5, 6 or 8 and group_size 32, 64 or 128, or
    dense (`QuantSpec.dense`)."""

    bits: int = 4
    group_size: int = 64
    scale_dtype: str = "bf16"

    @staticmethod
    def dense(dtype: Any) -> QuantSpec:
        """The floats themselves."""
        name = _dtypes.NAMES[_dtypes.code_of(dtype)]
        return QuantSpec(32 if name == "f32" else 16, 0, name)

    @property
    def is_dense(self) -> bool:
        return self.group_size == 0

    def __str__(self) -> str:
        if self.is_dense:
            return self.scale_dtype
        return f"{self.bits} bits, group {self.group_size}, {self.scale_dtype} scales"


def _spec_tuple(spec: QuantSpec) -> tuple[int, int, int]:
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"the weight's format is {kind_of(spec)}, needs a QuantSpec")
    return (_whole("bits", spec.bits), _whole("group_size", spec.group_size),
            _dtypes.code_of(spec.scale_dtype, "scale_dtype"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearProblem:
    """out[M, N] = x[M, K] * w^T.

    accumulation: "f32", "tensor", or None for the device's own; segments: of `tensor`, 0 for the
    plan's choice (docs/numerics.md section 3).
    """

    N: int
    K: int
    weight: QuantSpec = QuantSpec()
    activation: str = "bf16"
    M_max: int = 1
    accumulation: str | None = None
    segments: int = 0

    def _arguments(self) -> tuple[Any, ...]:
        return (_whole("M_max", self.M_max, 63), _whole("N", self.N, 63), _whole("K", self.K, 63),
                _spec_tuple(self.weight), _dtypes.code_of(self.activation, "activation"),
                _choice("accumulation", self.accumulation, _ACCUMULATIONS),
                _whole("segments", self.segments))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwigluProblem:
    """out[M, intermediate] = silu(x * gate^T) * (x * up^T), x [M, hidden].

    precision: "match" rounds where the separate ops round, "wide" once at the store.
    """

    hidden: int
    intermediate: int
    gate: QuantSpec = QuantSpec()
    up: QuantSpec = QuantSpec()
    activation: str = "bf16"
    precision: str = "match"
    M_max: int = 1
    accumulation: str | None = None
    segments: int = 0

    def _arguments(self) -> tuple[Any, ...]:
        return (_whole("M_max", self.M_max, 63), _whole("hidden", self.hidden, 63),
                _whole("intermediate", self.intermediate, 63), _spec_tuple(self.gate),
                _spec_tuple(self.up), _dtypes.code_of(self.activation, "activation"),
                _choice("precision", self.precision, _PRECISIONS),
                _choice("accumulation", self.accumulation, _ACCUMULATIONS),
                _whole("segments", self.segments))


Problem = LinearProblem | SwigluProblem


def _by_kind(problem: Problem, linear: Any, swiglu: Any) -> Any:
    """The extension's function for a problem."""
    if isinstance(problem, LinearProblem):
        return linear
    if isinstance(problem, SwigluProblem):
        return swiglu
    raise TypeError(f"problem is {kind_of(problem)}, needs a LinearProblem or a SwigluProblem")


class Support(NamedTuple):
    """A kernel's or the library's answer to a problem. True in a condition when it is yes."""

    supported: bool
    reason: str  # "ok", "no_device", "no_isa", "dtype", "bits", "group_size", "shape", ...
    field: str  # "K"
    have: int  # 100
    need: str  # "a multiple of the group size"
    sentence: str  # "K is 100, needs a multiple of the group size"

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        return self.sentence


class KernelVerdict(NamedTuple):
    """One row of the kernel tables and its answer."""

    kernel: str
    support: Support


def supports(problem: Problem, device: str = "cpu") -> Support:
    """Whether some kernel takes the problem; if none does, why.

    device: "cpu", "cuda", "cuda:N", or the name of a machine that is not here: "portable", "avx2",
    "avx512", "a100", "h200". Where CUDA cannot run (no driver, no GPU, a build without it) the answer is
    a "no" with reason "no_device". Raises ValueError for another name or number, TypeError for other
    types.
    """
    ask = _by_kind(problem, _native.supports_linear, _native.supports_swiglu)
    return Support(*ask(_text("device", device), *problem._arguments()))


def explain(problem: Problem, device: str = "cpu") -> list[KernelVerdict]:
    """Every kernel's answer at M = M_max, fastest first. Arguments as for `supports`."""
    ask = _by_kind(problem, _native.explain_linear, _native.explain_swiglu)
    return [KernelVerdict(name, Support(*answer))
            for name, answer in ask(_text("device", device), *problem._arguments())]


class Plan(Frozen):
    """Which kernels run a problem: one packed layout, one kernel for each range of M. Immutable.

    force_kernel: a row of the tables, or an error; force_isa: at most this instruction set of the
    host. Raises UnsupportedError when nothing takes the problem. A plan for a machine that is not
    here can be read, not run.
    """

    __slots__ = ("problem", "device", "force_kernel", "force_isa", "_handle")

    problem: Problem
    device: str
    force_kernel: str | None
    force_isa: str | None

    def __init__(self, problem: Problem, *, device: str = "cpu", force_kernel: str | None = None,
                 force_isa: str | None = None) -> None:
        make = _by_kind(problem, _native.plan_linear, _native.plan_swiglu)
        for name, given in (("force_kernel", force_kernel), ("force_isa", force_isa)):
            if given is not None:
                _text(name, given)
        self._handle = make(_text("device", device), force_kernel, force_isa, *problem._arguments())
        self._set(problem=problem, device=device, force_kernel=force_kernel, force_isa=force_isa)

    def kernel_name(self, M: int = 1) -> str:
        """The kernel that a call of M tokens runs."""
        return self._handle.kernel_name(_whole("M", M, 63))

    def workspace_bytes(self, M: int = 1) -> int:
        """Scratch that a call of M tokens needs."""
        return self._handle.workspace_bytes(_whole("M", M, 63))

    @property
    def accumulation(self) -> str:
        """"f32" or "tensor"."""
        return ("", "f32", "tensor")[self._handle.accumulation()]

    @property
    def segments(self) -> int:
        """1 unless the tensor contract cuts K."""
        return self._handle.segments()

    @property
    def can_run(self) -> bool:
        """False for a machine that is not here."""
        return self._handle.can_run()

    def __repr__(self) -> str:
        return f"qmlp.Plan({self.kernel_name(1)!r} at M = 1, device={self.device!r})"


def dispatch_counts() -> dict[str, int]:
    """How often each kernel ran in this process since the last reset."""
    return dict(_native.dispatch_counts())


def reset_dispatch_counts() -> None:
    """Starts the counts of `dispatch_counts` at zero."""
    _native.reset_dispatch_counts()
