"""The answers of the study `nano` about attention alone: speed, sparsity and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.document.model import Text
from stepscope.errors import Unavailable
from stepscope.formatting import plural, safe
from stepscope.studies.figures import Record, against, host_paced, known, lines, listed, said, table, told_apart
from stepscope.studies.lengths import grows
from stepscope.studies.stored import Rows, Stored

PATHS = ("dense", "sparse_mask", "sparse_flex")
DENSE, MASK, FLEX = PATHS
TIME, PEAK, BUSY = "time_median_ns", "peak_allocated_bytes", "gpu_busy_share"
NEEDED, EXECUTED = "fact_attention_formula_flops", "fact_attention_executed_flops"
PATTERN = {
    "sparsity_share": "fact_sparsity", "density_share": "fact_density", "causal_density_share": "fact_causal_density",
    "needed_flops": NEEDED, "executed_flops": EXECUTED,
}  # fmt: skip


def passes(rows: Rows) -> list[str]:
    """The modes of rows, in order."""
    return [mode for mode in ("inference", "forward+backward", "step") if len(rows.where(mode=mode))]


def _path(record: Record) -> str:
    """What a row's attention is, in a word or two."""
    return f"{record['attention']} scattered" if record["random"] == "scattered" else str(record["attention"])


def named(rows: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows with what their attention is as `path`."""
    return [{**record, "path": _path(record)} for record in rows]


def beside_dense(rows: Rows, name: str) -> list[tuple[Record, Record]]:
    """The rows of a sparse attention, each with that of dense attention of its sizes and mode."""
    ok, knobs = rows.ok.where(random="blocks"), ("preset", "part", "seq_len", "batch", "mode")
    return [
        (record, dense)
        for record in ok.where(attention=name)
        for dense in ok.where(attention=DENSE, **{knob: record[knob] for knob in knobs})
    ]


def speed(pairs: Iterable[tuple[Record, Record]]) -> str:
    """How fast the first of each pair is beside dense attention, by mode."""
    return listed(f"{against(record, dense, DENSE)} {in_mode(record['mode'])}" for record, dense in pairs)


def in_mode(mode: str) -> str:
    """A mode in a sentence."""
    return "in a step" if mode == "step" else f"in {mode}"


def faster(stored: Stored) -> Iterator[Any]:
    """Which of the paths is the fastest at which length."""
    rows = stored.rows("attention").needed()
    found = {name: pairs for name in (FLEX, MASK) if (pairs := beside_dense(rows, name))}
    if not found:
        raise Unavailable("no length was measured with dense and with sparse attention")
    places = "; ".join(f"{name} wins {_where(pairs)}" for name, pairs in found.items())
    speeds = []
    for name, pairs in found.items():
        longest = max(record["seq_len"] for record, _ in pairs)
        at_longest = [pair for pair in pairs if pair[0]["seq_len"] == longest]
        speeds.append(f"At {longest} tokens {name} is {speed(at_longest)}.")
    yield Text(f"Against dense attention, {places}. {speeds[0]}")
    yield Text(" ".join([*speeds[1:], *_sizes(rows), *host_paced(rows.ok), *_not_ranked(rows)]))
    for mode in passes(rows):
        yield lines(f"latency-{mode}", f"Attention, {mode}", named(rows.where(mode=mode)), "seq_len", TIME, "path")
    names = ("mode", "attention", "random", "seq_len", "batch", TIME, BUSY, PEAK, "speedup", "loss")
    yield table("attention", "Attention alone", rows, *known(rows, *names))


def _sizes(rows: Rows) -> Iterator[str]:
    """What was measured, once."""
    knobs = ("batch", "heads", "head_width", "dtype")
    for batch, heads, width, dtype in dict.fromkeys(tuple(record[name] for name in knobs) for record in rows):
        yield f"Measured: {plural(batch, 'sequence')}, {plural(heads, 'head')} of width {width}, in {dtype}."
    sparse = rows.where(attention=(MASK, FLEX))
    for pattern in dict.fromkeys(pattern_of(record) for record in sparse):
        yield f"The sparse pattern: {pattern} ({' or '.join(sparse.values('random'))})."


def pattern_of(record: Record) -> str:
    """The knobs of a row's sparse pattern."""
    return (
        f"{record['pattern']}, a window of {record['window']} tokens, {record['global_tokens']} global ones, "
        f"{record['random_keys']} at random"
    )


def _where(pairs: Sequence[tuple[Record, Record]]) -> str:
    """At which lengths the first of each pair is faster, beyond noise, by mode where that makes a difference."""
    modes: dict[str, list[str]] = {}
    for mode in dict.fromkeys(record["mode"] for record, _ in pairs):
        of = sorted((record["seq_len"], _wins(record, dense)) for record, dense in pairs if record["mode"] == mode)
        wins = [length for length, is_won in of if is_won]
        where = f"at {listed(wins)} tokens only" if wins else "nowhere"
        if wins and len(wins) == sum(length >= wins[0] for length, _ in of):
            where = f"from {wins[0]} tokens on"
        modes.setdefault(where, []).append(in_mode(mode))
    if len(modes) == 1:
        return next(iter(modes))
    return listed(f"{where} {listed(each)}" for where, each in modes.items())


def _wins(record: Record, dense: Record) -> bool:
    return bool(record[TIME] < dense[TIME]) and told_apart(record, dense)


def _not_ranked(rows: Rows) -> Iterator[str]:
    """Which rows have no part in it, and why."""
    for name in rows.values("attention"):
        left_out = [record for record in rows.where(attention=name) if record["status"] != OK]
        if left_out:
            statuses = ", ".join(dict.fromkeys(str(record["status"]) for record in left_out))
            yield (
                f"{plural(len(left_out), 'row')} of {name} not ranked: {statuses}, "
                f"{safe(str(left_out[0]['reason']), 200)}."
            )


def sparsity(stored: Stored) -> Iterator[Any]:
    """What the pattern leaves out, and what the hardware really skips."""
    rows = stored.rows("attention").ok.where(attention=(MASK, FLEX)).needed()
    longest = max(rows.values("seq_len"))
    sentences = []
    at = rows.where(seq_len=longest, mode=passes(rows)[0])
    for value in at.values("fact_sparsity"):
        same = list(at.where(fact_sparsity=value))
        left_out, density = said("share", value), said("share", same[0]["fact_density"])
        times = ", ".join(f"{record[EXECUTED] / record[NEEDED]:.2f} times by {_path(record)}" for record in same)
        sentences.append(
            f"At {longest} tokens the pattern has a sparsity of {left_out}: so much of all pairs is left out, those "
            f"that are not causal among them. Its density, which the note prints as its sparsity, is {density}. The "
            f"FLOPs that it needs are executed {times}."
        )
    yield Text(" ".join(sentences))
    work = [*_rates(stored), *_scattered(stored)]
    if work:
        yield Text(" ".join(work))
    unique = {(r["seq_len"], r["attention"], r["random"]): r for r in stored.rows("attention").ok}
    records = [{**r, **{name: r.get(fact) for name, fact in PATTERN.items()}} for r in unique.values()]
    yield table("sparsity", "Pattern and work", records, "seq_len", "attention", "random", *PATTERN)
    yield lines("executed", "FLOPs that run", named(records), "seq_len", "executed_flops", "path")


def _rates(stored: Stored) -> Iterator[str]:
    """What fewer FLOPs bring: those of a forward, so of inference."""
    pairs = [
        (record, dense)
        for record, dense in beside_dense(stored.rows("attention"), FLEX)
        if record["mode"] == "inference" and record[EXECUTED] < dense[EXECUTED]
    ]
    for record, dense in sorted(pairs, key=lambda pair: pair[0]["seq_len"])[-1:]:
        reached = [said("flops_per_s", each[EXECUTED] / each[TIME] * 1e9) for each in (record, dense)]
        yield (
            f"In inference at {record['seq_len']} tokens {FLEX} executes {dense[EXECUTED] / record[EXECUTED]:.2f} "
            f"times fewer FLOPs than {DENSE} and is {against(record, dense, 'it')}: it reaches {reached[0]}, {DENSE} "
            f"{reached[1]}."
        )


def _scattered(stored: Stored) -> Iterator[str]:
    """The same sparsity, in whole blocks and scattered."""
    ok, knobs = stored.rows("attention").ok, ("preset", "seq_len", "batch", "mode")
    for record in ok.where(attention=FLEX, random="scattered"):
        same = {name: record[name] for name in knobs}
        for blocks in ok.where(attention=FLEX, random="blocks", **same):
            for dense in ok.where(attention=DENSE, **same):
                yield (
                    f"Random keys one by one instead of in blocks, at {record['seq_len']} tokens: the sparsity is "
                    f"{said('share', record['fact_sparsity'])} ({said('share', blocks['fact_sparsity'])} in "
                    f"blocks), but {record[EXECUTED] / dense[EXECUTED]:.2f} times the FLOPs of {DENSE} are executed "
                    f"({blocks[EXECUTED] / dense[EXECUTED]:.2f} in blocks), and {record['mode']} takes "
                    f"{said(TIME, record[TIME])}, against {said(TIME, blocks[TIME])} in blocks and "
                    f"{said(TIME, dense[TIME])} by {DENSE}."
                )


def memory(stored: Stored) -> Iterator[Any]:
    """Linear or quadratic."""
    rows = stored.rows("attention").needed()
    blocks = rows.ok.where(random="blocks").needed()
    for mode in passes(blocks):
        peaks = {f"{name} attention {in_mode(mode)}": blocks.where(attention=name, mode=mode) for name in PATHS}
        yield Text(_grow(peaks))
    yield Text(
        f"A token is one of the whole batch of {blocks.values('batch')[0]}; a pair is one of length × length, "
        "counted once for the batch."
    )
    for mode in passes(rows):
        title = f"Peak of attention, {mode}"
        yield lines(f"memory-{mode}", title, named(rows.where(mode=mode)), "seq_len", PEAK, "path")
    whole = stored.rows("models").ok.where(attention=DENSE, mode="step").needed()
    grow = _grow({f"a step of {preset}": whole.where(preset=preset) for preset in whole.values("preset")})
    yield Text(f"{grow} The weights and the optimizer's state are there whatever the length.")


def _grow(peaks: Mapping[str, Rows]) -> str:
    found = {what: of for what, of in peaks.items() if len(of.values("seq_len")) > 1}
    if not found:
        raise Unavailable(f"there are not two lengths of {' or of '.join(peaks)}")
    return " ".join(f"The peak of {what} {grows(of, PEAK)}." for what, of in found.items())
