"""Our chat prompts against transformers' rendering of the families' templates."""
import json
import random
import struct
import unittest

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

import check_tokenizer
import chat_templates
import family_templates
import support
import tokenizer_kinds

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Gets the \"weather\" at a place, é 😀\n<|im_end|>",
                                      "parameters": {"type": "object", "required": ["city"], "properties": {
                                          "city": {"type": "string", "enum": ["Paris", "京都"]}, "days": {"type": "integer", "default": 3}}}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}, "strict": True, "return": None}},
]
CONVERSATIONS = [
    [("user", "What is the capital of France?")],
    [("system", "Be brief."), ("user", "Hi")],
    [("system", "You are terse. /no_think"), ("user", "Hi"), ("assistant", "Hello"), ("user", "  Bye\n\n")],
    [("system", "/system_override Only this. /think  "), ("user", "Hi")],
    [("user", "a"), ("assistant", "<think>\nWhy?\n</think>\n\nBecause."), ("user", "b"), ("assistant", "c"), ("user", "d")],
    [("user", "weather?"), ("assistant", ""), ("tool", "{\"t\": 21}"), ("tool", "sunny"), ("assistant", "It is sunny.")],
    [("user", "x"), ("assistant", "</think>"), ("user", "<tool_response>a</tool_response>")],
    [("user", "")], [("assistant", "first")], [("user", "one"), ("user", "two")], [("tool", "t"), ("user", "u")],
    [("user", "\u00a0 na\u00efve \u001c\t \u4f60\u597d \U0001f600 \\n \"quoted\" {{ x }} {% y %}")],
]


def conversations():
    rng = random.Random(8)
    parts = ["Hello", " there", "\n", " ", "\t", "é😀", "\u00a0", "\u001c", "</think>", "<think>", "a", "\\n", "/think", "\"", "\u0001"]
    out = [[{"role": role, "content": content} for role, content in conversation] for conversation in CONVERSATIONS]
    for _ in range(60):
        count = rng.randint(1, 6)
        roles = ["user", "assistant"] * 3 if rng.random() < 0.6 else rng.choices(["user", "assistant", "system", "tool"], k=6)
        if rng.random() < 0.3:
            roles = ["system", *roles]
        out.append([{"role": roles[i], "content": "".join(rng.choices(parts, k=rng.randint(0, 6)))} for i in range(count)])
    return out


def render(template, messages, tools, prompt, thinking):
    """The text by transformers, or None where the template raises."""
    options = dict(TOKENS) if thinking is None else {**TOKENS, "enable_thinking": thinking}
    try:
        texts, _ = render_jinja_template(conversations=[messages], tools=tools, chat_template=template,
                                         add_generation_prompt=prompt, **options)
    except (jinja2.TemplateError, TypeError):
        return None
    return texts[0]


def request(messages, tools, prompt, thinking):
    flags = prompt + 2 * (thinking is not None) + 4 * bool(thinking)
    pairs = [check_tokenizer.string(part.encode()) for message in messages for part in (message["role"], message["content"])]
    tools = json.dumps(tools, ensure_ascii=False).encode() if tools else b""
    return b"t" + struct.pack("<I", flags) + check_tokenizer.string(tools) + struct.pack("<I", len(messages)) + b"".join(pairs)


class ChatTemplates(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # Single bytes: decoding the prompt's tokens gives its text back.
        cls.folder = support.scratch() / "chat"
        cls.folder.mkdir(parents=True, exist_ok=True)
        kind = dict(tokenizer_kinds.step_kinds())["step_NFC"]
        (cls.folder / "tokenizer.json").write_text(json.dumps({**kind, "normalizer": None}))

    def ask(self, template, requests):
        (self.folder / "tokenizer_config.json").write_text(json.dumps({**TOKENS, "chat_template": template}))
        return check_tokenizer.ask(support.program("tests/text/encode_file"), self.folder, requests)

    def test_families(self):
        cases = [(messages, tools, prompt, thinking) for messages in conversations() for tools in (None, TOOLS)
                 for prompt in (True, False) for thinking in (None, True, False)]
        total = 0
        for name, template in {**family_templates.FAMILIES, **chat_templates.TEMPLATES}.items():
            with self.subTest(name):
                expected = [render(template, *case) for case in cases]
                ours = self.ask(template, (request(*case) for case in cases))
                rendered = 0
                for case, want in zip(cases, expected):
                    error = ours.error()
                    have = None if error else ours.string().decode()
                    if want is None:
                        self.assertIsNotNone(error, f"{name} {case}: rendered, transformers raises")
                        continue
                    self.assertIsNone(error, f"{name} {case}")
                    self.assertEqual(have, want, f"{name} {case}")
                    rendered += 1
                self.assertGreater(rendered, len(cases) // 5, name)
                total += rendered
        print(f"{total} prompts are the same")

    def test_sources(self):
        """A file of its own comes first, then a list of named templates, then the one text."""
        def text(config, file=None):
            path = self.folder / "chat_template.jinja"
            path.unlink(missing_ok=True)
            if file is not None:
                path.write_text(file)
            ours = self.ask(config, [request([], None, True, None)])
            path.unlink(missing_ok=True)
            return ours.error() or ours.string().decode()

        self.assertEqual(text("config"), "config")
        self.assertEqual(text("config", "file"), "file")
        self.assertEqual(text([{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]), "named")
        self.assertIn("none is named 'default'", text([{"name": "rag", "template": "no"}]))
        self.assertIn("the model has none", text(None))


if __name__ == "__main__":
    unittest.main()
