"""Builds a verification as a document: what each fix changed, measured, and whether its losses agree."""

from collections import Counter
from collections.abc import Iterator, Mapping

from stepscope.analysis.comparison import losses as gate
from stepscope.analysis.comparison import verification as verify
from stepscope.analysis.comparison.losses import LossCheck
from stepscope.analysis.comparison.metrics import METRICS, NO_DIFFERENCE
from stepscope.analysis.comparison.verification import Expected, Verification, Verified
from stepscope.document.comparison import change_text, figure, interval_text, p_text, signed
from stepscope.document.model import Document, Fact, Facts, Section
from stepscope.formatting import average, duration, milliseconds, percent, plural, significant, size, whole_percent

_LEAST_WARMUP_NS = 1e9
_WORTH_SAYING = 0.01  # of the time of a run
_ALLOWED = {"same": "the same arithmetic", "reordered": "sums in another order", "reduced": "lower precision",
            "resampled": "other random numbers", "by hand": "a change by hand"}  # fmt: skip

_WHY_MEANS = {
    gate.RESAMPLED: "The data or the model draws random numbers, and with the change others",
    gate.BY_HAND: "Those of single steps differ, as if the change draws other random numbers",
}


def verification_document(found: Verification) -> Document:
    """Return the verification: the baseline, then every fix, the fastest first."""
    spread = f"; they differ by up to {percent(found.apart_share)}"
    if found.num_rounds == 1:
        spread = f"; run at least {verify.MIN_ROUNDS} --rounds to see whether it repeats"
    about = (
        Fact("script", found.command),
        Fact("device", f"{found.device_name or 'unknown device'}   torch {found.torch or 'unknown'}"),
        Fact("baseline", f"{milliseconds(found.step_ns)} per step in {plural(found.num_rounds, 'run')}{spread}"),
        Fact("recordings", found.folder),
        *(Fact("warning", warning) for warning in found.warnings),
    )
    ordered = sorted(found.fixes, key=lambda each: (verify.STATUSES.index(each.status), _rank(each)))
    fixes = [
        Section(each.fix, f"Fix {each.fix}: {_verdict(each)}", (Facts(tuple(_facts(each))),)) for each in ordered
    ]
    return Document("verification", headline(found), (Section("baseline", "", (Facts(about),)), *fixes))


def headline(found: Verification) -> str:
    if len(found.fixes) == 1:
        return _sentence(found.fixes[0])
    counts = Counter(sorted((each.status for each in found.fixes), key=verify.STATUSES.index))
    statuses = ", ".join(f"{number} {status}" for status, number in counts.items())
    best = min((each for each in found.fixes if each.status == verify.FASTER), key=_rank, default=None)
    return f"{len(found.fixes)} fixes: {statuses}.{'' if best is None else f' {_sentence(best)}'}"


def _sentence(each: Verified) -> str:
    change = each.change
    if change is None or each.status == verify.WRONG:
        return f"{each.fix} {'' if each.status == verify.FAILED else 'is '}{each.status}: {each.reason}"
    before, after = figure(change.base, change.unit), figure(change.new, change.unit)
    what = "a step takes" if each.saving_ns is not None else f"{METRICS[change.metric].title} are"
    left_out = ", waits for CPU cores left out" if each.others_share > _WORTH_SAYING else ""
    took = f"{what} {after} instead of {before}, {change_text(change)}{left_out}"
    if each.status == verify.FASTER:
        return f"{each.fix} is faster: {took}."
    within = f" (95 % interval {interval_text(change)})" if each.status == NO_DIFFERENCE else ""
    return f"{each.fix}: {each.status}; {took}{within}."


def _verdict(each: Verified) -> str:
    if each.change is None or each.status == verify.WRONG:
        return each.status
    saved = ""
    if each.saving_ns is not None and each.status in (verify.FASTER, verify.SLOWER):
        saved = f" {signed(duration(abs(each.saving_ns), 3), -each.saving_ns)} per step,"
    return f"{each.status}{saved} {change_text(each.change)}"


def _facts(each: Verified) -> Iterator[Fact]:
    if each.script is not None:
        yield Fact("changed", each.script)
    if each.reason is not None:
        yield Fact("reason", each.reason)
    change = each.change
    if change is not None:
        after, before = figure(change.new, change.unit), figure(change.base, change.unit)
        tested = f"; 95 % interval {interval_text(change)}, {p_text(change.p_value)}" if change.p_value else ""
        counts = " and ".join(map(str, change.num_samples or ()))
        title = METRICS[change.metric].title
        yield Fact("measured", f"{title} {after} instead of {before}{tested}; {counts} runs")
        pairs = (f"{milliseconds(pair.before_ns)} → {milliseconds(pair.after_ns)}" for pair in each.rounds)
        yield Fact("runs", ", ".join(pairs) + _between_runs(each))
    if each.expected is not None:
        yield Fact("expected", _expected(each.expected))
    if each.losses is not None:
        yield Fact("losses", losses_sentence(each.losses))
    if each.changed:
        yield Fact("applied", _counts(each.changed))
    if each.left and each.status != verify.NOT_APPLIED:
        yield Fact("not applied", _counts(each.left))
    if any(abs(after - before) > 0.005 for before, after in each.products.values()):
        shares = [f"{name} {whole_percent(old)} → {whole_percent(new)}" for name, (old, new) in each.products.items()]
        yield Fact("dtypes", f"share of the FLOPs per step: {', '.join(shares)}")
    if each.warmup_extra_ns is not None and each.warmup_extra_ns > _LEAST_WARMUP_NS:
        back = "" if each.pays_after_steps is None else f"; it pays off after {plural(each.pays_after_steps, 'step')}"
        yield Fact("warm-up", f"{duration(each.warmup_extra_ns, 3)} longer{back}")
    if each.peak_bytes is not None:
        yield Fact("memory", f"peak allocated {size(each.peak_bytes[0])} → {size(each.peak_bytes[1])}")


def _between_runs(each: Verified) -> str:
    """Return the range of changes over the pairs of runs, if there are several that did the same work."""
    if len(each.rounds) < 2 or each.saving_ns is None:
        return ""
    shares = sorted(pair.after_ns / pair.before_ns - 1 for pair in each.rounds)
    low, high = (signed(percent(abs(share)), share) for share in (shares[0], shares[-1]))
    return f" ({low} to {high})"


def _expected(expected: Expected) -> str:
    if expected.saving_ns is None:
        return expected.reason or "a saving of unknown size"
    share = "" if expected.share is None else f", {signed(percent(expected.share), -expected.share)}"
    most = "up to " if expected.upper_bound else ""
    saving = duration(expected.saving_ns, 3)
    return f"{most}{saving} less per step{share} (from diagnose, {expected.confidence} confidence)"


def losses_sentence(losses: LossCheck) -> str:
    """Return whether the losses agree, how far they are apart, and what is allowed."""
    if losses.verdict == gate.NOT_COMPARED:
        return f"not compared: {losses.reason}"
    noise = losses.noise_share or 0.0
    if losses.chance_share is not None:
        return _means_sentence(losses)
    allowed = f"allowed {_small(losses.limit_share)} ({_ALLOWED[losses.arithmetic]}"
    if noise:
        allowed += f" {_small(losses.tolerance_share)}, plus twice the {_small(noise)} between two baseline runs"
        allowed += "; seed the script for a stricter check" if noise > (losses.tolerance_share or 0) else ""
    if losses.rounding_share:
        allowed += f", plus twice the {_small(losses.rounding_share)} that rounding alone changes by that step"
    allowed += ")"
    how, steps = "agree" if losses.verdict == gate.AGREE else "differ", plural(losses.num_steps, "step")
    if losses.difference_share == 0:
        return f"{how}: identical to the last digit in {steps}; {allowed}"
    far = "not a number" if losses.difference_share is None else f"up to {_small(losses.difference_share)} apart"
    where = f"at step {losses.step}: {_loss(losses.after)} instead of {_loss(losses.before)}"
    return f"{how}: {far}, {where}; {allowed}; {steps}"


def _means_sentence(losses: LossCheck) -> str:
    how = "agree" if losses.verdict == gate.AGREE else "differ"
    return (
        f"{how}: on average {_loss(losses.after)} instead of {_loss(losses.before)} in "
        f"{plural(losses.num_steps, 'step')}, {_small(losses.difference_share)} apart. "
        f"{_WHY_MEANS[losses.arithmetic]}, so only means are compared; allowed {_small(losses.limit_share)} "
        f"({_small(losses.tolerance_share)}, plus the {_small(losses.chance_share)} that chance can make)"
    )


def _small(share: float | None) -> str:
    return f"{significant(100 * (share or 0.0), 2)} %"


def _loss(value: float | None) -> str:
    return "not a number" if value is None else significant(value, 6)


def _counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{what}: {average(number)}" for what, number in counts.items())


def _rank(each: Verified) -> float:
    """Return what sorts fixes of one status: the largest gain first."""
    if each.change is None or each.change.share is None:
        return 0.0
    return each.change.share if each.saving_ns is not None else -each.change.share
