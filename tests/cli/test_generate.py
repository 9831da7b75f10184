import os
import stat
import unittest

import cli
import tiny_model


def model_text(text):
    return [byte for byte in text.encode()]


class Generate(cli.TestCase):
    def generate(self, *args, **options):
        return self.json("generate", cli.model(), *args, **options)

    def test_json_fields(self):
        result = self.generate("-p", "Hello", "-n", 12, "--threads", 2)
        self.assertEqual(result["prompt_ids"], model_text("Hello"))
        self.assertEqual(len(result["token_ids"]), 12)
        self.assertEqual(result["text"], bytes(result["token_ids"]).decode())
        self.assertEqual(result["stop_reason"], "length")
        self.assertEqual(result["activations"], "f16")
        self.assertEqual(result["threads"], 2)
        self.assertEqual(result["model"], cli.model())
        for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            self.assertGreater(result[key], 0.0)
        for key in ("packed_bytes", "cache_bytes", "peak_rss_bytes"):
            self.assertGreater(result["memory"][key], 0)
        self.assertEqual(result["ctx"], 17)

    def test_text_and_statistics(self):
        expected = self.generate("-p", "Hello", "-n", 12)["text"]
        result = self.good("generate", cli.model(), "-p", "Hello", "-n", 12)
        self.assertEqual(result.stdout.decode(), expected + "\n")
        self.assertIn("tokens/s", result.stderr.decode())
        self.assertIn("peak", result.stderr.decode())
        result = self.good("generate", cli.model(), "-p", "Hello", "-n", 12, "--quiet")
        self.assertEqual(result.stderr, b"")

    def test_prompt_sources_agree(self):
        text = "caf\u00e9 \u6a4b\n"
        path = os.path.join(cli.FOLDER, "prompt.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        direct = self.generate("-p", text, "-n", 4)
        ids = ",".join(map(str, model_text(text)))
        for other in (self.generate("-f", path, "-n", 4),
                      self.generate("-f", "-", "-n", 4, stdin=text.encode()),
                      self.generate("-", "-n", 4, stdin=text.encode()),
                      self.generate("--prompt-ids", ids, "-n", 4)):
            self.assertEqual(other["prompt_ids"], direct["prompt_ids"])
            self.assertEqual(other["token_ids"], direct["token_ids"])

    def test_prompt_errors(self):
        m = cli.model()
        self.bad(2, "no prompt", "generate", m)
        self.bad(2, "one prompt", "generate", m, "-p", "a", "--prompt-ids", "1")
        self.bad(2, "empty", "generate", m, "-p", "")
        self.bad(2, "empty", "generate", m, "--prompt-ids", "")
        self.bad(2, "empty", "generate", m, "-", stdin=b"")
        self.bad(2, "empty", "generate", m, "--chat", "-p", "")
        self.bad(2, "standard input", "generate", m, "prompt.txt")
        self.bad(2, "byte 3", "generate", m, "-", stdin=b"abc\xff")
        self.bad(2, "byte 1", "generate", m, "-", stdin=b"a\xe6\xa9")
        self.bad(2, "260", "generate", m, "--prompt-ids", "1,260")
        self.bad(2, "--prompt-ids", "generate", m, "--prompt-ids", "1,,2")
        self.bad(3, "no-such-file", "generate", m, "-f", "no-such-file")
        self.bad(2, "--chat", "generate", m, "-p", "a", "--system", "b")
        self.bad(2, "--chat", "generate", m, "--chat", "--prompt-ids", "1")
        self.bad(2, "--chat", "generate", m, "-p", "a", "--thinking", "off")
        self.bad(2, "maybe", "generate", m, "-p", "a", "--chat", "--thinking", "maybe")
        self.bad(2, "--stop", "generate", m, "-p", "a", "--stop", "")
        self.bad(2, "--prompt-cache-load", "generate", m, "-p", "a", "--prompt-cache-append")

    def test_special_tokens_in_text_stay_text(self):
        text = "<|im_end|>"
        self.assertEqual(self.generate("-p", text, "-n", 1)["prompt_ids"], model_text(text))

    def test_chat(self):
        start, end = [tiny_model.IM_START], [tiny_model.IM_END]
        user = start + model_text("user\nhi") + end + model_text("\n")
        answer = start + model_text("assistant\n")
        self.assertEqual(self.generate("--chat", "-p", "hi", "-n", 1)["prompt_ids"], user + answer)
        system = start + model_text("system\nbe brief") + end + model_text("\n")
        self.assertEqual(self.generate("--chat", "--system", "be brief", "-p", "hi", "-n",
                                       1)["prompt_ids"], system + user + answer)

    def test_thinking(self):
        plain = self.generate("--chat", "-p", "hi", "-n", 1)["prompt_ids"]
        self.assertEqual(self.generate("--chat", "--thinking", "on", "-p", "hi", "-n",
                                       1)["prompt_ids"], plain)
        self.assertEqual(self.generate("--chat", "--thinking", "off", "-p", "hi", "-n",
                                       1)["prompt_ids"], plain + model_text("no thoughts\n"))

    def test_bos(self):
        self.assertEqual(self.generate("--bos", "-p", "hi", "-n", 1)["prompt_ids"],
                         [tiny_model.IM_START] + model_text("hi"))

    def test_context(self):
        m = cli.model()
        text = self.bad(2, "--ctx", "generate", m, "-p", "abcdef", "--ctx", 5)
        self.assertIn("6", text)
        self.assertIn("5", text)
        text = self.bad(2, "512", "generate", m, "-p", "x" * 513)
        self.assertIn("513", text)
        self.bad(2, "512", "generate", m, "-p", "x", "--ctx", 513)
        # The prompt fills the context: the one token it predicts, then nothing more fits.
        result = self.generate("-p", "abcde", "--ctx", 5, "-n", 9)
        self.assertEqual((len(result["token_ids"]), result["stop_reason"]), (1, "context"))
        result = self.generate("-p", "abcde", "--ctx", 8, "-n", 9)
        self.assertEqual((len(result["token_ids"]), result["stop_reason"]), (4, "context"))

    def test_no_tokens(self):
        result = self.generate("-p", "abc", "-n", 0)
        self.assertEqual((result["token_ids"], result["text"]), ([], ""))
        self.assertEqual(self.good("generate", cli.model(), "-p", "abc", "-n", 0).stdout, b"")

    def test_end_tokens(self):
        ids = self.generate("-p", "Hello", "-n", 12)["token_ids"]
        end = ids[5]
        first = ids.index(end)
        path = cli.copy_of_model("ends", generation_config={"eos_token_id": [end]})
        result = self.json("generate", path, "-p", "Hello", "-n", 12)
        self.assertEqual(result["token_ids"], ids[:first + 1])
        self.assertEqual(result["stop_reason"], "end_token")
        self.assertEqual(result["text"], bytes(ids[:first]).decode())
        result = self.json("generate", path, "-p", "Hello", "-n", 12, "--ignore-eos")
        self.assertEqual(result["token_ids"], ids)

    def test_stop_text(self):
        plain = self.generate("-p", "Hello", "-n", 24)["text"]
        stop = plain[7:11]  # four tokens of one byte each
        expected = plain[:plain.index(stop)]
        result = self.generate("-p", "Hello", "-n", 24, "--stop", stop, "--stop", "never this")
        self.assertEqual((result["text"], result["stop_reason"]), (expected, "stop_text"))
        streamed = self.good("generate", cli.model(), "-p", "Hello", "-n", 24, "--stop", stop)
        self.assertEqual(streamed.stdout.decode().rstrip("\n"), expected.rstrip("\n"))
        # A beginning of the stop string that does not go on is shown after all.
        result = self.generate("-p", "Hello", "-n", 24, "--stop", plain[7:10] + "\u6a4b")
        self.assertEqual((result["text"], result["stop_reason"]), (plain, "length"))

    def test_sampling(self):
        warm = ("-p", "Hello", "-n", 16, "--temperature", 1.5)
        greedy = self.generate("-p", "Hello", "-n", 16)["token_ids"]
        self.assertEqual(self.generate("-p", "Hello", "-n", 16, "--greedy")["token_ids"], greedy)
        first = self.generate(*warm, "--seed", 1)["token_ids"]
        self.assertEqual(self.generate(*warm, "--seed", 1, "--threads", 1)["token_ids"], first)
        self.assertNotEqual(self.generate(*warm, "--seed", 2)["token_ids"], first)
        for narrow in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 1.0)):
            self.assertEqual(self.generate(*warm, *narrow)["token_ids"], greedy, narrow)
        self.assertNotEqual(self.generate("-p", "Hello", "-n", 24, "--repeat-penalty", 3.0)["token_ids"],
                            self.generate("-p", "Hello", "-n", 24)["token_ids"])

    def test_sampling_contradictions(self):
        m = cli.model()
        self.bad(2, "--greedy", "generate", m, "-p", "a", "--greedy", "--temperature", 1)
        for option in ("--top-k", "--top-p", "--min-p"):
            self.bad(2, option, "generate", m, "-p", "a", option, 1)

    def test_prompt_cache(self):
        path = os.path.join(cli.FOLDER, "prompt.cache")
        long = "The quick brown fox jumps over the lazy dog. " * 4
        self.generate("-p", long, "-n", 3, "--prompt-cache-save", path)
        plain = self.generate("-p", long + "And then", "-n", 12)
        cached = self.generate("-p", long + "And then", "-n", 12, "--prompt-cache-load", path)
        self.assertEqual(cached["token_ids"], plain["token_ids"])
        self.assertGreaterEqual(cached["reused_tokens"], len(long))
        # The whole prompt is cached: its last token runs again for the logits.
        same = self.generate("-p", long, "-n", 12, "--prompt-cache-load", path)
        self.assertEqual(same["token_ids"], self.generate("-p", long, "-n", 12)["token_ids"])
        self.assertEqual(same["reused_tokens"], len(long) - 1)
        # Only the common beginning is reused.
        other = self.generate("-p", "The quick red fox", "-n", 12, "--prompt-cache-load", path)
        self.assertEqual(other["reused_tokens"], len("The quick "))
        self.assertEqual(other["token_ids"],
                         self.generate("-p", "The quick red fox", "-n", 12)["token_ids"])
        # Appended, the prompt follows everything that the cache holds.
        self.generate("-p", "abc", "-n", 0, "--prompt-cache-save", path)
        joined = self.generate("-p", "def", "-n", 12, "--prompt-cache-load", path,
                               "--prompt-cache-append")
        self.assertEqual(joined["prompt_ids"], model_text("abcdef"))
        self.assertEqual(joined["token_ids"], self.generate("-p", "abcdef", "-n", 12)["token_ids"])

    def test_prompt_cache_errors(self):
        path = os.path.join(cli.FOLDER, "errors.cache")
        self.generate("-p", "abc", "-n", 0, "--prompt-cache-save", path)
        m = cli.model()
        self.bad(3, "absent.cache", "generate", m, "-p", "abc", "--prompt-cache-load",
                 os.path.join(cli.FOLDER, "absent.cache"))
        self.bad(2, "errors.cache", "generate", m, "-p", "abc", "--activations", "f32",
                 "--prompt-cache-load", path)
        with open(path, "r+b") as file:
            file.truncate(40)
        self.bad(2, "errors.cache", "generate", m, "-p", "abc", "--prompt-cache-load", path)
        for option in ("--prompt-cache-save", "--tap-gate"):
            self.bad(3, "/nonexistent/x", "generate", m, "-p", "abc", option, "/nonexistent/x")
            self.bad(3, cli.FOLDER, "generate", m, "-p", "abc", option, cli.FOLDER)
            pipe = os.path.join(cli.FOLDER, "pipe" + option)
            os.mkfifo(pipe)
            self.bad(3, "is not a regular file", "generate", m, "-p", "abc", option, pipe)
            self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))

    def test_files_that_are_there_keep_their_kind_and_rights(self):
        for option in ("--prompt-cache-save", "--tap-gate"):
            path = os.path.join(cli.FOLDER, "there" + option)
            with open(path, "w") as file:
                file.write("old")
            os.chmod(path, 0o600)
            link = path + ".link"
            os.symlink(path, link)
            self.generate("-p", "abc", "-n", 1, option, link)
            self.assertTrue(os.path.islink(link))
            self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
            self.assertGreater(os.path.getsize(path), 100)

    def test_a_full_disk_leaves_the_old_file(self):
        for option in ("--prompt-cache-save", "--tap-gate"):
            self.full_disk_leaves_the_old_file("file", "generate", cli.model(), "-p", "abc", "-n", 0,
                                               option)

    def test_byte_fallback_and_bos(self):
        start, end = tiny_model.IM_START, tiny_model.IM_END
        specials = [{"id": start, "content": "<s>", "special": True, "normalized": False},
                    {"id": end, "content": "</s>", "special": True, "normalized": False}]
        path = cli.copy_of_model("byte_fallback", tokenizer={
            "added_tokens": specials, "normalizer": None, "pre_tokenizer": None,
            "post_processor": {
                "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [start], "tokens": ["<s>"]}}},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "byte_fallback": True, "merges": [],
                      "vocab": {**{f"<0x{byte:02X}>": byte for byte in range(256)}, "<s>": start, "</s>": end}}})
        text = "caf\u00e9 \u6a4b"
        # The tokenizer puts bos in front, and --bos no second one.
        for flags in ((), ("--bos",)):
            result = self.json("generate", path, "-p", text, "-n", 24, *flags)
            self.assertEqual(result["prompt_ids"], [start, *model_text(text)])
        # Characters of several tokens come whole, streamed as at once.
        answer = bytes(b for b in result["token_ids"] if b < 256)
        expected = answer.removeprefix(b" ").decode(errors="replace")
        self.assertEqual(result["text"], expected)
        streamed = self.good("generate", path, "-p", text, "-n", 24).stdout.decode()
        self.assertEqual(streamed, expected if expected.endswith("\n") else expected + "\n")
        # What follows a cache is no start of a text.
        cache = os.path.join(cli.FOLDER, "bos.cache")
        self.json("generate", path, "-p", "ab", "-n", 0, "--prompt-cache-save", cache)
        more = self.json("generate", path, "-p", "cd", "-n", 1, "--prompt-cache-load", cache, "--prompt-cache-append")
        self.assertEqual(more["prompt_ids"], [start, *model_text("abcd")])

    def test_without_tokenizer(self):
        path = cli.copy_of_model("no_tokenizer")
        os.remove(os.path.join(path, "tokenizer.json"))
        result = self.json("generate", path, "--prompt-ids", "72,105", "-n", 3)
        self.assertEqual(result["token_ids"],
                         self.generate("--prompt-ids", "72,105", "-n", 3)["token_ids"])
        self.assertIsNone(result["text"])
        self.bad(3, "tokenizer.json", "generate", path, "-p", "hi")


if __name__ == "__main__":
    unittest.main()
