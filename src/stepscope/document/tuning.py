"""Builds a tuning as a document: the best point and its gain, the frontier, the path, what was not tried."""

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.analysis.comparison.tuning import AGAIN, BESIDE, Gain, Tried, Tuning
from stepscope.document.comparison import p_text
from stepscope.document.model import Document, Fact, Facts, Part, Section, Table
from stepscope.document.tables import columns_of
from stepscope.formatting import duration, plural, safe, significant, size

DEFAULTS = "the defaults"
REFERENCE = "reference"
NUM_FAILED = 6
_REASON = 160
_STOPPED = {
    "settled": "stopped when a whole round gained nothing",
    "time": "stopped when the time was up",
    "stuck": "stopped because no point was correct",
}


def turned_text(turned: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={safe(value, 40)}" for name, value in turned.items()) or DEFAULTS


def trial_line(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a finished row as one line of progress; `defaults` are the values that the search started from."""
    turned = {n: value for n, value in {**row["config"], **row["run"]}.items() if value != defaults.get(n)}
    roles = {AGAIN: f"round {row['tune']['round']} again: ", REFERENCE: "reference loss: ", BESIDE: "alongside: "}
    role = roles.get(row["tune"]["role"], "")
    figure = safe(row.get("reason") or "", _REASON)
    if row["status"] == OK:
        step_ns, tokens = median(row["samples_device_ns"]), row.get("num_tokens")
        speed = f", {significant(tokens / step_ns * 1e9)} tokens/s" if tokens else ""
        figure = f"{duration(step_ns, 3)} per step{speed}"
    return f"{row['status']:<8} {role}{turned_text(turned)}  {figure}"


def tuning_document(tuning: Tuning) -> Document:
    parts: list[Part] = [Facts(tuple(_facts(tuning)))]
    parts += [_frontier(tuning)] if tuning.frontier else []
    parts += [_path(tuning)] if tuning.moves else []
    groups = {
        "not ranked": tuple(_not_ranked(tuning)),
        "not tried": tuple(_not_tried(tuning)),
        "notes": tuple(Fact("", note) for note in _notes(tuning)),
        "to measure the best point again": (Fact("", tuning.command),) if tuning.command else (),
    }
    parts += [Facts(facts, title) for title, facts in groups.items() if facts]
    return Document("tuning", _headline(tuning), (Section("tuning", "", tuple(parts)),))


def _headline(tuning: Tuning) -> str:
    best = tuning.best
    if best is None or best.per_s is None:
        is_memory = bool(tuning.points) and all(each.is_pruned or each.status == "oom" for each in tuning.points)
        return f"None of {plural(len(tuning.points), 'point')} {'fits in memory' if is_memory else 'was correct'}."
    speed = f"{significant(best.per_s)} {tuning.unit}/s"
    if tuning.defaults is not None and best.hash == tuning.defaults.hash:
        return f"No point is measurably faster than the defaults: {speed}, {_memory(best)}."
    text = f"{safe(turned_text(best.turned), 300)}: {speed}"
    if tuning.gain is None:
        return f"{text}, {_memory(best)}; the defaults have no figure to compare with."
    return f"{text}, {significant(tuning.gain.speedup)}× the defaults, {_memory(best)}."


def _facts(tuning: Tuning) -> Iterator[Fact]:
    best, defaults = tuning.best, tuning.defaults
    name = " ".join(filter(None, (tuning.workload, tuning.preset)))
    yield Fact("workload", f"{name} on {tuning.device_name or 'an unknown device'}")
    if defaults is not None:
        is_ok = defaults.status == OK and defaults.per_s is not None
        figures = f"{significant(defaults.per_s or 0)} {tuning.unit}/s, {_memory(defaults)}"
        yield Fact("defaults", figures if is_ok else f"{defaults.status}: {defaults.reason}")
    if tuning.gain is not None:
        counts = dict.fromkeys(str(point.num_samples) for point in (defaults, best) if point)
        how = "measured in turns" if tuning.gain.is_measured_again else "from the search, which favors the best point"
        samples = f"{' and '.join(counts)} samples{' each' * (len(counts) == 1)}, {how}"
        yield Fact("gain", f"{_interval(tuning.gain)}, {p_text(tuning.gain.p_value)}; {samples}")
    if best is not None and best.memory_bytes is not None:
        budget = "" if tuning.budget_bytes is None else f" of {size(tuning.budget_bytes)}"
        plan = "" if best.predicted_bytes is None else f"; predicted {size(best.predicted_bytes)}"
        yield Fact("memory", f"{size(best.memory_bytes)}{budget}{plan}")
    if best is not None:
        yield Fact("loss", _loss(best))
    if tuning.lead is not None and tuning.runner_up is not None:
        second, lead = tuning.runner_up, tuning.lead
        slower = f"the best is faster, {_interval(lead)}"
        how = slower if lead.is_significant else f"not measurably slower than the best ({_interval(lead)})"
        yield Fact("runner-up", f"{safe(turned_text(second.turned), 300)}, {_memory(second)}: {how}")
    stopped = _STOPPED.get(tuning.stopped, "interrupted")
    spent = f"{plural(tuning.num_rounds, 'round')} in {tuning.seconds:.0f} s of {tuning.limit_s:.0f} s, {stopped}"
    yield Fact("searched", f"{', '.join(tuning.axes)}: {spent}")
    pruned = sum(point.is_pruned for point in tuning.points)
    by_status = Counter(tuning.num_by_status) - Counter(skipped=pruned)
    by_status["pruned by their plan"] = pruned
    statuses = [f"{number} {status}" for status, number in by_status.items() if number]
    yield Fact("points", f"{len(tuning.points)}: {', '.join(statuses)}")


def _loss(point: Tried) -> str:
    if point.loss_unchecked:
        return f"not checked: {point.loss_unchecked}"
    if point.loss is None:
        return "none"
    if point.loss_tolerance is None:
        return f"{point.loss:.6g}; this is the reference variant"
    return (
        f"{point.loss:.6g}, reference variant {point.plain_loss:.6g}; "
        f"at most {point.loss_deviation:.1g} apart, {point.loss_tolerance:.1g} allowed"
    )


def _frontier(tuning: Tuning) -> Table:
    points, defaults = tuning.frontier, tuning.defaults
    base = defaults.per_s if defaults is not None and defaults.status == OK else None
    best = None if tuning.best is None else tuning.best.hash
    columns = columns_of(
        points,
        f"point {tuning.unit}_per_s:per_s memory_bytes loss",
        point=lambda point: turned_text(point.turned) + (" *" if point.hash == best else ""),
        loss=lambda point: "unchecked" if point.loss_unchecked else "correct",
    )
    if base:
        columns["speedup"] = [round((point.per_s or 0) / base, 2) for point in points]
    if any(point.mfu_share is not None for point in points):
        columns["mfu_share"] = [point.mfu_share for point in points]
    title = f"the frontier: no other point has both more {tuning.unit}/s and less memory"
    note = "* the best point; speedup is over the defaults"
    return Table("frontier", title, columns, num_shown=len(points), note=note)


def _path(tuning: Tuning) -> Table:
    columns = columns_of(
        tuning.moves,
        "change round speedup",
        change=lambda move: ", ".join(f"{name} {move['before'][name]} → {to}" for name, to in move["turned"].items()),
        speedup=lambda move: None if move["gain"] is None else round(move["gain"], 2),
    )
    return Table("path", "the path of the search", columns, num_shown=len(tuning.moves))


def _not_ranked(tuning: Tuning) -> Iterator[Fact]:
    failed = [point for point in tuning.points if point.status != OK]
    for point in failed[:NUM_FAILED]:
        reason = safe(point.reason or "no reason recorded", _REASON)
        yield Fact("pruned" if point.is_pruned else point.status, f"{turned_text(point.turned)}: {reason}")
    if len(failed) > NUM_FAILED:
        yield Fact("", f"and {len(failed) - NUM_FAILED} more: see --json")


def _not_tried(tuning: Tuning) -> Iterator[Fact]:
    by_reason: dict[str, list[str]] = {}
    for entry in tuning.not_tried:
        where = f"round {entry['round']}: {entry['reason']}" if entry["round"] else entry["reason"]
        by_reason.setdefault(where, []).append(turned_text(entry["turned"]))
    for reason, names in by_reason.items():
        yield Fact("", f"{', '.join(dict.fromkeys(names))}: {reason}")


def _notes(tuning: Tuning) -> Iterator[str]:
    yield from tuning.notes
    turned = {} if tuning.best is None else tuning.best.turned
    if turned.get("dtype") is not None:
        yield (
            f"dtype={turned['dtype']} rounds differently from the defaults. A few steps agree within its tolerance, "
            "which says little about a whole training run."
        )
    if "batch" in turned:
        yield "Another batch size trains differently: tokens/s do not show how useful each step is."
    if tuning.gain is not None and not tuning.gain.is_measured_again:
        yield "There was no time to measure the best point again; give it more with --minutes."
    yield from dict.fromkeys(f"MFU of {point.mfu_limit}" for point in tuning.frontier if point.mfu_limit)


def _interval(gain: Gain) -> str:
    return f"{gain.speedup:.3f}×, 95 % interval {gain.low:.3f} to {gain.high:.3f}"


def _memory(point: Tried) -> str:
    return "unknown memory" if point.memory_bytes is None else size(point.memory_bytes)
