"""Runs one point in its own fresh process: build, gate, warm-up, clean samples, then the instrumented passes.

The row so far is written after each stage. If the process is killed, the row still says how far it got.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.sweep.checks import refused_backends
from stepscope.sweep.protocol import CRASHED, OK, OOM, SKIPPED, UNPROVEN, WRONG, Report, Request, Row
from stepscope.sweep.run_knobs import has_backward

# torch is imported inside functions: the process that only spawns points does not need it.
if TYPE_CHECKING:
    from stepscope.recorder.compiler.compile_watch import CompilerProbe


def run_point(request: Request) -> None:
    """Run one point in this process and write its result to `result_path`."""
    report = Report(Path(request.result_path))
    report.stage("start")
    with refused_backends.recorded_warnings() as messages:
        try:
            _run(request, report)
        except BaseException as error:
            _classify(error, report, request, messages)
    report.write()


def _run(request: Request, report: Report) -> None:
    if request.shapes is not None:
        from stepscope.sweep.checks.compile_check import check

        return check(request, report)
    from stepscope.recorder.compiler.compile_watch import CompilerProbe
    from stepscope.recorder.environment import environment_facts
    from stepscope.sweep import memory, prepare
    from stepscope.sweep.checks.compiled_graphs import CompiledGraphs
    from stepscope.workloads.registry import find
    from stepscope.workloads.workload import Built

    run, fields = request.run, report.fields
    device = str(run["device"])
    if device == "cpu":
        if request.memory_limit_bytes is None:
            memory.limit_to_machine()
        else:
            memory.limit_process(request.memory_limit_bytes)
    prepare.check_machine(run)
    if device == "cuda" and request.memory_limit_bytes is not None:
        _limit_cuda(request.memory_limit_bytes)
    prepare.apply_settings(run)
    fields["environment"] = environment_facts(0 if device == "cuda" else None)
    workload = find(request.workload)
    fields["reference"] = dict(workload.reference)
    fields["alternatives"] = dict(workload.alternatives)
    if workload.gate and not request.probe and not request.layers:
        _run_gate(request, report, workload)
        if not fields["gate"]["passed"]:
            fields.update(status=WRONG, reason=fields["gate"]["worst"])
            return

    report.stage("build")
    built = prepare.build(workload, workload.config(**request.config), int(run["seed"]), device)
    if not isinstance(built, Built) and (run["mode"] != "step" or run["compile"] != "off" or run["dtype"] != "fp32"):
        raise prepare.CannotRun(
            "this workload is a complete training step: it runs only with mode=step, compile=off and dtype=fp32"
        )
    compiler, graphs = CompilerProbe(), CompiledGraphs()
    compiler.start()
    if run["compile"] != "off":
        graphs.start()
    try:
        _measure(request, report, built, compiler, graphs.ops)
    finally:
        graphs.stop()
        compiler.stop()


def _run_gate(request: Request, report: Report, workload: Any) -> None:
    from stepscope.sweep.checks import gate
    from stepscope.sweep.measure import clear_dynamo

    if request.known_gate is not None:
        report.fields["gate"] = request.known_gate
        return
    report.stage("gate")
    verdict = gate.check(workload, request.config, request.run, has_backward(request.run))
    report.fields["gate"] = dataclasses.asdict(verdict)
    clear_dynamo()
    gc.collect()
    if request.run["device"] == "cuda":
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _measure(
    request: Request, report: Report, built: Any, compiler: CompilerProbe, graph_ops: Mapping[str, int]
) -> None:
    import torch

    from stepscope.sweep import measure, memory, prepare
    from stepscope.sweep.layers import median_layers_ns, timed_layers
    from stepscope.workloads.workload import WholeStep

    run, fields = request.run, report.fields
    device, num_steps, whole = str(run["device"]), int(run["steps"]), isinstance(built, WholeStep)
    fields["num_tokens"] = built.num_tokens
    if whole:
        run_once: Any = built.step
    else:
        fields["num_parameters"] = sum(p.numel() for p in built.module.parameters())
        fields["num_active_parameters"] = built.num_active_parameters or fields["num_parameters"]
        if built.forward_flops is not None:
            fields["flops_formula"] = built.forward_flops * (3 if has_backward(run) else 1)
        run_once = prepare.Pass(built.module, prepare.cast_to_point(built, run), run)

    phases = measure.Phases(device) if not whole and built.phases_apart else None
    one_pass = run_once if phases is None else lambda: phases.run(run_once)
    compile_ns_before = measure.compile_ns()
    report.stage("first call")
    if request.layers and not whole:
        fields["layers"] = {}
        with timed_layers(built.module, device) as fields["layers"]["first_call_ns"]:
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
    samples = measure.clean_samples(run_once, num_steps, device)
    fields["samples_host_ns"], fields["samples_device_ns"] = samples.host_ns, samples.device_ns
    fields["final_loss"] = _number(samples.result, "final loss", fields)
    fields["peak_resident_bytes"] = memory.peak_resident_bytes()
    if device == "cuda":
        fields["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        fields["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    fields["status"] = OK
    if request.probe:
        return

    # The limit was for the step; the profiler's own memory does not count.
    if device == "cpu":
        memory.limit_to_machine()
    elif request.memory_limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)

    def instrument(stage: str, problem: str, act: Callable[[], object]) -> None:
        """Run an instrumented pass. If it fails, that is a note: the samples are already taken."""
        report.stage(stage)
        try:
            act()
        except Exception as error:
            fields["notes"].append(f"{problem}: {_first_line(error)}")

    if device == "cuda" and not whole:
        instrument(
            "memory",
            "memory before the backward pass could not be read",
            lambda: fields.update(before_backward_bytes=measure.cuda_before_backward_bytes(run_once)),
        )
    if "layers" in fields:
        report.stage("layers")
        fields["layers"]["warm_ns"] = median_layers_ns(run_once, built.module, num_steps, device)
    _trace(request, report, built, run_once, compiler, graph_ops)
    if phases is not None:
        instrument("phases", "phases could not be timed", lambda: _time_phases(fields, phases, run_once, num_steps))
    if whole:
        report.stage("end")
        return
    instrument("FLOPs", "FLOPs could not be counted", lambda: fields.update(measure.counted_flops(run_once)))
    if fields.get("flops_formula") and fields.get("flops_counted") is not None:
        fields["flops_coverage"] = fields["flops_counted"] / fields["flops_formula"]
    if request.compares_dtypes:
        from stepscope.sweep.checks import precision_probe
        from stepscope.workloads.registry import find

        found = fields["precision"] = {}
        questions = precision_probe.questions(find(request.workload), request.config, run, run_once)
        for problem, ask in questions.items():
            instrument("comparison of dtypes", problem, partial(lambda ask: found.update(ask()), ask))
    report.stage("end")


def _time_phases(fields: Row, phases: Any, run_once: Any, num_steps: int) -> None:
    medians_ms = phases.medians_ms(run_once, num_steps)
    fields["samples_phase_ns"] = phases.samples_ns
    fields.setdefault("facts", {}).update(medians_ms)


def _trace(
    request: Request,
    report: Report,
    built: Any,
    run_once: Any,
    compiler: CompilerProbe,
    graph_ops: Mapping[str, int],
) -> None:
    from stepscope.sweep import measure
    from stepscope.sweep.checks import proofs
    from stepscope.workloads.workload import Evidence, WholeStep

    run, fields = request.run, report.fields
    device, whole = str(run["device"]), isinstance(built, WholeStep)
    claims = [*getattr(built, "proofs", ()), *proofs.run_proofs(run)]
    keep = Path(request.trace_path) if request.trace_path else None
    if not claims and keep is None and device != "cuda" and whole:
        return  # otherwise the trace also gives GPU busy time, or on a CPU the memory of tensors
    report.stage("trace")
    before = [] if whole else run_once.tensors()
    if not whole:
        run_once.drop_gradients()
    try:
        traced = measure.traced(run_once, device, before, keep)
    except Exception as error:
        if not claims:
            fields["notes"].append(f"the step could not be traced: {_first_line(error)}")
            return
        fields.update(status=UNPROVEN, reason=f"the traced pass failed: {_first_line(error)}")
        return
    facts = {} if whole else {name: float(value) for name, value in built.facts().items()}
    fields["facts"] = {name: value for name, value in facts.items() if math.isfinite(value)}
    fields["traced_ns"] = traced.traced_ns
    if device == "cuda":
        fields["num_kernels"] = sum(traced.kernels.values())
        fields["num_kernel_launches"] = traced.num_launches
        fields["gpu_busy_ns"] = traced.gpu_busy_ns
    elif not whole:
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
        ops=Counter(traced.ops) + Counter(graph_ops),
        kernels=traced.kernels,
        facts={**facts, **counters, **fields.get("compiler", {})},
    )
    fields["proofs"] = {proof.claim: proof.shows(evidence) for proof in claims}
    missing = [claim for claim, text in fields["proofs"].items() if text is None]
    if missing:
        fields.update(status=UNPROVEN, reason=f"the trace does not show that this ran: {', '.join(missing)}")


def _classify(error: BaseException, report: Report, request: Request, messages: list[str]) -> None:
    from stepscope.errors import StepscopeError
    from stepscope.sweep import memory
    from stepscope.sweep.prepare import CannotRun

    fields = report.fields
    traceback.print_exception(error)  # to the point's log
    shortage = memory.read_error(error)
    if isinstance(error, CannotRun | StepscopeError):
        fields.update(status=SKIPPED, reason=str(error))
    elif shortage is not None:
        fields.update(status=OOM, oom=dataclasses.asdict(shortage), reason=_first_line(error))
    elif (refusal := refused_backends.refusal(error, messages, request.run, request.config)) is not None:
        fields.update(status=SKIPPED, reason=refusal.reason, refused=refusal.torch_reasons)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        fields.update(status=CRASHED, exit_code=code, reason=f"the workload called sys.exit({error.code!r})")
    else:
        stage = fields.get("stage")
        fields.update(status=CRASHED, reason=f"{type(error).__name__} in stage {stage}: {_first_line(error)}")


def _limit_cuda(num_bytes: int) -> None:
    import torch

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


def _number(value: Any, what: str, fields: Row) -> float | None:
    if value is None or not hasattr(value, "item"):
        return None
    number = float(value.item())
    if not math.isfinite(number):
        fields["notes"].append(f"the {what} is {number}")
        return None
    return number


def _first_line(error: BaseException) -> str:
    """Return an error as one line. For Triton that is its first line (the place) and its last (the reason)."""
    text = str(error).split("\nSet TORCHDYNAMO_VERBOSE=1")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = f"{lines[0]} {lines[-1]}" if "CompilationError: at " in lines[0] and len(lines) > 1 else lines[0]
    return line[:500]
