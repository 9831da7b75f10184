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


if __name__ == "__main__":
    unittest.main()
