"""The answers of the study `megalodon` about the three paths of its moving average: proofs, speed, cross-overs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Text
from stepscope.studies.figures import against, crossing, host_paced, known, lines, listed, said, table
from stepscope.studies.stored import Rows, Stored

PATHS = ("fft", "sequential", "scan")
FFT, SEQUENTIAL, SCAN = PATHS
TIME, PEAK, BUSY = "time_median_ns", "peak_allocated_bytes", "gpu_busy_share"
PLACES = {"average": ("path", "alone"), "paths": ("ema", "in the model")}
"""Measure → the knob that is the path there, and where it is."""
SIZE = ("batch", "width", "num_states")


def alone(stored: Stored, last_state: bool = True) -> Rows:
    """The average alone, in the size that it has in the model."""
    model = stored.rows("paths")
    return stored.rows("average").where(last_state=last_state, **{name: model.values(name) for name in SIZE})


def place(stored: Stored, measure: str) -> Rows:
    """The rows of one of PLACES that can be held against those of the other."""
    return (alone(stored) if measure == "average" else stored.rows(measure)).needed()


def different(stored: Stored) -> Iterator[Any]:
    """What shows that each path ran, and how far it is from float64."""
    found: list[dict[str, Any]] = []
    sentences = []
    for measure, (knob, where) in PLACES.items():
        rows = stored.sweep(measure).rows
        seen = []
        for path in PATHS:
            of = [row for row in rows if row["config"][knob] == path and row.get("samples_host_ns")]
            if not of:
                continue
            claim = f"{knob}={path}"
            proven = [row for row in of if row.get("proofs", {}).get(claim)]
            last = max(proven or of, key=lambda row: row["config"]["seq_len"])
            evidence = (last.get("proofs") or {}).get(claim) or "none"
            seen.append(f"{path} by {evidence} at {last['config']['seq_len']} tokens")
            worst = {kind: _worst(of, kind) for kind in ("outputs", "gradients")}
            row = {"where": where, "path": path, "num_rows": len(of), "num_proven": len(proven)}
            found.append(row | {"longest": last["config"]["seq_len"], "evidence": evidence} | worst)
        sentences.append(f"{where.capitalize()}, a traced pass shows {', '.join(seen)}.")
    if not found:
        raise CannotCheck("no path was measured")
    num_rows, num_proven = (sum(row[name] for row in found) for name in ("num_rows", "num_proven"))
    furthest = max(row[name] for row in found for name in ("outputs", "gradients") if row[name] is not None)
    yield Text(
        f"{num_proven} of {num_rows} rows prove that their path ran, and none is further than {furthest:.1e} of its "
        f"norm from the sequential path in float64, gradients included. {_same_loss(stored)} The playbook's switch "
        f"for the sequential path did nothing, so that it held {FFT} against {FFT}."
    )
    yield Text(" ".join(sentences))
    for row in found:
        row |= {kind: None if row[kind] is None else f"{row[kind]:.1e}" for kind in ("outputs", "gradients")}
    yield table("proofs", "What ran, and how far from float64 the result is", found, *found[0])


def _worst(rows: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    found = [(row.get("gate") or {}).get("deviations", {}).get(kind) for row in rows]
    return max((value for value in found if value is not None), default=None)


def _same_loss(stored: Stored) -> str:
    rows = stored.rows("paths").ok
    spread = 0.0
    for length in rows.values("seq_len"):
        losses = [record["loss"] for record in rows.where(seq_len=length) if record["loss"]]
        spread = max([spread, *(abs(loss / losses[0] - 1) for loss in losses)])
    if not spread:
        return "The losses of the model at one length are the same to the last digit, whatever the path."
    return f"The losses of the model at one length differ by {spread:.1e} of themselves at the most."


def fastest(stored: Stored) -> Iterator[Any]:
    """Which path wins where, alone and in the model, and what part of the model the average is."""
    meetings: list[dict[str, Any]] = []
    parts: list[Any] = []
    waiting: list[str] = []
    for measure, (knob, where) in PLACES.items():
        rows = place(stored, measure)
        for mode in rows.values("mode"):
            of = rows.where(mode=mode)
            for one, other in ((SEQUENTIAL, FFT), (FFT, SCAN), (SEQUENTIAL, SCAN)):
                found = _meeting(list(of.ok.where(**{knob: one})), list(of.ok.where(**{knob: other})), knob)
                meetings += [{"where": where, "mode": mode} | row for row in found]
            parts.append(lines(f"{measure}-{mode}", f"{where.capitalize()}, {mode}", of, "seq_len", TIME, knob))
        names = known(rows, "mode", knob, "seq_len", TIME, BUSY, "tokens_per_s", PEAK, "speedup")
        parts.append(table(measure, where.capitalize(), rows, *names))
        waiting += host_paced(rows.ok, where.capitalize())
    yield Text(_winner(stored))
    if not meetings:
        raise CannotCheck("no two paths were measured at one length")
    told = (
        f"{row['where']}, {row['mode']}, {row['faster']} is faster than {row['than']} {row['from']}"
        for row in meetings
        if {row["faster"], row["than"]} == {FFT, SEQUENTIAL}
    )
    yield Text(" ".join([f"FFT and the sequential path: {'; '.join(told) or 'no length has both'}.", *waiting]))
    note = "times faster: at the longest length that both have"
    yield table("crossings", "From which length one path is faster than another", meetings, *meetings[0], note=note)
    yield from _larger(stored)
    yield from parts
    yield from _part_of_model(stored)


def _winner(stored: Stored) -> str:
    """The fastest path of the model where it is longest, and how far the others are behind at their longest."""
    rows = stored.rows("paths").ok.needed()
    mode = rows.values("mode")[-1]
    rows = rows.where(mode=mode)
    longest = rows.where(seq_len=max(rows.values("seq_len")))
    best = min(longest, key=lambda record: record[TIME])
    behind = []
    for path in PATHS:
        of = [
            record for record in rows.where(ema=path) if len(rows.where(ema=best["ema"], seq_len=record["seq_len"]))
        ]
        if path != best["ema"] and of:
            last = max(of, key=lambda record: record["seq_len"])
            same = rows.one(ema=best["ema"], seq_len=last["seq_len"])
            behind.append(f"{path} is {against(last, same, best['ema'])} at {last['seq_len']}")
    return (
        f"In the model, {mode}, {best['ema']} is the fastest path at {best['seq_len']} tokens "
        f"({said(TIME, best[TIME])}); {' and '.join(behind) or 'no other was measured there'}."
    )


def _larger(stored: Stored) -> Iterator[Any]:
    """The average alone in other sizes than the model's."""
    of_model = {record["hash"] for record in alone(stored)}
    rows = [r for r in stored.rows("average").where(last_state=True) if r["hash"] not in of_model]
    if not rows:
        return
    knobs = ("mode", "seq_len", *SIZE)
    speeds: dict[tuple[Any, ...], list[str]] = {}
    ok = Rows("average", rows).ok
    for record in ok.where(path=SCAN):
        for other in ok.where(path=FFT, **{name: record[name] for name in knobs}):
            size = tuple(record[name] for name in knobs[1:])
            speeds.setdefault(size, []).append(f"{against(record, other, FFT)} in {record['mode']}")
    told = [
        f"Alone, {batch} sequences of {length} tokens, width {width}, {num_states} states: scan is {listed(speed)}."
        for (length, batch, width, num_states), speed in speeds.items()
    ]
    if told:
        yield Text(" ".join([*told, *host_paced(ok, "In that size")]))
    names = known(rows, *knobs, "path", TIME, BUSY, "tokens_per_s", PEAK, "speedup")
    yield table("average-larger", "Alone, in other sizes than in the model", rows, *names)


def _meeting(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], knob: str) -> list[dict[str, Any]]:
    """Which of two paths is the faster one in the end, and from which length on; [] where they share no length."""
    times = [{record["seq_len"]: record[TIME] for record in rows} for rows in (one, other)]
    both = sorted(times[0].keys() & times[1].keys())
    if not both:
        return []
    last = both[-1]
    slow, fast = (one, other) if times[1][last] < times[0][last] else (other, one)
    at = crossing(slow, fast, "seq_len", TIME)
    if at is None:  # they are equal
        where = "nowhere"
    else:
        where = f"from about {at:.0f} tokens on" if at > both[0] else f"from {both[0]} tokens, the shortest, on"
    ratio = max(times[0][last], times[1][last]) / min(times[0][last], times[1][last])
    return [{"faster": fast[0][knob], "than": slow[0][knob], "from": where, "longest": last, "times_faster": ratio}]


def _part_of_model(stored: Stored) -> Iterator[Any]:
    """The average alone, as often as the model has it, beside the whole model."""
    rows = alone(stored).ok
    found: list[dict[str, Any]] = []
    for whole in stored.rows("paths").ok:
        same = {name: whole[name] for name in ("seq_len", "mode", *SIZE)}
        for part in rows.where(path=whole["ema"], **same):
            row = {"path": whole["ema"], "seq_len": whole["seq_len"], "mode": whole["mode"], "alone_ns": part[TIME]}
            row |= {"num_layers": whole["layers"], "model_ns": whole[TIME]}
            found.append(row | {"model_share": whole["layers"] * part[TIME] / whole[TIME]})
    if not found:
        raise CannotCheck("no length was measured alone and in the model")
    ends = sorted(found, key=lambda row: row["model_share"])
    low, high = (
        f"{said('share', row['model_share'])} ({row['path']}, {row['seq_len']} tokens, {row['mode']})"
        for row in (ends[0], ends[-1])
    )
    apart = " (both were measured apart: a share can pass 100 %)" if ends[-1]["model_share"] > 1 else ""
    yield Text(
        f"Alone, as often as the model has it, the average takes from {low} to {high} of the whole model{apart}. "
        "The playbook's micro traces, meant to be of it alone, were of the whole."
    )
    yield table("part", "The moving average alone beside the model", found, *found[0])
