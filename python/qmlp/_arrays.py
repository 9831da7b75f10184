"""What differs between array libraries: their types, memory, devices and streams, in one place.

A backend answers for the arrays of one library. `native(x)` is what the extension module takes: an
object with DLPack or the buffer protocol whose elements have the size of x's (NumPy can export
neither for bfloat16, so those go as their 16-bit patterns).
"""

from __future__ import annotations

import sys
from typing import Any, Sequence

import numpy

from . import _dtypes
from ._dtypes import BF16, F16, F32

CPU, CUDA = 0, 1
# Device of a call: kind, ordinal, stream handle.
Device = tuple[int, int, int]
HOST: Device = (CPU, 0, 0)


# Codes by NumPy dtype; ml_dtypes' bfloat16 joins when it is first met.
_numpy_codes = {numpy.dtype(numpy.float32): F32, numpy.dtype(numpy.float16): F16}
_bf16: numpy.dtype | None = None


def _bfloat16() -> numpy.dtype:
    global _bf16
    if _bf16 is None:
        try:
            import ml_dtypes
        except ImportError:
            raise TypeError(
                "NumPy has no bfloat16 of its own: pip install ml_dtypes, or give f32 or f16"
            ) from None
        _bf16 = numpy.dtype(ml_dtypes.bfloat16)
        _numpy_codes[_bf16] = BF16
    return _bf16


class NumpyBackend:
    """ndarray, with ml_dtypes for bfloat16; also what any buffer becomes."""

    name = "numpy"

    def dtype(self, x: numpy.ndarray) -> int:
        code = _numpy_codes.get(x.dtype)
        if code is not None:
            return code
        if x.dtype.name == "bfloat16" and x.dtype == _bfloat16():
            return BF16
        raise TypeError(f"dtype is {x.dtype!r}, needs float32, float16 or ml_dtypes.bfloat16")

    def dtype_object(self, code: int) -> numpy.dtype:
        return _bfloat16() if code == BF16 else numpy.dtype((numpy.float32, numpy.float16)[code])

    def device(self, x: numpy.ndarray) -> Device:
        return HOST

    def native(self, x: numpy.ndarray) -> numpy.ndarray:
        return x.view(numpy.uint16) if _numpy_codes.get(x.dtype) == BF16 else x

    def contiguous(self, x: numpy.ndarray) -> numpy.ndarray:
        return numpy.ascontiguousarray(x)

    def writable(self, x: numpy.ndarray) -> bool:
        return x.flags.writeable

    def empty(self, shape: Sequence[int], code: int, like: Any) -> numpy.ndarray:
        return numpy.empty(shape, self.dtype_object(code))

    def empty_bytes(self, shape: Sequence[int], like: Any) -> numpy.ndarray:
        return numpy.empty(shape, numpy.uint32)

    def workspace(self, nbytes: int, like: Any) -> None:
        return None  # the extension module's own

    def to_f32(self, x: numpy.ndarray) -> numpy.ndarray:
        return numpy.ascontiguousarray(x, dtype=numpy.float32)

    def from_f32(self, x: numpy.ndarray, code: int, like: Any) -> numpy.ndarray:
        return x if code == F32 else x.astype(self.dtype_object(code))

    def codes(self, x: numpy.ndarray) -> numpy.ndarray:
        if x.dtype not in (numpy.uint32, numpy.int32, numpy.uint8):
            raise TypeError(f"codes are {x.dtype!r}, needs uint32 (or int32, uint8) words")
        return x

    def result(self, x: numpy.ndarray) -> numpy.ndarray:
        return x


class TorchBackend:
    """torch.Tensor, on a CPU or the tensor's CUDA device and that device's current stream."""

    name = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.codes_of_dtype = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
        self.dtypes = (torch.float32, torch.float16, torch.bfloat16)
        self.word = getattr(torch, "uint32", torch.int32)

    def dtype(self, x: Any) -> int:
        code = self.codes_of_dtype.get(x.dtype)
        if code is None:
            raise TypeError(f"dtype is {x.dtype}, needs float32, float16 or bfloat16")
        return code

    def device(self, x: Any) -> Device:
        if x.device.type == "cpu":
            return HOST
        if x.device.type == "cuda" and self.torch.version.cuda is not None:
            stream = self.torch.cuda.current_stream(x.device).cuda_stream
            return (CUDA, x.device.index or 0, stream)
        raise TypeError(f"device is {x.device}, needs cpu or cuda")

    def native(self, x: Any) -> Any:
        x = x.detach()
        return x.view(self.torch.int32) if x.dtype == self.word else x

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def writable(self, x: Any) -> bool:
        return True

    def empty(self, shape: Sequence[int], code: int, like: Any) -> Any:
        return self.torch.empty(shape, dtype=self.dtypes[code], device=like.device)

    def empty_bytes(self, shape: Sequence[int], like: Any) -> Any:
        return self.torch.empty(shape, dtype=self.word, device=like.device)

    def workspace(self, nbytes: int, like: Any) -> Any:
        if like.device.type == "cpu":
            return None
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=like.device)

    def to_f32(self, x: Any) -> numpy.ndarray:
        if x.device.type != "cpu":
            raise TypeError(f"weight is on {x.device}, quantizing needs it on the cpu")
        return x.detach().float().contiguous().numpy()

    def from_f32(self, x: numpy.ndarray, code: int, like: Any) -> Any:
        return self.torch.from_numpy(x).to(self.dtypes[code])

    def codes(self, x: Any) -> Any:
        if x.dtype not in (self.word, self.torch.int32, self.torch.uint8):
            raise TypeError(f"codes are {x.dtype}, needs uint32 (or int32, uint8) words")
        return x

    def result(self, x: Any) -> Any:
        return x


class DlpackBackend(NumpyBackend):
    """Any other library on the CPU with DLPack: read in place, results given back by its from_dlpack.

    An array becomes a NumPy view for the call; `result` turns what was computed into the caller's
    type where the library can take it, and leaves a NumPy array where it cannot.
    """

    name = "dlpack"

    def __init__(self, like: Any) -> None:
        self.from_dlpack = _from_dlpack_of(like)

    def result(self, x: numpy.ndarray) -> Any:
        if self.from_dlpack is None:
            return x
        if _numpy_codes.get(x.dtype) == BF16 and self.from_dlpack is not _mlx_array:
            return x
        return self.from_dlpack(x)


def _mlx_array(x: numpy.ndarray) -> Any:
    import mlx.core as mx

    if _numpy_codes.get(x.dtype) == BF16:
        return mx.array(x.view(numpy.uint16)).view(mx.bfloat16)
    return mx.array(x)


def _from_dlpack_of(x: Any) -> Any:
    if type(x).__module__ == "mlx.core":
        return _mlx_array
    if hasattr(x, "__array_namespace__"):
        return getattr(x.__array_namespace__(), "from_dlpack", None)
    root = type(x).__module__.partition(".")[0]
    return getattr(sys.modules.get(root), "from_dlpack", None)


_numpy = NumpyBackend()
_torch: TorchBackend | None = None


def resolve(x: Any) -> tuple[Any, Any]:
    """The backend of an array and the array as that backend takes it."""
    if isinstance(x, numpy.ndarray):
        return _numpy, x
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        global _torch
        if _torch is None:
            _torch = TorchBackend()
        return _torch, x
    if hasattr(x, "__dlpack__"):
        return DlpackBackend(x), _numpy_view(x)
    try:
        return _numpy, numpy.asarray(memoryview(x))
    except TypeError:
        raise TypeError(
            f"{type(x).__name__} is no array: needs NumPy, torch, DLPack or a buffer"
        ) from None


def same_library(backend: Any, x: Any, name: str) -> Any:
    """Another array of the same call, which must be of the same library (or a plain buffer)."""
    other, array = resolve(x)
    if (other.name == "torch") != (backend.name == "torch"):
        raise TypeError(f"{name} is a {type(x).__name__}, x is of {backend.name}: give one library's")
    return array


def _numpy_view(x: Any) -> numpy.ndarray:
    kind = getattr(x, "__dlpack_device__", None)
    if kind is not None and int(kind()[0]) not in (1, 13):  # kDLCPU, unified memory
        raise TypeError(f"{type(x).__name__} is on device {tuple(kind())}, needs the cpu")
    try:
        return numpy.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        # Before NumPy learns bfloat16: its patterns, under ml_dtypes' name.
        if "bfloat16" in str(getattr(x, "dtype", "")):
            from . import _native

            return _native.bf16_patterns(x).view(_bfloat16())
        raise TypeError(f"{type(x).__name__} cannot be read through DLPack: {error}") from None


__all__ = ["CPU", "CUDA", "HOST", "resolve", "same_library", "_dtypes"]
