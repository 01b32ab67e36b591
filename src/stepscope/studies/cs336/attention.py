"""Answers of the study `cs336` about attention alone, and about the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from stepscope.document.model import Table, Text
from stepscope.errors import Unavailable
from stepscope.formatting import heading, plural
from stepscope.studies.cs336 import note
from stepscope.studies.cs336.time import Record, model_of
from stepscope.studies.figures import busy_ns, compared, growth, host_paced, in_words, lines, paced, said, span, table
from stepscope.studies.lengths import grows
from stepscope.studies.stored import Rows, Stored

HELD, THEORY = "before_backward_bytes", "by_formula_bytes"
ITEM_BYTES = {"fp32": 4, "bf16": 2}
TENSOR, BYTES = "fact_tensor_", "_bytes"
NAMES = {"naive": "written out", "builtin": "with torch.softmax", "custom": "with a backward of its own",
         "compiled": "compiled", "efficient": "by the memory-efficient kernel", "flash": "by flash"}  # fmt: skip


def _with_phases(rows: Rows) -> list[dict[str, Any]]:
    """Forward and backward in nanoseconds; what did not run has none."""
    named = {f"{phase}_ns": f"fact_{phase}_ms" for phase in ("forward", "backward")}
    return [
        {
            **r,
            THEORY: r.get("fact_theory_bytes"),
            **{name: None if r.get(fact) is None else r[fact] * 1e6 for name, fact in named.items()},
        }
        for r in rows
    ]


def grid(stored: Stored) -> Iterator[Any]:
    """Forward, backward and memory of attention written out, by width and length."""
    rows = stored.rows("attention").where(implementation="naive").needed()
    records = _with_phases(rows)
    ok = [r for r in records if r["status"] == "ok"]
    if not ok:
        raise Unavailable("attention written out ran at no length")
    width = min(r["head_width"] for r in ok)
    of = [r for r in ok if r["head_width"] == width]
    longest = max(of, key=lambda r: r["seq_len"])
    timed = [r for r in of if not paced(r)]
    text = (
        f"At a width of {width} memory before the backward {grows(of, HELD)}. At {longest['seq_len']} tokens "
        f"{said(HELD, longest[HELD])} are held; the tensors by formula are {said(HELD, longest[THEORY])}, and over "
        f"the whole grid the two differ by {span('bytes', [abs(r[HELD] - r[THEORY]) for r in ok])}."
    )
    if len(timed) > 1:
        since = min(r["seq_len"] for r in timed)
        text += (
            f" From {since} tokens on the forward's time grows {in_words(growth(timed, 'seq_len', 'forward_ns'))}."
        )
    text += "".join(f" {each}" for each in host_paced(ok))
    failed = [r for r in records if r["status"] == "oom"]
    if failed:
        least = min(failed, key=lambda r: r["seq_len"])
        more = (least["seq_len"] / longest["seq_len"]) ** 2
        peak = longest["peak_allocated_bytes"]
        text += (
            f" {least['seq_len']} tokens at a width of {least['head_width']} are out of memory: {more:,.0f} times "
            f"the peak at {longest['seq_len']}, {said(HELD, peak)}, would be {said(HELD, more * peak)}."
        )
    yield Text(text)
    names = ("seq_len", "head_width", "forward_ns", "backward_ns", HELD, THEORY)
    yield table("attention-grid", "Attention written out, fp32, causal", records, *names, num_shown=48)
    for name, title in (("forward_ns", "Forward"), ("backward_ns", "Backward"), (HELD, "Memory before the backward")):
        chart = name.removesuffix("_ns").removesuffix(BYTES).replace("_", "-")
        named = [{**r, "width": f"width {r['head_width']}"} for r in ok]
        yield lines(f"attention-{chart}", f"{title} of attention by width", named, "seq_len", name, "width")
    yield _accounting(longest)


def _accounting(record: Record) -> Table:
    tensors = {
        name.removeprefix(TENSOR).removesuffix(BYTES): value
        for name, value in record.items()
        if name.startswith(TENSOR)
    }
    held = {name: value for name, value in tensors.items() if name != "gradients"}
    names = [*held, "by formula, in all", "measured"]
    values = [*held.values(), record[THEORY], record[HELD]]
    columns = {"tensor": [name.replace("_", " ") for name in names], "held_bytes": values,
               "share": [value / record[HELD] for value in values]}  # fmt: skip
    title = f"What is held when the backward begins, {record['seq_len']} tokens, width {record['head_width']}"
    return Table("attention-accounting", title, columns, 16)


def squares(stored: Stored) -> Iterator[Any]:
    """How many seq_len² tensors each implementation keeps."""
    rows = stored.rows("attention").ok.where(implementation=tuple(NAMES))
    others = [r for r in rows if r["implementation"] != "naive"]
    if not others:
        raise Unavailable("nothing ran beside attention written out")
    width, length = others[0]["head_width"], max(r["seq_len"] for r in others)
    records = []
    for name in NAMES:
        for r in rows.where(implementation=name, head_width=width, seq_len=length):
            item = ITEM_BYTES[r["dtype"]]
            operands = 5 * r["batch"] * r["heads"] * length * width * item
            square = r["batch"] * r["heads"] * length**2 * item
            num = (r[HELD] - operands) / square
            theirs = note.SQUARE_TENSORS.get(name)
            mask = (r.get("fact_tensor_mask_bytes") or 0) / square
            masked = f", {mask:.2f} of it the mask" if mask else ""
            records.append(
                {
                    **r,
                    THEORY: r.get("fact_theory_bytes"),
                    "squares": num,
                    "squares_in_the_note": theirs,
                    "mask": masked,
                }
            )
    yield Text(
        f"At {length} tokens, beside queries, keys, values, the output and its gradient: "
        + "; ".join(
            f"attention {NAMES[r['implementation']]} in {r['dtype']} holds {r['squares']:.2f} tensors of {length} × "
            f"{length} a head ({said(HELD, r[HELD])}{r['mask']}{_in_the_note(r)})"
            for r in records
        )
        + "."
    )
    names = ("implementation", "dtype", HELD, THEORY, "squares", "squares_in_the_note", "time_median_ns")
    yield table("squares", "Tensors of length × length that attention keeps", records, *names)
    yield lines("attention-held", "Memory before the backward by implementation",
                rows.where(head_width=width), "seq_len", HELD, "implementation")  # fmt: skip


def _in_the_note(record: Record) -> str:
    theirs = record["squares_in_the_note"]
    return "" if theirs is None or abs(theirs - record["squares"]) < 0.5 else f"; the note expected {theirs}"


def compiled(stored: Stored) -> Iterator[Any]:
    """Eager against compiled: attention alone, and models."""
    records = []
    attention = stored.rows("attention").ok
    for fused in attention.where(implementation="compiled"):
        same = attention.where(implementation="naive", **{k: fused[k] for k in ("seq_len", "head_width", "mode")})
        for eager in same.where(dtype=fused["dtype"]):
            label = f"attention {fused['seq_len']} × {fused['head_width']}"
            records.append(_pair(label, eager, fused, fused["first_call_ns"]))
    rows = Rows("compiled", [])
    with suppress(Unavailable):  # --quick leaves it out
        rows = stored.rows("compiled").ok
    for fused in rows.where(compile="default"):
        same = rows.where(compile="off", **{k: fused[k] for k in ("preset", "seq_len", "layers", "mode", "dtype")})
        for eager in same:
            label = f"{model_of(fused)} with {plural(fused['layers'], 'layer')}"
            records.append(_pair(label, eager, fused, fused["compile_ns"]))
    if not records:
        raise Unavailable("nothing was measured both eager and compiled")
    sentences = []
    for r in records:
        saved = r["eager_ns"] - r["compiled_ns"]
        after = (
            f"pays for {said('time_ns', r['compiling_ns'])} of compiling after "
            f"{r['compiling_ns'] / saved:,.0f} passes" if saved > 0
            else f"never pays for {said('time_ns', r['compiling_ns'])} of compiling"
        )  # fmt: skip
        sentences.append(
            f"{heading(r['mode'])} of {r['what']} compiled is {compared(r['compiled_ns'], r['eager_ns'], 'eager')}, "
            f"has {r['compiled_peak_bytes'] / r['eager_peak_bytes']:.2f} times its peak, and {after}{r['work']}."
        )
    yield Text(" ".join(sentences))
    names = ("what", "mode", "dtype", "eager_ns", "compiled_ns", "speedup", "compiling_ns", "eager_peak_bytes",
             "compiled_peak_bytes")  # fmt: skip
    text = "compiling: of attention its first call; what torch's cache on disk already has is not compiled again"
    yield table("compiled", "Eager against compiled", records, *names, note=text)
    if not len(rows):
        raise Unavailable("no model was compiled: --full does")


def _pair(what: str, eager: Record, fused: Record, compiling_ns: int) -> dict[str, Any]:
    work = ""
    if paced(eager) and fused.get("gpu_busy_share"):
        faster = busy_ns(eager) / busy_ns(fused)
        work = f"; the GPU's own work is done {faster:.2f} times as fast, the rest is eager's host"
    return {
        "work": work,
        "what": what, "mode": eager["mode"], "dtype": eager["dtype"], "eager_ns": eager["time_median_ns"],
        "compiled_ns": fused["time_median_ns"], "speedup": eager["time_median_ns"] / fused["time_median_ns"],
        "compiling_ns": compiling_ns, "eager_peak_bytes": eager["peak_allocated_bytes"],
        "compiled_peak_bytes": fused["peak_allocated_bytes"],
    }  # fmt: skip
