"""Search the settings (knobs) of a workload for the highest throughput within a memory budget.

From the best configuration (point) so far, the search changes one knob at a time: the implementation (attention,
dispatch, loss …), optimizer, attention backend, batch, dtype, checkpointing, compiler. Each point runs in its own
process. It must pass the correctness check of stepscope bench, and its loss must match that of the plainest variant.
Points that are predicted not to fit in memory are skipped. At the end, the best point, the runner-up and the defaults
are measured again in alternating runs.

WORKLOAD is a name (stepscope list workloads), hf:path/to/config.json, my.module:build or path/to/file.py:build.
A knob with one value is fixed; a knob with several values is searched. The exit code is 0 if any point is correct, 1
if none is, and 2 for a usage error.

examples:
  stepscope tune cs336 --preset tiny --set seq_len=64 --device cpu --minutes 3
  stepscope tune hydra --preset 100m --memory-budget 40GiB --minutes 20
  stepscope tune cs336 --preset small --dtype autocast_bf16 --over attention,batch,compile
  stepscope tune train.py:build --set attention=plain,fast --set batch=16
"""

import argparse
from dataclasses import asdict

from stepscope.cli.support.options import (
    add_point_arguments,
    add_sweep_arguments,
    place_of,
    seconds,
    typed_axes,
    typed_where,
    words,
)
from stepscope.cli.support.output import EXIT_INTERRUPTED, Progress, fill_closed_streams, print_document, tell
from stepscope.errors import need_torch
from stepscope.formatting import safe

FLAGS = ("mode", "dtype", "compile", "sdpa", "optimizer", "device")
EXIT_NOTHING_CORRECT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_point_arguments(parser, "workload to tune", FLAGS)
    add = parser.add_argument
    add("--over", default="", metavar="A,B", help="search only these knobs")
    add("--memory-budget", metavar="MEMORY", help="memory limit per point, e.g. 40GiB (default: none)")
    add("--minutes", type=seconds, default=10.0, metavar="M", help="time budget in minutes (default 10)")
    add_sweep_arguments(parser, timeout_s=None)


def main(arguments: argparse.Namespace) -> int:
    need_torch()
    from stepscope.api.tuning import TUNE_FILE, run_tuning
    from stepscope.document.tuning import tuning_document
    from stepscope.sweep.memory import bytes_of
    from stepscope.sweep.tuning.descent import INTERRUPTED, TIME

    fill_closed_streams()
    place = place_of(arguments, "tune", arguments.workload)
    with Progress(f"tuning {safe(arguments.workload, 40)}", silent_s=0.0) as progress:
        tuning = run_tuning(
            arguments.workload,
            typed_axes(arguments, FLAGS),
            words([arguments.over]),
            bytes_of(arguments.memory_budget),
            arguments.minutes,
            arguments.timeout,
            place,
            where=typed_where(arguments, arguments.start),
            progress=progress,
            on_line=progress.above(arguments.quiet),
        )
    if tuning.defaults is None:
        tell(f"stepscope tune: the defaults did not finish in {arguments.minutes:g} minutes: set a larger --minutes")
        return EXIT_NOTHING_CORRECT
    print_document(lambda: tuning_document(tuning), lambda: asdict(tuning), arguments.json)
    tell(f"stepscope: all rows in {place.folder}/results.jsonl, .csv, .md; the answer in {place.folder}/{TUNE_FILE}")
    if tuning.stopped in (TIME, INTERRUPTED):
        reason = "the time is up" if tuning.stopped == TIME else "interrupted"
        tell(f"stepscope: {reason}; continue with  {place.resume_command}")
    if tuning.stopped == INTERRUPTED:
        return EXIT_INTERRUPTED
    return 0 if tuning.best is not None else EXIT_NOTHING_CORRECT
