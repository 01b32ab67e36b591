"""`analyze` and `diagnose` asked twice: the second answer is the first, until anything it depends on changes."""

from __future__ import annotations

import os

import pytest
from analyze_verb import training

from parametrized import parametrized
from stepscope.cli.main import main
from stepscope.cli.support import answers, options
from stepscope.errors import StepscopeError


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(answers, "_SETTLED_NS", 0)
    return training().write(tmp_path / "trace.json.gz")


@pytest.fixture
def ask(capsys):
    def ask(*words):
        assert main(list(map(str, words))) == 0
        return capsys.readouterr().out

    return ask


def unreadable(*_, **__):
    raise StepscopeError("read again")


@pytest.mark.parametrize("words", [["analyze"], ["analyze", "--json"], ["diagnose"], ["analyze", "--copies"]])
def test_a_second_answer_reads_nothing(trace, ask, monkeypatch, words):
    first = ask(*words, trace)
    monkeypatch.setattr(options, "open_session", unreadable)
    assert len(first) > 100
    assert ask(*words, trace) == first


@parametrized(
    "change", ["trace", "option", "terminal", "setting", "damage", "others", "no cache", "measured rates"], quick=4
)
def test_an_answer_to_another_question_is_not_used(trace, ask, monkeypatch, tmp_path, change):
    folder = tmp_path / "cache" / answers.FOLDER
    ask("analyze", trace)
    words = ["analyze", trace]
    if change == "trace":
        os.utime(trace)
    elif change == "option":
        words += ["--top", "3"]
    elif change == "terminal":
        monkeypatch.setenv("COLUMNS", "70")
    elif change == "setting":
        monkeypatch.setenv("STEPSCOPE_MAX_NAME", "50")
    elif change == "damage":
        [file] = folder.iterdir()
        file.write_bytes(file.read_bytes()[:-2] + b"9\n")
    elif change == "others":
        folder.chmod(0o777)
    elif change == "no cache":
        words.append("--no-cache")
    else:
        (tmp_path / "cache" / "ceilings.json").write_text("{}")
    monkeypatch.setattr(options, "open_session", unreadable)
    assert main(list(map(str, words))) == 2


def test_what_is_not_kept(trace, ask, monkeypatch, tmp_path):
    folder = tmp_path / "cache" / answers.FOLDER
    ask("analyze", trace, "--no-cache")
    monkeypatch.setattr(answers, "_SETTLED_NS", 10**18)  # it may change again unnoticed
    ask("analyze", trace)
    assert not folder.exists()


def test_the_oldest_answers_go(trace, ask, monkeypatch, tmp_path):
    folder = tmp_path / "cache" / answers.FOLDER
    ask("analyze", trace)
    [old] = folder.iterdir()
    os.utime(old, (0, 0))
    monkeypatch.setattr(answers, "_MOST_BYTES", 2 * old.stat().st_size - 1)
    ask("analyze", trace, "--top", "7")
    assert old not in folder.iterdir() and len(list(folder.iterdir())) == 1
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in folder.iterdir())
