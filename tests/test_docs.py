"""The documentation says what the code does: tables made from the classes, fields that are really written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stepscope
from stepscope.border import LIMITS
from stepscope.recorder.windows import Windows
from stepscope.trace.recording import RecordingFacts, StepSample

ROOT = Path(__file__).parents[1]


def test_the_tables_are_up_to_date(forks, tmp_path):
    exit_code, said, complained = forks.run([str(ROOT / "scripts" / "make_docs.py"), "--check"], tmp_path, {})
    assert exit_code == 0, said + complained


def test_every_field_that_is_written_is_documented(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.record(tmp_path / "run", windows=Windows(warmup=2, clean=2, trace=1)):
        for _ in range(8):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    facts = json.loads((tmp_path / "run" / "recording.json").read_text())
    assert set(facts) <= set(RecordingFacts.__annotations__)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {name for line in lines for name in line} <= {*StepSample.__dataclass_fields__, "restart"}
    assert {"trace", "flops", "memory", "parameters"} <= set(facts)


def test_a_page_names_every_verb():
    from stepscope.cli.main import VERBS

    text = (ROOT / "docs" / "commands.md").read_text()
    assert all(f"stepscope {verb}" in text for verb in VERBS)


def test_the_readme_takes_two_minutes_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()

    assert len(text.split()) < 500 and text.count("![") == 3
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert len(targets) > 20 and all((ROOT / target).exists() for target in targets)


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path / "site"]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    )

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file() and (tmp_path / "site" / "how-to" / "idle-gpu.html").is_file()


def test_the_tests_that_the_threat_model_names_exist():
    text = (ROOT / "docs" / "security.md").read_text()
    named = re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", text)

    assert len(set(named)) > 12 and all((ROOT / name).is_file() for name in named)


def test_every_limit_is_documented_with_its_default():
    page = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8")
    for name, most in LIMITS.items():
        assert f"| `STEPSCOPE_MAX_{name}` | {most:,} |" in page
    assert page.count("STEPSCOPE_MAX_") == len(LIMITS) + 1  # and where one of them needs --no-cache
