"""Every model type: mlx-lm's f32 logits, and the same bits however a prompt is run."""
import functools
import json
import shutil
import subprocess
import unittest

import numpy

import architectures
import models_page
import support

BOUND = 1e-4    # relative to the largest logit
CHANGED = 1e-3  # what a case's own config fields must move the logits by, at least
RUNS = 18       # runs that check_forward compares where one vector instruction set is there
PLAIN = "llama_plain"


def relative(ours, theirs):
    return float(numpy.abs(ours - theirs).max() / numpy.abs(theirs).max())


def check_forward(folder, ids, *options):
    """The program's f32 logits, and how many other runs had the same bits."""
    out = folder / "logits.bin"
    runs = support.run(support.program("tests/python/check_forward"), folder, support.joined(ids),
                       architectures.PREFILL, out, *options)
    return numpy.fromfile(out, numpy.float32).reshape(len(ids), -1), int(runs or 0)


class Measured:
    """A case's checkpoint, its logits by both programs, and what `inspect` says of it."""

    def __init__(self, case):
        self.case = case
        self.folder = architectures.write(case, support.scratch() / "architectures" / case.id)
        self.ids = architectures.ids_of(case)
        self.logits, self.runs = check_forward(self.folder, self.ids)
        self.theirs = architectures.mlx_logits(self.folder, self.ids, strict=case.strict)
        self.error = relative(self.logits, self.theirs)
        inspected = support.qmlp_json("inspect", self.folder)
        self.config = inspected["config"]
        self.modules = {module["path"]: module for module in inspected["modules"]}
        self.stacked = any(m["stored_path"] != m["path"] for m in inspected["modules"])


@functools.cache
def measured(case_id):
    return Measured(next(case for case in architectures.CASES if case.id == case_id))


@functools.cache
def refusal(index):
    """(status, standard error) of `inspect` on what architectures.REFUSED[index] makes."""
    _, changes = architectures.REFUSED[index]
    plain = measured(PLAIN).folder
    folder = support.scratch() / "architectures" / "refused"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").hardlink_to(plain / "model.safetensors")
    config = {**json.loads((plain / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None}))
    done = subprocess.run([support.program(), "inspect", "refused"], capture_output=True, text=True,
                          cwd=folder.parent)
    return done.returncode, done.stderr


def page():
    by_type = {}
    for case in architectures.CASES:
        by_type.setdefault(case.model_type, []).append(measured(case.id))
    refusals = [(what, refusal(i)[1].strip().removeprefix("qmlp: ").replace("refused/", ""))
                for i, (what, _) in enumerate(architectures.REFUSED)]
    return models_page.render(by_type, refusals, architectures.PREFILL, architectures.DECODE)


class Architectures(unittest.TestCase):
    def check(self, case):
        result = measured(case.id)
        theirs = result.theirs
        self.assertTrue(numpy.isfinite(theirs).all())
        spread = numpy.abs(numpy.diff(theirs, axis=0)).max() / numpy.abs(theirs).max()
        self.assertGreater(spread, 0.1, "positions have almost the same logits")
        self.assertLess(result.error, BOUND)
        self.assertGreaterEqual(result.runs, RUNS)
        print(f"{case.id}: largest difference {result.error:.1e}, {result.runs} runs agree ", end="")
        if case.without:
            self.assertGreater(relative(self.changed(result), theirs), CHANGED,
                               f"{list(case.without)} changes nothing")

    def changed(self, result):
        """The logits without the config fields that the case is about."""
        folder = support.scratch() / "architectures" / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "model.safetensors").hardlink_to(result.folder / "model.safetensors")
        config = json.loads((result.folder / "config.json").read_text())
        config.update(result.case.without)
        (folder / "config.json").write_text(
            json.dumps({name: value for name, value in config.items() if value is not None}))
        return check_forward(folder, result.ids, "--logits-only")[0]


def add_test(case):
    setattr(Architectures, "test_" + case.id, lambda self: self.check(case))


for one in architectures.CASES:
    add_test(one)


class Product(unittest.TestCase):
    """Model types x rope kinds x biases x tied and untied heads: the logits alone."""

    def check(self, model_type):
        worst, count = 0.0, 0
        for case in architectures.product(model_type):
            with self.subTest(case.id):
                folder = architectures.write(case, support.scratch() / "architectures" / "product")
                ids = architectures.ids_of(case)
                ours, _ = check_forward(folder, ids, "--logits-only")
                theirs = architectures.mlx_logits(folder, ids, strict=case.strict)
                self.assertTrue(numpy.isfinite(theirs).all())
                error = relative(ours, theirs)
                self.assertLess(error, BOUND)
                worst, count = max(worst, error), count + 1
        print(f"{count} checkpoints, largest difference {worst:.1e} ", end="")


for one in architectures.TYPES:
    setattr(Product, "test_" + one, lambda self, model_type=one: self.check(model_type))


class Inspect(unittest.TestCase):
    """`qmlp inspect` says what the cases were made with."""

    def test_formats(self):
        seen = set()
        for case in architectures.CASES:
            result = measured(case.id)
            config = json.loads((result.folder / "config.json").read_text())
            entries = config.get("quantization", {})
            for path, module in result.modules.items():
                entry = entries.get(module["stored_path"])
                if isinstance(entry, dict):
                    self.assertEqual((module["bits"], module["group_size"]),
                                     (entry["bits"], entry["group_size"]), f"{case.id} {path}")
                self.assertIsNotNone(module["decode_kernel"], f"{case.id} {path}")
                seen.add((module["bits"], module["group_size"], module["scale_dtype"]))
        widths = {(bits, group) for bits, group, _ in seen if group}
        self.assertEqual(widths, {(bits, group) for bits in architectures.BITS
                                  for group in architectures.GROUPS})
        self.assertEqual({dtype for bits, group, dtype in seen if not group},
                         {"f32", "f16", "bf16"}, "float modules of every type")

    def test_features(self):
        expected = {
            "llama_llama3": dict(rope="llama3", rope_factor=8.0, head_dim=32),
            "llama_windows": dict(layers_with_window=[0, 2, 3], window=11),
            "smollm3_every_fourth": dict(layers_without_rope=[3], tie_word_embeddings=True),
            "qwen2_plain": dict(attention_bias=True, attention_output_bias=False),
            "qwen3_plain": dict(qk_norm=True, head_dim=32),
            "granite_tied": dict(residual_scale=0.22, logits_scale=0.125, attention_scale=0.35),
            "minicpm_head_missing": dict(tie_word_embeddings=True, embedding_scale=12.0),
            "phi3_su_partial": dict(rope="longrope", rotary_dim=12, head_dim=16),
        }
        for case_id, fields in expected.items():
            config = measured(case_id).config
            self.assertEqual({name: config[name] for name in fields}, fields, case_id)

    def test_text(self):
        text = support.qmlp("inspect", measured("phi3_su_partial").folder)
        self.assertIn("rope longrope", text)
        self.assertIn("12 of 16 features", text)
        self.assertIn("(of qkv_proj)", text)
        text = support.qmlp("inspect", measured("granite_untied_bias").folder)
        self.assertIn("linear biases on q, k, v, o, gate, up, down", text)
        self.assertIn("residual 0.22", text)
        text = support.qmlp("inspect", measured("llama_widths_unnamed").folder)
        self.assertIn("the shapes of", text)
        self.assertIn("tensor shapes", text)


class Refusals(unittest.TestCase):
    def test_each_is_one_line_with_status_2(self):
        for i, (what, changes) in enumerate(architectures.REFUSED):
            with self.subTest(what):
                status, line = refusal(i)
                self.assertEqual(status, 2, line)
                self.assertEqual(line.count("\n"), 1, line)
                self.assertTrue(any(name in line for name in changes), line)


class Convert(unittest.TestCase):
    def test_stacked_projections_stay_stacked(self):
        """A converted copy is the same model to mlx-lm, re-quantized or not."""
        result = measured("phi3_longrope")
        for name, options in (("kept", ()), ("requantized", ("--bits", "*.qkv_proj=8/32"))):
            folder = support.scratch() / "architectures" / name
            support.qmlp("convert", result.folder, folder, "--force", *options)
            ours = check_forward(folder, result.ids, "--logits-only")[0]
            theirs = architectures.mlx_logits(folder, result.ids)
            self.assertLess(relative(ours, theirs), BOUND)
            if not options:
                self.assertTrue((ours == result.logits).all())


class ModelsPage(unittest.TestCase):
    def test_is_fresh(self):
        self.assertEqual(models_page.staleness(models_page.PAGE.read_text(), page()), "",
                         "run tests/python/models_page.py")

    def test_sees_what_is_stale(self):
        fresh = page()
        self.assertEqual(models_page.staleness(fresh, fresh), "")
        self.assertIn("text differs", models_page.staleness(fresh.replace("qwen3", "qwen4"), fresh))
        figures = models_page.FIGURE.findall(fresh)
        self.assertEqual(len(figures), len({case.model_type for case in architectures.CASES}))
        lower = models_page.FIGURE.sub("1e-9", fresh)
        self.assertIn("promises 1e-9", models_page.staleness(lower, fresh))


if __name__ == "__main__":
    unittest.main()
