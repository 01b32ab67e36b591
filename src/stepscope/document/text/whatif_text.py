"""The answer to a what-if, for a terminal."""

from __future__ import annotations

from stepscope.findings.what_if import WhatIf
from stepscope.formatting import duration, percent, plural, safe


def whatif_text(answer: WhatIf) -> str:
    """Before and after, side by side."""
    rows: list[tuple[str, ...]] = [("", "step", "until the GPU is done", "GPU work", "host's own time")]
    replays = [("in the trace", answer.traced), ("replayed", answer.before)]
    if answer.is_changed:
        replays.append(("changed", answer.after))
    for name, replayed in replays:
        figures = (replayed.step_ns, replayed.done_ns, replayed.device_ns, replayed.host_ns)
        rows.append((name, *(duration(ns, 4) for ns in figures)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.append("")
    lines.append(
        f"{plural(answer.num_steps, 'step')} of {plural(answer.num_work, 'piece')} of GPU work, a step's mean."
    )
    if answer.is_changed:
        saved = answer.before.done_ns - answer.after.done_ns
        word = "saves" if saved >= 0 else "costs"
        share = abs(saved) / answer.before.done_ns if answer.before.done_ns else 0.0
        lines.append(f"The change {word} {duration(abs(saved), 3)} a step ({percent(share)}).")
    lines += [f"Note: {safe(note, 500)}." for note in answer.notes]
    return "\n".join(lines)
