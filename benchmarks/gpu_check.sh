#!/usr/bin/env bash
# Everything that needs a GPU, in one go; writes its tables to the folder given.
set -u
out=${1:?where to write}
export PYTHONPATH=src
python3 -m stepscope doctor > "$out/doctor.txt" 2>&1
python3 -m pytest tests/gpu -m gpu -q -p no:cacheprovider --timeout 280 2>&1 | tee "$out/pytest.txt" | tail -60
python3 -m stepscope run -o "$out/gpt" --force examples/train_gpt.py --steps 60 > "$out/card.txt" 2> "$out/card.err"
cat "$out/card.txt"
python3 benchmarks/overhead.py --device cuda --seconds "${2:-30}" 2>&1 | tee "$out/overhead.txt"
