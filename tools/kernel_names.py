"""The grammar of kernel names: <op>_<activation>_<codes>_<tile>_<isa>, docs/kernels.md."""
import json
import re
import subprocess

NAME = re.compile(
    r"(?P<op>linear|swiglu)_"
    r"(?P<activation>bf16|f16|f32)_"
    r"(?P<codes>any|(u[234568]){1,2})_"
    r"(?P<tile>m[1-9]\d*n[1-9]\d*(k[1-9]\d*)?)_"
    r"(?P<isa>portable|avx2|avx512|neon|sm80|sm90a)"
)
DEVICE_OF_ISA = {"sm80": "cuda", "sm90a": "cuda"}


def table(program):
    """The rows of `qmlp info --kernels --json`, each with its name's parts under "parts"."""
    text = subprocess.run([program, "info", "--kernels", "--json"], check=True,
                          capture_output=True, text=True).stdout
    rows = json.loads(text)["kernels"]
    for row in rows:
        match = NAME.fullmatch(row["name"])
        row["parts"] = match.groupdict() if match else None
    return rows


def errors(rows):
    """What is wrong with the rows, one line each."""
    found = [] if rows else ["the table is empty"]
    seen = set()
    for row in rows:
        name, parts = row["name"], row["parts"]
        if name in seen:
            found.append(f"{name}: listed twice")
        seen.add(name)
        if parts is None:
            found.append(f"{name}: not <op>_<activation>_<codes>_<tile>_<isa>")
            continue
        if parts["isa"] != row["isa"]:
            found.append(f"{name}: runs on {row['isa']}")
        if row["device"] != DEVICE_OF_ISA.get(row["isa"], "cpu"):
            found.append(f"{name}: device is {row['device']}")
        tensor = row["accumulation"] == "tensor"
        if tensor != ("k" in parts["tile"]):
            found.append(f"{name}: accumulation {row['accumulation']}; a tile names k exactly where "
                         "the tensor contract's steps of 16 are summed")
        if tensor and parts["activation"] == "f32":
            found.append(f"{name}: the tensor contract has no f32 activations")
        if parts["op"] == "linear" and parts["codes"].count("u") > 1:
            found.append(f"{name}: a linear kernel has one weight")
    return found
