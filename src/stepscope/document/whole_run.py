"""The whole run on the card: its time since the start, its cost, and what went wrong in its course."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stepscope.analysis.run.goodput import Goodput
from stepscope.analysis.run.series import Run
from stepscope.analysis.time.loop_time import MEASURING, TRAINING
from stepscope.document.model import Bars, Fact, Series
from stepscope.findings.finding import Finding
from stepscope.findings.over_time import findings_over_time
from stepscope.formatting import percent, plural, significant, size, span
from stepscope.session import Session
from stepscope.session.goodput import goodput_of, job_of
from stepscope.trace.recording import Recording

_MOST_LOSSES = 4
_LEAST_WAIT = 0.05
_MUCH_WAIT = 0.1
_LEAST_LOSS = 0.001  # of the wall-clock time


@dataclass(frozen=True)
class WholeRun:
    """What is known of a run beyond its windows."""

    goodput: Goodput | None  # null before the first step
    job: Goodput | None  # of all recordings of the job; null if there is only this one
    findings: tuple[Finding, ...]
    price_per_hour: float | None
    peak: tuple[str, str] | None = None  # the most memory that the whole run used, and when; null if unknown
    core_wait_share: float | None = None  # of the time, in which training waited for a CPU core; null if unknown

    @classmethod
    def of(cls, session: Session, price_per_hour: float | None = None) -> "WholeRun":
        run, own = session.run, goodput_of(session)
        peak = _peak_texts(run, session.recording.facts.get("memory") or {})
        findings = tuple(findings_over_time(run))
        return cls(own, job_of(session, own), findings, price_per_hour, peak, run.core_wait_share)

    def to_json(self) -> dict[str, Any]:
        cost = None
        if self.price_per_hour is not None and (paid := self.job or self.goodput) is not None:
            unit, price = paid.cost_per_million(self.price_per_hour)
            cost = {"price_per_hour": self.price_per_hour, "unit": unit, "per_million": price}
        return {
            "goodput": None if self.goodput is None else asdict(self.goodput),
            "job": None if self.job is None else asdict(self.job),
            "cost": cost,
            "core_wait_share": self.core_wait_share,
            "findings": [finding.to_json() for finding in self.findings],
        }

    @property
    def problems(self) -> tuple[Fact, ...]:
        return tuple(Fact(finding.id, finding.sentence) for finding in self.findings)

    def waits_sentence(self, recording: Recording) -> str:
        """Return that training waits for CPU cores, if its device is the CPU and its times are longer for it."""
        device, share = (recording.facts.get("environment") or {}).get("device"), self.core_wait_share or 0.0
        if device != "cpu" or share < _MUCH_WAIT:
            return ""
        return f" Training waits {percent(share)} of the time for a CPU core: every time here is longer for it."

    def facts(self, is_whole: bool = True) -> Iterator[Fact]:
        """Yield its time, its memory and its cost; without `is_whole`, its time is unknown."""
        if self.goodput is not None and is_whole:
            yield Fact("goodput", *_share_texts(self.goodput))
        if self.peak is not None:
            yield Fact("peak memory", *self.peak)
        if self.core_wait_share is not None and self.core_wait_share >= _LEAST_WAIT:
            waits = f"training waits for one {percent(self.core_wait_share)} of the time"
            yield Fact("CPU cores", waits, "others run on them: on an idle machine, times are shorter")
        if self.job is not None:
            text, detail = _share_texts(self.job)
            yield Fact("job", f"{plural(self.job.num_runs, 'recording')}, {text}", detail)
        if self.price_per_hour is not None and (paid := self.job or self.goodput) is not None:
            unit, price = paid.cost_per_million(self.price_per_hour)
            hours = f"{significant(self.price_per_hour)} per hour for {span(paid.wall_ns)}"
            yield Fact("cost", f"{significant(price)} per million {unit}", hours)


def _share_texts(found: Goodput) -> tuple[str, str]:
    lost = sorted(((ns, name) for name, ns in found.rows.items() if name not in (TRAINING, MEASURING)), reverse=True)
    measuring_ns = found.rows.get(MEASURING, 0)
    whole_ns = max(1, found.wall_ns - measuring_ns)
    worth = [(ns, name) for ns, name in lost if ns >= _LEAST_LOSS * whole_ns][:_MOST_LOSSES]
    texts = ", ".join(f"{name} {percent(ns / whole_ns)}" for ns, name in worth)
    without = ", without measuring" if measuring_ns >= _LEAST_LOSS * whole_ns else ""
    return f"{percent(found.share)} of {span(whole_ns)} since the start{without}", f"lost: {texts}" if texts else ""


def _peak_texts(run: Run, first: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the largest memory of the whole run: later steps may use more than the `first` ones, or less."""
    for name, of_first, what in (
        ("peak_bytes", "peak_allocated_bytes", "allocated on the GPU"),
        ("resident_bytes", "peak_resident_bytes", "resident"),
    ):
        if (track := run.tracks.get(name)) is not None:
            most, when = max(track.values), "by the end of the clean window"
            if most >= first.get(of_first, 0):
                when = f"by {run.when(track.steps[track.values.index(most)])}"
            return f"{size(max(most, first.get(of_first, 0)))} {what} in the whole run", when
    return None


def goodput_bars(found: Goodput) -> Bars:
    """Return the wall-clock time by what took it, training first."""
    rows = sorted(found.rows.items(), key=lambda row: (row[0] != TRAINING, -row[1]))
    labels, times = zip(*rows)
    title = f"where the time since the start goes ({span(found.wall_ns)})"
    caption = f"Goodput: {percent(found.share)}. Stepscope's own work (measuring) is left out of it."
    return Bars("goodput", title, labels, (Series("time", times),), "time_ns", caption=caption)
