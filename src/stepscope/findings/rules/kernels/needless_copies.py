"""Are tensors copied, cast back and forth, or made contiguous for no reason?"""

from __future__ import annotations

import polars as pl

from stepscope.findings.rule import Case, Evidence, Finding, one_finding

_COPYING = ["aten::contiguous", "aten::clone", "aten::copy_"]
_CASTING = ["aten::to", "aten::_to_copy", "aten::type_as", "aten::float", "aten::half", "aten::bfloat16"]


def check(case: Case) -> list[Finding]:
    root = pl.col("root_op").cast(pl.String)
    is_training = pl.col("phase").is_in(["forward", "backward"])
    # The program cannot remove a copy in compiled code.
    moved = case.work.filter(
        is_training, pl.col("class").is_in(["copy_cast", "memset_memcpy"]), ~pl.col("is_compiled")
    )
    is_inside = (pl.col("kind") == "kernel") | pl.col("name").cast(pl.String).str.contains("(?i)DtoD")
    moved = moved.filter(is_inside)
    copied = moved.filter(root.is_in(_COPYING))
    # Fusing a chain of elementwise ops removes the casts in it: `unfused_elementwise` reports those.
    in_chains = case.chains["events"].explode()
    casts = moved.filter(root.is_in(_CASTING), ~pl.col("event").is_in(in_chains.implode()))
    # A checkpoint recomputes a forward: its casts in the backward do not undo earlier ones.
    again = case.recomputed["events"].explode()
    needless = pl.concat(
        [copied, _round_trips(casts.with_columns(pl.col("event").is_in(again.implode()).alias("again")))]
    )
    saving_ns = case.saving_ns(case.without(needless["event"]))
    if not case.is_worth(saving_ns):
        return []
    has_backward = bool((needless["phase"] == "backward").any())
    keys = ("root_op", "op", "phase", "module", "shapes")
    table = case.grouped(needless.with_columns(pl.col(*keys).cast(pl.String)), "num_kernels", *keys)
    names = table.group_by("root_op").agg(pl.col("duration_ns").sum()).sort("duration_ns", descending=True)
    called = ", ".join(str(name).removeprefix("aten::") for name in names["root_op"].head(3))
    return one_finding(
        sentence=f"{case.number_text(needless, 'kernel per step only copies', 'kernels per step only copy')} "
        f"tensors, because the program calls {called}. This takes {case.cost_text(needless)}"
        f"{', including the backward,' if has_backward else ''} and computes nothing.",
        fix="remove .contiguous(), .clone() and dtype round trips (.float().to(…)) if the next op accepts the "
        "strides and dtype as they are: linear layers, matmul and SDPA do",
        saving_ns=saving_ns,
        upper_bound=True,
        derived="the step replayed without these copies and the host's time for them; a copy that the next op needs "
        "would reappear inside it",
        confidence="medium",
        falsified_by="remove the call; the finding is wrong if the copy reappears under another op (aten::reshape)",
        places=case.places(needless["event"]),
        evidence=(Evidence("copies by called op", table.head(8).to_dicts()),),
    )


def _round_trips(casts: pl.DataFrame) -> pl.DataFrame:
    """Return casts that are undone: as many of one shape to a dtype as from it, in one phase of a step."""
    pair = pl.col("dtypes").cast(pl.String).str.json_decode(pl.List(pl.String))
    casts = casts.filter(pl.col("dtypes").is_not_null()).with_columns(
        pair.list.get(0, null_on_oob=True).alias("to"), pair.list.get(1, null_on_oob=True).alias("from")
    )
    casts = casts.filter(pl.col("to") != pl.col("from")).with_columns(
        pl.min_horizontal("to", "from").alias("low"), pl.max_horizontal("to", "from").alias("high")
    )
    keys = ("step", "phase", "again", "shapes")
    num = pl.len().over(*keys, "to", "from")
    num_back = pl.len().over(*keys, "low", "high") - num
    place = pl.int_range(pl.len()).over(*keys, "to", "from")
    return casts.filter(place < pl.min_horizontal(num, num_back)).drop("to", "from", "low", "high", "again")
