#!/usr/bin/env bash
# Train on one machine with several processes: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/.."
processes=${1:?usage: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]}
shift
# rlt_dist shares the cores among the processes itself; setting this keeps torchrun from warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/torchrun --standalone --nproc-per-node "$processes" -m rlt_dist train "$@"
