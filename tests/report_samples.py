"""A report with every kind of part, in which every text is one and the same name."""

from __future__ import annotations

from stepscope.document.findings import findings_part
from stepscope.document.model import (
    Axis,
    Bars,
    Document,
    Dot,
    Explorer,
    Fact,
    Facts,
    Figure,
    Heat,
    Lines,
    Mark,
    Missing,
    Node,
    Scatter,
    Section,
    Series,
    Table,
    Text,
    Tree,
)
from stepscope.findings.diagnose import Diagnosis, Unchecked
from stepscope.findings.finding import Evidence, Finding

MS = 1_000_000
_MARKUP = (
    "<a href='https://example.org/'>a</a></script><script>window.hacked = 1</script>"
    "<img src=x onerror='window.hacked = 1'>\"><!-- "
)
EVIL = f"{_MARKUP}\u202e\n\x1b[2J"
SHOWN = f"{_MARKUP}???[2J"
"""The same, as a page shows it."""


def finding(name: str, places: tuple[tuple[int, int], ...] = ()) -> Finding:
    row = {"name": name, "total_ns": 5 * MS, "share": 0.25}
    return Finding(
        sentence=f"The GPU waits for {name}.",
        fix=f"drop {name}",
        evidence=(Evidence(name, [row]),),
        falsified_by=f"{name} changes nothing",
        saving_ns=12.3 * MS,
        derived=f"played again without {name}",
        id="host_stall",
        places=places,
    )


def diagnosis(name: str, places: tuple[tuple[int, int], ...] = ()) -> Diagnosis:
    return Diagnosis(
        step_ns=40.0 * MS,
        is_measured=True,
        findings=(finding(name, places),),
        clean=("launch_bound",),
        unchecked=(Unchecked("full_logits", f"no memory of {name}: `stepscope run train.py` records it"),),
        suppressed=(),
        binds="It is bound by the host.",
        gpu_busy_share=0.6,
        warnings=(f"the trace of {name} is cut off",),
    )


def charts(name: str) -> tuple[Section, ...]:
    """A section a kind of chart."""
    y = [3.0 * MS, None, 1.0 * MS]
    times = [0, 5 * MS, 10 * MS]
    line = Series(
        name, y, times, low=[2.5 * MS, None, 0.5 * MS], high=[4.0 * MS, None, 2.0 * MS], gaps=["", name, ""]
    )
    areas = tuple(Series(owner, [1 << 20, 2 << 20, 1 << 20], times, color=owner) for owner in ("gradient", name))
    nodes = (Node("", "", name, 0),) if not name else (
        Node("all", "", name, 10 * MS),
        Node(f"all/{name}", "all", name, 6 * MS),
        Node("all/head", "all", "head", 4 * MS, color="forward"),
    )  # fmt: skip
    heat = Heat(id="heat", title=name, caption=name, x_title=name, y_title=name, x_labels=["128", name],
                y_labels=["small", name], unit="tokens_per_s", values=[[1e3, 2e3], [3e3, None]],
                texts=[["1 k", "2 k"], ["3 k", name]])  # fmt: skip
    roofline = Scatter(id="roofline", title=name, x="flops_per_byte", y="flops_per_s",
                       points=(Dot(10.0, 1e12, 0.5, name, "gemm"), Dot(1.0, 1e11, 0.1, "b", name)),
                       limits=(Series(name, [1e12, 1e15], [0.2, 200.0]),))  # fmt: skip
    every = {
        "bars": Bars(id="bars", title=name, labels=["a", name], unit="total_ns", series=(Series(name, y[::2]),)),
        "parts": Bars(id="parts", title=name, labels=[name], unit="total_ns",
                      series=(Series(name, [MS]), Series("forward", [2 * MS], color="forward"))),
        "lines": Lines(id="lines", title=name, x="time_ns", y="step_ns", series=(line,), marks=(Mark(5 * MS, name),)),
        "areas": Lines(id="areas", title=name, x="time_ns", y="live_bytes", series=areas, style="areas"),
        "dots": Lines(id="dots", title=name, x="num_steps", y="step_ns", style="dots", series=(line,)),
        "scatter": roofline,
        "icicle": Tree(id="icicle", title=name, shape="icicle", unit="device_ns", nodes=nodes),
        "treemap": Tree(id="treemap", title=name, shape="treemap", unit="live_bytes", nodes=nodes),
        "heat": heat,
    }  # fmt: skip
    return tuple(Section(kind, kind.capitalize(), (chart,)) for kind, chart in every.items())


def table(name: str, num_rows: int = 120) -> Table:
    """Rows whose texts sort otherwise than their figures: 2 ms, 10 µs …"""
    totals = [(row * 7919) % 1009 * 10_007 for row in range(num_rows)]
    columns = {"name": [name, *(f"kernel_{row}" for row in range(1, num_rows))], "total_ns": totals,
               "share": [None if row == 3 else row / num_rows for row in range(num_rows)]}  # fmt: skip
    return Table("kernels", name, columns, note=f"of {name}")


def explorer(name: str) -> Explorer:
    times = [1.0 * MS, 2.0 * MS, 2.0 * MS, None]
    return Explorer(
        id="explorer",
        title=name,
        axes=(Axis("seq_len", (128, 256), True, True), Axis(name, ("flash", name), False, False)),
        places=((0, 1, 0, 1), (0, 0, 1, 1)),
        figures={"time_median_ns": times},
        shown=(Figure("time_median_ns", False),),
        statuses=("ok", "ok", "ok", "oom"),
        reasons=("", "", "", name),
        names=(name,) * 4,
        marks=("best", "", "", ""),
        is_noisy=(False,) * 4,
        x=0,
        series=1,
    )


def sample_report(name: str = "gemm", places: tuple[tuple[int, int], ...] = ()) -> Document:
    overview = (
        Facts((Fact(name, name, name),), name),
        Text(f"About {name}."),
        findings_part(diagnosis(name, places), "runs/a"),
    )
    sections = (
        Section("overview", "Overview", overview),
        Section("kernels", "Kernels", (table(name),)),
        *charts(name),
        Section("explore", "Explore", (explorer(name),)),
        Section("ranks", "Ranks", (Missing(f"one rank of {name}: `stepscope run` records more"),)),
    )
    return Document(title=name, verdict=f"A step takes 40.0 ms: {name}.", sections=sections, facts={"source": name})
