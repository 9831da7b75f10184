"""Our conversion of the GGUF file against MLX's own GGUF reader."""
import functools
import re
import resource
import shutil
import subprocess
import unittest

import mlx.core as mx
import numpy

import support

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def mlx_name(name):
    stem, kind = name.rsplit(".", 1)
    if stem == "token_embd":
        return "model.embed_tokens." + kind
    if stem == "output_norm":
        return "model.norm." + kind
    layer, part = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem).groups()
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def halves(rows, heads):
    """GGUF interleaves the two halves of each head's rotary pairs; MLX keeps them apart."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


class Gguf(unittest.TestCase):
    def test_every_tensor(self):
        theirs = mx.load(str(support.gguf))
        ours = mx.load(str(support.model() / "model.safetensors"))
        heads = support.config(support.model())
        self.assertEqual({mlx_name(name) for name in theirs}, set(ours))
        for name, tensor in theirs.items():
            expected = numpy.array(tensor)
            if "attn_q." in name:
                expected = halves(expected, heads["num_attention_heads"])
            elif "attn_k." in name:
                expected = halves(expected, heads["num_key_value_heads"])
            actual = numpy.array(ours[mlx_name(name)])
            self.assertEqual(actual.shape, expected.shape, name)
            if actual.dtype != numpy.uint32:  # types may differ where the value does not
                actual, expected = actual.astype(numpy.float32), expected.astype(numpy.float32)
            self.assertTrue(numpy.array_equal(actual, expected), name)
        print(f"{len(theirs)} tensors equal")

    def test_too_little_memory_leaves_nothing(self):
        folder = support.scratch() / "little-memory"
        failures = 0
        for megabytes in range(88, 216, 16):
            folder.mkdir()
            done = subprocess.run(
                [support.program(), "convert", support.gguf, folder / "model"], text=True,
                stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, check=False,
                preexec_fn=functools.partial(
                    resource.setrlimit, resource.RLIMIT_AS, 2 * (megabytes << 20,)))
            left = sorted(path.name for path in folder.iterdir())
            if done.returncode == 0:
                self.assertEqual(left, ["model"])
            else:
                failures += 1
                self.assertEqual((done.returncode, left), (3, []), done.stderr)
                self.assertEqual(done.stderr.count("\n"), 1)
            shutil.rmtree(folder)
        self.assertGreater(failures, 2)


if __name__ == "__main__":
    unittest.main()
