"""The page in a real browser: every section draws, nothing leaves it, nothing of a name runs, and it can be used."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import replace
from pathlib import Path

import pytest

from conftest import opened_page
from handmade import cpu_facts, cpu_recording, gpu_recording, write_recording
from report_samples import EVIL, SHOWN, sample_report, table
from stepscope import report
from stepscope.analysis.time import statistics
from stepscope.document.model import Document, Section, Table
from stepscope.document.sections.timeline import timeline_of
from stepscope.formatting import cell
from stepscope.render.csv import csv_of
from stepscope.render.write import write_report
from trace_builder import PUBLIC, TRACES, TraceBuilder, needs_traces

SWEEP = Path(__file__).parents[2] / "docs" / "results" / "h200" / "cs336"
REAL = [
    "h200/gpt2_eager.json.gz", "h200/llama_compiled.json.gz", "h200/data_stall.json.gz",
    "public/cpu_only_gloo.json.gz", "public/dlrm_8ranks_v100", "public/qwen0.5b_mi300_stacks.json.gz",
]  # fmt: skip
if os.environ.get("STEPSCOPE_ALL_TRACES"):  # five minutes instead of one
    found = [*TRACES.glob("*/*.json.gz"), *PUBLIC.glob("trace_diff/*.json.gz"), PUBLIC / "dlrm_8ranks_v100"]
    REAL = [str(path.relative_to(TRACES)) for path in sorted(found)]


@pytest.fixture(autouse=True, scope="module")
def quick_and_alone(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSCOPE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(statistics, "NUM_RESAMPLES", 5)
        yield


@pytest.fixture(scope="module")
def sample_tab(chromium, tmp_path_factory):
    """One page for all tests that leave it as it was, and how far things moved on it until its first chart was there:
    a page takes more than a second to unpack Plotly."""
    path = write_report(sample_report(), tmp_path_factory.mktemp("sample") / "page.html")
    opened = opened_page(chromium, path, "#bars")
    opened.page.wait_for_selector("section#bars svg.main-svg")
    moved = opened.page.evaluate(
        """() => new Promise((done) => {
            let sum = 0;
            const add = (list) => list.getEntries().forEach((entry) => (sum += entry.value));
            new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
            setTimeout(() => done(sum), 100);
        })"""
    )
    yield opened, moved
    opened.page.context.close()


@pytest.fixture
def sample(sample_tab):
    yield sample_tab[0]
    assert sample_tab[0].complaints == []


@pytest.fixture(scope="module")
def sweep(chromium, tmp_path_factory):
    """The page of a sweep, on a phone."""
    path = write_report(report(SWEEP), tmp_path_factory.mktemp("sweep") / "page.html")
    opened = opened_page(chromium, path, viewport={"width": 390, "height": 844})
    yield opened
    opened.page.context.close()


WALK = """async () => {
    const faults = [];
    const until = async (holds, what) => {
        const began = performance.now();
        while (!holds()) {
            if (performance.now() - began > 20000) throw new Error(`never: ${what}`);
            await new Promise(requestAnimationFrame);
        }
    };
    for (const section of document.querySelectorAll("main > section")) {
        location.hash = section.id;
        await until(() => section.classList.contains("current"), `section ${section.id}`);
        for (const plot of section.querySelectorAll(".plot")) {
            plot.scrollIntoView();
            await until(() => plot.querySelector("svg.main-svg"), `a chart of ${section.id}`);
        }
        await until(() => !section.querySelector("#timeline-root .wait"), "the timeline");
        if (!section.innerText.trim()) faults.push(`${section.id} is empty`);
        const { scrollWidth, clientWidth } = document.documentElement;
        if (scrollWidth > clientWidth) faults.push(`${section.id} is wider than the window`);
    }
    return faults;
}"""


def walk(opened) -> None:
    """Every section, with every chart of it drawn."""
    assert opened.page.evaluate(WALK) == []


def follow(opened) -> None:
    """From the first finding with a place to that place on the timeline."""
    page = opened.page
    page.evaluate("location.hash = 'timeline'")
    page.wait_for_function("() => window.stepscopeTimeline")
    page.evaluate("location.hash = 'overview'")
    page.click("[data-places] >> nth=0")
    start_ns, end_ns = map(int, page.get_attribute("[data-places] >> nth=0", "data-places").split()[0].split("-"))
    origin_ns = int(page.evaluate("stepscopeTimeline.meta.origin_ns"))
    page.wait_for_function("() => stepscopeTimeline.spans.length && !stepscopeTimeline.moving")

    assert page.evaluate("location.hash") == "#timeline"
    seen, tick_ns = page.evaluate("[stepscopeTimeline.range, stepscopeTimeline.meta.tick_ns]")
    margin_ns = 0.15 * (end_ns - start_ns) + 16 * tick_ns
    assert start_ns - origin_ns - seen["startNs"] == pytest.approx(margin_ns, abs=margin_ns)
    assert seen["endNs"] - (end_ns - origin_ns) == pytest.approx(margin_ns, abs=margin_ns)


def test_every_kind_of_part_is_drawn_and_a_hostile_name_is_text(open_page):
    opened = open_page(sample_report(EVIL))
    walk(opened)

    page = opened.page
    assert page.evaluate("window.hacked") is None
    assert page.query_selector_all("img, iframe, object, embed, main script, link, main a") == []
    assert SHOWN in page.inner_text("section#ranks")
    page.evaluate("location.hash = 'kernels'")
    assert page.inner_text("section#kernels td >> nth=0") == SHOWN
    page.click("section#kernels th button >> nth=1")  # drawn again, by the script this time
    page.click("section#kernels th button >> nth=0")
    assert SHOWN in page.eval_on_selector_all("section#kernels td", "all => all.map(one => one.textContent)")
    assert page.evaluate("window.hacked") is None


@pytest.mark.long
@needs_traces
@pytest.mark.parametrize("name", REAL)
def test_every_section_of_a_real_trace(open_page, name, tmp_path):
    path = write_report(report(TRACES / name, use_cache=False), tmp_path / "trace.html")

    assert path.stat().st_size < 6_000_000
    opened = open_page(path, reduced_motion="reduce")
    walk(opened)
    if opened.page.query_selector("[data-places]"):
        follow(opened)


@pytest.mark.long
def test_every_section_of_recordings(open_page, tmp_path):
    walk(open_page(report(cpu_recording(tmp_path / "cpu"))))
    walk(open_page(report(gpu_recording(tmp_path / "gpu"))))


def test_every_section_of_an_empty_recording(open_page, tmp_path):
    opened = open_page(report(write_recording(tmp_path / "empty", cpu_facts(status="interrupted"), [])))
    walk(opened)

    assert opened.page.query_selector(".missing") is not None


@pytest.mark.long
def test_every_section_of_a_sweep_on_a_phone(sweep):
    walk(sweep)

    assert sweep.complaints == []


@pytest.mark.long
def test_a_sweep_over_other_axes(sweep):
    page = sweep.page
    page.set_viewport_size({"width": 1280, "height": 900})
    sweep.section("explore")
    page.wait_for_selector(".explorer svg.main-svg")
    before = page.inner_text(".explorer .plot")
    page.select_option(".explorer label:has-text('figure') select", label="peak allocated")
    page.wait_for_function(
        "() => document.querySelector('.explorer .plot').textContent.includes('peak allocated (GiB)')"
    )
    page.focus(".explorer label:has-text('chart') select")
    page.select_option(".explorer label:has-text('chart') select", label="heat map")
    page.wait_for_selector(".explorer .heatmaplayer image, .explorer .hm image", state="attached")

    assert page.inner_text(".explorer .plot") != before
    assert "oom" in page.inner_text(".explorer .plot")
    # Also where other controls took the place of these.
    assert page.evaluate("document.activeElement.closest('label')?.firstChild.textContent") == "chart"
    assert sweep.complaints == []


def test_tables_sort_by_figures_filter_and_show_all(sample):
    sample.section("kernels")
    page = sample.page

    def column(number: int) -> list[str]:
        return page.eval_on_selector_all(
            "section#kernels tbody tr", f"all => all.map(one => one.children[{number}].textContent)"
        )

    assert len(column(0)) == 50
    page.click("section#kernels th button >> nth=1")
    assert (
        column(1)[0].endswith("ms") and page.get_attribute("section#kernels th >> nth=1", "aria-sort") == "descending"
    )
    page.click("section#kernels th button >> nth=1")
    assert column(1) == [cell("total_ns", value) for value in sorted(table("gemm").columns["total_ns"])[:50]]
    page.click("section#kernels .more")
    assert len(column(0)) == 120
    page.click("section#kernels th button >> nth=2")
    assert column(2)[0] == "99.2 %" and column(2)[-1] == "–"
    page.fill("section#kernels .filter", "KERNEL_11")
    assert set(column(0)) == {"kernel_11", *(f"kernel_11{digit}" for digit in range(10))}
    with page.expect_download() as download:
        page.click("section#kernels .tools button")
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    assert download.value.suggested_filename == "kernels.csv"
    assert {row["name"]: int(row["total_ns"]) for row in rows}["kernel_11"] == 11 * 7919 % 1009 * 10_007


def test_dark_and_light_follow_the_system_and_the_button(sample):
    paper = "section#bars .main-svg"

    def colors(scheme: str | None = None) -> tuple[str, str]:
        if scheme is not None:
            sample.page.emulate_media(color_scheme=scheme)
        return sample.color("body"), sample.color(paper, "background")

    def drawn(comparison: str, color: str) -> None:
        """Wait for the chart, which is drawn again a moment after the theme turns."""
        background = "getComputedStyle(document.querySelector('section#bars .main-svg')).background"
        sample.page.wait_for_function(f"color => {background} {comparison} color", arg=color)

    sample.section("bars")
    light = colors("light")
    sample.page.emulate_media(color_scheme="dark")
    drawn("!==", light[1])
    dark = colors()
    assert light[0] != dark[0] and light[1] != dark[1]
    sample.page.click("#theme")
    drawn("===", light[1])
    assert colors() == light
    sample.page.keyboard.press("t")
    drawn("===", dark[1])
    assert colors() == dark
    sample.section("overview")  # a chart that is out of sight when the theme turns
    sample.page.keyboard.press("t")
    sample.section("bars")
    sample.page.wait_for_function(
        "color => getComputedStyle(document.querySelector('section#bars .main-svg')).background === color",
        arg=light[1],
    )
    sample.page.emulate_media(color_scheme="light")


def test_keys_and_links_go_between_sections(sample):
    sample.section("kernels")
    page = sample.page
    current = "document.querySelector('section.current').id"

    assert page.evaluate(current) == "kernels"
    page.keyboard.press("1")
    page.wait_for_selector("section#overview.current")
    page.keyboard.press("]")
    page.wait_for_selector("section#kernels.current")
    page.keyboard.press("[")
    page.wait_for_selector("section#overview.current")
    page.click("nav a:has-text('Ranks')")
    page.wait_for_selector("section#ranks.current")
    page.go_back()
    page.wait_for_selector("section#overview.current")
    page.keyboard.press("?")
    assert page.is_visible("#keys")
    page.keyboard.press("Escape")


def test_a_chart_is_saved_as_a_picture(sample):
    sample.section("parts")
    with sample.page.expect_download() as download:
        sample.page.click("section#parts [data-png]")

    assert download.value.suggested_filename == "parts.png"
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_a_name_of_the_legend_hides_its_series(sample):
    sample.section("parts")
    bars = "section#parts .bars .point"
    assert len(sample.page.query_selector_all(bars)) == 2
    sample.page.click("section#parts .legend button >> nth=0")
    assert len(sample.page.query_selector_all(bars)) == 1
    sample.page.click("section#parts .legend button >> nth=0")


@pytest.mark.long
def test_all_sections_are_there_on_paper_and_without_a_script(sample, chromium, tmp_path):
    visible = "all => all.filter(one => one.getBoundingClientRect().height > 0).length"
    number = len(sample.sections())

    assert sample.page.eval_on_selector_all("main > section", visible) == 1
    sample.page.emulate_media(media="print")
    assert sample.page.eval_on_selector_all("main > section:not(#timeline)", visible) == number - 1  # it moves
    sample.page.emulate_media(media="screen")
    path = write_report(sample_report(), tmp_path / "bare.html")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    text = page.inner_text("main")
    context.close()
    assert "12.3 ms" in text and "kernel_49" in text and "stepscope run" in text


def test_nothing_moves_after_the_first_paint(sample_tab):
    assert sample_tab[1] < 0.01


@pytest.mark.long
def test_charts_that_were_left_before_plotly_was_there_are_drawn_on_the_way_back(open_page):
    opened = open_page(sample_report("&lt;b&gt;"))
    page = opened.page
    page.evaluate("""() => {
        const whole = Response.prototype.arrayBuffer;
        const asked = new Promise((release) => (window.release = release));
        Response.prototype.arrayBuffer = async function () { await asked; return whole.call(this); };
    }""")
    page.evaluate("location.hash = 'bars'")
    page.wait_for_selector("#plotly-blob", state="detached")  # being unpacked
    page.evaluate("location.hash = 'explore'")
    page.wait_for_selector(".explorer .legend b")
    assert page.inner_text(".explorer .legend b >> nth=1") == "&lt;b&gt;"  # a name that looks like escaped markup
    page.evaluate("location.hash = 'overview'")
    page.wait_for_selector("section#overview.current")
    page.evaluate("window.release()")
    page.wait_for_function("() => window.Plotly")

    opened.section("bars")
    opened.section("explore")


def test_an_address_that_is_none_shows_the_first_section(open_page):
    page = open_page(sample_report(), "#%E0%A4").page

    assert page.is_visible("section#overview")


@pytest.mark.long
def test_the_csv_of_a_page_is_that_of_a_folder(open_page):
    names = [
        "=1+1",
        "  =1+1",
        '"=1+1',
        "＝1+1",
        "＠SUM(A1)",
        "a;=1+1",
        "-1",
        "-x",
        "a, b",
        'say "so"',
        "",
        EVIL,
        "x" * 3000,
    ]
    figures = [1e-7, 3.0, 2**60 + 1, -5, None, float("nan"), 1e22, 0.1 + 0.2, 1, 2, 3, 4, 5]
    hostile = {
        "=name": names, "total_ns": figures, "is_on": [True, False, None] * 4 + [True], "mixed": [1234, *names[1:]]
    }  # fmt: skip
    tables = [Table("hostile", "hostile", hostile), Table("one", "one", {"one": ["a", None, "b"]})]
    page = open_page(Document("csv", "", (Section("tables", "Tables", tuple(tables)),))).page
    for number, own in enumerate(tables):
        with page.expect_download() as download:
            page.click(f"[data-table='{number}'] .tools button")

        assert Path(download.value.path()).read_text(encoding="utf-8") == csv_of(own)


def test_a_finding_leads_to_its_place_to_the_nanosecond(open_page):
    start_ns = 1_700_000_000_000_000_000
    trace = TraceBuilder().op("aten::mm", start_ns / 1000, 50).op("aten::mm", start_ns / 1000 + 900, 50)
    report = sample_report(places=((start_ns + 1_001, start_ns + 2_003),))
    timeline = Section("timeline", "Timeline", (timeline_of(trace.linked()),))
    opened = open_page(replace(report, sections=(*report.sections[:1], timeline)))
    follow(opened)

    assert opened.page.evaluate("stepscopeTimeline.spans") == [[1_001, 2_003]]
