"""Shell completion and help: what a user sees before any verb runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stepscope.cli.main import GROUPS, RENAMED, VERBS, main
from verbs import run_verb

MOST_VERBS = 21
MOST_HELP = 60


def complete(line: str) -> list[str]:
    """What argcomplete answers a shell for a line, through a file as `register-python-argcomplete` does."""
    pytest.importorskip("argcomplete")
    read, write = os.pipe()
    code = f"import os; os.dup2({write}, 8); from stepscope.cli.main import main; main()"
    variables = {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **variables}, pass_fds=(write,), check=True)
    os.close(write)
    with os.fdopen(read) as answer:
        return answer.read().split()


def test_verbs_and_their_options_are_completed():
    assert {"diagnose", "doctor"} <= set(complete("stepscope d"))
    assert "--exit-after" in complete("stepscope run --exit")


def test_verbs_are_few_and_each_has_a_short_line():
    assert len(VERBS) <= MOST_VERBS and sum(map(len, GROUPS.values())) == len(VERBS)
    assert all(len(text) <= MOST_HELP for text in VERBS.values())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_screen(verb):
    done = run_verb(verb, "--help")

    assert done.returncode == 0 and done.stdout.startswith(f"usage: stepscope {verb}") and "examples:" in done.stdout


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["anlyze"], "Did you mean 'analyze'?"),
        (["card"], "stepscope show"),
        (["show", "--jsn"], "Did you mean '--json'?"),
        (["bench", "--check", "speed"], "compile, dtypes, precision"),
    ],
)
def test_a_near_miss_gets_a_hint(words, hint):
    done = run_verb(*words)

    assert done.returncode == 2 and hint in done.stderr and len(done.stderr.splitlines()) == 1


def test_what_was_renamed_leads_to_a_verb_that_exists():
    assert all(instead.split()[0] in VERBS for instead in RENAMED.values())


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("[tool.stepscope.show]\njson = true\n", None),
        ("[tool.stepscope.show]\njson = 3\n", "must be true or false"),
        ('[tool.stepscope.show]\ncolor = "red"\n', "has no key 'color'"),
    ],
)
def test_settings_are_defaults_and_unknown_ones_are_errors(tmp_path, monkeypatch, capsys, table, problem):
    (tmp_path / "pyproject.toml").write_text(table)
    monkeypatch.chdir(tmp_path)

    assert main(["show", "nothing-here"]) == 2
    assert (problem or "nothing-here") in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "key"), [("verify", "yes"), ("report", "force"), ("run", "force")])
def test_a_file_cannot_give_the_user_s_consent(tmp_path, monkeypatch, capsys, verb, key):
    """It may have come with somebody else's folder."""
    (tmp_path / "pyproject.toml").write_text(f"[tool.stepscope.{verb}]\n{key} = true\n")
    monkeypatch.chdir(tmp_path)

    assert main([verb, "nothing-here"]) == 2
    assert f"has no key '{key}'" in capsys.readouterr().err
