#!/usr/bin/env bash
# check_weak_symbols.sh BUILD: compiles each file that is built for an instruction set, at -O0 and -O2,
# with BUILD's own flags, and fails when an object defines a weak symbol. The linker keeps one copy of a
# weak function for the whole program; were it the one from an AVX2 file, older machines would crash.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?usage: check_weak_symbols.sh BUILD}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python3 - "$build/compile_commands.json" "$scratch" >"$scratch/commands" <<'PY'
import json, pathlib, re, shlex, sys

scratch = pathlib.Path(sys.argv[2])
for entry in json.load(open(sys.argv[1])):
    path = pathlib.Path(entry["file"])
    if path.parent.parts[-3:] != ("src", "cpu", "kernels"):
        continue
    words = shlex.split(entry["command"])
    if pathlib.Path(words[0]).name == "ccache":
        words = words[1:]
    words = [w for w in words if not re.fullmatch(r"-O\w|-g\w*|-DNDEBUG", w)]
    for level in ("-O0", "-O2"):
        out = scratch / f"{path.stem}{level}.o"
        words[words.index("-o") + 1] = str(out)
        print(f"cd {shlex.quote(entry['directory'])} && {shlex.join(words)} {level}"
              f" && echo {out}")
PY
[[ -s $scratch/commands ]] || { echo "no file of src/cpu/kernels in $build" >&2; exit 1; }
tr '\n' '\0' <"$scratch/commands" | xargs -0 -P "$(nproc)" -n 1 bash -c >"$scratch/objects"

status=0
while read -r object; do
  weak=$(nm -C --defined-only "$object" | awk '$2 ~ /^[WVu]$/')
  if [[ -n $weak ]]; then
    printf '%s defines weak symbols:\n%s\n' "$(basename "$object")" "$weak" >&2
    status=1
  fi
done <"$scratch/objects"
((status)) || echo "$(wc -l <"$scratch/objects") objects, no weak symbol"
exit $status
