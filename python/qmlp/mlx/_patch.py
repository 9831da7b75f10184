"""patch and unpatch: an mlx-lm model's MLPs and linear layers on qmlp's ops, in place."""

from __future__ import annotations

import ast
import copy
import functools
from typing import Any

import mlx.nn as nn

from .. import _dtypes
from .._plans import LinearProblem, QuantSpec, supports
from .._words import kind_of
from . import _layers, _modules
from ._load import mx, native

# The MLP of Llama-type models, as it is written in mlx-lm.
_MLP_CALLS = (
    "self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))",
    "self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))",
)


class PatchReport:
    """What `patch` did: `replaced` and `left` are lists of (path, what or why).

    Prints as a summary. As a context manager it unpatches at the end, unless the model was patched
    before.
    """

    def __init__(self, model: nn.Module, activation: str, device: str) -> None:
        self.model = model
        self.activation = activation
        self.device = device
        self.replaced: list[tuple[str, str]] = []
        self.left: list[tuple[str, str]] = []
        self._was_patched = any(isinstance(module, (_modules._Patched, _modules.FusedMLP))
                                for module in model.modules())

    def __enter__(self) -> PatchReport:
        return self

    def __exit__(self, *raised: Any) -> None:
        if not self._was_patched:
            unpatch(self.model)

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f", on {self.device}"
        lines = [f"qmlp.mlx: activations {self.activation}{where}"]
        for title, entries in (("replaced", self.replaced), ("left alone", self.left)):
            groups: dict[str, list[str]] = {}
            for path, what in entries:
                groups.setdefault(what, []).append(path)
            for what, paths in groups.items():
                where = paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]}"
                lines.append(f"  {title}: {len(paths)} x {what} ({where})")
            if not entries:
                lines.append(f"  {title}: nothing")
        return "\n".join(lines)

    __repr__ = __str__


def patch(model: nn.Module, *, activation: Any = None, small_ops: bool = True,
          segments: int = 0) -> PatchReport:
    """Makes a model's quantized linear layers and MLPs run on qmlp's ops, in place.

    Any mlx-lm model with nn.QuantizedLinear layers; MLPs of the Llama form (down(silu(gate) * up))
    become one op. Each layer's arrays are freed once they are packed, and come back lazily, bit for
    bit, when `model.parameters()` are evaluated or saved. Mixtures of experts, float layers and
    other quantization modes are left alone and reported.

    The weights are packed for the default device; a batch of sequences becomes rows of one product.

    activation: the type of the model's activations, by default that of its embedding. Another type
    at a call packs that layer again. small_ops: layers of the Llama form as a whole, and on a CPU
    nn.RMSNorm and nn.RoPE, each as one task with MLX's roundings, where MLX runs a dozen tiny ops.
    segments: parts that a product's sums over K have on a GPU: 1 for MLX's own bits at eight rows
    and more, 2, 4 or 8, or 0 for what is fast for each shape (docs/numerics.md).

    Returns a PatchReport; `with qmlp.mlx.patch(model):` unpatches at the end. A patched model may
    be patched again, also with other options. Lazy parameters are evaluated by the thread that
    patched last. Raises TypeError for something that is no nn.Module, ValueError for another
    number of segments, RuntimeError when the default device is a GPU on which ops cannot run.
    """
    _modules.check_segments(segments)
    _check_model(model)
    device = native.device()
    if mx.default_device() == mx.gpu and device == "cpu":
        raise RuntimeError(f"qmlp.mlx cannot run on the default device {mx.default_device()}: "
                           f"{native.gpu_refusal()}; mx.set_default_device(mx.cpu) runs on the CPU")
    layers = small_ops
    small_ops = small_ops and device == "cpu"
    modules = dict(sorted(model.named_modules(), key=lambda named: _natural(named[0])))
    code = _activation_of(modules) if activation is None else _dtypes.code_of(activation, "activation")
    report = PatchReport(model, _dtypes.NAMES[code], device)
    if not small_ops:
        _restore_small_ops(model)
    if not layers:
        _unfuse_layers(model)
    done: set[int] = set()
    head = any(path.rpartition(".")[2] == "lm_head" for path in modules)
    for path, module in modules.items():
        if isinstance(module, _modules.FusedMLP) or _has_mlp_parts(module):
            _patch_mlp(path, module, code, segments, report, done)
    for path, module in modules.items():
        if id(module) in done:
            continue
        if isinstance(module, nn.QuantizedEmbedding):
            if head:
                report.left.append((path, "embedding that is only looked up"))
            else:
                _patch_one(path, module, code, segments, report, _modules.QuantizedEmbedding)
        elif isinstance(module, nn.QuantizedLinear):
            _patch_one(path, module, code, segments, report, _modules.QuantizedLinear)
        elif small_ops and type(module) in (nn.RMSNorm, _modules.RMSNorm):
            _become(module, _modules.RMSNorm)
            report.replaced.append((path, "RMSNorm"))
        elif small_ops and type(module) in (nn.RoPE, _modules.RoPE):
            _become(module, _modules.RoPE)
            report.replaced.append((path, "RoPE"))
        else:
            reason = _why_left(module)
            if reason is not None:
                report.left.append((path, reason))
    if layers:
        for path, module in modules.items():
            _fuse_layer(path, module, report)
    mx.clear_cache()
    return report


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {kind_of(model)}, needs an mlx.nn.Module")


def _fuse_layer(path: str, module: nn.Module, report: PatchReport) -> None:
    """A block of the Llama form in one op, or its attention alone, where its parts allow it."""
    if not _layers.has_block_parts(module):
        return
    attention = module["self_attn"]
    if isinstance(attention, _layers.FusedAttention):
        _layers.forget(attention)
    elif _layers.has_attention_parts(attention):
        form = _layers.attention_form(type(attention))
        if form is not None:
            object.__setattr__(attention, "_qmlp_form", form)
            _layers.fuse(_layers.FusedAttention, attention)
    if isinstance(module, _layers.FusedBlock):
        _layers.forget(module)
    elif _layers.is_llama_block(type(module)):
        _layers.fuse(_layers.FusedBlock, module)
    for fused, where, what in ((module, path, "whole layer"),
                               (attention, f"{path}.self_attn", "attention")):
        if not isinstance(fused, (_layers.FusedBlock, _layers.FusedAttention)):
            continue
        if fused._qmlp_op() is None:
            _layers.unfuse(fused)
        else:
            report.replaced.append((where, what))
            return


def unpatch(model: nn.Module) -> int:
    """Undoes `patch`: classes, and the arrays' original bits, a layer at a time.

    Returns the number of modules that were restored; 0 for a model that is not patched. Raises
    TypeError for something that is no nn.Module.
    """
    _check_model(model)
    restored = _unfuse_layers(model)
    for _, module in model.named_modules():
        if isinstance(module, _modules.FusedMLP):
            _become(module, _original(module))
            object.__delattr__(module, "_qmlp_gate_up")
            restored += 1
    restored += _restore_small_ops(model)
    for _, module in model.named_modules():
        for kind in (_modules.QuantizedLinear, _modules.QuantizedEmbedding):
            if type(module) is not kind:
                continue
            # Lazy arrays belong to the thread that made them, which may be another.
            if module._qmlp.is_current(module):
                module._qmlp.hand_out(module)
            mx.eval([module[name] for name in _modules._QUANTIZED])
            if native.device() != "cpu":
                mx.clear_cache()
            _become(module, _original(module))
            object.__delattr__(module, "_qmlp")
            object.__delattr__(module, "_qmlp_activation")
            restored += 1
    return restored


def _unfuse_layers(model: nn.Module) -> int:
    fused = [module for _, module in model.named_modules()
             if isinstance(module, (_layers.FusedBlock, _layers.FusedAttention))]
    for module in fused:
        _layers.unfuse(module)
    return len(fused)


def _restore_small_ops(model: nn.Module) -> int:
    restored = 0
    for _, module in model.named_modules():
        for kind, original in ((_modules.RMSNorm, nn.RMSNorm), (_modules.RoPE, nn.RoPE)):
            if type(module) is kind:
                _become(module, original)
                restored += 1
        module.__dict__.pop("_qmlp_frequencies", None)
    return restored


def _natural(path: str) -> list[Any]:
    """Layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split(".")]


def _become(module: Any, kind: type) -> None:
    """Swaps the class and nothing else: name, place and parameters stay."""
    module.__class__ = kind


def _original(module: nn.Module) -> type:
    """The class that a patched module had."""
    return type(module).__bases__[1]


def _activation_of(modules: dict[str, nn.Module]) -> int:
    for module in modules.values():
        if isinstance(module, nn.QuantizedEmbedding):
            return _dtypes.code_of(module["scales"].dtype)
        if isinstance(module, nn.Embedding):
            return _dtypes.code_of(module["weight"].dtype)
    for module in modules.values():
        if isinstance(module, nn.QuantizedLinear) and module.mode == "affine":
            return _dtypes.code_of(module["scales"].dtype)
    return _dtypes.F32


def _refusal(module: nn.Module, code: int) -> str | None:
    """Why a quantized module stays as it is; None when it can be replaced."""
    if module.mode != "affine":
        return f"quantization mode {module.mode}"
    scales = module["scales"]
    if scales.dtype not in (mx.float32, mx.float16, mx.bfloat16):
        return f"scales are {scales.dtype}"
    N, groups = scales.shape[-2:]
    spec = QuantSpec(module.bits, module.group_size, _dtypes.NAMES[_dtypes.code_of(scales.dtype)])
    answer = supports(LinearProblem(
        N=N, K=groups * module.group_size, weight=spec,
        activation=_dtypes.NAMES[_modules.compute_code(scales, code)]), native.device())
    return None if answer else str(answer)


def _swap(module: nn.Module, kind: type, packed: _modules.Packed, code: int) -> None:
    object.__setattr__(module, "_qmlp", packed)
    object.__setattr__(module, "_qmlp_activation", code)
    _become(module, kind)


def _patch_one(path: str, module: nn.Module, code: int, segments: int, report: PatchReport,
               kind: type) -> None:
    what = "linear layer" if kind is _modules.QuantizedLinear else "embedding and head"
    if type(module) is kind:
        _patch_again(module, code, segments)
        report.replaced.append((path, what))
        return
    if type(module) is not kind.__bases__[1]:
        report.left.append((path, f"{type(module).__name__}, a class of its own"))
        return
    reason = _refusal(module, code)
    if reason is not None:
        report.left.append((path, reason))
        return
    packed = _modules.pack_module(module, _modules.compute_code(module["scales"], code), segments)
    _swap(module, kind, packed, code)
    report.replaced.append((path, what))


def _patch_again(module: nn.Module, code: int, segments: int) -> None:
    """For a patched module: what was evaluated since can be freed; other options pack again."""
    held = _modules.compute_code(module["scales"], module._qmlp_activation)
    object.__setattr__(module, "_qmlp_activation", code)
    if module._qmlp.is_current(module):
        module._qmlp.hand_out(module)
        wanted = _modules.compute_code(module["scales"], code)
        if wanted != held or module._qmlp.segments != segments:
            module._qmlp.forget()
    module._qmlp.segments = segments


def _has_mlp_parts(module: nn.Module) -> bool:
    return all(isinstance(module.get(name), nn.Module)
               for name in ("gate_proj", "up_proj", "down_proj"))


def _is_llama_mlp(kind: type) -> bool:
    """Whether a class's __call__ is the Llama MLP and nothing else, by its source."""
    call = kind.__call__
    text = _mlp_text(call)
    if text not in _MLP_CALLS:
        return False
    scope = call.__globals__
    if "swiglu" in text:
        from mlx_lm.models.activations import swiglu

        return scope.get("swiglu") is swiglu
    return scope.get("nn") is nn


@functools.cache
def _mlp_text(call: Any) -> str:
    """What a __call__(self, x) of one statement returns; empty for another."""
    function = _layers.call_definition(call)
    if function is None or len(function.body) != 1:
        return ""
    statement = function.body[0]
    names = [argument.arg for argument in function.args.args]
    if not isinstance(statement, ast.Return) or statement.value is None or len(names) != 2:
        return ""
    return ast.unparse(_Renamed(names[1]).visit(copy.deepcopy(statement.value)))


class _Renamed(ast.NodeTransformer):
    """The argument's name, whatever it is, as x."""

    def __init__(self, name: str) -> None:
        self.name = name

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == self.name:
            return ast.copy_location(ast.Name("x", node.ctx), node)
        return node


def _patch_mlp(path: str, module: nn.Module, code: int, segments: int, report: PatchReport,
               done: set[int]) -> None:
    parts = {name: module[name] for name in ("gate_proj", "up_proj", "down_proj")}
    if isinstance(module, _modules.FusedMLP):
        for part in parts.values():
            if type(part) is _modules.QuantizedLinear:
                _patch_again(part, code, segments)
                done.add(id(part))
        if module._qmlp_weights() is not None:
            report.replaced.append((path, "fused MLP"))
        else:
            report.left.append((path, "MLP not fused: a projection was replaced, is trained, or gate "
                                      "and up differ in type or shape"))
        return
    if not _is_llama_mlp(type(module)):
        if any(isinstance(part, nn.QuantizedLinear) for part in parts.values()):
            report.left.append((path, "MLP that is not down(silu(gate) * up): its layers alone"))
        return
    reason: str | None
    for name, part in parts.items():
        if type(part) is not nn.QuantizedLinear:
            reason = f"{name} is {type(part).__name__}"
        else:
            reason = _refusal(part, code)
        if reason is not None:
            report.left.append((path, f"MLP not fused: {reason}"))
            return
    gate, up, down = parts.values()
    compute = _modules.pair_code(gate, up, code)
    if isinstance(compute, str):
        report.left.append((path, f"MLP not fused: {compute}"))
        return
    whole, *halves = _modules.pack_pair(gate, up, compute, segments)
    for part, half in zip((gate, up), halves):
        _swap(part, _modules.QuantizedLinear, half, code)
        done.add(id(part))
    _swap(down, _modules.QuantizedLinear,
          _modules.pack_module(down, _modules.compute_code(down["scales"], compute), segments),
          code)
    done.add(id(down))
    object.__setattr__(module, "_qmlp_gate_up", (whole, *(half.weight for half in halves)))
    _become(module, _modules.fused_class(type(module)))
    report.replaced.append((path, "fused MLP"))


def _why_left(module: nn.Module) -> str | None:
    """The reason for modules that hold a matrix and are not replaced."""
    if isinstance(module, nn.Linear):
        return "linear layer that is not quantized"
    name = type(module).__name__
    if "Switch" in name and name.endswith("Linear"):
        return f"experts ({name})"
    if "weight" in module and "scales" in module:
        return f"{name}, a class of its own"
    return None


