#!/usr/bin/env bash
# Train over MPI: launch/mpirun.sh PROCESSES FILE [KEY.SUB=VALUE ...]
#
# On several machines, which must see the same files, HOSTS names a file with one of them a line.
set -euo pipefail
usage="usage: launch/mpirun.sh PROCESSES FILE [KEY.SUB=VALUE ...]"
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; }
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
exec rlt-dist launch mpirun ${HOSTS:+--hosts "$HOSTS"} --processes "$@"
