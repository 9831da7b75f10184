"""SmolLM2-135M against numbers that mlx-lm made with f32 activations (tests/data/smollm2)."""
import json
import unittest

import mlx.core as mx
import numpy

import support

GOLDENS = json.loads((support.DATA / "smollm2" / "greedy.json").read_text())
F32 = ("--activations", "f32")


class Goldens(unittest.TestCase):
    def test_teacher_forced(self):
        """Every position: top-8 logits within 5e-3, logsumexp, the greedy id where it is clear."""
        compared = worst = worst_sum = 0.0
        for golden in GOLDENS:
            ids = golden["prompt_ids"] + golden["greedy_ids"][:-1]
            ours = support.qmlp_json("kl", support.model(), *F32, "--top-logits", 8,
                                     "--prompt-ids", support.joined(ids))["positions"]
            self.assertEqual(len(ours), len(golden["top8_ids"]))
            for position, row in enumerate(ours):
                known = dict(zip(golden["top8_ids"][position], golden["top8_logits"][position]))
                values = dict(zip(row["ids"], row["logits"]))
                floor = min(known.values())
                # An id that only one side lists must lie at the edge of both lists.
                for token, value in values.items():
                    distance = value - known[token] if token in known else max(0, value - floor)
                    worst = max(worst, abs(distance))
                for token, value in known.items():
                    if token not in values:
                        worst = max(worst, value - min(values.values()))
                worst_sum = max(worst_sum, abs(row["logsumexp"] - golden["logsumexp"][position]))
                best, second = golden["top8_logits"][position][:2]
                if best - second > support.GAP:
                    compared += 1
                    self.assertEqual(row["ids"][0], golden["top8_ids"][position][0],
                                     f"{golden['prompt']!r} position {position}")
        print(f"{compared:.0f} clear positions; worst top-8 logit off by {worst:.2e}, "
              f"logsumexp by {worst_sum:.2e}")
        self.assertGreater(compared, 350)
        self.assertLess(worst, 5e-3)
        self.assertLess(worst_sum, 5e-3)

    def test_free_running(self):
        for golden in GOLDENS:
            count = len(golden["greedy_ids"])
            ours = support.qmlp_json("generate", support.model(), *F32, "--greedy", "-n", count,
                                     "--prompt-ids", support.joined(golden["prompt_ids"]))
            start = len(golden["prompt_ids"]) - 1
            for n, token in enumerate(golden["greedy_ids"]):
                best, second = golden["top8_logits"][start + n][:2]
                if best - second <= support.GAP and ours["token_ids"][n] != token:
                    break  # a tie may go either way, and the texts part from there
                self.assertEqual(ours["token_ids"][n], token, f"{golden['prompt']!r} token {n}")

    def test_prompt_ids(self):
        for golden in GOLDENS:
            ours = support.qmlp_json("generate", support.model(), "--chat", "-p", golden["prompt"],
                                     "-n", 0)
            self.assertEqual(ours["prompt_ids"], golden["prompt_ids"], golden["prompt"])

    def test_hidden_states(self):
        golden = mx.load(str(support.DATA / "smollm2" / "hidden.safetensors"))
        ids = numpy.array(golden["ids"])
        expected = numpy.array(golden["hidden"])  # embedding, 30 layers, final norm
        out = support.scratch() / "hidden.bin"
        support.run(support.program("tests/python/dump_hidden"), support.model(),
                    support.joined(ids), out)
        flat = numpy.fromfile(out, numpy.float32)
        hidden = flat[: expected.size].reshape(expected.shape)
        logits = flat[expected.size:].reshape(len(ids), -1)[-2:]
        self.assertEqual(int((hidden[0] != expected[0]).sum()), 0, "embedding rows are exact")
        for layer in range(1, len(expected)):
            scale = numpy.abs(expected[layer]).max(-1, keepdims=True)
            error = (numpy.abs(hidden[layer] - expected[layer]) / scale).max()
            self.assertLess(error, 1e-4, f"layer {layer - 1}")
        print(f"worst error of a layer's row, relative to its largest element: "
              f"{(numpy.abs(hidden - expected) / numpy.abs(expected).max(-1, keepdims=True)).max():.2e}")
        self.assertLess(numpy.abs(logits - numpy.array(golden["logits"])).max(), 5e-3)


if __name__ == "__main__":
    unittest.main()
