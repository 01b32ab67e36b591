"""Show where the time in a trace goes; with --memory, what takes up memory.

--attention shows the backend of each attention call and, if it is not flash attention, why. --copies shows where
copies and casts come from, and how long a step would take without them. --compiler shows what torch.compile did, why,
and what it cost. --hang reads a folder with a flight-recorder dump of each rank, without executing them, and names
the collective that hangs and the ranks that did not come to it (docs/hangs.md).

Reads PyTorch profiler traces (.json, .json.gz), SQLite files of Nsight Systems and rocprofv3 (docs/nsight.md), a
folder with one trace per rank, or a recording. Needs neither torch nor a GPU. The parsed trace is kept in your cache
folder (~/.cache/stepscope) until the trace changes. --memory also reads CUDA memory snapshots (.pickle), without
executing them. Given two recordings with different sequence lengths or batch sizes, --memory shows how memory grows.

examples:
  stepscope analyze trace.json.gz
  stepscope analyze traces/ --rank 3
  stepscope analyze runs/train-20260101-120000 --step 26 --top 30
  stepscope analyze trace.json.gz --json | jq .ranks[0].gpu_time
  stepscope analyze --memory runs/train-20260101-120000 -o memory.svg
  stepscope analyze --memory snapshot.pickle
  stepscope analyze --memory runs/length-512 runs/length-1024
  stepscope analyze --attention runs/train-20260101-120000
  stepscope analyze --copies trace.json.gz
  stepscope analyze --compiler runs/train-20260101-120000
  stepscope analyze --hang dumps/
  stepscope analyze --sql trace.json.gz "select kind, count(*) as num from host group by kind"
"""

import argparse
import os
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.cli.support.ahead import import_beside
from stepscope.cli.support.answers import answer
from stepscope.cli.support.options import add_source_arguments, add_spread_argument, opened, positive
from stepscope.cli.support.output import print_document, write
from stepscope.errors import StepscopeError, UsageError
from stepscope.session import latest_run

if TYPE_CHECKING:
    from stepscope.session.memory_scaling import MemoryAnalysis

NUM_ROWS = 8  # in lists of names on a terminal
VIEWS = {
    "memory": "show what takes up memory",
    "attention": "show attention backends, and why flash was not used",
    "copies": "show where copies and casts come from",
    "compiler": "show what torch.compile did and what it cost",
    "hang": "name the collective that hangs, from dumps",
    "sql": "query the tables with SQL (analyze --sql --help)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("paths", type=Path, nargs="*", metavar="PATH", help="recording or trace (default: latest run)")
    for name, about in VIEWS.items():
        add(f"--{name}", action="store_true", help=about)
    add("--json", action="store_true", help="print JSON instead of text (docs/analyze.md)")
    add("-o", "--output", type=Path, metavar="SVG", help="with --memory: draw the timeline to this file")
    add("--step", type=int, metavar="N", help="only this step")
    add("--top", type=positive, metavar="N", help="rows in lists of names (default 8; all in JSON)")
    add_source_arguments(parser, "only this rank")
    add_spread_argument(parser)


def main(arguments: argparse.Namespace) -> int:
    # Polars' allocator keeps freed memory for half a second, in four parts for each core, and returns it in a thread
    # that wakes ten times per second; returning it sooner lowers the peak by a tenth. Polars reads this once
    conf = "background_thread:false,dirty_decay_ms:1,muzzy_decay_ms:0,narenas:1"
    os.environ.setdefault("_RJEM_MALLOC_CONF", conf)
    views = [name for name in VIEWS if getattr(arguments, name)]
    if len(views) > 1:
        raise UsageError(f"--{views[0]} and --{views[1]}: choose one")
    if arguments.output and views != ["memory"]:
        raise UsageError("-o draws memory over time: use it with --memory")
    if arguments.output:
        _analyze(arguments, views)
        return 0
    return answer("analyze", arguments, arguments.paths or [latest_run()], lambda: _analyze(arguments, views))


def _analyze(arguments: argparse.Namespace, views: list[str]) -> None:
    from stepscope.api.displays import document_of

    most: int | None = arguments.top
    top = most or NUM_ROWS
    if views and views[0] != "memory":
        report = _report(arguments, views[0])
        print_document(lambda: document_of(report), lambda: report.to_json(most), arguments.json, top)
        return
    if views:
        analysis: Any = _memory(arguments)
    else:
        with opened(arguments, arguments.paths) as session:
            import_beside("stepscope.analysis.ranks.rank_account")
            analysis = session.analyze(arguments.step)
    if arguments.json and not views:
        write(chain(analysis.json_text(most), "\n"))
        return
    print_document(lambda: document_of(analysis, top), lambda: analysis.to_json(most), arguments.json)


def _report(arguments: argparse.Namespace, view: str) -> Any:
    if len(arguments.paths) > 1:
        raise UsageError(f"--{view} reads one path, not {len(arguments.paths)}")
    if view == "hang":
        from stepscope.api.reading import hang

        if not arguments.paths:
            raise UsageError("--hang reads a folder with a flight-recorder dump of each rank: name it")
        return hang(arguments.paths[0])
    if view != "attention" and arguments.step is not None:
        raise UsageError(f"--step does not go with --{view}, which looks at all typical steps together")
    with opened(arguments, arguments.paths) as session:
        case = session.case
    if view == "compiler":
        from stepscope.findings.compiler_report import compiler_report

        return compiler_report(case)
    if view == "attention":
        from stepscope.session.reports import attention_report

        return attention_report(case, arguments.step)
    return session.copies


def _memory(arguments: argparse.Namespace) -> "MemoryAnalysis":
    """Return what filled the memory; its timeline is drawn if that was asked for."""
    from stepscope.session.memory_scaling import analyze_memory

    output: Path | None = arguments.output
    if arguments.step is not None:
        raise UsageError(
            "--step does not go with --memory: a memory window covers one step, a trace's peak lies in one"
        )
    if output is not None and output.suffix != ".svg":
        raise UsageError(f"{output}: the timeline is an SVG, name it {output.with_suffix('.svg')}")
    if output is not None and output.exists():
        raise UsageError(f"{output} exists: name another file, or remove it")
    with ExitStack() as stack:
        paths = arguments.paths or [None]
        analysis = analyze_memory([stack.enter_context(opened(arguments, path)) for path in paths])
    if output is not None:
        from stepscope.document.memory_charts import allocator_timeline
        from stepscope.render.svg import svg_of

        try:
            output.write_text(svg_of(allocator_timeline(analysis.reports[0].account)), encoding="utf-8")
        except OSError as error:
            raise StepscopeError(f"{output} could not be written: {error.strerror or error}") from None
    return analysis
