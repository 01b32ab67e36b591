"""`%load_ext stepscope`: `%%stepscope` records the training in a cell, `%stepscope PATH` shows what was recorded."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stepscope.api.recording import record
from stepscope.errors import StepscopeError, UsageError
from stepscope.recorder.windows import Windows

if TYPE_CHECKING:
    from stepscope.document.model import Document

SECTIONS = ("overview", "timeline")
"""What is shown of a recording: the rest is in `stepscope.report(PATH)`."""


def load(shell: Any) -> None:
    """Register the magics in an IPython shell."""

    def stepscope(line: str, cell: str | None = None) -> Document | None:
        """Record the training in this cell (`%%stepscope`), or show a recording or a trace (`%stepscope PATH`)."""
        try:
            return shown(line) if cell is None else recorded(shell, line, cell)
        except StepscopeError as error:
            print(f"stepscope: {error}")
            return None

    shell.register_magic_function(stepscope, "line_cell", "stepscope")


def shown(line: str) -> Document:
    """Return the overview and the timeline of a path; without one, of the latest run."""
    from stepscope.session import need_read_side, open_session

    need_read_side()
    from stepscope.document.build import section_of, title_of, verdict_of
    from stepscope.document.model import Document

    words = shlex.split(line)
    if len(words) > 1:
        raise UsageError(f"%stepscope takes one path, not {len(words)}")
    session = open_session(*words)
    parts = tuple(section_of(session, name) for name in SECTIONS)
    return Document(title_of(session), verdict_of(session), parts, {"source": str(session.path)})


def recorded(shell: Any, line: str, cell: str) -> Document:
    """Return what was recorded while the cell ran in the notebook's own names."""
    from stepscope.recorder.files import default_folder

    asked = _options().parse_args(shlex.split(line))
    number = len(shell.history_manager.input_hist_parsed) - 1  # the cell's: execution_count may be the next one's
    folder = asked.output or default_folder(f"notebook-{number}")
    text = shell.transform_cell(cell)
    name = shell.compile.cache(text)  # as other cells are: an error shows its lines
    code = compile(text, name, "exec")
    windows = Windows(warmup=asked.warmup, clean=asked.clean, trace=asked.trace)
    with record(folder, windows=windows, tokens_per_step=asked.tokens_per_step, force=asked.force):
        exec(code, shell.user_ns)
    print(f"stepscope: {folder}")
    return shown(shlex.quote(str(folder)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n{self.format_usage().strip()}")


def _options() -> argparse.ArgumentParser:
    parser = _Parser(prog="%%stepscope", add_help=False)
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="DIR")
    add("--force", action="store_true")
    for window in ("warmup", "clean", "trace"):
        add(f"--{window}", type=int, default=getattr(Windows, window), metavar="N")
    add("--tokens-per-step", type=int, metavar="N")
    return parser
