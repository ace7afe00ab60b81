#!/usr/bin/env bash
# Saved on every mesh and gone on from on every other; writes docs/resume.txt (26 minutes of processor time).
set -euo pipefail
cd "$(dirname "$0")/.."
source .venv/bin/activate
meshes=(1x1x1 2x1x1 1x2x1 1x1x2 2x2x2 1x4x1)
verify() { rlt-dist verify resume "$@" "${meshes[@]/#/--from=}" "${meshes[@]/#/--to=}"; }
models=(configs/verify/rlt1.yaml configs/verify/txl.yaml)
{
  echo "# Made by launch/verify_resume.sh: largest relative errors against the run that was not interrupted."
  echo "# float64: 0 on the same mesh, else 1e-9"
  verify "${models[@]}"
  echo "# float32, DeepSpeed goes on: 1e-5 of losses and gradient norms"
  verify "${models[@]}" --precision float32 --to-with optimizer.engine=deepspeed
  echo "# float32, DeepSpeed saves"
  verify "${models[@]}" --precision float32 --from-with optimizer.engine=deepspeed
  echo "# float32, DeepSpeed does both: 0 on the same mesh"
  verify "${models[@]}" --precision float32 \
    --from-with optimizer.engine=deepspeed --to-with optimizer.engine=deepspeed
} | tee docs/resume.txt
