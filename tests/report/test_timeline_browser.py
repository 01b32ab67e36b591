"""The timeline in a real browser: what is drawn, found, selected and moved to."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepscope.render.page
from parametrized import parametrized
from stepscope.document.model import Timeline
from stepscope.document.sections.timeline import timeline_of
from trace_builder import TraceBuilder

FOLDER = Path(stepscope.render.page.__file__).parent
SCRIPTS = [FOLDER / f"timeline{part}.js" for part in ("_data", "_draw", "_details", "_move", "")]
EVIL = "</script><img src=x onerror=window.evil=1>\u202e<b>bold</b>"
PAGE = """<!doctype html><meta charset="utf-8"><title>timeline</title>
<style>:root {{ --bg: #fff; --fg: #111; }} :root[data-theme=dark] {{ --bg: #101418; --fg: #eee; }}</style>
<div id="root"></div>
<script type="application/json" id="meta">{meta}</script>
<script type="application/octet-stream" id="blob">{blob}</script>
<script>(() => {{ "use strict"; {script} }})()</script>
<script>(async () => {{
  const packed = Uint8Array.from(atob(document.getElementById("blob").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const meta = JSON.parse(document.getElementById("meta").textContent);
  new StepscopeTimeline(document.getElementById("root"), meta, await new Response(stream).arrayBuffer());
}})()</script>"""


def page_with(timeline: Timeline) -> str:
    meta = json.dumps(timeline.meta).replace("<", "\\u003c")
    blob = base64.b64encode(timeline.blob).decode()
    return PAGE.format(meta=meta, blob=blob, script="".join(path.read_text(encoding="utf-8") for path in SCRIPTS))


def training() -> TraceBuilder:
    """Two steps of 1 ms; the launch of the softmax is 10 µs and it runs 340 µs later."""
    trace = TraceBuilder()
    for step in range(2):
        start = 1000 * step
        trace.step(step, start, 990).op("aten::linear", start + 10, 200)
        for number in range(20):
            trace.launch("void gemm_kernel<float>(int)", start + 12 + 9 * number, (start + 60 + 12 * number, 8))
    trace.op("aten::softmax", 300, 30, id=5, **{"Input Dims": [[16, 8]]})
    trace.launch("softmax_warp_forward", 310, (650, 4), took=10, id=5)
    trace.op(EVIL, 400, 50)
    for number in range(60):
        trace.memory(number * 20, 4096)
    return trace


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("timeline") / "page.html"
    path.write_text(page_with(timeline_of(training().linked())), encoding="utf-8")
    return path


@pytest.fixture
def tab(chromium: Any, html: Path) -> Iterator[Any]:
    """The page; a script that fails, or that asks the network for anything, fails the test."""
    context = chromium.new_context(viewport={"width": 1200, "height": 800}, reduced_motion="reduce")
    page = context.new_page()
    faults: list[str] = []
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: faults.append(request.url) if request.url != html.as_uri() else None)
    page.goto(html.as_uri())
    page.wait_for_function("window.stepscopeTimeline")
    yield page
    context.close()
    assert faults == []


def drawn(tab: Any) -> list[str]:
    tab.evaluate("window.stepscopeTimeline.paint()")
    return tab.evaluate("window.stepscopeTimeline.labelsDrawn")


def test_zooming_to_a_kernel_shows_its_name(tab):
    assert "softmax_warp_forward" not in drawn(tab)

    tab.evaluate(
        """() => { const t = window.stepscopeTimeline; t.find("softmax_warp"); t.zoomTo(t.matches.order[0]); }"""
    )

    assert "softmax_warp_forward" in drawn(tab)


@pytest.mark.long
def test_the_wheel_zooms_where_the_pointer_is_and_a_drag_moves(tab):
    box = tab.locator("canvas").bounding_box()
    x, y = round(box["x"] + box["width"] * 0.6), round(box["y"] + 80)
    time_at = f"window.stepscopeTimeline.timeAt({x - box['x']})"
    before, held = tab.evaluate("window.stepscopeTimeline.range"), tab.evaluate(time_at)

    tab.mouse.move(x, y)
    for _ in range(5):
        tab.mouse.wheel(0, -150)
    tab.wait_for_function(f"window.stepscopeTimeline.range.endNs < {before['endNs']}")

    after = tab.evaluate("window.stepscopeTimeline.range")
    assert after["endNs"] - after["startNs"] < (before["endNs"] - before["startNs"]) / 2
    assert tab.evaluate(time_at) == pytest.approx(held, rel=1e-6)

    tab.mouse.down()
    tab.mouse.move(x - 100, y, steps=3)
    tab.mouse.up()
    moved = tab.evaluate("window.stepscopeTimeline.range")
    assert moved["startNs"] > after["startNs"]
    assert moved["endNs"] - moved["startNs"] == pytest.approx(after["endNs"] - after["startNs"])


def test_show_goes_to_a_stretch_of_the_traces_clock_with_a_margin(tab):
    tab.evaluate("window.stepscopeTimeline.show(600000, 700000, [[600000, 620000], [650000, 700000]])")

    seen = tab.evaluate("window.stepscopeTimeline.range")
    assert 560_000 < seen["startNs"] < 600_000 and 700_000 < seen["endNs"] < 740_000
    assert tab.evaluate("window.stepscopeTimeline.spans.length") == 2
    tab.evaluate("window.stepscopeTimeline.show('600000', 700000n)")  # as text, as a whole number: the same
    assert tab.evaluate("window.stepscopeTimeline.range") == seen


def test_a_search_counts_and_goes_from_match_to_match(tab):
    tab.locator("canvas").focus()
    tab.keyboard.press("/")
    tab.keyboard.type("gemm_kernel")
    tab.keyboard.press("Enter")
    assert tab.locator(".stt-count").text_content() == "1 of 40 events"
    first = tab.evaluate("window.stepscopeTimeline.selected")
    assert first["label"] == "gemm_kernel" and first["name"] == "void gemm_kernel<float>(int)"

    tab.locator("canvas").focus()
    tab.wait_for_timeout(200)  # until a search that still waits for more to be typed would have come
    tab.keyboard.press("n")
    second = tab.evaluate("window.stepscopeTimeline.selected")
    assert second["startNs"] == first["startNs"] + 12_000
    tab.keyboard.press("N")
    assert tab.evaluate("window.stepscopeTimeline.selected.index") == first["index"]
    tab.keyboard.press("Escape")
    assert tab.evaluate("window.stepscopeTimeline.selected") is None


def test_a_click_tells_and_leads_from_the_kernel_to_its_launch_and_back(tab):
    where = tab.evaluate(
        """() => { const t = window.stepscopeTimeline; t.find("softmax_warp");
        const event = t.matches.order[0]; t.zoomTo(event); t.paint(); const box = t.boxOf(event);
        return { x: box.x + box.width / 2, y: box.y + box.height / 2 }; }"""
    )
    box = tab.locator("canvas").bounding_box()
    tab.mouse.click(box["x"] + where["x"], box["y"] + where["y"])

    panel = tab.locator(".stt-panel")
    told = panel.inner_text()
    assert "softmax_warp_forward" in told and "aten::softmax" in told and "[[16, 8]]" in told
    assert "4 µs, starts at 650 µs" in told and "started 330 µs after its launch returned" in told
    assert "kernel softmax_warp_forward, 4 µs" in tab.locator("[aria-live]").text_content()

    panel.get_by_text("cudaLaunchKernel").click()
    selected = tab.evaluate("window.stepscopeTimeline.selected")
    assert (selected["name"], selected["startNs"], selected["durationNs"]) == ("cudaLaunchKernel", 310_000, 10_000)
    panel.get_by_text("softmax_warp_forward").click()
    assert tab.evaluate("window.stepscopeTimeline.selected.kind") == "kernel"


def test_keys_move_zoom_and_step_from_event_to_event(tab):
    tab.locator("canvas").focus()
    whole = tab.evaluate("window.stepscopeTimeline.range")
    tab.keyboard.press("+")
    near = tab.evaluate("window.stepscopeTimeline.range")
    assert near["endNs"] - near["startNs"] == pytest.approx((whole["endNs"] - whole["startNs"]) / 2)
    tab.keyboard.press("d")
    assert tab.evaluate("window.stepscopeTimeline.range.startNs") > near["startNs"]
    tab.keyboard.press("0")
    assert tab.evaluate("window.stepscopeTimeline.range") == whole
    tab.keyboard.press("Enter")
    first = tab.evaluate("window.stepscopeTimeline.selected.index")
    tab.keyboard.press("Shift+ArrowDown")
    assert tab.evaluate("window.stepscopeTimeline.selected.lane") > 0
    assert tab.evaluate("window.stepscopeTimeline.selected.index") != first


@pytest.mark.long
def test_a_track_folds(tab):
    rows = tab.evaluate("window.stepscopeTimeline.rows.length")
    head = tab.evaluate(
        "window.stepscopeTimeline.heads.find((head) => head.folds && head.title.startsWith('main')).y"
    )
    box = tab.locator("canvas").bounding_box()

    tab.mouse.click(box["x"] + 20, box["y"] + head + 8)

    assert tab.evaluate("window.stepscopeTimeline.rows.length") < rows


@pytest.mark.long
def test_dark_is_dark_and_a_chosen_theme_wins(tab):
    corner = """() => { const t = window.stepscopeTimeline; t.paint();
        return [...t.context.getImageData(t.canvas.width - 3, t.canvas.height - 3, 1, 1).data].slice(0, 3); }"""
    assert tab.evaluate(corner) == [255, 255, 255]

    tab.evaluate("document.documentElement.dataset.theme = 'dark'")

    assert tab.evaluate(corner) == [0x10, 0x14, 0x18]


def test_names_are_text(tab):
    tab.evaluate("""() => { const t = window.stepscopeTimeline; t.find("onerror"); t.next(1); }""")

    assert tab.evaluate("window.stepscopeTimeline.numMatches") == 1
    told = tab.locator(".stt-panel").inner_text()
    assert "</script><img src=x onerror=window.evil=1>" in told and "<b>bold</b>" in told and "\u202e" not in told
    assert tab.evaluate("window.evil") is None and tab.locator(".stt img").count() == 0


def test_a_call_that_is_shown_twice_counts_once_and_a_thinned_trace_says_what_is_counted(chromium, tmp_path):
    trace = TraceBuilder()
    for number in range(10):
        trace.launch("ncclDevKernel_AllReduce", 100 * number, (100 * number + 20, 30), stream=7)
    trace.launch("gemm", 1000, (1020, 30), stream=7)
    told = []
    for most_events in (1000, 24):  # all of them; the twenty kernels, and hardly a call
        path = tmp_path / f"{most_events}.html"
        path.write_text(page_with(timeline_of(trace.linked(), most_events)), encoding="utf-8")
        page = chromium.new_page()
        page.goto(path.as_uri())
        page.wait_for_function("window.stepscopeTimeline")
        page.evaluate("""() => { const t = window.stepscopeTimeline; t.find("AllReduce"); t.next(1); }""")
        told.append((page.inner_text(".stt-panel"), page.inner_text(".stt-count")))
        page.close()

    assert "10 events, 300 µs in total find all" in told[0][0] and told[0][1] == "1 of 10 events"
    assert " in total (of events drawn individually) find all" in told[1][0]
    assert told[1][1].endswith(" drawn individually")


@pytest.mark.long
def test_kernels_of_a_launch_are_looked_for_once_not_at_every_paint(tab):
    found = tab.evaluate("""() => {
        const t = window.stepscopeTimeline, look = t.data.kernelsOf;
        let asked = 0;
        t.data.kernelsOf = (launch) => { asked++; return look.call(t.data, launch); };
        t.find("cudaLaunchKernel");
        t.next(1);
        for (let i = 0; i < 5; i++) t.paint();
        return [asked, t.kernels.length];
    }""")

    assert found == [1, 1]


@parametrized("trace", [TraceBuilder().slice("x", "nothing", 0, 1), TraceBuilder().op("one", 0, 0)], quick=1)
def test_next_to_nothing_is_drawn_without_a_fault(chromium, tmp_path, trace):
    path = tmp_path / "page.html"
    path.write_text(page_with(timeline_of(trace.linked())), encoding="utf-8")
    page = chromium.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_function("window.stepscopeTimeline")
    page.locator("canvas").focus()
    for key in ("+", "-", "0", "Enter", "n", "Shift+ArrowDown", "Escape"):
        page.keyboard.press(key)
    page.close()
    assert faults == []
