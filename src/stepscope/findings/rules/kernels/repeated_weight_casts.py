"""Are weights cast to a lower precision again for every micro-batch?"""

from __future__ import annotations

import polars as pl

from stepscope.analysis.precision.casts import repeated
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, plural
from stepscope.session.case import Case


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    again = repeated(case.casts)
    saving_ns = case.saving_ns(case.without(again["event"])) if again.height else 0.0
    if not case.is_worth(saving_ns):
        return []
    num_micro_batches = max(again["num_micro_batches"])
    num_weights = again.height / case.num_steps / (num_micro_batches - 1)
    total_ns = float(again["duration_ns"].sum()) / case.num_steps
    table = (
        again.group_by("root_op", "shape", "target")
        .agg((pl.len() / case.num_steps).alias("num_casts"), pl.col("duration_ns").sum() / case.num_steps)
        .sort("duration_ns", descending=True)
    )
    return [
        Finding(
            sentence=f"{plural(num_weights, 'weight')} are cast to {again['target'][0]} in each of "
            f"{num_micro_batches} micro-batches of a step: {plural(again.height / case.num_steps, 'cast')} of "
            f"what was cast before, {duration(total_ns, 3)} of the GPU in a step of {duration(case.step_ns, 3)}.",
            fix='with torch.autocast("cuda", torch.bfloat16): around the loop over the micro-batches, whose inner '
            "regions then keep what is cast; or weights in bfloat16 and their float32 copy in the optimizer",
            saving_ns=saving_ns,
            derived="the step replayed without the casts of every micro-batch but the first, and the host's time for "
            "them",
            falsified_by="as many casts with one autocast region around all micro-batches",
            places=case.places(again["event"]),
            evidence=(Evidence("casts of weights that were cast before", table.head(8).to_dicts()),),
        )
    ]
