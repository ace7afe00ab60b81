#!/usr/bin/env bash
# A larger real corpus, end to end: two Debian packages -> two corpora with one tokenizer -> a model
# trained on their mixture -> evaluated on each. Needs Debian or a relative of it, and its mirror.
#
#   launch/debian_corpora.sh [KEY.SUB=VALUE ...]
#
# dict-gcide: a dictionary, 40 MB in one file, cut at empty lines into 250,000 short documents.
# linux-doc: the kernel's documentation, 42 MB in 8,800 compressed files, one document each.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
raw=runs/debian/raw
show() { printf '$'; printf ' %q' "$@"; echo; "$@"; }

mkdir -p "$raw"
if [ ! -e "$raw/linux" ]; then
  (cd "$raw" && apt-get -qq download dict-gcide linux-doc-6.1)
  for package in "$raw"/*.deb; do dpkg-deb -x "$package" "$raw/files"; done
  # dictzip is gzip with an index: read as any .gz
  mv "$raw/files/usr/share/dictd/gcide.dict.dz" "$raw/gcide.txt.gz"
  mv "$raw/files/usr/share/doc/linux-doc-6.1/Documentation" "$raw/linux"
fi

show rlt-dist data prepare --input "$raw/gcide.txt.gz" --separator $'\n\n' \
  --output runs/debian/gcide --tokenizer tokenizer/bpe.yaml
show rlt-dist data prepare --input "$raw/linux" --pattern '*.gz' --exclude images \
  --output runs/debian/linux --tokenizer runs/debian/gcide/tokenizer.json
show rlt-dist data stats runs/debian/gcide --split train
show rlt-dist data stats runs/debian/linux --split train
show launch/torchrun.sh 2 configs/rlt_debian.yaml "$@"
show rlt-dist eval runs/debian/rlt --data runs/debian/gcide --split test --max-tokens 100000
show rlt-dist eval runs/debian/rlt --data runs/debian/linux --split test --max-tokens 100000
