"""What `stepscope verify` is told and what it refuses: mistakes in one line, recordings that cannot be run again."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import stepscope
from parametrized import parametrized
from stepscope.cli import verify
from stepscope.cli.main import main
from stepscope.document.findings import diagnosis_document, findings_part
from stepscope.errors import RecordingError, StepscopeError, UsageError
from stepscope.findings.diagnose import Diagnosis
from stepscope.findings.finding import Finding
from stepscope.render.terminal import terminal_text
from stepscope.sweep.record_runs import Command, Options, changes_since, recorded_command, run_again, run_process
from stepscope.user_cache import has_run, note_command


def parsed(*words):
    """What verify reads of the command line: the target with its arguments, and the options."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verify.add_arguments(parser)
    arguments = parser.parse_args(words)
    return verify._own_options(arguments), arguments


@pytest.mark.parametrize(
    ("words", "target", "fixes", "rounds", "as_json"),
    [
        (["train.py", "--lr", "3", "--fix", "a", "--fix=b"], ["train.py", "--lr", "3"], ["a", "b"], 4, False),
        (["--fix", "a", "--rounds", "5", "train.py", "--clean", "9"], ["train.py", "--clean", "9"], ["a"], 5, False),
        (["train.py", "--fix", "a", "--rounds=2", "--json", "x"], ["train.py", "x"], ["a"], 2, True),
        (["--fix", "a", "x.py", "--", "--fix", "b", "--json"], ["x.py", "--fix", "b", "--json"], ["a"], 4, False),
        (["--fix", "a", "--", "x.py", "--", "--json"], ["x.py", "--", "--json"], ["a"], 4, False),
        (["--fix", "a", "-m", "pack.train", "--deep", "--fix", "b"], ["pack.train", "--deep"], ["a", "b"], 4, False),
    ],
)  # fmt: skip
def test_options_stand_before_or_behind_the_script(words, target, fixes, rounds, as_json):
    found, arguments = parsed(*words)

    assert (found, arguments.fix, arguments.rounds, arguments.json) == (target, fixes, rounds, as_json)


def test_all_options_may_stand_behind_a_recording(tmp_path):
    found, arguments = parsed(str(tmp_path), "--fix", "a", "--clean", "9", "-o", "x")

    assert (found, arguments.clean, str(arguments.output)) == ([str(tmp_path)], 9, "x")
    with pytest.raises(UsageError, match="--lr"):
        parsed(str(tmp_path), "--lr", "3")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a recording or a script"),
        (["train.py"], "--fix ID"),
        (["train.py", "--fix", "nosuch"], "Unknown fix 'nosuch'"),
        (["nothing.py", "--fix", "autocast"], "nothing.py is neither"),
        (["--warmup", "3", "train.py", "--fix", "autocast"], "5 is the least"),
        (["-o", ".", "train.py", "--fix", "autocast"], "is not empty"),
    ],
)
def test_a_mistake_is_one_line(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")

    assert main(["verify", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and len(shown.err.splitlines()) == 1


def test_fixes_are_listed_in_both_ways(capsys):
    assert main(["verify", "--fix", "list"]) == 0
    listed = capsys.readouterr().out
    assert main(["list", "fixes"]) == 0
    assert capsys.readouterr().out == listed
    assert re.search(r"unfused_optimizer +.*fused=True", listed)
    assert "attention_backend=flash|efficient|cudnn|math" in " ".join(listed.split())
    assert main(["list", "fixes", "compile", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)["fixes"][0]
    assert entry["id"] == "compile" and "max-autotune" in entry["values"] and entry["losses"] == "reordered"
    assert main(["list", "fixes", "compyle"]) == 2


# --- recordings


def facts(tmp_path, **given):
    (tmp_path / "train.py").write_text("print(1)\n")
    digest = hashlib.sha256(b"print(1)\n").hexdigest()
    command = {"argv": ["train.py", "--lr", "3"], "folder": str(tmp_path), "module": False, "sha256": digest}
    return {"command": command, "config": {"tokens_per_step": 7}, "git": None, "environment": {}, **given}


def test_a_recording_is_run_again_as_it_was(tmp_path):
    recorded = facts(tmp_path)
    command = recorded_command(tmp_path, recorded)

    assert (command.text, command.folder, command.tokens_per_step) == ("train.py --lr 3", tmp_path, 7)
    assert changes_since(command, recorded) == []


def test_a_script_that_changed_is_told(tmp_path):
    recorded = facts(tmp_path, git={"revision": "0123456789abc"})
    (tmp_path / "train.py").write_text("print(2)\n")
    warnings = changes_since(recorded_command(tmp_path, recorded), recorded)

    assert len(warnings) == 2
    assert warnings[0].startswith("train.py has changed") and "0123456789, now" in warnings[1]


@pytest.fixture
def shipped(tmp_path) -> Path:
    """A recording that somebody sent: its script, and git in its repository, leave a mark if they run."""
    mark = tmp_path / "mark"
    (tmp_path / "train.py").write_text(f"open({str(mark)!r}, 'w')\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@y"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "config", "core.fsmonitor", f"touch {mark}; false"], check=True)
    command = {"argv": ["train.py", "--evil\x1b[2J", "a b"], "folder": str(tmp_path), "module": False}
    recording = tmp_path / "recording"
    recording.mkdir()
    (recording / "recording.json").write_text(
        json.dumps({"schema_version": 1, "status": "finished", "command": command})
    )
    return recording


def test_the_command_of_a_recording_is_shown_and_not_run_unless_told(shipped, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # not a terminal

    assert main(["verify", str(shipped), "--fix", "autocast"]) == 2
    said = capsys.readouterr().err
    assert f"cd {shipped.parent} && python train.py '--evil?[2J' 'a b'. If you trust it, add --yes" in said
    assert said.count("\n") == 1
    with pytest.raises(UsageError, match="yes=True"):
        stepscope.verify(shipped, fix="autocast")
    assert not (shipped.parent / "mark").exists()


@pytest.mark.parametrize("answer", ["n\n", "\n", "", "nay\n"])
def test_on_a_terminal_the_user_is_asked(shipped, capsys, monkeypatch, answer):
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    monkeypatch.setattr("stepscope.cli.verify.is_terminal", lambda stream: True)

    assert main(["verify", str(shipped), "--fix", "autocast"]) == 2
    said = capsys.readouterr().err
    assert "python train.py" in said and "[y/N]" in said and said.endswith("nothing was run\n")
    assert not (shipped.parent / "mark").exists()


@parametrized("how", ["yes", "terminal", "function", "ran here before"], quick=4)
def test_the_command_runs_if_told(shipped, monkeypatch, how):
    """It fails, because it never trains: what counts is that it ran."""
    monkeypatch.setenv("STEPSCOPE_CACHE", str(shipped.parent / "cache"))
    command = json.loads((shipped / "recording.json").read_text())["command"]
    note_command({**command, "argv": [*command["argv"], "more"]})
    assert not has_run(command)
    if how == "ran here before":
        note_command(command)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    monkeypatch.setattr("stepscope.cli.verify.is_terminal", lambda stream: how == "terminal")
    monkeypatch.chdir(shipped.parent)
    asked = []
    if how == "function":
        with pytest.raises(StepscopeError):
            stepscope.verify(shipped, fix="autocast", yes=lambda command: not asked.append(command))
        assert len(asked) == 1
    else:
        assert main(["verify", str(shipped), "--fix", "autocast", *(["--yes"] if how == "yes" else [])]) == 2
    assert (shipped.parent / "mark").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"command": {}}, "does not say which script"),
        ({"environment": {"world_size": 8}}, "8 ranks and does not say what started them"),
        ({"command": {"argv": ["gone.py"], "folder": "."}}, "gone.py, which no longer exists"),
        ({"command": {"argv": ["train.py"], "folder": "/no/such"}}, "/no/such, which no longer exists"),
    ],
)
def test_what_cannot_be_run_again_says_what_to_type(tmp_path, change, said):
    with pytest.raises(RecordingError, match=said):
        recorded_command(tmp_path, facts(tmp_path, **change))


def test_a_module_is_run_by_its_name(tmp_path):
    (tmp_path / "pack").mkdir()
    for name, module in (("train.py", "pack.train"), ("__main__.py", "pack")):
        (tmp_path / "pack" / name).write_text("")
        command = {"argv": [str(tmp_path / "pack" / name), "x"], "folder": str(tmp_path), "module": True}
        for given in (command, {**command, "program": module}):
            assert recorded_command(tmp_path, {"command": given}).words == ("-m", module, "x")


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import subprocess; subprocess.run(['sleep', '60'])", "still running after 5 s (--timeout)"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV; see "),
        ("print('only this'); raise SystemExit(7)", "only this"),
        ("raise SystemExit(7)", "exit code 7, no output"),
    ],
)
def test_whatever_ends_a_run_is_a_line(tmp_path, monkeypatch, source, said):
    """Scripts without torch: a process takes no time to start."""
    monkeypatch.setenv("STEPSCOPE_FIX", "not for these")
    (tmp_path / "train.py").write_text(source)
    command, options = Command(("train.py",), tmp_path), Options(warmup=5, clean=5, timeout_s=5)

    ended = run_again(command, tmp_path / "out" / "run", options, None, rehearses=False)

    assert ended is not None and ended.reason.startswith(said), (tmp_path / "out" / "run.txt").read_text()


def test_a_finding_of_a_recording_says_how_to_prove_it():
    names = ("launch_bound", "full_logits", "padding")
    findings = [Finding("One.", "fix()", (), "no", 1e6, id=name) for name in names]
    diagnosis = Diagnosis(1e7, True, tuple(findings), (), (), (), "It is bound by the GPU.", 0.9, ())

    shown = terminal_text(diagnosis_document(diagnosis, "runs/my run"), 100)
    assert "stepscope verify 'runs/my run' --fix launch_bound" in shown and shown.count("stepscope verify") == 1
    shown = " ".join(shown.split())
    for name in ("full_logits", "padding"):
        assert f"run -o runs/without-{name} SCRIPT && stepscope compare 'runs/my run' runs/without-{name}" in shown
    assert "runs/without-padding --allow tokens,flops # after the change" in shown
    assert "stepscope verify" not in terminal_text(diagnosis_document(diagnosis), 100)


def test_a_change_by_hand_is_proven_by_verify_if_the_script_is_known():
    names = ("full_logits", "drift", "other_process")
    findings = [Finding("One.", "fix()", (), "no", 1e6, id=name) for name in names]
    diagnosis = Diagnosis(1e7, True, tuple(findings), (), (), (), "Bound.", 0.9, (), script="train.py --lr 3")

    cards = {card.id: card.prove for card in findings_part(diagnosis, "runs/my run").cards}
    assert cards["full_logits"].startswith("stepscope verify 'runs/my run' --fix full_logits=CHANGED.py")
    for name in ("drift", "other_process"):  # not in twenty steps, and not in the script
        assert cards[name].startswith(f"stepscope run -o runs/without-{name} train.py --lr 3 && stepscope compare")


RANKS = """
import subprocess, sys, time
rank = [sys.executable, "-c", "import os, time; open('rank', 'w').write(str(os.getpid())); time.sleep(100)"]
subprocess.Popen(rank, start_new_session=True)  # as torchrun starts its ranks
time.sleep(100)
"""


def ends(pid: str) -> bool:
    """Whether a process that was killed is gone, or waits for its parent only."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes of a launcher are found in /proc")
def test_ranks_of_a_launcher_end_with_its_run(tmp_path):
    words = [sys.executable, "-c", RANKS]

    failure = run_process(words, tmp_path, os.environ, tmp_path / "log.txt", timeout_s=2)

    assert failure is not None and failure.is_timeout
    assert ends((tmp_path / "rank").read_text())


def test_sigterm_ends_a_run_too(tmp_path):
    """As `timeout` sends it to verify, which waits for a run."""
    rank = tmp_path / "rank"

    def end() -> None:
        while not (rank.exists() and rank.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_process([sys.executable, "-c", RANKS], tmp_path, os.environ, tmp_path / "log.txt", timeout_s=60)
    thread.join()
    assert ends(rank.read_text())
