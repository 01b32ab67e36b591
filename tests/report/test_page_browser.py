"""The page in a real browser: every section draws, nothing leaves it, nothing of a name runs, and it can be used."""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path

import pytest

from handmade import cpu_facts, cpu_recording, gpu_recording, write_recording
from report_samples import EVIL, SHOWN, sample_report, table
from stepscope.analysis import statistics
from stepscope.report.build import report_of
from stepscope.report.cells import cell
from trace_builder import PUBLIC, TRACES, needs_traces

SWEEP = Path(__file__).parents[2] / "docs" / "results" / "h200" / "cs336"
REAL = [
    "h200/gpt2_eager.json.gz", "h200/llama_compiled.json.gz", "h200/data_stall.json.gz",
    "public/cpu_only_gloo.json.gz", "public/dlrm_8ranks_v100", "public/event_sync_multi_stream_a100.json.gz",
    "public/mi250_minitoy_train_ROCm6_2_kineto.json.gz", "public/qwen0.5b_mi300_stacks.json.gz",
    "public/rank_non_gpu.json.gz", "public/triton_example.json.gz",
]  # fmt: skip
if os.environ.get("STEPSCOPE_ALL_TRACES"):  # five minutes instead of one
    found = [*TRACES.glob("*/*.json.gz"), *PUBLIC.glob("trace_diff/*.json.gz"), PUBLIC / "dlrm_8ranks_v100"]
    REAL = [str(path.relative_to(TRACES)) for path in sorted(found)]


@pytest.fixture(autouse=True)
def quick_and_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(statistics, "NUM_RESAMPLES", 5)


def walk(opened) -> None:
    """Every section, with everything in it scrolled through."""
    for name in opened.sections():
        opened.section(name)
        opened.page.evaluate(
            "for (const plot of document.querySelectorAll('section.current .plot')) plot.scrollIntoView()"
        )
        opened.drawn()
        assert opened.page.inner_text(f"section#{name}").strip()
        wider = opened.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, name


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


@needs_traces
@pytest.mark.parametrize("name", REAL)
def test_every_section_of_a_real_trace(open_page, name, tmp_path):
    path = report_of(TRACES / name, use_cache=False).save(tmp_path / "trace.html")

    assert path.stat().st_size < 6_000_000
    walk(open_page(path))


def test_every_section_of_recordings(open_page, tmp_path):
    walk(open_page(report_of(cpu_recording(tmp_path / "cpu"))))
    walk(open_page(report_of(gpu_recording(tmp_path / "gpu"))))


def test_every_section_of_an_empty_recording(open_page, tmp_path):
    opened = open_page(report_of(write_recording(tmp_path / "empty", cpu_facts(status="interrupted"), [])))
    walk(opened)

    assert opened.page.query_selector(".missing") is not None


def test_every_section_of_a_sweep_on_a_phone(open_page):
    walk(open_page(report_of(SWEEP), viewport={"width": 390, "height": 844}))


def test_a_sweep_over_other_axes(open_page):
    opened = open_page(report_of(SWEEP), "#explore")
    page = opened.page
    page.wait_for_selector(".explorer svg.main-svg")
    before = page.inner_text(".explorer .plot")
    page.select_option(".explorer label:has-text('figure') select", label="peak allocated")
    page.wait_for_function(
        "() => document.querySelector('.explorer .plot').textContent.includes('peak allocated (GiB)')"
    )
    page.select_option(".explorer label:has-text('as') select", label="heat map")
    page.wait_for_selector(".explorer .heatmaplayer image, .explorer .hm image", state="attached")

    assert page.inner_text(".explorer .plot") != before
    assert "oom" in page.inner_text(".explorer .plot")


def test_tables_sort_by_figures_filter_and_show_all(open_page, tmp_path):
    page = open_page(sample_report(), "#kernels").page

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


def test_dark_and_light_follow_the_system_and_the_button(open_page):
    dark = open_page(sample_report(), "#bars", color_scheme="dark")
    light = open_page(sample_report(), "#bars", color_scheme="light")
    for opened in (dark, light):
        opened.drawn()
    paper = "section#bars .main-svg"

    assert dark.colour("body") != light.colour("body")
    assert dark.colour(paper, "background") != light.colour(paper, "background")
    dark.page.click("#theme")
    assert dark.colour("body") == light.colour("body")
    assert dark.colour(paper, "background") == light.colour(paper, "background")
    dark.page.keyboard.press("t")
    assert dark.colour("body") != light.colour("body")


def test_keys_and_links_go_between_sections(open_page):
    page = open_page(sample_report(), "#kernels").page
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


def test_a_chart_is_saved_as_a_picture(open_page):
    opened = open_page(sample_report(), "#parts")
    opened.drawn()
    with opened.page.expect_download() as download:
        opened.page.click("section#parts [data-png]")

    assert download.value.suggested_filename == "parts.png"
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_a_name_of_the_legend_hides_its_series(open_page):
    opened = open_page(sample_report(), "#parts")
    opened.drawn()
    bars = "section#parts .bars .point"
    assert len(opened.page.query_selector_all(bars)) == 2
    opened.page.click("section#parts .legend button >> nth=0")
    assert len(opened.page.query_selector_all(bars)) == 1


def test_all_sections_are_there_on_paper_and_without_a_script(open_page, chromium, tmp_path):
    opened = open_page(sample_report())
    visible = "all => all.filter(one => one.getBoundingClientRect().height > 0).length"
    number = len(opened.sections())

    assert opened.page.eval_on_selector_all("main > section", visible) == 1
    opened.page.emulate_media(media="print")
    assert opened.page.eval_on_selector_all("main > section", visible) == number
    path = sample_report().save(tmp_path / "bare.html")
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    text = page.inner_text("main")
    context.close()
    assert "12.3 ms" in text and "kernel_49" in text and "stepscope run" in text


def test_nothing_moves_after_the_first_paint(open_page):
    page = open_page(sample_report(), "#bars").page
    page.wait_for_selector("section#bars svg.main-svg")
    moved = page.evaluate(
        """() => new Promise((done) => {
            let sum = 0;
            const add = (list) => list.getEntries().forEach((entry) => (sum += entry.value));
            new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
            setTimeout(() => done(sum), 100);
        })"""
    )
    assert moved < 0.01


@needs_traces
def test_a_finding_leads_to_its_place_on_the_timeline(open_page, tmp_path):
    page = open_page(report_of(TRACES / "h200" / "data_stall.json.gz", use_cache=False)).page
    button = page.query_selector("[data-places]")
    page.evaluate("""() => {
        const show = StepscopeTimeline.prototype.show;
        StepscopeTimeline.prototype.show = function (...all) { window.shown = all; return show.apply(this, all); };
    }""")
    first = re.match(r"(\d+)-(\d+)", button.get_attribute("data-places"))
    button.click()
    page.wait_for_function("() => window.shown")

    assert page.evaluate("location.hash") == "#timeline"
    assert page.evaluate("window.shown.slice(0, 2)") == [int(first[1]), int(first[2])]
