"""What differs between array libraries: their types, memory, devices and streams, in one place.

A backend answers for the arrays of one library. For CPU calls `native(x)` is what the extension
module takes: an object with DLPack or the buffer protocol whose elements have the size of x's (NumPy
can export neither for bfloat16, so those go as their 16-bit patterns). CUDA calls take addresses:
`memory` and `matrix` give them, and what they return besides must live until the call is made. Nothing
more is needed, since the allocators of torch and CuPy give memory back in the stream's order.
"""

from __future__ import annotations

import sys
from typing import Any, Callable, Sequence

import numpy

from ._dtypes import BF16, F16, F32
from ._words import kind_of, one_line, shown

CPU, CUDA = 0, 1
# kind and ordinal
Device = tuple[int, int]
HOST: Device = (CPU, 0)


def device_name(device: Device) -> str:
    """"cpu" or "cuda:N"."""
    return "cpu" if device[0] == CPU else f"cuda:{device[1]}"


class StridesError(Exception):
    """An output whose strides make no matrix."""


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

    name = kind = "numpy"

    def dtype(self, x: numpy.ndarray, name: str = "x") -> int:
        code = _numpy_codes.get(x.dtype)
        if code is not None:
            return code
        if x.dtype.name == "bfloat16" and x.dtype == _bfloat16():
            return BF16
        raise TypeError(f"{name} is of {shown(x.dtype)}, needs float32, float16 or ml_dtypes.bfloat16")

    def dtype_object(self, code: int) -> numpy.dtype:
        return _bfloat16() if code == BF16 else numpy.dtype((numpy.float32, numpy.float16)[code])

    def device(self, x: numpy.ndarray, name: str = "x") -> Device:
        return HOST

    def native(self, x: numpy.ndarray) -> numpy.ndarray:
        return x.view(numpy.uint16) if _numpy_codes.get(x.dtype) == BF16 else x

    def aligned(self, x: Any) -> bool:
        """Whether the elements lie at multiples of their size, as fields of a record may not."""
        return x.flags.aligned

    def contiguous(self, x: numpy.ndarray) -> numpy.ndarray:
        """Aligned too."""
        return numpy.ascontiguousarray(x) if x.flags.aligned else x.copy(order="C")

    def writable(self, x: numpy.ndarray) -> bool:
        return x.flags.writeable

    def negated(self, x: Any) -> bool:
        """Whether x's memory holds its values with the other sign: see TorchBackend."""
        return False

    def freed(self, x: Any) -> bool:
        """Whether x has elements but no memory."""
        return False

    def written(self, x: Any) -> None:
        """Says to the library that x is written."""

    def empty(self, shape: Sequence[int], code: int, like: Any) -> numpy.ndarray:
        return numpy.empty(shape, self.dtype_object(code))

    def empty_words(self, shape: Sequence[int], like: Any) -> numpy.ndarray:
        return numpy.empty(shape, numpy.uint32)

    def host_empty(self, shape: Sequence[int], code: int) -> numpy.ndarray:
        """On the CPU, whatever the backend's device; `from_host` takes it to the device of `like`."""
        return numpy.empty(shape, self.dtype_object(code))

    def host_words(self, shape: Sequence[int]) -> numpy.ndarray:
        return numpy.empty(shape, numpy.uint32)

    def memory(self, x: numpy.ndarray) -> tuple[int, int]:
        """Address and bytes of a contiguous array."""
        return x.__array_interface__["data"][0], x.nbytes

    def traced(self, *arrays: Any) -> bool:
        """Whether the call has to be one of torch's ops: see TorchBackend."""
        return False

    def tangent(self, *arrays: Any) -> bool:
        """Whether an array carries a derivative of forward mode."""
        return False

    def on_host(self, x: numpy.ndarray) -> numpy.ndarray:
        """As NumPy, bfloat16 as its patterns; a copy for what is on a GPU."""
        return self.native(x)

    def from_host(self, x: numpy.ndarray, like: Any) -> numpy.ndarray:
        return x

    def to_f32(self, x: numpy.ndarray) -> numpy.ndarray:
        return numpy.require(x, numpy.float32, ("C", "A"))

    def from_f32(self, x: numpy.ndarray, code: int, like: Any) -> numpy.ndarray:
        return x if code == F32 else x.astype(self.dtype_object(code))

    def codes(self, x: numpy.ndarray) -> numpy.ndarray:
        if x.dtype not in (numpy.uint32, numpy.int32):
            raise TypeError(f"codes are {shown(x.dtype)}, needs uint32 (or int32) words")
        return x

    def result(self, x: numpy.ndarray) -> numpy.ndarray:
        return x


def _version_bump(torch: Any) -> Any:
    """What tells autograd that tensors are written, for a tuple of them."""
    bump = torch._C._increment_version
    try:
        bump(())
    except TypeError:  # before torch 2.6 or so it takes one tensor
        return lambda tensors: [bump(tensor) for tensor in tensors]
    return bump


class TorchBackend:
    """torch.Tensor, on a CPU or the tensor's CUDA device and that device's current stream."""

    name = kind = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.codes_of_dtype = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
        self.dtypes = (torch.float32, torch.float16, torch.bfloat16)
        self.word = getattr(torch, "uint32", torch.int32)
        self.plain = (torch.Tensor, torch.nn.Parameter)
        # Without these two, which torch's own compiler calls, the slower public way.
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda ordinal: torch.cuda.current_stream(ordinal).cuda_stream)
        self.num_modes = getattr(torch._C, "_len_torch_dispatch_stack", None) or (lambda: 0)
        self.tracing = torch._C._is_tracing
        # The innermost transform of torch.func, or None.
        self.transform = torch._C._functorch.peek_interpreter_stack
        self.forward_ad = torch.autograd.forward_ad
        self.bump_versions = _version_bump(torch)

    def dtype(self, x: Any, name: str = "x") -> int:
        code = self.codes_of_dtype.get(x.dtype)
        if code is None:
            raise TypeError(f"{name} is of {x.dtype}, needs float32, float16 or bfloat16")
        return code

    def device(self, x: Any, name: str = "x") -> Device:
        if x.layout is not self.torch.strided:
            raise TypeError(f"{name} is of layout {x.layout}, needs torch.strided")
        if x.device.type == "cpu":
            return HOST
        if x.device.type == "cuda" and self.torch.version.cuda is not None:
            return (CUDA, x.device.index or 0)
        raise TypeError(f"{name} is on {x.device}, needs cpu or cuda")

    def stream(self, ordinal: int) -> int:
        return self.raw_stream(ordinal)

    def synchronize(self, ordinal: int) -> None:
        self.torch.cuda.current_stream(ordinal).synchronize()

    def native(self, x: Any) -> Any:
        x = x.detach()
        return x.view(self.torch.int32) if x.dtype == self.word else x

    def aligned(self, x: Any) -> bool:
        return x.data_ptr() % x.element_size() == 0

    def contiguous(self, x: Any) -> Any:
        x = x.detach().contiguous()
        return x if self.aligned(x) else x.clone()

    def writable(self, x: Any) -> bool:
        return True

    def negated(self, x: Any) -> bool:
        """Whether torch's negative bit is set. The conjugate bit needs no look: only complex types, which
        are refused, have it."""
        return isinstance(x, self.torch.Tensor) and x.is_neg()

    def freed(self, x: Any) -> bool:
        return x.data_ptr() == 0 and x.numel() != 0

    def written(self, x: Any) -> None:
        self.bump_versions((x,))

    def empty(self, shape: Sequence[int], code: int, like: Any) -> Any:
        return self.torch.empty(shape, dtype=self.dtypes[code], device=like.device)

    def empty_words(self, shape: Sequence[int], like: Any) -> Any:
        return self.torch.empty(shape, dtype=self.word, device=like.device)

    def host_empty(self, shape: Sequence[int], code: int) -> Any:
        return self.torch.empty(shape, dtype=self.dtypes[code], device="cpu")

    def host_words(self, shape: Sequence[int]) -> Any:
        return self.torch.empty(shape, dtype=self.word, device="cpu")

    def memory(self, x: Any) -> tuple[int, int]:
        return x.data_ptr(), x.numel() * x.element_size()

    def matrix(self, x: Any, columns: int, copy: bool = True) -> tuple[Any, int, int]:
        """What holds the matrix [.., columns] that x is, its address and row stride.

        Raises StridesError when x's strides make none and copy is False.
        """
        flat = x.detach()
        if flat.numel() == 0:
            return flat, 0, columns
        try:
            flat = flat.view(-1, columns)
            fits = flat.stride(1) == 1 and (flat.shape[0] == 1 or flat.stride(0) >= columns)
        except RuntimeError:
            fits = False
        if not fits:
            if not copy:
                raise StridesError
            flat = x.detach().contiguous().view(-1, columns)
        return flat, flat.data_ptr(), flat.stride(0) if flat.shape[0] > 1 else columns

    def scratch(self, nbytes: int, like: Any) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=like.device)

    def traced(self, *arrays: Any) -> bool:
        """Whether the call has to be one of torch's ops (qmlp.torch): under torch.compile, torch.jit.trace,
        torch.func and other modes that see ops, for subclasses such as fake tensors, and where a
        derivative is wanted."""
        torch = self.torch
        if (torch.compiler.is_compiling() or self.num_modes() or self.tracing()
                or self.transform() is not None
                or self.forward_ad._current_level >= 0 and self.tangent(*arrays)):
            return True
        grad = torch.is_grad_enabled()
        return any(
            isinstance(array, torch.Tensor)
            and (type(array) not in self.plain or (grad and array.requires_grad))
            for array in arrays)

    def tangent(self, *arrays: Any) -> bool:
        return self.forward_ad._current_level >= 0 and any(map(self._is_dual, arrays))

    def _is_dual(self, array: Any) -> bool:
        functorch = self.torch._C._functorch
        while isinstance(array, self.torch.Tensor) and functorch.is_batchedtensor(array):
            array = functorch.get_unwrapped(array)
        return (isinstance(array, self.torch.Tensor)
                and self.forward_ad.unpack_dual(array).tangent is not None)

    def below(self, array: Any) -> Any:
        """What a transform of torch.func has wrapped, None for other tensors."""
        functorch = self.torch._C._functorch
        wrapped = functorch.is_batchedtensor(array) or functorch.is_gradtrackingtensor(array)
        return functorch.get_unwrapped(array) if wrapped else None

    def to_f32(self, x: Any) -> numpy.ndarray:
        return x.detach().to(device="cpu", dtype=self.torch.float32).contiguous().numpy()

    def from_f32(self, x: numpy.ndarray, code: int, like: Any) -> Any:
        return self.torch.from_numpy(x).to(self.dtypes[code]).to(like.device)

    def on_host(self, x: Any) -> numpy.ndarray:
        x = x.detach().cpu()
        if x.dtype == self.word or x.dtype == self.torch.int32:
            return x.view(self.torch.int32).numpy().view(numpy.uint32)
        return x.view(self.torch.int16).numpy() if x.element_size() == 2 else x.numpy()

    def from_host(self, x: Any, like: Any) -> Any:
        return x.to(like.device)

    def codes(self, x: Any) -> Any:
        if x.dtype not in (self.word, self.torch.int32):
            raise TypeError(f"codes are {x.dtype}, needs uint32 (or int32) words")
        return x

    def result(self, x: Any) -> Any:
        return x


class CupyBackend(NumpyBackend):
    """cupy.ndarray, on its device and that device's current stream; ml_dtypes for bfloat16."""

    name = kind = "cupy"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    def device(self, x: Any, name: str = "x") -> Device:
        return (CUDA, x.device.id)

    def stream(self, ordinal: int) -> int:
        return self.cupy.cuda.get_current_stream(ordinal).ptr

    def synchronize(self, ordinal: int) -> None:
        self.cupy.cuda.get_current_stream(ordinal).synchronize()

    def aligned(self, x: Any) -> bool:
        item = x.dtype.itemsize
        return not (x.data.ptr % item or any(stride % item for stride in x.strides))

    def contiguous(self, x: Any) -> Any:
        with x.device:
            return self.cupy.ascontiguousarray(x)

    def writable(self, x: Any) -> bool:
        return True

    def empty(self, shape: Sequence[int], code: int, like: Any) -> Any:
        with like.device:
            return self.cupy.empty(tuple(shape), self.dtype_object(code))

    def empty_words(self, shape: Sequence[int], like: Any) -> Any:
        with like.device:
            return self.cupy.empty(tuple(shape), numpy.uint32)

    def memory(self, x: Any) -> tuple[int, int]:
        return x.data.ptr, x.nbytes

    def matrix(self, x: Any, columns: int, copy: bool = True) -> tuple[Any, int, int]:
        if x.size == 0:
            return x, 0, columns
        flat = x if x.ndim == 2 else x.reshape(-1, columns)
        # reshape gives a copy where it cannot give a view.
        fits = x.ndim == 2 or flat.base is not None and flat.data.ptr == x.data.ptr
        item = x.dtype.itemsize
        row = flat.strides[0] // item if flat.shape[0] > 1 else columns
        if (not fits or (columns > 1 and flat.strides[1] != item) or row < columns
                or not self.aligned(flat)):
            if not copy:
                raise StridesError
            flat, row = self.contiguous(x), columns
        return flat, flat.data.ptr, row

    def scratch(self, nbytes: int, like: Any) -> Any:
        with like.device:
            return self.cupy.empty(nbytes, numpy.uint8)

    def to_f32(self, x: Any) -> numpy.ndarray:
        return numpy.ascontiguousarray(self.cupy.asnumpy(x), dtype=numpy.float32)

    def from_f32(self, x: numpy.ndarray, code: int, like: Any) -> Any:
        return self.from_host(x if code == F32 else x.astype(self.dtype_object(code)), like)

    def on_host(self, x: Any) -> numpy.ndarray:
        return NumpyBackend.native(self, self.cupy.asnumpy(x))

    def from_host(self, x: numpy.ndarray, like: Any) -> Any:
        with like.device:
            return self.cupy.asarray(x)


class TorchDlpackBackend(TorchBackend):
    """Any other library's arrays on a CUDA device, as torch tensors on torch's current stream.

    torch.from_dlpack asks the library for its data in that stream's order, and its from_dlpack asks
    torch the same for the result.
    """

    name = "dlpack"

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.from_dlpack = _from_dlpack_of(like)

    def writable(self, x: Any) -> bool:
        return False  # DLPack does not always say whether an array may be written

    def result(self, x: Any) -> Any:
        return x if self.from_dlpack is None else self.from_dlpack(x)


class CupyDlpackBackend(CupyBackend):
    """The same through CuPy."""

    name = "dlpack"

    def __init__(self, like: Any) -> None:
        super().__init__()
        self.from_dlpack = _from_dlpack_of(like)

    def writable(self, x: Any) -> bool:
        return False

    def result(self, x: Any) -> Any:
        return x if self.from_dlpack is None else self.from_dlpack(x)


class DlpackBackend(NumpyBackend):
    """Any other library on a CPU with DLPack: read in place, results given back by its from_dlpack.

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
_when_torch_starts: list[Callable[[TorchBackend], None]] = []
_cupy: CupyBackend | None = None


def torch_backend() -> TorchBackend:
    """The one backend of torch, made when torch is first met."""
    global _torch
    if _torch is None:
        _torch = TorchBackend()
        for start in _when_torch_starts:
            start(_torch)
    return _torch


def when_torch_starts(start: Callable[[TorchBackend], None]) -> None:
    """`start` is given torch's backend when torch is first met."""
    _when_torch_starts.append(start)


def release_caches() -> bool:
    """Gives back device memory that the array libraries hold but do not use. False without them."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        cupy.get_default_memory_pool().free_all_blocks()
    return torch is not None or cupy is not None


def resolve(x: Any, name: str = "x", or_else: str = "") -> tuple[Any, Any]:
    """The backend of an array and the array as that backend takes it. `name` and what else it could be
    are for messages."""
    if isinstance(x, numpy.ndarray):
        return _numpy, x
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return torch_backend(), x.resolve_neg() if x.is_neg() else x
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        global _cupy
        if _cupy is None:
            _cupy = CupyBackend()
        return _cupy, x
    if hasattr(x, "__dlpack__"):
        kind = getattr(x, "__dlpack_device__", None)
        place = (1, 0) if kind is None else tuple(int(part) for part in kind())
        if place[0] == 2:  # kDLCUDA
            return _cuda_dlpack(x, name)
        if place[0] not in (1, 3, 13):  # kDLCPU, pinned memory, unified memory
            raise TypeError(f"{name} is {kind_of(x)} on DLPack device {place}, needs a cpu or CUDA")
        if type(x).__module__ == "mlx.core":
            _refuse_traced(x)
        return DlpackBackend(x), _numpy_view(x, name)
    try:
        return _numpy, numpy.asarray(memoryview(x))
    except TypeError:
        raise TypeError(
            f"{name} is {kind_of(x)}, needs {or_else}an array: NumPy, torch, CuPy, DLPack or a buffer"
        ) from None


def no_forward_mode(op: str) -> str:
    """What is said of a tensor with a tangent."""
    return (f"{op}: a tensor has a tangent of forward-mode AD, which the op does not differentiate: needs "
            "reverse mode")


def _cuda_dlpack(x: Any, name: str) -> tuple[Any, Any]:
    """An array in a GPU's memory, held by torch or else CuPy, whichever the process has."""
    for module, kind in (("torch", TorchDlpackBackend), ("cupy", CupyDlpackBackend)):
        library = sys.modules.get(module)
        if library is not None:
            break
    else:
        try:
            import cupy as library

            kind = CupyDlpackBackend
        except ImportError:
            raise TypeError(f"{name} is {kind_of(x)} on a GPU: needs torch or CuPy, which hold the "
                            "memory of such calls") from None
    backend = kind(x)
    try:
        return backend, library.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(f"{name} is {kind_of(x)} that cannot be read through DLPack: "
                        f"{one_line(error)}") from None


def same_library(backend: Any, x: Any, name: str) -> Any:
    """Another array of the same call, which must be of the same library (or a plain buffer)."""
    other, array = resolve(x, name)
    if other.kind != backend.kind:
        raise TypeError(f"{name} is {kind_of(x)}, x is of {backend.name}: give one library's")
    return array


def _numpy_view(x: Any, name: str) -> numpy.ndarray:
    try:
        try:
            return numpy.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError):
            # Before NumPy learns bfloat16: its patterns, under ml_dtypes' name.
            if "bfloat16" not in str(getattr(x, "dtype", "")):
                raise
        from . import _native

        patterns = _native.bf16_patterns(x)
    except (BufferError, RuntimeError, SystemError, TypeError, ValueError) as error:
        raise TypeError(f"{name} is {kind_of(x)} that cannot be read through DLPack: "
                        f"{one_line(error)}") from None
    return patterns.view(_bfloat16())


# qmlp.mlx's own question, once it is asked.
_mlx_array_id: Any = None


def _refuse_traced(x: Any) -> None:
    """Refuses an mx.array that stands for another in mx.grad, mx.vmap or mx.compile. In some of them its
    numbers could be read, and its gradient would silently be zero. Only qmlp.mlx can tell."""
    global _mlx_array_id
    if _mlx_array_id is None:
        try:
            from .mlx._load import native
        except ImportError:
            _mlx_array_id = id
        else:
            _mlx_array_id = native.array_id
    if _mlx_array_id(x) < 0:
        raise TypeError("an array is traced by mx.grad, mx.vmap or mx.compile, which see the ops of "
                        "qmlp.mlx only: needs those")


__all__ = ["CPU", "CUDA", "HOST", "Device", "StridesError", "device_name", "no_forward_mode",
           "release_caches", "resolve", "same_library", "torch_backend", "when_torch_starts"]
