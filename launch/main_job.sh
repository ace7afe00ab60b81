#!/usr/bin/env bash
# The main job, end to end: real text -> tokenizer -> shards -> training on two processes, killed
# half-way -> resumed -> evaluated -> sampled -> reported.
#
#   launch/main_job.sh [rlt|transformer_xl] [KEY.SUB=VALUE ...]
#
# The text is the source of the Python standard library that is installed here: one file a document.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
model=${1:-rlt}
shift || true
config=configs/${model}_stdlib.yaml
corpus=${CORPUS:-runs/corpus}
run=${RUN:-runs/$model}
eval_tokens=${EVAL_TOKENS:-100000}
[ -f "$config" ] || { echo "no $config; MODEL is rlt or transformer_xl" >&2; exit 2; }

say() { printf '\n== %s\n' "$*"; }
show() { printf '$ %s\n' "$*"; "$@"; }
train=(launch/torchrun.sh 2 "$config" "run_folder=$run" "data.path=$corpus" "$@")

last_step() { tail -n 1 "$run/metrics.jsonl" 2>/dev/null | grep -o '"step": [0-9]*' | grep -o '[0-9]*'; }

kill_half_way() {
  local half=$1 pid=$2
  until [ "$(last_step || echo 0)" -ge "$half" ]; do
    kill -0 "$pid" 2>/dev/null || { wait "$pid"; return; }
    sleep 0.2
  done
  pkill -KILL -f "rlt_dist train .*run_folder=$run " || true
  wait "$pid" || true
}

say "1. Prepare: raw files to a tokenizer and shards"
stdlib=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
show rlt-dist data prepare --input "$stdlib" --pattern '*.py' --exclude site-packages \
  --exclude test --exclude tests --train 0.8 --validation 0.1 --test 0.1 --output "$corpus" --tokenizer tokenizer/bpe.yaml

say "2. Train on two processes, and kill them half-way with SIGKILL"
rm -rf "$run"
steps=$(python - "$config" "$@" <<'PY'
import sys
from pathlib import Path
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
print(load_typed(Path(sys.argv[1]), RunConfig, sys.argv[2:]).train.steps)
PY
)
printf '$ %s &\n' "${train[*]}"
"${train[@]}" &
kill_half_way $((steps / 2)) $!
echo "killed after step $(last_step) of $steps"

say "3. Resume: the same command goes on from the newest whole checkpoint"
show "${train[@]}"

say "4. Evaluate on held-out files: state carried from segment to segment, and cut at each"
show rlt-dist eval "$run" --split test --state both --max-tokens "$eval_tokens"

say "5. Sample"
show rlt-dist generate "$run" --prompt $'def read_lines(path):\n' --tokens 120 --top-p 0.9 | tee "$run/sample.txt"

say "6. Report"
show rlt-dist report "$run"
