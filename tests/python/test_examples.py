"""The examples of the documentation do what they say."""
import unittest

import support


class Examples(unittest.TestCase):
    def test_load_and_run(self):
        prompt = "What is the capital of France?"
        text = support.run(support.program("examples/example_load_and_run"), support.model(), prompt)
        expected = support.qmlp_json("generate", support.model(), "--chat", "-p", prompt, "-n", 48)
        self.assertEqual(text, expected["text"] + "\n")
        self.assertIn("Paris", text)

    def test_swiglu(self):
        self.assertRegex(support.run(support.program("examples/example_swiglu")),
                         r"^swiglu_f32_any_\w+: out\[0\]\[0\] = -?\d")

    def test_c(self):
        self.assertRegex(support.run(support.program("examples/example_c_linear")),
                         r"^linear_f32_any_\w+: y\[2\]\[5\] = (\S+), expected \1\n$")
        text = support.run(support.program("examples/example_c_chat"), support.model(),
                           "What is the capital of France?")
        self.assertIn("Paris", text)

    def test_python(self):
        text = support.script("examples/python/numpy_ops.py")
        self.assertRegex(text, r"^swiglu_f32_any_\w+: y\[0\]\[0\] = -?\d")
        self.assertIn("fused equals separate: True\none row equals many: True\n", text)
        text = support.script("examples/python/mlx_lm_patch.py", support.model(),
                              "What is the capital of France?")
        self.assertIn("Paris", text)


if __name__ == "__main__":
    unittest.main()
