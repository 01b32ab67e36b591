"""A trace for speedscope.app: a profile a host thread and a profile a GPU stream, in nanoseconds from the start.

The format: https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources. Every frame that opens closes,
in order, and time never goes back: what overlaps in part is cut where the next begins, and counted.
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice

import polars as pl

from stepscope.analysis.structure.modules import MODULE_PREFIX
from stepscope.analysis.structure.steps import PHASE_PREFIX
from stepscope.exporters.selection import Selection
from stepscope.exporters.tracks import module_paths, num_same
from stepscope.version import __version__

ENDINGS = (".speedscope.json", ".json", ".speedscope.json.gz", ".json.gz")
SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_EVENTS_A_TEXT = 20_000
OUR_LABEL = f"^({re.escape(MODULE_PREFIX)}|{re.escape(PHASE_PREFIX)})"
"""What `stepscope run` writes before a module's or a phase's name: the name alone says it."""


class Speedscope:
    """One file; `num_cut` is known once its texts were taken."""

    def __init__(self, selection: Selection, name: str) -> None:
        self._selection = selection
        self._name = name
        self._frames: dict[str, int] = {}
        self.num_cut = 0  # events that were made shorter because another overlaps them in part

    def texts(self) -> Iterator[str]:
        profiles = [*self._threads(), *self._streams()]
        head = {"$schema": SCHEMA, "exporter": f"stepscope {__version__}", "name": self._name}
        frames = ",\n".join(f'{{"name":{json.dumps(name)}}}' for name in self._frames)
        yield f'{json.dumps(head)[:-1]}, "shared": {{"frames": [\n{frames}\n]}}, "profiles": [\n'
        length = self._selection.end_ns - self._selection.start_ns
        for number, (name, events) in enumerate(profiles):
            top = {"type": "evented", "name": name, "unit": "nanoseconds", "startValue": 0, "endValue": length}
            yield f'{"," if number else ""}{json.dumps(top)[:-1]}, "events": [\n'
            yield from _joined(events)
            yield "\n]}\n"
        yield "]}\n"

    def _number(self, names: pl.Series) -> list[int]:
        texts = names.cast(pl.String).fill_null("?")
        known = {name: self._frames.setdefault(name, len(self._frames)) for name in texts.unique(maintain_order=True)}
        return texts.replace_strict(known, return_dtype=pl.Int64).to_list() if known else []

    def _threads(self) -> Iterator[tuple[str, Iterator[str]]]:
        names = dict(self._selection.linked.trace.threads.select("thread", "thread_name").iter_rows())
        start = self._selection.start_ns
        for (thread,), part in self._selection.host.group_by("thread", maintain_order=True):
            frames = self._number(part["name"].cast(pl.String).str.replace(OUR_LABEL, ""))
            begins, ends = (part[side] - start for side in ("start_ns", "end_ns"))
            name = names.get(thread) or f"thread {thread}"
            yield str(name), self._nested(zip(begins, ends, frames))

    def _streams(self) -> Iterator[tuple[str, Iterator[str]]]:
        start, paths = self._selection.start_ns, module_paths(self._selection)
        numbered = {name: tuple(self._number(pl.Series(path))) for name, path in paths.items()}
        work = self._selection.device.sort("device", "stream", "start_ns", "event")
        for (device, stream), part in work.group_by("device", "stream", maintain_order=True):
            frames, ops = self._number(part["name"]), self._number(part["op_name"])
            begins, ends = (part[side] - start for side in ("start_ns", "end_ns"))
            inner = [
                (frame,) if name is None else (op, frame) for name, op, frame in zip(part["op_name"], ops, frames)
            ]
            outer = [numbered.get(module, ()) for module in part["module"].cast(pl.String)]
            stacks = [(*modules, *own) for modules, own in zip(outer, inner)]
            yield f"GPU {device} stream {stream}", self._stacked(zip(begins, ends, stacks))

    def _nested(self, bars: Iterable[tuple[int, int, int]]) -> Iterator[str]:
        """Opens and closes of bars inside one another, in order of their starts, the outer first."""
        opened: list[tuple[int, int]] = []
        for start, end, frame in bars:
            while opened and opened[-1][0] <= start:
                yield _close(*opened.pop())
            if opened and end > opened[-1][0]:
                end = opened[-1][0]
                self.num_cut += 1
            opened.append((end, frame))
            yield f'{{"type":"O","at":{start},"frame":{frame}}}'
        while opened:
            yield _close(*opened.pop())

    def _stacked(self, bars: Iterable[tuple[int, int, tuple[int, ...]]]) -> Iterator[str]:
        """The same of work that follows one another, each with the frames it is in; frames that stay are kept."""
        opened: tuple[int, ...] = ()
        until = 0
        for start, end, stack in bars:
            if start < until:
                start, end = until, max(until, end)
                self.num_cut += 1
            # The innermost frame is always a new one.
            same = num_same(opened[:-1], stack[:-1]) if start == until else 0
            for frame in reversed(opened[same:]):
                yield _close(until, frame)
            for frame in stack[same:]:
                yield f'{{"type":"O","at":{start},"frame":{frame}}}'
            opened, until = stack, end
        for frame in reversed(opened):
            yield _close(until, frame)


def _close(at: int, frame: int) -> str:
    return f'{{"type":"C","at":{at},"frame":{frame}}}'


def _joined(events: Iterator[str]) -> Iterator[str]:
    """Events with commas between, many at a time."""
    separator = ""
    while batch := list(islice(events, _EVENTS_A_TEXT)):
        yield separator + ",\n".join(batch)
        separator = ",\n"
