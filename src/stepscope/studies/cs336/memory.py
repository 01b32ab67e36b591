"""Questions of the cs336 study about memory: peaks, what is alive at them, and what autocast adds."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from stepscope.errors import Unavailable
from stepscope.studies.cs336.passes import model_of, plain
from stepscope.studies.cs336.points import AUTOCAST, BOTH, FP32
from stepscope.studies.figures import PEAK, listed, said
from stepscope.studies.recorded import memory_chart
from stepscope.studies.stored import Recorded, Rows, Stored
from stepscope.studies.study import Record, Records, TableOf, Tables, question, table_of

if TYPE_CHECKING:
    from stepscope.analysis.memory.account import Account

RESERVED = "peak_reserved_bytes"
ACTIVATION, CAST = "activation", "autocast_weight_cast"
LARGEST = ("op", "module", "each_bytes", "num_allocations", "shape", "dtype", "owner")


def recorded(stored: Stored, mode: str, dtype: str) -> Recorded:
    """Return the recording of the largest model in a mode and dtype."""
    found = [each for each in stored.recordings("recordings", mode=mode, dtype=dtype) if each.folder]
    if not found:
        raise Unavailable(f"there is no recording of {mode} in {dtype}")
    return max(found, key=lambda each: each.axes["d_model"])


def account_of(stored: Stored, dtype: str) -> "Account":
    """Return what is alive in a recorded step of the largest model."""
    return recorded(stored, "step", dtype).source.memory.account


@table_of("peaks", "Peak memory, fp32 and autocast", f"preset seq_len mode dtype {PEAK} {RESERVED}", num_shown=48)
def in_both(stored: Stored) -> Rows:
    rows = stored.rows(plain).where(mode=("inference", "forward", "step"))
    return rows.where(preset=tuple(rows.where(dtype=AUTOCAST).values("preset"))).needed()


@table_of("residual-stream", "One tensor of the residual stream, fp32")
def residual(stored: Stored) -> Records:
    step = recorded(stored, "step", FP32)
    shape = [step.axes[name] for name in ("batch", "seq_len", "d_model")]
    alike = [
        each for each in step.source.allocations["allocations"]
        if each.get("shape") == shape and each.get("dtype") == "float32" and each.get("owner") == ACTIVATION
    ]  # fmt: skip
    ok = stored.rows(in_both).ok
    of = ok.where(preset=ok.most("num_parameters")["preset"])
    batch, width = of[0]["batch"], of[0]["d_model"]
    return [
        {"seq_len": length, "formula": f"{batch} × {length} × {width} × 4",
         "residual_bytes": batch * length * width * 4,
         "num_kept_in_a_step": len(alike) if length == shape[1] else None}
        for length in sorted({*of.values("seq_len"), shape[1]})
    ]  # fmt: skip


@question(
    "How high is the peak of memory?",
    *(memory_chart(f"memory-{mode}-{dtype}", f"Memory of {mode}, {dtype}", partial(recorded, mode=mode, dtype=dtype))
      for mode, dtype in (("inference", FP32), ("step", FP32), ("step", AUTOCAST))), in_both, residual,
    claim="Reads reserved segments as the peak; its inference keeps the graph.",
)  # fmt: skip
def peaks(tables: Tables) -> str:
    ok = tables["peaks"].ok
    of = ok.where(preset=ok.most("num_parameters")["preset"])
    of = of.where(seq_len=max(of.where(dtype=AUTOCAST).values("seq_len")))
    told = listed(
        f"{said(PEAK, wide[PEAK])} for {wide['mode']} ({said(PEAK, abs(narrow[PEAK] - wide[PEAK]))} "
        f"{'more' if narrow[PEAK] > wide[PEAK] else 'less'} under autocast)"
        for narrow, wide in of.beside(("mode",), dtype=FP32)
    )
    over = [row[RESERVED] - row[PEAK] for row in tables["peaks"].ok if row.get(RESERVED)]
    reserved = f"; reserved memory is up to {said('bytes', max(over))} more" if over else ""
    return f"The peak of {of[0]['model']} is {told}{reserved}."


@table_of("live-at-peak", "Alive at the peak of a step")
def live_at_peak(stored: Stored) -> Records:
    parts = {dtype: {part.name: part.bytes for part in account_of(stored, dtype).live_at_peak.by_owner}
             for dtype in BOTH}  # fmt: skip
    owners = dict.fromkeys(name for found in parts.values() for name in found)
    return [
        {"owner": "unknown" if name is None else name.replace("_", " "),
         **{f"{dtype}_bytes": parts[dtype].get(name, 0) for dtype in parts}} for name in owners
    ]  # fmt: skip


def largest(dtype: str, forward: bool) -> Callable[[Stored], Records]:
    """Return a function that returns the ten largest allocations of a step or of its forward."""

    def rows(stored: Stored) -> Records:
        from stepscope.document.sections.memory import largest as largest_table

        account = account_of(stored, dtype)
        if forward:
            kept = tuple(each for each in account.largest if each.phase == "forward")
            account = replace(account, largest=kept)
        columns = largest_table(account, 10).columns
        more = ("called_at",) if forward else ("num_at_peak", "phase")
        names = [name for name in (*LARGEST, *more) if name in columns]
        return [dict(zip(names, values)) for values in zip(*(columns[name] for name in names))]

    return rows


def largest_by(*names: str) -> Callable[[Stored], Records]:
    """Return a function that returns the largest allocation of the forward in both precisions, by these names."""

    def rows(stored: Stored) -> Records:
        most: dict[tuple[str, ...], dict[str, int]] = {}
        for dtype in BOTH:
            for large in account_of(stored, dtype).largest:
                if large.module and large.phase == "forward":
                    of = most.setdefault(tuple(str(getattr(large, name)) for name in names), {})
                    of[dtype] = max(of.get(dtype, 0), large.bytes)
        return [
            {**dict(zip(names, key)), "fp32_bytes": of[FP32], "autocast_bytes": of[AUTOCAST],
             "ratio": of[AUTOCAST] / of[FP32]} for key, of in most.items() if len(of) == 2
        ]  # fmt: skip

    return rows


@question(
    "What is alive at the peak?",
    live_at_peak,
    *(TableOf(f"largest{'-forward' * forward}-{dtype}",
              f"The ten largest allocations of {'its forward' if forward else 'a step'}, {dtype}",
              largest(dtype, forward))
      for dtype in BOTH for forward in (False, True)),
    TableOf("largest-by-module", "The largest single allocation of each module, forward", largest_by("module"),
            num_shown=24),
    TableOf("largest-by-op", "The largest single allocation of each op of a module, forward",
            largest_by("module", "op"), num_shown=24),
)  # fmt: skip
def alive(tables: Tables) -> str:
    rows, most = tables["live-at-peak"], tables["largest-fp32"][0]
    whole = sum(row["fp32_bytes"] for row in rows)
    told = listed(f"{row['owner']} {said('share', row['fp32_bytes'] / whole)}"
                  for row in rows if row["fp32_bytes"] >= 0.01 * whole)  # fmt: skip
    return (
        f"{said('bytes', whole)} are alive in tensors at the peak of a step in fp32: {told}; the largest single "
        f"allocation has {said('bytes', most['each_bytes'])}."
    )


def _at_backward(point: Recorded) -> list[Record]:
    memory = point.source.allocations
    begins = next((stage["event"] for stage in memory.get("stages") or [] if stage["name"] == "backward"), None)
    if begins is None:
        raise Unavailable("the recorded step has no backward")
    return [
        each for each in memory["allocations"]
        if (each["born"] is None or each["born"] < begins) and (each["died"] is None or each["died"] >= begins)
    ]  # fmt: skip


@table_of(
    "weight-casts", "Copies of weights that autocast keeps",
    if_empty="the recorded step under autocast has no cast copy of a weight",
)  # fmt: skip
def weight_casts(stored: Stored) -> Records:
    casts = recorded(stored, "step", AUTOCAST).source.allocations["allocations"]
    shapes = Counter((each["bytes"], str(each.get("op"))) for each in casts if each.get("owner") == CAST)
    return [{"each_bytes": size, "op": op, "num_copies": num, "all_bytes": num * size}
            for (size, op), num in shapes.items()]  # fmt: skip


@table_of("kept-at-backward", "Alive when the backward begins")
def kept_at_backward(stored: Stored) -> Records:
    for dtype in BOTH:
        there = _at_backward(recorded(stored, "step", dtype))
        sums = {name: sum(each["bytes"] for each in there if each.get("owner") == owner)
                for name, owner in (("activation_bytes", ACTIVATION), ("cast_weight_bytes", CAST))}  # fmt: skip
        num = sum(each.get("owner") == CAST for each in there)
        yield {"dtype": dtype, **sums, "num_cast_weights": num}


@table_of(
    "einsum", "Peak of a forward with einsum and with functional.linear",
    f"model linear dtype {PEAK}",
    is_optional=True,
)  # fmt: skip
def without_einsum(stored: Stored) -> Records:
    rows = stored.rows("models").ok.where(mode="forward")
    presets = rows.where(linear="linear").values("preset")
    return [row | {"model": model_of(row)} for row in rows.where(preset=tuple(presets))]


@question(
    "Why does autocast not halve the memory?",
    weight_casts, kept_at_backward, without_einsum,
    claim="Attributes a new allocation of 50 MiB to einsum; it is a cast weight of the MLP.",
)  # fmt: skip
def autocast(tables: Tables) -> str:
    kept, casts = tables["kept-at-backward"], tables["weight-casts"]
    wide, narrow = kept.one(dtype=FP32), kept.one(dtype=AUTOCAST)
    text = (
        f"{said('bytes', sum(row['all_bytes'] for row in casts))} of cast weights ({narrow['num_cast_weights']:,.0f} "
        f"bf16 copies) are alive when the backward begins, beside {said('bytes', narrow['activation_bytes'])} of "
        f"activations instead of {said('bytes', wide['activation_bytes'])} in fp32"
    )
    for row, base in tables["einsum"].where(dtype=AUTOCAST).beside(("model",), linear="einsum"):
        text += (
            f"; functional.linear instead of einsum changes the forward's peak by {row[PEAK] / base[PEAK] - 1:+.1%}"
        )
    return f"{text}."
