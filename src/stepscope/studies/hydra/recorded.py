"""Questions of the hydra study that recordings answer: the step, the model, memory, ops, copies, sizes, data."""

from typing import Any

from stepscope.analysis.comparison.sweeps import OK
from stepscope.errors import Unavailable
from stepscope.studies.figures import published, said, shares, span
from stepscope.studies.recorded import memory_chart, op_times, step_of
from stepscope.studies.stored import Recorded, Stored
from stepscope.studies.study import BarsOf, Record, Records, Tables, question, table_of

NOTE = "hydra-100m-notes, device not named"
PARTS = ("forward", "backward", "optimizer")
PART_SHARES = " ".join(f"{name}_share" for name in PARTS)
PUBLISHED_SHARES = {"forward": 0.35, "backward": 0.62, "optimizer": 0.03}
BYTES = {"weights": 135e6, "activations of a layer": 645e6, "head and loss": 1.2e9, "peak": 5.4e9}
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")
COPIED = ("phase", "what", "cause", "op", "num_calls", "bytes", "total_ns", "saving_ns", "share", "module")


def _recorded(stored: Stored, measure: str) -> list[Recorded]:
    try:
        return [each for each in stored.recordings(measure) if each.status == OK]
    except Unavailable:
        return []  # --quick leaves it out


@table_of(
    "step_shares", "Steps by phase", f"preset batch seq_len dtype step_ns tokens_per_s {PART_SHARES} gpu_idle_share"
)
def steps(stored: Stored) -> Records:
    return [step_of(each) for each in stored.recordings("step") if each.status == OK]


def _first(stored: Stored) -> Record:
    return stored.rows(steps)[0]


@question(
    "Where does a step go?", BarsOf("step_shares", "Shares of a step", steps, "preset seq_len", PART_SHARES), steps,
    published("published-step_share", NOTE, lambda s: {n: _first(s)[f"{n}_share"] for n in PARTS}, PUBLISHED_SHARES,
              "phase", "step_share"),
    published("published-step_ns", NOTE, lambda s: {"a step": _first(s)["step_ns"]}, {"a step": 53e6}, "what",
              "step_ns"),
    claim="A step takes 53 ms, compiled with max-autotune-no-cudagraphs and every second layer checkpointed.",
)  # fmt: skip
def step(tables: Tables) -> str:
    first = tables["step_shares"][0]
    told = shares([{"phase": name, "share": first[f"{name}_share"]} for name in PARTS], "phase", "share")
    idle = first.get("gpu_idle_share")
    waits = "" if idle is None else f", and the GPU is idle for {said('share', idle)} of it"
    return (
        f"{said('step_ns', first['step_ns'])} per step of {first['preset']} ({first['batch']} × {first['seq_len']} "
        f"tokens, {first['dtype']}): {told}{waits}."
    )


@table_of("knobs", "Every knob of the first recorded step", num_shown=60)
def knobs(stored: Stored) -> Records:
    axes = stored.recording("step").axes
    return [{"knob": name, "value": str(value)} for name, value in axes.items() if name != "preset"]


@table_of("parameters", "Parameters by preset", "preset dim blocks num_parameters")
def parameters(stored: Stored) -> Records:
    return {row["preset"]: row for row in map(step_of, _recorded(stored, "step"))}.values()


@question(
    "Which model was measured?", knobs, parameters,
    claim="Calls a model of 62 M parameters 100M: its misspelled keywords were ignored.",
)  # fmt: skip
def model(tables: Tables) -> str:
    first = tables["parameters"][0]
    return f"{first['num_parameters']:,} parameters were counted in the process that trained {first['preset']}."


@table_of("memory_by_layer", "Kept for the backward, by layer", note="activations: the most of each at one time")
def layers(stored: Stored) -> Records:
    account = stored.recording("step").source.memory.account
    kept = {row.module: row for row in account.activations if row.module is not None}
    names = sorted((name for name in kept if _is_layer(name)), key=lambda name: int(name.split(".")[1]))
    if not names:
        raise Unavailable("no layer keeps anything for the backward")
    names += [name for name in kept if name and "." not in name and name != "blocks"]
    sizes = {**{name: kept[name].total_bytes for name in names}, "head and loss": kept[""].bytes}
    return [{"module": n, "kept_bytes": size, "peak_share": size / account.peak_bytes} for n, size in sizes.items()]


def _is_layer(name: str) -> bool:
    return name.startswith("blocks.") and name.count(".") == 1


@table_of("memory_stages", "Memory by stage")
def stages(stored: Stored) -> Records:
    found = stored.recording("step").source.memory.account.stages
    most = max(stage.peak_bytes for stage in found)
    return [
        {"stage": stage.name, "when_it_ended_bytes": stage.after_bytes, "at_most_bytes": stage.peak_bytes,
         "has_the_peak": stage.peak_bytes == most} for stage in found
    ]  # fmt: skip


def _bytes(stored: Stored) -> dict[str, float]:
    """Return our bytes under the note's names."""
    account = stored.recording("step").source.memory.account
    kept = {row["module"]: row["kept_bytes"] for row in stored.rows(layers)}
    each = [size for name, size in kept.items() if _is_layer(name)]
    weights = next((part.bytes for part in account.live_at_peak.by_owner if part.name == "parameter"), 0)
    sizes = (weights, sum(each) / len(each), kept["head and loss"], account.peak_bytes)
    return dict(zip(BYTES, sizes))


@question(
    "What fills the memory, by stage and by layer?",
    BarsOf("memory_by_layer", "Kept for the backward, by layer", layers, "module", "kept_bytes"),
    *(memory_chart(id, title, lambda s: s.recording("step"), id) for id, title in (
        ("memory_timeline", "Allocated memory, by owner"), ("memory_at_peak", "At the peak, by owner"))),
    layers, stages,
    published("published-memory_bytes", NOTE, _bytes, BYTES, "what", "memory_bytes"),
    claim="8 layers, weights and loss are more than its peak: every second layer is checkpointed.",
)  # fmt: skip
def memory(tables: Tables) -> str:
    rows = tables["memory_by_layer"]
    each = [row for row in rows if _is_layer(row["module"])]
    return (
        f"The peak is {said('bytes', rows[0]['kept_bytes'] / rows[0]['peak_share'])}, in the "
        f"{tables['memory_stages'].most('at_most_bytes')['stage']}: {len(each)} layers keep "
        f"{span('bytes', [row['kept_bytes'] for row in each])} each for the backward, together "
        f"{said('share', sum(row['peak_share'] for row in each))} of it."
    )


@table_of(
    "bottlenecks", "Ops by their own time, per traced step", num_shown=15,
    if_empty="the trace has no op with a time of its own",
)  # fmt: skip
def ops(stored: Stored) -> Records:
    rows, _ = op_times(stored.recording("step").source)
    whole = sum(ns for _, _, ns in rows)
    return [{"op": op, "num_calls": calls, "own_ns": ns, "share": ns / whole} for op, calls, ns in rows]


@table_of(
    "modules", "Modules by their own time", num_shown=15,
    note="own_share adds up to 100 %; with_inner counts children again",
)  # fmt: skip
def modules(stored: Stored) -> Records:
    from stepscope.analysis.kernels.ops import module_groups

    source = stored.recording("step").source
    where, rank = op_times(source)[1], source.analysis.ranks[0]
    num, named = max(1, rank.steps.height), rank.modules.filter(rank.modules["module"].is_not_null())
    whole = max(1, int(named[f"{where}_self_ns"].sum()))
    for row in module_groups(named).sort(f"{where}_self_ns", descending=True).to_dicts():
        own, inner = row[f"{where}_self_ns"], row[f"{where}_total_ns"]
        figures = {"own_ns": own / num, "own_share": own / whole, "with_inner_ns": inner / num}
        yield {"module": row["module"], "num_modules": row["num_modules"], **figures}


def _op_shares(stored: Stored) -> dict[str, float]:
    return {row["op"]: row["share"] for row in stored.rows(ops)}


@question(
    "What are the bottlenecks?", BarsOf("bottlenecks", "Ops by their own time", ops, "op", "own_ns"), ops, modules,
    published("published-own_share", NOTE, _op_shares, {"aten::mm": 0.36}, "op", "own_share"),
    claim="Counts parents together with their children.",
)  # fmt: skip
def bottlenecks(tables: Tables) -> str:
    inner = tables["modules"]
    twice = sum(row["with_inner_ns"] for row in inner) / sum(row["own_ns"] for row in inner)
    told = shares(tables["bottlenecks"], "op", "share", 3)
    return (
        f"{told} of the time, each op counted once; counting modules with their children gives {twice:.2f} times it."
    )


@table_of("copies", "All copies of a step")
def all_copies(stored: Stored) -> Records:
    report = stored.recording("step").source.copies
    total, num = (sum(row[name] for row in report.rows) for name in ("total_ns", "num_calls"))
    whole = {"num_copies": num, "total_ns": total, "share": total / report.whole_ns}
    return [whole | {"step_ns": report.step_ns, "saving_ns": report.saving_ns}]


@table_of(
    "copy_sources", "Where copies come from", note="saving: how much shorter a step is without it, by the replay",
    if_empty="the trace has no copies",
)  # fmt: skip
def copy_sources(stored: Stored) -> Records:
    for row in stored.recording("step").source.copies.rows:
        texts = {name: str(row[name]).removeprefix("aten::").replace("_", " ") for name in ("what", "cause", "op")}
        called_for = str(row["root_op"]).removeprefix("aten::")
        yield {**{name: row[name] for name in COPIED}, **texts, "called_for": called_for}


@question(
    "Where do copies come from, and what would it save to remove them?",
    BarsOf("copies_by_source", "What a step would save without each source of copies", copy_sources,
           "module what phase", "saving_ns", "saving_ns"), all_copies, copy_sources,
    published("published-time_share", NOTE, _op_shares, {"aten::copy_": 0.19}, "op", "time_share"),
    claim="Copies are optimizer state updates and necessary backward copies: no changes needed.",
)  # fmt: skip
def copies(tables: Tables) -> str:
    whole, sources = tables["copies"][0], tables["copy_sources"]
    most = max(sources, key=lambda row: row["saving_ns"] or 0.0)
    in_backward = sum(row["total_ns"] for row in sources.where(phase="backward")) / whole["total_ns"]
    return (
        f"{whole['num_copies']:,.0f} copies per step take {said('_ns', whole['total_ns'])}, "
        f"{said('share', in_backward)} of it in the backward; without them a step of "
        f"{said('_ns', whole['step_ns'])} would be {said('_ns', whole['saving_ns'])} shorter, "
        f"{said('_ns', most['saving_ns'])} of it without the {most['what']} in {most['module'] or 'no module'}."
    )


@table_of(
    "sizes", "Presets at one number of tokens",
    f"preset num_parameters step_ns tokens_per_s {PART_SHARES} products_share copies_share gpu_idle_share peak_bytes "
    "largest_op",
)  # fmt: skip
def presets(stored: Stored) -> Records:
    from stepscope.analysis.kernels.copy_sources import copy_sources

    groups: dict[str, list[Recorded]] = {}
    for one in _recorded(stored, "step"):
        groups.setdefault(" ".join(str(one.axes[name]) for name in ("batch", "seq_len", "dtype")), []).append(one)
    alike = max(groups.values(), key=len, default=[])
    if len(alike) < 2:
        raise Unavailable("no two presets were recorded at one batch, length and dtype")
    for source, row in ((one.source, step_of(one)) for one in alike):
        (rows, where), rank = op_times(source), source.analysis.ranks[0]
        products = sum(ns for op, _, ns in rows if op in PRODUCTS) / max(1, sum(ns for _, _, ns in rows))
        if where == "device":
            products = next(
                (each["share"] for each in rank.kernel_classes.to_dicts() if each["class"] == "gemm"), 0.0
            )
        of_ns = rank.gpu_time.busy_ns if where == "device" else max(1, int(rank.steps["duration_ns"].sum()))
        copied_ns = int(copy_sources(source.case.linked)["duration_ns"].sum())
        row |= {"products_share": products, "copies_share": copied_ns / of_ns, "largest_op": rows[0][0]}
        yield row | {"peak_bytes": source.memory.account.peak_bytes}


@question("Do the patterns hold for larger models?", presets)
def sizes(tables: Tables) -> str:
    first, last = tables["sizes"][0], tables["sizes"][-1]
    names = [*PART_SHARES.split(), "products_share", "copies_share"]
    most = max(names, key=lambda name: abs(last[name] - first[name]))
    return (
        f"{last['num_parameters'] / first['num_parameters']:.1f} times the parameters ({first['preset']} to "
        f"{last['preset']}) take {last['step_ns'] / first['step_ns']:.1f} times as long, and the share that changes "
        f"most is {most.removesuffix('_share')}, from {said(most, first[most])} to {said(most, last[most])}."
    )


@table_of(
    "data", "Synthetic and real data",
    "batch seq_len data step_ns tokens_per_s data_wait_ns wait_share gpu_idle_share",
    note="the wait is host time; one batch that is already there has none",
    if_empty="no point was trained on the text",
)  # fmt: skip
def pipelines(stored: Stored) -> Records:
    texts = {"text": _recorded(stored, "text"), "text, 2 workers": _recorded(stored, "workers")}
    groups = []
    for base in _recorded(stored, "step"):
        arms = [_arm(name, each) for name, found in texts.items() for each in found if each.axes == base.axes]
        groups += [[_arm("one batch", base), *arms]] if arms else []
    return [row for group in sorted(groups, key=lambda group: group[0]["gpu_idle_share"] or 0.0) for row in group]


def _arm(name: str, recorded: Recorded) -> dict[str, Any]:
    """Return a step with its wait for data. Without a DataLoader the phase `data` is loop work, not a wait."""
    row, summary = step_of(recorded) | {"data": name}, recorded.source.summary
    if summary.data_is_named:
        row["data_wait_ns"] = next(phase.host_ns for phase in summary.phases if phase.name == "data")
        row["wait_share"] = row["data_wait_ns"] / row["step_ns"]
    return row


def _tokens(stored: Stored) -> dict[str, float]:
    size = {name: _first(stored)[name] for name in ("batch", "seq_len")}
    return {row["data"]: row["tokens_per_s"] for row in stored.rows(pipelines).where(**size)}


@question(
    "Does a real data pipeline slow it down?", pipelines,
    published("published-tokens_per_s", f"{NOTE}; withdrawn by its author", _tokens,
              {"one batch": 76_000.0, "text": 31_000.0}, "data", "tokens_per_s"),
    claim="Text has 0.41 times the tokens/s of one batch (withdrawn by its author).",
)  # fmt: skip
def data(tables: Tables) -> str:
    rows, told = tables["data"], []
    for row in (row for row in rows if row.get("data_wait_ns") is not None):
        base = rows.where(batch=row["batch"], seq_len=row["seq_len"])[0]
        told.append(
            f"{row['data']} makes the host wait {said('_ns', row['data_wait_ns'])} per step "
            f"({said('share', row['wait_share'])}) at {row['batch']} × {row['seq_len']} tokens, and a step takes "
            f"{said('_ns', row['step_ns'])} instead of {said('_ns', base['step_ns'])}"
        )
    return f"{'; '.join(told)}."
