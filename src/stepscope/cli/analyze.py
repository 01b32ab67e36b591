"""Show where the time in a trace goes; with --memory, what filled the memory.

--attention shows the backend of each attention call, and why it is not flash attention. --copies shows where copies
and casts come from, and what a step would take without them. --compiler shows what torch.compile did, why, and what
it cost.

Reads PyTorch profiler traces (.json, .json.gz), a folder with one trace per rank, or a recording. Needs neither torch
nor a GPU. The parsed trace is cached next to the file (<trace>.stepscope) until the trace changes. --memory also
reads CUDA memory snapshots (.pickle), without executing them. Given two recordings with different sequence lengths or
batch sizes, it shows how memory grows.

examples:
  stepscope analyze trace.json.gz
  stepscope analyze traces/ --rank 3
  stepscope analyze runs/train-20260101-120000 --step 12 --top 30
  stepscope analyze trace.json.gz --json | jq .ranks[0].gpu_time
  stepscope analyze --memory runs/train-20260101-120000 -o memory.svg
  stepscope analyze --memory snapshot.pickle
  stepscope analyze --memory runs/length-512 runs/length-1024
  stepscope analyze --attention runs/train-20260101-120000
  stepscope analyze --copies trace.json.gz
  stepscope analyze --compiler runs/train-20260101-120000
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.cli import analyze_views
from stepscope.cli.support.numbers import positive
from stepscope.errors import StepscopeError, UsageError

if TYPE_CHECKING:
    from stepscope.document.model import Document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this verb's options."""
    parser.add_argument(
        "paths", type=Path, nargs="*", metavar="PATH", help="recording or trace (default: latest run)"
    )
    parser.add_argument("--memory", action="store_true", help="show what filled the memory")
    parser.add_argument("--attention", action="store_true", help="show attention backends, and why not flash")
    parser.add_argument("--copies", action="store_true", help="show where copies and casts come from")
    parser.add_argument("--compiler", action="store_true", help="show what torch.compile did and what it cost")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text (docs/analyze.md)")
    parser.add_argument("-o", "--output", type=Path, metavar="SVG", help="with --memory: draw the timeline")
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    parser.add_argument("--rank", type=int, metavar="R", help="only this rank")
    parser.add_argument("--top", type=positive, default=8, metavar="N", help="rows in lists of names (default 8)")
    parser.add_argument("--no-cache", action="store_true", help="do not use or write the cache")


def main(arguments: argparse.Namespace) -> int:
    """Analyze and print."""
    # Polars' allocator keeps freed memory for half a second; returning it sooner lowers the peak by a sixth. Polars
    # reads this when it is loaded.
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:100,muzzy_decay_ms:0")
    gc.disable()  # hardly any cycles are made here, and a collection walks all imported modules
    if (view := analyze_views.asked(arguments)) is not None:
        return analyze_views.show(arguments, view)
    if arguments.memory:
        return _memory(arguments)
    if arguments.output:
        raise UsageError("-o draws memory over time: use it with --memory")
    from stepscope.cli.support.output import print_document
    from stepscope.cli.support.progress import Progress
    from stepscope.session import open_session

    with Progress("reading") as progress:
        use_cache = not arguments.no_cache
        session = open_session(arguments.paths, rank=arguments.rank, use_cache=use_cache, progress=progress)
        analysis = session.analyze(arguments.step)

    def document() -> Document:
        from stepscope.document.analysis import analysis_document

        return analysis_document(analysis, arguments.top)

    print_document(document, lambda: analysis.to_json(arguments.top), arguments.json)
    return 0


def _memory(arguments: argparse.Namespace) -> int:
    from stepscope.cli.support.output import print_document
    from stepscope.cli.support.progress import Progress
    from stepscope.session import open_session
    from stepscope.session.memory_growth import analyze_memory

    output: Path | None = arguments.output
    if arguments.step is not None:
        raise UsageError(
            "--step does not go with --memory: a memory window covers one step, a trace's peak lies in one"
        )
    if output is not None and output.suffix != ".svg":
        raise UsageError(f"{output}: the timeline is an SVG, name it {output.with_suffix('.svg')}")
    if output is not None and output.exists():
        raise UsageError(f"{output} exists: name another file, or remove it")
    with Progress("reading") as progress:
        analysis = analyze_memory(
            [
                open_session(path, rank=arguments.rank, use_cache=not arguments.no_cache, progress=progress)
                for path in arguments.paths or [None]
            ]
        )
    if output is not None:
        from stepscope.document.memory_charts import allocator_timeline
        from stepscope.render.svg import svg_of

        try:
            output.write_text(svg_of(allocator_timeline(analysis.reports[0].account)), encoding="utf-8")
        except OSError as error:
            raise StepscopeError(f"{output} could not be written: {error.strerror or error}") from None

    def document() -> Document:
        from stepscope.document.sections.memory import memory_document

        return memory_document(analysis, arguments.top)

    print_document(document, lambda: analysis.to_json(arguments.top), arguments.json)
    return 0
