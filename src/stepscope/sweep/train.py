"""An ordinary training loop over one point of a workload; `stepscope run -m stepscope.sweep.train POINT` records it.

POINT is the point as JSON: workload, preset, config, run. It trains on one batch of the workload's own, or with
`--data text` on a text that a DataLoader with `--workers` processes reads. The loop knows nothing of being recorded,
but for one thing: where no optimizer ends a step it says itself where one ends.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator

from stepscope.errors import UsageError
from stepscope.recorder import current
from stepscope.sweep import prepare
from stepscope.sweep.recorded import ASKED_BY
from stepscope.sweep.text_data import text_batches
from stepscope.workloads.registry import find
from stepscope.workloads.workload import Batch, Built

MAX_STEPS = 200
"""The end, should nobody ask it to stop after the last window."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("point", type=json.loads)
    parser.add_argument("--data", choices=("batch", "text"), default="batch")
    parser.add_argument("--workers", type=int, default=0)
    words = parser.parse_args(argv)
    point, run = words.point, words.point["run"]
    prepare.check_machine(run)
    prepare.apply_settings(run)
    workload = find(point["workload"])
    built = prepare.build(workload, workload.config(**point["config"]), int(run["seed"]), str(run["device"]))
    if not isinstance(built, Built):
        raise UsageError(f"{workload.name} is a whole step of its own: stepscope run records the script itself")
    dtype = prepare.weights_dtype(run)
    built.module.to(dtype)
    device = str(run["device"])
    batch = prepare.cast(prepare.make_batch(built, int(run["seed"]), device), dtype)
    one_pass = prepare.Pass(built.module, batch, run)
    batches: Iterator[Batch] = itertools.repeat(one_pass.batch, MAX_STEPS)
    if words.data == "text":
        vocab = point["config"].get("vocab", 0)
        batches = text_batches(one_pass.batch, vocab, MAX_STEPS, words.workers, device)
    asked_by = os.environ.get(ASKED_BY)
    for one_pass.batch in batches:
        if asked_by and asked_by != str(os.getppid()):
            return 0  # it was killed: nobody waits for the rest
        one_pass()
        if one_pass.optimizer is None and current.session is not None:
            current.session.explicit_step()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
