"""A flame graph: GPU work by phase, module, op and kernel; of a trace without a GPU, the host's time.

Every nanosecond is in exactly one stack. `.svg` is a picture that any browser shows, with figures under the pointer;
`.folded` has one line per stack, as flame graph tools read them.
"""

import html
from collections.abc import Iterator

import polars as pl

from stepscope.analysis.structure.nesting import ancestor
from stepscope.analysis.structure.steps import LABELS
from stepscope.document.colors import GREY, PHASES
from stepscope.document.kernel_names import short_name
from stepscope.document.sections.trees import Branch
from stepscope.exporters.selection import Selection
from stepscope.exporters.speedscope import OUR_LABEL
from stepscope.exporters.tracks import module_paths
from stepscope.formatting import duration, percent, safe
from stepscope.render.colors import ink_on

ENDINGS = (".svg", ".folded")
WIDTH, ROW = 1400, 18
NARROWEST = 0.4  # pixels: what is narrower is not drawn
_CHARACTER = 6.7  # pixels of a character, about
_NO_MODULE = "no module"

Stacks = dict[tuple[str, ...], int]


def stacks_of(selection: Selection) -> Stacks:
    """Return the nanoseconds of each stack: phase, modules from the outermost, op, kernel."""
    paths = module_paths(selection)
    device = selection.device
    if device.height:
        frame = device.select("phase", "module", "op_name", "name", ns="duration_ns")
    else:
        host = selection.linked.host
        inner = host["name"].gather(ancestor(host, host["kind"] == "op")).cast(pl.String)
        label = pl.col("name").cast(pl.String)
        own = pl.when(~label.str.contains(f"{OUR_LABEL}|{LABELS}")).then(label)  # such as a collective on the host
        frame = (
            host.with_columns(op_name=pl.coalesce(inner, own))
            .join(selection.host.select("row"), on="row", how="semi")
            .select("phase", "module", "op_name", name=pl.lit(None, pl.String), ns="self_ns")
        )
    keys = ["phase", "module", "op_name", "name"]
    sums = frame.with_columns(pl.col(keys).cast(pl.String)).group_by(keys).agg(pl.col("ns").sum())
    found: Stacks = {}
    for phase, module, op, name, ns in sums.filter(pl.col("ns") > 0).sort(keys).iter_rows():
        modules = ((_NO_MODULE,) if paths else ()) if module is None else paths.get(module, (module,))
        stack = (phase or "other", *modules, *(part for part in (op, name) if part is not None))
        found[stack] = found.get(stack, 0) + ns
    return found


def folded_texts(stacks: Stacks) -> Iterator[str]:
    for stack, ns in stacks.items():
        yield ";".join(safe(part, 1000).replace(";", ",") for part in stack) + f" {ns}\n"


def svg_texts(stacks: Stacks, title: str) -> Iterator[str]:
    """Yield the picture: the whole on top, its parts below, the largest first."""
    whole = Branch()
    for stack, ns in stacks.items():
        whole.add(stack, ns)
    drawn: list[tuple[int, float, str, Branch, str]] = [(0, 0.0, title, whole, "")]
    scale = WIDTH / max(1, whole.total)
    for depth, left, _, frame, phase in drawn:  # grows while it is walked: those inside come after
        for name, inner in sorted(frame.inner.items(), key=lambda one: -one[1].total):
            if inner.total * scale >= NARROWEST:
                drawn.append((depth + 1, left, name, inner, phase or name))
            left += inner.total * scale
    height = ROW * (1 + max(depth for depth, *_ in drawn)) + 2
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="12">\n'
    )
    for depth, left, name, frame, phase in drawn:
        yield _box(depth * ROW, left, frame.total * scale, name, frame.total, whole.total, PHASES.get(phase, GREY))
    yield "</svg>\n"


def _box(top: int, left: float, width: float, name: str, ns: int, whole: int, color: str) -> str:
    said = f"{safe(name, 400)}: {duration(ns)}, {percent(ns / max(1, whole))}"
    room = int((width - 6) / _CHARACTER)
    short = short_name(name)
    text = short if len(short) <= room else f"{short[: room - 1]}…" if room > 3 else ""
    place = f'x="{left:.2f}" y="{top}" width="{max(width - 0.5, 0.3):.2f}" height="{ROW - 1}"'
    label = (
        f'<text x="{left + 3:.2f}" y="{top + 13}" fill="{ink_on(color)}">{html.escape(text)}</text>' if text else ""
    )
    return f'<g><title>{html.escape(said)}</title><rect {place} fill="{color}"/>{label}</g>\n'
