"""Exact, fast kernels for MLX-quantized language models, on arrays of the caller's own library.

    packed = qmlp.pack(qmlp.quantize(w, bits=4, group_size=64), activation="f32")
    y = qmlp.quantized_linear(x, packed)

NumPy, torch, and anything with DLPack or the buffer protocol. `qmlp.torch` has ops for
torch.compile, `qmlp.mlx` the ops on mx.array and `qmlp.mlx.patch` for mlx-lm models.
"""

from __future__ import annotations

import os as _os
from pathlib import Path as _Path

from . import _native
from ._errors import (
    CorruptFileError,
    DeviceError,
    Error,
    FileError,
    InternalError,
    InterruptedCallError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedError,
)
from ._ops import fused_mlp, fused_swiglu, quantized_linear
from ._plans import (
    KernelVerdict,
    LinearProblem,
    Plan,
    QuantSpec,
    Support,
    SwigluProblem,
    _whole,
    dispatch_counts,
    explain,
    reset_dispatch_counts,
    supports,
)
from ._weights import PackedWeight, QuantizedTensor, dequantize, pack, quantize

__version__: str = _native.version()


def num_threads() -> int:
    """Threads that a call uses on the CPU, the calling one included."""
    return _native.num_threads()


def set_num_threads(count: int) -> None:
    """Sets the threads of later calls, 1 to 1024; 0 takes the default (affinity mask and cgroup).

    Never changes a result. Raises ValueError for another number, TypeError for what is none,
    DeviceError when the system starts no more threads. QMLP_THREADS sets it at import.
    """
    if not 0 <= _whole("count", count, 63) <= 1024:
        raise InvalidArgumentError(f"count is {count}, needs 1 to 1024, or 0 for the default")
    _native.set_num_threads(int(count))


def get_include() -> str:
    """The folder to put on a C compiler's include path for `qmlp/c_api.h`."""
    return str(_Path(__file__).parent / "include")


def get_library() -> str:
    """The path of libqmlp_c, the C library that this package runs on."""
    found = sorted((_Path(__file__).parent / "lib").glob("libqmlp_c.so.*"))
    if not found:
        raise FileError("libqmlp_c is not in the package's lib folder")
    return str(found[0])


def _start() -> None:
    text = _os.environ.get("QMLP_THREADS")
    if text is not None and text.strip():
        try:
            set_num_threads(int(text))
        except ValueError:
            raise InvalidArgumentError(
                f"QMLP_THREADS is {text!r}, needs a number from 1 to 1024") from None
    # A child has none of its parent's threads; it makes its own at its first call.
    _os.register_at_fork(after_in_child=_native.forget_after_fork)


_start()

__all__ = [
    "CorruptFileError",
    "DeviceError",
    "Error",
    "FileError",
    "InternalError",
    "InterruptedCallError",
    "InvalidArgumentError",
    "KernelVerdict",
    "LinearProblem",
    "OutOfMemoryError",
    "PackedWeight",
    "Plan",
    "QuantSpec",
    "QuantizedTensor",
    "Support",
    "SwigluProblem",
    "UnsupportedError",
    "dequantize",
    "dispatch_counts",
    "explain",
    "fused_mlp",
    "fused_swiglu",
    "get_include",
    "get_library",
    "num_threads",
    "pack",
    "quantize",
    "quantized_linear",
    "reset_dispatch_counts",
    "set_num_threads",
    "supports",
]
