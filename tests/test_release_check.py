"""The release checklist refuses a version without its changelog, and says so."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "release_check.py"


@pytest.fixture
def check(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("release_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "src" / "stepscope").mkdir(parents=True)
    (tmp_path / "src" / "stepscope" / "version.py").write_text('__version__ = "0.2.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.2.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n## 0.2.0\n\n- All of it.\n")
    return module


def test_a_version_with_its_section_passes(check):
    assert check.version("0.2.0") == "0.2.0"
    check.changelog("0.2.0")


def test_what_does_not_agree_is_refused(check, tmp_path):
    with pytest.raises(check.Failed, match=r"is 0\.2\.0, not 0\.3\.0"):
        check.version("0.3.0")
    (tmp_path / "CITATION.cff").write_text("version: 0.1.0\n")
    with pytest.raises(check.Failed, match=r"CITATION\.cff says 0\.1\.0"):
        check.version(None)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n- Something.\n")
    with pytest.raises(check.Failed, match="Unreleased"):
        check.changelog("0.2.0")


def test_a_version_is_set_wherever_it_stands(check, tmp_path):
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## Unreleased\n\n- Something.\n\n## 0.2.0\n\n- All of it.\n")
    check.set_version("0.3.0", "2026-12-01")

    assert check.version("0.3.0") == "0.3.0"
    check.changelog("0.3.0")
    titles = [line for line in changes.read_text().splitlines() if line.startswith("## ")]
    assert titles == ["## Unreleased", "## 0.3.0 (2026-12-01)", "## 0.2.0"]
    cited = (tmp_path / "CITATION.cff").read_text()
    assert cited == "cff-version: 1.2.0\nversion: 0.3.0\ndate-released: 2026-12-01\n"
    check.set_version("0.4.0", "2026-12-02")
    assert (tmp_path / "CITATION.cff").read_text() == cited.replace("0.3.0", "0.4.0").replace("-01", "-02")
    with pytest.raises(check.Failed, match="not a version"):
        check.set_version("0.3", "2026-12-01")


def test_a_package_says_where_it_comes_from(check, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nSource = "https://x"\n\n[tool.ruff]\nIssues = 1\n')
    with pytest.raises(check.Failed, match="lacks Documentation, Issues, Changelog"):
        check.urls()


def test_a_command_that_fails_says_how(check):
    with pytest.raises(check.Failed, match=r"ls /nowhere: .*No such file"):
        check.run("env", "ls", "/nowhere", cwd="/")
