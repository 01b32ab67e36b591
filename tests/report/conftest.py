"""A real browser for the page of a report: what it logs, and what it asks the network for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stepscope.document.model import Document
from stepscope.render.write import write_report

CHROMIUM = os.environ.get("STEPSCOPE_CHROMIUM") or shutil.which("chromium")


@dataclass
class Opened:
    """A page in a browser, and everything it should not have done."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def section(self, name: str) -> None:
        """Go to a section and wait until its charts are drawn."""
        self.page.evaluate("name => { location.hash = name }", name)
        self.page.wait_for_selector(f"section#{name}.current")
        self.drawn()

    def drawn(self) -> None:
        """Wait for the charts in view."""
        self.page.wait_for_function(
            """() => [...document.querySelectorAll("section.current .plot")].every((plot) => {
                const { top, bottom } = plot.getBoundingClientRect();
                return bottom < 0 || top > innerHeight || plot.querySelector("svg.main-svg");
            })"""
        )

    def sections(self) -> list[str]:
        found: list[str] = self.page.eval_on_selector_all("main > section", "all => all.map(one => one.id)")
        return found

    def color(self, selector: str, which: str = "backgroundColor") -> str:
        found: str = self.page.eval_on_selector(selector, f"one => getComputedStyle(one).{which}")
        return found


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, for all tests of a worker."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium, or set STEPSCOPE_CHROMIUM to its path")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened_page(chromium: Any, path: Path, fragment: str = "", **options: Any) -> Opened:
    """An HTML file in a browser's context of its own; `options` are the context's."""
    context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    page = context.new_page()
    page.set_default_timeout(20_000)
    opened = Opened(page)
    page.on("console", lambda said: opened.complaints.append(f"{said.type}: {said.text}"))
    page.on("pageerror", lambda error: opened.complaints.append(f"error: {error}"))
    url = path.resolve().as_uri()

    def asked(request: Any) -> None:
        if not request.url.startswith((url, "data:", "blob:")):
            opened.complaints.append(f"request: {request.url}")

    page.on("request", asked)
    page.goto(f"{url}{fragment}")
    page.wait_for_selector("html.ready", state="attached")
    return opened


@pytest.fixture
def open_page(chromium, tmp_path):
    """Opens a report or an HTML file; the test fails in the end if the page logged an error or made a request.

    `opened = open_page(report, color_scheme="dark")`; further arguments are of a browser's context.
    """
    every: list[Opened] = []

    def open_it(what: Document | Path, fragment: str = "", **options: Any) -> Opened:
        path = write_report(what, tmp_path / f"page{len(every)}.html") if isinstance(what, Document) else what
        opened = opened_page(chromium, path, fragment, **options)
        every.append(opened)
        return opened

    yield open_it
    complaints = [complaint for opened in every for complaint in opened.complaints]
    for opened in every:
        opened.page.context.close()
    assert complaints == []
