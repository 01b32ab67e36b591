"""Figures of a sweep from hand-written rows: exact numbers, who competes with whom, what is marked."""

from __future__ import annotations

import pytest

from stepscope.analysis.comparison.sweeps import sweep_of, varying_axes
from stepscope.devices import find_device

RUN = {
    "mode": "step", "dtype": "bf16", "bf16_reduction": "auto", "compile": "off", "sdpa": "free",
    "optimizer": "adamw", "warmup": 3, "steps": 3, "seed": 0, "device": "cuda",
}  # fmt: skip
ENVIRONMENTS = {"e": {"device_name": "NVIDIA H200"}}


def row(number, ns, variant="plain", seq_len=64, status="ok", **more):
    run = {**RUN, **more.pop("run", {})}
    return {
        "hash": str(number),
        "workload": "w",
        "preset": more.pop("preset", "small"),
        "config": {"variant": variant, "seq_len": seq_len, **more.pop("config", {})},
        "run": run,
        "status": status,
        "reason": None if status == "ok" else "why",
        "reference": {"variant": "plain"},
        "samples_device_ns": [ns, ns, ns] if isinstance(ns, int) else ns,
        "samples_host_ns": [ns] if isinstance(ns, int) else ns,
        "num_tokens": 1000,
        "num_parameters": 10,
        "environment_hash": "e",
        **more,
    }


def summary(*rows):
    return sweep_of(rows, ENVIRONMENTS, lambda name: (find_device(name), None))


def test_rates_and_mfu():
    flops = {"flops_formula": 989_400_000_000, "flops_counted": 10, "flops_counted_by_dtype": {"bf16": 10}}

    (point,) = summary(row(1, 2_000_000, **flops)).points

    assert point.time.median == 2_000_000 and point.tokens_per_s == 500_000
    assert point.flops_per_s == pytest.approx(989.4e12 / 2)
    assert point.mfu.share == pytest.approx(0.5) and "NVIDIA H200" in point.mfu.limit


def test_flops_are_held_against_the_peak_of_each_dtype_they_were_counted_in():
    peaks = find_device("NVIDIA H200").peak_flops
    counted = {"bf16": 3, "fp32": 1}
    flops = 4 * 10**12
    (point,) = summary(row(1, 10**9, flops_formula=flops, flops_counted_by_dtype=counted)).points

    assert point.mfu.share == pytest.approx(flops * (0.75 / peaks["bf16"] + 0.25 / peaks["fp32"]))


def test_without_a_known_device_or_flops_there_is_no_mfu():
    unknown = sweep_of([row(1, 10, flops_formula=5)], {"e": {"device_name": "x"}}, lambda name: (None, None))
    assert unknown.points[0].mfu is None and unknown.points[0].flops_per_s is not None
    assert summary(row(1, 10)).points[0].mfu is None


def test_rows_that_differ_in_how_they_compute_compete_and_others_do_not():
    points = summary(
        row(1, 400),
        row(2, 100, "fast"),
        row(3, 200, "fast", run={"compile": "default"}),
        row(4, 50, seq_len=32),
        row(5, 10, "broken", status="unproven"),
        row(6, 90, "fast", run={"dtype": "fp32"}),
    ).points

    assert [point.is_best for point in points] == [False, True, False, False, False, False]
    assert [point.speedup for point in points] == [1.0, 4.0, 2.0, None, None, None]


def test_the_plainest_need_be_plain_only_in_what_varies():
    run = {"compile": "default"}
    plain, fast = summary(row(1, 300, run=run), row(2, 100, "fast", run=run)).points

    assert (plain.speedup, fast.speedup) == pytest.approx((1.0, 3.0))


def test_what_cannot_be_told_from_the_best_is_tied():
    best, tied, apart = summary(
        row(1, [100, 101, 102] * 2), row(2, [102, 103, 104] * 2, "near"), row(3, [200, 201, 202] * 2, "far")
    ).points

    assert best.is_best and tied.is_tied and not apart.is_tied


def test_of_few_samples_no_tie_is_said():
    best, near = summary(row(1, [100, 101, 102]), row(2, [102, 103, 104], "near")).points
    assert best.is_best and not near.is_tied


def test_ties_of_searches_for_the_largest_batch_are_by_the_token():
    small, large = summary(
        row(1, [100] * 6, config={"batch": 1}, max_batch=1, num_tokens=10),
        row(2, [390] * 6, "fast", config={"batch": 4}, max_batch=4, num_tokens=20),
    ).points
    assert small.is_best and not large.is_tied


def test_rows_that_drop_work_do_not_compete_with_rows_that_drop_none():
    formula = {"flops_formula": 1000}
    plain, fast, dropping, dropping_too = summary(
        row(1, 400, **formula),
        row(2, 300, "fast", **formula),
        row(3, 100, "capacity", facts={"dropped_share": 0.25, "dropped_flops": 100.0}, **formula),
        row(4, 200, "capacity", run={"compile": "default"}, facts={"dropped_share": 0.25}),
    ).points

    assert [p.is_best for p in (plain, fast, dropping, dropping_too)] == [False, True, True, False]
    assert dropping.speedup == 4.0 and dropping.differs == "some dropped against none dropped"
    assert fast.differs is None
    assert dropping.flops_per_s == pytest.approx((1000 - 3 * 100) / 100e-9)


def test_sgd_does_not_compete_with_adamw():
    adamw, fused, sgd = summary(
        row(1, 300), row(2, 200, run={"optimizer": "fused"}), row(3, 100, run={"optimizer": "sgd"})
    ).points

    assert (adamw.is_best, fused.is_best, sgd.is_best) == (False, True, False)
    assert fused.differs is None and "optimizer=sgd" in sgd.differs and sgd.speedup == pytest.approx(3.0)
    forwards = [row(n, 100, run={"mode": "forward", "optimizer": name}) for n, name in enumerate(("adamw", "sgd"))]
    assert all(point.differs is None for point in summary(*forwards).points)


@pytest.mark.parametrize("knob", ["seed", "warmup", "steps"])
def test_repetitions_do_not_compete_with_each_other(knob):
    points = summary(row(1, 400, run={knob: 7}), row(2, 300, run={knob: 8})).points
    assert [(p.is_best, p.is_tied, p.speedup) for p in points] == [(False, False, None)] * 2

    points = summary(row(1, 400, run={knob: 7}), row(2, 300, run={knob: 8}), row(3, 200, "x", run={knob: 8})).points
    assert [(p.is_best, p.speedup) for p in points] == [(False, None), (False, 1.0), (True, pytest.approx(1.5))]


def test_alternatives_are_compared_by_name_and_only_equals_compete():
    more = {"alternatives": {"attention": [["dense"], ["mask", "flex"]]}}
    dense, mask, flex = summary(
        row(1, 400, config={"attention": "dense"}, **more),
        row(2, 800, config={"attention": "mask"}, **more),
        row(3, 100, config={"attention": "flex"}, **more),
    ).points

    assert (dense.is_best, mask.is_best, flex.is_best) == (False, False, True)
    assert (dense.speedup, mask.speedup, flex.speedup) == (1.0, 0.5, 4.0)
    assert dense.differs is None and flex.differs == "attention=mask or flex against attention=dense"


def test_knobs_that_do_not_apply_to_a_whole_step_are_no_axes():
    whole = [
        row(1, 400, run={"optimizer": "adamw"}),
        row(2, 300, run={"optimizer": "sgd"}),
        row(3, None, status="oom"),
    ]
    for one in whole[:2]:
        del one["num_parameters"]
    del whole[2]["num_parameters"], whole[2]["num_tokens"]  # it never came so far
    sweep = summary(*whole)

    names = {*sweep.varying, *sweep.constants}
    assert not names & {"mode", "dtype", "compile", "sdpa", "optimizer"} and "device" in names
    assert not any(point.is_best for point in sweep.points)


def test_notes_come_along():
    assert summary(row(1, 5, notes=["the loss is nan"])).points[0].notes == ("the loss is nan",)


def test_noise_is_marked():
    quiet, noisy = summary(row(1, [100] * 9 + [101]), row(2, [100, 100, 130], "x")).points
    assert (quiet.is_noisy, noisy.is_noisy) == (False, True)


def test_a_search_for_the_largest_batch_is_ranked_by_the_token():
    small, large = summary(
        row(1, 100, config={"batch": 1}, max_batch=1, num_tokens=10),
        row(2, 200, "fast", config={"batch": 4}, max_batch=4, num_tokens=40),
    ).points

    assert large.is_best and not small.is_best and large.speedup == pytest.approx(2.0)


def test_a_row_without_samples_keeps_its_status():
    failed = row(1, None, status="oom")
    sweep = summary(failed, row(2, 5, "x"))
    assert sweep.points[0].time is None and sweep.num_by_status == {"oom": 1, "ok": 1}


def test_what_follows_from_the_preset_is_no_axis_of_its_own():
    axes = [
        {"preset": "a", "width": 1, "batch": 1, "seed": 0},
        {"preset": "a", "width": 1, "batch": 2, "seed": 0},
        {"preset": "b", "width": 9, "batch": 1, "seed": 0},
    ]
    assert varying_axes(axes) == (("preset", "batch"), {"seed": 0})
    assert varying_axes([{**values, "preset": "a"} for values in axes])[0] == ("width", "batch")


def test_steps_until_compiling_has_paid_against_the_same_row_uncompiled():
    compiled = {"compile": "default"}
    eager, fast, slow, other = summary(
        row(1, 3_000_000, loss=2.0),
        row(2, 1_000_000, run=compiled, compile_ns=2_000_000_000, first_call_ns=1_000_000, loss=2.01),
        row(3, 4_000_000, run={"compile": "reduce-overhead"}, compile_ns=1_000_000, loss=2.0),
        row(4, 1_000_000, variant="other", run=compiled, compile_ns=1_000_000),
    ).points

    assert fast.break_even_steps == 1000 and fast.loss_deviation == pytest.approx(0.005)
    assert eager.break_even_steps is slow.break_even_steps is other.break_even_steps is None
    assert eager.loss_deviation is None and slow.loss_deviation == 0
