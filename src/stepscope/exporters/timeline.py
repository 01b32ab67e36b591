"""All ranks of a run on one Perfetto timeline, on one clock."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from stepscope.analysis.ranks.collectives import collectives
from stepscope.analysis.ranks.side_by_side import clock_alignment, match_collectives
from stepscope.analysis.structure.links import link
from stepscope.errors import UsageError
from stepscope.exporters.perfetto import clock_shift_ns, timeline_texts
from stepscope.exporters.selection import Selection, select
from stepscope.findings.diagnose import diagnose
from stepscope.findings.finding import Finding
from stepscope.formatting import milliseconds
from stepscope.render.files import write_texts
from stepscope.session import Session
from stepscope.trace.find import two_of_one_rank
from stepscope.version import __version__

Asked = tuple[int | None, str | None]
"""A step and a module; None for all of them."""


@dataclass
class Timeline:
    """Several ranks in one file: their traces are read twice, first for the clocks, one in memory at a time."""

    session: Session
    asked: Asked
    num_host: int = 0
    num_device: int = 0
    notes: list[str] = field(default_factory=list)

    def write(self, target: Path, ignored: Collection[str]) -> None:
        calls, spans, bases = {}, {}, {}
        paths: dict[int, Path] = {}
        for opened in self.session.traces():
            if opened.rank in paths:
                raise two_of_one_rank(opened.rank, paths[opened.rank], opened.path)
            paths[opened.rank] = opened.path
            linked = link(opened.trace)
            calls[opened.rank] = collectives(linked)
            part = select(linked, *self.asked)
            if part.host.height or part.device.height:
                spans[opened.rank] = (part.start_ns, part.end_ns)
            bases[opened.rank] = opened.trace.facts.base_time_ns
            del opened, linked, part  # before the next is read
        if len(calls) < 2:
            raise UsageError(f"{self.session.path} holds the trace of one rank: leave out --ranks")
        if not spans:
            raise UsageError("no rank has an event of that step and module: choose another step or module")
        clocks = clock_alignment(match_collectives(calls), bases)
        offsets = self._offsets(clocks, bases)
        start = min(first - offsets[rank] for rank, (first, _) in spans.items())
        end = max(last - offsets[rank] for rank, (_, last) in spans.items())
        shift = clock_shift_ns(start, end)
        header = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": bases[min(bases)] + shift,
            "stepscope": {"version": __version__, "ranks": sorted(spans), "clocks": clocks.to_dicts()},
        }
        findings = diagnose(self.session.case, ignored).findings
        if missing := sorted(set(calls) - set(spans)):
            self.notes.append(f"ranks without an event of that part: {', '.join(map(str, missing))}")
        whole = {rank: offset + shift for rank, offset in offsets.items() if rank in spans}
        write_texts(target, timeline_texts(header, self._parts(whole, findings)))

    def _offsets(self, clocks: pl.DataFrame, bases: dict[int, int]) -> dict[int, int]:
        """Return how far each rank's clock is ahead of the lowest rank's: by collectives, else by recorded times."""
        first, alone, offsets = min(bases), [], {}
        for row in clocks.iter_rows(named=True):
            offsets[row["rank"]] = row["offset_ns"] + bases[first] - bases[row["reference"]]
            if row["reference"] != first:
                alone.append(row["rank"])
        measured = clocks.filter(pl.col("reference") == first, pl.col("rank") != first)
        if measured.height:
            most = milliseconds(int(measured["uncertainty_ns"].max()))  # type: ignore[arg-type]  # numbers
            self.notes.append(f"clocks aligned by collectives, uncertain by at most {most}")
        for row in measured.filter("is_contradicted").iter_rows(named=True):
            self.notes.append(f"rank {row['rank']}: its collectives contradict each other, do not trust its clock")
        if alone:
            known = "as recorded" if all(bases.values()) else "of which some are not recorded"
            which = ", ".join(map(str, alone))
            self.notes.append(
                f"no kernel of NCCL or RCCL connects rank {first} and {which}: placed by their wall clocks, {known}"
            )
        return offsets

    def _parts(
        self, offsets: dict[int, int], findings: Sequence[Finding]
    ) -> Iterator[tuple[Selection, Sequence[Finding], int, int]]:
        for opened in self.session.traces():
            if opened.rank in offsets:
                part = select(link(opened.trace), *self.asked)
                self.num_host += part.host.height
                self.num_device += part.device.height
                is_first = opened.rank == self.session.case.rank
                yield part, findings if is_first else (), opened.rank, offsets[opened.rank]
