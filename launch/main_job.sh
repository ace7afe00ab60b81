#!/usr/bin/env bash
# The main job, end to end: real text -> tokenizer -> shards -> training on two processes, killed
# half-way -> resumed -> evaluated -> sampled -> reported.
#
#   launch/main_job.sh [rlt|transformer_xl] [KEY.SUB=VALUE ...]
#
# The text is the source of the Python standard library that is installed here: one file a document.
# CORPUS, RUN and EVAL_TOKENS in the environment change where it goes and how much is evaluated.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
model=${1:-rlt}
shift || true
config=configs/${model}_stdlib.yaml
corpus=${CORPUS:-runs/corpus}
run=${RUN:-runs/$model}
eval_tokens=${EVAL_TOKENS:-100000}
train=(launch/torchrun.sh 2 "$config" "run_folder=$run" "data.path=$corpus" "$@")

stop() { printf 'main job: %s\n' "$1" >&2; exit 2; }
say() { printf '\n== %s\n' "$*"; }
echo_command() { printf '$'; printf ' %q' "$@"; echo; }
show() { echo_command "$@"; "$@"; }

# The number of the last step recorded, or 0.
last_step() {
  { tail -n 1 "$run/metrics.jsonl" 2>/dev/null || true; } | sed -n 's/.*"step": \([0-9]*\).*/\1/p' | grep . || echo 0
}

descendants() {
  local child
  for child in $(cat "/proc/$1/task/"*/children 2>/dev/null); do echo "$child"; descendants "$child"; done
}

# Kill process $2 and all it started, with SIGKILL, once step $1 has been recorded.
kill_after_step() {
  until [ "$(last_step)" -ge "$1" ]; do
    kill -0 "$2" 2>/dev/null || stop "training ended before it could be killed"
    sleep 0.2
  done
  # shellcheck disable=SC2046  # a list of numbers
  kill -KILL "$2" $(descendants "$2")
  wait "$2" 2>/dev/null || true
}

[ -f "$config" ] || stop "no $config; the model is rlt or transformer_xl"
[ ! -e "$run" ] || [ -f "$run/config.yaml" ] || stop "$run is there and is no run folder; give another RUN"

say "1. Prepare: raw files to a tokenizer and shards"
stdlib=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
show rlt-dist data prepare --input "$stdlib" --pattern '*.py' --exclude site-packages \
  --exclude test --exclude tests --train 0.8 --validation 0.1 --test 0.1 \
  --output "$corpus" --tokenizer tokenizer/bpe.yaml

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
echo_command "${train[@]}"
"${train[@]}" &
kill_after_step $((steps / 2)) $!
echo "killed after step $(last_step) of $steps"

say "3. Resume: the same command goes on from the newest whole checkpoint"
show "${train[@]}"

say "4. Evaluate on held-out files: state carried from segment to segment, and cut at each"
show rlt-dist eval "$run" --split test --state both --max-tokens "$eval_tokens"

say "5. Sample"
sample=(rlt-dist generate "$run" --prompt $'def read_lines(path):\n' --tokens 120 --top-p 0.9)
echo_command "${sample[@]}"
"${sample[@]}" | tee "$run/sample.txt"

say "6. Report"
show rlt-dist report "$run"
