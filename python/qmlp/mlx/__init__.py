"""The ops on mx.array, lazy like MLX's own, and `patch`, which makes an mlx-lm model run on them.

    packed = qmlp.mlx.pack(qmlp.mlx.quantize(w))
    y = qmlp.mlx.quantized_linear(x, packed)

    model, tokenizer = mlx_lm.load(path)
    print(qmlp.mlx.patch(model))

Results have MLX's promoted type of x and the scales; sums are qmlp's (docs/numerics.md): each row's
bits are the same for any number of rows and threads. The ops work in mx.compile, shapeless too, in
mx.grad, mx.vjp and mx.jvp with respect to x, and in mx.vmap over rows.
"""

from __future__ import annotations

from typing import Any

from ._load import mx, native  # first: says what does not fit
from .. import _dtypes
from .._mlx import PackedWeight
from .._plans import (
    KernelVerdict,
    LinearProblem,
    Plan,
    QuantSpec,
    Support,
    SwigluProblem,
    explain,
    supports,
)
from .._weights import QuantizedTensor
from .._weights import dequantize as _dequantize
from . import _modules

def quantize(w: mx.array, *, bits: int = 4, group_size: int = 64) -> QuantizedTensor:
    """mx.quantize on the CPU, lazily: w [..., N, K]. Unpacks as codes, scales, biases."""
    codes, scales, biases = mx.quantize(w, group_size=group_size, bits=bits, stream=mx.cpu)
    return QuantizedTensor(codes, scales, biases, bits, group_size)


def dequantize(weight: QuantizedTensor, *, dtype: Any = None) -> mx.array:
    """The weight [..., N, K] that the ops compute with: exact, rounded once to dtype (by default the
    type of the scales), where MLX's CPU code rounds twice."""
    return _dequantize(weight, dtype=weight.scales.dtype if dtype is None else dtype)


def pack(
    weight: QuantizedTensor | mx.array, up: QuantizedTensor | mx.array | None = None, *,
    activation: Any = None, segments: int = 0,
) -> PackedWeight:
    """Re-lays a weight for the kernels, once; the arrays need not be kept.

    weight: a QuantizedTensor [N, K], or floats [N, K]. up: the second weight of a SwiGLU, `weight`
    being its gate. activation: the type of x that is expected, by default that of the scales; x of
    another type packs the weight again. segments: parts that sums over K have on a GPU, 1 for MLX's
    own bits at eight rows and more, 0 for the plan's choice. Evaluates the arrays. Raises
    ValueError for shapes and formats that no kernel takes.
    """
    _modules.check_segments(segments)
    parts, formats, types = [], [], []
    for source in (weight,) if up is None else (weight, up):
        if isinstance(source, QuantizedTensor):
            parts.append([source.codes, source.scales, source.biases])
            formats.append((source.bits, source.group_size))
            types.append(source.scales.dtype)
        elif isinstance(source, mx.array):
            parts.append([source])
            formats.append((0, 0))
            types.append(source.dtype)
        else:
            raise TypeError(f"weight is a {type(source).__name__}, needs a QuantizedTensor or an "
                            "mx.array")
    code = _promoted(types) if activation is None else _dtypes.code_of(activation)
    return native.pack(parts, formats, code, segments)


def _promoted(types: list[Any]) -> int:
    codes = {_dtypes.code_of(dtype) for dtype in types}
    return codes.pop() if len(codes) == 1 else _dtypes.F32


def _packed(weight: Any) -> PackedWeight:
    return weight if isinstance(weight, PackedWeight) else pack(weight)


def quantized_linear(
    x: mx.array, weight: PackedWeight, *, linear_bias: mx.array | None = None,
    residual: mx.array | None = None, stream: Any = None,
) -> mx.array:
    """out[..., N] = x[..., K] * w^T (+ linear_bias [N]) (+ residual).

    weight: from `pack` (a QuantizedTensor is packed at each call). The type is MLX's promotion of x
    and the scales: bf16 with f16 scales gives f32. Raises ValueError for shapes and types.
    """
    return native.quantized_linear(x, _packed(weight), linear_bias, residual, stream)


def fused_swiglu(
    x: mx.array, gate_up: PackedWeight, *, gate_bias: mx.array | None = None,
    up_bias: mx.array | None = None, stream: Any = None,
) -> mx.array:
    """out[..., intermediate] = silu(x * gate^T) * (x * up^T), gate_up from `pack(gate, up)`."""
    return native.fused_swiglu(x, gate_up, gate_bias, up_bias, stream)


def fused_mlp(
    x: mx.array, gate_up: PackedWeight, down: PackedWeight, *, gate_bias: mx.array | None = None,
    up_bias: mx.array | None = None, down_bias: mx.array | None = None,
    residual: mx.array | None = None, stream: Any = None,
) -> mx.array:
    """quantized_linear(fused_swiglu(x, gate_up), down) (+ residual), with the bits of the two."""
    return native.fused_mlp(x, gate_up, down, gate_bias, up_bias, down_bias, residual, stream)


def unpack(weight: PackedWeight, *, stream: Any = None) -> tuple[mx.array, ...]:
    """The codes, scales and biases of a linear weight, bit for bit (floats: the weight alone)."""
    return tuple(native.unpack(weight, None, stream))


from ._patch import PatchReport, patch, unpatch  # noqa: E402  (needs the ops above)

__all__ = [
    "KernelVerdict",
    "LinearProblem",
    "PackedWeight",
    "PatchReport",
    "Plan",
    "QuantSpec",
    "QuantizedTensor",
    "Support",
    "SwigluProblem",
    "dequantize",
    "explain",
    "fused_mlp",
    "fused_swiglu",
    "pack",
    "patch",
    "quantize",
    "quantized_linear",
    "supports",
    "unpack",
    "unpatch",
]
