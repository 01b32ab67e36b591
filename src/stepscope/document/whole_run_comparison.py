"""Two whole runs in a comparison: figures since the start, losses, and where each run changes."""

from collections.abc import Callable, Iterator

from stepscope.analysis.comparison.whole_runs import LossAt, WholeRuns
from stepscope.document.model import Part, Table, Text
from stepscope.formatting import elapsed, percent, significant, span

_MANY_TIMES = 9.0  # a growth that is told as a factor


def whole_run_parts(runs: WholeRuns) -> Iterator[Part]:
    base, new = runs.base, runs.new
    rows = [
        ("steps", f"{base.num_steps:,}", f"{new.num_steps:,}", ""),
        ("time since the start", span(base.wall_ns), span(new.wall_ns), _change(base.wall_ns, new.wall_ns)),
        ("goodput", percent(base.goodput), percent(new.goodput), _change(base.goodput, new.goodput)),
        ("steps per second", significant(base.steps_per_s), significant(new.steps_per_s),
         _change(base.steps_per_s, new.steps_per_s)),
    ]  # fmt: skip
    if base.per_s and new.per_s and base.unit == new.unit:
        values = significant(base.per_s), significant(new.per_s)
        rows.append((f"{base.unit} per second", *values, _change(base.per_s, new.per_s)))
    walls = base.wall_ns, new.wall_ns
    for name in dict.fromkeys((*base.rows, *new.rows)):
        times = base.rows.get(name, 0), new.rows.get(name, 0)
        if any(ns >= 0.001 * wall for ns, wall in zip(times, walls)):
            before, after = (f"{span(ns)} ({percent(ns / wall)})" for ns, wall in zip(times, walls))
            rows.append((name, before, after, _change(*times)))
    columns = {title: [row[place] for row in rows] for place, title in enumerate(("figure", "base", "new", "change"))}
    yield Table("whole_runs", "From the start to the end", columns, num_shown=len(rows))
    for side, figures in (("base", base), ("new", new)):
        for change in figures.changes:
            share = change.after_ns / change.before_ns - 1
            verb = "drift from" if change.kind == "drift" else "change at"
            word = "slower" if share > 0 else "faster"
            at = f" ({change.time_of_day})" if change.time_of_day else ""
            yield Text(f"{side}: steps {verb} step {change.step:,}{at}, {percent(abs(share))} {word}.")
        if not figures.changes:
            yield Text(f"{side}: after its windows, no lasting change of the step time was found.")
    if runs.loss_by_step:
        yield _losses("loss_by_step", "Loss against step", runs.loss_by_step, "step", lambda at: f"{at:,.0f}")
    elif runs.have_losses:
        yield Text("The losses are not compared: the two runs did not sample them at the same steps.")
    if runs.loss_by_time:
        yield _losses("loss_by_time", "Loss against time since the start", runs.loss_by_time, "time", elapsed)


def _losses(id: str, title: str, points: tuple[LossAt, ...], name: str, text: Callable[[float], str]) -> Table:
    is_noise = [0 < abs(point.new - point.base) <= point.noise for point in points]
    columns = {
        name: [text(point.at) for point in points],
        "base": [significant(point.base, 4) for point in points],
        "new": [significant(point.new, 4) for point in points],
        "change": ["within noise" if noise else _change(p.base, p.new) for p, noise in zip(points, is_noise)],
    }
    note = f"losses that both runs sampled at the same {name}, within 1 %; medians if there are several. "
    note += "Losses of different batches differ by noise"
    return Table(id, title, columns, num_shown=len(points), note=note)


def _change(base: float, new: float) -> str:
    if not base:
        return ""
    share = (new - base) / abs(base)
    if share >= _MANY_TIMES:  # +136882.5 % says nothing
        return f"{share + 1:,.0f}×"
    return f"{'+' if share > 0 else '−' if share < 0 else ''}{percent(abs(share))}"
