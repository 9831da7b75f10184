"""What the checks share: where things are, the model converted once, the program's answers."""
import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
GAP = 1e-3  # below this distance of the two best logits, f32 summation order may choose

build = None
gguf = None


def setup(build_folder, gguf_file):
    global build, gguf
    build, gguf = build_folder, gguf_file
    for path in (program(), gguf):
        if not path.is_file():
            sys.exit(f"{path} is not there")
    scratch().mkdir(exist_ok=True)


def program(name="qmlp"):
    return build / name


def scratch():
    return build / "parity"


def run(*args, stdin=None):
    """Runs a program; its standard output. A failure carries standard error."""
    done = subprocess.run([str(arg) for arg in args], capture_output=True, text=True, input=stdin)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, args))}: status {done.returncode}\n{done.stderr}")
    return done.stdout


def package():
    """The qmlp package of this build."""
    folder = str(build / "python")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import qmlp as imported

    return imported


def script(name, *args):
    """What a script of the project prints that may import this build's package."""
    return python_run([str(DATA.parents[1] / name), *map(str, args)])


def python(code, **variables):
    """What Python code prints that may import this build's package."""
    return python_run(["-c", code], **variables)


def python_run(arguments, **variables):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(build / "python"), **variables})
    if done.returncode != 0:
        raise AssertionError(f"status {done.returncode}\n{done.stderr}")
    return done.stdout


def qmlp(*args):
    return run(program(), *args)


def qmlp_json(*args):
    return json.loads(qmlp(*args, "--json"))


@functools.cache
def model():
    """The GGUF file as an MLX checkpoint, converted by this build."""
    folder = scratch() / "smollm2"
    qmlp("convert", gguf, folder, "--force")
    return folder


@functools.cache
def mixed_model():
    """The re-quantized copy: gate, up and down with different widths."""
    folder = scratch() / "smollm2-mixed"
    qmlp("convert", model(), folder, "--force", "--bits", "gate=4,up=8,down=6")
    return folder


def joined(ids):
    return ",".join(str(int(i)) for i in ids)


def config(folder):
    return json.loads((folder / "config.json").read_text())


def spec(folder, module):
    """(bits, group) of a module by the rules of mlx-lm: an override replaces the default whole."""
    quantization = config(folder)["quantization"]
    entry = quantization.get(module, quantization)
    return entry["bits"], entry["group_size"]


def read(path, dtype, *shape):
    """A raw file of a dump program. bf16 comes as its uint16 patterns."""
    return numpy.fromfile(path, dtype).reshape(shape)


def bf16_patterns(values):
    """float64 values rounded once, ties to even, to bf16; their uint16 patterns. Finite input."""
    values = numpy.asarray(values, numpy.float64)
    bits = values.view(numpy.uint64)
    sign = (bits >> numpy.uint64(48)).astype(numpy.uint16) & numpy.uint16(0x8000)
    magnitude = numpy.abs(values)
    # Normal bf16 numbers have 8 significant bits from 2^-126 on; below, the grid is 2^-133.
    exponent = numpy.maximum(numpy.frexp(magnitude)[1] - 1, -126)
    unit = numpy.ldexp(1.0, exponent - 7)
    rounded = numpy.rint(magnitude / unit) * unit  # exact division and product, one rounding
    wide = rounded.astype(numpy.float32).view(numpy.uint32)
    return sign | (wide >> 16).astype(numpy.uint16)
