"""What went wrong in the course of a run, as findings. Standard library only: `watch` and the card use it too."""

from collections.abc import Callable
from dataclasses import replace

from stepscope.analysis.run.drift import Slowdown, Together, slowdowns
from stepscope.analysis.run.interruptions import LEAST_SHARE, LONG_NS, STOPPED, interruption, stalls
from stepscope.analysis.run.losses import Spike, loss_anomaly
from stepscope.analysis.run.memory_creep import KINDS, Creep, creeps
from stepscope.analysis.run.memory_peaks import evaluation_peak
from stepscope.analysis.run.series import Run
from stepscope.findings.finding import Evidence, Finding
from stepscope.formatting import duration, percent, plural, significant, size, span, whole_percent

MOST_FINDINGS = 3  # of one rule
_MANY_OTHERS = 0.1  # of all cores
_MOST_ROWS = 8
UNSURE_SHARE = 0.05  # of the run's steps: if a change may have begun anywhere within more, the finding says so
_FIXES = {
    "data": "see what the dataset reads by then: DataLoader(..., num_workers=…), data on a local disk",
    "other": "look at what the loop does outside of the passes: growing lists, logs, files",
    "passes": "take a trace then and one earlier, and compare them: stepscope trigger RUN, stepscope compare",
}
_TRACK_TEXTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "sm_clock_mhz": ("the GPU's clock", lambda mhz: f"{mhz:,.0f} MHz"),
    "allocated_bytes": ("GPU memory", size),
    "resident_bytes": ("host memory", size),
    "num_collections": ("garbage collections per step", significant),
    "num_gpu_processes": ("other processes on the GPU", significant),
    "core_wait_share": ("the share of time waiting for a CPU core", percent),
    "num_compiles": ("compiles", significant),
    "work per step": ("work per step", significant),
}
_PARTS = {
    "data": "waiting for data",
    "other": "outside of forward, backward and optimizer",
    "passes": "in the passes",
}


def findings_over_time(run: Run) -> list[Finding]:
    """Return everything that is wrong with a run so far, by rule; a run that still grows can be asked again."""
    return [replace(finding, id=id) for id, find in RULES.items() for finding in find(run)]


def drift(run: Run) -> list[Finding]:
    return [_slower(run, each) for each in slowdowns(run) if not each.may_be_others][:MOST_FINDINGS]


def unsure_drift(run: Run) -> str:
    """Return why slower steps are no finding: other processes could be the reason. Empty if there are none."""
    unsure = next((each for each in slowdowns(run) if each.may_be_others), None)
    if unsure is None:
        return ""
    return (
        f"Steps take {whole_percent(unsure.share)} longer from {run.when(unsure.step)} on, but other processes used "
        "the CPU cores too and could be the reason. Run it on an idle machine."
    )


def _slower(run: Run, slow: Slowdown) -> Finding:
    before, after = duration(slow.before_ns, 3), duration(slow.after_ns, 3)
    parts = [each for each in slow.together if each.name in _PARTS]
    others = [each for each in slow.together if each.name in _TRACK_TEXTS]
    until = "" if slow.lasts else f" until {run.when(slow.end_step)}"
    since = run.when(slow.step)
    if slow.latest_step - slow.earliest_step > UNSURE_SHARE * run.num_steps:
        since += f", or some step from {slow.earliest_step:,} to {slow.latest_step:,},"
    if slow.kind == "drift":
        num = next((num for num in (100, 1_000, 10_000, 100_000) if slow.growth_per(num) >= 0.005), 1_000_000)
        rate = f"{percent(slow.growth_per(num))} per {num:,} steps, from {before} to {after}"
        what = f"Steps become slower from {since} on{until}: {rate}."
    else:
        longer = f"{after} instead of {before}, {whole_percent(slow.share)} longer"
        what = f"Steps take longer from {since} on{until}: {longer}."
    where = f" Most of it is {_PARTS[parts[0].name]}." if parts else ""
    also = " and ".join(map(_text, others))
    because = f" At the same time, {also}." if also else ""
    share, so_far = slow.lost_ns / max(1, run.end_ns), "" if run.has_ended else " so far"
    figures = [("step_time_ns", slow.before_ns, slow.after_ns)]
    figures += [(each.name, each.before, each.after) for each in slow.together]
    rows = [{"figure": name, "before": first, "after": second} for name, first, second in figures]
    within = {"earliest_step": slow.earliest_step, "latest_step": slow.latest_step}
    stretch = {"step": slow.step, **within, "end_step": slow.end_step, "kind": slow.kind, "lost_ns": slow.lost_ns}
    return Finding(
        sentence=f"{what}{where}{because} This cost {span(slow.lost_ns)}{so_far}, {percent(share)} of the run.",
        fix=_fix(parts, others),
        evidence=(Evidence("where", [stretch]), Evidence("what changed", rows)),
        saving_ns=slow.after_ns - slow.before_ns if slow.lasts else slow.lost_ns / max(1, run.num_steps),
        rows=("slow_steps",),
        upper_bound=True,
        derived="how much longer a step takes by now than before it"
        if slow.lasts
        else "the time of these steps above the level before, divided by all steps of the run",
        confidence="high" if slow.kind == "step" and others else "medium",
        falsified_by="run it again; the finding is wrong if steps slow down elsewhere, or not at all",
    )


def _text(each: Together) -> str:
    name, form = _TRACK_TEXTS[each.name]
    word = "fell" if each.after < each.before else "rose"
    return f"{name} {word} from {form(each.before)} to {form(each.after)}"


def _fix(parts: list[Together], others: list[Together]) -> str:
    names = [each.name for each in others]
    if "sm_clock_mhz" in names:
        return "nvidia-smi -q -d PERFORMANCE,TEMPERATURE  # see what throttles the clock: cooling or the power limit"
    if "num_gpu_processes" in names:
        return "nvidia-smi  # end the other process, or use a free GPU: CUDA_VISIBLE_DEVICES=N"
    if "core_wait_share" in names:
        return "other processes take the CPU: end them, or start fewer DataLoader workers"
    if "num_compiles" in names:
        return "torch.compile(model, dynamic=True), or pad batches to a few sizes  # it compiled again"
    if "num_collections" in names:
        return "gc.freeze() before the loop, and do not keep objects from step to step"
    return _FIXES[parts[0].name if parts else "passes"]


def memory_creep(run: Run) -> list[Finding]:
    return [_creeping(run, each) for each in creeps(run)]


def _creeping(run: Run, creep: Creep) -> Finding:
    begin_ns = run.blocks[0].start_ns if run.blocks else 0  # the time before the first step is not repeated
    step_ns = (run.end_ns - begin_ns) / max(1, run.num_steps)
    out, verb, last = "", "are", "now"
    if run.has_ended:
        verb, last = "would have been", f"at step {creep.last_step:,}, the last"
    if creep.steps_left is not None and creep.free_bytes is not None:
        left_ns = creep.steps_left * step_ns
        end = creep.last_step + round(creep.steps_left)
        at = run.clock_text(run.end_ns + round(left_ns), ", at {}")
        when = f"{span(left_ns)} later" if run.has_ended else f"in {span(left_ns)}{at}"
        out = f" At this rate, the remaining {size(creep.free_bytes)} {verb} used up at step {end:,}, {when}."
    what = KINDS[creep.name]
    row = {"memory": creep.name, "step": creep.step, "before_bytes": creep.before_bytes,
           "after_bytes": creep.after_bytes, "bytes_per_1000_steps": creep.per_1000_steps,
           "steps_left": creep.steps_left}  # fmt: skip
    return Finding(
        sentence=f"{what[0].upper()}{what[1:]} grows by {size(creep.per_1000_steps)} per 1,000 steps from "
        f"{run.when(creep.step)} on: {size(creep.before_bytes)} then, {size(creep.after_bytes)} {last}.{out}",
        fix="keep numbers, not tensors: losses.append(loss.item()); empty what the loop adds to in every step",
        evidence=(Evidence("growth", [row]),),
        saving_bytes=round(creep.after_bytes - creep.before_bytes),
        derived="the lowest level of each stretch of the run: what an evaluation takes for a while does not count",
        confidence="high" if creep.name == "allocated_bytes" else "medium",
        falsified_by="let it run longer; the finding is wrong if the memory stops growing",
    )


def checkpoint_cost(run: Run) -> list[Finding]:
    fix = "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)  # or save less often"
    return _interrupted(run, "checkpoint", "Saving checkpoints", fix)


def evaluation_cost(run: Run) -> list[Finding]:
    fix = "evaluate less often, on fewer batches, or with larger ones: nothing is kept for a backward"
    return _interrupted(run, "evaluation", "Evaluation", fix)


def evaluation_memory(run: Run) -> list[Finding]:
    peak = evaluation_peak(run)
    if peak is None:
        return []
    where = f" ({places[0]})" if (places := run.places.get("evaluation")) else ""
    more = peak.bytes - peak.before_bytes
    row = {"step": peak.step, "peak_bytes": peak.bytes, "peak_before_bytes": peak.before_bytes}
    return [
        Finding(
            sentence=f"An evaluation{where} before {run.when(peak.step)} needs {size(peak.bytes)} of GPU memory, "
            f"{size(more)} more than everything before it, training included.",
            fix="keep numbers, not outputs: correct += (logits.argmax(-1) == y).sum().item(); move outputs to the "
            "host with .cpu() as they come; torch.inference_mode(); a smaller batch",
            evidence=(Evidence("peak of GPU memory", [row]),),
            saving_bytes=round(more),
            derived="the peak after the evaluation, less the peak before it",
            upper_bound=True,
            falsified_by="leave the evaluation out; the finding is wrong if the run's peak is as high",
        )
    ]


def _interrupted(run: Run, kind: str, what: str, fix: str) -> list[Finding]:
    found = interruption(run, kind)
    if found is None or found.share < LEAST_SHARE:
        return []
    where = f" ({found.places[0]})" if found.places else ""
    often = f", every {significant(found.every)} steps" if found.every and found.every >= 2 and found.num > 2 else ""
    each_ns = found.total_ns / found.num
    longest = ""
    if found.longest_ns is not None and found.longest_step is not None and found.longest_ns > 2 * each_ns:
        longest = f" The longest took {span(found.longest_ns)}, at {run.when(found.longest_step)}."
    row = {"what": found.kind, "times": found.num, "total_ns": found.total_ns, "step": found.step,
           "last_step": found.last_step, "every_steps": found.every, "longest_ns": found.longest_ns}  # fmt: skip
    places = Evidence("places in the script", [{"place": place} for place in found.places[:3]])
    return [
        Finding(
            sentence=f"{what}{where} takes {span(found.total_ns)} of the run's {span(run.end_ns)}: "
            f"{plural(found.num, 'time')}{often}, {span(each_ns)} each, first at {run.when(found.step)}.{longest}",
            fix=fix,
            evidence=(Evidence("time between steps", [row]), places),
            saving_ns=found.total_ns / max(1, run.num_steps),
            rows=("between_steps",),
            upper_bound=True,
            derived="its wall-clock time in the run, divided by the steps; a typical step does not have it",
            confidence="high" if found.num > 1 else "medium",
            falsified_by="leave it out of a run and compare the throughput",
        )
    ]


def loss_anomaly_findings(run: Run) -> list[Finding]:
    found = loss_anomaly(run)
    if found is None:
        return []
    findings = []
    if found.step is not None and found.value is not None:
        name = "NaN" if found.value != found.value else "infinite"
        broken = f"{found.num_not_finite:,} of {found.num_losses:,}"
        seen = f"The loss is {name} at {run.when(found.step)}"
        if found.finite_step is not None and found.finite_step + 1 < found.step:
            seen = f"The loss is first seen to be {name} at {run.when(found.step)}. It was finite at step "
            seen += f"{found.finite_step:,}, so it broke at some step in between"
        row = {"step": found.step, "loss": str(found.value), "last_finite_step": found.finite_step}
        then = "Later losses are finite again." if found.recovers else "It has stayed so."
        findings.append(
            Finding(
                sentence=f"{seen}. {broken} sampled losses are not finite. {then}",
                fix="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), a lower learning rate, bf16 for fp16",
                evidence=(Evidence("losses", [row]),),
                derived="no time is saved; what is trained after it may be lost",
                falsified_by="log the loss of that step; the finding is wrong if it is finite",
            )
        )
    return findings + ([_spiked(run, found.spikes)] if found.spikes else [])


def _spiked(run: Run, spikes: tuple[Spike, ...]) -> Finding:
    lasting = [spike for spike in spikes if spike.lasts]
    worst = max(lasting or spikes, key=lambda spike: spike.loss / spike.usual if spike.usual > 0 else spike.loss)
    figures = f"{significant(worst.loss)} instead of {significant(worst.usual)}"
    what = f"The loss jumps at {run.when(worst.step)} to {figures}"
    what += " and stays there." if worst.lasts else " and comes back."
    more = f" It jumps {plural(len(spikes), 'time')}, first at {run.when(spikes[0].step)}." if len(spikes) > 1 else ""
    rows = [{"step": each.step, "loss": each.loss, "usual_loss": each.usual, "lasts": each.lasts} for each in spikes]
    return Finding(
        sentence=f"{what}{more}",
        fix="look at the batch of that step; clip gradients: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        evidence=(Evidence("jumps of the loss", rows[:_MOST_ROWS]),),
        derived="no time is saved; compared with the last losses sampled before it",
        confidence="high" if worst.lasts else "medium",
        falsified_by="log every loss; the finding is wrong if such losses are usual for single batches",
    )


def stall_findings(run: Run) -> list[Finding]:
    fix = "gc.collect(); gc.freeze(); gc.disable() before the loop, and gc.collect() every few hundred steps"
    findings = _interrupted(run, "garbage_collection", "Garbage collection", fix)
    found = stalls(run)
    total_ns = sum(stall.ns for stall in found)
    share = total_ns / max(1, run.end_ns)
    if not found or (share < LEAST_SHARE and max(stall.ns for stall in found) < LONG_NS):
        return findings
    longest = max(found, key=lambda stall: stall.ns)
    names = {"data": "waiting for data", "suspended": "while the machine slept",
             STOPPED: "while the process was stopped"}  # fmt: skip
    why = ", for no known reason"
    fix = "stepscope run --when 'step_time > 3x' SCRIPT  # takes a window when it happens"
    others = run.tracks["others_share"].at(longest.step) if "others_share" in run.tracks else None
    if longest.kind in names:
        why = f", {names[longest.kind]}"
    elif others is not None and others >= _MANY_OTHERS:
        why = f", while other processes, or other machines on the same host, had {whole_percent(others)} of the cores"
        fix = "run it on a machine of its own  # or with fewer jobs beside it"
    ordered = sorted(found, key=lambda stall: -stall.ns)[:_MOST_ROWS]
    rows = [{"step": each.step, "duration_ns": each.ns, "why": each.kind} for each in ordered]
    times = "once" if len(found) == 1 else plural(len(found), "time")
    return [
        *findings,
        Finding(
            sentence=f"Training stalls {times}: {span(total_ns)} of the run's {span(run.end_ns)}. The "
            f"longest takes {span(longest.ns)} at {run.when(longest.step)}{why}.",
            fix=fix,
            evidence=(Evidence("stalls", rows),),
            saving_ns=total_ns / max(1, run.num_steps),
            rows=("slow_steps",),
            upper_bound=True,
            derived="the time of these steps above a typical one, divided by all steps of the run",
            confidence="medium",
            falsified_by="run it again on a machine of its own; the finding is wrong if other steps stall",
        ),
    ]


RULES: dict[str, Callable[[Run], list[Finding]]] = {
    "drift": drift,
    "memory_creep": memory_creep,
    "checkpoint_cost": checkpoint_cost,
    "evaluation_cost": evaluation_cost,
    "evaluation_memory": evaluation_memory,
    "loss_anomaly": loss_anomaly_findings,
    "stalls": stall_findings,
}
