"""Which collective hangs, from dumps: missing ranks, other calls, several groups, old and damaged files."""

from __future__ import annotations

import json
import os

import pytest

import stepscope
from dump_maker import START_NS, call, calls, dump, write
from stepscope.errors import UsageError

USUAL = ("broadcast 8 train.py:3", "all_reduce 8 train.py:5", "all_gather 8 train.py:7", "all_reduce 8 train.py:9")


def ranks_of(found):
    return [each.rank for each in found.absent]


def test_the_rank_that_did_not_come_is_named_with_its_last_line(tmp_path):
    hang = stepscope.hang(write(tmp_path / "dumps", {0: calls(*USUAL), 1: calls(*USUAL), 2: calls(*USUAL[:3])}))
    first = hang.first

    assert (first.kind, first.collective, first.number, first.place) == (
        "missing",
        "all_reduce",
        4,
        "train.py:9 step",
    )
    assert first.arrived == (0, 1) and ranks_of(first) == [2] and first.absent[0].place == "train.py:7 step"
    assert not first.skipped and not hang.is_deadlock and hang.no_dump == ()
    assert "Rank 2 did not come to all_reduce 4" in str(hang) and json.loads(json.dumps(hang.to_json()))


def test_a_skipped_collective_is_named_although_all_later_ones_fit(tmp_path):
    loop = [f"all_reduce 8 train.py:{line}" for line in (5, 6, 5, 6, 5, 6)]
    first = stepscope.hang(
        write(tmp_path / "dumps", {0: calls(*loop), 1: calls(*loop), 2: calls(*loop[:2], *loop[3:])})
    ).first

    assert (first.number, ranks_of(first)) == (6, [2])
    assert [(each.rank, each.number, each.place) for each in first.skipped] == [(2, 3, "train.py:5 step")]


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("all_gather 8 train.py:5", "operation"),
        ("all_reduce 9 train.py:5", "sizes"),
        ("all_reduce 8 train.py:5 BFloat16", "dtypes"),
    ],
)
def test_another_call_than_the_others_made(other, kind, tmp_path):
    odd = calls(USUAL[0], other, *USUAL[2:])
    hang = stepscope.hang(write(tmp_path / "dumps", {0: odd, 1: calls(*USUAL), 2: calls(*USUAL), 3: calls(*USUAL)}))

    assert (hang.first.kind, hang.first.number, ranks_of(hang.first)) == (kind, 2, [0])
    assert hang.first.arrived == (1, 2, 3) and hang.first.absent[0].place == "train.py:5 step"
    assert "Rank 0 called" in str(hang)


def test_uneven_gathers_and_scatters_are_no_mismatch(tmp_path):
    def uneven(rank):
        sizes = {"input_sizes": [[rank + 1]], "output_sizes": [[1], [2]]}
        return [
            call("all_gather", 1, **sizes),
            call("all_to_all", 2, input_sizes=[[rank]], output_sizes=[[5 - rank]]),
        ]

    hang = stepscope.hang(write(tmp_path / "dumps", {0: uneven(0), 1: uneven(1)}))

    assert hang.first is None and "No collective diverges" in str(hang)


def test_a_rank_without_a_dump_is_suspected_only_if_no_other_is(tmp_path):
    waiting = [*calls(*USUAL[:2]), call(USUAL[2], 3, state="started", retired=False)]
    world = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    folder = write(tmp_path / "dumps", {rank: dump(waiting, world) for rank in (0, 1, 2)})
    hang = stepscope.hang(folder)

    assert (hang.first.kind, hang.first.number, hang.first.no_dump) == ("missing", 3, (3,))
    assert hang.first.arrived == (0, 1, 2) and hang.no_dump == (3,) and "left no dump" in str(hang)
    write(folder, {1: dump(waiting[:2], world)})
    assert ranks_of(stepscope.hang(folder).first) == [1]


def test_all_ranks_came_and_it_does_not_end(tmp_path):
    waiting = [*calls(USUAL[0]), call(USUAL[1], 2, state="started", retired=False)]
    first = stepscope.hang(write(tmp_path / "dumps", {0: waiting, 1: waiting})).first

    assert (first.kind, first.number, first.arrived, first.absent) == ("unfinished", 2, (0, 1), ())


GROUPS = {
    "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
    "1": {"name": "1", "desc": "left", "ranks": "[0, 1]"},
    "2": {"name": "2", "desc": "right", "ranks": "[2, 3]"},
}


def test_the_cause_comes_before_what_follows_from_it(tmp_path):
    # Rank 1 does not come to its pair's collective; the others wait for that pair in the world's.
    left = [*calls(USUAL[0]), call("all_reduce 4 train.py:20", 1, "1", time_created_ns=START_NS + 10**10)]
    right = [*calls(USUAL[0]), call("all_reduce 4 train.py:20", 1, "2"), call(USUAL[1], 2)]
    made = {0: left, 1: calls(USUAL[0]), 2: right, 3: right}
    hang = stepscope.hang(write(tmp_path / "dumps", {rank: dump(each, GROUPS) for rank, each in made.items()}))

    assert [(each.group, ranks_of(each)) for each in hang.divergences] == [("0", [0, 1]), ("1", [1])]
    assert not hang.divergences[0].is_consequence, "rank 1 waits nowhere"
    only = [*calls(USUAL[0]), call("all_reduce 4 train.py:20", 1, "1"), call(USUAL[1], 2)]
    made[1] = only  # rank 1 came to both: now rank 0 alone is missing in the world, and waits nowhere
    hang = stepscope.hang(write(tmp_path / "dumps", {rank: dump(each, GROUPS) for rank, each in made.items()}))
    assert [(each.group, ranks_of(each)) for each in hang.divergences] == [("0", [0])]


def test_ranks_that_wait_for_one_another_in_two_groups_are_a_deadlock(tmp_path):
    groups = {"1": {"desc": "a", "ranks": "[0, 1]"}, "2": {"desc": "b", "ranks": "[0, 1]"}}
    made = {0: [call("all_reduce 8 train.py:3", 1, "1")], 1: [call("all_reduce 8 train.py:4", 1, "2")]}
    hang = stepscope.hang(write(tmp_path / "dumps", {rank: dump(each, groups) for rank, each in made.items()}))

    assert hang.is_deadlock and {each.group for each in hang.divergences} == {"1", "2"}
    assert all(each.is_consequence for each in hang.divergences) and "Deadlock" in str(hang)


def test_a_rank_that_waits_elsewhere_is_not_the_cause(tmp_path):
    # Rank 0 waits for rank 1 in the pair; ranks 2 and 3 wait for rank 0 alone in a group of three.
    groups = {"1": {"desc": "pair", "ranks": "[0, 1]"}, "3": {"desc": "three", "ranks": "[0, 2, 3]"}}
    three = [call("all_reduce 8 train.py:9", 1, "3")]
    made = {
        0: [call("all_reduce 4 train.py:2", 1, "1", time_created_ns=START_NS + 10**10)],
        1: [],
        2: three,
        3: three,
    }
    status = {1: {"pg_status": {"1": {"last_enqueued_collective": 0}}}}
    hang = stepscope.hang(
        write(tmp_path / "dumps", {rank: dump(each, groups, **status.get(rank, {})) for rank, each in made.items()})
    )

    assert [(each.group, ranks_of(each), each.is_consequence) for each in hang.divergences] == [
        ("1", [1], False),
        ("3", [0], True),
    ]


def test_a_send_without_its_receive(tmp_path):
    def p2p(name, number):
        return call("send", 0, profiling_name=f"nccl:{name}", p2p_seq_id=number, is_p2p=True, record_id=number - 1)

    made = {0: [p2p("send 0->1", 1), p2p("send 0->1", 2)], 1: [p2p("recv 1<-0", 1)]}
    first = stepscope.hang(write(tmp_path / "dumps", made)).first

    assert (first.kind, first.collective, first.number, first.arrived) == ("point_to_point", "send", 2, (0,))
    assert ranks_of(first) == [1]


def test_the_buffers_have_only_the_last_calls(tmp_path):
    late = [call(f"all_reduce 8 train.py:{number}", number) for number in range(500, 510)]
    hang = stepscope.hang(write(tmp_path / "dumps", {0: late, 1: late[3:], 2: late[:8]}))

    assert (hang.first.number, ranks_of(hang.first)) == (508, [2])
    assert any("TORCH_FR_BUFFER_SIZE" in note for note in hang.notes)
    beyond = stepscope.hang(write(tmp_path / "dumps", {2: late[:1]})).first
    assert (beyond.number, ranks_of(beyond), beyond.collective) == (501, [2], "all_reduce")


def test_a_dump_of_an_earlier_attempt_is_left_out(tmp_path):
    day = 86_400 * 10**9
    old = [entry | {"time_created_ns": entry["time_created_ns"] - day} for entry in calls(*USUAL[:2])]
    hang = stepscope.hang(write(tmp_path / "dumps", {0: calls(*USUAL), 1: calls(*USUAL), 2: old}))

    assert hang.ranks == (0, 1) and hang.no_dump == (2,) and (hang.first.number, hang.first.no_dump) == (4, (2,))
    assert [note for note in hang.notes if note.startswith("nccl_trace_rank_2 was left out") and "86,40" in note]


def test_damaged_files_are_named_and_the_others_read(tmp_path):
    folder = write(tmp_path / "dumps", {0: calls(*USUAL), 1: calls(*USUAL[:3]), 2: calls(*USUAL)})
    whole = (folder / "nccl_trace_rank_2").read_bytes()
    (folder / "nccl_trace_rank_2").write_bytes(whole[: len(whole) // 2])
    (folder / "nccl_trace_rank_3").write_bytes(b"")
    os.utime(folder / "nccl_trace_rank_3", (2e9, 2e9))  # the newest
    (folder / "notes_4.txt").write_text("not a dump")
    hang = stepscope.hang(folder)

    assert hang.ranks == (0, 1) and ranks_of(hang.first) == [1]
    assert [note.split()[0] for note in hang.notes] == ["nccl_trace_rank_2", "nccl_trace_rank_3"]
    for path in folder.iterdir():
        path.write_bytes(b"\x80")
    with pytest.raises(UsageError, match="no flight-recorder dump that can be read"):
        stepscope.hang(folder)
    with pytest.raises(UsageError, match="not a folder"):
        stepscope.hang(tmp_path / "nothing")
