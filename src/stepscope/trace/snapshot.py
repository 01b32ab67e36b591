"""Reads a CUDA memory snapshot (`torch.cuda.memory._dump_snapshot`) without executing anything in it.

A pickle is a program. Before it runs, its opcodes are checked: only those that create dicts, lists, texts, numbers
and pairs of numbers are allowed, and only as many as the file's size explains. The unpickler then finds no classes
and no functions.
"""

import io
import pickle
import pickletools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from stepscope.border import limit, read_file
from stepscope.errors import TraceError
from stepscope.trace.dumps.callers import Callers

MAX_TEXT_BYTES = 1 << 20
LEAST_ENTRY_BYTES = 16
"""A real entry takes more of the file. A pickle can refer to one list a million times, and so need gigabytes."""
_NUMBER_END = 2**64
# Opcodes of texts and bytes, and the number of bytes for their length.
_TEXTS = {ord("X"): 4, 0x8C: 1, 0x8D: 8, ord("C"): 1, ord("B"): 4}


class Block(NamedTuple):
    address: int
    bytes: int
    requested_bytes: int
    state: str  # `active_allocated`, `active_awaiting_free` or `inactive`
    caller: str | None  # where the user's code requested it: `train.py:42 forward`


class Segment(NamedTuple):
    """Memory that the allocator got from CUDA."""

    device: int
    bytes: int
    blocks: list[Block]


class Entry(NamedTuple):
    action: str
    address: int
    bytes: int
    caller: str | None
    time_us: int | None
    free_bytes: int | None  # only for `oom`: free memory according to CUDA


class Snapshot(NamedTuple):
    segments: list[Segment]
    entries: list[list[Entry]]  # by device


def read_snapshot(path: Path) -> Snapshot:
    """Return the snapshot in a file; TraceError in one line if it is invalid or contains more than plain values."""
    try:
        data = read_file(path, "SNAPSHOT_MIB")
        most = min(limit("SNAPSHOT_ENTRIES"), 1000 + len(data) // LEAST_ENTRY_BYTES)
        return _Reading(most).snapshot(plain_values(data))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise TraceError(f"{path} is not a memory snapshot: {error}") from None


def plain_values(data: bytes) -> Any:
    """Return the contents of a pickle of plain values; ValueError if it contains anything else."""
    _look_through(data)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise ValueError(f"its pickle is damaged ({error})") from None
    except MemoryError:
        raise ValueError("it needs more memory than available") from None


class _PlainUnpickler(pickle.Unpickler):
    """Finds no classes: only plain values can come out."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"it refers to {module}.{name}, but a snapshot contains no code")

    def persistent_load(self, _id: Any) -> NoReturn:
        raise ValueError("it refers to something outside itself")


def _look_through(data: bytes) -> None:
    """Raise ValueError for the first opcode that no snapshot has."""
    if data[:1] != b"\x80" or data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise ValueError("it does not start like a pickle of protocol 2 to 5")
    plain, place, num_containers, num_large = _plain_opcodes(len(data)), 2, 0, 0
    while place < len(data):
        run = plain.match(data, place)
        if run:
            num_containers += data.count(b"]", place, run.end()) + data.count(b"}", place, run.end())
            num_large += data.count(b"\x8a\x08", place, run.end()) + data.count(b"\x8a\x09", place, run.end())
            place = run.end()
        elif data[place] in _TEXTS:
            start = place + 1 + _TEXTS[data[place]]
            length = int.from_bytes(data[place + 1 : start], "little")
            if length > MAX_TEXT_BYTES or start + length > len(data):
                raise ValueError(f"a text at byte {place:,} claims {length:,} bytes: the file is cut off or damaged")
            place = start + length
        elif data[place] == ord("."):
            break
        else:
            names = {opcode.code: f"the opcode {opcode.name}" for opcode in pickletools.opcodes}
            what = names.get(chr(data[place]), f"0x{data[place]:02x}")
            raise ValueError(f"{what} at byte {place:,} is not needed for plain values; nothing was executed")
    else:
        raise ValueError(f"it ends at byte {len(data):,} before its pickle does")
    # A real entry takes at least 30 bytes and two of these; one takes 72 bytes of memory.
    if num_containers > min(1000 + len(data) // 4, 2 * limit("SNAPSHOT_ENTRIES")):
        raise ValueError("it has more lists and dicts than a snapshot of its size")
    # Numbers from 2**61 - 1 on can share one hash, and as names in a dict take time that grows with their square.
    # Addresses have 6 bytes. Other bytes look like a long number once in 65,536.
    if num_large > 1000 + len(data) // 16384:
        raise ValueError("it has many numbers of 8 bytes, which no snapshot has")


def _plain_opcodes(num_bytes: int) -> re.Pattern[bytes]:
    """Return opcodes in order that create plain values, for a pickle of so many bytes.

    Tuples must be pairs of small numbers, like pool ids: hashing nested tuples overflows the C stack, and large
    numbers can be chosen so that all pairs have one hash. Memo indices are limited by the file's size, since the
    unpickler allocates all of them.
    """
    third, last = (num_bytes >> 16, 0) if num_bytes < 1 << 24 else (0xFF, num_bytes >> 24)
    upper = b"[\\x00-\\x%02x][\\x00-\\x%02x]" % (third, last)
    long = b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(10))
    small = rb"(?:K.|M..|J....)"
    number = b"(?:" + small + rb"|\x8a(?:" + long + rb"))"
    frame = rb"\x95.{8}"
    pair = small + b"(?:" + frame + b")?" + small + b"(?:" + frame + rb")?\x86"
    opcodes = (pair, number, rb"[Naesu(\]})\x88\x89\x94]", rb"G.{8}")
    memo = (rb"[hq].", rb"j....", rb"r.." + upper, frame)
    return re.compile(b"(?:" + b"|".join(opcodes + memo) + b"){1,4096}", re.DOTALL)


class _Reading:
    """One pass over the unpickled values, which may be anything plain."""

    def __init__(self, most_entries: int) -> None:
        self._num_entries = 0
        self._most_entries = most_entries
        self._callers = Callers()

    def snapshot(self, root: Any) -> Snapshot:
        if isinstance(root, list):  # torch.cuda.memory_snapshot() returns only the segments
            root = {"segments": root}
        if not isinstance(root, dict) or "segments" not in root:
            raise ValueError("it has no segments")
        segments = [self._segment(each) for each in self._each(root["segments"], "segments")]
        traces = self._each(root.get("device_traces", []), "device_traces", list)
        return Snapshot(segments, [[self._entry(each) for each in self._each(t, "device_traces")] for t in traces])

    def _segment(self, segment: dict[str, Any]) -> Segment:
        blocks, address = [], _number(segment, "address", 0)
        for each in self._each(segment.get("blocks"), "blocks"):
            old = each.get("history")  # PyTorch before 2.1
            known = old[0] if isinstance(old, list) and old and isinstance(old[0], dict) else each
            size = _number(each, "size")
            requested = _number(known, "real_size" if known is not each else "requested_size", size)
            begin, state = _number(each, "address", address), _word(each, "state")
            blocks.append(Block(begin, size, requested, state, self._callers.innermost(known)))
            address += size
        return Segment(_number(segment, "device", 0), _number(segment, "total_size"), blocks)

    def _entry(self, entry: dict[str, Any]) -> Entry:
        action = _word(entry, "action")
        return Entry(
            action,
            _number(entry, "addr", 0),
            _number(entry, "size", 0),
            self._callers.innermost(entry),
            _number(entry, "time_us") if "time_us" in entry else None,
            _number(entry, "device_free") if action == "oom" and "device_free" in entry else None,
        )

    def _each(self, values: Any, what: str, kind: type = dict) -> Iterator[Any]:
        """Return the members of a list, all of one kind."""
        if not isinstance(values, list):
            raise ValueError(f"{what} is not a list")
        for value in values:
            self._num_entries += 1
            if self._num_entries > self._most_entries:
                raise ValueError(f"it has more than {self._most_entries:,} entries, too many for its size")
            if not isinstance(value, kind):
                raise ValueError(f"{what} contains something that is not a {kind.__name__}")
            yield value


def _word(holder: dict[str, Any], name: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):  # converting a list to text could take forever
        raise ValueError(f"{name} is missing or not a text")
    return value


def _number(holder: Any, name: str, default: int | None = None) -> int:
    value = holder.get(name, default) if isinstance(holder, dict) else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _NUMBER_END:
        raise ValueError(f"{name} is missing or not a number of bytes")
    return value
