"""The stages of one point: build, gate, warm-up, clean samples, then each instrument in its own pass.

The row so far is written after each stage. If the process is killed, the row still says how far it got.
"""

import dataclasses
import gc
import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from stepscope.recorder.compiler.compile_watch import CompilerProbe
from stepscope.recorder.machine.environment import environment_facts
from stepscope.rows import Row
from stepscope.sweep import measure, memory, prepare
from stepscope.sweep.checks import gate, proofs
from stepscope.sweep.checks.proofs import CompiledGraphs
from stepscope.sweep.protocol import OK, UNPROVEN, WRONG, CannotRun, Report, Request, first_line
from stepscope.sweep.run_knobs import has_backward
from stepscope.workloads.registry import find
from stepscope.workloads.workload import Evidence, WholeStep, Workload

_Probes = tuple[CompilerProbe, CompiledGraphs]


def begin(request: Request, report: Report) -> Workload[Any]:
    """Limit the memory and set the switches of this process for a point, and return its workload."""
    run, device = request.run, request.run["device"]
    prepare.check_machine(run)
    if device == "cpu":
        if request.memory_limit_bytes is None:
            memory.limit_to_machine()
        else:
            memory.limit_process(request.memory_limit_bytes)
    elif request.memory_limit_bytes is not None:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, request.memory_limit_bytes / total))
    prepare.apply_settings(run)
    report.fields["environment"] = environment_facts(0 if device == "cuda" else None)
    return find(request.workload)


def run_stages(request: Request, report: Report) -> None:
    """Run one point in this process; its row is `report.fields`."""
    run, fields, workload = request.run, report.fields, begin(request, report)
    fields["reference"] = dict(workload.reference)
    fields["alternatives"] = dict(workload.alternatives)
    if workload.gate and not request.probe and not request.layers:
        fields["gate"] = request.known_gate or _gate(request, report, workload)
        if not fields["gate"]["passed"]:
            fields.update(status=WRONG, reason=fields["gate"]["worst"])
            return

    report.stage("build")
    built = prepare.build(workload, workload.config(**request.config), int(run["seed"]), str(run["device"]))
    if isinstance(built, WholeStep) and (run["mode"], run["compile"], run["dtype"]) != ("step", "off", "fp32"):
        raise CannotRun(
            "this workload is a complete training step: it runs only with mode=step, compile=off and dtype=fp32"
        )
    compiler, graphs = CompilerProbe(), CompiledGraphs()
    compiler.start()
    if run["compile"] != "off":
        graphs.start()
    try:
        run_once, phases = _sample(request, report, built)
        fields["status"] = OK
        if not request.probe:
            _instrument(request, report, built, run_once, phases, (compiler, graphs))
            report.stage("end")
    finally:
        graphs.stop()
        compiler.stop()


def _gate(request: Request, report: Report, workload: Workload[Any]) -> dict[str, Any]:
    report.stage("gate")
    verdict = gate.check(workload, request.config, request.run, has_backward(request.run))
    measure.clear_dynamo()
    gc.collect()
    if request.run["device"] == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return dataclasses.asdict(verdict)


def _sample(request: Request, report: Report, built: Any) -> tuple[Any, measure.Phases | None]:
    """Take the clean samples; return one pass as a callable, and the times of its phases if they are asked for."""
    run, fields, device = request.run, report.fields, str(request.run["device"])
    fields["num_tokens"] = built.num_tokens
    phases = None
    if isinstance(built, WholeStep):
        run_once: Any = built.step
    else:
        fields["num_parameters"] = sum(p.numel() for p in built.module.parameters())
        fields["num_active_parameters"] = built.num_active_parameters or fields["num_parameters"]
        if built.forward_flops is not None:
            fields["flops_formula"] = built.forward_flops * (3 if has_backward(run) else 1)
        run_once = prepare.Pass(built.module, prepare.cast_to_point(built, run), run)
        phases = measure.Phases(device) if built.phases_apart else None

    one_pass = run_once if phases is None else lambda: phases.run(run_once)
    compile_ns_before = measure.compile_ns()
    report.stage("first call")
    if request.layers and not isinstance(built, WholeStep):
        fields["layers"] = {}
        with measure.timed_layers(built.module, device) as fields["layers"]["first_call_ns"]:
            fields["first_call_ns"], loss = measure.timed_call(one_pass, device)
    else:
        fields["first_call_ns"], loss = measure.timed_call(one_pass, device)
    fields["loss"] = _number(loss, "loss", fields)
    report.stage("warm-up")
    fields["samples_warmup_ns"] = [measure.timed_call(one_pass, device)[0] for _ in range(int(run["warmup"]) - 1)]
    if run["compile"] != "off":
        fields["compile_ns"] = measure.compile_ns() - compile_ns_before

    report.stage("samples")
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    fields["samples_host_ns"], fields["samples_device_ns"], loss = measure.clean_samples(
        run_once, int(run["steps"]), device
    )
    fields["final_loss"] = _number(loss, "final loss", fields)
    fields["peak_resident_bytes"] = memory.peak_resident_bytes()
    if device == "cuda":
        fields["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        fields["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return run_once, phases


def _number(value: Any, what: str, fields: Row) -> float | None:
    number = float(value.item()) if hasattr(value, "item") else None
    if number is not None and not math.isfinite(number):
        fields["notes"].append(f"the {what} is {number}")
        return None
    return number


def _instrument(
    request: Request, report: Report, built: Any, run_once: Any, phases: measure.Phases | None, probes: _Probes
) -> None:
    """Run each instrument in its own pass. If one fails, that is a note: the samples are already taken."""
    run, fields, device, num_steps = request.run, report.fields, str(request.run["device"]), int(request.run["steps"])
    # The limit was for the step; the profiler's own memory does not count.
    if device == "cpu":
        memory.limit_to_machine()
    elif request.memory_limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)

    def instrument(stage: str, problem: str, ask: Callable[[], Mapping[str, Any]], into: Row = fields) -> None:
        report.stage(stage)
        try:
            into.update(ask())
        except Exception as error:
            fields["notes"].append(f"{problem}: {first_line(error)}")

    if device == "cuda" and not isinstance(built, WholeStep):
        problem = "memory before the backward pass could not be read"
        instrument("memory", problem, lambda: {"before_backward_bytes": measure.cuda_before_backward_bytes(run_once)})
    if "layers" in fields:
        report.stage("layers")
        fields["layers"]["warm_ns"] = measure.median_layers_ns(run_once, built.module, num_steps, device)
    _trace(request, report, built, run_once, probes)
    if isinstance(built, WholeStep):
        return
    if phases is not None:

        def timed_phases() -> Row:
            medians_ms = phases.medians_ms(run_once, num_steps)
            return {"samples_phase_ns": phases.samples_ns, "facts": {**fields.get("facts", {}), **medians_ms}}

        instrument("phases", "phases could not be timed", timed_phases)
    instrument("FLOPs", "FLOPs could not be counted", lambda: measure.counted_flops(run_once))
    if fields.get("flops_formula") and fields.get("flops_counted") is not None:
        fields["flops_coverage"] = fields["flops_counted"] / fields["flops_formula"]
    if request.compares_dtypes:
        from stepscope.sweep.checks import precision_probe

        fields["precision"] = {}
        questions = precision_probe.questions(find(request.workload), request.config, run, run_once)
        for problem, ask in questions.items():
            instrument("comparison of dtypes", problem, ask, fields["precision"])


def _trace(request: Request, report: Report, built: Any, run_once: Any, probes: _Probes) -> None:
    """Trace one pass: GPU busy time, or on a CPU the memory of tensors, and proof of what ran."""
    run, fields, device = request.run, report.fields, str(request.run["device"])
    is_whole = isinstance(built, WholeStep)
    compiler, graphs = probes
    claims = [*getattr(built, "proofs", ()), *proofs.run_proofs(run)]
    keep = Path(request.trace_path) if request.trace_path else None
    if not claims and keep is None and device != "cuda" and is_whole:
        return
    report.stage("trace")
    before = [] if is_whole else run_once.tensors()
    if not is_whole:
        run_once.drop_gradients()
    try:
        traced = measure.traced(run_once, device, before, keep)
    except Exception as error:
        if claims:
            fields.update(status=UNPROVEN, reason=f"the traced pass failed: {first_line(error)}")
        else:
            fields["notes"].append(f"the step could not be traced: {first_line(error)}")
        return
    facts = {} if is_whole else {name: float(value) for name, value in built.facts().items()}
    fields["facts"] = {name: value for name, value in facts.items() if math.isfinite(value)}
    fields["traced_ns"] = traced.traced_ns
    if device == "cuda":
        fields["num_kernels"] = sum(traced.kernels.values())
        fields["num_kernel_launches"] = traced.num_launches
        fields["gpu_busy_ns"] = traced.gpu_busy_ns
    elif not is_whole:
        fields["peak_allocated_bytes"] = traced.peak_bytes
        fields["before_backward_bytes"] = traced.before_backward_bytes
    if keep is not None:
        fields["trace"] = f"{keep.parent.name}/{keep.name}"
    counters = measure.dynamo_counters()
    if run["compile"] != "off":
        fields["compiler"] = proofs.compiler_facts(compiler, counters)
        fields["notes"] += proofs.compiler_notes(compiler, run)
    evidence = Evidence(
        device=device,
        ops=Counter(traced.ops) + graphs.ops,
        kernels=traced.kernels,
        facts={**facts, **counters, **fields.get("compiler", {})},
    )
    fields["proofs"] = {proof.claim: proof.shows(evidence) for proof in claims}
    missing = [claim for claim, text in fields["proofs"].items() if text is None]
    if missing:
        fields.update(status=UNPROVEN, reason=f"the trace does not show that this ran: {', '.join(missing)}")
