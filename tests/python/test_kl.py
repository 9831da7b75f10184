"""How far 16-bit activations are from f32 ones, teacher-forced on the program's built-in text."""
import unittest

import support


class Divergence(unittest.TestCase):
    def check(self, activations):
        result = support.qmlp_json("kl", support.model(), "--reference", "activations=f32",
                                   "--test", f"activations={activations}")
        self.assertGreaterEqual(result["positions"], 1000)
        print(f"{activations}: KL over {result['positions']} tokens: mean {result['mean_kl']:.3e}, "
              f"largest {result['max_kl']:.3e}; argmax equal in "
              f"{100 * result['argmax_agreement']:.2f} %; perplexity "
              f"{result['reference']['perplexity']:.4f} and {result['test']['perplexity']:.4f}")
        errors = result["layer_relative_rms_error"]
        print("  relative error by layer: " + " ".join(f"{e:.1e}" for e in errors))
        self.assertEqual(len(errors), 30)
        self.assertLess(result["mean_kl"], 1e-2)

    def test_bf16(self):
        self.check("bf16")

    def test_f16(self):
        self.check("f16")

    def test_a_mode_agrees_with_itself(self):
        result = support.qmlp_json("kl", support.model(), "--reference", "fused=0", "--test",
                                   "fused=1", "--positions", 64)
        self.assertEqual(result["max_kl"], 0.0)
        self.assertEqual(max(result["layer_relative_rms_error"]), 0.0)


if __name__ == "__main__":
    unittest.main()
