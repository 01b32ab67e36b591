"""Documents about dtypes: an audit (what runs in which, what was cast), and a comparison of several."""

from collections.abc import Iterator, Sequence

from stepscope.analysis.precision.dtype_audit import PHASES, CastGroup, DtypeAudit
from stepscope.analysis.precision.dtype_comparison import CAST, REFERENCE, DtypeComparison, DtypeRow
from stepscope.document.model import Document, Fact, Facts, Part, Section, Table, Text
from stepscope.document.tables import columns_of
from stepscope.formatting import duration, percent, plural, safe, significant, size

NUM_ROWS = 12
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_WHY = {
    "autocast_fp32_list": "{detail} is on autocast's float32 list for {device}",
    "autocast_promote_list": "{detail} is on autocast's list of ops that take the widest dtype among their inputs",
    "type_promotion": "type promotion: one input is float32{origin}, another is lower",
    "autocast_off": "autocast is off there",
    "inputs": "their inputs are float32{origin}",
    "norm_mismatch": "the weight of {detail} is float32 and its input is not",
}


def audit_document(audit: DtypeAudit, num_rows: int = NUM_ROWS) -> Document:
    """Return the whole audit; tables show `num_rows` rows, that of modules twice as many."""
    parts = (
        Facts(tuple(_facts(audit))),
        _modules(audit, 2 * num_rows),
        *_ops(audit, num_rows),
        *_stayed(audit, num_rows),
        *_casts(audit, num_rows),
        Text(" ".join(_sentences(audit))),
    )
    return Document("Dtype audit", _verdict(audit), (Section("audit", "Dtypes", parts),))


def _verdict(audit: DtypeAudit) -> str:
    total = audit.cast_bytes()
    if not total:
        return "No casts."
    shares = [f"{phase} {percent(audit.cast_bytes(phase=phase) / total)}" for phase in PHASES]
    return f"Casts move {size(total)} per step: {', '.join(shares)}."


def _short(dtypes: Sequence[str]) -> str:
    return ", ".join(_SHORT.get(dtype, dtype) for dtype in dtypes) or "–"


def _facts(audit: DtypeAudit) -> Iterator[Fact]:
    facts = audit.facts
    how = f"autocast {facts['autocast']}" if facts["autocast"] else str(facts.get("dtype") or "no autocast")
    what = [facts.get("workload"), facts.get("preset"), how, f"on {facts['device']}", f"torch {facts['torch']}"]
    yield Fact("audit of", " · ".join(safe(word) for word in what if word))
    sizes = [f"{_short([dtype])} {size(num)}" for dtype, num in facts["parameters"].items()]
    yield Fact("parameters", ", ".join(sizes) or "none")
    yield from (Fact(name, _short([facts[name]])) for name in ("logits", "loss") if facts[name])
    for name in ("gradients", "optimizer_state"):
        if found := [f"{_short([row['dtype']])} {size(row['bytes'])}" for row in facts[name]]:
            yield Fact(name.replace("_", " "), ", ".join(found))


def _modules(audit: DtypeAudit, num_rows: int) -> Table:
    columns = columns_of(
        audit.modules,
        "module num_modules kind weights inputs outputs",
        module=lambda one: one.name or "(model)",
        weights=lambda one: _short(one.parameters),
        inputs=lambda one: _short(one.inputs),
        outputs=lambda one: _short(one.outputs),
    )
    return Table("audit_modules", "Dtypes of modules", columns, num_rows)


def _ops(audit: DtypeAudit, num_rows: int) -> Iterator[Table]:
    for phase in PHASES:
        columns = columns_of(
            (one for one in audit.ops if one.phase == phase),
            "op num_calls inputs output",
            inputs=lambda one: _short(one.inputs),
            output=lambda one: _short([one.output] if one.output else one.inputs[:1]),
        )
        yield Table(f"audit_ops_{phase}", f"Dtypes of ops in {phase}", columns, num_rows)


def _stayed(audit: DtypeAudit, num_rows: int) -> Iterator[Table]:
    if audit.stayed:
        device = str(audit.facts["device"]).upper()
        columns = columns_of(
            audit.stayed,
            "ops num_calls because at",
            ops=lambda one: f"{', '.join(one.ops[:8])}{' …' * (len(one.ops) > 8)}",
            because=lambda one: _WHY[one.reason].format(
                detail=one.detail, origin=f" (from {one.detail})" if one.detail else "", device=device
            ),
            at=lambda one: _places(one.places),
        )
        yield Table("audit_float32", "Computed in float32", columns, num_rows, below=("because", "at"))


def _places(places: Sequence[str], most: int = 1) -> str:
    more = f" and {plural(len(places) - most, 'other place')}" if len(places) > most else ""
    return f"{', '.join(places[:most])}{more}"


def _casts(audit: DtypeAudit, num_rows: int) -> Iterator[Table]:
    if found := audit.casts:
        columns = {"from_to": [f"{_short([one.source])} → {_short([one.target])}" for one in found]}
        columns |= columns_of(found, "casts moved_bytes phase of cast_by", casts=_numbers, cast_by=_asker)
        columns["in"] = [_places(one.modules, 4) or "the model" for one in found]
        columns["at"] = [_places(one.callers) for one in found]
        note = "casts: per micro-batch" if audit.facts["num_micro_batches"] > 1 else ""
        yield Table("audit_casts", "Casts", columns, num_rows, note, below=("in", "at"))


def _numbers(one: CastGroup) -> str:
    numbers = one.num_by_micro_batch
    more = " …" if len(numbers) > 4 else ""
    return f"{one.num_casts:,}" if len(numbers) == 1 else " + ".join(map(str, numbers[:4])) + more


def _asker(one: CastGroup) -> str:
    if one.by == "autocast" and one.function:
        return f"autocast, {one.function}"
    return {"code": f"your code, {one.function}", "torch": one.function or "torch"}.get(one.by, one.by)


def _sentences(audit: DtypeAudit) -> Iterator[str]:
    facts, weights = audit.facts, audit.weight_casts
    if weights.num_casts:
        yield (
            f"Autocast casts {plural(weights.num_parameters, 'weight')} of {size(weights.parameter_bytes)} to "
            f"{facts['autocast']}: {size(weights.cast_bytes)} per micro-batch, for {plural(weights.num_uses, 'use')}."
        )
    if weights.num_repeated:
        yield (
            f"{plural(weights.num_repeated, 'cast of them repeats', 'casts of them repeat')} what an earlier "
            f"micro-batch did: {size(weights.repeated_bytes)} moved again per step."
        )
    elif weights.num_casts and facts["num_micro_batches"] == 1:
        yield "Each further micro-batch casts them again (see --micro-batches 2)."
    if number := sum(one.num_again for one in audit.casts):
        moved = size(sum(one.again_bytes for one in audit.casts if one.num_again))
        again = plural(number, "cast in forward repeats", "casts in forward repeat")
        note = "Autocast caches its casts of weights, not of activations."
        yield f"{again} an earlier cast: {moved} moved again per step. {note}"
    for norm in facts["norms"]:
        ops = ", ".join(op.removeprefix("aten.") for op in norm["ops"])
        lost = f"it loses the fused kernel and runs as {ops}"
        effect = lost if norm["loses_fused"] else "no fused kernel is lost here"
        first = norm["module"] or norm["caller"] or "unknown"
        calls = f"{plural(norm['num_calls'], 'call')} of {norm['function']} (first: {first})"
        yield f"{calls} with a {norm['input']} input and a {norm['weight']} weight: {effect}."
    if facts["settings"]["cuda.matmul.allow_tf32"] and facts["device"] == "cuda":
        yield "float32 matrix products may run in TF32: cuda.matmul.allow_tf32 is on."
    if facts["error"]:
        yield f"Not everything was counted: {safe(facts['error'])}."


NUM_CLASSES = 4
BUSY_SHARE = 0.85  # a GPU that is busy for less of a step than this waits for its host
_CLASSES = {
    "gemm": "products", "attention_forward": "attention forward", "attention_backward": "attention backward",
    "elementwise": "elementwise ops", "reduction": "reductions", "copy_cast": "copies", CAST: "casts",
    "norm": "norms", "embedding_index": "lookups", "memset_memcpy": "fills and transfers",
    "other": "unclassified work",
}  # fmt: skip
"""Classes of work as a sentence names them."""
_OWNERS = {
    "parameter": "weights", "gradient": "gradients", "optimizer_state": "optimizer", "activation": "activations",
    "autocast_weight_cast": "weight casts", "temporary": "temporaries",
}  # fmt: skip


def dtypes_document(comparisons: Sequence[DtypeComparison]) -> Document:
    sections = []
    for one in comparisons:
        name = " ".join(safe(word) for word in (one.workload, one.preset) if word)
        title = f"{name} · {one.mode} · {safe(one.device_name or one.device)}"
        sections.append(Section("dtypes", title, tuple(_parts(one))))
    return Document("Dtypes", sections[0].title if len(sections) == 1 else "", tuple(sections))


def _parts(comparison: DtypeComparison) -> Iterator[Part]:
    yield from map(Text, sentences(comparison))
    if lost := [row for row in comparison.rows if row.status != "ok"]:
        yield Facts(tuple(Fact(row.dtype, row.status, safe(row.reason or "no reason given", 400)) for row in lost))
    yield from (_times(comparison), _memory(comparison), _exactness(comparison))


def _times(comparison: DtypeComparison) -> Table:
    rows = [row for row in comparison.rows if row.time is not None]
    phases = dict.fromkeys(name for row in rows for name in row.phase_ns)
    columns = columns_of(rows, "dtype step_ns", step_ns=lambda row: row.time.median)
    columns[f"÷ {REFERENCE}"] = [comparison.slowdown(row) for row in rows]
    columns |= {f"{name}_ns": [row.phase_ns.get(name) for row in rows] for name in phases}
    return Table("dtype_times", "Time per step", columns)


def _memory(comparison: DtypeComparison) -> Table:
    """Return what is alive at the peak; a narrow terminal leaves out the smallest owners."""
    rows = [row for row in comparison.rows if row.memory_bytes]
    owners = {f"{title}_bytes": [row.memory_bytes.get(name, 0) for row in rows] for name, title in _OWNERS.items()}
    peaks = [sum(row.memory_bytes.values()) if row.peak_bytes is None else row.peak_bytes for row in rows]
    columns = columns_of(rows, "dtype") | {"peak_bytes": peaks}
    columns |= {name: sizes for name, sizes in owners.items() if any(sizes)}
    screen = ("dtype", "peak_bytes", *sorted(owners, key=lambda name: -max(owners[name], default=0)))
    return Table("dtype_memory", "Alive at the peak", columns, screen=screen)


def _exactness(comparison: DtypeComparison) -> Table:
    columns = columns_of(
        (row for row in comparison.rows if row.loss is not None or _deviation(row) is not None),
        "dtype loss difference gradient largest_element",
        loss=lambda row: "–" if row.loss is None else f"{row.loss:.6g}",
        difference=lambda row: _exponent(row.loss_difference, "+.2e"),
        gradient=lambda row: _exponent(_deviation(row)),
        largest_element=lambda row: _exponent(row.gradient_largest),
    )
    return Table("dtype_exactness", f"Deviation from {REFERENCE}", columns)


def _deviation(row: DtypeRow) -> float | None:
    return row.gradient_deviation if row.gradient_deviation is not None else row.output_deviation


def sentences(comparison: DtypeComparison) -> Iterator[str]:
    """Yield a sentence per dtype: how much faster or slower it is, and which work made it so."""
    reference = comparison.reference
    if reference is None:
        yield f"{REFERENCE} was not measured: the other dtypes cannot be compared with it."
        return
    for row in comparison.rows:
        if row.num_not_finite:
            of = f"of the {row.dtype} results"
            yield f"{plural(row.num_not_finite, f'element {of} is', f'elements {of} are')} not finite."
        ratio = comparison.slowdown(row)
        if row is reference or ratio is None:
            continue
        times = significant(max(ratio, 1 / ratio), 3)
        pace = "as fast as" if times == "1.00" else f"{times}× {'faster' if ratio < 1 else 'slower'} than"
        doubt = "" if comparison.is_different(row) else " (not significant: the 95 % intervals overlap)"
        changes = comparison.changes(row)[:NUM_CLASSES]
        found = [(_CLASSES.get(name, name), "+" if ns >= 0 else "−", duration(abs(ns), 2)) for name, ns in changes]
        told = ", ".join(f"{name} {sign}{time}" for name, sign, time in found)
        casts = f"; {plural(row.num_casts, 'cast')} per step" if row.num_casts else ""
        why = f"{': ' + told if told else ''}{casts}.{_waiting(comparison, row)}"
        yield f"{row.dtype} is {pace} {REFERENCE}{doubt}{why}"


def _waiting(comparison: DtypeComparison, row: DtypeRow) -> str:
    """Return why less work does not make a shorter step: the GPU waits for its host."""
    work_ns = sum(row.class_ns.values())
    if comparison.device != "cuda" or not work_ns or row.time is None or work_ns > BUSY_SHARE * row.time.median:
        return ""
    return (
        f" The GPU is busy for {duration(work_ns, 3)} of {duration(row.time.median, 3)} and waits for the host "
        "otherwise, so less GPU work does not shorten the step."
    )


def _exponent(value: float | None, form: str = ".1e") -> str:
    return "–" if value is None else f"{value:{form}}" if value else "0"
