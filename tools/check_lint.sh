#!/usr/bin/env bash
# check_lint.sh BUILD: clang-tidy over the sources of the library and the program, as BUILD compiles
# them. Files of one instruction set are left out: their intrinsics are not clang-tidy's subject, and
# they take minutes each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?usage: check_lint.sh BUILD}
[[ -f $build/compile_commands.json ]] || { echo "no $build/compile_commands.json" >&2; exit 1; }
mapfile -t files < <(git ls-files 'src/*.cc' 'cli/*.cc' | grep -v '^src/cpu/kernels/')
((${#files[@]})) || { echo "check_lint.sh: no files" >&2; exit 1; }
printf '%s\n' "${files[@]}" | xargs -P "$(nproc)" -n 4 clang-tidy --quiet -p "$build" \
  2> >(grep -v ' warnings\? generated' >&2)
