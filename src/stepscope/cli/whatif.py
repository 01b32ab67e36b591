"""What a step would take if something in it were different: the trace is played again with the change.

The replay keeps the host's own time, the order of launches, streams and waits, and what each launch and each pause
took: making kernels faster on a step that waits for its host saves nothing, and is seen to save nothing
(docs/whatif.md). Work is chosen by FIELD=PATTERN, several with commas: class, kernel, op, called (the op that the
program called), module, phase; * stands for anything.

examples:
  stepscope whatif trace.json.gz
  stepscope whatif trace.json.gz --scale 'class=attention:0.5'
  stepscope whatif trace.json.gz --scale 'class=gemm,phase=backward:0.7' --scale 'module=layers.0:0'
  stepscope whatif trace.json.gz --drop-launches 'called=aten::contiguous'
  stepscope whatif runs/train-20260101-120000 --host 0.1 --no-waits
"""

from __future__ import annotations

import argparse
from pathlib import Path

from stepscope.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument("path", type=Path, nargs="?", metavar="PATH", help="recording or trace (default: latest run)")
    parser.add_argument(
        "--scale", action="append", default=[], metavar="WORK:FACTOR", help="this GPU work takes FACTOR of its time"
    )
    parser.add_argument(
        "--drop-launches",
        action="append",
        default=[],
        metavar="WORK",
        help="this GPU work is gone, and the host's time for it",
    )
    parser.add_argument("--host", type=float, metavar="FACTOR", help="the host takes FACTOR of its own time")
    parser.add_argument("--no-waits", action="store_true", help="the host never waits for the GPU within a step")
    parser.add_argument(
        "--clean", action="store_true", help="first take off what the profiler adds: the step as it runs without it"
    )
    parser.add_argument("--rank", type=int, metavar="R", help="this rank (default: the first)")
    parser.add_argument("--json", action="store_true", help="one JSON object (docs/whatif.md)")
    parser.add_argument("--no-cache", action="store_true", help="read the trace itself and keep nothing")


def main(arguments: argparse.Namespace) -> int:
    """Replay and print."""
    from stepscope.api import what_if
    from stepscope.cli.support.output import print_document
    from stepscope.cli.support.progress import Progress

    with Progress("reading") as progress:
        answer = what_if(
            arguments.path,
            scale=[_scale(word) for word in arguments.scale],
            drop_launches=arguments.drop_launches,
            host=arguments.host,
            waits=not arguments.no_waits,
            clean=arguments.clean,
            rank=arguments.rank,
            use_cache=not arguments.no_cache,
            progress=progress,
        )

    from stepscope.document.what_if import what_if_document

    print_document(lambda: what_if_document(answer), answer.to_json, arguments.json)
    return 0


def _scale(word: str) -> tuple[str, float]:
    work, is_there, factor = word.rpartition(":")
    try:
        value = float(factor)
    except ValueError:
        value = -1.0
    if not is_there or not 0 <= value < float("inf"):
        raise UsageError(f"--scale {word!r}: write WORK:FACTOR, as in 'class=attention:0.5'")
    return work, value
