#!/usr/bin/env bash
# What only a GPU can show, in at most 8 minutes on one H200: every kernel held to float64, timed
# beside torch and beside its floor; training with kernels and without, to the same losses.
#
#   launch/gpu_check.sh [--steps N]
#
# It prints one table. Without a GPU it does what a CPU can, and says of the rest that it is untested.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
unset TRITON_INTERPRET RLT_DIST_OPS
exec timeout --kill-after=5 480 python tests/gpu/check.py "$@"
