"""The model types that run, as cases: small random checkpoints that mlx-lm builds, saves and loads.

A new model type gets its row in src/io/architecture.cc and its cases here; the tests and
docs/models.md follow. Each case says which config fields it is about (`without` takes them away,
and the logits must then change), how its weights are stored, and what stays float.
"""
import dataclasses
import hashlib
import importlib
import json
import pathlib
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import MODEL_REMAPPING, load_model

PREFILL, DECODE = 24, 20
CONTEXT = 512
DTYPES = (mx.float16, mx.bfloat16, mx.float32)
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)

# Odd sizes where the format lets them be: 131 tokens, 3 or 5 groups, 3 queries a key head. Heads
# are 16 wide; a case takes one of the shapes, so that every group size divides some K.
BASE = dict(num_hidden_layers=4, vocab_size=131, rms_norm_eps=1e-5,
            max_position_embeddings=CONTEXT)
SHAPES = (
    dict(hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=2),
    dict(hidden_size=192, intermediate_size=256, num_attention_heads=12, num_key_value_heads=4),
    dict(hidden_size=128, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4),
)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    model_type: str
    name: str
    config: dict
    without: dict = dataclasses.field(default_factory=dict)  # field: value, None takes it away
    dense: tuple = ()       # ends of module paths that stay float, beside the ones no group divides
    drop: tuple = ()        # tensors taken out of the file
    quantized: bool = True
    wild: str = ""          # how the file is odd: see write()
    strict: bool = True     # False: mlx-lm's own loader trips over names that its model adds

    @property
    def id(self):
        return f"{self.model_type}_{self.name}"

    def full_config(self):
        shape = SHAPES[seed_of(self.id) % len(SHAPES)]
        config = dict(BASE, **shape, model_type=self.model_type)
        config.update(self.config)
        return {name: value for name, value in config.items() if value is not None}


def llama3(**changes):
    return dict({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                 "high_freq_factor": 4.0, "original_max_position_embeddings": 64}, **changes)


def yarn(**changes):
    return dict({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
                 "beta_fast": 4.0, "beta_slow": 1.0}, **changes)


def longrope(pairs, **changes):
    return dict({"type": "longrope", "short_factor": [1.0] * pairs,
                 "long_factor": [1.0 + 0.37 * i for i in range(pairs)],
                 "original_max_position_embeddings": 128}, **changes)


NO_SCALING = {"rope_scaling": None}
QWEN3 = dict(head_dim=32, rope_theta=1e6, tie_word_embeddings=True)
MINICPM = dict(scale_emb=12.0, scale_depth=1.4, dim_model_base=32, rope_theta=1e4)
GRANITE = dict(embedding_multiplier=12.0, attention_multiplier=0.35, residual_multiplier=0.22,
               logits_scaling=8.0, attention_bias=False, mlp_bias=False, rope_theta=1e4)
PHI3 = dict(original_max_position_embeddings=128)
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]

CASES = [
    Case("llama", "plain", {}),
    Case("llama", "bias_untied", dict(attention_bias=True, mlp_bias=True,
                                      tie_word_embeddings=False, num_key_value_heads=None)),
    Case("llama", "traditional", dict(rope_traditional=True, head_dim=20, attention_bias=True),
         without={"rope_traditional": None}),
    Case("llama", "linear", dict(rope_scaling={"type": "linear", "factor": 2.5}, mlp_bias=True),
         without=NO_SCALING),
    Case("llama", "llama3", dict(rope_scaling=llama3(), head_dim=32), without=NO_SCALING),
    Case("llama", "llama3_traditional_untied",
         dict(rope_scaling=llama3(factor=32.0), rope_traditional=True, tie_word_embeddings=False,
              attention_bias=True), without=NO_SCALING),
    Case("llama", "yarn", dict(rope_scaling=yarn()), without=NO_SCALING),
    Case("llama", "yarn_mscale", dict(rope_scaling=yarn(mscale=0.7, mscale_all_dim=0.3,
                                                        rope_type="yarn"), head_dim=40),
         without=NO_SCALING),
    Case("llama", "dynamic", dict(rope_scaling={"type": "dynamic", "factor": 4.0})),
    Case("llama", "longrope", dict(rope_scaling=longrope(8)), without=NO_SCALING),
    Case("llama", "windows", dict(layer_types=SLIDING, sliding_window=11),
         without={"layer_types": None}),
    Case("llama", "windows_of_one", dict(layer_types=SLIDING[::-1], sliding_window=1,
                                         attention_bias=True, tie_word_embeddings=False),
         without={"layer_types": None}),
    Case("llama", "floats", dict(attention_bias=True), quantized=False),
    # mlx-lm reads a module that config.json does not name by its shapes.
    Case("llama", "widths_unnamed", dict(attention_bias=True), wild="unnamed"),
    Case("llama", "shards_and_extras", {}, dense=("embed_tokens",), wild="extras"),
    Case("mistral", "plain", dict(tie_word_embeddings=False, sliding_window=None, head_dim=24)),
    Case("mistral", "windows", dict(layer_types=SLIDING, sliding_window=17, rope_theta=1e6),
         without={"layer_types": ["full_attention"] * 4}),
    Case("iquestcoder", "plain", dict(tie_word_embeddings=False, rope_theta=5e5)),
    Case("xverse", "plain", dict(tie_word_embeddings=False)),
    Case("smollm3", "every_fourth", dict(rope_theta=5e6), without={"no_rope_layers": [1] * 4}),
    Case("smollm3", "interval", dict(no_rope_layer_interval=2, attention_bias=True, mlp_bias=True,
                                     tie_word_embeddings=False, rope_scaling=llama3()),
         without={"no_rope_layer_interval": 3}),
    Case("smollm3", "list_yarn", dict(no_rope_layers=[0, 1, 1, 0], rope_scaling=yarn()),
         without={"no_rope_layers": [1] * 4}),
    Case("smollm3", "linear_traditional",
         dict(rope_traditional=True, rope_scaling={"rope_type": "linear", "factor": 3.0}),
         without=NO_SCALING),
    Case("qwen2", "plain", {}),
    Case("qwen2", "untied_yarn", dict(tie_word_embeddings=False, rope_scaling=yarn()),
         without=NO_SCALING),
    Case("qwen2", "linear_traditional", dict(rope_scaling={"type": "linear", "factor": 4.0},
                                             rope_traditional=True), without=NO_SCALING),
    Case("qwen2", "window_unused", dict(use_sliding_window=False, sliding_window=8,
                                        rope_scaling=llama3()), without=NO_SCALING),
    Case("qwen3", "plain", QWEN3),
    Case("qwen3", "untied_yarn", dict(QWEN3, tie_word_embeddings=False, rope_scaling=yarn()),
         without=NO_SCALING),
    Case("qwen3", "rope_parameters", dict(QWEN3, rope_theta=None, head_dim=20, rope_parameters={
        "rope_type": "llama3", **llama3(), "rope_theta": 5e4})),
    Case("qwen3", "linear", dict(QWEN3, rope_scaling={"type": "linear", "factor": 4.0}),
         without=NO_SCALING),
    Case("minicpm", "untied", MINICPM, without={"dim_model_base": 48}),
    Case("minicpm", "tied_embedding_float", dict(MINICPM, tie_word_embeddings=True),
         dense=("embed_tokens",), strict=False, without={"scale_emb": 1.0}),
    Case("minicpm", "head_missing", dict(MINICPM, rope_scaling={"type": "linear", "factor": 2.0}),
         dense=("embed_tokens", "lm_head"), drop=("lm_head.weight",), without={"scale_depth": 1.0}),
    Case("minicpm", "yarn_traditional", dict(MINICPM, rope_scaling=yarn(), rope_traditional=True),
         without=NO_SCALING),
    Case("minicpm", "longrope", dict(MINICPM, rope_scaling=longrope(8)), without=NO_SCALING),
    Case("granite", "tied", GRANITE, without={"residual_multiplier": 1.0}),
    Case("granite", "untied_bias", dict(GRANITE, attention_bias=True, mlp_bias=True,
                                        tie_word_embeddings=False),
         without={"attention_multiplier": 0.25}),
    Case("granite", "linear", dict(GRANITE, rope_scaling={"type": "linear", "factor": 2.0},
                                   mlp_bias=True), without={"logits_scaling": 1.0}),
    Case("granite", "yarn", dict(GRANITE, rope_scaling=yarn(), attention_bias=True),
         without={"embedding_multiplier": 1.0}),
    Case("phi3", "untied", PHI3),
    Case("phi3", "tied_linear", dict(PHI3, tie_word_embeddings=True,
                                     rope_scaling={"type": "linear", "factor": 2.0,
                                                   "long_factor": 1.0}), without=NO_SCALING),
    Case("phi3", "longrope", dict(PHI3, rope_scaling=longrope(8)), without=NO_SCALING),
    Case("phi3", "su_partial", dict(PHI3, partial_rotary_factor=0.75,
                                    rope_scaling=longrope(6, type="su")), without=NO_SCALING),
    Case("phi3", "partial", dict(PHI3, partial_rotary_factor=0.5, num_key_value_heads=None),
         without={"partial_rotary_factor": None}),
    Case("phi3", "traditional", dict(PHI3, rope_traditional=True), quantized=False,
         without={"rope_traditional": None}),
]

# Every model type with every rope kind that its code in mlx-lm takes, with and without biases where
# it has such fields, tied and untied.
ROPES = {
    "default": {},
    "traditional": dict(rope_traditional=True),
    "linear": dict(rope_scaling={"type": "linear", "factor": 2.5}),
    "llama3": dict(rope_scaling=llama3()),
    "yarn": dict(rope_scaling=yarn()),
    "dynamic": dict(rope_scaling={"type": "dynamic", "factor": 4.0}),
    "longrope": dict(rope_scaling=longrope(8)),
}
PHI3_ROPES = {
    "default": {},
    "traditional": dict(rope_traditional=True),
    "linear": dict(rope_scaling={"type": "linear", "factor": 2.0, "long_factor": 1.0}),
    "longrope": dict(rope_scaling=longrope(8)),
    "partial": dict(partial_rotary_factor=0.5),
}
NOT_TRADITIONAL = {kind: fields for kind, fields in ROPES.items() if kind != "traditional"}
BIASES = {"plain": dict(attention_bias=False, mlp_bias=False),
          "bias": dict(attention_bias=True, mlp_bias=True)}
NO_BIAS_FIELDS = {"plain": {}}
TYPES = {"llama": (ROPES, BIASES, {}), "mistral": (ROPES, BIASES, {}),
         "smollm3": (ROPES, BIASES, {}), "qwen2": (ROPES, NO_BIAS_FIELDS, {}),
         "qwen3": (NOT_TRADITIONAL, NO_BIAS_FIELDS, dict(QWEN3, head_dim=16)),
         "minicpm": (ROPES, NO_BIAS_FIELDS, MINICPM), "granite": (NOT_TRADITIONAL, BIASES, GRANITE),
         "phi3": (PHI3_ROPES, NO_BIAS_FIELDS, PHI3)}


def product(model_type):
    ropes, biases, common = TYPES[model_type]
    for rope, rope_fields in ropes.items():
        for bias, bias_fields in biases.items():
            for tied in (True, False):
                yield Case(model_type, f"product_{rope}_{bias}_{'tied' if tied else 'untied'}",
                           dict(common, **rope_fields, **bias_fields, tie_word_embeddings=tied),
                           dense=("embed_tokens",) if model_type == "minicpm" else (),
                           strict=not (model_type == "minicpm" and tied))


# What is refused, by name: config fields that a plain Llama checkpoint gets (None takes one away),
# or a file beside it. `qmlp inspect` must give the line that docs/models.md shows.
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
REFUSED = [
    ("gemma and its kin", dict(model_type="gemma2")),
    ("mixtures of experts", dict(model_type="qwen3_moe")),
    ("experts in a model type that runs", dict(num_local_experts=8)),
    ("any other model type", dict(model_type="mamba2")),
    ("code of the model's own", dict(model_file="model.py")),
    ("another activation", dict(hidden_act="gelu")),
    ("other rope kinds", dict(rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]})),
    ("other layer types", dict(layer_types=["full_attention", "chunked_attention"] * 2)),
    ("partial rotation where mlx-lm has none", dict(partial_rotary_factor=0.5)),
    ("AWQ", dict(quantization=None, quantization_config=AWQ)),
    ("GPTQ", dict(quantization=None, quantization_config=dict(AWQ, quant_method="gptq"))),
    ("bitnet", dict(quantization=None, quantization_config=dict(quant_method="bitnet"))),
    ("compressed-tensors", dict(quantization=None, quantization_config=dict(
        quant_method="compressed-tensors", format="pack-quantized"))),
    ("mxfp4", dict(quantization=dict(bits=4, group_size=32, mode="mxfp4"))),
    ("nvfp4", dict(quantization=dict(bits=4, group_size=16, mode="nvfp4"))),
    ("mxfp8 in one module", dict(quantization={"bits": 4, "group_size": 64, "lm_head": {
        "bits": 8, "group_size": 32, "mode": "mxfp8"}})),
    ("two quantization entries that differ", dict(
        quantization=dict(bits=4, group_size=64), quantization_config=dict(bits=8, group_size=64))),
    ("7 bits", dict(quantization=dict(bits=7, group_size=64))),
    ("groups of 16", dict(quantization=dict(bits=4, group_size=16))),
]


def seed_of(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def ids_of(case):
    random = numpy.random.default_rng(seed_of(case.id) + 1)
    return [int(i) for i in random.integers(0, BASE["vocab_size"], PREFILL + DECODE)]


def build(config):
    """The mlx-lm model that a config names, with its fresh parameters."""
    model_type = config["model_type"]
    module = importlib.import_module("mlx_lm.models." + MODEL_REMAPPING.get(model_type, model_type))
    return module.Model(module.ModelArgs.from_dict(config))


def randomize(model, random):
    """Weights as large as trained ones: rows of norm 1, norms near 1, biases that matter."""
    def values(path, like):
        if like.ndim == 2:
            scale = 1.0 if "embed_tokens" in path else like.shape[1] ** -0.5
            return random.normal(0.0, scale, like.shape)
        if path.endswith("norm.weight"):
            return random.normal(1.0, 0.1, like.shape)
        return random.normal(0.0, 0.3, like.shape)
    paths = {path: mx.array(values(path, like).astype(numpy.float32))
             for path, like in tree_flatten(model.parameters())}
    model.load_weights(list(paths.items()))


def write(case, folder):
    """The case as a checkpoint folder: mixed types, widths and groups, some modules float."""
    random = numpy.random.default_rng(seed_of(case.id))
    config = case.full_config()
    model = build(config)
    randomize(model, random)
    entries = {}
    def choose(path, module):
        if not case.quantized or not hasattr(module, "to_quantized") or (case.dense and path.endswith(case.dense)):
            return False
        if random.integers(0, 9) == 0 and not path.startswith(("model.embed", "lm_head")):
            return False  # a float layer beside quantized ones
        groups = [group for group in GROUPS if module.weight.shape[-1] % group == 0]
        if not groups:
            return False
        entries[path] = {"bits": BITS[int(random.integers(0, len(BITS)))],
                         "group_size": groups[int(random.integers(0, len(groups)))]}
        return entries[path]

    # Each module in a type of its own; its scales take the type of its weights.
    for _, module in model.named_modules():
        dtype = DTYPES[int(random.integers(0, len(DTYPES)))]
        if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
            module.update(tree_map(lambda p: p.astype(dtype), module.parameters()))
    if case.quantized:
        nn.quantize(model, class_predicate=choose)
        config["quantization"] = {"bits": 4, "group_size": 64}
        if case.wild != "unnamed":
            config["quantization"].update(entries)
    tensors = {name: value for name, value in tree_flatten(model.parameters())
               if name not in case.drop}
    folder = pathlib.Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if case.wild == "extras":
        config["quantization_config"] = config["quantization"]
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        for layer in range(config["num_hidden_layers"]):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = mx.arange(8.0)
        save_shards(folder, tensors, 3)
    else:
        mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def save_shards(folder, tensors, count):
    """Tensors in turn over `count` files, with an index."""
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    order = sorted(tensors)
    for i, name in enumerate(names):
        mx.save_safetensors(str(folder / name), {key: tensors[key] for key in order[i::count]},
                            metadata={"format": "mlx"})
    index = {"metadata": {}, "weight_map": {key: names[i % count] for i, key in enumerate(order)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def mlx_logits(folder, ids, prefill=PREFILL, strict=True):
    """mlx-lm's f32 logits of every position: `prefill` tokens at once, the others one by one."""
    from mlx_lm.models.cache import make_prompt_cache

    model, _ = load_model(pathlib.Path(folder), strict=strict)
    model.set_dtype(mx.float32)
    cache = make_prompt_cache(model)
    rows = [model(mx.array([ids[:prefill]]), cache=cache)[0]]
    rows += [model(mx.array([[token]]), cache=cache)[0] for token in ids[prefill:]]
    return numpy.array(mx.concatenate(rows))
