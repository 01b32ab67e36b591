"""A verification for a terminal: what each fix brought, and the proof."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from stepscope.analysis.comparison.losses import AGREE, NOT_COMPARED, LossCheck
from stepscope.analysis.comparison.metrics import NO_DIFFERENCE, TOO_FEW
from stepscope.analysis.comparison.verified import (
    FAILED,
    FASTER,
    INCOMPARABLE,
    MIN_ROUNDS,
    NOT_APPLIED,
    SLOWER,
    WRONG,
    Expected,
    Verification,
    Verified,
)
from stepscope.document.card import BOLD, DIM, RESET
from stepscope.document.text.compare_words import change_text, figure, interval_text, p_text, signed, title_of
from stepscope.formatting import average, duration, milliseconds, percent, plural, safe, significant, size

_ORDER = (FASTER, NO_DIFFERENCE, TOO_FEW, SLOWER, WRONG, FAILED, INCOMPARABLE, NOT_APPLIED)
_LABEL = 10
_WORTH_A_LINE_NS = 1e9


def verify_text(found: Verification, color: bool, width: int) -> str:
    """The whole answer for a terminal of so many columns."""
    bold, dim, reset = (BOLD, DIM, RESET) if color else ("", "", "")
    ordered = sorted(found.fixes, key=lambda each: (_ORDER.index(each.status), _share(each)))
    lines = [f"{bold}{row}{reset}" for row in textwrap.wrap(safe(headline(found), 1000), width)]
    apart = f"; their medians are up to {percent(found.apart_share)} apart"
    if found.num_rounds == 1:
        apart = f": whether it repeats itself is not known (--rounds {MIN_ROUNDS})"
    about = [
        ("script", found.command),
        ("on", f"{found.device_name or 'an unknown device'}   torch {found.torch or '?'}"),
        ("without", f"{milliseconds(found.step_ns)} a step, in {plural(found.num_rounds, 'run')}{apart}"),
        ("runs", found.folder),
    ]
    lines += ["", *(line for label, text in about for line in _field(label, text, width, "", ""))]
    for each in ordered:
        lines += ["", f"{bold}{safe(each.fix)}{reset}   {_verdict(each)}"]
        for label, text in _fields(each):
            lines += _field(label, text, width, dim, reset)
    for warning in found.warnings:
        lines += ["", *textwrap.wrap(f"To be known: {safe(warning, 500)}.", width)]
    return "\n".join(lines)


def headline(found: Verification) -> str:
    """What was found, in a sentence or two."""
    if len(found.fixes) == 1:
        return _sentence(found.fixes[0])
    counts: dict[str, int] = {}
    for each in sorted(found.fixes, key=lambda fix: _ORDER.index(fix.status)):
        counts[each.status] = counts.get(each.status, 0) + 1
    told = ", ".join(f"{number} {status}" for status, number in counts.items())
    best = min((each for each in found.fixes if each.status == FASTER), key=_share, default=None)
    most = "" if best is None else f" {_sentence(best)}"
    return f"{plural(len(found.fixes), 'fix').replace('fixs', 'fixes')}: {told}.{most}"


def _sentence(each: Verified) -> str:
    change = each.change
    if change is None or each.status == WRONG:
        return f"{each.fix} {'' if each.status == FAILED else 'is '}{each.status}: {each.reason}"
    before, after = figure(change.base, change.unit), figure(change.new, change.unit)
    what = "a step takes" if each.saving_ns is not None else f"{title_of(change.metric)} are"
    took = f"{what} {after} instead of {before}, {change_text(change)}"
    if each.status == FASTER:
        return f"{each.fix} makes it faster: {took}."
    return f"{each.fix}: {each.status}; {took}."


def _verdict(each: Verified) -> str:
    if each.change is None or each.status == WRONG:
        return each.status
    saved = ""
    if each.saving_ns is not None and each.status in (FASTER, SLOWER):
        saved = f"   {signed(duration(abs(each.saving_ns), 3), -each.saving_ns)} a step,"
    return f"{each.status}{saved}   {change_text(each.change)}".replace(",   ", ", ")


def _fields(each: Verified) -> Iterator[tuple[str, str]]:
    if each.reason is not None:
        yield "because", each.reason
    change = each.change
    if change is not None:
        after, before = figure(change.new, change.unit), figure(change.base, change.unit)
        tested = f"; 95 % interval {interval_text(change)}, {p_text(change.p_value)}" if change.p_value else ""
        counts = " and ".join(map(str, change.num_samples or ()))
        yield "measured", f"{title_of(change.metric)} {after} instead of {before}{tested}; {counts} clean steps"
        pairs = (f"{milliseconds(pair.before_ns)} → {milliseconds(pair.after_ns)}" for pair in each.rounds)
        yield "runs", "   ".join(pairs) + _between_runs(each)
    if each.expected is not None:
        yield "expected", _expected(each.expected)
    if each.losses is not None:
        yield "losses", losses_sentence(each.losses)
    if each.changed:
        yield "applied", _counts(each.changed)
    if each.left and each.status != NOT_APPLIED:
        yield "not", _counts(each.left)
    if any(abs(after - before) > 0.005 for before, after in each.products.values()):
        shares = (f"{name} {before:.0%} → {after:.0%}" for name, (before, after) in each.products.items())
        yield "products", f"of a step's FLOPs: {', '.join(shares)}"
    if each.warmup_extra_ns is not None and each.warmup_extra_ns > _WORTH_A_LINE_NS:
        back = "" if each.pays_after_steps is None else f": won back after {plural(each.pays_after_steps, 'step')}"
        yield "costs", f"the warm-up takes {duration(each.warmup_extra_ns, 3)} longer{back}"
    if each.peak_bytes is not None:
        yield "memory", f"peak allocated {size(each.peak_bytes[0])} → {size(each.peak_bytes[1])}"


def _between_runs(each: Verified) -> str:
    """How far the pairs agree, where there are several and they compare the same work."""
    if len(each.rounds) < 2 or each.saving_ns is None:
        return ""
    shares = sorted(pair.after_ns / pair.before_ns - 1 for pair in each.rounds)
    low, high = (signed(percent(abs(share)), share) for share in (shares[0], shares[-1]))
    tested = "" if each.runs_p_value is None else f", {p_text(each.runs_p_value)}"
    return f"   ({low} to {high}{tested})"


def _expected(expected: Expected) -> str:
    if expected.saving_ns is None:
        return expected.reason or "a saving that nobody can say in milliseconds"
    share = "" if expected.share is None else f", {signed(percent(expected.share), -expected.share)}"
    most = "up to " if expected.upper_bound else ""
    return f"{most}{duration(expected.saving_ns, 3)} less a step{share} (diagnose, confidence {expected.confidence})"


def losses_sentence(losses: LossCheck) -> str:
    """What became of the losses."""
    if losses.verdict == NOT_COMPARED:
        return f"not compared: {losses.reason}"
    noise = losses.noise_share or 0.0
    held = f"allowed {_small(losses.limit_share)} ({_ALLOWED[losses.arithmetic]})"
    if noise:
        held = (
            f"allowed {_small(losses.limit_share)} ({_ALLOWED[losses.arithmetic]} {_small(losses.tolerance_share)}, "
            f"and twice the {_small(noise)} that two runs without it are apart"
            + ("; seeded, the script would show more)" if noise > (losses.tolerance_share or 0) else ")")
        )
    where = f"at step {losses.step}: {_loss(losses.after)} instead of {_loss(losses.before)}"
    how = "agree" if losses.verdict == AGREE else "differ"
    if losses.difference_share == 0:
        return f"{how}: the same to the last digit in {plural(losses.num_steps, 'step')}; {held}"
    far = "no number" if losses.difference_share is None else f"up to {_small(losses.difference_share)} apart"
    return f"{how}: {far}, {where}; {held}; {plural(losses.num_steps, 'step')}"


_ALLOWED = {
    "same": "the same arithmetic",
    "reordered": "sums in another order",
    "reduced": "fewer digits",
}


def _small(share: float | None) -> str:
    """A share in per cent, however small."""
    return f"{significant(100 * (share or 0.0), 2)} %"


def _loss(value: float | None) -> str:
    return "no number" if value is None else significant(value, 6)


def _counts(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{safe(what, 300)}: {average(number)}" for what, number in counts.items())


def _share(each: Verified) -> float:
    """What sorts fixes of one status: the most faster first."""
    if each.change is None or each.change.share is None:
        return 0.0
    return each.change.share if each.saving_ns is not None else -each.change.share


def _field(label: str, text: str, width: int, dim: str, reset: str) -> list[str]:
    rows = textwrap.wrap(safe(text, 1000), max(40, width - _LABEL - 3), break_on_hyphens=False) or [""]
    head = f"   {dim}{label:<{_LABEL}}{reset}"
    return [(head if number == 0 else " " * (3 + _LABEL)) + row for number, row in enumerate(rows)]
