"""Problems, what takes them, and plans."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from . import _dtypes, _native

_ACCUMULATIONS = {None: 0, "f32": 1, "tensor": 2}
_PRECISIONS = {"match": 0, "wide": 1}


def _choice(name: str, value: Any, choices: dict[Any, int]) -> int:
    if value not in choices:
        words = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} is {value!r}, needs one of {words}")
    return choices[value]


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
    return (spec.bits, spec.group_size, _dtypes.code_of(spec.scale_dtype))


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
        return (self.M_max, self.N, self.K, _spec_tuple(self.weight),
                _dtypes.code_of(self.activation),
                _choice("accumulation", self.accumulation, _ACCUMULATIONS), self.segments)


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
        return (self.M_max, self.hidden, self.intermediate, _spec_tuple(self.gate),
                _spec_tuple(self.up), _dtypes.code_of(self.activation),
                _choice("precision", self.precision, _PRECISIONS),
                _choice("accumulation", self.accumulation, _ACCUMULATIONS), self.segments)


Problem = LinearProblem | SwigluProblem


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
    a "no" with reason "no_device". Raises ValueError for another name or number.
    """
    ask = _native.supports_linear if isinstance(problem, LinearProblem) else (
        _native.supports_swiglu)
    return Support(*ask(device, *problem._arguments()))


def explain(problem: Problem, device: str = "cpu") -> list[KernelVerdict]:
    """Every kernel's answer at M = M_max, fastest first. Arguments as for `supports`."""
    ask = _native.explain_linear if isinstance(problem, LinearProblem) else _native.explain_swiglu
    return [KernelVerdict(name, Support(*answer))
            for name, answer in ask(device, *problem._arguments())]


class Plan:
    """Which kernels run a problem: one packed layout, one kernel for each range of M. Immutable.

    force_kernel: a row of the tables, or an error; force_isa: at most this instruction set of the
    host. Raises UnsupportedError when nothing takes the problem. A plan for a machine that is not
    here can be read, not run.
    """

    __slots__ = ("problem", "device", "force_kernel", "force_isa", "_handle")

    def __init__(self, problem: Problem, *, device: str = "cpu", force_kernel: str | None = None,
                 force_isa: str | None = None) -> None:
        make = _native.plan_linear if isinstance(problem, LinearProblem) else _native.plan_swiglu
        self.problem = problem
        self.device = device
        self.force_kernel = force_kernel
        self.force_isa = force_isa
        self._handle = make(device, force_kernel, force_isa, *problem._arguments())

    def kernel_name(self, M: int = 1) -> str:
        """The kernel that a call of M tokens runs."""
        return self._handle.kernel_name(M)

    def workspace_bytes(self, M: int = 1) -> int:
        """Scratch that a call of M tokens needs."""
        return self._handle.workspace_bytes(M)

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
