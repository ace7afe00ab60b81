#!/usr/bin/env bash
# Prepare a corpus with MPI: launch/prepare_mpi.sh PROCESSES --input ... --output ... --tokenizer ...
#
# One process leads, the others work, so PROCESSES is one more than the CPUs that are to work. On
# several machines, which must see the same files, HOSTS names a file with one of them a line:
#   HOSTS=machines.txt launch/prepare_mpi.sh 33 --input ...
# Under Slurm: slurm/prepare.sbatch.
set -euo pipefail
usage="usage: launch/prepare_mpi.sh PROCESSES OPTION ... (those of rlt-dist data prepare)"
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "$usage" >&2; exit 2; }
processes=$1
shift
PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec mpirun ${HOSTS:+-f "$HOSTS"} -n "$processes" python -m rlt_dist data prepare --mpi "$@"
