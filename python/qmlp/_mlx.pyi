from collections.abc import Sequence

import mlx.core


class PackedWeight:
    """
    Weights re-laid for the kernels, made by `qmlp.mlx.pack`: one array (a linear layer) or two
    (gate and up). Immutable; holds the source's own bits.
    """

    @property
    def N(self) -> int:
        """Output features."""

    @property
    def K(self) -> int:
        """Input features."""

    @property
    def num_parts(self) -> int:
        """1, or 2 for gate and up."""

    @property
    def nbytes(self) -> int:
        """Bytes that the packed form owns."""

    def part(self, index: int) -> PackedWeight:
        """
        The gate (0) or up (1) half as a linear weight, which shares the memory on a CPU.
        """

    def __deepcopy__(self, arg: object, /) -> object: ...

def array_id(arg: mlx.core.array, /) -> int: ...

def is_current(arg0: object, arg1: Sequence[int], /) -> bool: ...

def device() -> str: ...

def gpu_refusal() -> str: ...

def gpu_mismatch() -> str: ...

def buffer_device(arg: mlx.core.array, /) -> int: ...

def probe(arg: mlx.core.array, /) -> int: ...

def pack(parts: Sequence[Sequence[mlx.core.array]], formats: Sequence[tuple[int, int]], activation: int, segments: int) -> PackedWeight: ...

def quantized_linear(x: mlx.core.array, weight: PackedWeight, linear_bias: mlx.core.array | None, residual: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def fused_swiglu(x: mlx.core.array, gate_up: PackedWeight, gate_bias: mlx.core.array | None, up_bias: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def fused_mlp(x: mlx.core.array, gate_up: PackedWeight, down: PackedWeight, gate_bias: mlx.core.array | None, up_bias: mlx.core.array | None, down_bias: mlx.core.array | None, residual: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def rms_norm(x: mlx.core.array, weight: mlx.core.array, eps: float, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def rope(x: mlx.core.array, inv_freqs: mlx.core.array, dims: int, traditional: bool, base: float, scale: float, offset: int, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def dequantize_rows(codes: mlx.core.array, scales: mlx.core.array, biases: mlx.core.array, bits: int, group_size: int, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def unpack(weight: PackedWeight, ids: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> list[mlx.core.array]: ...

class Guard:
    def __init__(self, arg0: list, arg1: list, arg2: list, arg3: list, /) -> None: ...

    def check(self) -> int: ...

    def __deepcopy__(self, arg: object, /) -> None: ...

class KvRows:
    def __deepcopy__(self, arg: object, /) -> None: ...

    def __reduce__(self) -> tuple: ...

class Layer:
    def __init__(self, arg: dict, /) -> None: ...

    def run(self, x: mlx.core.array, cached: bool, rows: object | None, keys: object | None, values: object | None, offset: int, unshared: bool) -> object: ...

    def __deepcopy__(self, arg: object, /) -> object: ...

def array_ids(arg: list, /) -> object: ...
