"""The answers of the study `megalodon` about precision, memory, decoding and points that fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Text
from stepscope.report.text import plural
from stepscope.studies.figures import beside, compared, growth, in_words, lines, said, table
from stepscope.studies.megalodon_paths import FFT, PATHS, PEAK, PLACES, SCAN, TIME
from stepscope.studies.megalodon_recordings import gemm_share
from stepscope.studies.stored import Stored

HOW = {"on": "from the state", "off": "all tokens"}
PUBLISHED_OFF_OVER_ON = {512: 1.25}
"""The playbook's gain of bf16 reduction, by length; at 2048 it has "negligible impact", without a figure."""
PUBLISHED_ON = "the playbook, which names no device"


def precision(stored: Stored) -> Iterator[Any]:
    """Dtypes beside one another, and what summing bf16 products in bf16 brings."""
    rows = stored.rows("steps").needed()
    ok = rows.ok.where(batch=rows.ok.needed().values("batch")[0])
    plain = ok.where(bf16_reduction="auto")
    sentences = []
    for dtype in [name for name in plain.values("dtype") if name != "fp32"]:
        pairs = [(r, o) for r in plain.where(dtype=dtype) for o in plain.where(dtype="fp32", seq_len=r["seq_len"])]
        for record, other in sorted(pairs, key=lambda pair: pair[0]["seq_len"])[-1:]:
            sentences.append(
                f"At {record['seq_len']} tokens a step in {dtype} takes {said(TIME, record[TIME])}, "
                f"{compared(record[TIME], other[TIME], 'fp32')}, with {said('share', record[PEAK] / other[PEAK])} of "
                f"its peak and a loss of {record['loss']:.3f} where fp32 has {other['loss']:.3f}."
            )
    ratios = []
    for length in ok.values("seq_len"):
        on, off = (list(ok.where(dtype="bf16", bf16_reduction=value, seq_len=length)) for value in ("on", "off"))
        if on and off:
            ratio = off[0][TIME] / on[0][TIME]
            ratios.append({"seq_len": length, "off_over_on": ratio})
            apart = on[0]["time_ci_high_ns"] < off[0]["time_ci_low_ns"] or (
                off[0]["time_ci_high_ns"] < on[0]["time_ci_low_ns"]
            )
            noise = "their intervals do not meet" if apart else "their intervals meet: that may be noise"
            sentences.append(
                f"At {length} tokens reduction in bf16 makes a step {ratio:.3f} times as fast as without ({noise})."
            )
    if not sentences:
        raise CannotCheck("no two dtypes were measured at one length")
    yield Text(" ".join(sentences))
    names = ("dtype", "bf16_reduction", "seq_len", "batch", TIME, "tokens_per_s", PEAK, "loss")
    yield table("steps", "A training step", rows, *names)
    yield lines("steps-time", "A training step", ok, "seq_len", TIME, ("dtype", "bf16_reduction"))
    if not ratios:
        reasons = {str(r["reason"]) for r in rows.where(dtype="bf16", bf16_reduction=("on", "off")) if r["reason"]}
        raise CannotCheck(f"reduction on against off: {'; '.join(sorted(reasons)) or 'no length has both'}")
    yield beside(ratios, PUBLISHED_OFF_OVER_ON, "seq_len", "off_over_on", PUBLISHED_ON)
    yield from gemm_share(stored)


def memory(stored: Stored) -> Iterator[Any]:
    """The power of the length that peaks grow with, and what FFT's padding adds."""
    sentences, found, parts = [], [], []
    steps = stored.rows("steps").ok.where(bf16_reduction="auto")
    groups = [("a step", dtype, steps.where(dtype=dtype)) for dtype in steps.values("dtype")]
    for measure, (knob, where) in PLACES.items():
        rows = stored.rows(measure)
        rows = rows.where(last_state=True) if knob == "path" else rows
        mode = rows.values("mode")[-1]
        of = rows.where(mode=mode)
        groups += [(f"{where}, {mode}", path, of.ok.where(**{knob: path})) for path in PATHS]
        fft, scan = (
            {record["seq_len"]: record[PEAK] for record in of.ok.where(**{knob: path})} for path in (FFT, SCAN)
        )
        for length in sorted(fft.keys() & scan.keys())[-1:]:
            ratio = fft[length] / scan[length]
            sentences.append(
                f"{where.capitalize()}, fft takes {ratio:.2f} times the peak of scan at {length} tokens."
            )
        parts.append(lines(f"memory-{measure}", f"Peak {where}, {mode}", of, "seq_len", PEAK, knob))
    for what, variant, rows in groups:
        if len(rows.values("seq_len")) > 1:
            first, last = sorted(rows, key=lambda record: record["seq_len"])[-2:]
            more = (last[PEAK] - first[PEAK]) / (last["num_tokens"] - first["num_tokens"])
            row = {"of": what, "variant": variant, "longest": last["seq_len"], "peak_bytes": last[PEAK]}
            found.append(row | {"power": growth(rows, "seq_len", PEAK), "token_bytes": more})
    if not found:
        raise CannotCheck("there are not two lengths of anything")
    first = found[0]
    yield Text(
        f"The peak of {first['of']} ({first['variant']}) grows {in_words(first['power'])} with the length, at the "
        f"end by {said('bytes', first['token_bytes'])} a token. {' '.join(sentences)}"
    )
    note = "power: of the length, through all lengths; token: what a token more takes between the two longest"
    yield table("growth", "Peaks over the length", found, *found[0], note=note)
    yield from parts


def cache(stored: Stored) -> Iterator[Any]:
    """One token from the state against all tokens again, and what keeping the state costs."""
    rows = stored.rows("decode").needed()
    sentences = []
    longest = max(rows.ok.needed().values("seq_len"))
    at = rows.ok.where(seq_len=longest)
    on, off = (sorted(at.where(cache=value), key=lambda record: record[TIME]) for value in ("on", "off"))
    if not on or not off:
        raise CannotCheck(f"at {longest} tokens there is no time with and without a cache")
    best, again = on[0], f"all tokens again ({off[0]['ema']})"
    sentences.append(
        f"After {longest} tokens the next one takes {said(TIME, best[TIME])} with the state ({best['ema']}), "
        f"{compared(best[TIME], off[0][TIME], again)}."
    )
    others = [f"{record['ema']} {said(TIME, record[TIME])}" for record in on[1:]]
    if others:
        sentences.append(f"For one token the other paths take longer: {', '.join(others)}.")
    for value, what in (("on", "With the state"), ("off", "Without")):
        of = rows.ok.where(cache=value, ema=(best if value == "on" else off[0])["ema"])
        if len(of.values("seq_len")) > 1:
            sentences.append(
                f"{what}, the time grows {in_words(growth(of, 'seq_len', TIME))} with the tokens before."
            )
    yield Text(" ".join(sentences))
    told = [record | {"how": HOW[record["cache"]]} for record in rows]
    told = [record | {"num_computed": record.get("fact_num_computed_tokens")} for record in told]
    yield table("decode", "The next token", told, "how", "ema", "seq_len", "num_computed", TIME, PEAK)
    yield lines("decode-time", "The next token", told, "seq_len", TIME, ("how", "ema"))
    alone = stored.rows("average").ok
    for without in alone.where(path=FFT, last_state=False):
        kept = alone.where(path=FFT, last_state=True, mode=without["mode"], seq_len=without["seq_len"])
        for record in kept:
            yield Text(
                f"To keep the state, fft computes it beside its outputs: at {record['seq_len']} tokens that makes "
                f"the average {record[TIME] / without[TIME]:.2f} times as long ({said(TIME, record[TIME])} and "
                f"{said(TIME, without[TIME])}, {record['mode']})."
            )


def out_of_memory(stored: Stored) -> Iterator[Any]:
    """How many rows came after one that did not fit."""
    rows = list(stored.rows("steps").needed())
    failed = [place for place, record in enumerate(rows) if record["status"] == "oom"]
    if not failed:
        raise CannotCheck(f"none of the {len(rows)} points of steps ran out of memory")
    first = rows[failed[0]]
    after = rows[failed[0] + 1 :]
    yield Text(
        f"{plural(len(failed), 'point')} of {len(rows)} ran out of memory ({first['seq_len']} tokens × "
        f"{first['batch']:,} sequences: {first['reason']}). {sum(r['status'] == 'ok' for r in after)} of the "
        f"{len(after)} points after it have a time, and summary.csv has all {len(rows)} rows. The playbook's "
        f"sweep would have lost these {len(after)} and the summary."
    )
    yield table("order", "In the order in which they ran", rows, "dtype", "seq_len", "batch", "status", TIME)
