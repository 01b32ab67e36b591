"""The parts of a clean step on each rank: what a late rank takes longer than the others."""

from __future__ import annotations

from types import SimpleNamespace

from handmade import MS, cpu_facts, sample, write_recording
from stepscope.session.rank_times import clean_times


def ranks_of(tmp_path, *data_ms):
    summaries = []
    for rank, ms in enumerate(data_ms):
        host = {"data": ms * MS, "forward": 3 * MS, "backward": (20 - ms) * MS, "optimizer": 2 * MS, "other": MS}
        folder = tmp_path / (f"rank{rank}" if rank else "")
        write_recording(
            folder, cpu_facts(), [{**sample(step, host_ns=host), "wall_ns": 26 * MS} for step in range(8)]
        )
        summaries.append(SimpleNamespace(rank=rank, path=str(folder / "trace" / f"rank{rank}.json.gz")))
    return summaries


def test_the_backward_has_the_waiting_and_is_left_out(tmp_path):
    times = clean_times(ranks_of(tmp_path / "run", 2, 14))

    assert times.columns == ["rank", "data_ns", "forward_ns", "optimizer_ns", "other_ns"]
    assert times["data_ns"].to_list() == [2 * MS, 14 * MS] and times["forward_ns"].to_list() == [3 * MS, 3 * MS]


def test_a_trace_that_is_in_no_recording_has_none(tmp_path):
    summaries = ranks_of(tmp_path / "run", 2, 14)
    assert clean_times([*summaries, SimpleNamespace(rank=2, path=str(tmp_path / "traces" / "x" / "r.json"))]) is None
