"""Reads any trace file as a `Trace`: streaming, in bounded memory, on all cores."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from stepscope.errors import TraceError
from stepscope.trace.assemble import Assembler
from stepscope.trace.decode import Decoded, decode_slice
from stepscope.trace.fast import is_built
from stepscope.trace.fields import LARGEST_HEADER
from stepscope.trace.kind import is_sqlite
from stepscope.trace.pool import Processes, Result, Threads, num_workers
from stepscope.trace.scan import LARGEST_EVENT, USUAL_EVENT
from stepscope.trace.source import SLICE, Document, Slice, Source
from stepscope.trace.tables import Trace, facts_of

Progress = Callable[[float], None]  # called with the share of the file that has been read
WORTH_WORKERS = 6 * SLICE  # from this many bytes on, starting other processes pays off


def read_trace(
    path: Path, progress: Progress | None = None, workers: int | None = None, process: int | None = None
) -> Trace:
    """Return one trace file: of PyTorch, compressed or not, or one process of an export of Nsight Systems.

    Valid parts are read; the rest is counted in `problems`. Raises TraceError if nothing is valid.
    """
    if is_sqlite(Path(path)):
        from stepscope.trace.databases import read_database

        return read_database(path, process, progress)
    with closing(Source(Path(path))) as source:
        try:
            document = Document(source)
            document.read_header()
            return _Reading(document, progress).run(num_workers() if workers is None else workers)
        except TraceError as error:
            raise TraceError("; ".join([str(error), *source.warnings])) from None


class _Reading:
    def __init__(self, document: Document, progress: Progress | None) -> None:
        self.document = document
        self.source = document.source
        self.assembler = Assembler()
        self.progress = progress
        self.warnings: list[str] = []
        self.carried = b""  # the unfinished end of a slice, until the next completes it
        self.carried_base = 0
        self.is_lost = False  # whether the next slice begins inside something broken
        self.trailer: list[bytes] | None = None  # what follows the list of events
        self.trailer_base = 0

    def run(self, workers: int) -> Trace:
        own = self.document.fields.get("stepscope")
        if isinstance(own, dict) and own.get("ranks"):
            raise TraceError(
                f"{self.source.path} is a timeline of several ranks for a viewer: open the ranks' traces"
            )
        expected = self.source.num_bytes * (12 if self.source.is_compressed else 1)
        pool: Threads | None = None
        if is_built() and expected > SLICE:
            pool = Threads(self.source, workers)
        elif workers > 1 and expected > WORTH_WORKERS:
            with suppress(OSError):  # no other process available: it only takes longer
                pool = Processes(self.source, workers)
        with pool or nullcontext():
            self._take_all(pool.decode(self.document.slices()) if pool else self._decode_here())
        self._end()
        path, assembler = self.source.path, self.assembler
        if not assembler.num_sound:
            problems = [f"{p.what} (byte {p.offset:,})" for p in assembler.problems.values()]
            raise TraceError("; ".join([f"{path} has no events that can be read", *problems, *self.warnings]))
        if assembler.num_passed_over > USUAL_EVENT:
            self.warnings.append(
                f"{assembler.num_passed_over:,} of {self.source.num_read:,} bytes of JSON are broken and were "
                "skipped, with all events in them"
            )
        facts = replace(facts_of(self.document.fields), is_cut_off=self.trailer is None)
        return assembler.finish(path, facts, [*self.source.warnings, *self.warnings])

    def _decode_here(self) -> Iterator[tuple[Slice, Result]]:
        for part in self.document.slices():

            def decode(part: Slice = part) -> Decoded:
                return decode_slice(self.source.bytes_of(part), part.base)

            yield part, decode

    def _take_all(self, results: Iterable[tuple[Slice, Result]]) -> None:
        for part, result in results:
            if self.trailer is None:
                self._take(part, result)
            elif sum(map(len, self.trailer)) > LARGEST_HEADER:
                break
            else:
                self.trailer.append(self.source.bytes_of(part))
            if self.progress:
                self.progress(self.source.share_read)

    def _take(self, part: Slice, result: Result) -> None:
        before, base = self.carried, part.base - len(self.carried)
        if before or self.is_lost:
            # The previous slice did not end between two events: read both as one.
            decoded = decode_slice(before + self.source.bytes_of(part), base, is_lost=self.is_lost)
        else:
            decoded = result()
        self.assembler.add(decoded)
        self.carried, self.is_lost = b"", decoded.is_lost
        if decoded.end == part.base + part.length:
            return
        self._keep((before + self.source.bytes_of(part))[decoded.end - base :], decoded)
        if len(self.carried) > LARGEST_EVENT and not self.is_lost:
            self.assembler.problems.add(f"larger than {LARGEST_EVENT >> 20} MiB", decoded.end)
            self.is_lost = True

    def _keep(self, rest: bytes, decoded: Decoded) -> None:
        if decoded.is_closed:
            self.trailer, self.trailer_base = [rest[1:]], decoded.end + 1
        else:
            self.carried, self.carried_base = rest, decoded.end

    def _end(self) -> None:
        if self.carried:
            decoded = decode_slice(self.carried, self.carried_base, is_last=True, is_lost=self.is_lost)
            self.assembler.add(decoded)
            self._keep(self.carried[decoded.end - self.carried_base :], decoded)
        if self.trailer is not None:
            fault = self.document.read_trailer(self.trailer_base, b"".join(self.trailer)[:LARGEST_HEADER])
            if fault:
                self.warnings.append(fault)
        elif not self.source.warnings:
            self.warnings.append(
                f"the file ends at byte {self.source.num_read:,} inside its list of events, probably because the job "
                "that wrote it was killed; every complete event was read"
            )
