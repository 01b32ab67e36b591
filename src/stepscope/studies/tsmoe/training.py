"""Answers of the study `tsmoe` about the training run: its figures and its MFU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.devices import find_device
from stepscope.document.model import Text, Value
from stepscope.errors import Unavailable
from stepscope.formatting import safe
from stepscope.studies.figures import known, listed, paced, said, table
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.tsmoe import note

NUM_OTHERS = 4
"""Classes of kernels besides products and attention that are told by name."""
SPARSE = 2
"""A peak with sparsity is so many times the dense one."""
STEP = (
    "model", "dtype", "step_ns", "tokens_per_s", "flops_per_s", "mfu_share", "gpu_busy_share",
    "memory_controller_busy_share", "num_kernels", "data_share", "peak_bytes", "num_parameters",
    "num_active_parameters", "loss",
)  # fmt: skip


def step_of(recorded: Recorded) -> dict[str, Any]:
    """What a recording says of its step; None of what the device does not offer."""
    source, summary = recorded.source, recorded.source.card.summary
    if summary.step_ns is None or summary.throughput is None or summary.flops is None:
        raise Unavailable(f"the recording of {recorded.axes['preset']} has no clean step with counted FLOPs")
    counters, facts, parameters = summary.counters, source.card.recording.facts, summary.parameters or {}
    phases = {phase.name: phase.host_ns if phase.device_ns is None else phase.device_ns for phase in summary.phases}
    gauges = (counters.gpu_busy_share, counters.memory_controller_busy_share) if counters else (None, None)
    busy, controller = (None if gauge is None else gauge.mean for gauge in gauges)
    peak = (facts.get("memory") or {}).get("peak_allocated_bytes")
    num_parameters = parameters.get("num_total")
    losses = [sample.loss for sample in source.card.recording.samples if sample.loss is not None]
    axes, environment = recorded.axes, facts.get("environment") or {}
    return {
        **axes,
        "model": f"{axes['preset']} ({axes['batch']} × {axes['seq_len']}), {num_parameters:,} parameters",
        "step_ns": summary.step_ns.median,
        "tokens_per_s": summary.throughput.per_s,
        "flops_per_s": summary.flops.model_flops / summary.step_ns.median * 1e9,
        "model_flops": summary.flops.model_flops,
        "mfu_share": None if summary.mfu is None else summary.mfu.share,
        "gpu_busy_share": busy,
        "memory_controller_busy_share": controller,
        "num_kernels": summary.num_kernels_per_step,
        "gpu_idle_share": next((row.share for row in summary.rows if row.name == "idle"), None),
        "data_share": phases.get("data", 0.0) / sum(phases.values()),
        "peak_bytes": source.memory.account.peak_bytes if peak is None else peak,
        "num_parameters": num_parameters,
        "num_active_parameters": summary.flops.num_active_parameters,
        "loss": losses[0] if losses else None,
        "device_name": safe(str(environment.get("device_name")), 80),
        "float32_matmul": environment.get("float32_matmul"),
    }


def steps(stored: Stored) -> list[dict[str, Any]]:
    """Every recording of the training, small models first."""
    found = [step_of(each) for each in stored.recordings("training") if each.status == OK]
    if not found:
        raise Unavailable("no training run was recorded: --resume goes on with it")
    return sorted(found, key=size_of)


def size_of(record: Mapping[str, Any]) -> tuple[int, int, bool]:
    """What runs are sorted by: parameters, tokens, AMP last."""
    return record["num_parameters"], record["batch"] * record["seq_len"], record["dtype"] != "fp32"


def _kernel_classes(stored: Stored, main: Mapping[str, Any]) -> dict[str, float]:
    """The GPU's time in a traced step by class of kernel, most first; nothing of a CPU."""
    knobs = ("preset", "d_model", "layers", "batch", "seq_len", "dtype")
    rank = stored.recording("training", **{name: main[name] for name in knobs}).source.analysis.ranks[0]
    num_steps = max(1, rank.steps.height)
    return {row["class"]: row["total_ns"] / num_steps for row in rank.kernel_classes.to_dicts()}


def training(stored: Stored) -> Iterator[Any]:
    """Tokens/s, step, TFLOP/s, MFU, utilization, launches, data, peak, parameters."""
    records = steps(stored)
    main = records[-1]
    told = {
        f"MFU {said('share', main['mfu_share'])}": main["mfu_share"],
        f"the GPU busy {said('share', main['gpu_busy_share'])} of the time": main["gpu_busy_share"],
        f"{main['num_kernels'] or 0:,.0f} kernels a step": main["num_kernels"],
    }
    figures = [text for text, value in told.items() if value is not None]
    yield Text(
        f"{main['model']} ({main['num_active_parameters']:,} active), {main['dtype']}, routing={main['routing']}, on "
        f"{main['device_name']}: {said('step_ns', main['step_ns'])} a step, {main['tokens_per_s']:,.0f} tokens/s, "
        f"{', '.join([said('flops_per_s', main['flops_per_s']), *figures])}; data, a batch that is there already, is "
        f"{said('share', main['data_share'])} of a step, the peak {said('peak_bytes', main['peak_bytes'])}."
    )
    shown = known(records, *STEP)
    missing = [name for name in STEP if name not in shown]
    remark = "MFU is of the dense peak of each dtype; data is what the loop does before a forward"
    remark += f"; not offered by {main['device_name']}: {', '.join(missing)}" if missing else ""
    yield table("training", "The training runs", records, *shown, note=remark)
    controller = main["memory_controller_busy_share"]
    yield Text(
        f"The note prints both hbm_util and mem_ctrl_util in {note.NUM_LINES_WITH_BOTH} lines: in "
        f"{note.NUM_LINES_EQUAL} of them they are the same number, since both are NVML's utilization.memory, the "
        "share of time in which memory was read or written at all. Here it is one column, "
        "memory_controller_busy_share"
        + ("." if controller is None else f": {said('share', controller)}, while MFU is {_mfu_text(main)}.")
    )
    yield from _beside_note(main)


def _mfu_text(record: Mapping[str, Any]) -> str:
    return said("share", record["mfu_share"])


def _beside_note(main: Mapping[str, Any]) -> Iterator[Any]:
    if (main["preset"], main["batch"], main["seq_len"]) != (note.PRESET, note.BATCH, note.LENGTH):
        raise Unavailable(
            f"the note's figures are of {note.PRESET} with {note.BATCH} × {note.LENGTH} points, this run has "
            f"{main['preset']} with {main['batch']} × {main['seq_len']}"
        )
    per_token = _flops_per_token(note.NUM_ACTIVE, note.LAYERS, note.LENGTH, note.WIDTH)
    rows: list[dict[str, Value]] = [
        {"device": main["device_name"], "attention": main["mask"], "step_ns": main["step_ns"],
         "tokens_per_s": main["tokens_per_s"], "flops_per_s": main["flops_per_s"], "peak_bytes": main["peak_bytes"]},
    ]  # fmt: skip
    for line in (note.MASKED, note.FLASH, note.SXM):
        rows.append(
            {"device": f"{line.device} ({note.NOTE})", "attention": line.attention, "step_ns": line.step_ms * 1e6,
             "tokens_per_s": line.tokens_per_s, "flops_per_s": line.tokens_per_s * per_token,
             "peak_bytes": line.peak_gb * 2**30}
        )  # fmt: skip
    best = note.SXM
    device = find_device(str(main["device_name"]))
    theirs = find_device(best.device)
    text = (
        f"The note's best run of this model, on {best.device}, has {best.tokens_per_s:,.0f} tokens/s: ours has "
        f"{main['tokens_per_s'] / best.tokens_per_s:.2f} times that"
    )
    if device is not None and theirs is not None:
        flops = device.peak_flops["bf16"] / theirs.peak_flops["bf16"]
        bandwidth = device.bandwidth_bytes_per_s / theirs.bandwidth_bytes_per_s
        text += f", on a device with {flops:.2f} times the bf16 peak and {bandwidth:.2f} times the bandwidth"
    yield Text(
        f"{text}; both dispatch by a loop over sorted tokens, the note's by a router that learns, ours with "
        f"routing={main['routing']}. FLOP/s are by one formula for all rows."
    )
    yield table("published-training", "Beside what was published", rows, *rows[0])


def _flops_per_token(num_active: float, layers: int, length: int, width: int) -> float:
    """6 a parameter, and causal attention: two products of 2·length·width, half of them, three times."""
    return 6 * num_active + 6 * layers * length * width


def mfu(stored: Stored) -> Iterator[Any]:
    """As the note computes it, and as it is; what keeps it from being more."""
    main = steps(stored)[-1]
    sizes = (main["num_active_parameters"], main["layers"], main["seq_len"], main["d_model"])
    device_name = str(main["device_name"])
    ours = _formulas(f"this run on {device_name}", device_name, main["tokens_per_s"], *sizes)
    shape = (note.NUM_ACTIVE, note.LAYERS, note.LENGTH, note.WIDTH)
    best = _formulas(f"the note's run on {note.SXM.device}", note.SXM.device, note.SXM.tokens_per_s, *shape)
    counted = main["model_flops"] / (main["batch"] * main["seq_len"])
    peak = _dense_peak(device_name)
    ours.append(_formula(ours[-1]["run"], "counted op by op", counted, main["tokens_per_s"], peak))
    typed = [row for line in (note.MASKED, note.FLASH) for row in _typed(line)]
    wrong, right = best[0], best[2]
    share = right["mfu_share"] / wrong["mfu_share"]
    text = (
        f"The note's {note.SXM.tokens_per_s:,.0f} tokens/s at 12·N FLOPs a token are "
        f"{said('flops_per_s', wrong['flops_per_s'])}, {said('share', wrong['mfu_share'])} of the peak with "
        f"sparsity. At 6·N and attention they are {said('flops_per_s', right['flops_per_s'])}, "
        f"{right['flops_per_s'] / wrong['flops_per_s']:.2f} times that, and {said('share', right['mfu_share'])} of "
        f"the dense peak, {share:.2f} times that: its errors work against each other."
    )
    first, last = ours[0], ours[2]
    text += f" This run: {said('flops_per_s', first['flops_per_s'])} the note's way, "
    text += f"{said('flops_per_s', last['flops_per_s'])} the right way"
    if last["mfu_share"] is not None:
        text += f"; MFU {said('share', first['mfu_share'])} and {said('share', last['mfu_share'])}"
    yield Text(f"{text}; counted op by op, a token takes {counted / last['token_flops']:.3f} times the formula.")
    yield from _why_not_more(stored, main)
    yield Text(
        f"The note's two runs on {note.MASKED.device} are held against a peak of {note.MASKED.peak_tflops:,.0f} "
        f"TFLOP/s, as it was typed in: what it gives as {_listed_mfu(typed[::2])} is {_listed_mfu(typed[1::2])} of "
        "the dense peak, attention counted."
    )
    yield table("mfu", "Both computations", [*best, *typed, *ours], *wrong)
    if peak is None:
        raise Unavailable(f"the peak of {main['device_name']} is not known: its own MFU is missing")


def _why_not_more(stored: Stored, main: Mapping[str, Any]) -> Iterator[Text]:
    """What a step is besides products and attention, whose FLOPs MFU counts; nothing of a CPU."""
    times, idle = _kernel_classes(stored, main), main["gpu_idle_share"]
    if not times or idle is None or main["mfu_share"] is None:
        return
    products_ns = times.pop("gemm", 0.0)
    attention_ns = times.pop("attention_forward", 0.0) + times.pop("attention_backward", 0.0)
    share = (products_ns + attention_ns) / main["step_ns"]
    others = listed(f"{name} {said('_ns', ns)}" for name, ns in list(times.items())[:NUM_OTHERS])
    blamed = "that is" if paced({"gpu_busy_share": 1 - idle}) else "that is not"
    yield Text(
        f"Why MFU is not more: of {said('_ns', main['step_ns'])} products take {said('_ns', products_ns)} and "
        f"attention {said('_ns', attention_ns)}, {said('share', share)} of a step; while they run they reach "
        f"{said('share', main['mfu_share'] / share)} of the peak. Of the rest, which MFU does not count, {others} "
        f'are the most. The GPU has nothing to do for {said("share", idle)}: the note blames "{note.BLAMED}", and '
        f"here {blamed} it."
    )


def _typed(line: note.Line) -> list[dict[str, Any]]:
    """A run of the note by the peak that its author typed in, and by the dense one."""
    run, peak = f"the note's run on {line.device}, {line.attention}", line.peak_tflops * 1e12
    right = _flops_per_token(note.NUM_ACTIVE, note.LAYERS, note.LENGTH, note.WIDTH)
    return [
        _formula(run, "12·N, peak as typed", 12 * note.NUM_ACTIVE, line.tokens_per_s, peak),
        _formula(run, "6·N + attention, dense peak", right, line.tokens_per_s, _dense_peak(line.device)),
    ]


def _listed_mfu(rows: Sequence[Mapping[str, Any]]) -> str:
    return listed(said("share", row["mfu_share"]) for row in rows)


def _dense_peak(device_name: str) -> float | None:
    device = find_device(device_name)
    return None if device is None else float(device.peak_flops["bf16"])


def _formulas(
    run: str, device_name: str, tokens_per_s: float, num_active: float, layers: int, length: int, width: int
) -> list[dict[str, Any]]:
    peak = _dense_peak(device_name)
    sparse = None if peak is None else SPARSE * peak
    right = _flops_per_token(num_active, layers, length, width)
    return [
        _formula(run, "12·N, peak with sparsity", 12 * num_active, tokens_per_s, sparse),
        _formula(run, "6·N, dense peak", 6 * num_active, tokens_per_s, peak),
        _formula(run, "6·N + attention, dense peak", right, tokens_per_s, peak),
    ]


def _formula(run: str, formula: str, flops: float, tokens_per_s: float, peak: float | None) -> dict[str, Any]:
    rate = flops * tokens_per_s
    return {
        "run": run, "formula": formula, "token_flops": flops, "flops_per_s": rate, "peak_flops_per_s": peak,
        "mfu_share": None if peak is None else rate / peak,
    }  # fmt: skip
