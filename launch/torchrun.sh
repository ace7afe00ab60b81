#!/usr/bin/env bash
# Train on one machine with several processes: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]
set -euo pipefail
usage="usage: launch/torchrun.sh PROCESSES FILE [KEY.SUB=VALUE ...]"
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; }
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
exec rlt-dist launch torchrun --processes "$@"
