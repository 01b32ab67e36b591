"""The report, the live page and the documentation pass axe's audit, and a report fits on ten printed pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
from test_live_page import Served

from conftest import opened_page
from parametrized import parametrized
from report_samples import sample_report
from stepscope import report
from stepscope.render.write import write_report

pytest.importorskip("axe_playwright_python", reason="axe is not installed")
ROOT = Path(__file__).parents[2]
AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
LOOKS = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}
SITE = ("index", "tutorial", "how-to/idle-gpu", "commands", "findings/waiting_for_data", "trace-speed")


def violations(page) -> list[str]:
    """Return what axe finds in a page, in one line each."""
    if not page.evaluate("() => Boolean(window.axe)"):
        page.evaluate(AXE)
    found = page.evaluate("() => axe.run({ resultTypes: ['violations'] })")["violations"]
    return [f"{rule['id']}: {node['html'][:200]}" for rule in found for node in rule["nodes"]]


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return write_report(sample_report(), tmp_path_factory.mktemp("axe") / "page.html")


@parametrized("look", LOOKS, quick=1)
def test_the_report_passes(look, chromium, sample):
    """Its first section; the others with `long`."""
    opened = opened_page(chromium, sample, bypass_csp=True, **LOOKS[look])
    assert violations(opened.page) == []
    opened.page.context.close()


@pytest.mark.long
def test_the_audit_can_fail(chromium, tmp_path):
    path = tmp_path / "page.html"
    path.write_text('<html class="ready"><body><img src="data:,"><p style="color: #ccc">pale</p></body></html>')
    opened = opened_page(chromium, path)
    found = violations(opened.page)
    opened.page.context.close()

    assert {"image-alt", "color-contrast", "html-has-lang"} <= {each.partition(":")[0] for each in found}


@pytest.mark.long
@pytest.mark.parametrize("look", LOOKS)
def test_every_section_passes(look, chromium, sample, tmp_path):
    trace = tmp_path / "trace.html"
    report(ROOT / "tests" / "traces" / "full_logits.slow.json.gz", output=trace)
    found = []
    for path in (sample, trace):
        opened = opened_page(chromium, path, bypass_csp=True, **LOOKS[look])
        for name in opened.sections():
            opened.section(name)
            found += [f"{path.name}#{name}: {each}" for each in violations(opened.page)]
        opened.page.context.close()
    assert found == []


@parametrized("look", LOOKS, quick=1)
def test_the_live_page_passes(look, chromium):
    served = Served()
    context = chromium.new_context(bypass_csp=True, **LOOKS[look])
    page = context.new_page()
    page.goto(served.server.address)
    page.wait_for_selector("main")
    found = violations(page)
    context.close()
    served.server.shutdown()
    served.server.server_close()

    assert found == []


@pytest.mark.long
def test_the_documentation_passes(chromium, tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path / "site"]
    subprocess.run(words, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    found = []
    for look, options in LOOKS.items():
        context = chromium.new_context(**options)
        for name in SITE:
            page = context.new_page()
            page.goto((tmp_path / "site" / f"{name}.html").as_uri())
            found += [f"{name} {look}: {each}" for each in violations(page)]
            page.close()
        context.close()
    assert found == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["compatibility/recording-1", "traces/full_logits.slow.json.gz"])
def test_a_report_takes_ten_printed_pages(name, chromium, tmp_path):
    report(ROOT / "tests" / name, output=tmp_path / "page.html")
    opened = opened_page(chromium, tmp_path / "page.html")
    printed = opened.page.pdf(format="A4")
    opened.page.context.close()

    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 10
