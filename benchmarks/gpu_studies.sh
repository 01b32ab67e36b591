#!/usr/bin/env bash
# The studies on a machine with a GPU, for so many seconds: called again, it goes on where it was.
#   benchmarks/gpu_studies.sh OUTPUT_FOLDER SECONDS [STUDY…]
# The pages are made elsewhere, from what was stored: stepscope report OUTPUT_FOLDER/STUDY
set -u
out=${1:?where to write}
seconds=${2:?for how long}
shift 2
export PYTHONPATH=src
[ $# -gt 0 ] || set -- tsmoe cs336 megalodon hydra nano
for study in "$@"; do
  left=$((seconds - SECONDS))
  [ "$left" -gt 5 ] || break
  echo "== $study, $left s left"
  timeout "$left" python3 -m stepscope study "$study" "${MODE:---full}" --no-report --resume -o "$out/$study" 2>&1 | tail -n 5
done
