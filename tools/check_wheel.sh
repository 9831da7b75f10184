#!/usr/bin/env bash
# check_wheel.sh: the Python package as users get it. An sdist, a wheel built from it, made portable, and
# installed into an empty environment with no compiler on its path; then it is used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh

need_packages "${build_packages[@]}" "${python_packages[@]}"
need_space 1500000 "building the wheel"
need_python .cache/wheel-tools tools/wheel-requirements.txt
tools=$PWD/.cache/wheel-tools/bin
scratch=$PWD/.cache/wheel-check
rm -rf "$scratch"
mkdir -p "$scratch"

if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL

heading "sdist, then a wheel from it"
run "$tools/python" -m build --sdist --outdir "$scratch" .
sdist=("$scratch"/qmlp-*.tar.gz)
run "$tools/pip" wheel "${pip_options[@]}" --no-deps --wheel-dir "$scratch/built" "${sdist[0]}"

heading "manylinux"
wheel=("$scratch"/built/qmlp-*.whl)
# libmlx comes from the mlx-cpu or mlx-cuda package that is installed beside qmlp.
PATH=$tools:$PATH run "$tools/auditwheel" repair --plat manylinux_2_35_x86_64 --exclude libmlx.so \
  --wheel-dir "$scratch/repaired" "${wheel[0]}"
wheel=("$scratch"/repaired/qmlp-*.whl)

heading "An empty environment"
run python3 -m venv "$scratch/venv"
run "$scratch/venv/bin/pip" install "${pip_options[@]}" "${wheel[0]}"
alone() { env -i "PATH=$scratch/venv/bin" HOME="$scratch" "$@"; }
cd "$scratch"
run alone python "$OLDPWD/examples/python/numpy_ops.py"
run alone qmlp info
[[ $(alone qmlp --version) == "qmlp $(alone python -c 'import qmlp; print(qmlp.__version__)')" ]] ||
  fail "the program and the package have two versions"
# Without MLX, one sentence.
said=$(alone python -c 'import qmlp.mlx' 2>&1 | tail -1) || true
[[ $said == "ImportError: qmlp.mlx needs mlx "* ]] ||
  fail "import qmlp.mlx without MLX does not say what it needs: $said"

heading "The C library inside the package"
include=$(alone python -c 'import qmlp; print(qmlp.get_include())')
library=$(alone python -c 'import qmlp; print(qmlp.get_library())')
run cc -std=c11 -Wall -Werror -pedantic "-I$include" "$OLDPWD/examples/c/linear.c" "$library" -lm \
  "-Wl,-rpath,$(dirname "$library")" -o "$scratch/linear"
run "$scratch/linear"

heading "With MLX, as qmlp[mlx] asks for it"
run "$scratch/venv/bin/pip" install "${pip_options[@]}" "${wheel[0]}[mlx]"
run alone python -c 'import mlx.core as mx, qmlp.mlx as q
w = q.quantize(mx.ones((8, 64)))
y = q.quantized_linear(mx.ones((2, 64)), q.pack(w))
assert y.tolist() == [[64.0] * 8] * 2, y
print("qmlp.mlx on mlx", mx.__version__)'
