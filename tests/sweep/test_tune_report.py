"""From a tuning's rows to its figures: frontier, gain, turns; and its screen."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

from stepscope.analysis.comparison.tuning import tuning_of
from stepscope.document.tuning import trial_line, tuning_document
from stepscope.render.terminal import terminal_text

RUN = {"mode": "step", "dtype": "fp32", "compile": "off", "device": "cpu"}
SPREAD = (0.97, 0.98, 0.99, 1.0, 1.0, 1.01, 1.02, 1.03)


def row(name, ms, mib, role="search", of=None, number=1, among="", status="ok", **more):
    """A row whose hash is its name, with samples around `ms`; knobs are in the name: `batch=8`."""
    knobs = dict(word.split("=") for word in (of or name).split() if "=" in word)
    batch = int(knobs.pop("batch", 4))
    told = {"role": role, "round": number, "of": of or name, "scale": 1.0, "among": among, "predicted_bytes": None}
    told["loss"] = {"passed": True, "reason": None, "plain_loss": 5.0, "deviation": 1e-6, "tolerance": 1e-4}
    found = {
        "hash": name,
        "workload": "cs336",
        "preset": "tiny",
        "config": {"batch": batch, "attention": knobs.pop("attention", "naive")},
        "run": {**RUN, **knobs},
        "status": status,
        "reason": None if status == "ok" else f"{status} for a reason",
        "tune": told,
        "seconds": 1.0,
        **more,
    }
    if ms is not None:
        samples = [round(ms * 1e6 * share) for share in SPREAD]
        found |= {"samples_device_ns": samples, "num_tokens": 1000 * batch, "num_parameters": 7, "loss": 5.0}
    return found | ({"peak_allocated_bytes": mib << 20} if mib is not None else {})


def log(**more):
    return {
        "defaults": "defaults",
        "workload": "cs336",
        "preset": "tiny",
        "budget_bytes": None,
        "axes": {"attention": ["naive", "sdpa"], "batch": None},
        "moves": [],
        "not_tried": [],
        "num_rounds": 1,
        "stopped": "settled",
        "seconds": 9.0,
        "limit_s": 60.0,
        "contenders": [],
        "commands": {},
        "notes": [],
        **more,
    }


def tuning(rows, **more):
    return tuning_of(rows, {}, log(**more), lambda name: (None, None))


def shown(found, width=200):
    return terminal_text(tuning_document(found), width)


def test_the_frontier_is_what_no_other_beats_in_both():
    found = tuning(
        [
            row("defaults", 40, 10, role="defaults"),
            row("attention=sdpa", 30, 8),  # better in both
            row("batch=8", 50, 20),  # faster a token
            row("batch=8 attention=sdpa", 80, 19),  # slower a token, and larger
            row("batch=1", 30, 4),  # slow, and the smallest
            row("attention=wrong", 1, 1, status="wrong"),
        ]
    )

    assert [point.hash for point in found.frontier] == ["batch=1", "attention=sdpa", "batch=8"]
    assert {point.hash for point in found.points if point.is_on_frontier} == {p.hash for p in found.frontier}
    assert found.best.hash == "batch=8" and found.best.per_s == pytest.approx(160_000)
    assert found.gain.speedup == pytest.approx(1.6) and not found.gain.is_measured_again
    assert found.num_by_status == {"ok": 5, "wrong": 1}


def again(name, ms, turn, among):
    return row(f"{name} turn {turn}", ms, None, role="again", of=name, number=turn, among=among)


def test_what_was_measured_again_in_turns_is_believed():
    names = ["defaults", "attention=sdpa", "batch=8"]
    among = " ".join(names)
    rows = [row("defaults", 40, 10, role="defaults"), row("attention=sdpa", 20, 8), row("batch=8", 60, 20)]
    rows += [row("batch=16", 10, 30)]  # lucky, once
    rows += [again(name, ms, turn, among) for turn in (1, 2) for name, ms in zip(names, (40, 36, 60))]
    rows += [again("defaults", 1, 3, among)]  # a turn that was not finished
    rows += [again("defaults", 1, 1, "among others")]

    found = tuning(rows, contenders=names)

    assert found.best.hash == "batch=8" and found.best.num_samples == 16
    assert found.gain.is_measured_again and found.gain.speedup == pytest.approx(80 / 60)
    assert found.gain.low < 80 / 60 < found.gain.high and found.gain.is_significant
    assert found.runner_up.hash == "attention=sdpa" and found.lead.speedup == pytest.approx(2 * 36 / 60)
    assert [point.hash for point in found.frontier] == ["attention=sdpa", "batch=8"]


def test_points_that_were_not_measured_again_are_put_on_the_same_scale():
    rows = [row("defaults", 40, 10, role="defaults"), row("attention=sdpa", 20, 8), row("batch=8", 200, 20)]
    rows[2]["tune"]["scale"] = 0.5  # the machine was half as fast then
    rows += [again(name, ms, 1, "defaults attention=sdpa") for name, ms in (("defaults", 80), ("attention=sdpa", 44))]

    found = tuning(rows, contenders=["defaults", "attention=sdpa"])

    by_name = {point.hash: point for point in found.points}
    assert by_name["batch=8"].time_ns == pytest.approx(200e6) and by_name["defaults"].time_ns == pytest.approx(80e6)


def test_without_a_right_default_there_is_no_gain():
    found = tuning([row("defaults", None, None, role="defaults", status="oom"), row("batch=2", 40, 5)])

    assert found.best.hash == "batch=2" and found.gain is None
    assert "the defaults have no figure to compare with" in shown(found)
    assert "oom: oom for a reason" in shown(found)


def test_where_nothing_can_be_used_it_is_said_whether_memory_is_the_reason():
    pruned = row("batch=2", None, None, status="skipped")
    pruned["tune"]["predicted_bytes"] = 40 << 20
    defaults = [row("defaults", None, None, role="defaults", status=status) for status in ("oom", "wrong")]

    assert shown(tuning([defaults[0], pruned])).startswith("None of 2 points fits in memory.")
    assert shown(tuning([defaults[1], pruned])).startswith("None of 2 points was correct.")


def test_the_screen_says_it_all():
    names = ["defaults", "batch=8"]
    rows = [row("defaults", 40, 10, role="defaults"), row("batch=8", 50, 20), row("batch=16", None, None)]
    rows[2].update(status="skipped", reason="its plan needs 40.0 MiB, and 30.0 MiB can be had")
    rows[2]["tune"]["predicted_bytes"] = 40 << 20
    rows += [again(name, ms, turn, " ".join(names)) for turn in (1, 2) for name, ms in zip(names, (40, 50))]
    found = tuning(
        rows,
        contenders=names,
        budget_bytes=30 << 20,
        stopped="time",
        commands={"batch=8": "stepscope bench cs336 --set batch=8"},
        moves=[{"round": 1, "turned": {"batch": 8}, "before": {"batch": 4}, "gain": 1.6}],
        not_tried=[{"round": 1, "turned": {"compile": "default"}, "reason": "no time was left"}],
    )

    text = shown(found, width=100)
    flat = " ".join(text.split())

    for part in (
        "batch=8: 160,000 tokens/s, 1.60× the defaults, 20.0 MiB.",
        "1.600×, 95 % interval",
        "p < 0.001; 16 samples each",
        "20.0 MiB of 30.0 MiB",
        "at most 1e-06 apart, 0.0001 allowed",
        "1 round in 9 s of 60 s",
        "3: 2 ok, 1 pruned",
        "batch=16: its plan needs 40.0 MiB, and 30.0 MiB can be had",
        "compile=default: round 1: no time was left",
        "stepscope bench cs336 --set batch=8",
    ):
        assert part in flat, part
    assert re.search(r"batch=8 \* +160,000 +20.0 MiB +correct +1.60", text)
    assert re.search(r"batch 4 → 8 +1 +1.60", text)
    assert max(map(len, text.splitlines())) <= 100
    assert asdict(found)["best"]["hash"] == "batch=8"


@pytest.mark.parametrize("ms", [60, 39.8])
def test_defaults_that_win_or_are_not_beaten_for_sure_are_the_best(ms):
    found = tuning([row("defaults", 40, 10, role="defaults"), row("attention=sdpa", ms, 12)])

    assert found.best.hash == "defaults" and found.gain is None
    headline = shown(found).splitlines()[0]
    assert "faster than the defaults" in headline and "100,000 tokens/s, 10.0 MiB" in headline


def test_a_line_for_who_watches():
    first = row("defaults", 40, 10, role="defaults")
    base = {**first["config"], **first["run"]}

    assert trial_line(first, base) == "ok       the defaults  40.0 ms per step, 100,000 tokens/s"
    beside = row("batch=8 beside", 50, 10, role="beside", of="batch=8")
    assert trial_line(beside, base) == "ok       alongside: batch=8  50.0 ms per step, 160,000 tokens/s"
    failed = row("batch=16", None, None, status="oom")
    assert trial_line(failed, base) == "oom      batch=16  oom for a reason"
