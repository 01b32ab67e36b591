"""A tuning for the terminal: the best point and its gain, the frontier, the path, what was not ranked or tried."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.analysis.comparison.tuning import AGAIN, BESIDE, Gain, Tried, Tuning, tuning_of
from stepscope.devices import find_device, load_ceilings
from stepscope.document.card import BOLD, DIM, RESET
from stepscope.formatting import duration, percent, plural, safe, significant, size

DEFAULTS = "the defaults"
REFERENCE = "reference"
MOST_REASONS = 6
MOST_REASON = 160
_LABEL = 17


def tuning_from(rows: Sequence[Mapping[str, Any]], environments: Mapping[str, Any], log: Mapping[str, Any]) -> Tuning:
    """The tuning of rows, held against what is known of their device."""
    return tuning_of(rows, environments, lambda name: (find_device(name), load_ceilings(name)), log)


def turned_text(turned: Mapping[str, Any]) -> str:
    """Knobs that differ from the defaults, as they are typed."""
    return " ".join(f"{name}={safe(value, 40)}" for name, value in turned.items()) or DEFAULTS


def trial_line(row: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """A finished row in one line, for who watches; `defaults` are the values of all knobs at the beginning."""
    turned = {n: value for n, value in {**row["config"], **row["run"]}.items() if value != defaults.get(n)}
    told = {AGAIN: f"turn {row['tune']['round']}: ", REFERENCE: "for its loss: ", BESIDE: "beside: "}
    role = told.get(row["tune"]["role"], "")
    figure = safe(row.get("reason") or "", MOST_REASON)
    if row["status"] == OK:
        step_ns = median(row["samples_device_ns"])
        tokens = row.get("num_tokens")
        figure = f"{duration(step_ns, 3)} a step" + (f", {_rate(tokens / step_ns * 1e9)} tokens/s" if tokens else "")
    return f"{row['status']:<8} {role}{turned_text(turned)}  {figure}"


def tuning_text(tuning: Tuning, color: bool = False, width: int = 100) -> str:
    """What `stepscope tune` prints."""
    bold, dim, reset = (BOLD, DIM, RESET) if color else ("", "", "")
    lines = [f"{bold}{line}{reset}" for line in textwrap.wrap(_headline(tuning), width)]
    lines.append("")
    for label, text in _facts(tuning):
        lines += textwrap.wrap(f"  {label:<{_LABEL - 2}}{safe(text, 1000)}", width, subsequent_indent=" " * _LABEL)
    if tuning.frontier:
        title = f"the frontier: no other point has both more {tuning.unit}/s and less memory"
        lines += ["", f"{bold}{title}{reset}", *_frontier(tuning, width)]
    if tuning.moves:
        lines += ["", f"{bold}the path{reset}{dim}, as the search measured it{reset}", *_path(tuning)]
    for title, entries in (
        ("not ranked", _not_ranked(tuning)),
        ("not tried", _not_tried(tuning)),
        ("to be known", _notes(tuning)),
    ):
        if entries:
            lines += ["", f"{bold}{title}{reset}"]
        for entry in entries:
            lines += textwrap.wrap(safe(entry, 1000), width, initial_indent="  ", subsequent_indent="    ")
    if tuning.command:
        lines += ["", f"{bold}to measure the best again{reset}", f"  {safe(tuning.command, 2000)}"]
    return "\n".join(lines)


def _headline(tuning: Tuning) -> str:
    best = tuning.best
    if best is None or best.per_s is None:
        is_memory = bool(tuning.points) and all(each.is_pruned or each.status == "oom" for each in tuning.points)
        return (
            f"None of {plural(len(tuning.points), 'point')} {'fits into the memory' if is_memory else 'was right'}."
        )
    speed = f"{_rate(best.per_s)} {tuning.unit}/s"
    if tuning.defaults is not None and best.hash == tuning.defaults.hash:
        return f"Nothing that was tried is shown to be faster than the defaults: {speed}, {_memory(best)}."
    text = f"{safe(turned_text(best.turned), 300)}: {speed}"
    if tuning.gain is None:
        return f"{text}, {_memory(best)}; the defaults have no figure to compare it with."
    return f"{text}, {significant(tuning.gain.speedup)} × the defaults, {_memory(best)}."


def _facts(tuning: Tuning) -> list[tuple[str, str]]:
    best, defaults = tuning.best, tuning.defaults
    where = " ".join(filter(None, (tuning.workload, tuning.preset)))
    facts = [("workload", f"{where} on {tuning.device_name or 'an unknown device'}")]
    if defaults is not None:
        figures = f"{_rate(defaults.per_s)} {tuning.unit}/s, {_memory(defaults)}"
        facts.append(("defaults", figures if defaults.status == OK else f"{defaults.status}: {defaults.reason}"))
    if tuning.gain is not None:
        counts = dict.fromkeys(str(point.num_samples) for point in (defaults, best) if point)
        how = (
            "in turns" if tuning.gain.is_measured_again else "by the search: the best of many seems better than it is"
        )
        said = f"{_interval(tuning.gain)}, {_p(tuning.gain.p_value)}"
        facts.append(("gain", f"{said}; {' and '.join(counts)} samples{' each' * (len(counts) == 1)}, {how}"))
    if best is not None:
        budget = "" if tuning.budget_bytes is None else f" of {size(tuning.budget_bytes)}"
        plan = "" if best.predicted_bytes is None else f"; its plan said {size(best.predicted_bytes)}"
        if best.memory_bytes is not None:
            facts.append(("memory", f"{size(best.memory_bytes)}{budget}{plan}"))
        facts.append(("loss", _loss(best)))
    if tuning.lead is not None and tuning.runner_up is not None:
        facts.append(("runner-up", _runner_up(tuning.runner_up, tuning.lead)))
    pruned = sum(point.is_pruned for point in tuning.points)
    counts_text = ", ".join(
        f"{number - (pruned if status == 'skipped' else 0)} {status}"
        for status, number in tuning.num_by_status.items()
        if number > (pruned if status == "skipped" else 0)
    )
    found = f"{plural(len(tuning.points), 'point')}: {counts_text}" + (f", {pruned} pruned by plan" if pruned else "")
    stopped = {
        "settled": "a whole round gained nothing",
        "time": "the time was over",
        "stuck": "nothing was right",
    }.get(tuning.stopped, "it was interrupted")
    spent = (
        f"{plural(tuning.num_rounds, 'round')} in {tuning.seconds:.0f} s of {tuning.limit_s:.0f} s, until {stopped}"
    )
    return [*facts, ("searched", f"{', '.join(tuning.axes)}: {spent}"), ("points", found)]


def _runner_up(point: Tried, lead: Gain) -> str:
    said = f"{safe(turned_text(point.turned), 300)}, {_memory(point)}"
    if not lead.is_significant:
        return f"{said}: the best cannot be told from it ({_interval(lead)})"
    return f"{said}: the best is faster, {_interval(lead)}"


def _loss(point: Tried) -> str:
    if point.loss_unchecked:
        return f"not checked: {point.loss_unchecked}"
    if point.loss is None:
        return "none"
    if point.loss_tolerance is None:
        return f"{point.loss:.6g}; it is the plainest variant itself"
    return (
        f"{point.loss:.6g}, of the plainest variant {point.plain_loss:.6g}; "
        f"at most {point.loss_deviation:.1g} apart, allowed is {point.loss_tolerance:.1g}"
    )


def _frontier(tuning: Tuning, width: int) -> list[str]:
    base = tuning.defaults.per_s if tuning.defaults is not None and tuning.defaults.status == OK else None
    has_mfu = any(point.mfu_share is not None for point in tuning.frontier)
    rows = [[f"{tuning.unit}/s", "× defaults", "memory", *(["MFU"] if has_mfu else []), "loss"]]
    for point in tuning.frontier:
        ratio = f"{point.per_s / base:.2f}" if base and point.per_s else ""
        mfu = [percent(point.mfu_share) if point.mfu_share is not None else ""] if has_mfu else []
        loss = "unchecked" if point.loss_unchecked else "right"
        rows.append([_rate(point.per_s or 0), ratio, size(point.memory_bytes or 0), *mfu, loss])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, name in zip(rows, ["", *(turned_text(point.turned) for point in tuning.frontier)]):
        line = "  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths)) + f"  {name}"
        best = name and tuning.best is not None and name == turned_text(tuning.best.turned)
        lines.append(_cut(line + (" *" if best else ""), width).rstrip())
    return lines


def _path(tuning: Tuning) -> list[str]:
    lines = []
    for move in tuning.moves:
        steps = ", ".join(f"{name} {move['before'][name]} → {value}" for name, value in move["turned"].items())
        gain = "" if move["gain"] is None else f"× {move['gain']:.2f}"
        lines.append(f"  round {move['round']}  {gain:<7}  {safe(steps, 200)}")
    return lines


def _not_ranked(tuning: Tuning) -> list[str]:
    failed = [point for point in tuning.points if point.status != OK]
    lines = [
        f"{'pruned' if point.is_pruned else point.status}: {turned_text(point.turned)}: "
        f"{safe(point.reason or 'no reason was given', MOST_REASON)}"
        for point in failed[:MOST_REASONS]
    ]
    more = len(failed) - MOST_REASONS
    return [*lines, f"and {more} more: see --json"] if more > 0 else lines


def _not_tried(tuning: Tuning) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for entry in tuning.not_tried:
        where = f"round {entry['round']}: {entry['reason']}" if entry["round"] else entry["reason"]
        by_reason.setdefault(where, []).append(turned_text(entry["turned"]))
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in by_reason.items()]


def _notes(tuning: Tuning) -> list[str]:
    notes = list(tuning.notes)
    best, lead = tuning.best, tuning.gain
    dtype = best.turned.get("dtype") if best is not None else None
    if dtype is not None:
        notes.append(
            f"dtype={dtype} rounds otherwise than the defaults: a few steps agree within its tolerance, "
            "which says little about a whole training"
        )
    if best is not None and "batch" in best.turned:
        notes.append("another batch is another training: tokens/s say nothing about how well its steps are spent")
    if lead is not None and not lead.is_measured_again:
        notes.append("there was no time to measure the best again: --minutes gives more")
    limits = dict.fromkeys(point.mfu_limit for point in tuning.frontier if point.mfu_limit)
    return [*notes, *(f"MFU of {limit}" for limit in limits)]


def _interval(gain: Gain) -> str:
    return f"× {gain.speedup:.3f}, 95 % interval {gain.low:.3f} to {gain.high:.3f}"


def _p(value: float) -> str:
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def _rate(per_s: float | None) -> str:
    return "nothing" if per_s is None else significant(per_s)


def _memory(point: Tried) -> str:
    return "memory not known" if point.memory_bytes is None else size(point.memory_bytes)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
