"""The figures of a recording as facts: step time, throughput, FLOPs, memory, counters, compiler."""

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.analysis.time.phases import IDLE
from stepscope.analysis.time.summary import Summary
from stepscope.devices import nearest_names
from stepscope.document.model import Fact
from stepscope.document.verdict import named_between, rounded
from stepscope.formatting import count, milliseconds, percent, plural, shortened, significant, size, whole_percent
from stepscope.formatting import flops as as_flops
from stepscope.trace.compile_file import count_of, entries
from stepscope.trace.recording import Recording

MAX_NAMES = 4
NOISY_SPREAD = 0.20
"""If p10 to p90 spans more of the median than this, the median alone does not describe the steps."""
WORTH_ADDING = 0.001
"""A smaller share of the average step is below the digits of the sum."""
_REASON_WIDTH = 110
_LEAST_IDLE_SHARE = 0.05
_MATMUL = {"highest": "float32 matrix products run in float32", "high": "float32 matrix products may use TF32",
           "medium": "float32 matrix products may use TF32 or bf16"}  # fmt: skip


def figures(recording: Recording, summary: Summary) -> Iterator[Fact]:
    yield from step_facts(summary)
    yield from _flops(recording, summary)
    yield from _utilization(recording, summary)
    yield from _parameters(summary)
    yield from _memory(recording)
    yield from _counters(recording, summary)
    yield from _idle(summary)
    yield from _compiler(recording)
    environment, settings = recording.facts.get("environment") or {}, recording.facts.get("precision")
    on_gpu = environment.get("device") == "cuda"
    if isinstance(settings, dict) and (on_gpu or settings.get("float32_matmul_precision") != "highest"):
        yield Fact("precision", *precision_words(settings, on_gpu))


def step_facts(summary: Summary) -> Iterator[Fact]:
    """Yield how long a clean step takes, how sure that is, and the throughput."""
    step = summary.step_ns
    if step is None:
        return
    noise = step.ci_high - step.ci_low
    median, p10, p90, low, high = (
        milliseconds(ns, noise) for ns in (step.median, step.p10, step.p90, step.ci_low, step.ci_high)
    )
    clock = "CUDA events" if summary.clock == "device" else "host clock"
    how = f"median of {plural(step.num_samples, 'clean step')}, 95 % CI {low} to {high}, {clock}"
    yield Fact("typical step", f"{median}, p10 {p10}, p90 {p90}", how)
    if step.p90 - step.p10 > NOISY_SPREAD * step.median:
        spread = whole_percent((step.p90 - step.p10) / step.median)
        yield Fact("noise", f"p10 to p90 spans {spread} of the median", "look at samples.jsonl, or add --clean steps")
    if summary.num_compiling:
        compiled = plural(summary.num_compiling, "clean step compiled and is", "clean steps compiled and are")
        yield Fact("compiling", f"{compiled} excluded")
    if (throughput := summary.throughput) is None:
        yield Fact("throughput", "unknown", "no model input was found: pass --tokens-per-step N")
    else:
        micro = f" in {summary.num_micro_batches} micro-batches" if summary.num_micro_batches > 1 else ""
        per_step = f"{throughput.per_step:,.0f} {throughput.unit} per step{micro}"
        yield Fact("throughput", f"{significant(throughput.per_s)} {throughput.unit}/s", per_step)
    yield from _loop(summary)


def _loop(summary: Summary) -> Iterator[Fact]:
    """Yield how long a step takes on average, with what lies between steps."""
    if (loop := summary.loop) is None:
        return
    steps = f"mean of {plural(loop.num_measured, 'undisturbed step')}"
    worth = [(name, ns) for name, ns in loop.between_ns.items() if ns >= WORTH_ADDING * loop.step_ns]
    parts = "".join(f" + {named_between(name)} {rounded(ns)}" for name, ns in worth)
    alone = rounded(loop.step_ns - sum(loop.between_ns.values()))
    text = f"{rounded(loop.step_ns)} of wall-clock time" + (f" = {alone}{parts}" if parts else "")
    yield Fact("average step", text, f"{steps}; {loop.caveat}" if loop.caveat else steps)
    share = "the share of training in the loop's wall-clock time; Stepscope's own work is left out"
    yield Fact("goodput", percent(loop.goodput), share)


def _flops(recording: Recording, summary: Summary) -> Iterator[Fact]:
    flops, step = summary.flops, summary.step_ns
    if flops is None:
        if step is not None:
            why = "see the note" if recording.window("memory") else "the run ended before the memory and FLOPs window"
            if (recording.facts.get("config") or {}).get("memory") is False:
                why = "the memory and FLOPs window was left out (--no-memory)"
            yield Fact("FLOPs", "not counted", why)
        return
    if not flops.hardware_flops:
        yield Fact("FLOPs", "none counted", flops.hidden or "no op of the step has a FLOP formula")
        return
    rate = f", {as_flops(flops.model_flops / step.median * 1e9, '/s')}" if step is not None else ""
    check = "counted op by op"
    if flops.formula_flops and summary.throughput is not None and summary.throughput.unit == "tokens":
        # Convolutions use a weight many times per sample: the rule only holds for tokens.
        ratio = flops.model_flops / flops.formula_flops
        check += f"; {ratio:.3f} × ({'6' if flops.has_backward else '2'}·N·tokens + attention)"
    yield Fact("FLOPs", f"{as_flops(flops.model_flops)} per step{rate}", check)
    if flops.recomputed_flops:
        yield Fact("recomputed", f"{as_flops(flops.recomputed_flops)} per step", "in backward, on top of the FLOPs")
    if flops.hidden:
        yield Fact("FLOPs", "a lower bound", flops.hidden)
    if flops.uncounted_ops:
        names, more = ", ".join(flops.uncounted_ops[:MAX_NAMES]), len(flops.uncounted_ops) - MAX_NAMES
        names += f" and {more} more (--json lists them)" if more > 0 else ""
        yield Fact("not counted", f"{plural(len(flops.uncounted_ops), 'op')} without a FLOP formula", names)


def _utilization(recording: Recording, summary: Summary) -> Iterator[Fact]:
    if summary.flops is None or not summary.flops.model_flops or summary.step_ns is None:
        return
    if summary.mfu is not None and summary.hfu is not None:
        yield Fact("MFU", percent(summary.mfu.share), f"{summary.mfu.formula}: {summary.mfu.limit}")
        yield Fact("HFU", percent(summary.hfu.share), f"{summary.hfu.formula}, recomputation included")
        return
    name = str((recording.facts.get("environment") or {}).get("device_name"))
    near = nearest_names(name, 1)
    hint = f" (nearest name: {near[0]})" if near else ""
    peak = f"no {'/'.join(summary.flops.model_flops_by_dtype)} peak known for {name!r}{hint}"
    yield Fact("MFU", "unknown", f"{peak}: run stepscope doctor --measure on that machine")


def _parameters(summary: Summary) -> Iterator[Fact]:
    parameters = summary.parameters
    if not parameters or not parameters["num_total"]:
        return
    active = summary.flops.num_active_parameters if summary.flops is not None else None
    text = f"{count(parameters['num_total'])}, {count(parameters['num_trainable'])} trainable"
    text += f", {count(active)} active" if active is not None else ""
    sizes = (f"{size(num)} {dtype}" for dtype, num in parameters["bytes_by_dtype"].items())
    yield Fact("parameters", text, ", ".join(sizes))


def _memory(recording: Recording) -> Iterator[Fact]:
    memory: dict[str, Any] = recording.facts.get("memory") or {}
    until = "until the end of the clean window"
    if "peak_allocated_bytes" in memory:
        names = ("peak_allocated", "peak_reserved", "driver_used", "driver_total")
        allocated, reserved, used, total = (size(memory[f"{name}_bytes"]) for name in names)
        text = f"peak {allocated} allocated, {reserved} reserved; {used} of {total} in use on the device"
        yield Fact("memory", text, f"{until}; {memory['num_allocator_retries']} allocator retries")
    elif "peak_resident_bytes" in memory:
        yield Fact("memory", f"peak {size(memory['peak_resident_bytes'])} resident", f"host memory, {until}")


def _counters(recording: Recording, summary: Summary) -> Iterator[Fact]:
    counters = summary.counters
    if counters is None:
        return
    busy = {"busy": counters.gpu_busy_share, "memory controller": counters.memory_controller_busy_share}
    texts = [f"{name} {percent(one.mean)} (p95 {percent(one.p95)})" for name, one in busy.items() if one]
    yield Fact("GPU", ", ".join(texts), f"NVML, {counters.num_samples} samples during the clean steps")
    texts = []
    if counters.power_watts:
        texts.append(f"{significant(counters.power_watts.mean)} W (p95 {significant(counters.power_watts.p95)})")
    if counters.sm_clock_mhz and counters.memory_clock_mhz:
        texts.append(f"SM {counters.sm_clock_mhz.mean:,.0f} MHz, memory {counters.memory_clock_mhz.mean:,.0f} MHz")
    if summary.throughput is not None and summary.throughput.joules_per_unit is not None:
        texts.append(f"{significant(summary.throughput.joules_per_unit)} J/{summary.throughput.unit[:-1]}")
    throttle = ", ".join(f"{reason} {percent(share)}" for reason, share in counters.throttle_shares)
    yield Fact("power", ", ".join(texts), f"clocks throttled: {throttle}" if throttle else "clocks not throttled")
    others = (recording.facts.get("counters") or {}).get("other_processes") or []
    for process in others[:MAX_NAMES]:
        used = f", {size(process['used_bytes'])}" if process.get("used_bytes") else ""
        yield Fact("other process", f"{process.get('name')} on this GPU", f"pid {process.get('pid')}{used}")


def _idle(summary: Summary) -> Iterator[Fact]:
    idle = next((row for row in summary.rows if row.name == IDLE), None)
    waits = [(phase.name, (phase.device_ns or 0) - (phase.gpu_busy_ns or 0)) for phase in summary.phases]
    total = sum(ns for _, ns in waits)
    largest = [f"{name} {percent(ns / total)}" for name, ns in waits if ns > _LEAST_IDLE_SHARE * total]
    if idle is not None and largest:
        yield Fact("GPU idle", f"{percent(idle.share)} of the step", f"of that: {', '.join(largest)}")


def _compiler(recording: Recording) -> Iterator[Fact]:
    compiler = recording.compiler
    if not compiler:
        return
    breaks, recompiles = entries(compiler, "graph_breaks"), entries(compiler, "recompiles")
    texts = [plural(sum(map(count_of, breaks)), "graph break"), plural(len(recompiles), "recompile")]
    if "num_compiles" in compiler and "compile_seconds" in compiler:
        seconds = significant(compiler["compile_seconds"])
        texts.insert(0, f"{plural(compiler['num_compiles'], 'compile')} in {seconds} s")
    yield Fact("compiler", ", ".join(texts))
    for one in breaks[:MAX_NAMES]:
        yield Fact("graph break", str(one.get("place")), shortened(str(one["reason"]), _REASON_WIDTH, 1.0))
    for one in recompiles[:MAX_NAMES]:
        guard = str(one["failed_guards"][0]) if one["failed_guards"] else ""
        yield Fact("recompile", str(one["frame"]), shortened(guard, _REASON_WIDTH, 1.0))
    for one in entries(compiler, "recompile_limit_hits")[:MAX_NAMES]:
        yield Fact("recompile limit", f"reached by {one['frame']}", "it runs eagerly from then on")
    for one in entries(compiler, "cuda_graph_skips")[:MAX_NAMES]:
        yield Fact("CUDA graphs", "skipped", shortened(str(one["reason"]), _REASON_WIDTH, 1.0))
    if graphs := compiler.get("cuda_graphs"):
        sizes = plural(graphs["num_distinct_sizes"], "distinct size")
        yield Fact("CUDA graphs", f"{graphs['num_recorded']:,} recorded", f"at most {sizes}")
    if left := sum(max(0, len(found) - MAX_NAMES) for found in (breaks, recompiles)):
        yield Fact("compiler", f"{left} more in compile.json")


def precision_words(settings: Mapping[str, Any], on_gpu: bool) -> tuple[str, str]:
    """Return what applies to float32 products, and the other settings.

    >>> precision_words({"float32_matmul_precision": "high", "cuda.matmul.allow_tf32": True}, on_gpu=True)
    ('float32 matrix products may use TF32', 'float32_matmul_precision high')
    """
    said = str(settings.get("float32_matmul_precision"))
    value = _MATMUL.get(said, f"float32_matmul_precision {said}")
    if not on_gpu:
        return value, f"float32_matmul_precision {said}"
    if (is_tf32 := settings.get("cuda.matmul.allow_tf32")) is not None and is_tf32 != (said != "highest"):
        value = _MATMUL["high" if is_tf32 else "highest"]  # torch.backends.cuda.matmul.fp32_precision has its own say
    rest = [f"float32_matmul_precision {said}"]
    if (cudnn := settings.get("cudnn.allow_tf32")) is not None:
        rest.append(f"cuDNN {'with' if cudnn else 'without'} TF32")
    for low in ("bf16", "fp16"):
        allowed = settings.get(f"cuda.matmul.allow_{low}_reduced_precision_reduction")
        if allowed is not None:
            rest.append(f"split {low} products summed in {low if allowed else 'fp32'}")
    return value, ", ".join(rest)
