"""The answers of the study `megalodon` about precision, memory, decoding and points that fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Text
from stepscope.report.text import plural
from stepscope.studies.figures import (
    Record,
    against,
    beside,
    growth,
    host_paced,
    in_words,
    known,
    lines,
    listed,
    meet,
    paced,
    said,
    table,
)
from stepscope.studies.lengths import grown, grows
from stepscope.studies.megalodon_paths import BUSY, FFT, PATHS, PEAK, PLACES, SCAN, SIZE, TIME, alone, place
from stepscope.studies.megalodon_recordings import gemm_share
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
    sentences = []
    for dtype in [name for name in plain.values("dtype") if name != "fp32"]:
        pairs = [(r, o) for r in plain.where(dtype=dtype) for o in plain.where(dtype="fp32", seq_len=r["seq_len"])]
        for record, other in sorted(pairs, key=lambda pair: pair[0]["seq_len"])[-1:]:
            sentences.append(
                f"At {record['seq_len']} tokens a step in {dtype} takes {said(TIME, record[TIME])} and is "
                f"{against(record, other, 'fp32')}, with {said('share', record[PEAK] / other[PEAK])} of its peak and "
                f"a loss of {record['loss']:.3f} where fp32 has {other['loss']:.3f}."
            )
    bf16 = ok.where(dtype="bf16")
    reduced = [
        (on, off) for on in bf16.where(bf16_reduction="on")
        for off in bf16.where(bf16_reduction="off", seq_len=on["seq_len"])
    ]  # fmt: skip
    sentences += [_reduction(reduced)] if reduced else []
    if not sentences:
        raise CannotCheck("no two dtypes were measured at one length")
    yield Text(" ".join([*sentences, *host_paced(ok)]))
    names = ("dtype", "bf16_reduction", "seq_len", "batch", TIME, BUSY, "tokens_per_s", PEAK, "loss")
    yield table("steps", "A training step", rows, *known(rows, *names))
    yield lines("steps-time", "A training step", ok, "seq_len", TIME, ("dtype", "bf16_reduction"))
    if not reduced:
        reasons = {str(r["reason"]) for r in rows.where(dtype="bf16", bf16_reduction=("on", "off")) if r["reason"]}
        raise CannotCheck(f"reduction on against off: {'; '.join(sorted(reasons)) or 'no length has both'}")
    ratios = [{"seq_len": on["seq_len"], "off_over_on": off[TIME] / on[TIME]} for on, off in reduced]
    yield beside(ratios, PUBLISHED_OFF_OVER_ON, "seq_len", "off_over_on", PUBLISHED_ON)
    yield from gemm_share(stored)


def _reduction(pairs: Sequence[tuple[Record, Record]]) -> str:
    """What reduction in bf16 changes over the lengths, and at which of them it is more than noise."""
    shares = [on[TIME] / off[TIME] for on, off in pairs]
    taken = " to ".join(dict.fromkeys(said("share", share) for share in (min(shares), max(shares))))
    beyond = [f"at {on['seq_len']} tokens ({against(on, off, 'without')})" for on, off in pairs if not meet(on, off)]
    lengths = listed(on["seq_len"] for on, _ in pairs)
    return (
        f"With reduction in bf16 a step at {lengths} tokens takes {taken} of its time without; beyond noise: "
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
        groups += [(f"{where}, {mode}", path, of.ok.where(**{knob: path})) for path in PATHS]
        sentences += _more_than_scan(where, of.ok, knob)
        parts.append(lines(f"memory-{measure}", f"Peak {where}, {mode}", of, "seq_len", PEAK, knob))
    groups = [group for group in groups if len(group[2].values("seq_len")) > 1]
    if not groups:
        raise CannotCheck("there are not two lengths of anything")
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
        ratio = fft[length] / scan[length]
        yield f"{where.capitalize()}, fft takes {ratio:.2f} times the peak of scan at {length} tokens."


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
        f"After {longest} tokens the next one takes {said(TIME, best[TIME])} with the state ({best['ema']}) and "
        f"is {against(best, off[0], again)}."
    )
    sentences += [
        f"With {record['ema']} it takes {said(TIME, record[TIME])}: {against(record, best, best['ema'])}."
        for record in on[1:]
    ]
    for value, what in (("on", "With the state"), ("off", "Without")):
        of = rows.ok.where(cache=value, ema=(best if value == "on" else off[0])["ema"])
        if len(of.values("seq_len")) > 1:
            sentences.append(
                f"{what}, the time grows {in_words(growth(of, 'seq_len', TIME))} with the tokens before."
            )
    yield Text(" ".join([*sentences, *host_paced(rows.ok)]))
    told = [record | {"how": HOW[record["cache"]]} for record in rows]
    told = [record | {"num_computed": record.get("fact_num_computed_tokens")} for record in told]
    names = known(told, "how", "ema", "seq_len", "num_computed", TIME, BUSY, PEAK)
    yield table("decode", "The next token", told, *names)
    yield lines("decode-time", "The next token", told, "seq_len", TIME, ("how", "ema"))
    for without in alone(stored, last_state=False).ok.where(path=FFT):
        same = {name: without[name] for name in ("path", "mode", "seq_len", *SIZE)}
        for record in alone(stored).ok.where(**same):
            yield Text(
                f"To keep the state, fft computes it beside its outputs: at {record['seq_len']} tokens, "
                f"{record['mode']}, that takes {said(TIME, record[TIME])}{paced(record)} and is "
                f"{against(record, without, 'without')}, {said(TIME, without[TIME])}{paced(without)}."
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
