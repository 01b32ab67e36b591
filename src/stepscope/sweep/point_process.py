"""What runs in the fresh process of one point: build, gate, warm-up, clean samples, then the instruments.

After each stage what is known so far is written down, so that the row of a point that is killed still says how far
it came.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stepscope.recorder.files import write_json
from stepscope.sweep.checks import refused_backends as refused

# Not imported here, so that the process that only spawns points need not have it: torch.

OK, OOM, WRONG, UNPROVEN, SKIPPED, CRASHED = "ok", "oom", "wrong", "unproven", "skipped", "crashed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """Everything a point's process is told; JSON with `dataclasses.asdict`."""

    workload: str
    preset: str | None
    config: dict[str, Any]
    """Every knob of the workload."""
    run: dict[str, Any]
    """Every run knob."""
    result_path: str
    log_path: str
    trace_path: str | None = None
    """Where to keep the Chrome trace; None: not kept."""
    memory_limit_bytes: int | None = None
    """Host memory, on a CPU; device memory, on a GPU; None: what there is."""
    known_gate: dict[str, Any] | None = None
    """The gate's verdict from another point of this sweep with the same variant."""
    probe: bool = False
    """Only find out whether it fits: no gate, no FLOPs, no trace."""
    timeout_s: float = 600.0
    compares_dtypes: bool = False
    """Whether it is also asked what `sweep/checks/precision_probe.py` asks."""
    layers: bool = False
    """Time each layer in the first call and once warm; no gate, which would warm the process up."""
    shapes: list[dict[str, Any]] | None = None
    """Knobs of the shapes at which compiled code is only held against eager code (`compile_check.py`)."""


class Report:
    """The row so far, on disk after each stage."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.fields: dict[str, Any] = {"notes": []}

    def stage(self, name: str) -> None:
        self.fields["stage"] = name
        self.write()

    def write(self) -> None:
        write_json(self._path, self.fields)


def run_point(request: Request) -> None:
    """Run one point in this process and leave its result at `result_path`."""
    report = Report(Path(request.result_path))
    report.stage("start")
    with refused.heard() as said:
        try:
            _run(request, report)
        except BaseException as error:
            _classify(error, report, request, said)
    report.write()


def _run(request: Request, report: Report) -> None:
    if request.shapes is not None:
        from stepscope.sweep.checks.compile_check import check

        return check(request, report)
    from stepscope.recorder.compiler.compile_watch import CompilerProbe
    from stepscope.recorder.environment import environment_facts
    from stepscope.sweep import memory, prepare
    from stepscope.sweep.checks import gate
    from stepscope.sweep.checks.compiled_graphs import CompiledGraphs
    from stepscope.sweep.measure import clear_dynamo
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
    with_gradients = run["mode"] in ("forward+backward", "step")

    if workload.gate and not request.probe and not request.layers:
        if request.known_gate is not None:
            fields["gate"] = request.known_gate
        else:
            report.stage("gate")
            verdict = gate.check(workload, request.config, run, with_gradients)
            fields["gate"] = dataclasses.asdict(verdict)
            clear_dynamo()
            gc.collect()
            if device == "cuda":
                _empty_cuda()
        if not fields["gate"]["passed"]:
            fields.update(status=WRONG, reason=fields["gate"]["worst"])
            return

    report.stage("build")
    built = prepare.build(workload, workload.config(**request.config), int(run["seed"]), device)
    whole = not isinstance(built, Built)
    if whole and (run["mode"] != "step" or run["compile"] != "off" or run["dtype"] != "fp32"):
        raise prepare.CannotRun("it is a whole step of your own: take mode=step, compile=off, dtype=fp32")
    compiler, graphs = CompilerProbe(), CompiledGraphs()
    compiler.start()
    if run["compile"] != "off":
        graphs.start()
    try:
        _measure(request, report, built, whole, compiler, graphs.ops)
    finally:
        graphs.stop()
        compiler.stop()


def _measure(
    request: Request, report: Report, built: Any, whole: bool, compiler: Any, graph_ops: Mapping[str, int]
) -> None:
    import torch

    from stepscope.sweep import measure, memory, prepare
    from stepscope.sweep.layers import median_layers_ns, timed_layers

    run, fields = request.run, report.fields
    device, mode = str(run["device"]), str(run["mode"])
    fields["num_tokens"] = built.num_tokens
    if whole:
        run_once: Any = built.step
    else:
        fields["num_parameters"] = sum(p.numel() for p in built.module.parameters())
        fields["num_active_parameters"] = built.num_active_parameters or fields["num_parameters"]
        if built.forward_flops is not None:
            fields["flops_formula"] = built.forward_flops * (3 if mode in ("forward+backward", "step") else 1)
        built.module.to(prepare.weights_dtype(run))
        batch = prepare.cast(prepare.make_batch(built, int(run["seed"]), device), prepare.weights_dtype(run))
        run_once = prepare.Pass(built.module, batch, run)

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
    samples = measure.clean_samples(run_once, int(run["steps"]), device)
    fields["samples_host_ns"], fields["samples_device_ns"] = samples.host_ns, samples.device_ns
    fields["final_loss"] = _number(samples.result, "final loss", fields)
    fields["peak_resident_bytes"] = memory.peak_resident_bytes()
    if device == "cuda":
        fields["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        fields["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    fields["status"] = OK
    if request.probe:
        return

    # The limit was for the step: a profiler's own memory is not a part of it.
    if device == "cpu":
        memory.limit_to_machine()
    elif request.memory_limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if device == "cuda" and not whole:
        report.stage("memory")
        _guarded(
            fields,
            "memory before the backward was not read",
            lambda: fields.update(before_backward_bytes=measure.cuda_before_backward_bytes(run_once)),
        )
    if "layers" in fields:
        report.stage("layers")
        fields["layers"]["warm_ns"] = median_layers_ns(run_once, built.module, int(run["steps"]), device)
    _trace(request, report, built, run_once, whole, compiler, graph_ops)
    if phases is not None:
        report.stage("phases")
        _guarded(fields, "phases were not timed", lambda: _time_phases(fields, phases, run_once, int(run["steps"])))
    if not whole:
        report.stage("FLOPs")
        _guarded(fields, "FLOPs were not counted", lambda: fields.update(measure.counted_flops(run_once)))
        if fields.get("flops_formula") and fields.get("flops_counted") is not None:
            fields["flops_coverage"] = fields["flops_counted"] / fields["flops_formula"]
    if request.compares_dtypes and not whole:
        _compare_dtypes(request, report, run_once)
    report.stage("end")


def _time_phases(fields: dict[str, Any], phases: Any, run_once: Any, num_steps: int) -> None:
    for _ in range(num_steps):
        phases.run(run_once)
    fields["samples_phase_ns"] = phases.samples_ns
    fields.setdefault("facts", {}).update(phases.medians_ms(num_steps))


def _compare_dtypes(request: Request, report: Report, run_once: Any) -> None:
    from stepscope.sweep.checks import precision_probe
    from stepscope.workloads.registry import find

    fields = report.fields
    found = fields["precision"] = {}
    for missing, ask in precision_probe.questions(
        find(request.workload), request.config, request.run, run_once
    ).items():
        report.stage("comparison of dtypes")
        _guarded(fields, missing, lambda ask=ask: found.update(ask()))


def _trace(
    request: Request,
    report: Report,
    built: Any,
    run_once: Any,
    whole: bool,
    compiler: Any,
    graph_ops: Mapping[str, int],
) -> None:
    from stepscope.sweep import measure
    from stepscope.sweep.checks import proofs
    from stepscope.workloads.workload import Evidence

    run, fields = request.run, report.fields
    device = str(run["device"])
    claims = [*getattr(built, "proofs", ()), *proofs.run_proofs(run)]
    keep = Path(request.trace_path) if request.trace_path else None
    if not claims and keep is None and device != "cuda" and whole:
        return  # of the rest it is also how busy the GPU is, and on a CPU the memory of tensors
    report.stage("trace")
    before = [] if whole else run_once.tensors()
    if not whole:
        run_once.drop_gradients()
    try:
        traced = measure.traced(run_once, device, before, keep)
    except Exception as error:
        if not claims:
            fields["notes"].append(f"not traced: {_first_line(error)}")
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
    shown = {proof.claim: proof.shows(evidence) for proof in claims}
    fields["proofs"] = shown
    missing = [claim for claim, text in shown.items() if text is None]
    if missing:
        fields.update(status=UNPROVEN, reason=f"nothing shows that it ran: {', '.join(missing)}")


def _guarded(fields: dict[str, Any], what: str, act: Any) -> None:
    """An instrument that fails after the samples were taken is a note, not the end of the row."""
    try:
        act()
    except Exception as error:
        fields["notes"].append(f"{what}: {_first_line(error)}")


def _classify(error: BaseException, report: Report, request: Request, said: list[str]) -> None:
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
    elif (refusal := refused.refusal(error, said, request.run, request.config)) is not None:
        fields.update(status=SKIPPED, reason=refusal.reason, refused=refusal.said)
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        fields.update(status=CRASHED, exit_code=code, reason=f"it called sys.exit({error.code!r})")
    else:
        stage = fields.get("stage")
        fields.update(status=CRASHED, reason=f"{type(error).__name__} in stage {stage}: {_first_line(error)}")


def _limit_cuda(num_bytes: int) -> None:
    import torch

    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))


def _empty_cuda() -> None:
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _number(value: Any, what: str, fields: dict[str, Any]) -> float | None:
    if value is None or not hasattr(value, "item"):
        return None
    number = float(value.item())
    if not math.isfinite(number):
        fields["notes"].append(f"the {what} is {number}")
        return None
    return number


def _first_line(error: BaseException) -> str:
    """What an error says in one line. Triton's first line is a place in code nobody wrote, its last one says why."""
    text = str(error).split("\nSet TORCHDYNAMO_VERBOSE=1")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    line = f"{lines[0]} {lines[-1]}" if "CompilationError: at " in lines[0] and len(lines) > 1 else lines[0]
    return line[:500]
