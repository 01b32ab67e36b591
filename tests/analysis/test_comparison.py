"""Two subjects side by side: verdicts, tables that add up, what is refused, gates, points that belong together."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handmade import MS, cpu_recording, flops_facts, gpu_recording, sample
from memories import a_step, write_memory
from stepscope.analysis.comparison.compare import Comparison, Gate, Parts, Subject, compare_pair, decide, parse_gate
from stepscope.analysis.comparison.metrics import METRICS, Measure, neighbors_correlation
from stepscope.analysis.comparison.subjects import pair_points
from stepscope.analysis.comparison.sweeps import sweep_of
from stepscope.analysis.time.statistics import quantile
from stepscope.api import compare
from stepscope.document.comparison import headline
from stepscope.errors import UsageError
from trace_builder import TraceBuilder

STEADY = tuple(10.0 * MS + i for i in range(20))
SLOWER = tuple(1.1 * ns for ns in STEADY)


def subject(samples=STEADY, identity=None, context=None, tables=None, missing=None, **figures):
    measures = {"step_time": Measure(quantile(sorted(samples), 0.5), tuple(samples))} if samples else {}
    measures |= {name: Measure(value, samples if METRICS[name].is_rate else None) for name, value in figures.items()}
    return Subject("run", measures, identity or {}, context or {}, tables or {}, missing or {})


def gated(pair, *texts):
    results = decide([parse_gate(text) for text in texts], [pair], [])
    comparison = Comparison("recording", "a", "b", 0.02, (pair,), (), (), results)
    return [result.status for result in results], comparison.exit_code


def test_a_change_says_how_much_and_which_way():
    pair = compare_pair(
        subject(tokens_per_second=1000.0, peak_memory=100, kernels=50),
        subject(SLOWER, tokens_per_second=1000 / 1.1, peak_memory=101, kernels=45),
    )

    step, tokens = pair.change("step_time"), pair.change("tokens_per_second")
    assert step.share == pytest.approx(0.1) and step.low < 0.1 < step.high
    assert (step.verdict, step.is_worse, step.num_samples) == ("slower", True, (20, 20))
    assert tokens.share == pytest.approx(1 / 1.1 - 1) and tokens.low < tokens.share < tokens.high
    assert (tokens.verdict, tokens.p_value) == ("slower", step.p_value)
    assert (pair.change("peak_memory").verdict, pair.change("kernels").verdict) == ("same", "fewer")
    assert pair.change("mfu") is None and pair.missing == ()


def test_other_tokens_change_a_rate_and_not_the_step():
    pair = compare_pair(subject(tokens_per_second=1000.0), subject(tokens_per_second=1200.0))

    assert pair.change("step_time").verdict == "no difference shown"
    rate = pair.change("tokens_per_second")
    assert rate.verdict == "faster" and rate.low < rate.share < rate.high and rate.share == pytest.approx(0.2)


def test_significant_but_small_is_no_difference():
    barely = compare_pair(subject(), subject(tuple(1.01 * ns for ns in STEADY))).change("step_time")

    assert barely.is_significant and barely.verdict == "no difference shown" and barely.detectable_share == 0.02
    wider = compare_pair(subject(), subject(tuple(1.01 * ns for ns in STEADY)), threshold_share=0.005)
    assert wider.change("step_time").verdict == "slower"


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(-(10**9), 10**12), max_size=6),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(-(10**9), 10**12), max_size=6),
    st.integers(0, 10**13),
    st.integers(0, 10**13),
)
def test_every_table_adds_up(before, after, whole_before, whole_after):
    sides = [
        subject(tables={"phase": (Parts("a step", "ns", whole, {**rows, "unattributed": 5}),)})
        for rows, whole in ((before, whole_before), (after, whole_after))
    ]
    (table,) = compare_pair(*sides).tables

    assert sum(row.delta for row in table.rows) == table.delta == whole_after - whole_before
    assert sum(row.base for row in table.rows) == whole_before and sum(row.new for row in table.rows) == whole_after
    assert table.rows[-1].name == "unattributed"
    assert [row.name for row in table.rows].count("unattributed") == 1


def test_what_is_not_comparable_is_refused_unless_it_is_what_the_comparison_is_about():
    base = subject(identity={"device": "H100", "dtype": "bf16", "tokens": 1000, "flops": 10**12, "parameters": 5})
    new = subject(SLOWER, identity={"device": "H200", "dtype": "bf16", "tokens": 1005, "parameters": 5})

    refused = compare_pair(base, new)
    assert [(each.what, each.base, each.new) for each in refused.refused] == [("device", "H100", "H200")]
    assert refused.changes == () and refused.unchecked == ("flops",)
    assert gated(refused, "step_time:50%") == (["undecided"], 4)
    assert gated(refused) == ([], 4)
    about = compare_pair(base, new, allow=["device"])
    assert about.refused == () and [each.what for each in about.allowed] == ["device"]
    assert about.change("step_time").verdict == "slower"
    fewer = compare_pair(base, subject(identity={**base.identity, "tokens": 900, "parameters": 6}))
    assert [each.what for each in fewer.refused] == ["tokens", "parameters"]


def test_gates():
    pair = compare_pair(
        subject(peak_memory=100, tokens_per_second=100.0, kernels=0),
        subject(SLOWER, peak_memory=103, tokens_per_second=100 / 1.1, kernels=3),
    )

    assert gated(pair, "step_time:3%") == (["failed"], 3)
    assert gated(pair, "step_time:12%", "tokens_per_second:12%") == (["passed"] * 2, 0)
    assert gated(pair, "peak_memory:3%", "peak_memory:2.9%") == (["passed", "failed"], 3)
    assert gated(pair, "tokens_per_second:3%") == (["failed"], 3)
    assert gated(pair, "kernels:10%") == (["failed"], 3), "from none to some is worse by any share"
    assert gated(pair, "mfu:3%") == (["undecided"], 4)
    assert gated(pair, "mfu:3%", "step_time:3%") == (["undecided", "failed"], 3)
    few = compare_pair(subject(STEADY[:3], peak_memory=1), subject(SLOWER[:3], peak_memory=1))
    assert gated(few, "step_time:3%") == (["undecided"], 4)
    assert gated(few) == ([], 4), "no gate was asked for, and no answer found"
    assert gated(few, "peak_memory:1%") == (["passed"], 0), "a gate on what there is has been decided"
    noisy = compare_pair(
        subject([1.0, 2, 3, 4, 5, 6, 7]), subject([1.5, 2.2, 3.3, 4.4, 5.5, 6.6, 7.7])
    )  # 10 % worse, in noise of 50 %
    assert gated(noisy, "step_time:3%") == (["undecided"], 4), "they could not have shown 3 %"
    assert "record more steps" in decide([Gate("step_time", 0.03)], [noisy], [])[0].reason
    assert gated(noisy, "step_time:900%") == (["passed"], 0)
    assert decide([Gate("step_time", 0.03)], [], ["seq=1"])[0].status == "undecided"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steptime:3%", ["'steptime'", "step_time", "peak_memory"]),
        ("step_time:3", ["step_time:3%"]),
        ("step_time", ["METRIC:LIMIT%"]),
        ("step_time:-3%", ["METRIC:LIMIT%"]),
    ],
)
def test_a_gate_that_is_none(text, words):
    with pytest.raises(UsageError) as error:
        parse_gate(text)
    assert all(word in str(error.value) for word in words)


def test_what_one_side_lacks_is_said_with_what_to_run():
    parts = {"module": (Parts("a clean step", "ns", 5, {"net": 4}),), "memory": (Parts("peak", "bytes", 9, {}),)}
    new = subject((), missing={"trace": "run it with --trace 2", "step_time": "no clean step"})

    pair = compare_pair(subject(tables=parts, peak_memory=9), new)

    told = {each.what: each.reason for each in pair.missing}
    assert told == {
        "step_time": "new: no clean step",
        "peak_memory": "new: not there",
        "trace": "new: run it with --trace 2",
        "memory": "new: not there",
    }
    assert gated(pair) == ([], 4), "nothing was compared"


def test_a_machine_that_is_not_at_rest_is_told():
    drifting = tuple(10.0 * MS + i * MS / 10 for i in range(20))

    assert neighbors_correlation([1.0] * 9) == 0.0
    assert any("correlated" in note for note in compare_pair(subject(drifting), subject()).notes)
    shuffled = tuple(STEADY[i * 7 % 20] for i in range(20))
    assert compare_pair(subject(shuffled), subject(shuffled)).notes == ()


def traced(folder, kernel_us):
    """A GPU recording with a trace: two steps with a product on one stream and a copy beside it on another."""
    gpu_recording(folder)
    trace = TraceBuilder(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}])
    for number in (1, 2):
        begin = 20_000 * number
        trace.step(number, begin, 15_000).op("aten::mm", begin + 10, 30, id=number)
        trace.annotation("stepscope.module/net", begin + 5, 50)
        trace.launch("sm90_gemm_kernel", begin + 15, (begin + 100, kernel_us), id=number)
        trace.launch("elementwise_kernel", begin + 25, (begin + 100, 50), id=number, stream=9)
    (folder / "trace").mkdir()
    trace.write(folder / "trace" / "rank0.json.gz")
    return folder


def test_a_recording_with_a_gpu_is_told_by_class_and_module_of_the_clean_step(tmp_path):
    base, new = traced(tmp_path / "base", 4000), traced(tmp_path / "new", 6000)
    slower = [sample(step, device_ns={"forward": 12 * MS}) for step in range(8)]
    (new / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in slower))

    comparison = compare(base, new, use_cache=False)

    tables = {table.by: table for table in comparison.pairs[0].tables}
    for by in ("phase", "kernel_class", "module"):
        assert tables[by].delta == 2 * MS, by
        assert sum(row.delta for row in tables[by].rows) == pytest.approx(2 * MS)
    classes = {row.name: row for row in tables["kernel_class"].rows}
    assert classes["gemm"].delta == 2 * MS and classes["gemm"].base == 4 * MS
    assert classes["at the same time as other work"].base == classes["at the same time as other work"].new == -50_000
    assert {row.name: row.delta for row in tables["module"].rows}["net"] == 2 * MS
    memory = {each.what: each.reason for each in comparison.pairs[0].missing}["memory"]
    assert memory.startswith("both: ") and "stepscope run" in memory
    assert comparison.pairs[0].change("step_time").verdict == "too few samples"


def test_a_recording_without_a_trace_is_held_against_one_with_by_what_both_have(tmp_path):
    base, new = gpu_recording(tmp_path / "a"), gpu_recording(tmp_path / "b")
    facts = json.loads((new / "recording.json").read_text())
    (new / "recording.json").write_text(json.dumps({**facts, "trace": None}))

    (table,) = compare(base, new).pairs[0].tables

    assert (table.by, table.of) == ("phase", "a clean step, device time")
    assert "idle" not in {row.name for row in table.rows}


def test_owners_of_compiled_code_are_not_held_against_those_of_eager_code(tmp_path):
    folders = {}
    for name, is_compiled in (("eager", False), ("compiled", True), ("again", True)):
        folders[name] = cpu_recording(tmp_path / name, flops=flops_facts(compiled=is_compiled))
        write_memory(folders[name] / "memory.json.gz", a_step())

    one = compare(folders["eager"], folders["compiled"], allow=["flops"]).pairs[0]
    two = compare(folders["compiled"], folders["again"]).pairs[0]

    told = {each.what: each.reason for each in one.missing}["memory"]
    assert told.startswith("not comparable: base: peak allocated; new: peak allocated, whose tensors inside compiled")
    assert "memory" not in {table.by for table in one.tables} and one.change("peak_memory") is not None
    assert "memory" in {table.by for table in two.tables}


def test_what_differs_is_said(tmp_path):
    base = cpu_recording(tmp_path / "a", git={"revision": "a" * 40, "modified": False})
    environment = {"device_name": "Imaginary CPU 9000", "torch": "2.14.0", "variables": {"OMP_NUM_THREADS": "4"}}
    environment["variables"]["TORCHELASTIC_RUN_ID"] = "new each time"
    new = cpu_recording(tmp_path / "b", git={"revision": "b" * 40, "modified": True}, environment=environment)

    differs = {each.what: (each.base, each.new) for each in compare(base, new).pairs[0].differs}

    assert differs["git revision"] == ("a" * 40, "b" * 40) and differs["uncommitted changes"] == (False, True)
    assert differs["torch"] == ("2.13.0", "2.14.0") and differs["OMP_NUM_THREADS"] == (None, "4")
    assert not {"command", "TORCHELASTIC_RUN_ID"} & set(differs) and "device_name" not in differs


def points(*configs):
    rows = [
        {
            "hash": str(sorted(config.items())),
            "workload": "w",
            "config": config,
            "run": {"mode": "step"},
            "status": "ok",
        }
        for config in configs
    ]
    return sweep_of(rows, {}, lambda name: (None, None)).points


def test_points_are_paired_by_hash_and_then_by_what_the_comparison_is_about():
    base = points({"s": 1, "a": "naive"}, {"s": 2, "a": "naive"}, {"s": 9, "a": "naive"})

    assert pair_points(base, base) == ([(0, 0), (1, 1), (2, 2)], ())
    other = points({"s": 2, "a": "sdpa"}, {"s": 1, "a": "sdpa"})
    assert pair_points(base, other) == ([(0, 1), (1, 0)], ("a",))
    mixed = points({"s": 1, "a": "naive"}, {"s": 2, "a": "sdpa"}, {"s": 9, "a": "sdpa"})
    assert pair_points(base, mixed) == ([(0, 0), (1, 1), (2, 2)], ("a",))
    assert pair_points(base, points({"s": 1, "a": "sdpa"}, {"s": 2, "a": "flex"})) == ([], ())


@pytest.mark.parametrize(("share", "verdict"), [(0.0, "faster"), (0.05, "faster"), (0.5, "cannot tell")])
def test_what_others_may_have_taken_is_in_the_interval(share, verdict):
    """Steps of 7 instead of 10 ms; the first run waited for a CPU core that others used."""
    base, new = subject(), subject(tuple(ns * 0.7 for ns in STEADY))
    base = replace(base, measures={"step_time": replace(base.measures["step_time"], others_share=share)})
    change = compare_pair(base, new).change("step_time")

    assert change.verdict == verdict and change.low <= change.share <= change.high
    assert change.high >= 0.7 / (1 - share) - 1
    assert change.others_shares == ((share, 0.0) if share else None)
    said = headline(Comparison("recording", "a", "b", 0.02, (compare_pair(base, new),), (), (), ()))
    assert ("training waited for one 50 % of the time (base) and 0 % (new)" in said) is (share == 0.5)
