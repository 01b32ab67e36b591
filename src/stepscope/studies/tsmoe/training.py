"""Questions of the tsmoe study about the training runs: throughput, MFU, AMP."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from stepscope.analysis.comparison.sweeps import OK
from stepscope.devices import find_device
from stepscope.errors import Unavailable
from stepscope.studies.figures import BUSY, HOST_PACED, HOST_SPREAD, compared, listed, said
from stepscope.studies.recorded import differences, step_of
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.study import BarsOf, Record, Records, Tables, question, table_of

NOTE = "foundationts-training-notes"
PRESET, BATCH, LENGTH, LAYERS, WIDTH, NUM_ACTIVE = "538m", 16, 4096, 12, 768, 198_392_169
"""The model of the note's log."""


class Line(NamedTuple):
    """The last line of a run in the note's log."""

    device: str
    attention: str
    tokens_per_s: float
    step_ms: float
    peak_tflops: float  # the peak that the author typed in
    peak_gb: float


MASKED = Line("NVIDIA H100 PCIe", "mask", 53_296, 1210.48, 1671.0, 73.78)
FLASH = Line("NVIDIA H100 PCIe", "flash", 89_583, 719.97, 1671.0, 59.66)
SXM = Line("NVIDIA H100 80GB HBM3", "flash", 134_339, 478.67, 1979.0, 59.75)


def _size(record: Record) -> tuple[int, int, bool]:
    return record["num_parameters"], record["batch"] * record["seq_len"], record["dtype"] != "fp32"


@table_of(
    "training", "The training runs",
    f"model dtype step_ns tokens_per_s flops_per_s mfu_share {BUSY} memory_controller_busy_share num_kernels "
    "data_share peak_bytes num_parameters num_active_parameters loss",
    note="MFU is of the dense peak of each dtype; data is what the loop does before a forward",
)  # fmt: skip
def runs(stored: Stored) -> Records:
    return sorted((step_of(each) for each in stored.recordings("training") if each.status == OK), key=_size)


@table_of("published-training", "Beside what was published", is_optional=True)
def published_runs(stored: Stored) -> Records:
    main = stored.rows(runs.rows)[-1]
    if (main["preset"], main["batch"], main["seq_len"]) != (PRESET, BATCH, LENGTH):
        return []
    names = ("step_ns", "tokens_per_s", "flops_per_s", "peak_bytes")
    rows = [{"device": main["device_name"], "attention": main["mask"], **{name: main[name] for name in names}}]
    flops = _token_flops(NUM_ACTIVE, LAYERS, LENGTH, WIDTH)
    for line in (MASKED, FLASH, SXM):
        figures = (line.step_ms * 1e6, line.tokens_per_s, line.tokens_per_s * flops, line.peak_gb * 2**30)
        rows.append({"device": f"{line.device} ({NOTE})", "attention": line.attention, **dict(zip(names, figures))})
    return rows


@question(
    "What does the training run reach?", runs, published_runs,
    claim="134,339 tokens/s on an H100 SXM. hbm_util and mem_ctrl_util are equal in all 32 log lines: both are "
    "NVML's utilization.memory.",
)  # fmt: skip
def training(tables: Tables) -> str:
    main = tables["training"][-1]
    told = [said("flops_per_s", main["flops_per_s"]), f"a peak of {said('peak_bytes', main['peak_bytes'])}"]
    told += [f"MFU {said('share', main['mfu_share'])}"] if main.get("mfu_share") is not None else []
    told += [f"{main['num_kernels']:,.0f} kernels per step"] if main.get("num_kernels") else []
    return f"{main['tokens_per_s']:,.0f} tokens/s for {main['model']} in {main['dtype']}, with {listed(told)}."


def _token_flops(num_active: float, layers: int, length: int, width: int) -> float:
    """Return 6 FLOPs per parameter, and causal attention: half of two products of 2·length·width, three times."""
    return 6 * num_active + 6 * layers * length * width


def _dense_peak(device_name: str) -> float | None:
    device = find_device(device_name)
    return None if device is None else float(device.peak_flops["bf16"])


def _formulas(run: str, device_name: str, tokens_per_s: float, flops: Mapping[str, tuple[float, float]]) -> Records:
    """Yield one row per formula: FLOPs per token, and which multiple of the dense peak MFU is of."""
    dense = _dense_peak(device_name)
    for formula, (token_flops, times_dense) in flops.items():
        rate, peak = token_flops * tokens_per_s, dense and dense * times_dense
        row = {"run": run, "formula": formula, "token_flops": token_flops, "flops_per_s": rate}
        yield row | {"peak_flops_per_s": peak, "mfu_share": rate / peak if peak else None}


@table_of("mfu", "Both computations")
def formulas(stored: Stored) -> Records:
    main = stored.rows(runs.rows)[-1]
    right = _token_flops(NUM_ACTIVE, LAYERS, LENGTH, WIDTH)
    ways: dict[str, tuple[float, float]]
    ways = {"12·N, peak with sparsity": (12 * NUM_ACTIVE, 2), "6·N, dense peak": (6 * NUM_ACTIVE, 1),
            "6·N + attention, dense peak": (right, 1)}  # fmt: skip
    yield from _formulas(f"the note's run on {SXM.device}", SXM.device, SXM.tokens_per_s, ways)
    for line in (MASKED, FLASH):
        typed = line.peak_tflops * 1e12 / (_dense_peak(line.device) or 1.0)
        ways = {"12·N, peak as typed": (12 * NUM_ACTIVE, typed), "6·N + attention, dense peak": (right, 1)}
        run = f"the note's run on {line.device}, {line.attention}"
        yield from _formulas(run, line.device, line.tokens_per_s, ways)
    active, counted = main["num_active_parameters"], main["model_flops"] / (main["batch"] * main["seq_len"])
    ours = _token_flops(active, main["layers"], main["seq_len"], main["d_model"])
    ways = {"12·N, peak with sparsity": (12 * active, 2), "6·N, dense peak": (6 * active, 1),
            "6·N + attention, dense peak": (ours, 1), "counted op by op": (counted, 1)}  # fmt: skip
    yield from _formulas(f"this run on {main['device_name']}", main["device_name"], main["tokens_per_s"], ways)


@table_of("kernel-classes", "GPU time of a traced step by kernel class", is_optional=True)
def kernel_classes(stored: Stored) -> Records:
    main = stored.rows(runs.rows)[-1]
    knobs = {name: main[name] for name in ("preset", "d_model", "layers", "batch", "seq_len", "dtype")}
    rank = stored.recording("training", **knobs).source.analysis.ranks[0]
    times = {row["class"]: row["total_ns"] / max(1, rank.steps.height) for row in rank.kernel_classes.to_dicts()}
    return [{"class": name, "total_ns": ns, "step_share": ns / main["step_ns"]} for name, ns in times.items()]


@question(
    "Which MFU is that?", formulas, kernel_classes,
    claim='16.2 % of the peak with sparsity at 12·N FLOPs per token; blames "a bunch of tiny kernel launches".',
)  # fmt: skip
def mfu(tables: Tables) -> str:
    rows = tables["mfu"]
    wrong, _, right, *_ = (row for row in rows if row["run"].startswith("this run"))
    rates = [said("flops_per_s", row["flops_per_s"]) for row in (right, wrong)]
    text = f"{rates[0]} instead of {rates[1]} the note's way"
    if right["mfu_share"] is not None:
        text += f" (MFU {said('share', right['mfu_share'])} instead of {said('share', wrong['mfu_share'])})"
    counted = ("gemm", "attention_forward", "attention_backward", "attention")
    if busy := [row["step_share"] for row in tables["kernel-classes"] if row["class"] in counted]:
        text += f", with products and attention {said('share', sum(busy))} of the step"
    return (
        f"{text}; the note's best run is {said('share', rows[2]['mfu_share'])} of the dense peak, not "
        f"{said('share', rows[0]['mfu_share'])} of the sparse one."
    )


def _pairs(stored: Stored) -> list[tuple[Recorded, Recorded]]:
    """Return (fp32, AMP) recordings of equal sizes."""
    pairs = []
    for low in stored.recordings("training", dtype="autocast_bf16"):
        sizes = {name: low.axes[name] for name in ("preset", "d_model", "layers", "batch", "seq_len")}
        fp32 = [each for each in stored.recordings("training", dtype="fp32", **sizes) if each.status == OK]
        pairs += [(fp32[0], low)] if fp32 and low.status == OK else []
    if not pairs:
        raise Unavailable("no size was trained both with AMP and in fp32")
    return sorted(pairs, key=lambda pair: _size(step_of(pair[0])))


@table_of(
    "amp", "With AMP and without",
    "model dtype step_ns num_kernels gpu_idle_share num_casts cast_time_ns peak_bytes loss",
)  # fmt: skip
def both(stored: Stored) -> Records:
    return [{**step_of(each), **_casts(each)} for pair in _pairs(stored) for each in pair]


def _casts(one: Recorded) -> dict[str, float]:
    """Return how many casts a step makes and their time: kernels that cast, on a CPU calls of `_to_copy`."""
    import polars as pl

    case = one.source.case
    if case.has_gpu_work:
        num, ns, steps = float(case.casts.height), float(case.casts["duration_ns"].sum()), case.num_steps
    else:
        account = one.source.analysis.ranks[0]
        calls = account.ops.filter(pl.col("op") == "aten::_to_copy")
        num, ns = float(calls["num_calls"].sum()), float(calls["host_total_ns"].sum())
        steps = max(1, account.steps.height)
    return {"num_casts": num / steps, "cast_time_ns": ns / steps}


@table_of("amp-differences", "What the difference is made of")
def amp_differences(stored: Stored) -> Records:
    return [
        {"model": step_of(fp32)["model"], **row}
        for fp32, low in _pairs(stored)
        for row in differences(fp32.source, low.source, ("fp32", "amp"), 5, ("dtype",))
    ]


@question(
    "Does AMP pay, and where does it not?",
    BarsOf("amp", "Step time with AMP and without", both, "model dtype", "step_ns"), both, amp_differences,
    claim="Its small model has 147,515 tokens/s without AMP and 108,780 with it; 538m without AMP does not fit 79 "
    "GiB (device not named).",
)  # fmt: skip
def amp(tables: Tables) -> str:
    rows = list(tables["amp"])
    return f"AMP is {listed(amp_verdict(fp32, low) for fp32, low in zip(rows[::2], rows[1::2]))}."


def amp_verdict(fp32: Record, low: Record) -> str:
    """Return whether AMP pays for a model; where the host limits both steps, that they do not differ."""
    short, long = sorted((fp32["step_ns"], low["step_ns"]))
    idle = [row.get("gpu_idle_share") for row in (fp32, low)]
    if all(share is not None and 1 - share < HOST_PACED for share in idle) and long < HOST_SPREAD * short:
        work: list[Any] = [said("_ns", (1 - row["gpu_idle_share"]) * row["step_ns"]) for row in (low, fp32)]
        return (
            f"not measurably different from fp32 for {fp32['model']} (host-bound: {said('share', idle[1])} GPU idle "
            f"time, {work[0]} instead of {work[1]} of GPU work)"
        )
    times = f"{said('_ns', low['step_ns'])} instead of {said('_ns', fp32['step_ns'])} per step"
    return f"{compared(low['step_ns'], fp32['step_ns'], 'fp32')} for {fp32['model']} ({times})"
