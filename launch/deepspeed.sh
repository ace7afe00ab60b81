#!/usr/bin/env bash
# Train with DeepSpeed's launcher: launch/deepspeed.sh HOSTFILE FILE [KEY.SUB=VALUE ...]
#
# HOSTFILE is DeepSpeed's: lines such as `node1 slots=8`.
set -euo pipefail
usage="usage: launch/deepspeed.sh HOSTFILE FILE [KEY.SUB=VALUE ...]"
[[ $# -ge 2 && -f $1 ]] || { echo "$usage" >&2; exit 2; }
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
exec rlt-dist launch deepspeed --hosts "$@"
