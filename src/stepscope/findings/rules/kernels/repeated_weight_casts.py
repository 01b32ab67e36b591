"""Are weights cast to lower precision again for every micro-batch?"""

from __future__ import annotations

from stepscope.analysis.precision.casts import repeated
from stepscope.findings.rule import Case, Evidence, Finding, one_finding, plural


def check(case: Case) -> list[Finding]:
    case.with_shapes()
    again = repeated(case.casts)
    saving_ns = case.saving_ns(case.without(again["event"]))
    if not case.is_worth(saving_ns):
        return []
    num_micro_batches = max(again["num_micro_batches"])
    num_weights = again.height / case.num_steps / (num_micro_batches - 1)
    table = case.grouped(again, "num_casts", "root_op", "shape", "target")
    return one_finding(
        sentence=f"{plural(num_weights, 'weight is', 'weights are')} cast to {again['target'][0]} in each of "
        f"{num_micro_batches} micro-batches per step. Repeating {case.number_text(again, 'cast')} takes "
        f"{case.cost_text(again)}.",
        fix='with torch.autocast("cuda", torch.bfloat16): around the loop over micro-batches, so that inner regions '
        "reuse the casts; or weights in bfloat16 with float32 copies in the optimizer",
        saving_ns=saving_ns,
        derived="the step replayed without the casts of every micro-batch except the first, and the host's time for "
        "them",
        falsified_by="put one autocast region around all micro-batches; the finding is wrong if there are as many "
        "casts",
        places=case.places(again["event"]),
        evidence=(Evidence("repeated casts of weights", table.head(8).to_dicts()),),
    )
