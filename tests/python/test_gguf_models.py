"""GGUF files of every architecture against the mlx-lm model that they were written from."""
import importlib
import unittest

import mlx.core as mx
import numpy
from gguf import GGMLQuantizationType as Type
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

import gguf_files
import support
from gguf_files import VOCAB

IDS = [5, 200, 33, 33, 7, 261, 90, 1, 17, 250, 4, 88]


def base(**fields):
    return {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
            "vocab_size": VOCAB, "max_position_embeddings": 512, "rope_theta": 10000.0,
            "tie_word_embeddings": False} | fields


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"type": "longrope", "long_factor": [1.0 + 0.5 * i for i in range(12)],
        "short_factor": [1.0 + 0.0625 * i for i in range(12)],
        "original_max_position_embeddings": 128}
BIASES = {"attention_bias": True, "mlp_bias": True}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
GRANITE = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
           "residual_multiplier": 0.22, "logits_scaling": 8.0}
MINICPM = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 16}

# A name: the architecture in the file, the fields of config.json.
CASES = {
    "llama": ("llama", base(model_type="llama", head_dim=24, **BIASES)),
    "llama-3": ("llama", base(model_type="llama", head_dim=32, rope_theta=500000.0,
                              rope_scaling=LLAMA3, tie_word_embeddings=True, **NO_BIASES)),
    "llama-3-other": ("llama", base(model_type="llama", head_dim=64, rope_theta=500000.0,
                                    rope_scaling=LLAMA3 | {"factor": 16.0, "low_freq_factor": 0.5,
                                                           "high_freq_factor": 20.0},
                                    **NO_BIASES)),
    "llama-linear": ("llama", base(model_type="llama", head_dim=16,
                                   rope_scaling={"type": "linear", "factor": 2.5}, **NO_BIASES)),
    "qwen2": ("qwen2", base(model_type="qwen2", rope_theta=1000000.0, rms_norm_eps=1e-6,
                            tie_word_embeddings=True)),
    "qwen2-yarn": ("qwen2", base(model_type="qwen2", rope_scaling=YARN)),
    "qwen3": ("qwen3", base(model_type="qwen3", head_dim=32, rope_theta=1000000.0)),
    "qwen3-yarn": ("qwen3", base(model_type="qwen3", head_dim=32, tie_word_embeddings=True,
                                 rope_scaling=YARN | {"beta_fast": 16.0, "beta_slow": 2.0})),
    "smollm3": ("smollm3", base(model_type="smollm3", head_dim=16, num_hidden_layers=5,
                                rope_theta=5000000.0, tie_word_embeddings=True,
                                no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0, 1],
                                **NO_BIASES)),
    "phi3": ("phi3", base(model_type="phi3", hidden_size=128, partial_rotary_factor=1.0,
                          original_max_position_embeddings=512)),
    "phi3-long": ("phi3", base(model_type="phi3", hidden_size=128, partial_rotary_factor=0.75,
                               original_max_position_embeddings=128, rope_scaling=LONG,
                               sliding_window=262144, tie_word_embeddings=True)),
    "minicpm": ("minicpm", base(model_type="minicpm", **MINICPM)),
    "granite": ("granite", base(model_type="granite", tie_word_embeddings=True, **GRANITE,
                                **BIASES)),
    "granite-untied": ("granite", base(model_type="granite", **GRANITE, **NO_BIASES)),
}


def make(config):
    """A random mlx-lm model; its parameters."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = numpy.random.default_rng(7)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        values = rng.normal(0, 0.1, value.shape)
        # Norms around 1. All values are ones that f16 holds.
        weights[name] = (values + (name.endswith("norm.weight"))).astype(numpy.float16).astype(
            numpy.float32)
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    return model, weights


def convert(name, arch, config, weights, *options, **writer):
    path = support.scratch() / f"{name}.gguf"
    gguf_files.write_model(path, arch, config, weights, **writer)
    out = support.scratch() / name
    report = support.qmlp_json("convert", path, out, "--force", *options)
    path.unlink()
    return out, report


class Models(unittest.TestCase):
    def check_config(self, folder, config):
        have = support.config(folder)
        for field, value in config.items():
            if field == "rope_scaling":
                for key, expected in value.items():
                    self.assertEqual(have[field][key], expected, key)
            else:
                self.assertEqual(have[field], value, field)

    def check_logits(self, folder, expected):
        """qmlp's own forward in f32, against mlx-lm's logits [tokens, VOCAB]."""
        found = support.qmlp_json("kl", folder, "--prompt-ids", support.joined(IDS),
                                  "--top-logits", VOCAB, "--activations", "f32")
        for position, row in zip(found["positions"], expected, strict=True):
            logits = numpy.empty(VOCAB)
            logits[position["ids"]] = position["logits"]
            self.assertLessEqual(numpy.abs(logits - row).max(), 1e-4 * numpy.abs(row).max())

    def check(self, name):
        arch, config = CASES[name]
        model, weights = make(config)
        folder, report = convert(name, arch, config, weights)
        self.assertTrue(report["lossless"])
        self.check_config(folder, config)
        converted = mx.load(str(folder / "model.safetensors"))
        self.assertEqual(set(converted), set(weights))
        for tensor, value in weights.items():
            self.assertTrue(numpy.array_equal(numpy.array(converted[tensor]), value), tensor)
        loaded, _ = load_model(folder)
        expected = model(mx.array([IDS]))
        self.assertTrue(mx.array_equal(loaded(mx.array([IDS])), expected))
        self.check_logits(folder, numpy.array(expected[0]))

    def test_a_minicpm_without_a_head_gets_a_copy_of_the_embedding(self):
        """llama.cpp scales what a tied head gets; mlx-lm does so for a head of its own alone."""
        _, config = CASES["minicpm"]
        model, weights = make(config)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        model.load_weights([("lm_head.weight", mx.array(weights["lm_head.weight"]))], strict=False)
        stored = {name: value for name, value in weights.items() if name != "lm_head.weight"}
        folder, _ = convert("minicpm-tied", "minicpm", config, stored)
        self.assertIs(support.config(folder)["tie_word_embeddings"], False)
        loaded, _ = load_model(folder)
        self.assertTrue(mx.array_equal(loaded(mx.array([IDS])), model(mx.array([IDS]))))

    def test_split_files(self):
        """As llama.cpp's tools split: the metadata in the first part, also one without tensors."""
        arch, config = CASES["llama-3"]
        _, weights = make(config)
        whole, _ = convert("whole", arch, config, weights)
        for options in ({"split_max_tensors": 7}, {"split_max_tensors": 7,
                                                   "small_first_shard": True}):
            path = support.scratch() / "parts.gguf"
            gguf_files.write_model(path, arch, config, weights, **options)
            parts = sorted(support.scratch().glob("parts-*-of-*.gguf"))
            self.assertGreater(len(parts), 3)
            for given in (parts[0], parts[-1]):
                out = support.scratch() / "from-parts"
                support.qmlp("convert", given, out, "--force")
                for name in ("model.safetensors", "config.json", "tokenizer.json"):
                    self.assertEqual((out / name).read_bytes(), (whole / name).read_bytes())
            for part in parts:
                part.unlink()

    def test_affine_types(self):
        """Quantized q and k lose their interleaving, too."""
        for arch in ("llama", "qwen2", "phi3"):
            config = CASES[arch][1] | {"hidden_size": 128}
            if "head_dim" in config:
                config["head_dim"] = 32
            model, weights = make(config)
            kinds = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.F16, Type.BF16]
            types = {}
            for n, name in enumerate(sorted(weights)):
                if weights[name].ndim == 2:
                    types[name] = (kinds[n % len(kinds)], None)
            folder, report = convert(f"{arch}-affine", arch, config, weights, types=types)
            self.assertTrue(report["lossless"])
            converted = mx.load(str(folder / "model.safetensors"))
            for name, (qtype, _) in types.items():
                expected = gguf_files.gguf.quants.dequantize(
                    gguf_files.gguf.quants.quantize(weights[name], qtype), qtype)
                actual = converted[name]
                if qtype not in (Type.F16, Type.BF16):
                    module = name.removesuffix(".weight")
                    bits, group = support.spec(folder, module)
                    actual = mx.dequantize(actual, converted[module + ".scales"].astype(mx.float32),
                                           converted[module + ".biases"].astype(mx.float32),
                                           group, bits)
                self.assertTrue(numpy.array_equal(numpy.array(actual.astype(mx.float32)),
                                                  expected), name)


def add_case(name):
    def test(self):
        self.check(name)
    setattr(Models, "test_" + name.replace("-", "_"), test)


for case in CASES:
    add_case(case)


if __name__ == "__main__":
    unittest.main()
