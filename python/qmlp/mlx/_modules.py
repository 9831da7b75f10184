"""Modules of mlx.nn and mlx-lm with their arithmetic replaced.

A module keeps its place, name, parameters and class hierarchy; only its class is swapped for a
subclass here. Its `weight`, `scales` and `biases` become lazy arrays that unpack the original bits
when somebody evaluates them.
"""

from __future__ import annotations

import operator
from typing import Any

import mlx.nn as nn
import numpy

from .. import _dtypes
from .._words import shown
from ._explain import explained
from ._load import mx, native

_F32 = _dtypes.F32
_QUANTIZED = ("weight", "scales", "biases")
_FROZEN = frozenset(_QUANTIZED)


class Packed:
    """What a patched module runs on: the packed weight, and the arrays that stand for it."""

    __slots__ = ("weight", "segments", "ids", "keeps_arrays")

    def __init__(self, module: nn.Module, weight: Any, segments: int,
                 keeps_arrays: bool = False) -> None:
        self.weight = weight
        self.segments = segments  # as asked for
        self.keeps_arrays = keeps_arrays
        self.hand_out(module)

    def hand_out(self, module: nn.Module) -> None:
        """Gives the module fresh lazy arrays, so that what they held can be freed."""
        if self.keeps_arrays:
            self.ids = [native.array_id(module[name]) for name in _QUANTIZED]
            return
        arrays = native.unpack(self.weight, None, mx.cpu if native.device() == "cpu" else None)
        self.ids = [native.array_id(array) for array in arrays]
        for name, array in zip(_QUANTIZED, arrays):
            module[name] = array
        if native.device() != "cpu":
            mx.clear_cache()  # otherwise MLX's allocator keeps what was freed

    def forget(self) -> None:
        """Makes the module pack its arrays again at its next call."""
        self.ids = [0] * len(_QUANTIZED)

    def __deepcopy__(self, memo: Any) -> "Packed":
        copied = object.__new__(Packed)
        for name in self.__slots__:
            setattr(copied, name, getattr(self, name))
        return copied

    def is_current(self, module: nn.Module) -> bool:
        """False when a parameter was replaced since. A traced stand-in counts as the same."""
        return native.is_current(module, self.ids)


def check_segments(segments: int) -> None:
    try:
        known = operator.index(segments) in (0, 1, 2, 4, 8)
    except TypeError:
        known = False
    if not known:
        raise ValueError(f"segments is {shown(segments)}, needs 0, 1, 2, 4 or 8")


def pack_module(module: nn.Module, activation: int, segments: int) -> Packed:
    """Packs a QuantizedLinear's or QuantizedEmbedding's own arrays."""
    parts = [module[name] for name in _QUANTIZED]
    weight = native.pack([parts], [(module.bits, module.group_size)], activation, segments)
    # On GPUs an embedding's rows are looked up by MLX, in the arrays as they are.
    keeps = isinstance(module, nn.QuantizedEmbedding) and native.device() != "cpu"
    return Packed(module, weight, segments, keeps)


def compute_code(scales: Any, activation: int) -> int:
    """MLX's promotion of activations and scales, as a code of qmlp."""
    code = _dtypes.code_of(scales.dtype)
    return code if code == activation else _F32


class _Patched(nn.Module):
    """The part that patched linear layers and embeddings share."""

    _qmlp: Packed
    _qmlp_activation: int
    _no_grad: set[str]

    def _qmlp_weight(self) -> Any:
        """The packed weight, packed again when the parameters were replaced; None when they are
        MLX's own code's part: being trained, or of a type that has no kernels on this device."""
        if not _FROZEN <= self._no_grad:
            return None
        packed = self._qmlp
        if not packed.is_current(self):
            code = compute_code(self["scales"], self._qmlp_activation)
            if code == _F32 and native.device() != "cpu":
                return None
            packed = self._qmlp = pack_module(self, code, packed.segments)
        return packed.weight


class QuantizedLinear(_Patched, nn.QuantizedLinear):
    """nn.QuantizedLinear on qmlp.mlx.quantized_linear."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self._qmlp_weight()
        if weight is None:
            return super().__call__(x)
        try:
            return native.quantized_linear(x, weight, self.get("bias"), None, None)
        except TypeError as error:
            raise explained("QuantizedLinear", error, x=x, bias=self.get("bias")) from None


class QuantizedEmbedding(_Patched, nn.QuantizedEmbedding):
    """nn.QuantizedEmbedding that is also the head: rows are looked up in the packed weight."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self._qmlp_weight()
        if weight is None or self._qmlp.keeps_arrays:
            return super().__call__(x)
        try:
            codes, scales, biases = native.unpack(weight, x, None)
        except TypeError as error:
            raise explained("QuantizedEmbedding", error, x=x) from None
        return native.dequantize_rows(codes, scales, biases, self.bits, self.group_size, None)

    def as_linear(self, x: mx.array) -> mx.array:
        weight = self._qmlp_weight()
        if weight is None:
            return super().as_linear(x)
        try:
            return native.quantized_linear(x, weight, None, None, None)
        except TypeError as error:
            raise explained("QuantizedEmbedding", error, x=x) from None


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm as one task."""

    def __call__(self, x: mx.array) -> mx.array:
        try:
            return native.rms_norm(x, self["weight"], self.eps, None)
        except TypeError as error:
            raise explained("RMSNorm", error, x=x) from None


class RoPE(nn.RoPE):
    """nn.RoPE as one task, where its offset is a number."""

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if type(offset) is not int:
            return super().__call__(x, offset)
        try:
            return native.rope(x, rope_frequencies(self), self.dims, self.traditional, self.base,
                               self.scale, offset, None)
        except TypeError as error:
            raise explained("RoPE", error, x=x) from None


def rope_frequencies(module: nn.RoPE) -> mx.array:
    """As MLX computes them; kept by the module until its numbers change."""
    held = module.__dict__.get("_qmlp_frequencies")
    if held is not None and held[0] == module.dims and held[1] == module.base:
        return held[2]
    half = module.dims // 2
    step = numpy.log(numpy.float32(module.base)) / numpy.float32(half)
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * mx.array(step, mx.float32))
    mx.eval(frequencies)
    object.__setattr__(module, "_qmlp_frequencies", (module.dims, module.base, frequencies))
    return frequencies


def pair_code(gate: nn.Module, up: nn.Module, activation: int) -> int | str:
    """The type in which gate and up become one op, as a code of qmlp; or why they do not."""
    codes = {compute_code(part["scales"], activation) for part in (gate, up)}
    if len(codes) != 1 or gate["weight"].shape[0] != up["weight"].shape[0]:
        return "gate and up differ in type or shape"
    (code,) = codes
    for bias in (gate.get("bias"), up.get("bias")):
        if bias is not None and compute_code(bias, code) != code:
            return f"a linear bias is {bias.dtype}"
    return code


def pack_pair(gate: nn.Module, up: nn.Module, code: int,
              segments: int) -> tuple[Any, Packed, Packed]:
    """Packs gate and up as one: the whole, and what each of them runs on."""
    whole = native.pack([[part[name] for name in _QUANTIZED] for part in (gate, up)],
                        [(part.bits, part.group_size) for part in (gate, up)], code, segments)
    return whole, Packed(gate, whole.part(0), segments), Packed(up, whole.part(1), segments)


class FusedMLP(nn.Module):
    """Mixed into an MLP's own class: gate, up and down in one op, while they can be one."""

    _qmlp_gate_up: Any  # the packed pair and its halves; None where gate and up are apart

    def __call__(self, x: mx.array) -> mx.array:
        weights = self._qmlp_weights()
        if weights is None:
            return super().__call__(x)  # type: ignore[misc]
        gate, up, down = (self[name].get("bias") for name in ("gate_proj", "up_proj", "down_proj"))
        try:
            return native.fused_mlp(x, *weights, gate, up, down, None, None)
        except TypeError as error:
            raise explained("FusedMLP", error, x=x, gate_bias=gate, up_bias=up,
                            down_bias=down) from None

    def _qmlp_weights(self) -> tuple[Any, Any] | None:
        """Gate and up, and down, packed again when parameters were replaced; None where the MLP's
        own code has to run: a LoRA layer, say, took a projection's place."""
        gate, up, down = self["gate_proj"], self["up_proj"], self["down_proj"]
        if not type(gate) is type(up) is type(down) is QuantizedLinear:
            return None
        if not (_FROZEN <= gate._no_grad and _FROZEN <= up._no_grad):
            return None
        held = self._qmlp_gate_up
        if (held is None or gate._qmlp.weight is not held[1] or up._qmlp.weight is not held[2]
                or not gate._qmlp.is_current(gate) or not up._qmlp.is_current(up)):
            held = self._qmlp_pack()
        down_weight = None if held is None else down._qmlp_weight()
        return None if down_weight is None else (held[0], down_weight)

    def _qmlp_pack(self) -> Any:
        gate, up = self["gate_proj"], self["up_proj"]
        object.__setattr__(self, "_qmlp_gate_up", None)  # frees the pair before
        code = pair_code(gate, up, gate._qmlp_activation)
        if isinstance(code, str) or (code == _F32 and native.device() != "cpu"):
            return None
        whole, gate._qmlp, up._qmlp = pack_pair(gate, up, code, gate._qmlp.segments)
        object.__setattr__(self, "_qmlp_gate_up", (whole, gate._qmlp.weight, up._qmlp.weight))
        return self._qmlp_gate_up


_fused_classes: dict[type, type] = {}


def fused_class(original: type) -> type:
    """The MLP class `original` with FusedMLP in front, made once."""
    made = _fused_classes.get(original)
    if made is None:
        made = type(original.__name__, (FusedMLP, original), {
            "__module__": original.__module__, "__doc__": original.__doc__})
        _fused_classes[original] = made
    return made
