"""Whatever a point does, it ends as a row, and the next one runs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.sweep.protocol import Request
from stepscope.sweep.runner import Options
from stepscope.sweep.server import Server

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="limits and signals of Linux")


@pytest.mark.long
@linux_only
def test_every_kind_of_end_is_a_row_and_the_rest_of_the_grid_completes(rows_of):
    kinds = "ok,segfault,exit,sys_exit,raise,killed,huge,python_huge,hang,threads"

    rows = rows_of("build", f"kind={kinds}", "width=8", options=Options(timeout_s=8))

    by_kind = {row["config"]["kind"]: row for row in rows}
    statuses = {kind: row["status"] for kind, row in by_kind.items()}
    assert statuses == {
        "ok": "ok",
        "segfault": "crashed",
        "exit": "crashed",
        "sys_exit": "crashed",
        "raise": "crashed",
        "killed": "crashed",
        "huge": "oom",
        "python_huge": "oom",
        "hang": "timeout",
        "threads": "ok",  # a fork can use threads: the server has never run an op
    }
    assert by_kind["segfault"]["signal"] == "SIGSEGV"
    assert "odd_workloads.py" in by_kind["segfault"]["reason"]
    assert by_kind["exit"]["exit_code"] == 3 and by_kind["exit"]["reason"].endswith("leaving")
    assert by_kind["sys_exit"]["exit_code"] == 4
    assert by_kind["raise"]["reason"] == "ValueError in stage build: no such thing"
    assert by_kind["killed"]["signal"] == "SIGKILL"
    assert [kind for kind, row in by_kind.items() if row.get("killed")] == ["killed"]  # the only one from outside
    assert "killed after 8 s in stage build" in by_kind["hang"]["reason"]
    huge = by_kind["huge"]
    assert huge["oom"]["asked_bytes"] == 1 << 40
    # Nothing was allocated before: all that the point may use can be free.
    assert 0 < huge["oom"]["free_bytes"] <= huge["oom"]["total_bytes"] < 1 << 40
    assert huge["reason"].startswith("needed 1.00 TiB with ")
    assert 0 < by_kind["python_huge"]["oom"]["free_bytes"] < 1 << 40


@linux_only
def test_a_point_can_neither_answer_for_the_server_nor_leave_anything_behind(rows_of, server, tmp_path):
    rows = rows_of("troublesome", "trouble=garbage,daemon,impossible", f"pid_file={tmp_path / 'pid'}")

    assert [row["status"] for row in rows] == ["ok", "ok", "skipped"]
    assert rows[2]["reason"] == "width=8: must be a multiple of 3"
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert Path(f"/proc/{server._process.pid}").exists()


class Stub(Server):
    """A server that is a line of Python; a grandchild keeps its pipe open for a while."""

    code = ""

    def _begin(self):
        code = f"import os, subprocess; subprocess.Popen(['sleep', '30']); input(); {self.code}"
        return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@linux_only
@pytest.mark.parametrize(
    ("code", "exit_code"),
    [(r"os.write(1, b'\xff\xfe\n'); input()", -9), (r"os.write(1, b'{}\n'); input()", -9), ("os._exit(3)", 3)],
)
def test_an_answer_that_cannot_be_read_is_a_crash_and_so_is_a_server_that_is_gone(code, exit_code):
    began = time.monotonic()
    request = Request(workload="", preset=None, config={}, run={}, result_path="", log_path="")

    with Stub("fork") as server:
        server.code = code
        ending = server.run(request)

    assert ending.exit_code == exit_code and time.monotonic() - began < 25


@linux_only
def test_the_server_has_one_thread_so_that_its_forks_have_all_they_need(rows_of, server):
    rows_of("build", "kind=threads")

    assert len(list(Path(f"/proc/{server._process.pid}/task").iterdir())) == 1


def test_what_a_point_prints_is_in_its_log(rows_of, tmp_path):
    (row,) = rows_of("build", "kind=exit")

    assert (tmp_path / "sweep" / "logs" / f"{row['hash']}.txt").read_text() == "leaving\n"


def test_a_point_has_its_figures(rows_of):
    (row,) = rows_of("GATED", "variant=same", "preset=wide")

    assert row["status"] == "ok", row["reason"]
    assert row["num_parameters"] == 16 * 16 + 16
    assert len(row["samples_host_ns"]) == 2 and row["samples_device_ns"] == row["samples_host_ns"]
    assert row["first_call_ns"] > 0 and row["samples_warmup_ns"] == []
    assert row["flops_formula"] == 3 * 2 * 4 * 16 * 16
    # Inputs need no gradient: two of the three products are there.
    assert row["flops_counted"] == 2 * 2 * 4 * 16 * 16
    assert row["flops_coverage"] == pytest.approx(2 / 3)
    assert row["proofs"] == {"variant": "aten::addmm ×1"} and row["facts"] == {"density": 0.5}
    weights = 4 * (16 * 16 + 16)
    inputs = 2 * 4 * 4 * 16
    assert weights + inputs < row["before_backward_bytes"] < row["peak_allocated_bytes"] < 4 * (weights + inputs)
    assert row["gate"]["sizes"] == {"width": 4, "batch": 3} and row["gate"]["passed"]
    assert row["gate"]["deviations"]["gradients"] < 1e-5


def test_losses_of_equal_variants_are_equal(rows_of):
    plain, same = rows_of("GATED", "variant=plain,same")

    assert plain["loss"] == pytest.approx(same["loss"], rel=1e-6)


def test_a_wrong_variant_is_not_timed(rows_of):
    wrong, gradient, nan = rows_of("GATED", "variant=wrong,wrong_gradient,nan")

    assert {row["status"] for row in (wrong, gradient, nan)} == {"wrong"}
    assert wrong["gate"]["deviations"]["outputs"] == pytest.approx(0.01, rel=1e-3)
    assert "samples_host_ns" not in wrong
    assert "gradient of layer" in gradient["reason"] and gradient["gate"]["deviations"]["outputs"] < 1e-5
    assert nan["gate"]["deviations"]["outputs"] is None


def test_without_a_backward_gradients_are_not_compared(rows_of):
    (row,) = rows_of("GATED", "variant=wrong_gradient", "mode=forward", "steps=1")

    assert row["status"] == "ok" and "gradients" not in row["gate"]["deviations"]


def test_a_claim_that_nothing_shows_is_unproven_with_its_samples_kept(rows_of):
    (row,) = rows_of("GATED", "variant=lying")

    assert row["status"] == "unproven" and "variant=lying" in row["reason"]
    assert len(row["samples_host_ns"]) == 2


def test_the_gate_runs_once_for_points_that_differ_in_nothing_it_sees(rows_of):
    first, second, other = rows_of("GATED", "variant=same", "width=8,32") + rows_of("GATED", "variant=plain")

    assert second["gate"]["run_by"] == first["hash"] and "run_by" not in first["gate"]
    assert "run_by" not in other["gate"]


def test_what_cannot_run_here_is_skipped_with_the_reason(rows_of):
    rows = [
        *rows_of("build", "dtype=tf32"),
        *rows_of("build", "sdpa=cudnn"),
        *rows_of("build", "compile=reduce-overhead"),
        *rows_of("whole", "mode=forward"),
    ]

    assert [row["status"] for row in rows] == ["skipped"] * 4
    assert "tf32" in rows[0]["reason"] and "complete training step" in rows[3]["reason"]


def test_a_device_that_is_not_there_is_skipped(rows_of):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    (row,) = rows_of("build", "device=cuda")
    assert (row["status"], row["reason"]) == (
        "skipped",
        "no CUDA device found: use --device cpu, or run `stepscope doctor`",
    )


def test_a_loop_of_ones_own_is_timed_as_it_is(rows_of):
    (row,) = rows_of("whole", "mode=step")

    assert row["status"] == "ok" and len(row["samples_host_ns"]) == 2
    assert row["loss"] > row["final_loss"] and "gate" not in row


@pytest.mark.parametrize("mode", ["inference", "forward", "step"])
def test_modes(rows_of, mode):
    (row,) = rows_of("GATED", f"mode={mode}", "optimizer=handwritten")

    assert row["status"] == "ok", row["reason"]
    assert (row["loss"] is None) == (mode == "inference")
    assert (row.get("before_backward_bytes") is not None) == (mode == "step")
    flops = 2 * 4 * 8 * 8
    assert row["flops_counted"] == (2 * flops if mode == "step" else flops)


def test_bf16_weights_and_a_fused_optimizer_show_their_path(rows_of):
    (row,) = rows_of("GATED", "mode=step", "dtype=bf16", "optimizer=fused")

    assert row["status"] == "ok", row["reason"]
    assert row["flops_counted_by_dtype"].keys() == {"bf16"}
    assert row["proofs"]["optimizer=fused"].startswith("_fused_adamw")
