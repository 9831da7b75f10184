#!/usr/bin/env bash
# check_torch.sh BUILD: tests/torch, and what of it needs a GPU where there is one, and
# examples/python/torch_ops.py, against the package in a build folder
# that was configured with QMLP_PYTHON=ON for the Python in PATH or $PYTHON. Run by .ci/run, not by ./test:
# torch and the libraries it needs are 5 GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${1:?usage: check_torch.sh BUILD}
python=${PYTHON:-python3}
[[ -d $build/python/qmlp ]] || { echo "no $build/python/qmlp: configure with -DQMLP_PYTHON=ON" >&2; exit 1; }
"$python" -c 'import torch, numpy, ml_dtypes; print("torch", torch.__version__)' ||
  { echo "needs: pip install torch numpy ml_dtypes" >&2; exit 1; }
export PYTHONPATH=$build/python
"$python" tests/torch/test_torch.py
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  "$python" tests/torch/test_torch_cuda.py
else
  echo "not run: tests/torch/test_torch_cuda.py (no CUDA device)"
fi
"$python" examples/python/torch_ops.py
