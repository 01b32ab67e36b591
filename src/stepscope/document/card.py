"""The card: a recording on one screen, as text, as JSON, as HTML for a notebook."""

from __future__ import annotations

import dataclasses
import html
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.time.summary import Summary, summarize
from stepscope.devices import find_device, load_ceilings
from stepscope.document.text.card_lines import Line, card_lines
from stepscope.document.verdict import verdict
from stepscope.errors import WRONG_KIND, RecordingError, wrong_kind
from stepscope.formatting import safe
from stepscope.trace.recording import Recording, read_recording

BOLD, DIM, RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"

_FACTS = ("exit_code", "command", "environment", "precision", "steps", "memory", "notes")


@dataclass(frozen=True)
class Card:
    """A recording, its summary and its verdict. `str(card)` is the plain text."""

    recording: Recording
    summary: Summary
    verdict: str
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, folder: Path) -> Card:
        """The card of the recording in `folder`; RecordingError when it cannot be made."""
        return cls.of_recording(read_recording(folder))

    @classmethod
    def of_recording(cls, recording: Recording) -> Card:
        """The same of a recording that has been read."""
        try:
            name = str((recording.facts.get("environment") or {}).get("device_name"))
            device = find_device(name)
            summary = summarize(recording, device, load_ceilings(name) if device is None else None)
            return cls(recording, summary, verdict(recording, summary), tuple(card_lines(recording, summary)))
        except WRONG_KIND as error:
            raise RecordingError(f"{recording.folder} holds a recording with {wrong_kind(error)}") from None

    def text(self, color: bool = False, width: int = 100) -> str:
        """The card for a terminal of so many columns; plain unless `color`."""
        bold, dim, reset = (BOLD, DIM, RESET) if color else ("", "", "")
        lines = [line.made_safe() for line in self.lines]
        indent = 4 + max(len(line.title) for line in lines if not line.is_heading)
        parts = [f"{bold}{row}{reset}" for row in textwrap.wrap(safe(self.verdict, 1000), width)] + [""]
        for line in lines:
            if line.is_heading:
                parts += ["", f"{bold}{line.title}{reset}"]
                continue
            text = f"  {line.title:<{indent - 4}}  {line.value}".rstrip()
            if line.detail and len(text) + 3 + len(line.detail) <= width:
                parts.append(f"{text}   {dim}{line.detail}{reset}")
            else:
                details = textwrap.wrap(line.detail, max(40, width - indent))
                parts += [text] + [f"{' ' * indent}{dim}{detail}{reset}" for detail in details]
        return "\n".join(parts)

    def __str__(self) -> str:
        return self.text()

    def to_json(self) -> dict[str, Any]:
        """The card as one JSON object; docs/card.md lists its fields."""
        facts = self.recording.facts
        return {
            "schema_version": 1,
            "verdict": self.verdict,
            "recording": str(self.recording.folder),
            "status": self.recording.status,
            **{name: facts.get(name) for name in _FACTS},
            **_plain(self.summary),
            "compiler": self.recording.compiler,
            "warnings": list(self.recording.warnings),
        }

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th colspan=3 style='text-align:left'>{html.escape(line.title)}</th></tr>"
            if line.is_heading
            else f"<tr><td>{html.escape(line.title)}</td><td>{html.escape(line.value)}</td>"
            f"<td style='opacity:.7'>{html.escape(line.detail)}</td></tr>"
            for line in self.lines
        )
        return f"<p><b>{html.escape(self.verdict)}</b></p><table>{rows}</table>"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
