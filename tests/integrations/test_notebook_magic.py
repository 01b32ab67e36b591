"""`%load_ext stepscope` in a real kernel: a cell that trains is recorded and shown, timeline included."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope import read

nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel")
NotebookClient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel").NotebookClient
pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")

SOURCE = str(Path(__file__).parents[2] / "src")
SETUP = """
import torch
from torch import nn
%load_ext stepscope
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAIN = """%%stepscope -o runs/cell --warmup 2 --clean 3 --trace 1
for step in range(10):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
seen = step
"""
FAIL = """%%stepscope -o runs/failed --warmup 2 --clean 2 --trace 0
for step in range(5):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
raise KeyError("mine")
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook")
    names = {
        "setup": SETUP,
        "train": TRAIN,
        "after": "seen, type(optimizer).__name__",
        "diagnose": "import stepscope\nstepscope.diagnose('runs/cell')",
        "again": "%stepscope runs/cell",
        "repr": "print(repr(stepscope.read('runs/cell')))",
        "fail": FAIL,
        "numbered": "%%stepscope --trace 0\nmodel(torch.randn(4, 8))",
        "nothing": "%stepscope runs/nothing",
        "options": "%%stepscope --wormup 3\npass",
        "taken": "%%stepscope -o runs/cell\nmodel(torch.randn(4, 8))",
        "unload": "%unload_ext stepscope\n%stepscope runs/cell",
        "reload": "%load_ext stepscope\n%stepscope runs/nothing",
    }
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in names.values()])
    client = NotebookClient(
        book, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    path = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))
    client.execute(env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    return folder, dict(zip(names, book.cells)), book


def html_of(cell) -> str:
    return next(output["data"]["text/html"] for output in cell.outputs if "data" in output)


def text_of(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_cell_is_recorded_in_the_notebooks_own_names(cells):
    folder, by_name, _ = cells

    assert by_name["after"].outputs[0]["data"]["text/plain"] == "(9, 'SGD')"
    assert read(folder / "runs" / "cell").to_json()["num_steps"] == 10
    assert json.loads((folder / "runs" / "cell" / "recording.json").read_text())["status"] == "finished"


def test_it_is_shown_with_its_timeline_in_a_frame_of_its_own(cells):
    shown = html_of(cells[1]["train"])

    assert "samples/s" in shown and "forward" in shown
    assert shown.count("<iframe") == 1 and 'sandbox="allow-scripts"' in shown
    outside = re.sub(r'srcdoc="[^"]*"', "", shown)
    assert "<script" not in outside
    assert "timeline-blob" in shown and "id=&quot;plotly-blob" not in shown
    assert html_of(cells[1]["again"]).count("<iframe") == 1


def test_a_folder_without_a_name_has_the_number_of_its_cell(cells):
    assert f"runs/notebook-{cells[1]['numbered'].execution_count}-" in text_of(cells[1]["numbered"])


def test_results_show_themselves_and_have_a_readable_repr(cells):
    assert "<table" in html_of(cells[1]["diagnose"])
    assert text_of(cells[1]["repr"]).startswith("<Card: ")


def test_an_error_of_the_cell_stays_its_own_and_the_recording_is_whole(cells):
    folder, by_name, _ = cells
    error = next(output for output in by_name["fail"].outputs if output.output_type == "error")

    told = re.sub("\x1b\\[[0-9;]*m", "", "".join(error["traceback"]))
    assert error["ename"] == "KeyError" and 'raise KeyError("mine")' in told
    recording = json.loads((folder / "runs" / "failed" / "recording.json").read_text())
    assert recording["status"] == "failed"


@pytest.mark.parametrize(
    ("name", "said"), [("nothing", "runs/nothing does not exist"), ("options", "--wormup"), ("taken", "runs/cell")]
)
def test_what_cannot_be_done_is_said_in_a_line(cells, name, said):
    cell = cells[1][name]

    assert text_of(cell).startswith("stepscope: ") and said in text_of(cell)
    assert not [output for output in cell.outputs if output.output_type == "error"]


def test_the_magics_can_be_unloaded_and_loaded_again(cells):
    told = text_of(cells[1]["unload"])

    assert "`%stepscope` not found" in told and "doesn't define how to unload it" not in told
    assert text_of(cells[1]["reload"]).startswith("stepscope: ")


LOOK = """
import sys
from playwright.sync_api import sync_playwright

with sync_playwright() as started:
    browser = started.chromium.launch(executable_path=sys.argv[1], args=["--no-sandbox"])
    tab = browser.new_page()
    tab.on("pageerror", lambda error: sys.exit(f"an error in the page: {error}"))
    tab.goto(sys.argv[2])
    frame = tab.frame_locator("iframe")
    frame.locator("canvas").first.wait_for(timeout=60_000)
    print(frame.locator("#timeline-root").inner_text())
    browser.close()
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_frame_draws_the_timeline_in_a_browser(cells, tmp_path):
    pytest.importorskip("playwright")
    page = tmp_path / "cell.html"
    page.write_text(f"<!doctype html><meta charset=utf-8>{html_of(cells[1]['train'])}", encoding="utf-8")
    # In a process of its own: the kernel's client leaves an event loop behind.
    words = [sys.executable, "-c", LOOK, str(shutil.which("chromium")), page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert "events drawn" in done.stdout
