"""One run has one goodput, wherever it is shown, and every second of it has a name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import stepscope
from history_maker import Run, write_history
from stepscope.analysis.run.goodput import goodput
from stepscope.analysis.run.interruptions import interruption, stalls
from stepscope.document.card import Card, card_document
from stepscope.findings.over_time import findings_over_time
from stepscope.findings.run_status import WatchedRun
from stepscope.formatting import size
from stepscope.recorder.windows import Windows
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.history import load
from stepscope.session.run import run_of

MS, SECOND = 1_000_000, 1_000_000_000


def shares(folder: Path) -> tuple[float, float]:
    """Goodput as `show` and as `watch` have it."""
    shown = Card.of(open_session(folder)).whole_run
    watched = WatchedRun(folder).status()
    assert shown is not None and shown.goodput is not None and watched.goodput is not None
    rows = {name: ns for name, ns in shown.goodput.rows.items() if name not in ("training", "measuring")}
    assert rows == dict(watched.lost_ns)
    return shown.goodput.share, watched.goodput


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A loop with slow steps, an evaluation with metrics after its last forward, and a checkpoint after its end."""
    folder = tmp_path_factory.mktemp("goodput")
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stepscope.record(folder / "run", windows=Windows(warmup=2, clean=3, trace=0, memory=0)):
        for step in range(120):
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.05 if step % 40 == 39 else 0.002)
            if step == 60:
                model.eval()
                with torch.no_grad():
                    model(torch.ones(3, 4))
                model.train()
                time.sleep(0.4)  # metrics
        torch.save(torch.zeros(2_000_000), folder / "last.pt")
    return folder / "run"


def test_show_and_watch_have_the_same_goodput(recorded: Path) -> None:
    shown, watched = shares(recorded)
    assert shown == watched
    text = terminal_text(card_document(Card.of(open_session(recorded))), 120)
    (line,) = (line for line in text.splitlines() if line.lstrip().startswith("goodput"))
    assert f"{100 * shown:.1f} % of" in line


def test_of_a_synthetic_run_with_restarts_too(tmp_path: Path) -> None:
    faults = {"restart_at": (700,), "suspend_at": (900,), "stall_at": (1_500,), "save_every": 200}
    shown, watched = shares(write_history(tmp_path, Run(num_steps=2_000, compile_at=(300,), **faults)))
    assert shown == watched


def test_what_follows_the_last_step_is_in_the_history(recorded: Path) -> None:
    run = run_of(None, load(recorded))
    assert run.tail_times == {"checkpoint": 1} and run.tail_ns["checkpoint"] > 0
    found = goodput(run)
    saved = interruption(run, "checkpoint")
    assert found is not None and saved is not None
    assert found.rows["checkpoint"] == saved.total_ns == run.tail_ns["checkpoint"]
    assert sum(found.rows.values()) == found.wall_ns == run.end_ns


def test_an_evaluation_has_the_time_after_its_last_forward(recorded: Path) -> None:
    found = interruption(run_of(None, load(recorded)), "evaluation")
    assert found is not None and found.num == 1 and 0.4e9 <= found.total_ns < 1.4e9


def test_the_peak_of_the_whole_run_is_on_the_card(tmp_path: Path) -> None:
    folder = write_history(tmp_path, Run(num_steps=500, leak_bytes=8 << 20, total_bytes=80 << 30))
    text = terminal_text(card_document(Card.of(open_session(folder))), 140)
    # 8 GiB, 4 GiB above them at the peak, and 500 times 8 MiB
    assert "15.9 GiB allocated on the GPU in the whole run" in text and "by step 499" in text


def test_the_peak_of_the_whole_run_is_never_below_that_of_its_first_steps(recorded: Path) -> None:
    card = Card.of(open_session(recorded))
    first = card.recording.facts["memory"]["peak_resident_bytes"]
    blocks = max(block.resident_bytes or 0 for block in load(recorded).blocks)
    assert card.whole_run is not None and card.whole_run.peak is not None
    assert card.whole_run.peak[0].startswith(size(max(first, blocks)))


def test_a_process_that_is_stopped_inside_a_probed_step_stalls(tmp_path: Path) -> None:
    folder = write_history(tmp_path, Run(num_steps=1_000, window_at=(400,)))
    path = folder / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    at = next(i for i, line in enumerate(lines) if line.get("window") == "trace")
    block = lines[at]
    event = {"event": "stopped", "step": block["step"], "start_ns": block["start_ns"] + MS, "ns": 30 * SECOND}
    block["host_ns"]["unattributed"] += 30 * SECOND
    block["wall_ns"] += 30 * SECOND
    block["max_ns"] += 30 * SECOND
    for line in lines[at + 1 :]:
        line["start_ns"] += 30 * SECOND
    before = goodput(run_of(None, load(folder)))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unknown = goodput(run_of(None, load(folder)))
    lines.insert(at, {**event, "t": block["t"]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = run_of(None, load(folder))
    known = goodput(run)
    assert before is not None and unknown is not None and known is not None
    assert unknown.rows["measuring"] - before.rows.get("measuring", 0) == pytest.approx(30e9, rel=0.001)
    assert known.rows["stalls"] == 30 * SECOND and known.share < unknown.share
    assert [(stall.kind, stall.ns) for stall in stalls(run)] == [("stopped", 30 * SECOND)]
    (finding,) = (each for each in findings_over_time(run) if each.id == "stalls")
    assert "while the process was stopped" in finding.sentence


LOOP = """
import sys, time, torch, stepscope
from stepscope.recorder.windows import Windows
model = torch.nn.Linear(4, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with stepscope.record(sys.argv[1], windows=Windows(warmup=2, clean=2, trace=0, memory=0)):
    for step in range(2_000):
        model(torch.ones(3, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad(); time.sleep(0.005)
        if step == 100: print("go", flush=True)
        if step == 400: break
"""


@pytest.mark.long
def test_a_signal_that_stops_the_process_is_an_event(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOP, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(120) == 0
    stopped = [event for event in load(tmp_path / "run").events if event.event == "stopped"]
    assert stopped and sum(event.ns for event in stopped) > 2 * SECOND


def test_garbage_that_a_probe_made_is_measuring(tmp_path: Path) -> None:
    run = run_of(None, load(write_history(tmp_path / "run", Run(num_steps=400))))
    first, *rest = run.blocks
    collected = {**first.host_ns, "garbage_collection": first.host_ns.get("garbage_collection", 0) + MS}
    rows = []
    for window in ("free", "memory"):
        block = first._replace(window=window, wall_ns=first.wall_ns + MS, host_ns=collected)
        found = goodput(replace(run, blocks=[block, *rest]))
        assert found is not None
        rows.append(found.rows)

    free, probed = (found.get("garbage collection", 0) for found in rows)
    assert free - probed == collected["garbage_collection"]
    assert rows[1]["measuring"] - rows[0].get("measuring", 0) >= MS
