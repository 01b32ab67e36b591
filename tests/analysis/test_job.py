"""The work of all ranks together, and the ranks of which nothing is known."""

import json

import pytest

from stepscope import open as open_session
from stepscope.analysis.ranks.job import RankWork, job_throughput
from stepscope.session.job import processes_of

SECOND_NS = 1_000_000_000


def test_rates_are_added_each_over_its_own_time():
    job = job_throughput([RankWork(0, 8, 10, SECOND_NS), RankWork(1, 24, 10, 2 * SECOND_NS)], 2)
    assert (job.per_step, job.per_s) == (32, 80 + 120)
    assert (job.recorded, job.missing, job.is_complete) == ((0, 1), (), True)


def test_a_missing_rank_is_named_and_not_guessed():
    job = job_throughput([RankWork(3, 8, 10, SECOND_NS), RankWork(0, 8, 10, SECOND_NS)], 4)
    assert (job.per_step, job.per_s) == (16, 160)
    assert (job.recorded, job.missing, job.is_complete) == ((0, 3), (1, 2), False)


@pytest.mark.parametrize("unknown", [RankWork(1, None, 10, SECOND_NS), RankWork(1, 8, 0, 0), RankWork(1, 8, 10, 0)])
def test_a_rank_without_work_makes_the_sum_unknown(unknown):
    job = job_throughput([RankWork(0, 8, 10, SECOND_NS), unknown], 2)
    assert (job.per_step, job.per_s, job.missing) == (None, None, ())


def test_without_any_rank_nothing_is_known():
    job = job_throughput([], 2)
    assert (job.per_step, job.per_s, job.recorded, job.missing) == (None, None, (), (0, 1))


def test_a_rank_beyond_the_world_size_raises_it():
    assert job_throughput([RankWork(2, 8, 10, SECOND_NS)], 1).missing == (0, 1)


def write(folder, **environment):
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"schema_version": 1, "status": "finished", "environment": environment}
    (folder / "recording.json").write_text(json.dumps(facts))


def test_the_processes_of_a_folder_are_its_ranks_and_others(tmp_path):
    write(tmp_path, rank=0, world_size=4)
    for rank in (10, 2):
        write(tmp_path / f"rank{rank}", rank=rank, world_size=12)
    write(tmp_path / "process77")
    (tmp_path / "rank3").mkdir()
    (tmp_path / "processes").mkdir()
    found = processes_of(open_session(tmp_path))
    assert list(found.ranks) == [0, 2, 10]
    assert found.missing == (1, 3, 4, 5, 6, 7, 8, 9, 11)
    assert [each.path.name for each in found.others] == ["process77"]


def test_a_run_of_one_process_is_one_rank(tmp_path):
    write(tmp_path)
    found = processes_of(open_session(tmp_path))
    assert (found.world_size, list(found.ranks), found.missing, found.others) == (1, [0], (), ())
