#!/usr/bin/env bash
# Fails when a C++ file is not as clang-format leaves it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
git ls-files -z '*.h' '*.cc' '*.cu' '*.cuh' | xargs -0 clang-format --dry-run -Werror
