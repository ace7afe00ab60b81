#!/usr/bin/env bash
# Train as a step of Slurm's: launch/srun.sh PROCESSES FILE [KEY.SUB=VALUE ...]
#
# PROCESSES is the number of all ranks. NODES is how many nodes they are on (default 1); the rest is
# said by srun's own variables, such as SLURM_PARTITION.
set -euo pipefail
usage="usage: launch/srun.sh PROCESSES FILE [KEY.SUB=VALUE ...]"
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; }
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
exec rlt-dist launch srun --nodes "${NODES:-1}" --processes "$@"
