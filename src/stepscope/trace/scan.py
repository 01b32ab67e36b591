"""The careful way through a trace's text: event by event, with the byte offset of every problem.

The fast way (`decode.py`) is a typed decoder over whole stretches, which requires every byte to be valid. Otherwise
this takes over. Bytes are read as Latin-1, so that a character is a byte.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Raw

from stepscope.trace.events import Args, Event, decode_event

LARGEST_EVENT = 1 << 22  # bytes. Larger events (4 MiB) are skipped, so that memory stays bounded.
USUAL_EVENT = 1 << 13  # bytes; nearly every event is smaller
LOOK_AHEAD = 1 << 16  # bytes examined to see whether something is an event
_BLANK = re.compile(r"[ \t\n\r]*")
_BLANK_OR_COMMA = re.compile(r"[ \t\n\r,]*")
_MAYBE_EVENT = re.compile(r"[},][ \t\n\r]*(?=\{)")
_TOKEN = re.compile(r'(?<!\\)"[^"\\]*(?:\\.[^"\\]*)*"|[][{}]', re.DOTALL)
_GOES_ON = re.compile(r"[ \t\n\r,]*(?:[]{]|\Z)")
_MOST_REREADING = 8
"""How often a text may be read again in search of valid events, as a multiple of its length: hostile files must end.
"""
_MOST_OTHERS = 10_000  # values in a stretch that are not events, before searching for the next event instead
_LONG = 1 << 18  # characters within which the brackets of a broken event must match
_LEAST_COST = 512  # cost of an attempt that fails at once, in characters
_COST_OF_DEPTH = 1 << 16  # cost of descending as deep as Python allows, and back
_TOO_DEEP = "nested too deeply"
_WORDS = ("true", "false", "null", "NaN", "Infinity", "-Infinity", ".", "e+", "e-", "E+", "E-")
_BEGUN = {word[:end] for word in _WORDS for end in range(len(word) + 1)}
"""What the decoder reports if a text ends inside a word or number."""
_BEGUN_ESCAPE = re.compile(r"\\?u[0-9a-fA-F]{0,4}")


class NumberText(str):
    """A number as it was written."""

    __slots__ = ()


_known_number = lru_cache(maxsize=4096)(NumberText)


def _number(text: str) -> NumberText:
    return _known_number(text) if len(text) < 24 else NumberText(text)  # repeated texts are kept once


_DECODER = json.JSONDecoder(strict=False, parse_float=_number, parse_int=_number, parse_constant=_number)


@dataclass
class Problem:
    """A problem with a trace that did not prevent reading it."""

    what: str
    offset: int  # byte in the (uncompressed) file where it first occurred
    num: int = 1


class Problems(dict[str, Problem]):
    """Problems by kind: how many, and where the first was."""

    def add(self, what: str, offset: int, num: int = 1) -> None:
        known = self.setdefault(what, Problem(what, offset, 0))
        known.num += num
        known.offset = min(known.offset, offset)

    def take(self, others: Iterable[Problem]) -> None:
        for other in others:
            self.add(other.what, other.offset, other.num)


@dataclass
class Scanned:
    """The events found in a stretch of text, and where it stopped."""

    events: list[Event] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    end: int = 0  # position where it stopped; everything before is done
    is_closed: bool = False  # whether the list was closed at `end`
    is_lost: bool = False  # whether `end` is inside something broken
    num_passed_over: int = 0  # bytes of broken stretches up to the next readable event


def value_at(text: str, position: int) -> tuple[Any, int]:
    """Return the JSON value that starts here and where it ends; ValueError if there is none.

    >>> value_at('{"a": 1.50} ', 0)
    ({'a': '1.50'}, 11)
    """
    # Python's decoder counts all lines before an error: short values are read from a short text.
    part = text[position : position + USUAL_EVENT]
    is_all = position + len(part) == len(text)
    try:
        try:
            value, end = _DECODER.raw_decode(part)
            if end < len(part) or is_all:
                return value, position + end
        except json.JSONDecodeError as error:
            if is_all or not is_incomplete(error, part):
                error.pos += position
                raise
        return _DECODER.raw_decode(text, position)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None


def is_incomplete(error: ValueError, text: str) -> bool:
    """Return whether a value may have failed only because the text ends inside it."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    rest = text[error.pos : error.pos + 10]
    return error.msg.startswith("Unterminated string") or rest in _BEGUN or bool(_BEGUN_ESCAPE.fullmatch(rest))


def may_go_on(text: str, end: int) -> bool:
    """Return whether a number that ends here may continue after the text."""
    return text[end : end + 10] in _BEGUN


def skip_blank(text: str, position: int) -> int:
    return _BLANK.match(text, position).end()  # type: ignore[union-attr]  # it matches always


def try_event(text: str, position: int) -> tuple[bool, int]:
    """Return whether a whole event starts here, and the cost of finding out, in characters."""
    try:
        value, end = value_at(text, position)
    except ValueError as error:
        return False, _cost(error, text, position)
    return isinstance(value, dict) and type(value.get("ph")) is str, end - position


def _cost(error: ValueError, text: str, position: int) -> int:
    """Return the cost of a failed attempt to read a value, in characters."""
    if is_incomplete(error, text):
        return len(text) - position
    return error.pos - position if isinstance(error, json.JSONDecodeError) else _COST_OF_DEPTH


def scan_events(
    data: bytes, base: int, start: int = 0, stop: int | None = None, is_last: bool = False, is_lost: bool = False
) -> Scanned:
    """Return every readable event in `data` that begins from `start` to before `stop`; `base` is the file's offset.

    An event that `data` cuts off is left for a call with more of the file, unless this `is_last`. The start is
    between two events, or anywhere if `is_lost`.
    """
    text = data.decode("latin-1")
    stop = len(text) if stop is None else stop
    found = Scanned()
    search = _Search(text)
    broken = start
    position = search.next_event(start) if is_lost else start
    found.num_passed_over = (position or start) - start
    while position is not None:
        position = _BLANK_OR_COMMA.match(text, position).end()  # type: ignore[union-attr]  # it matches always
        if position >= stop:
            break
        if text[position] == "]":
            found.is_closed = True
            break
        try:
            value, end = value_at(text, position)
        except ValueError as error:
            is_cut = is_incomplete(error, text)
            if is_cut and not is_last:
                break
            fault = str(error) if not isinstance(error, json.JSONDecodeError) else "not valid JSON"
            found.problems.add("cut off" if is_cut else fault, base + position)
            broken = position
            position = search.after_broken(position, _cost(error, text, position))
            found.num_passed_over += (position or broken) - broken
            continue
        problem: str | None = None
        if not isinstance(value, dict):
            problem = "not an event"
        elif end - position > LARGEST_EVENT:
            problem = f"larger than {LARGEST_EVENT >> 20} MiB"
            found.num_passed_over += end - position
        else:
            try:
                event, problem = _event(data[position:end])
                found.events.append(event)
                found.offsets.append(base + position)
            except RecursionError:
                problem = _TOO_DEEP
        if problem:
            found.problems.add(problem, base + position)
        if problem == "not an event" and found.problems[problem].num > _MOST_OTHERS:
            broken, position = position, search.next_event(end)
            found.num_passed_over += (position or broken) - broken
        else:
            position = end
    if position is None:
        found.is_lost = not is_last
        # An event may begin at the very end and be recognizable only with more of the file.
        position = len(text) if is_last else max(broken + 1, len(text) - LOOK_AHEAD)
        found.num_passed_over += position - broken
    found.end = position
    return found


class _Search:
    """Finds valid events after something broken."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._num_left = _MOST_REREADING * max(len(text), LOOK_AHEAD)

    def after_broken(self, position: int, cost: int) -> int | None:
        """Return where to continue after a broken value that was read at some cost."""
        self._num_left -= cost
        if self._num_left < 0:
            return None
        found = self.next_event(position + 1)
        return self._end_of_value(position) if found is None else found

    def next_event(self, position: int) -> int | None:
        if self._text.startswith("{", position) and try_event(self._text, position)[0]:
            return position
        for match in _MAYBE_EVENT.finditer(self._text, position):
            is_event, num_read = try_event(self._text, match.end())
            if is_event:
                return match.end()
            self._num_left -= num_read + _LEAST_COST
            if self._num_left < 0:
                break
        self._num_left -= len(self._text) - position
        return None

    def _end_of_value(self, position: int) -> int | None:
        """Return the end of a broken value whose brackets match."""
        depth = 0
        for match in _TOKEN.finditer(self._text, position, position + _LONG):
            token = match.group()
            if depth == 0 and token == "]":
                return match.start()  # it was not a list or object, and the list of events ends after it
            depth += (token in "{[") - (token in "}]")
            if depth <= 0:
                self._num_left -= 8 * (match.end() - position)
                return match.end() if _GOES_ON.match(self._text, match.end()) else None
        return None


def _event(data: bytes) -> tuple[Event, str | None]:
    """Return an event from its JSON bytes, repaired if the typed decoder rejects them, and the problem."""
    try:
        return decode_event(data), None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    fault = None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        fault = "invalid UTF-8 in a text (the bytes were replaced)"
        text = data.decode("utf-8", errors="replace")
    value, _ = value_at(text, 0)
    args = value.get("args")
    args = args if isinstance(args, dict) else {}
    known: dict[str, Any] = {
        name: (_raw if type_ is Raw else _plain)(args[key]) for name, key, type_ in _ARGS if args.get(key) is not None
    }
    parts: dict[str, Any] = {name: convert(value.get(name)) for name, convert in _PARTS.items()}
    return Event(**parts, args=Args(**known)), fault


def _text(value: Any) -> str:
    return "" if value is None else sound_text(value if isinstance(value, str) else _written(value))


def sound_text(text: str) -> str:
    """Return a text with unencodable characters (half a surrogate pair) replaced."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _plain(value: Any) -> int | float | str | bool | None:
    if isinstance(value, NumberText):
        try:
            return int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:  # more digits than Python converts
            return None
    return value if value is None or isinstance(value, bool) else _text(value)


def _raw(value: Any) -> Raw:
    return Raw() if value is None else Raw(_written(value).encode("ascii"))


_ARGS = [(f.name, f.encode_name, f.type) for f in msgspec.structs.fields(Args)]
_PARTS = {"ph": _text, "cat": _text, "name": _text, "pid": _plain, "tid": _plain, "ts": _raw, "dur": _raw}


def _written(value: Any) -> str:
    """Return a value as JSON, with its numbers as written."""
    if isinstance(value, NumberText):
        return value
    if isinstance(value, list):
        return f"[{', '.join([_written(item) for item in value])}]"
    if isinstance(value, dict):
        return f"{{{', '.join([f'{json.dumps(key)}: {_written(item)}' for key, item in value.items()])}}}"
    return json.dumps(value)
