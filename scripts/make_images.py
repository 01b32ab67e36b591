"""Makes the pictures of the README and the documentation from the page of a recording, in a real browser.

python scripts/make_images.py RECORDING    # writes docs/images; needs chromium and playwright
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import stepscope

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1180, 760
DRAWN_MS = 2_000


def shoot(page: Page, name: str, anchor: str | None = None, height: int = HEIGHT) -> None:
    """Save what a window of this height shows below an element of the page."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    if anchor is not None:
        page.locator(anchor).first.evaluate("element => element.scrollIntoView()")
    page.wait_for_timeout(DRAWN_MS)
    page.screenshot(path=IMAGES / f"{name}.png")


def main(recording: str) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder) / "page.html"
        stepscope.report(recording, output=file)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(file.as_uri())
        shoot(page, "report-overview", height=1_000)
        shoot(page, "report-ledger", "text=down to what its work needs")
        page.locator("text=Show on the timeline").first.click()
        shoot(page, "report-timeline", "#timeline")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
