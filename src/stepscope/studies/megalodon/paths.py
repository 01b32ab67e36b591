"""The answers of the study `megalodon` about the three paths of its moving average: proofs, speed, cross-overs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.figures import (
    Record,
    against,
    crossing,
    host_paced,
    known,
    lines,
    listed,
    paced,
    said,
    table,
    told_apart,
)
from stepscope.studies.stored import Rows, Stored

PATHS = ("fft", "sequential", "scan")
FFT, SEQUENTIAL, SCAN = PATHS
TIME, PEAK, BUSY = "time_median_ns", "peak_allocated_bytes", "gpu_busy_share"
PLACES = {"average": ("path", "alone"), "paths": ("ema", "in the model")}
"""Measure → the knob that is the path there, and where it is."""
SIZE = ("batch", "width", "num_states")
WITH_STATE = "fft with its last state"
"""What the model computes in decoding only: fft takes a second contraction for it; the others have it anyway."""


def alone(stored: Stored) -> Rows:
    """The average alone, in the size that it has in the model, each row with its `variant`."""
    model = stored.rows("paths")
    return _varied(stored.rows("average").where(**{name: model.values(name) for name in SIZE}))


def _varied(rows: Rows) -> Rows:
    return Rows(
        rows.about,
        [
            record | {"variant": WITH_STATE if record["path"] == FFT and record["last_state"] else record["path"]}
            for record in rows
        ],
    )


def place(stored: Stored, measure: str) -> Rows:
    """The rows of one of PLACES that can be held against those of the other, each with its `variant`.

    Alone, fft is without its last state in a mode in which every length has it so, and with it in the others.
    """
    if measure != "average":
        rows = stored.rows(measure).needed()
        return Rows(rows.about, [record | {"variant": record["ema"]} for record in rows])
    rows = alone(stored)
    kept = {mode: _lengths(rows, WITH_STATE, mode) - _lengths(rows, FFT, mode) for mode in rows.values("mode")}
    other = {mode: FFT if kept[mode] else WITH_STATE for mode in kept}
    return Rows(rows.about, [record for record in rows if record["variant"] != other[record["mode"]]]).needed()


def _lengths(rows: Rows, variant: str, mode: str) -> set[int]:
    return set(rows.ok.where(variant=variant, mode=mode).values("seq_len"))


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
            row |= {"longest": last["config"]["seq_len"], "evidence": evidence, "checked_at": _checked_at(of)}
            found.append(row | worst)
        sentences.append(f"{where.capitalize()}, a traced pass shows {', '.join(seen)}.")
    if not found:
        raise Unavailable("no path was measured")
    num_rows, num_proven = (sum(row[name] for row in found) for name in ("num_rows", "num_proven"))
    checked = "; ".join(dict.fromkeys(f"{row['where']} at {row['checked_at']}" for row in found))
    furthest = max(row[name] for row in found for name in ("outputs", "gradients") if row[name] is not None)
    yield Text(
        f"{num_proven} of {num_rows} rows prove that their path ran, and none is further than {furthest:.1e} of its "
        f"norm from the sequential path in float64, gradients included, where that was checked: {checked}. "
        f"{_same_loss(stored)} The playbook's switch for the sequential path did nothing, so that it held {FFT} "
        f"against {FFT}."
    )
    yield Text(" ".join(sentences))
    for row in found:
        row |= {kind: None if row[kind] is None else f"{row[kind]:.1e}" for kind in ("outputs", "gradients")}
    yield table("proofs", "What ran, and how far from float64 the result is", found, *found[0])


def _worst(rows: Sequence[Mapping[str, Any]], kind: str) -> float | None:
    found = [(row.get("gate") or {}).get("deviations", {}).get(kind) for row in rows]
    return max((value for value in found if value is not None), default=None)


def _checked_at(rows: Sequence[Mapping[str, Any]]) -> str:
    """The sizes at which results were held against float64: smaller ones than those that were timed."""
    sizes = [(row.get("gate") or {}).get("sizes") or {} for row in rows]
    told = dict.fromkeys(f"{s['seq_len']} tokens × {s['batch']}, width {s['width']}" for s in sizes if s)
    return listed(told) if told else "no size"


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
                found = _meeting(list(of.ok.where(**{knob: one})), list(of.ok.where(**{knob: other})))
                meetings += [{"where": where, "mode": mode} | row for row in found]
        every = alone(stored) if measure == "average" else rows
        for mode in every.values("mode"):
            of = every.where(mode=mode)
            parts.append(lines(f"{measure}-{mode}", f"{where.capitalize()}, {mode}", of, "seq_len", TIME, "variant"))
        names = known(every, "mode", "variant", "seq_len", TIME, BUSY, "tokens_per_s", PEAK, "speedup")
        parts.append(table(measure, where.capitalize(), every, *names))
        waiting += host_paced(every.ok, where.capitalize())
    yield Text(_winner(stored))
    if not meetings:
        raise Unavailable("no two paths were measured at one length")
    modes: dict[tuple[str, str], list[str]] = {}
    for row in meetings:
        if SCAN not in (row["faster"], row["than"]):
            met = f"{row['faster']} is faster than {row['than']} {row['from']}"
            modes.setdefault((row["where"], met), []).append(row["mode"])
    told = (f"{where}, {listed(of)}, {met}" for (where, met), of in modes.items())
    yield Text(f"FFT and the sequential path: {'; '.join(told) or 'no length has both'}. {_sizes(stored)}")
    yield Text(" ".join([_state(stored), *waiting]))
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


def _sizes(stored: Stored) -> str:
    """What was measured, once."""
    model = next(iter(stored.rows("paths").needed()))
    dtypes = {record["dtype"] for measure in PLACES for record in stored.rows(measure)}
    told = listed(f"{dtype} (TF32 off)" if dtype == "fp32" else dtype for dtype in sorted(dtypes))
    return (
        f"The model has {model['layers']} layers of width {model['width']} with {model['num_states']} states a "
        f"channel and a batch of {model['batch']}; the average alone is one layer's, of the same sizes. All paths "
        f"are in {told}."
    )


def _state(stored: Stored) -> str:
    """Whether the average alone computes its last state, and whether it does so in the model."""
    modes: dict[str, dict[str, None]] = {}
    for record in place(stored, "average").where(path=FFT):
        how = "with it (not every length has fft without)" if record["variant"] == WITH_STATE else "without it"
        modes.setdefault(how, {})[record["mode"]] = None
    told = "; ".join(f"{how} in {listed(of)}" for how, of in modes.items())
    sentences = [
        "The model in training does not ask for the last state of the average. Alone, scan and sequential compute it "
        f"in any case; fft, which computes it apart, stands beside them {told}.",
        *_kernels_of_state(stored),
    ]
    return " ".join(sentences)


def _kernels_of_state(stored: Stored) -> Iterator[str]:
    """By the kernels of a forward: as many more of fft than of scan in a layer of the model as alone without it."""
    whole, rows = stored.rows("paths").ok, alone(stored).ok
    for record in sorted(rows.where(variant=FFT, mode="forward"), key=lambda record: -record["seq_len"]):
        at = {"mode": "forward", "seq_len": record["seq_len"]}
        found = [whole.where(ema=path, **at) for path in (FFT, SCAN)]
        found += [rows.where(variant=variant, **at) for variant in (FFT, WITH_STATE, SCAN)]
        if all(len(of) and next(iter(of))["num_kernels"] for of in found):
            model_fft, model_scan, fft, with_state, scan = (next(iter(of))["num_kernels"] for of in found)
            layers = next(iter(found[0]))["layers"]
            yield (
                f"The kernels show it: a forward of {record['seq_len']} tokens by fft has "
                f"{(model_fft - model_scan) / layers:.0f} more than by scan in each layer of the model, alone "
                f"{fft - scan} without the state and {with_state - scan} with it."
            )
            return


def _larger(stored: Stored) -> Iterator[Any]:
    """The average alone in other sizes than the model's."""
    of_model = {record["hash"] for record in alone(stored)}
    rows = [record for record in _varied(stored.rows("average")) if record["hash"] not in of_model]
    if not rows:
        return
    knobs = ("mode", "seq_len", *SIZE)
    speeds: dict[tuple[Any, ...], list[str]] = {}
    ok = Rows("average", rows).ok
    for record in ok.where(path=SCAN):
        for other in ok.where(path=FFT, **{name: record[name] for name in knobs}):
            size = tuple(record[name] for name in knobs[1:])
            speed = f"{against(record, other, other['variant'])} in {record['mode']}{paced(record)}"
            speeds.setdefault(size, []).append(speed)
    told = [
        f"Alone, {batch} sequences of {length} tokens, width {width}, {num_states} states: scan is {listed(speed)}."
        for (length, batch, width, num_states), speed in speeds.items()
    ]
    if told:
        yield Text(" ".join(told))
    names = known(rows, *knobs, "variant", TIME, BUSY, "tokens_per_s", PEAK, "speedup")
    yield table("average-larger", "Alone, in other sizes than in the model", rows, *names)


def _meeting(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which of two paths is the faster one in the end, and from which length on; [] where they share no length."""
    by_length = [{record["seq_len"]: record for record in rows} for rows in (one, other)]
    both = sorted(by_length[0].keys() & by_length[1].keys())
    if not both:
        return []
    last = both[-1]
    slow, fast = sorted(by_length, key=lambda rows: -rows[last][TIME])
    found = {"faster": fast[last]["variant"], "than": slow[last]["variant"], "from": _from(slow, fast, both)}
    return [found | {"longest": last, "times_faster": slow[last][TIME] / fast[last][TIME]}]


def _from(slow: Mapping[int, Record], fast: Mapping[int, Record], lengths: Sequence[int]) -> str:
    """From which length on the one is faster beyond noise; where before it is slower, about where they meet."""
    won = [fast[at][TIME] < slow[at][TIME] and told_apart(fast[at], slow[at]) for at in lengths]
    if not won[-1]:
        return "nowhere beyond noise"
    if all(won):
        return f"from {lengths[0]} tokens, the shortest, on"
    first = len(won) - won[::-1].index(False)
    before = lengths[first - 1]
    if fast[before][TIME] > slow[before][TIME]:
        at = crossing([slow[at] for at in lengths], [fast[at] for at in lengths], "seq_len", TIME)
        return f"from about {at:.0f} tokens on"
    return f"from {lengths[first]} tokens on"


def _part_of_model(stored: Stored) -> Iterator[Any]:
    """The average alone, as often as the model has it, beside the model; fft without its state where measured so."""
    rows = alone(stored).ok
    found: list[dict[str, Any]] = []
    for whole in stored.rows("paths").ok:
        same = {name: whole[name] for name in ("seq_len", "mode", *SIZE)}
        parts = sorted(rows.where(path=whole["ema"], **same), key=lambda record: record["variant"] == WITH_STATE)
        for part in parts[:1]:
            row = {
                "path": part["variant"],
                "seq_len": whole["seq_len"],
                "mode": whole["mode"],
                "alone_ns": part[TIME],
            }
            row |= {"num_layers": whole["layers"], "model_ns": whole[TIME]}
            found.append(row | {"alone_over_model": whole["layers"] * part[TIME] / whole[TIME]})
    if not found:
        raise Unavailable("no length was measured alone and in the model")
    ends = sorted(found, key=lambda row: row["alone_over_model"])
    low, high = (
        f"{row['alone_over_model']:.2f} times ({row['path']}, {row['seq_len']} tokens, {row['mode']})"
        for row in (ends[0], ends[-1])
    )
    num_more = sum(row["path"] == WITH_STATE for row in found)
    more = (
        f"{plural(num_more, 'row')} of fft {'is' if num_more == 1 else 'are'} with the state, which the model does "
        "not compute: more than its share. "
    )
    yield Text(
        f"Alone, as often as the model has it, the average takes from {low} to {high} as long as the whole model, "
        "measured in a process of its own. "
        f"{more if num_more else ''}The playbook's micro traces, meant to be of it alone, were of the whole."
    )
    yield table("part", "The moving average alone beside the model", found, *found[0])
