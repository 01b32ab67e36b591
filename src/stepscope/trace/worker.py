"""A process that decodes slices of a trace: slices arrive on its standard input, columns leave on its output."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from typing import IO

import msgspec
import polars as pl

from stepscope.trace.columns import Columns, Label, Thread
from stepscope.trace.decode import Decoded, decode_slice
from stepscope.trace.scan import Problems

_MARK = b"stepscope"
_LENGTH = 8


class Task(msgspec.Struct):
    """A slice to decode: `length` bytes of the file at `base`, or as many that follow this message."""

    base: int
    length: int
    is_inline: bool


class Answer(msgspec.Struct):
    """A decoded slice; the tables follow as Arrow files of these sizes."""

    sizes: dict[str, int]
    num_events: int
    counts: list[tuple[str, str, str | None, int]]
    threads: list[Thread]
    labels: list[Label]
    problems: list[tuple[str, int, int]]
    end: int
    is_closed: bool
    is_lost: bool
    num_unsound: int
    num_passed_over: int


_encode = msgspec.msgpack.Encoder().encode
_decode_task = msgspec.msgpack.Decoder(Task).decode
_decode_answer = msgspec.msgpack.Decoder(Answer).decode


def _send(stream: IO[bytes], message: bytes) -> None:
    stream.write(_MARK + len(message).to_bytes(_LENGTH, "little") + message)


def _receive(stream: IO[bytes]) -> bytes:
    """Return the next message; EOFError if the other side is gone, or something else wrote to the pipe."""
    if _exactly(stream, len(_MARK)) != _MARK:
        raise EOFError
    return _exactly(stream, int.from_bytes(_exactly(stream, _LENGTH), "little"))


def _exactly(stream: IO[bytes], num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data


def send_task(stream: IO[bytes], base: int, length: int, data: bytes | None) -> None:
    _send(stream, _encode(Task(base, length, data is not None)))
    if data is not None:
        stream.write(data)
    stream.flush()


def send_answer(stream: IO[bytes], decoded: Decoded) -> None:
    columns = decoded.columns
    bodies = {}
    for name, frame in columns.frames.items():
        file = io.BytesIO()
        frame.write_ipc(file)
        bodies[name] = file.getbuffer()
    answer = Answer(
        sizes={name: len(body) for name, body in bodies.items()},
        num_events=columns.num_events,
        counts=[(*key, num) for key, num in columns.counts.items()],
        threads=columns.threads,
        labels=columns.labels,
        problems=[(p.what, p.offset, p.num) for p in decoded.problems.values()],
        end=decoded.end,
        is_closed=decoded.is_closed,
        is_lost=decoded.is_lost,
        num_unsound=decoded.num_unsound,
        num_passed_over=decoded.num_passed_over,
    )
    _send(stream, _encode(answer))
    for body in bodies.values():
        stream.write(body)
    stream.flush()


def receive_answer(stream: IO[bytes]) -> Decoded:
    """Return a worker's answer; EOFError if it is gone."""
    answer = _decode_answer(_receive(stream))
    frames = {name: pl.read_ipc(_exactly(stream, size)) for name, size in answer.sizes.items()}
    counts = {(letter, category, table): num for letter, category, table, num in answer.counts}
    columns = Columns(frames, answer.num_events, counts, answer.threads, answer.labels, {})
    problems = Problems()
    for what, offset, num in answer.problems:
        problems.add(what, offset, num)
    return Decoded(
        columns,
        problems,
        answer.end,
        answer.is_closed,
        answer.is_lost,
        answer.num_unsound,
        answer.num_passed_over,
    )


def main(path: str, file_id: tuple[int, int]) -> None:
    """Answer tasks until there are no more. `file_id` is the device and inode the trace must still have."""
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
            task = _decode_task(_receive(tasks))
            data = _exactly(tasks, task.length) if task.is_inline else os.pread(trace, task.length, task.base)
        except EOFError:
            return
        send_answer(answers, decode_slice(data, task.base))


def identity(file: int) -> tuple[int, int]:
    """Return what identifies an open file."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino
