"""Builds the answer to a what-if as a document: the step as traced, replayed and changed."""

from __future__ import annotations

from stepscope.document.model import Document, Fact, Facts, Part, Section, Table
from stepscope.document.tables import columns_of
from stepscope.findings.what_if import WhatIf
from stepscope.formatting import duration, percent, plural


def what_if_document(answer: WhatIf) -> Document:
    """Return the step before and after the change, and what the change saves."""
    replays = {"in the trace": answer.traced, "replayed": answer.before}
    verdict = ""
    if answer.is_changed:
        replays["changed"] = answer.after
        saved = answer.before.done_ns - answer.after.done_ns
        share = abs(saved) / answer.before.done_ns if answer.before.done_ns else 0.0
        word = "saves" if saved >= 0 else "costs"
        verdict = f"The change {word} {duration(abs(saved), 3)} per step ({percent(share)})."
    names = "step_time_ns:step_ns until_gpu_is_done_ns:done_ns gpu_work_ns:device_ns host_ns"
    columns = {"step": [*replays], **columns_of(replays.values(), names)}
    work = f"Mean over {plural(answer.num_steps, 'step')} with {plural(answer.num_work, 'piece')} of GPU work."
    parts: list[Part] = [Table("replay", "Time per step", columns, note=work)]
    parts += [Facts(tuple(Fact("note", note) for note in answer.notes))] if answer.notes else []
    return Document("what-if", verdict, (Section("replay", "", tuple(parts)),))
