#!/usr/bin/env bash
# Run the studies on a machine with a GPU within a time budget. Run it again to continue.
#   benchmarks/gpu_studies.sh OUTPUT_FOLDER SECONDS [STUDY…]
# Make the pages elsewhere: stepscope report OUTPUT_FOLDER/STUDY
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
