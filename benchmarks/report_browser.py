"""How a report of a large trace feels in a browser: until it is seen, and while it is zoomed and moved.

    python benchmarks/report_browser.py --base TRACE --maker MAKE_BIG_TRACE.py [--events 1000000]
    python benchmarks/report_browser.py --trace TRACE

A large trace is made from a real one by the maker (`MAKER BASE OUT --copies N`), and `stepscope report` makes its
page. Headless Chromium opens it from `file://` at 1400 × 900. First paint is the browser's own; the timeline is
opened by its address, a cold start each time. The gestures are real input, one event after the other; meanwhile the
page notes when each frame began and how long drawing took. A frame is what lies between two beginnings: at 60 Hz no
less than 16.7 ms. Other work on the machine slows all of it: the load is printed with the table.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parents[2] / "shared"
FIRST_PAINT_MS, FRAME_MS = 3000.0, 50.0
NUM_MOVES = 60

RECORD = """() => {
  const seen = window.seenFrames = [], timeline = window.stepscopeTimeline;
  const paint = timeline.paint.bind(timeline);
  timeline.paint = () => { paint(); seen.drawn.push(timeline.lastDrawMs); };
  seen.drawn = [];
  const frame = (now) => { seen.push(now); window.nextFrame = requestAnimationFrame(frame); };
  window.nextFrame = requestAnimationFrame(frame);
}"""
STOP = """() => {
  cancelAnimationFrame(window.nextFrame);
  delete window.stepscopeTimeline.paint;
  const frames = window.seenFrames.slice(1).map((now, i) => now - window.seenFrames[i]);
  return { frames, drawn: window.seenFrames.drawn };
}"""
WHOLE = "() => { const t = window.stepscopeTimeline; const all = t.whole(); t.go(all.start, all.end, false); }"
A_STEP = """() => {
  const t = window.stepscopeTimeline, { start, end } = t.data.steps, last = start.length - 1;
  if (last >= 0) t.go(start[last], end[last], false);
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=SHARED / "traces" / "h200" / "gpt2_eager.json.gz")
    parser.add_argument("--maker", type=Path, default=SHARED / "tools" / "make_big_trace.py")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--trace", type=Path, help="a large trace that is there already")
    parser.add_argument("--page", type=Path, help="a report that is there already: nothing is made")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the trace is made; a temporary folder otherwise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        page = arguments.page or make_page(arguments, Path(folder))
        print(f"page: {page.stat().st_size / 1e6:.2f} MB; {os.cpu_count()} cores, {platform.machine()}\n")
        print_table(measure(arguments, page))


def make_page(arguments: argparse.Namespace, folder: Path) -> Path:
    trace = arguments.trace or make_trace(arguments, folder)
    page = folder / "report.html"
    began = time.perf_counter()
    command = [sys.executable, "-m", "stepscope", "report", str(trace), "-o", str(page), "--no-cache"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"made in {time.perf_counter() - began:.1f} s from {trace.stat().st_size / 1e6:.0f} MB")
    return page


def make_trace(arguments: argparse.Namespace, folder: Path) -> Path:
    with gzip.open(arguments.base) as file:
        num_events = len(json.load(file)["traceEvents"])
    trace = folder / "trace.json"
    copies = math.ceil(arguments.events / num_events)
    maker = [sys.executable, str(arguments.maker), str(arguments.base), str(trace), "--copies", str(copies)]
    subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
    print(f"{copies * num_events:,} events, {copies} copies of {arguments.base.name}")
    return trace


def measure(arguments: argparse.Namespace, page: Path) -> list[dict[str, Any]]:
    from playwright.sync_api import sync_playwright

    runs = []
    with sync_playwright() as playwright:
        for _ in range(arguments.repeat):
            browser = playwright.chromium.launch(executable_path=arguments.chromium, args=["--no-sandbox"])
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            runs.append(one_run(tab, page))
            browser.close()
    return runs


def one_run(tab: Any, page: Path) -> dict[str, Any]:
    """Figures of one cold start, in milliseconds."""
    tab.goto(f"{page.resolve().as_uri()}#timeline")
    tab.wait_for_function("window.stepscopeTimeline", timeout=120_000)
    tab.wait_for_function("performance.getEntriesByType('paint').length > 0")
    figures = tab.evaluate(
        """() => ({ paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
                    drawn: performance.getEntriesByName("stepscope-timeline-drawn")[0].startTime })"""
    )
    box = tab.locator("#timeline-root canvas").bounding_box()
    x, y = box["x"] + box["width"] * 0.7, box["y"] + box["height"] * 0.4

    def wheel(by: float) -> Callable[[int], None]:
        return lambda _: tab.mouse.wheel(0, by)

    def drag(number: int) -> None:
        tab.mouse.move(x - 5 * number, y)

    tab.mouse.move(x, y)
    figures["zoom in"] = gesture(tab, WHOLE, wheel(-60))
    figures["zoom out"] = gesture(tab, "() => {}", wheel(60))
    tab.evaluate(A_STEP)
    tab.mouse.down()
    figures["pan a step"] = gesture(tab, "() => {}", drag)
    tab.mouse.up()
    tab.mouse.move(x, y)
    tab.evaluate(WHOLE)
    tab.evaluate("() => window.stepscopeTimeline.zoom(0.2, 0.5)")
    tab.mouse.down()
    figures["pan a fifth of the trace"] = gesture(tab, "() => {}", drag)
    tab.mouse.up()
    return figures


def gesture(tab: Any, prepare: str, move: Callable[[int], None]) -> dict[str, list[float]]:
    tab.evaluate(prepare)
    tab.evaluate(RECORD)
    for number in range(NUM_MOVES):
        move(number)
    tab.wait_for_timeout(50)
    return tab.evaluate(STOP)


def print_table(runs: list[dict[str, Any]]) -> None:
    print(f"load {os.getloadavg()[0]:.1f}; {len(runs)} cold starts, all their frames together\n")
    print("| what | median ms | p95 ms | max ms | bar | holds |")
    print("|---|---|---|---|---|---|")
    for name, title in (("paint", "first paint"), ("drawn", "until the timeline is drawn")):
        print_row(title, [run[name] for run in runs], FIRST_PAINT_MS if name == "paint" else None)
    for name in [key for key in runs[0] if isinstance(runs[0][key], dict)]:
        print_row(f"{name}: frames", [ms for run in runs for ms in run[name]["frames"]], FRAME_MS)
        print_row(f"{name}: drawing", [ms for run in runs for ms in run[name]["drawn"]], None)


def print_row(title: str, values: list[float], bar: float | None) -> None:
    """The bar is held against the 95th percentile: a single frame belongs to whatever else the machine did."""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    holds = "" if bar is None else "yes" if high < bar else "no"
    shown = "" if bar is None else f"< {bar:g}"
    print(f"| {title} | {statistics.median(ordered):.1f} | {high:.1f} | {ordered[-1]:.1f} | {shown} | {holds} |")


if __name__ == "__main__":
    main()
