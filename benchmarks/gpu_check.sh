#!/usr/bin/env bash
# Everything that needs a GPU, in one go: what docs/results/ holds comes from here.
#   benchmarks/gpu_check.sh OUTPUT_FOLDER [SECONDS_PER_OVERHEAD_LOOP] [PYTEST_OPTIONS…]
set -u
out=${1:?where to write}
seconds=${2:-60}
shift 2
export PYTHONPATH=src
python3 benchmarks/overhead.py --device cuda --seconds "$seconds" 2>&1 | tee "$out/overhead.txt"
for mode in eager compile; do
  option=$([ "$mode" = compile ] && echo --compile)
  python3 -m stepscope run --force -o "$out/$mode" examples/train_gpt.py --steps 60 $option \
    > "$out/card-$mode.txt" 2> /dev/null
  cat "$out/card-$mode.txt"
done
python3 -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -q -m gpu "$@" tests/gpu 2>&1 | tee "$out/pytest.txt"
python3 -m stepscope doctor > "$out/doctor.txt" 2> /dev/null
