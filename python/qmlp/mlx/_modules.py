"""Modules of mlx.nn and mlx-lm with their arithmetic replaced.

A module keeps its place, name, parameters and class hierarchy; only its class is swapped for a
subclass here. Its `weight`, `scales` and `biases` become lazy arrays that unpack the original bits
when somebody evaluates them.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
import numpy

from .. import _dtypes
from ._load import mx, native

_F32 = _dtypes.F32
_QUANTIZED = ("weight", "scales", "biases")
_FROZEN = frozenset(_QUANTIZED)


class Packed:
    """What a patched module runs on: the packed weight, and the arrays that stand for it."""

    __slots__ = ("weight", "ids", "keeps_arrays")

    def __init__(self, module: nn.Module, weight: Any, keeps_arrays: bool = False) -> None:
        self.weight = weight
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

    def __deepcopy__(self, memo: Any) -> "Packed":
        copied = object.__new__(Packed)
        copied.weight, copied.ids, copied.keeps_arrays = self.weight, self.ids, self.keeps_arrays
        return copied

    def is_current(self, module: nn.Module) -> bool:
        """False when a parameter was replaced since. A traced stand-in counts as the same."""
        return native.is_current(module, self.ids)


def pack_module(module: nn.Module, activation: int) -> Packed:
    """Packs a QuantizedLinear's or QuantizedEmbedding's own arrays."""
    parts = [module[name] for name in _QUANTIZED]
    weight = native.pack([parts], [(module.bits, module.group_size)], activation)
    # On GPUs an embedding's rows are looked up by MLX, in the arrays as they are.
    keeps = isinstance(module, nn.QuantizedEmbedding) and native.device() != "cpu"
    return Packed(module, weight, keeps)


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
            packed = self._qmlp = pack_module(self, code)
        return packed.weight


class QuantizedLinear(_Patched, nn.QuantizedLinear):
    """nn.QuantizedLinear on qmlp.mlx.quantized_linear."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self._qmlp_weight()
        if weight is None:
            return super().__call__(x)
        return native.quantized_linear(x, weight, self.get("bias"), None, None)


class QuantizedEmbedding(_Patched, nn.QuantizedEmbedding):
    """nn.QuantizedEmbedding that is also the head: rows are looked up in the packed weight."""

    def __call__(self, x: mx.array) -> mx.array:
        weight = self._qmlp_weight()
        if weight is None or self._qmlp.keeps_arrays:
            return super().__call__(x)
        codes, scales, biases = native.unpack(weight, x, None)
        return native.dequantize_rows(codes, scales, biases, self.bits, self.group_size, None)

    def as_linear(self, x: mx.array) -> mx.array:
        weight = self._qmlp_weight()
        if weight is None:
            return super().as_linear(x)
        return native.quantized_linear(x, weight, None, None, None)


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm as one task."""

    def __call__(self, x: mx.array) -> mx.array:
        return native.rms_norm(x, self["weight"], self.eps, None)


class RoPE(nn.RoPE):
    """nn.RoPE as one task, where its offset is a number."""

    _qmlp_frequencies: Any

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if type(offset) is not int:
            return super().__call__(x, offset)
        return native.rope(x, self._qmlp_frequencies, self.dims, self.traditional, self.base,
                           self.scale, offset, None)


def rope_frequencies(module: nn.RoPE) -> mx.array:
    """As MLX computes them."""
    half = module.dims // 2
    step = numpy.log(numpy.float32(module.base)) / numpy.float32(half)
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * mx.array(step, mx.float32))
    mx.eval(frequencies)
    return frequencies


class FusedMLP(nn.Module):
    """Mixed into an MLP's own class: gate, up and down in one op, while they are as patched."""

    _qmlp_gate_up: Any

    def __call__(self, x: mx.array) -> mx.array:
        gate, up, down = self["gate_proj"], self["up_proj"], self["down_proj"]
        # A LoRA layer, say, may have taken a projection's place; then its own code runs.
        if type(gate) is type(up) is type(down) is QuantizedLinear:
            whole, gate_half, up_half = self._qmlp_gate_up
            if gate._qmlp_weight() is gate_half and up._qmlp_weight() is up_half:
                down_weight = down._qmlp_weight()
                if down_weight is not None:
                    return native.fused_mlp(x, whole, down_weight, gate.get("bias"),
                                            up.get("bias"), down.get("bias"), None, None)
        return super().__call__(x)  # type: ignore[misc]


_fused_classes: dict[type, type] = {}


def fused_class(original: type) -> type:
    """The MLP class `original` with FusedMLP in front, made once."""
    made = _fused_classes.get(original)
    if made is None:
        made = type(original.__name__, (FusedMLP, original), {
            "__module__": original.__module__, "__doc__": original.__doc__})
        _fused_classes[original] = made
    return made
