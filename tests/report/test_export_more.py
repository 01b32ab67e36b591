"""`stepscope export`: all ranks on one timeline, a flame graph, and one op as a script that runs."""

from __future__ import annotations

import gzip
import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest

from stepscope import TraceError, UsageError, analyze, export, open
from stepscope.exporters.export import write_export
from stepscope.exporters.flame import stacks_of
from stepscope.exporters.selection import select
from trace_builder import PUBLIC, TRACES, TraceBuilder, needs_traces

SKEW = 250  # µs that the second rank's clock is ahead


def rank(number: int) -> TraceBuilder:
    """Five collectives that both ranks leave together; both have process 1 and GPU 0."""
    ahead = SKEW if number else 0
    trace = TraceBuilder(distributedInfo={"rank": number, "world_size": 2})
    for call in range(5):
        at = 1000 + 100 * call + ahead
        trace.step(call, at, 90)
        trace.op("c10d::allreduce_", at + 1, 10, id=call + 1)
        trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", at + 2, (at + 10 + 5 * number, 30 - 5 * number))
    return trace


@pytest.fixture
def ranks(tmp_path) -> Path:
    folder = tmp_path / "ranks"
    folder.mkdir()
    for number in range(2):
        rank(number).write(folder / f"rank{number}.json")
    return folder


def events_of(path: Path) -> list[dict]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def kernels_of(events: list[dict]) -> dict[str, list[dict]]:
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    found = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel":
            found[names[event["pid"]]].append(event)
    return found


def test_ranks_share_a_clock_and_no_process(ranks, tmp_path):
    notes: list[str] = []
    written = export(ranks, "perfetto", ranks="all", output=tmp_path / "all.json.gz", warn=notes.append)

    kernels = kernels_of(events_of(written))
    assert sorted(kernels) == ["rank 0: GPU 0", "rank 1: GPU 0"]
    ends = [[e["ts"] + e["dur"] for e in kernels[name]] for name in sorted(kernels)]
    assert ends[0] == pytest.approx(ends[1], abs=0.001), "collectives end together on all ranks"
    starts = [[e["ts"] for e in kernels[name]] for name in sorted(kernels)]
    assert [b - a for a, b in zip(*starts)] == pytest.approx([5] * 5, abs=0.001)
    assert any("aligned by collectives" in note for note in notes)


@pytest.mark.long
def test_arrows_of_two_ranks_have_different_numbers(ranks, tmp_path):
    events = events_of(export(ranks, "perfetto", ranks="all", output=tmp_path / "all.json.gz"))

    begins = [(e["cat"], e["id"]) for e in events if e["ph"] == "s"]
    assert len(begins) == 10 and len(set(begins)) == 10


@pytest.mark.long
def test_a_part_of_all_ranks(ranks, tmp_path):
    events = events_of(export(ranks, "perfetto", ranks="all", step=2, output=tmp_path / "all.json.gz"))

    assert {name: len(found) for name, found in kernels_of(events).items()} == {
        "rank 0: GPU 0": 1,
        "rank 1: GPU 0": 1,
    }


def test_a_timeline_of_ranks_is_not_read_as_one_trace(ranks, tmp_path):
    written = export(ranks, "perfetto", ranks="all", output=tmp_path / "all.json.gz")

    with pytest.raises(TraceError, match="several ranks"):
        analyze(written)


@pytest.mark.long
def test_ranks_without_collectives_are_placed_by_their_wall_clocks(tmp_path):
    folder = tmp_path / "ranks"
    folder.mkdir()
    for number, base in enumerate((5_000_000_000, 5_000_070_000)):
        trace = TraceBuilder(distributedInfo={"rank": number, "world_size": 2}, baseTimeNanoseconds=base)
        trace.op("aten::mm", 100, 20, id=1).launch("gemm", 101, (110, 5), id=1)
        trace.write(folder / f"rank{number}.json")
    notes: list[str] = []

    written = export(folder, "perfetto", ranks="all", output=tmp_path / "all.json.gz", warn=notes.append)

    kernels = kernels_of(events_of(written))
    assert kernels["rank 1: GPU 0"][0]["ts"] - kernels["rank 0: GPU 0"][0]["ts"] == pytest.approx(70)
    assert any("wall clocks" in note for note in notes)


def test_two_traces_of_one_rank_are_refused(ranks, tmp_path):
    rank(1).write(ranks / "another.json")

    with pytest.raises(UsageError, match="both of rank 1"):
        export(ranks, "perfetto", ranks="all", output=tmp_path / "all.json.gz")


def test_what_does_not_fit_all_ranks_is_refused(ranks, tmp_path):
    for asked in ({"form": "speedscope", "ranks": "all"}, {"form": "perfetto", "ranks": "all", "rank": 1}):
        with pytest.raises(UsageError, match="--rank"):
            export(ranks, **asked)
    with pytest.raises(UsageError, match="one rank"):
        export(ranks / "rank0.json", "perfetto", ranks="all", output=tmp_path / "x.json")


@needs_traces
@pytest.mark.parametrize("num_ranks", [2, pytest.param(8, marks=pytest.mark.long)])
def test_real_ranks(num_ranks, tmp_path):
    paths = sorted((PUBLIC / "dlrm_8ranks_v100").glob("*.json.gz"))[:num_ranks]
    (tmp_path / "ranks").mkdir()
    for path in paths:
        shutil.copy(path, tmp_path / "ranks")

    written = export(tmp_path / "ranks", "perfetto", ranks="all", output=tmp_path / "all.json.gz")

    kernels = kernels_of(events_of(written))
    alone = [open(path).linked.device for path in paths]
    assert len(kernels) == num_ranks
    total = sum(len(found) for found in kernels.values())
    assert total == sum(device.filter(device["kind"] == "kernel").height for device in alone)


# -- flame graph --------------------------------------------------------------------------------------------------


def modules() -> TraceBuilder:
    trace = TraceBuilder()
    for place, module in enumerate(("a", "a.b")):
        at = 100 * place
        trace.annotation(f"stepscope.module/{module}", at, 80)
        trace.op("aten::mm", at + 5, 20, id=place + 1).launch("<b>;gemm", at + 6, (at + 30, 40), id=place + 1)
    return trace


def test_every_nanosecond_is_in_one_stack(tmp_path):
    linked = modules().linked()

    stacks = stacks_of(select(linked))

    assert sum(stacks.values()) == linked.device["duration_ns"].sum() == 80_000
    assert {stack[1] for stack in stacks} == {"a", "a.b"}


def test_a_flame_graph_is_a_picture_without_scripts(tmp_path):
    path = modules().write(tmp_path / "mine.json")

    written = export(path, "flame", output=tmp_path / "mine.svg")

    root = ElementTree.parse(written).getroot()
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0] == "GPU work: 80.00 µs, 100.0 %"
    assert "<b>;gemm: 40.00 µs, 50.0 %" in titles
    assert "script" not in written.read_text()


def test_folded_stacks_sum_to_the_gpu_work(tmp_path):
    path = modules().write(tmp_path / "mine.json")

    lines = export(path, "flame", output=tmp_path / "mine.folded").read_text().splitlines()

    assert sum(int(line.rpartition(" ")[2]) for line in lines) == 80_000
    assert all(line.count(";") == 3 for line in lines), "a name has no separator"


def test_without_a_gpu_it_is_the_hosts_time(tmp_path):
    trace = TraceBuilder()
    trace.op("aten::linear", 0, 100).op("aten::mm", 10, 80)
    linked = trace.linked()

    assert sum(stacks_of(select(linked)).values()) == linked.host["self_ns"].sum() == 100_000


def test_a_collective_on_the_host_has_its_name_and_a_label_of_ours_none():
    trace = (
        TraceBuilder().step(3, 0, 100).annotation("stepscope.module/a", 10, 80).annotation("gloo:all_reduce", 20, 50)
    )

    ends = {stack[-1]: ns for stack, ns in stacks_of(select(trace.linked())).items()}

    assert ends["gloo:all_reduce"] == 50_000 and set(ends) == {"gloo:all_reduce", "a", "no module"}


@needs_traces
@pytest.mark.parametrize("name", ["h200/llama_compiled.json.gz", "public/qwen0.5b_h100_stacks.json.gz"])
def test_real_traces_lose_nothing(name):
    linked = open(TRACES / name).linked

    assert sum(stacks_of(select(linked)).values()) == linked.device["duration_ns"].sum()


# -- one op as a script -------------------------------------------------------------------------------------------

RECORD = """
import sys
import torch
from torch.nn import functional as F

torch.manual_seed(0)
table = torch.nn.Embedding(50, 16)
image = torch.nn.Conv2d(3, 8, 3, padding=1)
rows = [torch.randn(4, 6), torch.randn(2, 6)]
with torch.profiler.profile(record_shapes=True) as profiler:
    words = torch.randint(0, 50, (4, 7))
    x = table(words)
    y = F.layer_norm(x @ torch.randn(16, 16), [16]).transpose(0, 1)
    z = F.softmax(y.float(), dim=-1).to(torch.bfloat16)
    F.scaled_dot_product_attention(*(torch.randn(2, 2, 8, 4) for _ in range(3)), is_causal=True)
    F.cross_entropy(torch.randn(9, 5), torch.randint(0, 5, (9,)))
    image(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).square().mean().backward()
    torch.cat(rows).gather(1, torch.zeros(6, 1, dtype=torch.long)).index_select(0, torch.tensor([1, 0]))
    torch._foreach_add_([torch.zeros(3), torch.zeros(4)], 1.0)
    torch.arange(10).masked_fill(torch.ones(10, dtype=torch.bool), 3).cumsum(0).topk(2)
profiler.export_chrome_trace(sys.argv[1])
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory, forks) -> Path:
    folder = tmp_path_factory.mktemp("real")
    (folder / "record.py").write_text(RECORD)
    assert forks.run(["record.py", "real.json"], folder, {})[0] == 0
    return folder / "real.json"


def test_every_op_that_has_arguments_runs_alone(real, forks, tmp_path):
    session = open(real)
    host = session.linked.host
    ops = host.filter(host["kind"] == "op")
    names = sorted({name for name in ops["name"].cast(str) if name.startswith("aten::")})
    scripts = []
    for name in names:
        try:
            scripts.append(write_export(session, "repro", tmp_path / f"{name[6:]}.py", op=name).path)
        except UsageError as error:
            pytest.fail(f"{name}: {error}")
    runner = "import runpy, sys\nfor path in sys.argv[1:]:\n    sys.argv[1:] = ['cpu']\n    runpy.run_path(path)\n"
    (tmp_path / "runner.py").write_text(runner)
    exit_code, stdout, stderr = forks.run(["runner.py", *map(str, scripts)], tmp_path, {})

    assert len(names) > 30
    assert exit_code == 0, stderr[-2000:]
    assert stdout.count("in the trace") == len(names)


def test_a_script_of_a_slow_op_ends(real, forks, tmp_path):
    script = export(real, "repro", op="mm", output=tmp_path / "slow.py")
    text = script.read_text().replace("timed(10, 2)", "timed(10, 0.1)").replace("timed(100, 10)", "timed(100, 1)")
    script.write_text(text.replace("\n    call()\n", "\n    call()\n    time.sleep(0.3)\n"))
    exit_code, stdout, _ = forks.run([script.name, "cpu"], tmp_path, {})

    assert exit_code == 0
    assert 1 <= int(stdout.split("median of ")[1].split(")")[0]) <= 4


def test_an_op_by_its_place_and_its_arguments(real, tmp_path):
    script = export(real, "repro", op="mm", output=tmp_path / "mm.py").read_text()

    assert "tensor([28, 16], [16, 1], torch.float32)," in script
    assert "tensor([16, 16], [16, 1], torch.float32)," in script
    first = export(real, "repro", op="1", output=tmp_path / "first.py").read_text()
    assert first.startswith('"""aten::')


@pytest.mark.parametrize("op", ["nothing", "0", "999", "label"])
def test_an_op_that_is_not_there(real, tmp_path, op):
    with pytest.raises(UsageError):
        export(real, "repro", op=op, output=tmp_path / "x.py")


def test_names_and_values_of_a_trace_are_never_code(forks, tmp_path):
    evil = "__import__('os').system('touch hit')"
    trace = TraceBuilder()
    fields = {"Input Dims": [[2, 2], []], "Input type": ["float", "Scalar"], "Input Strides": [[2, 1], []]}
    trace.op("aten::mul", 0, 10, shapes=None, **fields, **{"Concrete Inputs": ["", evil]})
    trace.op(f"aten::{evil}", 20, 10, shapes=None, **fields)
    path = trace.write(tmp_path / '""" + 1 + """.json')

    script = export(path, "repro", op="aten::mul", output=tmp_path / "x.py").read_text()

    forks.run(["x.py", "cpu"], tmp_path, {})
    assert not (tmp_path / "hit").exists()
    assert repr(evil) in script
    with pytest.raises(UsageError, match="label"):
        export(path, "repro", op=f"aten::{evil}", output=tmp_path / "y.py")
