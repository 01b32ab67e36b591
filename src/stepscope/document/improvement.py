"""Builds an improvement as a document of one screen: baseline, best, what each change brought, what was rejected."""

from collections.abc import Iterator

from stepscope.analysis.comparison import improvement as found
from stepscope.analysis.comparison.improvement import Factor, Improvement, Trial
from stepscope.document.model import Document, Fact, Facts, Section
from stepscope.document.verification import losses_sentence
from stepscope.formatting import milliseconds, percent, plural, safe, size

_MEASURED = (found.KEPT, found.REPLACED)
_LONGEST = 160
_WORTH_A_LINE = 0.05  # of a step


def improvement_document(result: Improvement) -> Document:
    """Return the result on one screen."""
    groups = {
        "": tuple(_facts(result)),
        "what each change brought": tuple(_brought(each) for each in result.trials if each.status in _MEASURED),
        "not kept": tuple(_rejected(result.trials)),
        "lines for your script": tuple(Fact("", line) for line in result.code),
    }
    parts = tuple(Facts(facts, title) for title, facts in groups.items() if facts)
    return Document("improvement", headline(result), (Section("improvement", "", parts),))


def headline(result: Improvement) -> str:
    name = safe(result.command, 80)
    if result.gain is None:
        tried = [each.fix for each in result.trials if each.status not in (found.NOT_APPLIED, found.NOT_TRIED)]
        undecided = [each for each in result.trials if each.status == found.UNDECIDED]
        seen = ", ".join(f"{each.fix} ({_factor(each.gain)})" for each in undecided if each.gain)
        what = f"Nothing paid for {name}: tried {', '.join(tried)}."
        if seen:
            what = f"Nothing is proven for {name} yet. Too few runs for a verdict: {seen}."
        elif not tried and result.is_finished:
            what = f"Nothing paid for {name}: none of the known changes applies."
        elif not tried:
            why = "it was interrupted" if result.is_interrupted else "no time was left"
            what = f"Nothing was tried for {name}: {why}."
        return f"{what} A step takes {milliseconds(result.baseline_ns)}."
    return (
        f"{name} trains {_factor(result.gain)} as fast with {', '.join(result.kept)}: "
        f"{milliseconds(result.best_ns)} per step instead of {milliseconds(result.baseline_ns)}."
    )


def _facts(result: Improvement) -> Iterator[Fact]:
    yield Fact("script", safe(result.command, 300))
    yield Fact("device", f"{result.device_name or 'unknown device'}   torch {result.torch or 'unknown'}")
    yield Fact("baseline", f"{milliseconds(result.baseline_ns)} per step")
    if result.gain is not None:
        yield Fact("best", f"{milliseconds(result.best_ns)} per step")
        runs = f"{result.gain.num_runs[0]} and {result.gain.num_runs[1]} runs in alternation"
        yield Fact("factor", f"{_factor(result.gain)}{_interval(result.gain)}; {runs}")
    if result.losses is not None:
        yield Fact("losses", losses_sentence(result.losses))
    if result.peak_bytes is not None:
        yield Fact("memory", f"peak allocated {size(result.peak_bytes[0])} → {size(result.peak_bytes[1])}")
    how = "everything was tried" if result.is_finished else "not everything was tried"
    spent = f"{plural(result.num_runs, 'run')} in {result.seconds:.0f} s of {result.limit_s:.0f} s; {how}"
    yield Fact("searched", f"{spent}, in {safe(result.order, 200)}")
    if large := [f"{name} ({percent(part)})" for name, part in result.by_hand.items() if part >= _WORTH_A_LINE]:
        text = f"not tried, a change in the script: {', '.join(large)}"
        yield Fact("by hand", text, "stepscope run, then diagnose")
    yield Fact("recordings", result.folder)
    yield from (Fact("warning", warning) for warning in result.warnings)


def _brought(trial: Trial) -> Fact:
    gain = "" if trial.gain is None else f"{_factor(trial.gain)}{_interval(trial.gain)}"
    top = f" on top of {', '.join(trial.on_top_of)}" if trial.on_top_of else ""
    promised = "" if trial.promise_share is None else f"; promised up to {percent(trial.promise_share)}"
    why = "" if trial.reason is None else f"; {trial.reason}"
    return Fact(trial.fix, f"{gain}{top}{why}{promised}")


def _rejected(trials: tuple[Trial, ...]) -> Iterator[Fact]:
    """Yield why each change is not kept; those with the same reason share a line."""
    names: dict[str, list[str]] = {}
    for trial in trials:
        if trial.status not in _MEASURED:
            names.setdefault(_reason(trial), []).append(trial.fix)
    for reason, some in names.items():
        status, _, rest = reason.partition(": ")
        yield Fact(some[0], reason) if len(some) == 1 else Fact(status, f"{', '.join(some)}: {rest}")


def _reason(trial: Trial) -> str:
    words = [trial.status]
    if trial.gain is not None and trial.status in (found.NO_GAIN, found.SLOWER, found.UNDECIDED):
        words.append(f"{_factor(trial.gain)}{_interval(trial.gain)}")
    if trial.status == found.WRONG and trial.losses is not None:
        words.append(f"losses {losses_sentence(trial.losses)}")
    elif trial.reason is not None:
        words.append(safe(trial.reason, _LONGEST))
    return ": ".join(words)


def _factor(gain: Factor) -> str:
    return f"{gain.factor:.2f}×"


def _interval(gain: Factor) -> str:
    return "" if gain.low is None or gain.high is None else f" (95 % interval {gain.low:.2f}× to {gain.high:.2f}×)"
