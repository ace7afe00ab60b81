#!/usr/bin/env bash
# Train on one machine with several processes: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]
set -euo pipefail
usage="usage: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]"
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; }
processes=$1
shift
environment=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv
# The processes share the cores; torchrun would give each of them one.
share=$(($(nproc) / processes))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((share > 0 ? share : 1))}
# What the processes understand (rlt-dist train --help), torchrun is to pass on to them.
exec "$environment/bin/torchrun" --standalone --nproc-per-node "$processes" \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m rlt_dist train "$@"
