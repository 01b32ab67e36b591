"""A process that decodes slices of a trace: slices arrive on its standard input, columns leave on its output."""

import gc
import os
import pickle
import signal
import sys
from typing import IO, Any

import polars as pl

from stepscope.trace.decode import Decoded, decode_slice

_MARK = b"stepscope"


def send(stream: IO[bytes], message: Any) -> None:
    """Send a message to the process at the other end of a pipe."""
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
    """Return what identifies an open file."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino
