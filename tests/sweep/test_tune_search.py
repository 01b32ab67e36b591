"""The search of a tuning, over pretended points whose costs are known: no processes, a clock of its own."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")

from sweep_runs import gated

from stepscope.analysis.comparison.significance import difference
from stepscope.errors import UsageError
from stepscope.sweep.grid import Grid
from stepscope.sweep.results import Results
from stepscope.sweep.runner import Options
from stepscope.sweep.tuning.descent import Search
from stepscope.sweep.tuning.space import search_space
from stepscope.sweep.tuning.trials import Clock, Forecast, Trials
from stepscope.workloads.registry import find

CPU = {"device": "cpu", "steps": 8, "warmup": 2}


class Pretended:
    """A runner whose points take `cost(values)` nanoseconds a token, or end as `cost` says in words."""

    def __init__(self, cost, clock, drift=0.0, loss=None):
        self.options = Options()
        self.cost, self.clock, self.drift, self.loss = cost, clock, drift, loss or (lambda values: 5.0)
        self.random = random.Random(0)
        self.ran = []

    def run(self, point):
        values = {**point.config, **point.run}
        self.ran.append(values)
        seconds = self.clock.cost_s(values)
        self.clock.now += min(seconds, self.options.timeout_s)
        cost = self.cost(values)
        row = {"hash": point.hash, "workload": point.workload, "preset": point.preset, "config": dict(point.config)}
        row |= {"run": dict(point.run), "seconds": seconds, "reason": None}
        if seconds > self.options.timeout_s:
            return {**row, "status": "timeout", "reason": "killed"}
        if isinstance(cost, str):
            return {**row, "status": cost, "reason": "as told"}
        slower = 1 + self.drift * len(self.ran)
        tokens = values["batch"]
        samples = [round(cost * slower * tokens * self.random.uniform(0.998, 1.002) * 1000) for _ in range(8)]
        loss = self.loss(values)
        row |= {"status": "ok", "samples_device_ns": samples, "num_tokens": tokens, "num_parameters": 1}
        return {**row, "loss": loss, "final_loss": loss, "peak_allocated_bytes": 100 * tokens}


class FakeClock(Clock):
    def __init__(self, whole_s=1e6, cost_s=lambda values: 1.0):
        super().__init__(whole_s)
        self.now, self.cost_s = 0.0, cost_s

    @property
    def spent_s(self):
        return self.now


@pytest.fixture
def tune(tmp_path):
    """Search a workload whose points cost what a function says; returns the search and the runner."""

    def run(cost, *words, workload="cs336", over=(), clock=None, forecast=None, budget=None, folder="tune", **kwargs):
        found = find(workload) if isinstance(workload, str) else workload
        grid = Grid(found, CPU)
        preset = ["preset=tiny"] if workload == "cs336" else []
        space = search_space(found, grid, grid.words([*preset, *words]), over)
        clock = clock or FakeClock()
        runner = Pretended(cost, clock, **kwargs)
        with Results(tmp_path / folder, {"command": "test"}, True, "") as results:
            trials = Trials(
                space,
                runner,
                results,
                clock,
                forecast=forecast or (lambda point, defaults: None),
                budget_bytes=budget,
                timeout_s=None,
                on_begin=lambda: None,
                on_row=lambda row: None,
            )
            search = Search(space, trials, is_faster)
            search.run()
            search.rows = list(results.rows)
        return search, runner

    return run


def is_faster(before, after, least):
    found = difference(before, after)
    return found.ratio * (1 + least) < 1 and found.is_significant


def rows(search, role):
    return [row for row in search.rows if row["tune"]["role"] == role]


def test_the_best_value_of_every_knob_is_found_though_one_needs_another(tune):
    def cost(values):
        # The compiler pays only with sdpa, and sdpa only in bf16.
        sdpa, bf16 = values["attention"] == "sdpa", values["dtype"] == "bf16"
        compiled = values["compile"] == "default"
        return 100 - 5 * bf16 - 20 * (sdpa and bf16) - 20 * (compiled and sdpa) + 10 * (compiled and not sdpa)

    search, runner = tune(cost, "batch=4")

    best = search.best
    assert (best.config["attention"], best.run["dtype"], best.run["compile"]) == ("sdpa", "bf16", "default")
    assert search.stopped == "settled" and len(runner.ran) < 90
    assert [set(move["turned"]) for move in search.moves] == [{"dtype"}, {"attention"}, {"compile"}]
    assert [move["round"] for move in search.moves] == [1, 2, 2]


@pytest.mark.parametrize(("percent", "is_kept"), [(0.7, False), (1.5, True)])
def test_a_gain_of_less_than_a_percent_is_not_followed(tune, percent, is_kept):
    search, _ = tune(lambda values: 100 - percent * (values["linear"] == "linear"), over=("linear",))

    assert bool(search.moves) is is_kept


def test_noise_alone_moves_nothing(tune):
    noise = random.Random(3)
    search, _ = tune(lambda values: 100 * noise.uniform(0.99, 1.01), over=("attention", "linear", "optimizer"))

    assert search.best.hash == search.to_json()["defaults"]


def test_luck_that_does_not_come_twice_is_not_followed(tune):
    seen = []

    def cost(values):
        is_linear = values["linear"] == "linear"
        seen.extend(["linear"] * is_linear)
        return 80 if is_linear and len(seen) == 1 else 104 if is_linear else 100

    search, _ = tune(cost, over=("linear",))

    assert search.moves == [] and len(seen) == 2 + 3  # tried, tried again, and three turns


@pytest.mark.parametrize("drift", [0.02, 0.1])
def test_a_machine_that_gets_slower_all_the_time_hides_no_gain_and_makes_none(tune, drift):
    def cost(values):
        return 100 - 20 * (values["linear"] == "linear") + 3 * (values["optimizer"] == "fused")

    search, _ = tune(cost, over=("attention", "linear", "optimizer"), drift=drift)

    assert search.best.config["linear"] == "linear" and search.best.run["optimizer"] == "adamw"
    assert rows(search, "beside")


def test_contenders_are_measured_again_in_turns(tune):
    search, _ = tune(lambda values: 100 - 20 * (values["linear"] == "linear"), over=("linear", "optimizer"))

    again = rows(search, "again")
    contenders = search.to_json()["contenders"]
    assert contenders[:2] == [search.to_json()["defaults"], search.best.hash]
    assert [row["tune"]["of"] for row in again] == contenders * 3


def test_the_batch_grows_by_powers_of_two_while_that_gains(tune):
    search, runner = tune(lambda values: 100 / min(values["batch"], 20) + 1, over=("batch",))
    assert search.best.config["batch"] == 32
    assert sorted({values["batch"] for values in runner.ran}) == [4, 8, 16, 32, 64]


def test_points_that_do_not_fit_are_not_run(tune):
    def forecast(point, defaults):
        assert defaults["tune"]["role"] == "defaults"
        needs = 1000 * point.config["batch"]
        return Forecast(needs, needs <= 16_000, None if needs <= 16_000 else "its plan needs more")

    search, runner = tune(lambda values: 100 / values["batch"], over=("batch", "checkpoint"), forecast=forecast)

    assert search.best.config["batch"] == 16
    pruned = [row for row in search.rows if row["status"] == "skipped"]
    assert {row["config"]["batch"] for row in pruned} == {32}
    assert all(row["tune"]["predicted_bytes"] == 32_000 and row["reason"] == "its plan needs more" for row in pruned)
    assert max(values["batch"] for values in runner.ran) == 16
    # The batch ended at the memory: with blocks recomputed it is tried once more.
    assert {row["config"]["checkpoint"] for row in pruned} == {0, 1, 2}


def test_checkpointing_makes_room_for_a_larger_batch(tune):
    def cost(values):
        if values["batch"] > (8 if values["checkpoint"] == 0 else 32):
            return "oom"
        return 100 / values["batch"] * (1.3 if values["checkpoint"] else 1)

    search, _ = tune(cost, over=("batch", "checkpoint"))

    assert search.best.config["batch"] == 32 and search.best.config["checkpoint"] > 0


def test_what_is_over_the_budget_is_not_ranked(tune):
    search, _ = tune(lambda values: 100 / values["batch"], over=("batch",), budget=1000)

    assert search.best.config["batch"] == 8
    (over,) = [row for row in search.rows if row["status"] == "oom"]
    assert over["config"]["batch"] == 16 and over["oom"]["asked_bytes"] == 1600


def test_defaults_that_do_not_fit_are_made_smaller_first(tune):
    search, runner = tune(lambda values: "oom" if values["batch"] > 2 else 10.0, over=("batch", "linear"))

    assert search.best.config["batch"] == 2
    assert [values["batch"] for values in runner.ran[:2]] == [4, 2]


def test_a_point_whose_loss_strays_is_wrong_and_not_followed(tune):
    def cost(values):
        return {"naive": 100, "builtin": 80, "sdpa": 20}[values["attention"]]

    search, _ = tune(cost, over=("attention",), loss=lambda values: 5.0 + 0.001 * (values["attention"] == "sdpa"))

    (wrong,) = [row for row in search.rows if row["status"] == "wrong"]
    assert wrong["config"]["attention"] == "sdpa"
    assert "loss 5.001 instead of 5" in wrong["reason"]
    assert search.best.config["attention"] == "builtin"


def test_a_loss_may_stray_as_far_as_its_dtype_allows(tune):
    def loss(values):
        return 5.0 + 0.1 * (values["dtype"] == "bf16")

    search, _ = tune(lambda values: 100 - 30 * (values["dtype"] == "bf16"), over=("dtype",), loss=loss)

    assert search.best.run["dtype"] == "bf16"


def test_each_batch_has_a_plainest_variant_of_its_own(tune):
    def cost(values):
        return (100 - 20 * (values["attention"] == "sdpa")) / min(values["batch"], 8)

    # The loss depends on the batch, as other data does.
    search, _ = tune(cost, over=("attention", "batch"), loss=lambda values: 5.0 + values["batch"])

    assert not [row for row in search.rows if row["status"] == "wrong"]
    references = rows(search, "reference")
    assert {row["config"]["batch"] for row in references} == {8, 16}
    assert {row["config"]["attention"] for row in references} == {"naive"}


def test_it_ends_with_the_time_and_says_what_was_not_tried(tune):
    clock = FakeClock(30.0, lambda values: 100.0 if values["compile"] != "off" else 1.0)

    search, _ = tune(lambda values: 100.0, over=("linear", "compile", "checkpoint"), clock=clock)

    assert search.stopped == "time" and clock.now <= 31
    assert [entry["turned"] for entry in search.not_tried] == [{"compile": "default"}]
    # What was begun and not finished has no row: it can be tried with more time.
    assert all(row["run"]["compile"] == "off" for row in search.rows)
    assert rows(search, "again")


def test_a_point_that_takes_far_too_long_is_killed_and_the_rest_goes_on(tune):
    clock = FakeClock(1000.0, lambda values: 500.0 if values["dtype"] == "bf16" else 1.0)

    search, _ = tune(lambda values: 100 - 20 * (values["checkpoint"] == 1), over=("dtype", "checkpoint"), clock=clock)

    (late,) = [row for row in search.rows if row["status"] == "timeout"]
    assert "the best so far took 1.00 s" in late["reason"]
    assert clock.now < 60 and search.best.config["checkpoint"] == 1


def test_a_search_goes_on_where_it_was_stopped(tune):
    def cost(values):
        return 100 - 20 * (values["linear"] == "linear") - 10 * (values["attention"] == "sdpa")

    whole, _ = tune(cost, over=("attention", "linear", "optimizer"), folder="whole")
    first, early = tune(cost, over=("attention", "linear", "optimizer"), clock=FakeClock(9.0))
    second, late = tune(cost, over=("attention", "linear", "optimizer"))

    assert first.stopped == "time" and second.stopped == "settled"
    assert second.best.hash == whole.best.hash
    searched = [row["hash"] for row in second.rows]
    assert len(searched) == len(set(searched)) == len(early.ran) + len(late.ran)
    third, none = tune(cost, over=("attention", "linear", "optimizer"))
    assert none.ran == [] and third.best.hash == second.best.hash


def test_back_ends_of_attention_are_given_up_where_nothing_calls_it(tune):
    search, runner = tune(lambda values: "unproven" if values["sdpa"] != "free" else 100.0, over=("sdpa",))

    assert [values["sdpa"] for values in runner.ran if values["sdpa"] != "free"] == ["flash"]
    assert [entry["turned"] for entry in search.not_tried] == [{"sdpa": "math"}]


@pytest.mark.parametrize(
    ("words", "over", "said"),
    [
        (["seq_len=64,128"], [], "seq_len changes the result"),
        (["optimizer=adamw,sgd"], [], "AdamW"),
        (["mode=step,forward"], [], "mode must be"),
        (["batch=8"], ["batch"], "remove one of them"),
        ([], ["bach"], "did you mean batch?"),
        ([], ["d_model"], "d_model changes the result"),
        (["preset=small"], [], "one preset at a time"),
    ],
)
def test_what_cannot_be_searched_is_refused(tune, words, over, said):
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        tune(lambda values: 1.0, *words, over=over)


def test_only_alternatives_that_compute_the_same_are_searched():
    nano = find("nano")
    grid = Grid(nano, CPU)

    def axes(*words):
        return {axis.name: axis.values for axis in search_space(nano, grid, grid.words(words), ()).axes}

    assert "attention" not in axes("preset=tiny") and axes("preset=tiny")["written_out"] == (True, False)
    both = ("sparse_mask", "sparse_flex")
    assert axes("preset=tiny", f"attention={','.join(both)}")["attention"] == both
    with pytest.raises(UsageError, match="compute different things"):
        axes("preset=tiny", "attention=dense,sparse_mask")


def test_a_users_own_knob_is_searched_when_asked_and_held_by_its_loss(tune):
    workload = gated()
    search, _ = tune(
        lambda values: 100 / values["width"], "width=8,16", workload=workload, loss=lambda values: values["width"]
    )
    assert {row["config"]["width"] for row in search.rows if row["status"] == "wrong"} == {16}
    assert search.best.config["width"] == 8
