"""What a child process needs to know to record itself."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from stepscope.recorder.fixes.words import Regrouped
from stepscope.recorder.windows import Windows


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `stepscope run` that hold in every process.

    >>> options = Options(folder=Path("runs/x"), windows=Windows(clean=3), pid=1)
    >>> Options.from_json(options.to_json()) == options
    True
    """

    folder: Path  # of the recording: child processes record in folders inside it
    windows: Windows
    pid: int  # the process that was started first, and writes the recording's own files at the end
    rank: int | None = None
    """Its rank, if it is itself one of several; a child that inherits it is not a rank of its own."""
    tokens_per_step: int | None = None
    exit_after: bool = False
    inference: bool = False
    memory_in_full: bool = False
    fix: str | None = None  # fixes of `stepscope verify`, as in `AppliedFixes`
    words: Regrouped | None = None  # what was changed for them on the command line
    is_quiet: bool = False
    when: tuple[str, ...] = ()  # conditions for further windows
    limit: int = 3  # on how many windows, for each
    trace_ranks: tuple[int, ...] = ()  # ranks that take traces; empty: all

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "folder": os.fspath(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> "Options":
        fields = json.loads(text)
        converted = {"folder": Path(fields["folder"]), "windows": Windows(**fields["windows"])}
        converted |= {name: tuple(fields[name]) for name in ("when", "trace_ranks")}
        words = fields["words"] and Regrouped(*fields["words"])
        return cls(**{**fields, **converted, "words": words})
