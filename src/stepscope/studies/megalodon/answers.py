"""The answers of the study `megalodon` about precision, memory, decoding and points that fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural
from stepscope.studies.figures import (
    HOST_SPREAD,
    Record,
    against,
    beside,
    busy_ns,
    host_paced,
    known,
    lines,
    listed,
    loss_said,
    paced,
    said,
    table,
    told_apart,
)
from stepscope.studies.lengths import grown, grows
from stepscope.studies.megalodon.paths import BUSY, FFT, PATHS, PEAK, PLACES, SCAN, TIME, WITH_STATE, alone, place
from stepscope.studies.megalodon.recordings import gemm_share
from stepscope.studies.stored import Rows, Stored

HOW = {"on": "from the state", "off": "all tokens"}
PUBLISHED_OFF_OVER_ON = {512: 1.25}
"""The playbook's gain of bf16 reduction, by length; at 2048 it has "negligible impact", without a figure."""
PUBLISHED_ON = "the playbook, which names no device"


def precision(stored: Stored) -> Iterator[Any]:
    """Dtypes beside one another, and what summing bf16 products in bf16 brings."""
    rows = stored.rows("steps").needed()
    ok = rows.ok.where(batch=rows.ok.needed().values("batch")[0])
    plain = ok.where(bf16_reduction="auto")
    sentences = list(_dtypes(plain))
    bf16 = ok.where(dtype="bf16")
    reduced = [
        (on, off) for on in bf16.where(bf16_reduction="on")
        for off in bf16.where(bf16_reduction="off", seq_len=on["seq_len"])
    ]  # fmt: skip
    sentences += [_reduction(reduced)] if reduced else []
    if not sentences:
        raise Unavailable("no two dtypes were measured at one length")
    yield Text(" ".join([*sentences, *host_paced(ok)]))
    names = ("dtype", "bf16_reduction", "seq_len", "batch", TIME, BUSY, "tokens_per_s", PEAK, "loss")
    yield table("steps", "A training step", rows, *known(rows, *names))
    yield lines("steps-time", "A training step", ok, "seq_len", TIME, ("dtype", "bf16_reduction"))
    if not reduced:
        reasons = {str(r["reason"]) for r in rows.where(dtype="bf16", bf16_reduction=("on", "off")) if r["reason"]}
        raise Unavailable(f"reduction on against off: {'; '.join(sorted(reasons)) or 'no length has both'}")
    ratios = [{"seq_len": on["seq_len"], "off_over_on": off[TIME] / on[TIME]} for on, off in reduced]
    yield beside(ratios, PUBLISHED_OFF_OVER_ON, "seq_len", "off_over_on", PUBLISHED_ON)
    yield from gemm_share(stored, PUBLISHED_OFF_OVER_ON)


def _dtypes(rows: Rows) -> Iterator[str]:
    """Each dtype beside fp32, at the longest length that both have."""
    lengths: dict[int, list[Record]] = {}
    for dtype in [name for name in rows.values("dtype") if name != "fp32"]:
        of = [r for r in rows.where(dtype=dtype) if len(rows.where(dtype="fp32", seq_len=r["seq_len"]))]
        for record in sorted(of, key=lambda record: record["seq_len"])[-1:]:
            lengths.setdefault(record["seq_len"], []).append(record)
    for length, records in lengths.items():
        plain = rows.one(dtype="fp32", seq_len=length)
        others = (
            f"in {record['dtype']} {said(TIME, record[TIME])}, {against(record, plain, 'that')}, with "
            f"{said('share', record[PEAK] / plain[PEAK])} of the peak and a loss of {loss_said(record)}"
            for record in records
        )
        yield (
            f"At {length} tokens a step in fp32 takes {said(TIME, plain[TIME])}, with a peak of "
            f"{said(PEAK, plain[PEAK])} and a loss of {loss_said(plain)}; {'; '.join(others)}."
        )


def _reduction(pairs: Sequence[tuple[Record, Record]]) -> str:
    """What reduction in bf16 changes over the lengths, and at which of them it is more than noise."""
    times = [on[TIME] / off[TIME] for on, off in pairs]
    taken = " to ".join(dict.fromkeys(f"{each:.2f}" for each in (min(times), max(times))))
    beyond = [
        f"at {on['seq_len']} tokens ({against(on, off, 'without')})" for on, off in pairs if told_apart(on, off)
    ]
    lengths = listed(on["seq_len"] for on, _ in pairs)
    return (
        f"With reduction in bf16 a step at {lengths} tokens takes {taken} times as long as without; beyond noise: "
        f"{listed(beyond) if beyond else 'at none of them'}."
    )


def memory(stored: Stored) -> Iterator[Any]:
    """What peaks are made of, by the length, and what FFT's padding adds."""
    sentences: list[str] = []
    found, parts = [], []
    steps = stored.rows("steps").ok.where(bf16_reduction="auto").needed()
    steps = steps.where(batch=steps.values("batch")[0])
    groups = [("a step", dtype, steps.where(dtype=dtype)) for dtype in steps.values("dtype")]
    for measure, (knob, where) in PLACES.items():
        rows = place(stored, measure)
        mode = rows.values("mode")[-1]
        of = rows.where(mode=mode)
        found_rows = [of.ok.where(**{knob: path}) for path in PATHS]
        groups += [(f"{where}, {mode}", each.values("variant")[0], each) for each in found_rows if len(each)]
        sentences += _more_than_scan(where, of.ok, knob)
        parts.append(lines(f"memory-{measure}", f"Peak {where}, {mode}", of, "seq_len", PEAK, "variant"))
    groups = [group for group in groups if len(group[2].values("seq_len")) > 1]
    if not groups:
        raise Unavailable("there are not two lengths of anything")
    for what, variant, rows in groups:
        row = {"of": what, "variant": variant, "num_lengths": len(rows), "longest": max(rows.values("seq_len"))}
        found.append(row | {"peak_bytes": max(record[PEAK] for record in rows)} | grown(rows, PEAK)._asdict())
    what, variant, rows = groups[0]
    fitted = [row for row in found if row["error_share"] is not None]
    linear = [row for row in fitted if not row["pair_bytes"]]
    yield Text(
        f"The peak of {what} ({variant}) {grows(rows, PEAK)}; a token is one of the whole batch of "
        f"{rows.values('batch')[0]}. {len(linear)} of {plural(len(fitted), 'peak')} over three lengths or more have "
        f"nothing for pairs. {' '.join(sentences)}"
    )
    note = (
        "constant + token · tokens of the batch + pair · length²; pairs: their share at the longest length; error: "
        "the largest. Two lengths cannot tell linear from quadratic: token is then what one more takes."
    )
    yield table("growth", "Peaks over the length", found, *found[0], note=note)
    yield from parts


def _more_than_scan(where: str, rows: Rows, knob: str) -> Iterator[str]:
    fft, scan = ({record["seq_len"]: record[PEAK] for record in rows.where(**{knob: path})} for path in (FFT, SCAN))
    for length in sorted(fft.keys() & scan.keys())[-1:]:
        name, ratio = rows.where(**{knob: FFT}).values("variant")[0], fft[length] / scan[length]
        yield f"{where.capitalize()}, {name} takes {ratio:.2f} times the peak of scan at {length} tokens."


def cache(stored: Stored) -> Iterator[Any]:
    """One token from the state against all tokens again, and what keeping the state costs."""
    rows = stored.rows("decode").needed()
    lengths = {length: rows.ok.where(seq_len=length) for length in rows.ok.needed().values("seq_len")}
    told = {length: _ways(at) for length, at in lengths.items()}
    both = {length: (ways["on"], ways["off"]) for length, ways in told.items() if len(ways) == 2}
    if not both:
        raise Unavailable("there is no length with a time with and without a cache")
    longest = max(both)
    (best, *_), (again, *_) = both[longest]
    times = {length: f"{_range(on)} with the state and {_range(off)} without" for length, (on, off) in both.items()}
    sentences = [
        f"After {longest} tokens the next one takes {times[longest]}, from all tokens again: the state "
        f"({best['ema']}) is {against(best, again, 'that')}.",
        *(f"After {length} tokens it takes {told}." for length, told in times.items() if length != longest),
        _pays({length: (on[0], off[0]) for length, (on, off) in both.items()}),
        *_same_work(rows.ok.where(cache="on")),
    ]
    yield Text(" ".join([*sentences, *host_paced(rows.ok)]))
    records = [record | {"how": HOW[record["cache"]]} for record in rows]
    records = [record | {"num_computed": record.get("fact_num_computed_tokens")} for record in records]
    names = known(records, "how", "ema", "seq_len", "num_computed", TIME, BUSY, "num_kernels", PEAK)
    yield table("decode", "The next token", records, *names)
    yield lines("decode-time", "The next token", records, "seq_len", TIME, ("how", "ema"))
    yield from _held(rows.ok.where(cache="on", ema=best["ema"]))
    yield from _kept(alone(stored).ok)


def _ways(rows: Rows) -> dict[str, Sequence[Record]]:
    """With and without a cache, as far as there are rows: the fastest path first."""
    found: dict[str, Sequence[Record]]
    found = {how: sorted(rows.where(cache=how), key=lambda record: record[TIME]) for how in HOW}
    return {how: records for how, records in found.items() if records}


def _range(records: Sequence[Record]) -> str:
    """Of records by their time: from the fastest to the slowest path."""
    return " to ".join(dict.fromkeys(f"{said(TIME, r[TIME])} ({r['ema']})" for r in (records[0], records[-1])))


def _same_work(rows: Rows) -> Iterator[str]:
    """How far the host's pace alone sets apart rows that compute the same: one token, whatever the length."""
    paths = [sorted(rows.where(ema=path), key=lambda record: record[TIME]) for path in rows.values("ema")]
    paths = [of for of in paths if len(of) > 1 and all(map(paced, of))]
    if not paths:
        return
    low, *_, high = max(paths, key=lambda of: of[-1][TIME] / of[0][TIME])
    work = listed(f"{said(TIME, busy_ns(first))} ({first['ema']})" for first, *_ in paths)
    yield (
        f"With the state one token is computed whatever the length: yet {low['ema']} takes {said(TIME, low[TIME])} "
        f"after {low['seq_len']} and {said(TIME, high[TIME])} after {high['seq_len']}, so that paths less than "
        f"{high[TIME] / low[TIME]:.2f} times apart are not to be told from each other. The GPU's work is {work}."
    )


def _pays(fastest: Mapping[int, tuple[Record, Record]]) -> str:
    """From which length the state is faster by more than two processes of one point may differ."""
    paid = [on[TIME] * HOST_SPREAD <= off[TIME] and told_apart(on, off) for on, off in fastest.values()]
    lengths = list(fastest)
    num_paid = next((num for num, pays in enumerate(reversed(paid)) if not pays), len(paid))
    if not num_paid:
        return f"At none of {listed(lengths)} tokens does that pay ({HOST_SPREAD:g} times or more)."
    little = lengths[:-num_paid]
    before = f"; at {listed(little)} it brings little or nothing" if little else ", the fewest that were measured"
    return f"It pays ({HOST_SPREAD:g} times or more) from {lengths[-num_paid]} tokens on{before}."


def _held(rows: Rows) -> Iterator[Any]:
    """Whether memory grows though the state does not."""
    ordered = sorted((record for record in rows if record[PEAK]), key=lambda record: record["seq_len"])
    if len(ordered) < 2:
        return
    short, long = ordered[0], ordered[-1]
    open_tokens = dict.fromkeys((record["seq_len"] - 1) % record["chunk"] for record in (short, long))
    yield Text(
        f"From the state ({long['ema']}) the peak is {said(PEAK, short[PEAK])} after {short['seq_len']} tokens and "
        f"{said(PEAK, long[PEAK])} after {long['seq_len']}; the state has keys and values of {listed(open_tokens)} "
        f"of them, those of the open chunk."
    )


def _kept(rows: Rows) -> Iterator[Any]:
    """What fft takes longer with the state, at the longest length of each mode."""
    told = []
    for mode in rows.values("mode"):
        without = {record["seq_len"]: record for record in rows.where(variant=FFT, mode=mode)}
        kept = {record["seq_len"]: record for record in rows.where(variant=WITH_STATE, mode=mode)}
        for length in sorted(kept.keys() & without.keys())[-1:]:
            record, other = kept[length], without[length]
            kernels = ""
            if record.get("num_kernels") and other.get("num_kernels"):
                kernels = f", with {record['num_kernels']:,} kernels instead of {other['num_kernels']:,}"
            told.append(
                f"{said(TIME, record[TIME])}{paced(record)} in {mode} at {length} tokens, "
                f"{against(record, other, 'without')}, {said(TIME, other[TIME])}{paced(other)}{kernels}"
            )
    if told:
        yield Text(f"To keep the state, fft computes it beside its outputs: alone that takes {'; '.join(told)}.")


def out_of_memory(stored: Stored) -> Iterator[Any]:
    """How many rows came after one that did not fit."""
    rows = list(stored.rows("steps").needed())
    failed = [place for place, record in enumerate(rows) if record["status"] == "oom"]
    if not failed:
        raise Unavailable(f"none of the {len(rows)} points of steps ran out of memory")
    first = rows[failed[0]]
    after = rows[failed[0] + 1 :]
    yield Text(
        f"{plural(len(failed), 'point')} of {len(rows)} ran out of memory ({first['seq_len']} tokens × "
        f"{first['batch']:,} sequences: {first['reason']}). {sum(r['status'] == 'ok' for r in after)} of the "
        f"{len(after)} points after it have a time, and summary.csv has all {len(rows)} rows. The playbook's "
        f"sweep would have lost these {len(after)} and the summary."
    )
    yield table("order", "In the order in which they ran", rows, "dtype", "seq_len", "batch", "status", TIME)
