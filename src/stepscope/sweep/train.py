"""An ordinary training loop over one point of a workload; `stepscope run -m stepscope.sweep.train POINT` records it.

POINT is the point as JSON: workload, preset, config, run. It trains on one batch of the workload, or with
`--data text` on a text that a DataLoader with `--workers` processes reads. The loop does not know that it is
recorded, except that it marks the end of a step itself if there is no optimizer.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator

from stepscope.errors import UsageError
from stepscope.recorder import current
from stepscope.sweep import prepare
from stepscope.sweep.record_runs import PARENT_VARIABLE
from stepscope.sweep.text_data import text_batches
from stepscope.workloads.registry import find
from stepscope.workloads.workload import Batch, Built

MAX_STEPS = 200  # where it stops if the recorder does not stop it after the last window


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
        raise UsageError(f"{workload.name} is a complete training step. Record your own script with stepscope run.")
    one_pass = prepare.Pass(built.module, prepare.cast_to_point(built, run), run)
    batches: Iterator[Batch] = itertools.repeat(one_pass.batch, MAX_STEPS)
    if words.data == "text":
        vocab = point["config"].get("vocab", 0)
        batches = text_batches(one_pass.batch, vocab, MAX_STEPS, words.workers, str(run["device"]))
    parent = os.environ.get(PARENT_VARIABLE)
    for one_pass.batch in batches:
        if parent and parent != str(os.getppid()):
            return 0  # the parent was killed, so nobody needs the rest
        one_pass()
        if one_pass.optimizer is None and current.session is not None:
            current.session.explicit_step()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
