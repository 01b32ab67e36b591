"""An audit of dtypes, for a terminal."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence

from stepscope.analysis.precision.dtype_audit import PHASES, CastGroup, DtypeAudit, Stayed
from stepscope.formatting import percent, plural, safe, size

NUM_ROWS = 12
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
_WHY = {
    "autocast_fp32_list": "{detail} is on autocast's float32 list for {device}",
    "autocast_promote_list": "{detail} is on autocast's list of ops that take the widest dtype among their inputs",
    "type_promotion": "a float32 input beside a lower one{origin}: type promotion",
    "autocast_off": "autocast is off there",
    "inputs": "they run in the dtype of their inputs, which are float32{origin}",
    "norm_mismatch": "the weight of {detail} is float32 and its input is not",
}


class Audit(DtypeAudit):
    """An audit that prints as text and shows itself in a notebook; what `stepscope.audit` returns."""

    def __repr__(self) -> str:
        return audit_text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(audit_text(self))}</pre>"


def audit_text(audit: DtypeAudit, width: int = 100, num_rows: int = NUM_ROWS) -> str:
    """The whole audit."""
    tables = (_head(audit), _modules(audit, num_rows), _ops(audit, num_rows), _stayed(audit, num_rows, width))
    parts = [*tables, _casts(audit, num_rows, width), _wrapped(_sentences(audit), width)]
    return "\n\n".join("\n".join(safe(line, width) for line in part) for part in parts if part)


def _short(dtypes: Sequence[str]) -> str:
    return ", ".join(_SHORT.get(dtype, dtype) for dtype in dtypes) or "–"


def _head(audit: DtypeAudit) -> list[str]:
    facts = audit.facts
    how = f"autocast {facts['autocast']}" if facts["autocast"] else str(facts.get("dtype") or "no autocast")
    title = [facts.get("workload"), facts.get("preset"), how, f"on {facts['device']}", f"torch {facts['torch']}"]
    sizes = [f"{_SHORT.get(dtype, dtype)} {size(num)}" for dtype, num in facts["parameters"].items()]
    rows = [("parameters", ", ".join(sizes) or "none")]
    rows += [(name, _short([facts[name]])) for name in ("logits", "loss") if facts[name]]
    for name, title_of in (("gradients", "gradients"), ("optimizer_state", "optimizer state")):
        found = [f"{_SHORT.get(r['dtype'], r['dtype'])} {size(r['bytes'])}" for r in facts[name]]
        rows += [(title_of, ", ".join(found))] if found else []
    return [" · ".join(safe(word) for word in title if word), *(f"{name:<16}{text}" for name, text in rows)]


def _modules(audit: DtypeAudit, num_rows: int) -> list[str]:
    groups = audit.modules
    rows = [("module", "", "kind", "weights", "takes", "gives")]
    rows += [
        (
            one.name or "(model)", f"×{one.num_modules}" if one.num_modules > 1 else "", one.kind,
            _short(one.parameters), _short(one.inputs), _short(one.outputs),
        )
        for one in groups[: 2 * num_rows]
    ]  # fmt: skip
    return [*_table(rows, {1}), *_more(len(groups), 2 * num_rows, "module")]


def _ops(audit: DtypeAudit, num_rows: int) -> list[str]:
    lines = []
    for phase in PHASES:
        groups = [one for one in audit.ops if one.phase == phase]
        rows = [
            (f"{one.num_calls:,}", one.op, _short(one.inputs), _short([one.output] if one.output else one.inputs[:1]))
            for one in groups[:num_rows]
        ]
        if rows:
            lines += _table([("calls", phase, "takes", "gives"), *rows], {0})
            lines += [*_more(len(groups), num_rows, "kind"), ""]
    return lines[:-1]


def _stayed(audit: DtypeAudit, num_rows: int, width: int) -> list[str]:
    found = audit.stayed
    lines = ["computed in float32, and why"] if found else []
    for one in found[:num_rows]:
        calls = f"{one.num_calls:>5,}  "
        told = f"{', '.join(one.ops[:8])}{' …' * (len(one.ops) > 8)}: {_why(one, str(audit.facts['device']))}"
        lines += _wrapped([calls + told + _places(one.places)], width, " " * 7)
    return [*lines, *_more(len(found), num_rows, "reason")]


def _why(one: Stayed, device: str) -> str:
    origin = f", from {one.detail}" if one.detail else ""
    return _WHY[one.reason].format(detail=one.detail, origin=origin, device=device.upper())


def _places(places: Sequence[str]) -> str:
    more = f" and {plural(len(places) - 1, 'other place')}" if len(places) > 1 else ""
    return f" ({safe(places[0])}{more})" if places else ""


def _casts(audit: DtypeAudit, num_rows: int, width: int) -> list[str]:
    found = audit.casts
    if not found:
        return ["casts           none"]
    rows = [("casts", "moved", "from → to", "phase", "of", "asked for by")]
    rows += [
        (
            _numbers(one), size(one.moved_bytes), f"{_short([one.source])} → {_short([one.target])}", one.phase,
            one.of, _asker(one),
        )
        for one in found[:num_rows]
    ]  # fmt: skip
    table = _table(rows, {0, 1})
    indent = " " * (max(len(row[0]) for row in rows) + 2)
    lines = table[:1]
    for text, one in zip(table[1:], found):
        modules = ", ".join(one.modules[:4]) + (f" and {len(one.modules) - 4} more" if len(one.modules) > 4 else "")
        where = f"{modules or 'the model'}{_places(one.callers)}"
        lines += [text, *_wrapped([where], width, indent, indent)]
    return [*lines, *_more(len(found), num_rows, "kind")]


def _numbers(one: CastGroup) -> str:
    numbers = one.num_by_micro_batch
    more = " …" if len(numbers) > 4 else ""
    return f"{one.num_casts:,}" if len(numbers) == 1 else " + ".join(map(str, numbers[:4])) + more


def _asker(one: CastGroup) -> str:
    if one.by == "autocast" and one.function:
        return f"autocast, {one.function}"
    return {"code": f"the code, {one.function}", "torch": one.function or "torch"}.get(one.by, one.by)


def _wrapped(texts: Sequence[str], width: int, indent: str = "", first: str = "") -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)
    ]


def _sentences(audit: DtypeAudit) -> list[str]:
    return list(_said(audit))


def _said(audit: DtypeAudit) -> Iterator[str]:
    facts, weights = audit.facts, audit.weight_casts
    if weights.num_casts:
        yield (
            f"Autocast casts {plural(weights.num_parameters, 'weight')} of {size(weights.parameter_bytes)} to "
            f"{facts['autocast']}: {size(weights.cast_bytes)} a micro-batch, for {plural(weights.num_uses, 'use')}."
        )
    if weights.num_repeated:
        yield (
            f"{plural(weights.num_repeated, 'cast')} of them repeat what an earlier micro-batch did: they move "
            f"{size(weights.repeated_bytes)} a step."
        )
    elif weights.num_casts and facts["num_micro_batches"] == 1:
        yield "Each further micro-batch casts them again (--micro-batches 2 shows it)."
    again = [one for one in audit.casts if one.num_again]
    if again:
        number, moved = sum(one.num_again for one in again), sum(one.again_bytes for one in again)
        yield (
            f"{plural(number, 'cast')} of the forward cast what it had cast already: they move {size(moved)} a step. "
            "Autocast keeps its casts of weights, not of activations."
        )
    total = audit.cast_bytes()
    if total:
        parts = [f"{phase} {percent(audit.cast_bytes(phase=phase) / total)}" for phase in PHASES]
        yield f"Casts move {size(total)} a step: {', '.join(parts)}."
    for norm in facts["norms"]:
        effect = "the fused kernel is lost, it runs as " + ", ".join(op.removeprefix("aten.") for op in norm["ops"])
        if not norm["loses_fused"]:
            effect = "no fused kernel is lost by that here"
        first = norm["module"] or norm["caller"] or "not known"
        calls = f"{plural(norm['num_calls'], 'call')} of {norm['function']} (first: {first})"
        yield f"{calls} with a {norm['input']} input and a {norm['weight']} weight: {effect}."
    if facts["settings"]["cuda.matmul.allow_tf32"] and facts["device"] == "cuda":
        yield "float32 products may run in TF32: cuda.matmul.allow_tf32 is on."
    if facts["error"]:
        yield f"Not everything was counted: {safe(facts['error'])}."


def _more(number: int, shown: int, noun: str) -> list[str]:
    return [f"… and {plural(number - shown, noun)} more: --rows, or --json"] if number > shown else []


def _table(rows: Sequence[Sequence[str]], right: set[int]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
