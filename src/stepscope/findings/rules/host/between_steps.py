"""Does the loop spend time between its training steps: evaluations, checkpoints, logging, starting workers?"""

from __future__ import annotations

from stepscope.findings.rule import Case, Evidence, Finding, Unavailable, duration, plural

_FIXES = {
    "data": "DataLoader(..., persistent_workers=True)  # keep the workers from one epoch to the next",
    "evaluation": "evaluate less often, on fewer batches, or with larger ones: nothing is kept for a backward",
    "rollout": "collect more at once: a larger batch of environments, or generation with a key-value cache",
    "checkpoint": "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)  # or save less often",
    "logging": "keep metrics on the device and log them every N steps",
    "garbage collection": "gc.disable() before the loop and gc.collect() every few hundred steps",
}


def check(case: Case) -> list[Finding]:
    loop = case.summary.loop
    if loop is None:
        raise Unavailable("The recording has no undisturbed steps: it ended during warm-up.")
    findings = []
    rows = {row.name: row for row in loop.rows}
    for name, ns in loop.between_ns.items():
        row = rows.get(name)
        if row is None or not row.num or not case.is_worth(ns):
            continue
        where = f" ({row.places[0]})" if row.places else ""
        what = "Starting the DataLoader" if name == "data" else name.capitalize()
        evidence = {"what": name, "times": row.num, "total_ns": row.ns, "per_step_ns": ns}
        findings.append(
            Finding(
                sentence=f"{what}{where} takes {duration(ns, 3)} per step on average: {plural(row.num, 'time')} in "
                f"{plural(loop.num_steps, 'step')}, {duration(row.ns / row.num, 3)} each.",
                fix=_FIXES[name],
                saving_ns=ns,
                upper_bound=True,
                derived="its wall-clock time in the loop, divided by the steps; a typical step does not have it",
                confidence="high" if row.num > 1 else "medium",
                falsified_by="leave it out of a run and compare the throughput",
                evidence=(
                    Evidence("time between steps", [evidence, *({"place": place} for place in row.places[:3])]),
                ),
            )
        )
    return findings
