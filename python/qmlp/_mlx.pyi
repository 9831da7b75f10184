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

    def spec(self, arg: int, /) -> tuple: ...

    def kernel_name(self, arg0: int, arg1: int, /) -> str: ...

    def part(self, arg: int, /) -> PackedWeight: ...

    def __deepcopy__(self, arg: object, /) -> object: ...

def array_id(arg: mlx.core.array, /) -> int: ...

def probe(arg: mlx.core.array, /) -> int: ...

def pack(parts: Sequence[Sequence[mlx.core.array]], formats: Sequence[tuple[int, int]], activation: int) -> PackedWeight: ...

def quantized_linear(x: mlx.core.array, weight: PackedWeight, linear_bias: mlx.core.array | None, residual: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def fused_swiglu(x: mlx.core.array, gate_up: PackedWeight, gate_bias: mlx.core.array | None, up_bias: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def fused_mlp(x: mlx.core.array, gate_up: PackedWeight, down: PackedWeight, gate_bias: mlx.core.array | None, up_bias: mlx.core.array | None, down_bias: mlx.core.array | None, residual: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def rms_norm(x: mlx.core.array, weight: mlx.core.array, eps: float, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def rope(x: mlx.core.array, inv_freqs: mlx.core.array, dims: int, traditional: bool, base: float, scale: float, offset: int, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> mlx.core.array: ...

def unpack(weight: PackedWeight, ids: mlx.core.array | None, stream: mlx.core.Stream | mlx.core.ThreadLocalStream | mlx.core.Device | mlx.core.DeviceType | None) -> list[mlx.core.array]: ...
