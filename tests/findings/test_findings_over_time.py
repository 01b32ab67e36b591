"""What goes wrong in the course of a run: planted at known steps of synthetic histories, and not in clean ones."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest

from history_maker import MIB, Run, a_week, write_history
from noisy_machine import noisy_factors
from parametrized import parametrized
from stepscope.analysis.run.goodput import goodput, job_goodput
from stepscope.analysis.run.interruptions import interruption
from stepscope.analysis.run.series import Track
from stepscope.findings.diagnose import diagnose
from stepscope.findings.finding import OVER_TIME
from stepscope.findings.over_time import RULES, findings_over_time, loss_anomaly_findings, unsure_drift
from stepscope.session import open_session
from stepscope.session.history import load
from stepscope.session.run import run_of

NUM = 2_000


def found(tmp_path, **faults):
    """Findings of a run by rule; the first evidence of each as a mapping."""
    run = run_of(None, load(write_history(tmp_path, Run(**{"num_steps": NUM, **faults}))))
    findings = findings_over_time(run)
    assert len({each.id for each in findings}) == len(findings)
    return {each.id: (each, each.evidence[0].rows[0]) for each in findings}


def near(step: int):
    return pytest.approx(step, abs=0.05 * NUM)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.long)])
def test_no_finding_in_20_clean_runs_on_a_noisy_machine(tmp_path, seeds):
    for seed in seeds:
        factors = noisy_factors(1000 + seed, NUM)
        assert found(tmp_path / str(seed), seed=seed, noise=0.02, slower=factors.__getitem__) == {}


@pytest.mark.parametrize("at", [0, 700])
def test_a_step_that_grows_one_percent_per_100_steps(tmp_path, at):
    finding, row = found(tmp_path, slower=lambda step: 1 + max(0, step - at) / 100 * 0.01)["drift"]
    assert row["kind"] == "drift" and row["step"] == near(at) and row["end_step"] == NUM - 1
    assert "per 100 steps" in finding.sentence and "in the passes" in finding.sentence
    lost_ns = sum(95_000_000 * max(0, step - at) / 100 * 0.01 for step in range(NUM))
    assert row["lost_ns"] == pytest.approx(lost_ns, rel=0.15)
    assert finding.saving_ns == pytest.approx(95_000_000 * (NUM - at) / 100 * 0.01, rel=0.1), "of the last steps"


def more_collections(step: int) -> float:
    """One in ten steps, from step 1,200 on two in each: the mean until a step."""
    return (120 + 2 * (step - 1200)) / step if step >= 1200 else 0.1


@parametrized(
    ("faults", "figure", "words"),
    [
        ({"clock_mhz": lambda step: 1200.0 if step >= 1200 else 1980.0}, "sm_clock_mhz", "from 1,980 MHz to 1,200"),
        ({"other_processes": lambda step: int(step >= 1200), "clock_mhz": lambda step: 1980.0},
         "num_gpu_processes", "other processes on the GPU rose from 0 to 1"),
        ({"collections": more_collections}, "num_collections", "garbage collections"),
        ({"compile_at": (1200,)}, "num_compiles", "compiles rose"),
    ], quick=2,
)  # fmt: skip
def test_steps_that_take_longer_at_once_with_what_changed(tmp_path, faults, figure, words):
    finding, row = found(tmp_path, slower=lambda step: 1.4 if step >= 1200 else 1.0, **faults)["drift"]
    assert row["kind"] == "step" and row["step"] == near(1200)
    assert figure in [each["figure"] for each in finding.evidence[1].rows] and words in finding.sentence


def test_data_that_becomes_slower_is_named(tmp_path):
    finding, row = found(tmp_path, data_share=0.2, slower_data=lambda step: 2.5 if step >= 800 else 1.0)["drift"]
    assert row["step"] == near(800) and "waiting for data" in finding.sentence


def test_a_leak_with_its_rate_and_when_memory_runs_out(tmp_path):
    findings = found(tmp_path, leak_bytes=MIB, total_bytes=16 << 30, clock_mhz=lambda step: 1980.0, ends=None)
    finding, row = findings.pop("memory_creep")
    assert not findings
    assert row["memory"] == "allocated_bytes" and row["step"] == near(0)
    assert row["bytes_per_1000_steps"] == pytest.approx(1000 * MIB, rel=0.05)
    free = (16 << 30) - (8 << 30) - NUM * MIB - 1024 * MIB
    assert row["steps_left"] == pytest.approx(free / MIB, rel=0.05)
    assert f"step {NUM - 1 + round(row['steps_left']):,}" in finding.sentence


def test_the_time_until_memory_runs_out_is_without_the_start_up(tmp_path):
    faults = {"leak_bytes": MIB, "total_bytes": 16 << 30, "startup_ns": 600_000_000_000}
    finding, row = found(tmp_path / "0", ends=None, **faults)["memory_creep"]
    left = f"{row['steps_left'] * 0.1 / 60:.3g} min"  # of 0.1 s per step
    assert f"in {left}" in finding.sentence and " now." in finding.sentence
    ended = found(tmp_path / "1", **faults)["memory_creep"][0].sentence
    assert f"{left} later" in ended and "now" not in ended and "at step 1,999, the last." in ended


@pytest.mark.parametrize(("steps", "is_found"), [(80, False), (400, True)])
def test_what_a_short_run_takes_is_its_start(tmp_path, steps, is_found):
    findings = found(tmp_path, num_steps=steps, leak_bytes=4 * MIB, clock_mhz=lambda step: 1980.0)
    assert ("memory_creep" in findings) is is_found


def test_host_memory_leaks_too(tmp_path):
    assert found(tmp_path, leak_bytes=MIB // 4)["memory_creep"][1]["memory"] == "resident_bytes"


def test_checkpoints_and_evaluations_with_their_first_step_and_interval(tmp_path):
    findings = found(tmp_path, save_every=50, save_ns=600_000_000, evaluate_every=400)
    for id, every, num, place in (
        ("checkpoint_cost", 50, 40, "train.py:40 save"),
        ("evaluation_cost", 400, 5, "train.py:31 evaluate"),
    ):
        finding, row = findings[id]
        assert row["times"] == num and row["every_steps"] == pytest.approx(every, rel=0.05)
        assert row["step"] == pytest.approx(every, abs=10) and place in finding.sentence
        between, places = finding.evidence
        assert len(between.rows) == 1 and places.rows == [{"place": place}]
    assert findings.keys() == {"checkpoint_cost", "evaluation_cost"}


@parametrized(("at", "gib", "is_found"), [(398, 6, True), (500, 6, False), (398, 0.2, False)], quick=2)
def test_an_evaluation_that_needs_more_memory_than_training(tmp_path, at, gib, is_found):
    """The first of five evaluations raises the peak of 12 GiB, or something else 100 steps later does."""
    on_gpu = {"total_bytes": 80 << 30, "clock_mhz": lambda step: 1980.0}
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=NUM, evaluate_every=400, **on_gpu))))
    peaks = run.tracks["peak_bytes"]
    raised = [value + (step >= at) * gib * 2**30 for step, value in zip(peaks.steps, peaks.values)]
    raised[3] = 0  # a script may reset it
    run = replace(run, tracks={**run.tracks, "peak_bytes": replace(peaks, values=raised)})

    found = [each for each in findings_over_time(run) if each.id == "evaluation_memory"]
    assert len(found) == is_found
    if found:
        assert found[0].saving_bytes == gib * 2**30 and found[0].evidence[0].rows[0]["step"] == near(400)


def test_what_follows_the_last_step_is_one_more(tmp_path):
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=NUM, save_every=900, save_ns=600_000_000))))
    last_ns = 5_000_000_000
    whole = replace(run, end_ns=run.end_ns + last_ns, tail_ns={"checkpoint": last_ns}, tail_times={"checkpoint": 1})
    before, after = interruption(run, "checkpoint"), interruption(whole, "checkpoint")
    assert (after.num, after.total_ns) == (before.num + 1, before.total_ns + last_ns)
    assert after.last_step == NUM and after.step == before.step
    assert after.share == after.total_ns / whole.end_ns
    only = interruption(replace(whole, blocks=[each._replace(host_ns={}) for each in run.blocks]), "checkpoint")
    assert (only.num, only.step, only.every) == (1, NUM, None)


def test_a_collection_before_the_first_steps_is_not_the_first_of_many(tmp_path):
    run = run_of(None, load(write_history(tmp_path, Run())))
    times, took = {"garbage_collection": 1}, {"garbage_collection": 10**9}
    blocks = [
        each._replace(host_ns=took, num_times=times) if i in (0, 5, 9) else each for i, each in enumerate(run.blocks)
    ]

    early = interruption(
        replace(run, blocks=[blocks[0]._replace(window="warmup"), *blocks[1:]]), "garbage_collection"
    )
    assert (early.num, early.step) == (2, interruption(replace(run, blocks=blocks[1:]), "garbage_collection").step)
    assert interruption(replace(run, blocks=blocks), "garbage_collection").num == 3


def test_a_loss_that_is_not_a_number(tmp_path):
    finding, row = found(tmp_path, loss=lambda step: math.nan if step >= 1500 else 3.0 - step / NUM)["loss_anomaly"]
    assert row["step"] == near(1500) and "NaN" in finding.sentence and "stayed" in finding.sentence


def with_losses(tmp_path, loss, steps, step_ns=8_000_000) -> dict:
    """The first evidence of what is found about losses that were sampled at these steps."""
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=NUM))))
    track = Track(steps, [step * step_ns for step in steps], [loss(step) for step in steps])
    (finding,) = loss_anomaly_findings(replace(run, tracks={"loss": track}))
    return finding.evidence[0].rows


SAMPLED = [*range(5, 30), *range(144, 1_800, 110)]  # each step of the windows, then about one per second


@pytest.mark.parametrize(("num", "value"), [(300, 1.0), (100, 50.0)])
def test_a_jump_of_losses_that_have_fallen_far(tmp_path, num, value):
    def loss(step: int) -> float:
        return value if 1_000 <= step < 1_000 + num else 2.3 if step < 100 else 0.5 * math.exp(-step / 150)

    (row,) = with_losses(tmp_path, loss, SAMPLED)
    assert row["step"] == 1_024 and row["loss"] == value and not row["lasts"]
    assert row["usual_loss"] == loss(1_024 - 3 * 110)  # the middle one of the last five


@pytest.mark.parametrize("period", [30, 100])
def test_losses_that_fall_within_each_epoch_do_not_jump(tmp_path, period):
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=NUM))))
    numbers, steps = random.Random(period), range(NUM)
    losses = [10 ** -(step % period / period) * math.exp(numbers.gauss(0, 0.1)) for step in steps]
    track = Track(steps, [step * 10**9 for step in steps], losses)
    assert loss_anomaly_findings(replace(run, tracks={"loss": track})) == []


@pytest.mark.parametrize(("steps", "last"), [(range(3, NUM, 212), 1_275), (range(NUM), 1_299)])
def test_the_last_finite_loss_before_one_that_is_not(tmp_path, steps, last):
    (row,) = with_losses(tmp_path, lambda step: math.nan if step >= 1300 else 1.0, steps)
    assert (row["step"], row["last_finite_step"]) == (last + steps.step, last)


@pytest.mark.parametrize(("end", "word"), [(NUM, "stays there"), (1320, "comes back")])
def test_a_loss_that_jumps(tmp_path, end, word):
    def loss(step: int) -> float:
        return (9.0 if 1300 <= step < end else 3.0) - step / NUM + (step % 7) / 50

    finding, row = found(tmp_path, loss=loss)["loss_anomaly"]
    assert row["step"] == near(1300) and word in finding.sentence


@pytest.mark.parametrize("loss", [0.1, 0.5])
def test_a_hard_batch_where_the_data_has_been_learned_is_no_jump(tmp_path, loss):
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=NUM))))
    losses = [loss if step == 1_500 else 4.0 * math.exp(-step / 100) + 1e-4 for step in range(NUM)]
    track = Track(range(NUM), [step * 10**9 for step in range(NUM)], losses)
    assert bool(loss_anomaly_findings(replace(run, tracks={"loss": track}))) == (loss > 0.05 * 4.0)


def test_a_gradient_scaler_that_doubles_is_no_jump(tmp_path):
    assert found(tmp_path, loss=lambda step: (3.0 - step / NUM) * (2 if step >= 1000 else 1)) == {}


def test_stalls_with_the_longest(tmp_path):
    finding, row = found(tmp_path, stall_at=(500, 1600), stall_ns=30_000_000_000)["stalls"]
    assert row["step"] in (500, 1600) and "2 times: 1.00 min" in finding.sentence.replace("60.0 s", "1.00 min")


def test_time_of_day_of_every_finding(tmp_path):
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=NUM, step_ns=60_000_000_000))))
    # 20 s of start-up, then a minute for each step.
    assert run.ns_of(60) == pytest.approx(20e9 + 3600e9, rel=0.02)
    assert run.when(60).startswith("step 60 (") and run.when(1999).count(",") == 2  # with the date


def test_goodput_adds_up_with_restarts_sleep_and_stalls(tmp_path):
    faults = {
        "restart_at": (600,),
        "suspend_at": (900,),
        "stall_at": (1500,),
        "save_every": 200,
        "evaluate_every": 500,
    }
    run = run_of(None, load(write_history(tmp_path, Run(num_steps=NUM, compile_at=(300,), **faults))))
    rows = goodput(run).rows
    assert sum(rows.values()) == run.end_ns == goodput(run).wall_ns
    exact = {"start-up": 40, "restarts": 300, "checkpoint": 30, "evaluation": 20, "stalls": 3660}
    assert {name: rows[name] / 1e9 for name in exact} == pytest.approx(exact, rel=0.01)
    assert rows["warm-up"] / 1e9 == pytest.approx(20, rel=0.05)
    assert rows["training"] / 1e9 == pytest.approx(NUM * 0.095, rel=0.02)


@pytest.mark.parametrize(("status", "num_repeated"), [(None, 60), ("failed", 60), ("finished", 0)])
def test_goodput_of_a_resumed_run_counts_the_steps_that_were_repeated(tmp_path, status, num_repeated):
    """Saved at step 600, cut off at 660. A process that has finished is not followed by one that repeats it."""
    folder = write_history(tmp_path, Run(num_steps=NUM, step_ns=300_000_000, save_every=200, restart_at=(660,)))
    lines = (folder / "history.jsonl").read_text().splitlines()
    second = next(number for number, line in enumerate(lines) if number and line.startswith('{"began"'))
    if status is not None:
        last = json.loads(lines[second - 1])
        end = {"event": "end", "step": 660, "start_ns": last["start_ns"] + last["wall_ns"], "t": last["t"], "ns": 0}
        lines.insert(second, json.dumps(end | {"status": status}))
        (folder / "history.jsonl").write_text("\n".join(lines) + "\n")
    run = run_of(None, load(folder))
    rows = goodput(run).rows
    assert sum(rows.values()) == run.end_ns
    assert rows.get("repeated steps", 0) / 1e9 == pytest.approx(num_repeated * 0.285, rel=0.05)


def test_goodput_of_a_job_counts_the_steps_that_were_repeated(tmp_path):
    runs = []
    for number, num_steps in enumerate((700, 2_000)):
        run = run_of(None, load(write_history(tmp_path / str(number), Run(num_steps=num_steps, save_every=500))))
        run = type(run)(**{**vars(run), "began": run.began + number * 1_000})
        runs.append((run, goodput(run)))
    whole = job_goodput(runs[::-1])
    assert whole.num_runs == 2 and sum(whole.rows.values()) == whole.wall_ns
    assert whole.wall_ns == pytest.approx(1_000e9 + runs[1][1].wall_ns)
    assert whole.rows["repeated steps"] / 1e9 == pytest.approx(200 * 0.095, rel=0.05)
    assert whole.cost_per_million(3.6) == ("tokens", pytest.approx(whole.wall_ns / 1e9 / (2_700 * 8192) * 1e3))


@pytest.mark.long
def test_a_week_is_diagnosed_in_bounded_memory(tmp_path):
    folder = write_history(tmp_path, a_week(slower=lambda step: 1.3 if step >= 4_000_000 else 1.0))
    code = (
        "import re, sys; from pathlib import Path; from stepscope.session.history import load;"
        "from stepscope.session.run import run_of; from stepscope.findings.over_time import findings_over_time;"
        "found = findings_over_time(run_of(None, load(Path(sys.argv[1]))));"
        "peak = int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) >> 10;"
        "print(found[0].evidence[0].rows[0]['step'], peak)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True)
    step, mebibytes = map(int, done.stdout.split())
    assert step == pytest.approx(4_000_000, rel=0.01) and mebibytes < 200


def test_the_first_slower_step_is_exact_if_waits_for_a_core_are_known(tmp_path):
    """They are left out of the mean of many steps; the step that is named is not the first of these."""
    slower = Run(num_steps=NUM, step_ns=300_000_000, slower=lambda step: 1.4 if step >= 1200 else 1.0)
    folder = write_history(tmp_path, slower)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    lines = [line | {"core_wait_share": 0.02} for line in lines]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = min(line["step"] for line in lines if line.get("step", 0) >= 1200 and "num_steps" in line)
    (finding,) = findings_over_time(run_of(None, load(folder)))
    assert finding.evidence[0].rows[0]["step"] == first
    assert finding.saving_ns == pytest.approx(0.4 * 0.95 * 0.98 * 300_000_000, rel=0.05)


def test_waiting_for_a_core_is_no_drift(tmp_path):
    """Other processes take the cores in the second half: steps are longer, but not for a reason of their own."""
    shared = [0.5 if step >= 1000 else 0.0 for step in range(NUM)]
    folder = write_history(tmp_path, Run(num_steps=NUM, slower=lambda step: 2.0 if shared[step] else 1.0))
    assert [each.id for each in findings_over_time(run_of(None, load(folder)))] == ["drift"]
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for line in lines:
        if "num_steps" in line:
            line["core_wait_share"] = shared[line["step"]]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert findings_over_time(run_of(None, load(folder))) == []


@pytest.mark.parametrize(
    ("on_core", "waits", "factor", "is_found"),
    [
        (0.9, 0.3, 1.3, False),  # the same work is slower on a core that others share
        (0.9, 0.01, 1.3, True),  # nobody else is there
        pytest.param(0.9, 0.3, 2.5, True, marks=pytest.mark.long),  # more than sharing a core can do
        pytest.param(0.1, 0.3, 1.3, True, marks=pytest.mark.long),  # it is not on a core that it takes longer
    ],
)
def test_work_that_is_slower_on_a_shared_core_is_no_drift(tmp_path, on_core, waits, factor, is_found):
    slower = Run(num_steps=NUM, step_ns=300_000_000, slower=lambda step: factor if step >= 1200 else 1.0)
    folder = write_history(tmp_path, slower)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for line in lines:
        if "num_steps" in line:
            rest = 1 - waits
            share = on_core if on_core > 0.5 or line["step"] < 1200 else on_core / factor
            line |= {"core_wait_share": waits, "core_share": share * rest}
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = run_of(None, load(folder))
    assert bool(findings_over_time(run)) == is_found
    assert ("other processes used the CPU cores" in unsure_drift(run)) == (not is_found)


@pytest.mark.parametrize(
    ("before", "after", "is_found"),
    [
        ((0.0, 0.1), (0.5, 0.6), False),  # others begin to work as steps become slower
        ((0.0, 0.1), (0.5, 0.0), True),  # steps are as slow while they pause
        pytest.param((0.5, 0.6), (0.5, 0.6), True, marks=pytest.mark.long),  # they were there before
        pytest.param((0.5, 0.6), (0.0, 0.1), True, marks=pytest.mark.long),  # they end
    ],
)
def test_work_that_becomes_slower_beside_another_process_is_no_drift(tmp_path, before, after, is_found):
    """Training does not wait for a core: there is another one. But the two share caches."""
    slower = Run(num_steps=NUM, step_ns=300_000_000, slower=lambda step: 1.3 if step >= 1200 else 1.0)
    folder = write_history(tmp_path, slower)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        if "num_steps" in line:
            others = (after if line["step"] >= 1200 else before)[number % 2]
            line |= {"core_wait_share": 0.01, "core_share": 0.9, "others_share": others}
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bool(findings_over_time(run_of(None, load(folder)))) == is_found


def with_cores(folder, on_core_ns):
    """The run of a history in whose steps training is on a core for `on_core_ns(step)` and never waits for one."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for line in lines:
        if "num_steps" in line:
            share = on_core_ns(line["step"]) * line["num_steps"] / line["wall_ns"]
            line |= {"core_wait_share": 0.0, "core_share": share, "others_share": 0.5}
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_of(None, load(folder))


@parametrized("begin", [0, 700], quick=1)
def test_a_wait_that_grows_is_found_where_it_begins_though_work_on_the_core_wanders(tmp_path, begin):
    """A sleep of 200 ms grows by 1 % per 100 steps; the work beside it takes from 60 to 80 ms, and wanders."""
    wanders = [70e6 + 10e6 * math.sin(step / 160) for step in range(NUM)]
    slower = Run(
        num_steps=NUM, step_ns=200_000_000, noise=0.0, data_share=0.0,
        slower=lambda step: 1 + wanders[step] / 200e6 + 0.0001 * max(0, step - begin),
    )  # fmt: skip
    run = with_cores(write_history(tmp_path, slower), wanders.__getitem__)
    (finding,) = findings_over_time(run)
    assert finding.id == "drift" and finding.evidence[0].rows[0]["step"] == pytest.approx(begin, abs=20)


def test_work_that_moves_off_the_core_makes_no_step_slower(tmp_path):
    steady = Run(num_steps=NUM, step_ns=200_000_000, noise=0.0)
    run = with_cores(write_history(tmp_path, steady), lambda step: 150e6 if step < 1200 else 50e6)
    assert findings_over_time(run) == []


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("data", "waiting for data"),
        pytest.param("before_forward", "outside of forward", marks=pytest.mark.long),
        pytest.param("unattributed", "in the passes", marks=pytest.mark.long),
    ],
)
def test_drift_names_the_part_of_the_step_that_grew(tmp_path, part, said):
    slower = Run(num_steps=NUM, step_ns=300_000_000, slower=lambda step: 1.4 if step >= 1200 else 1.0)
    folder = write_history(tmp_path, slower)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for line in lines:
        if "num_steps" in line:
            same = 50_000_000 * line["num_steps"]
            line["host_ns"] = {"optimizer": same, part: line["wall_ns"] - same}
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (finding,) = findings_over_time(run_of(None, load(folder)))
    assert f"Most of it is {said}" in finding.sentence


@pytest.mark.parametrize(("num_steps", "is_checked"), [(1, False), (101, True)])
def test_a_single_step_cannot_be_checked_for_changes(tmp_path, num_steps, is_checked):
    diagnosis = diagnose(open_session(write_history(tmp_path, Run(num_steps=num_steps))).case)
    assert OVER_TIME.isdisjoint(diagnosis.clean) != is_checked
    assert OVER_TIME.isdisjoint(each.id for each in diagnosis.unchecked) == is_checked


def test_every_rule_of_the_whole_run_is_known_by_its_id():
    assert set(RULES) == OVER_TIME
