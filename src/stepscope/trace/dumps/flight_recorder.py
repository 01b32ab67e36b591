"""Reads the dumps of PyTorch's flight recorder: the last collectives that each rank called.

NCCL writes one file per rank when a collective times out; `torch._C._distributed_c10d._dump_fr_trace()` and
`_dump_nccl_trace()` return the same bytes. They are pickles, or JSON without stacks.
"""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.border import Values, is_count, limit, open_file, read_file
from stepscope.errors import UsageError
from stepscope.trace.dumps.callers import Callers
from stepscope.trace.dumps.plain_pickle import decoded

LEAST_CALL_BYTES = 16
"""A real call takes more of the file; a pickle can refer to one call a million times."""
_LONGEST = 200
_RANK = re.compile(r"rank[_-]?(\d{1,7})|(\d{1,7})(?:\.(?:json|pickle|pkl|bin))*$", re.IGNORECASE)
_POINT_TO_POINT = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})")
_VERSIONS = ("1.", "2.")
Groups = dict[str, tuple[str, tuple[int, ...]]]
"""Process groups by name: the description, and the ranks as far as the dump has them."""


class Signature(NamedTuple):
    """What the ranks of a group must agree on."""

    collective: str  # `all_reduce`, `send`
    inputs: str  # shapes: `[8, 2] [4]`
    outputs: str
    dtypes: str
    num_input_elements: int
    num_output_elements: int


class Call(NamedTuple):
    """One collective of one rank."""

    group: str  # the name of its process group
    number: int  # counts the collectives of the group, from 1
    peers: tuple[int, int] | None  # of a `send` or `recv`: from and to, as ranks in the group
    signature: Signature
    stack: tuple[str, ...]  # lines of the user's code, innermost first; empty if the dump has none
    is_finished: bool  # completed, or no longer waited for
    created_ns: int  # on the host's own clock
    timeout_ms: int


class Dump(NamedTuple):
    """What one rank wrote."""

    rank: int
    path: Path
    is_whole: bool  # the buffer holds every call since the start
    calls: list[Call]  # in order
    groups: Groups
    last_numbers: dict[str, int]  # by name of the group: the last collective that was called


class Dumps(NamedTuple):
    """The dumps of a folder."""

    folder: Path
    ranks: dict[int, Dump]
    unread: set[int]  # ranks whose file could not be read
    problems: list[str]  # files that could not be read, or were left out, in a sentence each


def read_dumps(folder: Path) -> Dumps:
    """Return the dumps in a folder, one per rank; UsageError if it has none."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: --hang reads a folder with a flight-recorder dump of each rank")
    found: dict[int, Dump] = {}
    unread: set[int] = set()
    problems: list[str] = []
    for path, rank in sorted(_files(folder), key=lambda file: (file[0].suffix == ".json", -_changed(file[0]))):
        if rank in found:
            problems.append(f"{path.name} was not read: {found[rank].path.name} is also of rank {rank}")
            continue
        try:
            found[rank] = _dump(path, rank)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            problems.append(f"{path.name} could not be read: {reason}")
            unread.add(rank)
    if not found:
        why = f": {problems[0]}" if problems else ""
        raise UsageError(
            f"{folder} has no flight-recorder dump that can be read{why}. Each rank writes one, such as "
            "nccl_trace_rank_0, if TORCH_FR_BUFFER_SIZE=2000 and TORCH_NCCL_DUMP_ON_TIMEOUT=1 are set (docs/hangs.md)"
        )
    return Dumps(folder, dict(sorted(found.items())), unread - found.keys(), sorted(problems))


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in sorted(folder.iterdir()):
        found = _RANK.search(path.name)
        if found and path.is_file():
            try:
                with open_file(path) as stream:
                    is_dump = stream.read(1) in (b"\x80", b"{")
            except OSError:
                is_dump = True  # the reader says what is wrong with it
            if is_dump or "trace" in path.name:
                yield path, int(found.group(1) or found.group(2))


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _dump(path: Path, rank: int) -> Dump:
    data = read_file(path, "DUMP_MIB")
    root = Values().parsed(data) if data[:1] == b"{" else decoded(data)
    if not isinstance(root, dict) or not isinstance(root.get("entries", []), list):
        raise ValueError("it is not a dump of the flight recorder")
    version = root.get("version")
    if not isinstance(version, str) or not version.startswith(_VERSIONS):
        raise ValueError(f"its version is {str(version)[:20]!r}; versions 1 and 2 can be read")
    entries = root.get("entries", [])
    if len(entries) > 1000 + len(data) // LEAST_CALL_BYTES:
        raise ValueError(f"it has {len(entries):,} calls, too many for its size")
    reading = _Reading()
    calls = [reading.call(entry) for entry in entries]
    first = entries[0].get("record_id") if entries else 0
    groups = _groups(root)
    for call, entry in zip(calls, entries):
        if call.group not in groups:  # Gloo lists no groups, or one without a name
            described = entry["process_group"][1:2] if call.group else []
            groups[call.group] = (_text(described[0]) if described else ""), ()
    return Dump(rank, path, first == 0, calls, groups, _last_numbers(root))


def _groups(root: dict[str, Any]) -> Groups:
    """Return the process groups; a list of ranks that is empty or not a list is left out."""
    listed, found = root.get("pg_config"), {}
    for name, group in listed.items() if isinstance(listed, dict) else ():
        if not isinstance(group, dict):
            continue
        text = str(group.get("ranks"))
        ranks = [int(each) for each in re.findall(r"\d{1,7}", text)] if re.fullmatch(r"\[[\d, ]*\]", text) else []
        found[_text(name)] = _text(group.get("desc")), tuple(sorted(ranks))
    return found


def _last_numbers(root: dict[str, Any]) -> dict[str, int]:
    """Return the last collective of each group: numbers in a pickle, texts in JSON."""
    listed, found = root.get("pg_status"), {}
    for name, status in listed.items() if isinstance(listed, dict) else ():
        last = status.get("last_enqueued_collective") if isinstance(status, dict) else None
        if re.fullmatch(r"\d{1,18}", str(last)[:20]):
            found[_text(name)] = int(str(last))
    return found


class _Reading:
    """One pass over the entries of a dump. Equal texts and shapes are kept once."""

    def __init__(self) -> None:
        self._callers = Callers()
        self._signatures: dict[Signature, Signature] = {}
        self._shapes: dict[int, tuple[str, int]] = {}
        """By identity of a list of shapes: its text, and how many elements it has."""

    def call(self, entry: Any) -> Call:
        if not isinstance(entry, dict):
            raise ValueError("an entry is not an object")
        name = _text(entry.get("profiling_name")).rpartition(":")[2]
        found = _POINT_TO_POINT.fullmatch(name)
        ends = (int(found[2]), int(found[4])) if found else None
        peers = ends[::-1] if ends and found and found[1] == "recv" else ends
        group = entry.get("process_group")
        finished = entry.get("retired") is True or entry.get("state") == "completed"
        return Call(
            group=_text(group[0] if isinstance(group, list) and group else None),
            number=_number(entry, "p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"),
            peers=peers,
            signature=self._signature(found[1] if found else name, entry),
            stack=self._callers.stack(entry),
            is_finished=finished,
            created_ns=_number(entry, "time_created_ns"),
            timeout_ms=_number(entry, "timeout_ms"),
        )

    def _signature(self, name: str, entry: dict[str, Any]) -> Signature:
        (inputs, num_in), (outputs, num_out) = (self._shape(entry.get(f"{way}_sizes")) for way in ("input", "output"))
        dtypes = entry.get("input_dtypes") or entry.get("output_dtypes")
        kinds = sorted({_text(each) for each in dtypes[:100]}) if isinstance(dtypes, list) else []
        made = Signature(name, inputs, outputs, ", ".join(kinds), num_in, num_out)
        return self._signatures.setdefault(made, made)

    def _shape(self, shapes: Any) -> tuple[str, int]:
        if id(shapes) not in self._shapes:
            self._shapes[id(shapes)] = _shape_of(shapes)
        return self._shapes[id(shapes)]


def _shape_of(shapes: Any) -> tuple[str, int]:
    listed = shapes if isinstance(shapes, list) else []
    known = [each for each in listed if isinstance(each, list) and all(map(is_count, each))]
    text = " ".join(str(each) for each in known[:20])
    return text[:_LONGEST], sum(prod(each) if len(each) < limit("DEPTH") else 0 for each in known)


def _text(value: Any) -> str:
    return value[:_LONGEST] if isinstance(value, str) else ""


def _number(entry: dict[str, Any], name: str) -> int:
    value = entry.get(name) or 0
    if not is_count(value):
        raise ValueError(f"{name} is not a count")
    return value
