"""Checks that compiled code computes the same as eager code, at several shapes.

Two modules are built with the weights of the largest shape; one is compiled. Both run a batch of each shape, and
outputs (or loss) and gradients are compared. Then every shape is called again and timed, which shows code that was
compiled for one shape only. Compiled code draws random numbers like eager code; otherwise dropout would differ.
"""

import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._inductor.config

from stepscope.recorder.compiler.compile_watch import CompilerProbe, place_of, useful_line
from stepscope.rows import Row
from stepscope.sweep import measure, memory, prepare
from stepscope.sweep.checks import gate
from stepscope.sweep.point_stages import begin
from stepscope.sweep.protocol import CRASHED, OK, WRONG, CannotRun, Report, Request
from stepscope.sweep.run_knobs import CUDA_GRAPH_MODES, has_backward
from stepscope.workloads.workload import Batch, Built, Value

FEWEST_SECONDS = 0.2  # each shape is timed for at least this long and at least `steps` times


def check(request: Request, report: Report) -> None:
    """Run the check in this process and write the result to the report."""
    run, shapes, device = request.run, request.shapes or [{}], str(request.run["device"])
    if run["compile"] == "off":
        raise CannotRun("compile=off leaves nothing to check")
    workload = begin(request, report)
    report.stage("build")
    sizes = [{**request.config, **shape} for shape in shapes]
    num_elements = [math.prod(int(size.get(name) or 1) for name in ("batch", "seq_len")) for size in sizes]
    largest = num_elements.index(max(num_elements))
    modules, batches = [], []
    for place, size in enumerate(sizes):
        built = prepare.build(workload, workload.config(**size), int(run["seed"]), device)
        if not isinstance(built, Built):
            raise CannotRun("a complete training step hides its model: return (module, batch function) instead")
        batches.append(prepare.make_batch(built, int(run["seed"]), device))
        if place == largest:
            again = prepare.build(workload, workload.config(**size), int(run["seed"]), device)
            again.module.load_state_dict(built.module.state_dict())
            modules = [built.module, again.module]
    for module in modules:
        module.to(prepare.weights_dtype(run))
        module.train(run["mode"] != "inference")
    batches = [prepare.cast(batch, prepare.weights_dtype(run), device) for batch in batches]
    fields, (eager, plain) = report.fields, modules
    compiled = prepare.compiled(plain, run)
    found: list[dict[str, Any]] = [{"shape": shape} for shape in shapes]
    fields["shapes"] = found
    torch._inductor.config.fallback_random = True  # draw random numbers like eager code
    probe = CompilerProbe()
    probe.start()
    compile_before = measure.compile_ns()
    try:
        for shape, batch in zip(found, batches):
            named = ", ".join(f"{name}={value}" for name, value in shape["shape"].items())
            report.stage(f"eager call{f' at {named}' if named else ''}")
            truth = _results(eager, eager, batch, run)
            report.stage(f"compiled call{f' at {named}' if named else ''}")
            began = time.perf_counter_ns()
            result = _results(compiled, plain, batch, run)
            measure.synchronize(device)
            shape["first_call_ns"] = time.perf_counter_ns() - began
            shape.update(_compared(result, truth, str(run["dtype"])))
        for shape, batch in zip(found, batches):
            report.stage("timing")
            shape["compiled_ns"] = _median_ns(compiled, plain, batch, run)
            shape["eager_ns"] = _median_ns(eager, eager, batch, run)
        wrong = [shape for shape in found if not shape["passed"]]
        fields.update(status=WRONG, reason=wrong[0]["worst"]) if wrong else fields.update(status=OK)
    except Exception as error:
        if isinstance(error, CannotRun) or memory.read_error(error) is not None:
            raise
        traceback.print_exception(error)  # to the check's log
        fields.update(_failure(error, str(fields["stage"])))
    finally:
        probe.stop()
        fields["compiler_report"] = {**probe.report(), "compiled_calls": []}
        fields["compile_ns"] = measure.compile_ns() - compile_before


def _failure(error: Exception, stage: str) -> Row:
    """Return how an error ended the check: its first useful line, and the user's line that caused it."""
    own = str(error).partition("from user code:")[2]
    place = place_of(own) or place_of("".join(traceback.format_tb(error.__traceback__)))
    where = f", at {place}" if place else ""
    reason = f"{type(error).__name__}: {useful_line(error)}{where}"
    compiles = not stage.startswith("compiled call")
    return {"status": CRASHED, "reason": f"in stage {stage}: {reason}" if compiles else reason, "compiles": compiles}


def _results(
    module: Callable[..., Any], plain: torch.nn.Module, batch: Batch, run: Mapping[str, Value]
) -> gate.Tensors:
    """Return outputs (or the loss) and gradients of one call."""
    out = _call(module, plain, batch, run)
    results = {"outputs": {f"output {i}": gate.in_float64(t) for i, t in enumerate(prepare.tensors_of(out))}}
    if has_backward(run):
        results["gradients"] = gate.gradients_of(plain, batch)
    return results


def _call(module: Callable[..., Any], plain: torch.nn.Module, batch: Batch, run: Mapping[str, Value]) -> Any:
    contexts = prepare.Contexts(run)
    torch.manual_seed(int(run["seed"]) + 3)
    if run["compile"] in CUDA_GRAPH_MODES:
        torch.compiler.cudagraph_mark_step_begin()
    for tensor in (*plain.parameters(), *batch.values()):
        tensor.grad = None
    if run["mode"] == "inference":
        with torch.inference_mode(), contexts():
            return module(**prepare.without_targets(batch))
    with contexts():
        out = module(**batch)
    if has_backward(run):
        prepare.differentiable(out)  # a loss without a gradient is a reason to skip, not a crash
        prepare.backward(out, contexts, int(run["seed"]))
    return out


def _compared(result: gate.Tensors, truth: gate.Tensors, dtype: str) -> dict[str, Any]:
    """Return how far compiled results are from eager ones, with the gate's tolerances."""
    deviations = gate.deviations(result, truth)
    tolerances = gate.tolerances_of(dtype, deviations)
    share, _, name, value = gate.furthest(deviations, tolerances)
    return {
        "passed": share <= 1,
        "worst": f"{name}: {value:.2g} of eager's norm",
        "deviations": gate.worst_by_kind(deviations),
        "tolerances": tolerances,
    }


def _median_ns(module: Callable[..., Any], plain: torch.nn.Module, batch: Batch, run: Mapping[str, Value]) -> int:
    device, began = str(run["device"]), time.monotonic()
    samples: list[int] = []
    for _ in range(int(run["warmup"])):
        _call(module, plain, batch, run)
    while len(samples) < int(run["steps"]) or time.monotonic() - began < FEWEST_SECONDS:
        samples.append(measure.timed_call(lambda: _call(module, plain, batch, run), device)[0])
    return int(statistics.median(samples))
