"""A slice of a trace's text as columns: fast if it is valid, carefully if not; here or in another process."""

import gc
import os
import pickle
import re
import signal
import sys
from bisect import bisect_right
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import polars as pl

from stepscope.trace.columns import Builder, Columns
from stepscope.trace.events import decode_events
from stepscope.trace.fast import Scanner, is_built
from stepscope.trace.scan import LARGEST_EVENT, Problems, scan_events

_BETWEEN = re.compile(rb"\}[ \t\n\r]*,[ \t\n\r]*(?=\{)")
_SEPARATORS = b" \t\n\r,"
_PIECE = 1 << 18  # bytes decoded at a time; what fits into the CPU cache is fastest


@dataclass
class Decoded:
    """A decoded slice."""

    columns: Columns
    problems: Problems
    end: int  # everything before this file offset is done
    is_closed: bool  # whether the list of events ended at `end`
    is_lost: bool  # whether `end` is inside something broken
    num_unsound: int = 0  # events that fit no table: without a phase, or with invalid times
    num_passed_over: int = 0  # bytes in which no event was found


def decode_slice(data: bytes, base: int, is_last: bool = False, is_lost: bool = False) -> Decoded:
    """Return a slice decoded; it starts at the file's offset `base` between two events, or anywhere if `is_lost`.

    A slice that also ends between two events is decoded completely; otherwise `end` is where it stopped.
    """
    builder = Scanner() if is_built() else Builder()
    problems = Problems()
    pieces: list[tuple[int, int, bool]] = []  # first event, position, whether it begins inside something broken
    is_closed = False
    num_passed_over = 0
    tail = data[-1024:]
    position, length = 0, len(data) - len(tail) + len(tail.rstrip(_SEPARATORS))
    while position < length:
        if isinstance(builder, Scanner) and not is_lost:
            position, scanned_pieces = builder.scan(data, position, length, _PIECE, LARGEST_EVENT)
            pieces += [(*piece, False) for piece in scanned_pieces]
            if position >= length:
                continue
        # A piece ends where an event seems to end; the decoder notices if it does not.
        match = _BETWEEN.search(data, position + _PIECE)
        end, resume = (match.start() + 1, match.end()) if match else (length, len(data))
        pieces.append((builder.num_events, position, is_lost))
        if not is_lost and end - position <= LARGEST_EVENT:
            try:
                builder.add(decode_events(b"[" + data[position:end] + b"]"))
                position = resume
                continue
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                pass
        stop = min(resume, position + _PIECE)
        scanned = scan_events(data, base, position, stop, is_last, is_lost)
        builder.add(scanned.events)
        problems.take(scanned.problems.values())
        num_passed_over += scanned.num_passed_over
        position, is_closed, is_lost = scanned.end, scanned.is_closed, scanned.is_lost
        if is_closed or is_lost or position < stop:
            break
    else:
        position = len(data)
    columns, bad = builder.finish()
    for what, events in bad.items():
        problems.add(f"with {what}", _offset(data, base, pieces, min(events)), len(events))
    num_unsound = sum(map(len, bad.values()))
    return Decoded(columns, problems, base + position, is_closed, is_lost, num_unsound, num_passed_over)


def _offset(data: bytes, base: int, pieces: list[tuple[int, int, bool]], event: int) -> int:
    after = bisect_right(pieces, event, key=lambda piece: piece[0])
    first_event, position, is_lost = pieces[after - 1]
    stop = pieces[after][1] if after < len(pieces) else None
    offsets = scan_events(data, base, position, stop, is_lost=is_lost).offsets
    index = event - first_event
    return offsets[index] if index < len(offsets) else base + position


_MARK = b"stepscope"


def send(stream: IO[bytes], message: Any) -> None:
    stream.write(_MARK)
    pickle.dump(message, stream, pickle.HIGHEST_PROTOCOL)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Return the next message; EOFError if the other side is gone, or something else wrote to the pipe."""
    if stream.read(len(_MARK)) != _MARK:
        raise EOFError
    try:
        return pickle.load(stream)
    except pickle.UnpicklingError:
        raise EOFError from None


def send_answer(stream: IO[bytes], decoded: Decoded) -> None:
    """Send a decoded slice. Tables travel as Arrow files, which are faster than their pickles."""
    tables = {name: frame.write_ipc(None).getvalue() for name, frame in decoded.columns.frames.items()}
    decoded.columns.frames = {}
    send(stream, (decoded, tables))


def receive_answer(stream: IO[bytes]) -> Decoded:
    """Return a worker's answer; EOFError if it is gone."""
    decoded: Decoded
    decoded, tables = receive(stream)
    decoded.columns.frames = {name: pl.read_ipc(data) for name, data in tables.items()}
    return decoded


def main(path: str, file_id: tuple[int, int]) -> None:
    """Answer tasks until there are no more. `file_id` is the device and inode the trace must still have.

    A task is a slice's offset in the file, its length, and its data if the file itself cannot be read there.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process, which ends this one
    gc.disable()  # there are no cycles here, and a collection would visit every event
    tasks = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output must not mix with the answers
    trace = os.open(path, os.O_RDONLY)
    if file_id != identity(trace):
        sys.exit("the trace was replaced while it was read")
    while True:
        try:
            base, length, data = receive(tasks)
        except EOFError:
            return
        send_answer(answers, decode_slice(os.pread(trace, length, base) if data is None else data, base))


def identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino
