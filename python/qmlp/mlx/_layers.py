"""Decoder layers of the Llama form as one op each.

A patched layer keeps its class hierarchy, its parts and its code. When it meets arrays that the op is
for, the op runs; otherwise (a function that is being traced, a batched or quantized cache, an adapter
in a projection's place) its own code does, on the patched parts.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
from typing import Any

import mlx.nn as nn

from . import _modules
from ._load import mx, native

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")

# Attention of Llama-type models as it is written in mlx-lm, with the names of the numbers of heads.
_ATTENTION = """
B, L, {D} = x.shape
queries, keys, values = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
queries = {queries}
keys = {keys}
values = values.reshape(B, L, self.{kv_heads}, -1).transpose(0, 2, 1, 3)
if cache is not None:
    queries = self.rope(queries, offset=cache.offset)
    keys = self.rope(keys, offset=cache.offset)
    keys, values = cache.update_and_fetch(keys, values)
else:
    queries = self.rope(queries)
    keys = self.rope(keys)
{out} = scaled_dot_product_attention(queries, keys, values, cache=cache, scale=self.scale, mask=mask)
{out} = {out}.transpose(0, 2, 1, 3).reshape(B, L, -1)
return self.o_proj({out})
"""
_PLAIN = {"queries": "queries.reshape(B, L, self.{heads}, -1).transpose(0, 2, 1, 3)",
          "keys": "keys.reshape(B, L, self.{kv_heads}, -1).transpose(0, 2, 1, 3)"}
_NORMED = {"queries": "self.q_norm(queries.reshape(B, L, self.{heads}, -1)).transpose(0, 2, 1, 3)",
           "keys": "self.k_norm(keys.reshape(B, L, self.{kv_heads}, -1)).transpose(0, 2, 1, 3)"}


def _attention_text(form: dict[str, str], heads: str, kv_heads: str, D: str, out: str) -> str:
    filled = {name: text.format(heads=heads, kv_heads=kv_heads) for name, text in form.items()}
    return _ATTENTION.format(kv_heads=kv_heads, D=D, out=out, **filled).strip()


# text: (names of the numbers of heads, whether q and k have norms)
_ATTENTION_CALLS = {
    _attention_text(_PLAIN, "n_heads", "n_kv_heads", "D", "output"):
        ("n_heads", "n_kv_heads", False),
    _attention_text(_NORMED, "n_heads", "n_kv_heads", "D", "output"):
        ("n_heads", "n_kv_heads", True),
    _attention_text(_PLAIN, "num_heads", "num_key_value_heads", "_", "attn_output"):
        ("num_heads", "num_key_value_heads", False),
}
_BLOCK_CALL = """
r = self.self_attn(self.input_layernorm(x), mask, cache)
h = x + r
r = self.mlp(self.post_attention_layernorm(h))
out = h + r
return out
""".strip()


@functools.cache
def call_definition(call: Any) -> ast.FunctionDef | None:
    """How a class's __call__ is written; None where it is no plain function, or a wrapped one."""
    if not isinstance(call, types.FunctionType) or hasattr(call, "__wrapped__"):
        return None
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(call))).body[0]
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    return function if isinstance(function, ast.FunctionDef) else None


@functools.cache
def _call_text(call: Any) -> str | None:
    """The body of a __call__(self, x, mask, cache), without comments; None for another."""
    function = call_definition(call)
    if function is None:
        return None
    if [argument.arg for argument in function.args.args] != ["self", "x", "mask", "cache"]:
        return None
    return "\n".join(ast.unparse(statement) for statement in function.body)


def attention_form(kind: type) -> tuple[str, str, bool] | None:
    """How a class's attention is written, when it is the Llama form."""
    form = _ATTENTION_CALLS.get(_call_text(kind.__call__) or "")
    if form is None:
        return None
    from mlx_lm.models.base import scaled_dot_product_attention as own

    same = kind.__call__.__globals__.get("scaled_dot_product_attention") is own
    return form if same else None


def is_llama_block(kind: type) -> bool:
    """Whether a class's __call__ is the Llama block and nothing else, by its source."""
    return _call_text(kind.__call__) == _BLOCK_CALL


def no_rows() -> None:
    """What a pickled cache has in the place of rows in the kernels' layout."""
    return None


class _Counted:
    """To learn what sys.getrefcount says of an attribute that nobody else refers to."""

    def __init__(self) -> None:
        self.keys = object()


def _references(cache: Any) -> int:
    return sys.getrefcount(cache.keys)


_UNSHARED = _references(_Counted())


@functools.cache
def _cache_class() -> type:
    from mlx_lm.models.cache import KVCache

    return KVCache


def _run(layer: Any, x: mx.array, mask: Any, cache: Any) -> Any:
    """The op's result, the cache brought up to date; None where the op is not for this call."""
    if not isinstance(x, mx.array):
        return None  # the layer's own code refuses it
    # "causal" is how mlx-lm says that no mask is needed but the usual one.
    if x.ndim != 3 or not (mask is None and x.shape[1] == 1
                           or isinstance(mask, str) and mask == "causal"):
        return None
    if cache is None:
        made = layer.run(x, False, None, None, None, 0, False)
        return None if made is None else made[0]
    if type(cache) is not _cache_class():
        return None
    unshared = (sys.getrefcount(cache.keys) <= _UNSHARED
                and sys.getrefcount(cache.values) <= _UNSHARED)
    made = layer.run(x, True, cache.__dict__.get("_qmlp_rows"), cache.keys, cache.values,
                     cache.offset, unshared)
    if made is None:
        return None
    out, cache.keys, cache.values, cache._qmlp_rows = made
    cache.offset += x.shape[1]
    return out


def _fill_step(cache: Any) -> None:
    """Makes room in a cache as its own code does, by whole steps: on a GPU the op's arrays end where the
    cache ends, and MLX has its fast attention for whole steps alone."""
    if type(cache) is not _cache_class() or cache.keys is None or native.device() == "cpu":
        return
    if native.array_id(cache.keys) < 0:  # a traced function's stand-in
        return
    missing = -cache.keys.shape[2] % cache.step
    if missing and cache.keys.shape[2] == cache.offset:
        widths = [(0, 0), (0, 0), (0, missing), (0, 0)]
        cache.keys, cache.values = mx.pad(cache.keys, widths), mx.pad(cache.values, widths)


def _rope_parts(rope: Any) -> dict[str, Any] | None:
    """What the op needs to know of a rope module; None for a kind that it does not compute."""
    if type(rope) in (nn.RoPE, _modules.RoPE):
        return {"frequencies": _modules.rope_frequencies(rope), "traditional": bool(rope.traditional),
                "rope_scale": float(rope.scale), "rope_dims": int(rope.dims),
                "rope_base": float(rope.base)}
    from mlx_lm.models.rope_utils import Llama3RoPE

    if type(rope) is Llama3RoPE:
        # As mx.fast.rope uses them.
        frequencies = mx.reciprocal(rope._freqs.astype(mx.float32))
        mx.eval(frequencies)
        return {"frequencies": frequencies, "traditional": bool(rope.traditional),
                "rope_scale": 1.0, "rope_dims": int(rope.dims), "rope_periods": rope._freqs}
    return None


def _is_norm(module: Any) -> bool:
    return type(module) in (nn.RMSNorm, _modules.RMSNorm)


class _Whole(nn.Module):
    """What fused attention and fused blocks share."""

    _qmlp_layer: Any  # (what the op was made of, the op, what sees a change in it), or None

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        op = self._qmlp_op()
        out = None if op is None else _run(op, x, mask, cache)
        if out is not None:
            return out
        _fill_step(cache)
        return super().__call__(x, mask, cache)  # type: ignore[misc]

    def _qmlp_op(self) -> Any:
        """The op for the parts as they are now; None where they do not make one."""
        held = self._qmlp_layer
        if held is not None and held[2] is not None:
            answer = held[2].check()
            if answer == 0:
                return held[1]
            if answer == 2:  # a traced function's stand-ins
                return None
        return self._qmlp_make()

    def _qmlp_make(self) -> Any:
        places = [(*place, place[0][place[1]]) for place in self._qmlp_places()]
        modules = [module for _, _, module in places]
        sources = [(module, name) for module in modules
                   for name in (*_ARRAYS, "_freqs") if name in module or name == "bias"]
        if native.array_ids([module.get(name) for module, name in sources]) is None:
            return None
        parts = self._qmlp_parts()
        op = None if parts is None else native.Layer(parts)
        # Read after the parts: packing a layer again hands out other arrays.
        ids = native.array_ids([module.get(name) for module, name in sources])
        numbers = [(module, name, module.__dict__[name]) for module in (self, *modules)
                   for name in _NUMBERS if name in module.__dict__]
        guard = native.Guard(places, sources, ids, numbers)
        object.__setattr__(self, "_qmlp_layer", (modules, op, guard))
        return op

    def _qmlp_places(self) -> list[tuple[Any, str]]:
        """Where the modules are that the op is made of: each one's container and name."""
        raise NotImplementedError

    def _qmlp_parts(self) -> dict[str, Any] | None:
        raise NotImplementedError


_ARRAYS = ("weight", "scales", "biases", "bias")
# What modules hold beside arrays that an op was made of: attention's, norms', rotations'.
_NUMBERS = ("scale", "n_heads", "n_kv_heads", "num_heads", "num_key_value_heads", "eps", "dims",
            "traditional", "base")


def _attention_places(attention: Any) -> list[tuple[Any, str]]:
    names = (*_PROJECTIONS, "rope", *(("q_norm", "k_norm") if attention._qmlp_form[2] else ()))
    return [(attention, name) for name in names]


def _attention_parts(attention: Any, form: tuple[str, str, bool]) -> dict[str, Any] | None:
    heads, kv_heads, normed = form
    parts: dict[str, Any] = {}
    for name in _PROJECTIONS:
        projection = attention[name]
        if type(projection) is not _modules.QuantizedLinear:
            return None
        weight = projection._qmlp_weight()
        if weight is None:
            return None
        parts[name[0]] = weight
        parts[f"{name[0]}_bias"] = projection.get("bias")
    if normed:
        for name in ("q_norm", "k_norm"):
            if not _is_norm(attention[name]):
                return None
            parts[name] = attention[name]["weight"]
            parts[f"{name[0]}_eps"] = float(attention[name].eps)
    rope = _rope_parts(attention["rope"])
    if rope is None:
        return None
    parts.update(rope)
    num_heads = int(getattr(attention, heads))
    if num_heads < 1 or parts["q"].N % num_heads != 0:
        return None
    parts.update(num_heads=num_heads, num_kv_heads=int(getattr(attention, kv_heads)),
                 head_dim=parts["q"].N // num_heads, scale=float(attention.scale))
    return parts


class FusedAttention(_Whole):
    """Mixed into an attention's own class: projections, rotation, cache and attention in one op."""

    def _qmlp_places(self) -> list[tuple[Any, str]]:
        return _attention_places(self)

    def _qmlp_parts(self) -> dict[str, Any] | None:
        return _attention_parts(self, self._qmlp_form)


class FusedBlock(_Whole):
    """Mixed into a block's own class: the whole layer in one op."""

    def _qmlp_places(self) -> list[tuple[Any, str]]:
        attention, mlp = self["self_attn"], self["mlp"]
        if not isinstance(attention, FusedAttention) or not isinstance(mlp, _modules.FusedMLP):
            return [(self, "self_attn"), (self, "mlp")]
        return [(self, "self_attn"), *_attention_places(attention), (self, "mlp"),
                *((mlp, name) for name in _MLP), *((self, name) for name in _NORMS)]

    def _qmlp_parts(self) -> dict[str, Any] | None:
        attention, mlp = self["self_attn"], self["mlp"]
        if not isinstance(attention, FusedAttention) or not isinstance(mlp, _modules.FusedMLP):
            return None
        parts = attention._qmlp_parts()
        if parts is None or not all(_is_norm(self[name]) for name in _NORMS):
            return None
        projections = [mlp[name] for name in _MLP]
        if any(type(projection) is not _modules.QuantizedLinear for projection in projections):
            return None
        weights = mlp._qmlp_weights()
        if weights is None:
            return None
        parts.update(gate_up=weights[0], down=weights[1])
        for name, projection in zip(("gate_bias", "up_bias", "down_bias"), projections):
            parts[name] = projection.get("bias")
        for short, name in (("input", _NORMS[0]), ("post", _NORMS[1])):
            parts[f"{short}_norm"] = self[name]["weight"]
            parts[f"{short}_eps"] = float(self[name].eps)
        return parts


_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")


def has_attention_parts(module: nn.Module) -> bool:
    return all(isinstance(module.get(name), nn.Module) for name in (*_PROJECTIONS, "rope"))


def has_block_parts(module: nn.Module) -> bool:
    return all(isinstance(module.get(name), nn.Module) for name in ("self_attn", "mlp", *_NORMS))


_fused_classes: dict[tuple[type, type], type] = {}


def fused_class(kind: type, original: type) -> type:
    """The class `original` with `kind` in front, made once."""
    made = _fused_classes.get((kind, original))
    if made is None:
        made = type(original.__name__, (kind, original), {
            "__module__": original.__module__, "__doc__": original.__doc__})
        _fused_classes[(kind, original)] = made
    return made


def fuse(kind: type, module: Any) -> None:
    """Makes `module` a fused one of `kind`, its class and nothing else."""
    forget(module)
    module.__class__ = fused_class(kind, type(module))


def forget(module: Any) -> None:
    """Makes a fused module's op anew at its next call."""
    object.__setattr__(module, "_qmlp_layer", None)


def unfuse(module: Any) -> None:
    module.__class__ = type(module).__bases__[1]
    for name in ("_qmlp_layer", "_qmlp_form"):
        if name in module.__dict__:
            object.__delattr__(module, name)
