"""The rows of the card: each fact with its name, its value and how it was come by."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.time.phases import IDLE
from stepscope.analysis.time.summary import Summary
from stepscope.devices import nearest_names
from stepscope.document.precision_settings import precision_words
from stepscope.formatting import count, milliseconds, percent, plural, safe, significant, size
from stepscope.formatting import flops as as_flops
from stepscope.trace.recording import Recording

BAR_WIDTH = 24
MAX_NAMES = 4
# A wider spread than this means that the median alone does not describe the steps.
NOISY_SPREAD = 0.20


@dataclass(frozen=True)
class Line:
    """One row; a heading has a title alone."""

    title: str
    value: str = ""
    detail: str = ""
    is_heading: bool = False

    def made_safe(self) -> Line:
        """The same row with nothing in it that a terminal would obey."""
        return Line(safe(self.title), safe(self.value, 1000), safe(self.detail, 1000), self.is_heading)


def card_lines(recording: Recording, summary: Summary) -> list[Line]:
    """Every row of the card, in order."""
    return [
        *_run(recording),
        *_speed(summary),
        *_limit(recording, summary),
        *_resources(recording, summary),
        *_compiler(recording),
        *_rows(summary),
        Line("about this measurement", is_heading=True),
        *_steps(recording, summary),
        *_caveats(recording, summary),
        Line("recording", safe(_shown(recording.folder))),
        Line("next", _next_command(recording)),
    ]


def _run(recording: Recording) -> Iterator[Line]:
    environment = recording.facts.get("environment") or {}
    command = recording.facts.get("command") or {}
    if command.get("argv"):
        yield Line("script", safe(" ".join(map(str, command["argv"]))), _status(recording))
    if environment:
        world = environment.get("world_size", 1)
        ranks = f", rank {environment.get('rank')} of {world}" if world > 1 else ""
        yield Line("on", safe(environment.get("device_name")) + ranks, f"torch {safe(environment.get('torch'))}")
    settings = recording.facts.get("precision")
    on_gpu = environment.get("device") == "cuda"
    if isinstance(settings, dict) and (on_gpu or settings.get("float32_matmul_precision") != "highest"):
        products, others = precision_words(settings, on_gpu)
        yield Line("precision", safe(products), safe(others))


def _status(recording: Recording) -> str:
    if recording.status == "interrupted":
        return "interrupted, or still running"
    exit_code = recording.facts.get("exit_code")
    error = recording.facts.get("exception")
    if recording.status == "failed":
        code = f" with exit code {exit_code}" if exit_code is not None else ""
        return f"failed{code}" + (f" ({safe(error)})" if error else "")
    return ""


def _speed(summary: Summary) -> Iterator[Line]:
    step = summary.step_ns
    if step is None:
        return
    noise = step.ci_high - step.ci_low
    how = "between CUDA events" if summary.clock == "device" else "host clock"
    low, high = milliseconds(step.ci_low, noise), milliseconds(step.ci_high, noise)
    quantiles = (("", step.median), ("10 ", step.p10), ("90 ", step.p90))
    yield Line(
        "step",
        "   p".join(f"{name}{milliseconds(ns, noise)}" for name, ns in quantiles),
        f"median of {step.num_samples} clean steps, 95 % CI {low} to {high}; {how}",
    )
    if step.p90 - step.p10 > NOISY_SPREAD * step.median:
        spread = percent((step.p90 - step.p10) / step.median)
        yield Line(
            "",
            f"noisy: p10 to p90 spans {spread} of the median",
            "look at samples.jsonl, or take more --clean steps",
        )
    if summary.num_compiling:
        yield Line("", f"{plural(summary.num_compiling, 'step')} of the window compiled something: left out")
    if summary.throughput is not None:
        unit = summary.throughput.unit
        micro = f" in {summary.num_micro_batches} micro-batches" if summary.num_micro_batches > 1 else ""
        yield Line(
            "speed",
            f"{significant(summary.throughput.per_s)} {unit}/s",
            f"{summary.throughput.per_step:,.0f} {unit} a step{micro}",
        )
    else:
        yield Line("speed", "unknown", "no model input was seen: say --tokens-per-step N")


def _limit(recording: Recording, summary: Summary) -> Iterator[Line]:
    flops = summary.flops
    if flops is None:
        if summary.step_ns is not None:
            why = "see the note" if recording.window("memory") else "the run ended before the memory and FLOPs window"
            yield Line("FLOPs", "not counted", why)
    elif not flops.hardware_flops:
        yield Line("FLOPs", "none counted", flops.hidden or "no op of the step has a FLOP formula")
    else:
        step = summary.step_ns
        rate = f"   {as_flops(flops.model_flops / step.median * 1e9, '/s')}" if step is not None else ""
        check = "counted op by op"
        if flops.formula_flops and summary.throughput is not None and summary.throughput.unit == "tokens":
            # Convolutions use a weight many times a sample: the rule is one for tokens.
            factor = "6" if flops.has_backward else "2"
            ratio = flops.model_flops / flops.formula_flops
            check += f"; {ratio:.3f} × ({factor}·N·tokens + attention)"
        yield Line("FLOPs", f"{as_flops(flops.model_flops)} a step{rate}", check)
        if flops.recomputed_flops:
            yield Line("", f"{as_flops(flops.recomputed_flops)} more are recomputed in backward")
        if flops.hidden:
            yield Line("", "a lower bound", safe(flops.hidden))
        if flops.uncounted_ops:
            names = ", ".join(safe(name) for name in flops.uncounted_ops[:MAX_NAMES])
            more = len(flops.uncounted_ops) - MAX_NAMES
            yield Line(
                "",
                f"{plural(len(flops.uncounted_ops), 'op')} without a formula",
                names + (f" and {more} more (--json lists them)" if more > 0 else ""),
            )
    yield from _utilization(recording, summary)
    parameters = summary.parameters
    if parameters and parameters["num_total"]:
        active = flops.num_active_parameters if flops is not None else None
        by_dtype = ", ".join(f"{size(n)} {safe(dtype)}" for dtype, n in parameters["bytes_by_dtype"].items())
        yield Line(
            "parameters",
            f"{count(parameters['num_total'])}   trainable {count(parameters['num_trainable'])}"
            + (f"   active {count(active)}" if active is not None else ""),
            by_dtype,
        )


def _utilization(recording: Recording, summary: Summary) -> Iterator[Line]:
    if summary.flops is None or not summary.flops.model_flops or summary.step_ns is None:
        return
    if summary.mfu is not None and summary.hfu is not None:
        yield Line("MFU", percent(summary.mfu.share), f"{summary.mfu.formula}: {safe(summary.mfu.limit)}")
        yield Line("HFU", percent(summary.hfu.share), f"{summary.hfu.formula}, recomputation included")
        return
    name = str((recording.facts.get("environment") or {}).get("device_name"))
    dtypes = "/".join(summary.flops.model_flops_by_dtype)
    near = nearest_names(name, 1)
    hint = f" (nearest name: {near[0]})" if near else ""
    yield Line("MFU", "unknown", f"no {dtypes} peak known for {safe(name)!r}{hint}: stepscope doctor --measure")


def _resources(recording: Recording, summary: Summary) -> Iterator[Line]:
    memory: dict[str, Any] = recording.facts.get("memory") or {}
    if "peak_allocated_bytes" in memory:
        yield Line(
            "memory",
            f"peak {size(memory['peak_allocated_bytes'])} allocated   {size(memory['peak_reserved_bytes'])} reserved"
            f"   {size(memory['driver_used_bytes'])} in use by driver",
            f"of {size(memory['driver_total_bytes'])}; {memory['num_allocator_retries']} allocator retries",
        )
    elif "peak_resident_bytes" in memory:
        yield Line("memory", f"peak {size(memory['peak_resident_bytes'])} resident", "of the process, on the host")
    counters = summary.counters
    if counters is None:
        return
    parts = []
    if counters.gpu_busy_share:
        parts.append(f"busy {percent(counters.gpu_busy_share.mean)} (p95 {percent(counters.gpu_busy_share.p95)})")
    if counters.memory_controller_busy_share:
        gauge = counters.memory_controller_busy_share
        parts.append(f"memory controller {percent(gauge.mean)} (p95 {percent(gauge.p95)})")
    yield Line("GPU", "   ".join(parts), f"NVML, {counters.num_samples} samples during the clean steps")
    parts = []
    if counters.power_watts:
        parts.append(f"{significant(counters.power_watts.mean)} W (p95 {significant(counters.power_watts.p95)})")
    if counters.sm_clock_mhz and counters.memory_clock_mhz:
        parts.append(f"SM {counters.sm_clock_mhz.mean:,.0f} MHz   memory {counters.memory_clock_mhz.mean:,.0f} MHz")
    joules = summary.throughput.joules_per_unit if summary.throughput else None
    if joules is not None and summary.throughput is not None:
        parts.append(f"{significant(joules)} J/{summary.throughput.unit[:-1]}")
    throttle = ", ".join(f"{reason} {percent(share)}" for reason, share in counters.throttle_shares)
    yield Line("", "   ".join(parts), f"clocks held back: {throttle}" if throttle else "clocks not held back")
    others = (recording.facts.get("counters") or {}).get("other_processes") or []
    for process in others[:MAX_NAMES]:
        used = f", {size(process['used_bytes'])}" if process.get("used_bytes") else ""
        yield Line("", f"another process on this GPU: {safe(process.get('name'))}", f"pid {process.get('pid')}{used}")


def _compiler(recording: Recording) -> Iterator[Line]:
    compiler = recording.compiler
    if not compiler:
        return
    breaks, recompiles = compiler["graph_breaks"], compiler["recompiles"]
    yield Line(
        "compiler",
        f"{plural(compiler['num_compiles'], 'compile')}   {significant(compiler['compile_seconds'])} s"
        f"   {plural(sum(b['count'] for b in breaks), 'graph break')}   {plural(len(recompiles), 'recompile')}",
    )
    for entry in breaks[:MAX_NAMES]:
        yield Line("", f"graph break at {safe(entry['place'])}", safe(entry["reason"], 110))
    for entry in recompiles[:MAX_NAMES]:
        guard = entry["failed_guards"][0] if entry["failed_guards"] else ""
        yield Line("", f"recompiled {safe(entry['frame'])}", safe(guard, 110))
    for entry in compiler["recompile_limit_hits"][:MAX_NAMES]:
        yield Line("", f"recompile limit hit by {safe(entry['frame'])}", "it runs eager from then on")
    for entry in compiler["cuda_graph_skips"][:MAX_NAMES]:
        yield Line("", "CUDA graphs skipped", safe(entry["reason"], 110))
    graphs = compiler.get("cuda_graphs")
    if graphs:
        sizes = plural(graphs["num_distinct_sizes"], "distinct size")
        yield Line("", f"{plural(graphs['num_recorded'], 'CUDA graph')} recorded", f"at most {sizes}")
    left = sum(max(0, len(compiler[name]) - MAX_NAMES) for name in ("graph_breaks", "recompiles"))
    if left:
        yield Line("", f"and {left} more in compile.json")


def _rows(summary: Summary) -> Iterator[Line]:
    if not summary.rows:
        return
    gpu = any(row.name == IDLE for row in summary.rows)
    kind = "GPU work by the phase that launched it" if gpu else f"{summary.clock} time by phase"
    yield Line(f"where a step goes ({kind}; middle half of the clean steps)", is_heading=True)
    for row in summary.rows:
        bar = "█" * round(row.share * BAR_WIDTH)
        detail = ""
        if row.name == IDLE:
            waits = [(p.name, (p.device_ns or 0) - (p.gpu_busy_ns or 0)) for p in summary.phases]
            total = sum(ns for _, ns in waits)
            largest = [f"{name} {percent(ns / total)}" for name, ns in waits if ns > 0.05 * total]
            detail = f"of it in {', '.join(largest)}" if largest else ""
        yield Line(row.name, f"{row.ns / 1e6:>9,.2f} ms  {percent(row.share):>7}  {bar}", detail)
    if not gpu and summary.clock == "host":
        yield Line("unattributed", f"{0:>9,.2f} ms  {percent(0):>7}  ", "the phases are cut from one clock")


def _steps(recording: Recording, summary: Summary) -> Iterator[Line]:
    steps = recording.facts.get("steps") or {}
    source, several = steps.get("source"), steps.get("num_sources", 1)
    if source is None:
        return
    surer = "call stepscope.step() at the end of your loop's body to be surer"
    found = {
        "step()": ("the script says where: stepscope.step()", ""),
        "optimizer": (f"each ends with optimizer.step() ({plural(several, 'optimizer')})", surer),
        "forward": ("each ends with the root module's forward: no optimizer stepped", surer),
    }
    text, detail = found.get(source, (safe(source), ""))
    skipped = f"; {summary.num_skipped} skipped by the GradScaler" if summary.num_skipped else ""
    yield Line("steps", f"{summary.num_steps} seen, {text}{skipped}", detail)
    if summary.warmup_ns:
        yield Line(
            "warm-up",
            f"{len(summary.warmup_ns)} steps kept apart, the first took {milliseconds(summary.warmup_ns[0])}",
        )
    if any(phase.name == "forward" and phase.host_ns for phase in summary.phases):
        yield Line(
            "data",
            "time inside the DataLoader" if summary.data_is_named else "time from one step's end to the next forward",
            "" if summary.data_is_named else "no DataLoader seen; with stepscope.phase('data'): says it exactly",
        )
    if summary.num_kernels_per_step is not None:
        yield Line("launches", f"{summary.num_kernels_per_step:,.0f} kernels a step")
    if summary.observer_effects:
        effects = "   ".join(f"{e.window} {e.ratio:.2f}×" for e in summary.observer_effects)
        yield Line("observer effect", effects, "probed step ÷ clean step; the clean steps had no probe")


def _caveats(recording: Recording, summary: Summary) -> Iterator[Line]:
    for note in recording.facts.get("notes") or []:
        yield Line("note", safe(note.get("about")), safe(note.get("text"), 500))
    trimmed = (recording.facts.get("trace") or {}).get("trimmed")
    if trimmed:
        yield Line("note", "trace", safe(trimmed))
    dropped = (recording.facts.get("steps") or {}).get("num_lines_dropped")
    if dropped:
        yield Line("note", f"{dropped:,} sample lines past the limit were not kept")
    for warning in recording.warnings:
        yield Line("warning", safe(warning))


def _next_command(recording: Recording) -> str:
    folder = shlex.quote(safe(_shown(recording.folder)))
    if (recording.facts.get("trace") or {}).get("file"):
        return f"stepscope diagnose {folder}, stepscope report {folder} --open"
    return f"stepscope report {folder} --open"


def _shown(path: Path) -> Path:
    """A path as the reader would type it: relative where that is shorter."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
