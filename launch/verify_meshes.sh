#!/usr/bin/env bash
# Every model on every mesh, held to one process; writes docs/meshes.txt (about half an hour on 2 cores).
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
meshes=(1x1x1 2x1x1 1x1x2 1x2x1 1x2x2 2x2x1 2x1x2 1x4x1 1x1x4 2x2x2)
verify() { rlt-dist verify mesh "$@" "${meshes[@]/#/--mesh=}"; }
{
  echo "# Made by launch/verify_meshes.sh: largest relative errors against one process, in float64."
  verify configs/verify/*.yaml \
    --variant "train.micro_batch=1 recompute.decoder_chunk=5 recompute.layers=true" \
    --variant "train.micro_batch=4"
  verify configs/verify/rlt[12]*.yaml --variant "train.micro_batch=1 pipeline.group=2 pipeline.in_flight=1"
  verify configs/verify/txl*.yaml --variant "train.micro_batch=1 pipeline.schedule=gpipe"
} | tee docs/meshes.txt
