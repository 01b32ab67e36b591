"""An ordinary training loop over one point of a workload; `stepscope run -m stepscope.sweep.train POINT` records it.

POINT is the point as JSON: workload, preset, config, run. The loop knows nothing of being recorded.
"""

from __future__ import annotations

import json
import sys

from stepscope.errors import UsageError
from stepscope.sweep import prepare
from stepscope.workloads.registry import find
from stepscope.workloads.workload import Built

MAX_STEPS = 200
"""The end, should nobody ask it to stop after the last window."""


def main(argv: list[str]) -> int:
    point = json.loads(argv[0])
    run = point["run"]
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
    for _ in range(MAX_STEPS):
        one_pass()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
