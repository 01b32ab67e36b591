"""Write a trace for another tool: Perfetto, speedscope, a flame graph, one op as a script, or tables.

FORMAT is one of:
  perfetto    a trace for ui.perfetto.dev and chrome://tracing, with tracks for steps, phases, modules and findings
  speedscope  a flame graph per host thread and GPU stream, for speedscope.app
  flame       a flame graph as SVG or, for other tools, as .folded: GPU work by phase, module, op and kernel
  repro       a script that runs one op with its shapes, dtypes and strides, and times it (--op)
  csv         a folder with the tables of stepscope analyze --sql and of stepscope analyze
  parquet     the same tables as Parquet files

examples:
  stepscope export runs/train-20260101-120000 perfetto --step 26
  stepscope export trace.json.gz perfetto --module 'blocks.*.mlp' -o mlp.json.gz
  stepscope export trace.json.gz speedscope
  stepscope export traces/ perfetto --ranks all
  stepscope export flame                          the latest run
  stepscope export trace.json.gz repro --op aten::mm
  stepscope export traces/ parquet --rank 3 -o tables/
"""

import argparse
import os
from pathlib import Path

from stepscope.cli.support.options import add_source_arguments, opened
from stepscope.cli.support.output import tell
from stepscope.cli.support.settings import ignored_rules
from stepscope.errors import UsageError
from stepscope.formatting import plural, safe
from stepscope.session import need_read_side

FORMS = ("perfetto", "speedscope", "flame", "repro", "csv", "parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, about = parser.add_argument, "recording, trace or folder of ranks (default: latest run)"
    add("path", type=Path, nargs="?", metavar="PATH", help=about)
    add("form", metavar="FORMAT", help=", ".join(FORMS))
    add("--step", type=int, metavar="N", help="only this step")
    add("--module", metavar="FQN", help="only this module and its backward; * matches a number")
    add("--op", metavar="NAME", help="repro: the op, or its place among the ops by time")
    add("--ranks", choices=("all",), help="perfetto: all ranks on one timeline, with aligned clocks")
    add("-o", "--output", type=Path, metavar="FILE", help="a file, or a folder for tables")
    add("--force", action="store_true", help="overwrite existing files")
    add_source_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("_RJEM_MALLOC_CONF", "dirty_decay_ms:100,muzzy_decay_ms:0")  # see cli/analyze.py
    need_read_side()
    from stepscope.exporters.export import write_export

    if arguments.form not in FORMS and str(arguments.path) in FORMS:
        arguments.path, arguments.form = Path(arguments.form), str(arguments.path)
    if arguments.form not in FORMS:
        what = f"{safe(arguments.form)} is not a format"
        if Path(arguments.form).exists():
            what = f"The format is missing (stepscope export FORMAT {safe(arguments.form)})"
        raise UsageError(f"{what}: choose from {', '.join(FORMS)}")
    ignored, part = ignored_rules(Path.cwd()), (arguments.step, arguments.module)
    with opened(arguments, arguments.path) as session:
        written = write_export(
            session, arguments.form, arguments.output, arguments.force, *part, ignored,
            arguments.ranks == "all", arguments.op,
        )  # fmt: skip
    for note in written.notes:
        tell(f"stepscope export: {safe(note, 400)}")
    parts = f"{plural(written.num_host, 'host event')}, {plural(written.num_device, 'GPU event')}"
    tell(f"stepscope: {safe(written.path)} ({parts})")
    return 0
