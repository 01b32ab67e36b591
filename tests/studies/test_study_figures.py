"""What sentences of studies are made of: how bytes grow with the length, times told apart, who sets the pace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import Unavailable
from stepscope.studies.figures import (
    HOST_SPREAD,
    against,
    is_host_bound,
    lines,
    loss_said,
    meet,
    shares,
    speeds,
    told_apart,
)
from stepscope.studies.lengths import EXACT_SHARE, Grown, grown, grows
from stepscope.studies.report import host_bound
from stepscope.studies.stored import Rows

LENGTHS = (1024, 2048, 4096, 16384)


def peaks(*lengths, constant=0.0, token=0.0, pair=0.0, batch=4):
    """Rows of a batch whose peak is made of these."""
    return [
        {"seq_len": n, "num_tokens": batch * n, "peak_bytes": constant + token * batch * n + pair * n * n}
        for n in lengths
    ]


def test_a_mask_of_three_bytes_a_pair_is_quadratic_though_its_power_is_near_one():
    assert grows(peaks(*LENGTHS, token=8192, pair=3), "peak_bytes") == (
        "grows quadratically (3.0 B per token pair + 8.00 KiB per token; pairs are 60.0 % at 16384 tokens)"
    )


def test_what_is_linear_has_nothing_for_pairs_and_what_is_there_anyway_is_told():
    assert grows(peaks(*LENGTHS, token=8192), "peak_bytes") == ("grows linearly (8.00 KiB per token)")
    assert grows(peaks(*LENGTHS[:3], token=8192, constant=5 << 30), "peak_bytes") == (
        "grows linearly (8.00 KiB per token + 5.00 GiB)"
    )
    assert grows(peaks(*LENGTHS, constant=5 << 30), "peak_bytes") == "does not grow (5.00 GiB)"


def test_two_lengths_say_what_a_token_takes_and_no_more():
    rows = peaks(1024, 4096, token=8192, constant=100)

    assert grown(rows, "peak_bytes") == Grown(None, 8192, None, None, None)
    assert grows(rows, "peak_bytes") == ("grows by 8.00 KiB per token from 1024 to 4096 tokens")
    with pytest.raises(Unavailable, match="fewer than two lengths"):
        grown(rows[:1] * 3, "peak_bytes")


def test_three_lengths_are_not_fitted_by_three_terms_for_these_fit_everything():
    found = grown(peaks(512, 1024, 2048, constant=1e6, token=300, pair=1), "peak_bytes")

    assert found.error_share > 0 and 0 in found[:3]


def test_a_peak_that_no_terms_explain_says_how_far_off_they_are():
    rows = peaks(*LENGTHS, token=8192)
    rows[1]["peak_bytes"] *= 1.5

    assert grown(rows, "peak_bytes").error_share > 0.1
    assert "% off" in grows(rows, "peak_bytes")


def test_a_step_of_an_allocator_is_no_square():
    rows = peaks(256, 512, 1024, token=1177)
    rows[-1]["peak_bytes"] *= 1.11

    assert grows(rows, "peak_bytes").startswith("grows linearly (1.19 KiB per token, up to ")


@given(*[st.floats(0, 1e10), st.floats(1, 1e7), st.floats(0, 100)])
def test_what_is_made_of_the_three_is_explained_by_them(constant, token, pair):
    rows = peaks(*LENGTHS, 65536, constant=constant, token=token, pair=pair)
    found = grown(rows, "peak_bytes")

    assert found.error_share <= EXACT_SHARE and min(found) >= 0
    assert found.pairs_share == pytest.approx(pair * 65536**2 / rows[-1]["peak_bytes"], abs=0.05)


def timed(median, low, high, num_samples=10):
    return {"time_median_ns": median, "time_ci_low_ns": low, "time_ci_high_ns": high, "num_samples": num_samples}


def test_times_whose_intervals_meet_are_not_told_apart():
    one, other, far = timed(358, 307, 449), timed(394, 269, 568), timed(700, 690, 710)

    assert meet(one, other) and meet(other, one) and not meet(one, far)
    assert "not measurably different from dense" in against(one, other, "dense")
    assert against(far, one, "dense") == "1.96 times slower than dense"
    assert not meet(one, timed(394, 269, 568, num_samples=5))  # too few for an interval


def test_a_difference_that_two_processes_of_one_point_have_is_not_told():
    base, near, far = timed(1000, 999, 1001), timed(1009, 1008, 1010), timed(1011, 1010, 1012)

    assert not told_apart(base, near) and not told_apart(near, base)
    assert against(near, base, "fp32") == "not measurably different from fp32 (less than 1 % apart)"
    assert against(far, base, "fp32") == "1.01 times slower than fp32"


def test_rows_in_which_the_gpu_waits_are_counted_in_the_note():
    rows = Rows("r", [{"seq_len": 2048, "gpu_busy_share": share} for share in (0.41, 0.2, 0.9, None)])

    assert [is_host_bound(row) for row in rows] == [True, True, False, False]
    assert host_bound(rows, ["seq_len", "gpu_busy_share"]).startswith("2 of 3 rows are host-bound")
    assert host_bound(rows, ["seq_len"]) == ""


def test_rows_are_compared_with_the_base_row_of_equal_knobs():
    rows = Rows("r", [
        timed(ns, ns, ns) | {"way": way, "mode": mode, "status": "ok"}
        for way, mode, ns in (("plain", "a", 100), ("fast", "a", 50), ("plain", "b", 100), ("fast", "b", 200))
    ])  # fmt: skip

    told = speeds(rows, "mode", lambda row, _: f" in {row['mode']}", way="plain")
    assert told == "fast is 2.00 times as fast as plain in a and fast is 2.00 times slower than plain in b"
    with pytest.raises(Unavailable, match="beside way=none"):
        speeds(rows, "mode", way="none")
    assert shares(rows, "mode", "num_samples", 1) == "a 10"


def test_where_the_host_sets_the_pace_two_processes_are_not_told_apart():
    fast, slow, slower = (timed(ns, ns - 1, ns + 1) for ns in (1000, 1000 * HOST_SPREAD - 1, 1000 * HOST_SPREAD))
    waits = {"gpu_busy_share": 0.4}

    for one, other in ((fast | waits, slow), (fast, slow | waits), (slow, fast | waits)):
        assert not told_apart(one, other)
        assert against(one, other, "dense") == (
            "not measurably different from dense (host-bound, which varies between processes)"
        )
    assert told_apart(fast | waits, slower) and against(slower | waits, fast, "dense").startswith("2.00 times slower")
    for busy in ({}, {"gpu_busy_share": None}, {"gpu_busy_share": 0.9}):
        assert told_apart(fast | busy, slow | busy)


@pytest.mark.parametrize(
    ("loss", "dtype", "told"),
    [
        (11.0625, "bf16", "11.06 ± 0.03"),
        (0.5, "bf16", "0.500 ± 0.002"),
        (300.0, "bf16", "300 ± 1"),
        (0.0, "bf16", "0.000"),
        (5.6247, "autocast_bf16", "5.625"),
    ],
)
def test_a_loss_has_the_digits_of_its_dtype(loss, dtype, told):
    assert loss_said({"loss": loss, "dtype": dtype}) == told


@pytest.mark.parametrize(("lengths", "factor", "logs"), [
    ((64, 128), 3, (False, False)), ((64, 256), 3, (True, False)), ((64, 256), 4, (True, True)),
    ((64, 128), 4, (False, False)), ((64, 128), 30, (False, True)),
])  # fmt: skip
def test_over_a_logarithmic_x_y_is_logarithmic_too(lengths, factor, logs):
    chart = lines("t", "", [{"n": n, "t": t} for n, t in zip(lengths, (1, factor))], "n", "t")

    assert (chart.log_x, chart.log_y) == logs
