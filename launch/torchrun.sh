#!/usr/bin/env bash
# Train on one machine with several processes: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]
set -euo pipefail
cd "$(dirname "$0")/.."
processes=${1:?usage: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]}
shift
# The processes share the cores; torchrun would give each of them one.
share=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
exec .venv/bin/torchrun --standalone --nproc-per-node "$processes" -m rlt_dist train "$@"
