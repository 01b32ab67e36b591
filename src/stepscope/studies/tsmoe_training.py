"""Answers of the study `tsmoe` about the training run: its figures and its MFU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.analysis.sweeps import OK
from stepscope.devices import find_device
from stepscope.findings.finding import CannotCheck
from stepscope.report.parts import Text, Value
from stepscope.report.text import safe
from stepscope.studies import tsmoe_note as note
from stepscope.studies.figures import known, said, table
from stepscope.studies.stored import Recorded, Stored

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
        raise CannotCheck(f"the recording of {recorded.axes['preset']} has no clean step with counted FLOPs")
    counters, facts, parameters = summary.counters, source.card.recording.facts, summary.parameters or {}
    phases = {phase.name: phase.host_ns if phase.device_ns is None else phase.device_ns for phase in summary.phases}
    gauges = (counters.gpu_busy_share, counters.memory_controller_busy_share) if counters else (None, None)
    busy, controller = (None if gauge is None else gauge.mean for gauge in gauges)
    peak = (facts.get("memory") or {}).get("peak_allocated_bytes")
    num_parameters = parameters.get("num_total")
    losses = [sample.loss for sample in source.card.recording.samples if sample.loss is not None]
    axes = recorded.axes
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
        "device_name": safe(str((facts.get("environment") or {}).get("device_name")), 80),
    }


def steps(stored: Stored) -> list[dict[str, Any]]:
    """Every recording of the training, small models first."""
    found = [step_of(each) for each in stored.recordings("training") if each.status == OK]
    if not found:
        raise CannotCheck("no training run was recorded: --resume goes on with it")
    return sorted(found, key=size_of)


def size_of(record: Mapping[str, Any]) -> tuple[int, int, bool]:
    """What runs are sorted by: parameters, tokens, AMP last."""
    return record["num_parameters"], record["batch"] * record["seq_len"], record["dtype"] != "fp32"


def main_step(stored: Stored) -> dict[str, Any]:
    """The run that the note is about: the largest model with AMP."""
    return steps(stored)[-1]


def training(stored: Stored) -> Iterator[Any]:
    """Tokens/s, step, TFLOP/s, MFU, utilisation, launches, data, peak, parameters."""
    records = steps(stored)
    main = records[-1]
    told = {
        f"MFU {said('share', main['mfu_share'])}": main["mfu_share"],
        f"the GPU busy {said('share', main['gpu_busy_share'])} of the time": main["gpu_busy_share"],
        f"{main['num_kernels'] or 0:,.0f} kernels a step": main["num_kernels"],
    }
    figures = [text for text, value in told.items() if value is not None]
    yield Text(
        f"{main['model']} ({main['num_active_parameters']:,} active), {main['dtype']}, on {main['device_name']}: "
        f"{said('step_ns', main['step_ns'])} a step, {main['tokens_per_s']:,.0f} tokens/s, "
        f"{', '.join([said('flops_per_s', main['flops_per_s']), *figures])}; data, a batch that is there already, is "
        f"{said('share', main['data_share'])} of a step, the peak {said('peak_bytes', main['peak_bytes'])}."
    )
    shown = known(records, *STEP)
    missing = [name for name in STEP if name not in shown]
    remark = "MFU is of the dense peak of each dtype; data is what the loop does before a forward"
    remark += f"; not offered by {main['device_name']}: {', '.join(missing)}" if missing else ""
    yield table("training", "The training runs", records, *shown, note=remark)
    same = sum(one == other for one, other in zip(note.HBM_UTIL, note.MEM_CTRL_UTIL))
    controller = main["memory_controller_busy_share"]
    yield Text(
        f"The note prints hbm_util and mem_ctrl_util: in {same} of its {len(note.HBM_UTIL)} lines they are the same "
        "number, since both are NVML's utilization.memory, the share of time in which memory was read or written at "
        "all. Here it is one column, memory_controller_busy_share"
        + ("." if controller is None else f": {said('share', controller)}, while MFU is {_mfu_text(main)}.")
    )
    yield from _beside_note(main)


def _mfu_text(record: Mapping[str, Any]) -> str:
    return said("share", record["mfu_share"])


def _beside_note(main: Mapping[str, Any]) -> Iterator[Any]:
    if (main["preset"], main["batch"], main["seq_len"]) != (note.PRESET, note.BATCH, note.LENGTH):
        raise CannotCheck(
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
    yield Text(f"{text}; both dispatch by a loop over sorted tokens, and FLOP/s are by one formula for all rows.")
    yield table("published-training", "Beside what was published", rows, *rows[0])


def _flops_per_token(num_active: float, layers: int, length: int, width: int) -> float:
    """6 a parameter, and causal attention: two products of 2·length·width, half of them, three times."""
    return 6 * num_active + 6 * layers * length * width


def mfu(stored: Stored) -> Iterator[Any]:
    """As the note computes it, and as it is."""
    main = main_step(stored)
    ours = (main["tokens_per_s"], main["num_active_parameters"], main["layers"], main["seq_len"], main["d_model"])
    theirs = (note.SXM.tokens_per_s, note.NUM_ACTIVE, note.LAYERS, note.LENGTH, note.WIDTH)
    rows = [
        *_formulas(f"the note's run on {note.SXM.device}", note.SXM.device, *theirs),
        *_formulas(f"this run on {main['device_name']}", str(main["device_name"]), *ours),
    ]
    counted = main["model_flops"] / (main["batch"] * main["seq_len"])
    peak = _dense_peak(str(main["device_name"]))
    rows.append(_formula(rows[-1]["run"], "counted op by op", counted, main["tokens_per_s"], peak))
    wrong, right = rows[0], rows[2]
    share = right["mfu_share"] / wrong["mfu_share"]
    text = (
        f"The note's {note.SXM.tokens_per_s:,.0f} tokens/s at 12·N FLOPs a token are "
        f"{said('flops_per_s', wrong['flops_per_s'])}, {said('share', wrong['mfu_share'])} of the peak with "
        f"sparsity. At 6·N and attention they are {said('flops_per_s', right['flops_per_s'])}, "
        f"{right['flops_per_s'] / wrong['flops_per_s']:.2f} times that, and {said('share', right['mfu_share'])} of "
        f"the dense peak, {share:.2f} times that: its errors work against each other."
    )
    first, last = rows[3], rows[5]
    text += f" This run: {said('flops_per_s', first['flops_per_s'])} the note's way, "
    text += f"{said('flops_per_s', last['flops_per_s'])} the right way"
    if last["mfu_share"] is not None:
        text += f"; MFU {said('share', first['mfu_share'])} and {said('share', last['mfu_share'])}"
    yield Text(f"{text}; counted op by op, a token takes {counted / last['token_flops']:.3f} times the formula.")
    yield table("mfu", "Both computations", rows, *rows[0])
    if peak is None:
        raise CannotCheck(f"the peak of {main['device_name']} is not known: its own MFU is missing")


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
