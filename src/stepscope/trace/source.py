"""The bytes of a trace, compressed or not, in slices that begin and end between events."""

import os
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stepscope.border import open_file
from stepscope.errors import TraceError
from stepscope.trace.fields import Fields
from stepscope.trace.scan import LARGEST_EVENT, LOOK_AHEAD, try_event

SLICE = 1 << 22  # bytes of a slice: large enough to be worth sending to another process
# Each slice takes milliseconds, whatever its size: a large file has at least so many, up to this many times as large.
_SLICES, _LARGEST_SLICES = 32, 3
_CHUNK = 1 << 16  # bytes of a compressed file decompressed at a time
_SUSPICIOUS = 1 << 28
_MOST_EXPANSION = 250
"""Real traces compress 10 to 60 times. Files that expand more than this beyond 256 MiB are rejected."""
_BETWEEN = re.compile(r"\}[ \t\n\r]*,[ \t\n\r]*(?=\{)")
_WINDOWS = (1 << 14, 1 << 18, 1 << 21)
_MOST_CANDIDATES = 200
"""Candidate ends of events examined per window: most are inside an event if its arguments contain objects."""


@dataclass(frozen=True)
class Slice:
    """A stretch of the uncompressed file; the next begins where it ends."""

    base: int
    length: int
    data: bytes | None  # none if the file itself can be read at `base`


class Source:
    """A trace's bytes in order, decompressed; as many as there were when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open_file(path)
            self.num_bytes = os.fstat(self._file.fileno()).st_size
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            raise TraceError(f"{path}: {_plain(error)}") from None
        self.is_compressed = self._read_file(2) == b"\x1f\x8b"
        self._file.seek(0)
        self._inflate = zlib.decompressobj(wbits=31)
        self._compressed = b""
        self.num_read = 0  # uncompressed bytes returned so far
        self.warnings: list[str] = []
        self._is_stopped = False

    def close(self) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def share_read(self) -> float:
        return min(1.0, self._file.tell() / self.num_bytes) if self.num_bytes else 1.0

    def read(self, num_bytes: int) -> bytes:
        """Return at most so many uncompressed bytes; none at the end."""
        data = self._read_compressed(num_bytes) if self.is_compressed else self._read_file(num_bytes)
        self.num_read += len(data)
        return data

    def skip(self, num_bytes: int) -> int:
        """Pass over at most so many bytes of a file that is not compressed; return how many there were."""
        num_skipped = min(num_bytes, self.num_bytes - self._file.tell())
        self._file.seek(num_skipped, os.SEEK_CUR)
        self.num_read += num_skipped
        return num_skipped

    def bytes_of(self, part: Slice) -> bytes:
        if part.data is not None:
            return part.data
        try:
            data = os.pread(self.fileno(), part.length, part.base)
        except OSError as error:
            raise TraceError(f"{self.path}: {_plain(error)}") from None
        if len(data) < part.length:
            raise TraceError(f"{self.path} became shorter while it was read (byte {part.base + len(data):,})")
        return data

    def _read_file(self, num_bytes: int) -> bytes:
        try:
            return self._file.read(min(num_bytes, self.num_bytes - self._file.tell()))
        except OSError as error:
            self._file.close()
            raise TraceError(f"{self.path}: {_plain(error)}") from None

    def _read_compressed(self, num_bytes: int) -> bytes:
        parts: list[bytes] = []
        wanted = num_bytes
        while wanted > 0 and not self._is_stopped:
            part = self._inflate_next(wanted)
            parts.append(part)
            wanted -= len(part)
            so_far = self.num_read + num_bytes - wanted
            if so_far > _SUSPICIOUS and so_far > _MOST_EXPANSION * self._file.tell():
                self._stop(f"the file expands more than {_MOST_EXPANSION} times, more than any trace")
        return b"".join(parts)

    def _inflate_next(self, wanted: int) -> bytes:
        """Return at most so many bytes, maybe none, of the next part of the compressed file."""
        if self._inflate.eof:  # another member may follow, as from parallel compressors, or padding
            self._compressed = (self._compressed or self._read_file(_CHUNK)).lstrip(b"\0")
            if self._compressed:
                self._inflate = zlib.decompressobj(wbits=31)
            elif self._file.tell() >= self.num_bytes:
                self._is_stopped = True
            return b""
        data = self._inflate.unconsumed_tail or self._compressed or self._read_file(_CHUNK)
        before = self._inflate.copy()
        try:
            part = self._inflate.decompress(data, wanted)
        except zlib.error:
            parts: list[bytes] = []  # by byte, as long as they are sound
            with suppress(zlib.error):
                for byte in data:
                    parts.append(before.decompress(bytes((byte,))))
            self._stop("the compressed data is damaged", len(data) - len(parts))
            return b"".join(parts)[:wanted]
        self._compressed = self._inflate.unused_data
        if not data and not part:
            self._stop("the compressed file ends early")
        return part

    def _stop(self, why: str, num_left: int = 0) -> None:
        """Stop reading: the file is valid except for its last `num_left` bytes."""
        end = self._file.tell() - num_left
        rest = f", {self.num_bytes - end:,} before its end" if end < self.num_bytes else ""
        self.warnings.append(f"{why}: reading stopped at byte {end:,} of the file{rest}")
        self._is_stopped = True


class Document:
    """The JSON around the events: the header, the list in slices, the trailer."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.fields: dict[str, Any] = {}
        """Top-level values other than the events."""
        self._buffer = b""
        self._base = 0  # file offset of the buffer's first byte
        self._is_object = False

    def read_header(self, chunk: int | None = None) -> None:
        """Read up to the first event, a little at a time: what is read beyond it is copied."""
        chunk = chunk or min(SLICE, _CHUNK)
        header = Fields(self.source.path, lambda: self.source.read(chunk))
        self._is_object = header.open()
        if self._is_object and not header.read(self.fields):
            raise header.error('is JSON but not a trace: it has no list "traceEvents"')
        self._base, self._buffer = header.rest()

    def slices(self) -> Iterator[Slice]:
        """Yield the rest of the file in slices that seem to end between events; the decoder notices if not.

        Of a file that is not compressed only the ends of slices are read here.
        """
        base, end = self._base, self._base + len(self._buffer)
        is_compressed, self._buffer = self.source.is_compressed, self._buffer if self.source.is_compressed else b""
        usual = min(_LARGEST_SLICES * SLICE, max(SLICE, self.source.num_bytes // _SLICES))
        while True:
            wanted = max(usual, end - base)
            if is_compressed:
                more = self.source.read(wanted)
                self._buffer += more
                num_more = len(more)
            else:
                num_more = self.source.skip(wanted)
            end += num_more
            if end == base:
                return
            cut = _last_boundary(end - base, partial(self._last, end)) if num_more else None
            if cut is None and num_more and end - base < usual + LARGEST_EVENT:
                continue
            length = end - base if cut is None else cut
            yield Slice(base, length, self._buffer[:length] if is_compressed else None)
            self._buffer = self._buffer[length:]
            base += length

    def _last(self, end: int, num_bytes: int) -> bytes:
        if self.source.is_compressed:
            return self._buffer[len(self._buffer) - num_bytes :]
        return self.source.bytes_of(Slice(end - num_bytes, num_bytes, None))

    def read_trailer(self, base: int, rest: bytes) -> str | None:
        """Read what follows the list of events at the file's offset `base`; return a problem with it, if any."""
        trailer = Fields(self.source.path, lambda: b"", rest, base)
        if self._is_object:
            try:
                if trailer.read(self.fields):
                    return f'a second list "traceEvents" was not read (byte {trailer.offset:,})'
            except TraceError:
                return f"the data after the events is cut off or damaged (byte {trailer.offset:,})"
        if trailer.peek():
            return f"data after the trace was not read (byte {trailer.offset:,})"
        return None


def _last_boundary(length: int, last: Callable[[int], bytes]) -> int | None:
    """Return where it seems safe to cut so many bytes: before the last event that the `last` of them show."""
    for window in _WINDOWS:
        first = max(0, length - window)
        text = last(length - first).decode("latin-1")
        for match in reversed(deque(_BETWEEN.finditer(text), maxlen=_MOST_CANDIDATES)):
            if try_event(text[match.end() : match.end() + LOOK_AHEAD], 0)[0]:
                return first + match.end()
        if first == 0:
            break
    return None


def _plain(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
