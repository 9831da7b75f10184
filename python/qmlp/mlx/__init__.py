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
from .._plans import _whole
from .._weights import dequantize as _dequantize
from .._words import kind_of as _kind_of
from . import _modules
from ._explain import explained as _explained


def quantize(w: mx.array, *, bits: int = 4, group_size: int = 64) -> QuantizedTensor:
    """mx.quantize on the CPU, lazily: w [..., N, K]. Unpacks as codes, scales, biases."""
    if not isinstance(w, mx.array):
        raise TypeError(f"w is {_kind_of(w)}, needs an mx.array")
    bits, group_size = _whole("bits", bits), _whole("group_size", group_size)
    codes, scales, biases = mx.quantize(w, group_size=group_size, bits=bits, stream=mx.cpu)
    return QuantizedTensor(codes, scales, biases, bits, group_size)


def dequantize(weight: QuantizedTensor, *, dtype: Any = None) -> mx.array:
    """The weight [..., N, K] that the ops compute with: exact, rounded once to dtype (by default the
    type of the scales), where MLX's CPU code rounds twice."""
    return _dequantize(weight, dtype=dtype)


def pack(
    weight: QuantizedTensor | mx.array, up: QuantizedTensor | mx.array | None = None, *,
    activation: Any = None, segments: int = 0,
) -> PackedWeight:
    """Re-lays a weight for the kernels, once; the arrays need not be kept.

    weight: a QuantizedTensor [N, K], or floats [N, K]. up: the second weight of a SwiGLU, `weight`
    being its gate. activation: the type of x that is expected, by default that of the scales; x of
    another type packs the weight again. segments: parts that sums over K have on a GPU, 1 for MLX's
    own bits at eight rows and more, 0 for the plan's choice. Evaluates the arrays. Raises
    ValueError for shapes and formats that no kernel takes, TypeError for other types.
    """
    _modules.check_segments(segments)
    parts, formats, types = [], [], []
    given = {"weight": weight} if up is None else {"gate": weight, "up": up}
    for name, source in given.items():
        if isinstance(source, QuantizedTensor):
            parts.append([source.codes, source.scales, source.biases])
            for what, part in zip(("codes", "scales", "biases"), parts[-1]):
                if not isinstance(part, mx.array):
                    raise TypeError(f"{name}: its {what} are {_kind_of(part)}, needs an mx.array")
            formats.append((source.bits, source.group_size))
            types.append(_dtypes.code_of(source.scales.dtype, f"{name}: scales"))
        elif isinstance(source, mx.array):
            parts.append([source])
            formats.append((0, 0))
            types.append(_dtypes.code_of(source.dtype, name))
        else:
            raise TypeError(f"{name} is {_kind_of(source)}, needs a qmlp.mlx.QuantizedTensor or an "
                            "mx.array")
    if activation is not None:
        code = _dtypes.code_of(activation, "activation")
    else:  # what MLX promotes different types to
        code = types[0] if len(set(types)) == 1 else _dtypes.F32
    return native.pack(parts, formats, code, int(segments))


def _packed(weight: Any) -> Any:
    return pack(weight) if isinstance(weight, (QuantizedTensor, mx.array)) else weight


def quantized_linear(
    x: mx.array, weight: PackedWeight, *, linear_bias: mx.array | None = None,
    residual: mx.array | None = None, stream: Any = None,
) -> mx.array:
    """out[..., N] = x[..., K] * w^T (+ linear_bias [N]) (+ residual).

    weight: from `pack` (a QuantizedTensor is packed at each call). The type is MLX's promotion of x
    and the scales: bf16 with f16 scales gives f32. residual: of the result's shape, or one that MLX
    broadcasts to it. Raises ValueError for shapes and element types, TypeError for other Python types.
    """
    if type(weight) is not PackedWeight:
        weight = _packed(weight)
    try:
        return native.quantized_linear(x, weight, linear_bias, residual, stream)
    except TypeError as error:
        raise _explained("quantized_linear", error, x=x, weight=weight, linear_bias=linear_bias,
                         residual=residual, stream=stream) from None


def fused_swiglu(
    x: mx.array, gate_up: PackedWeight, *, gate_bias: mx.array | None = None,
    up_bias: mx.array | None = None, stream: Any = None,
) -> mx.array:
    """out[..., intermediate] = silu(x * gate^T) * (x * up^T), gate_up from `pack(gate, up)`."""
    try:
        return native.fused_swiglu(x, gate_up, gate_bias, up_bias, stream)
    except TypeError as error:
        raise _explained("fused_swiglu", error, x=x, gate_up=gate_up, gate_bias=gate_bias,
                         up_bias=up_bias, stream=stream) from None


def fused_mlp(
    x: mx.array, gate_up: PackedWeight, down: PackedWeight, *, gate_bias: mx.array | None = None,
    up_bias: mx.array | None = None, down_bias: mx.array | None = None,
    residual: mx.array | None = None, stream: Any = None,
) -> mx.array:
    """quantized_linear(fused_swiglu(x, gate_up), down) (+ residual), with the bits of the two."""
    try:
        return native.fused_mlp(x, gate_up, down, gate_bias, up_bias, down_bias, residual, stream)
    except TypeError as error:
        raise _explained("fused_mlp", error, x=x, gate_up=gate_up, down=down, gate_bias=gate_bias,
                         up_bias=up_bias, down_bias=down_bias, residual=residual,
                         stream=stream) from None


def unpack(weight: PackedWeight, *, stream: Any = None) -> tuple[mx.array, ...]:
    """The codes, scales and biases of a linear weight, bit for bit (floats: the weight alone)."""
    try:
        return tuple(native.unpack(weight, None, stream))
    except TypeError as error:
        raise _explained("unpack", error, weight=weight, stream=stream) from None


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
