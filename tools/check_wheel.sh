#!/usr/bin/env bash
# check_wheel.sh [--cuda]: the Python package as users get it. An sdist, a wheel built from it, made portable,
# and installed into an empty environment with no compiler on its path; then it is used. --cuda: with the
# CUDA kernels (nvcc 12.4 or later in PATH), which must do no harm where there is no driver. PYTHON: the
# interpreter to build for, python3 unless set; from 3.12 on the wheel must be of the stable ABI.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tools/setup.sh

need_packages "${build_packages[@]}" "${python_packages[@]}"
need_space 1500000 "building the wheel"
cuda=
case ${1-} in
  '') ;;
  --cuda) cuda=ON ;;
  *) fail "unknown option $1: give --cuda or nothing" ;;
esac
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
need_python ".cache/wheel-tools-$version" tools/wheel-requirements.txt "$python"
tools=$PWD/.cache/wheel-tools-$version/bin
scratch=$PWD/.cache/wheel-check
rm -rf "$scratch"
mkdir -p "$scratch"

if command -v ccache >/dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
CMAKE_BUILD_PARALLEL_LEVEL=$(nproc)
export CMAKE_BUILD_PARALLEL_LEVEL

heading "sdist, then a wheel from it"
run "$tools/python" -m build --sdist --outdir "$scratch" .
sdist=("$scratch"/qmlp-*.tar.gz)
options=()
[[ -z $cuda ]] || options=(-C cmake.define.QMLP_CUDA=ON)
run "$tools/pip" wheel "${pip_options[@]}" "${options[@]}" --no-deps --wheel-dir "$scratch/built" \
  "${sdist[0]}"

heading "manylinux"
wheel=("$scratch"/built/qmlp-*.whl)
# libmlx comes from the mlx-cpu or mlx-cuda package that is installed beside qmlp.
PATH=$tools:$PATH run "$tools/auditwheel" repair --plat manylinux_2_35_x86_64 --exclude libmlx.so \
  --wheel-dir "$scratch/repaired" "${wheel[0]}"
wheel=("$scratch"/repaired/qmlp-*.whl)
tag="cp$version-cp$version"
((version < 312)) || tag=cp312-abi3
[[ ${wheel[0]} == *-$tag-manylinux* ]] || fail "${wheel[0]} is not tagged $tag"
((version < 312)) || unzip -l "${wheel[0]}" | grep -q '_native\.abi3\.so$' ||
  fail "the wheel's extension is not of the stable ABI"
du -h --apparent-size "${wheel[0]}"

heading "An empty environment"
run "$python" -m venv "$scratch/venv"
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

if [[ -n $cuda ]]; then
  heading "CUDA inside, and no driver here"
  library=$(alone python -c 'import qmlp; print(qmlp.get_library())')
  readelf -d "$library" "$scratch/venv/bin/qmlp" | grep 'NEEDED.*lib\(cuda\|nv\)' &&
    fail "the wheel needs CUDA libraries"
  run alone python -c 'import qmlp
problem = qmlp.LinearProblem(N=64, K=64)
answer = qmlp.supports(problem, "cuda")
if answer:
    raise SystemExit("not run: this machine has a driver")
print(answer)
assert answer.reason == "no_device" and "\n" not in str(answer), answer
assert "no CUDA: configure" not in str(answer), answer
try:
    qmlp.Plan(problem, device="cuda")
except qmlp.DeviceError as error:
    assert str(error) == str(answer), error
else:
    raise SystemExit("a plan for a device that is not there")'
fi

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
