"""Recordings on a CPU: results that are never used, emulated bfloat16, and one base for percentages."""

from __future__ import annotations

import json

import pytest
from host_cases import case_of
from recorded_cases import recorded, run_script

from stepscope.document.findings import diagnosis_document, findings_part
from stepscope.findings.diagnose import diagnose
from stepscope.findings.rules.cpu import cpu_bfloat16
from stepscope.findings.rules.memory import checkpointing_with_free_memory
from stepscope.findings.rules.unused_results import forward_without_backward, untouched_rows, unused_gradients
from trace_builder import TraceBuilder

FLAGS = {"num_threads": 1, "num_cores": 8, "cpu.bf16": False}
PARAMETERS = {"num_total": 1, "num_trainable": 1, "bytes_by_dtype": {}}
AUTOGRAD = 2
MS = 1_000_000

# A table of which few rows are looked up, an encoder that nothing trains, and a second forward for a metric.
UNREAD = """
import torch
from torch import nn
torch.manual_seed(0); torch.set_num_threads(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
        self.words, self.head = nn.Embedding(8_000, 64), nn.Linear(320, 10)
    def forward(self, x, words):
        return self.head(torch.cat([self.encoder(x), self.words(words).mean(1)], 1))

net = Net()
trained = [*net.words.parameters(), *net.head.parameters()]
optimizer = torch.optim.AdamW(trained, foreach=False)
for step in range(100):
    x, words, y = torch.randn(256, 256), torch.randint(8_000, (256, 2)), torch.randint(10, (256,))
    loss = nn.functional.cross_entropy(net(x, words), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    right = (net(x, words).argmax(1) == y).float().mean().item()
"""


@pytest.mark.long
def test_results_that_nobody_reads_are_found_on_a_cpu(forks, tmp_path):
    diagnosis = diagnose(run_script(forks, tmp_path, UNREAD, "--warmup", "2", "--clean", "5", "--exit-after"))

    found = {finding.id: finding for finding in diagnosis.findings}
    assert {"untouched_rows", "unused_gradients", "forward_without_backward"} <= {*found, *diagnosis.clean}
    assert "at most 512 of the 8,000 rows" in found["untouched_rows"].sentence
    assert "Net runs forward 1 time per step with no backward" in found["forward_without_backward"].sentence
    assert "of encoder" in found["unused_gradients"].sentence and "no_grad" in found["unused_gradients"].fix
    held = {row.id: row.ns for row in diagnosis.ledger.rows}
    assert all(finding.claims[row] <= held[row] + 1 for finding in found.values() for row in finding.claims)


def test_gradients_and_rows_that_nobody_reads_by_their_ops(tmp_path):
    """GIVEN two calls per step WHEN only the head trains THEN the encoder before it needs no backward."""
    unused = {"without_optimizer": [{"module": "encoder", "num_parameters": 7}]}
    recorded(tmp_path, [1.0] * 20, flags=FLAGS, parameters={**PARAMETERS, **unused})
    trace = TraceBuilder().step(1, 0, 1000).step(2, 1000, 1000)
    for step in (0, 1):
        begin, number = 1000 * step, 100 * step + 1
        trace.annotation("stepscope.phase/forward", begin, 400).annotation(
            "stepscope.phase/backward", begin + 400, 500
        )
        for call in (0, 1):
            at, names = begin + 200 * call, {"encoder": 0, "head": 1}
            trace.annotation("stepscope.module/Net", at, 190)
            for module, place in names.items():
                one = number + 2 * call + place
                trace.annotation(f"stepscope.module/{module}", at + 5 + 90 * place, 80)
                trace.op("aten::mm", at + 10 + 90 * place, 60, id=one, sequence=one)
                back = begin + 410 + 100 * (2 * call + place)
                trace.op("MmBackward0", back, 90, AUTOGRAD, sequence=one, forward_thread=1)
                trace.op("aten::mm", back + 5, 80, AUTOGRAD, id=one + 50)
        dims = {"Input Dims": [[40, 8], [40], [], [], []], "Concrete Inputs": ["", "", "1000", "-1", "False"]}
        trace.op("aten::embedding_dense_backward", begin + 820, 10, id=number + 90, **dims)
        trace.op("aten::fill_", begin + 840, 100, id=number + 91, **{"Input Dims": [[1000, 8], []]})
    case = case_of(trace, tmp_path)

    (found,) = unused_gradients(case)
    assert found.saving_ns == pytest.approx(2 * 90_000) and "no_grad" in found.fix
    (found,) = untouched_rows(case)
    assert found.saving_ns == pytest.approx(0.96 * 100_000) and "at most 40 of the 1,000 rows" in found.sentence


def called(folder, is_second_trained=False, recomputes=False):
    """Two forwards of a module per step, 200 µs each, the first of them with a backward."""
    recorded(folder, [1.0] * 20, flags=FLAGS)
    trace = TraceBuilder()
    for step in (0, 1):
        begin, number = 1000 * step, 100 * step + 1
        trace.step(step + 1, begin, 1000)
        trace.annotation("stepscope.phase/forward", begin, 500).annotation(
            "stepscope.phase/backward", begin + 500, 400
        )
        for call in (0, 1):
            trace.annotation("stepscope.module/Net", begin + 250 * call, 200)
            dims = {"Input Dims": [[8, 8], [8, 8]]}
            trace.op("aten::mm", begin + 250 * call + 10, 150, id=number + call, sequence=number + call, **dims)
        nodes = (number, number + 1) if is_second_trained else (number,)
        for place, node in enumerate(nodes):
            names = {"sequence": node, "forward_thread": 1}
            trace.op("MmBackward0", begin + 510 + 150 * place, 100, AUTOGRAD, **names)
            trace.op("aten::mm", begin + 520 + 150 * place, 50, AUTOGRAD, id=number + 10 + place)
        if recomputes:
            trace.annotation("stepscope.module/Net", begin + 800, 50)
            trace.op("aten::mm", begin + 810, 20, id=number + 20)
    return case_of(trace, folder)


def test_a_forward_without_a_backward_costs_its_whole_call(tmp_path):
    (finding,) = forward_without_backward(called(tmp_path))

    assert finding.saving_ns == pytest.approx(200_000)
    assert finding.evidence[0].rows == [{"module": "Net", "num_calls": 1.0}]


@pytest.mark.parametrize("how", ["is_second_trained", "recomputes"])
def test_forwards_that_are_trained_or_recomputed_are_none(tmp_path, how):
    assert forward_without_backward(called(tmp_path, **{how: True})) == []


RECOMPUTED = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0); torch.set_num_threads(1)
block = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
optimizer = torch.optim.SGD(block.parameters(), 0.01)
x = torch.randn(512, 512, requires_grad=True)
for step in range(100):
    checkpoint(block, x, use_reentrant={}).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.long
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_recomputed_forward_on_a_cpu_with_free_memory(forks, tmp_path, is_reentrant):
    script = RECOMPUTED.format(is_reentrant)
    (found,) = checkpointing_with_free_memory(
        run_script(forks, tmp_path, script, "--warmup", "2", "--clean", "5", "--exit-after")
    )

    assert "fit in memory" in found.sentence and found.saving_ns > 0
    assert "aten::linear" in {row["name"] for row in found.evidence[0].rows}


def test_without_a_recomputed_forward_there_is_nothing_to_keep_in_memory(tmp_path):
    assert checkpointing_with_free_memory(called(tmp_path)) == []


@pytest.mark.parametrize(("dtype", "has_bf16"), [("c10::BFloat16", False), ("float", False), ("c10::BFloat16", True)])
def test_products_in_bfloat16_on_a_cpu_that_converts_every_number(tmp_path, dtype, has_bf16):
    recorded(tmp_path, [10.0] * 20, flags={**FLAGS, "cpu.bf16": has_bf16})
    trace = TraceBuilder()
    for step in (0, 1):
        trace.step(step + 1, 1000 * step, 1000)
        types = {"Input Dims": [[8, 8], [8, 8]], "Input type": [dtype, dtype]}
        trace.op("aten::mm", 1000 * step, 600, id=10 * step + 1, **types)
        trace.op("aten::copy_", 1000 * step + 700, 100, id=10 * step + 2, **types)

    found = cpu_bfloat16(case_of(trace, tmp_path))

    assert [round(one.saving_ns) for one in found] == ([5_000_000] if dtype != "float" and not has_bf16 else [])


def test_all_percentages_are_of_the_average_step_and_the_first_line_says_so(tmp_path):
    recorded(tmp_path, [10.0, 10.0, 10.0, 40.0] * 5, flags=FLAGS)
    trace = TraceBuilder().step(1, 0, 1000).step(2, 1000, 1000)
    for step in (0, 1):
        trace.op("aten::add", 1000 * step, 900, id=step + 1)

    diagnosis = diagnose(case_of(trace, tmp_path))

    assert diagnosis.step_ns == 10_000_000 and diagnosis.average_ns == 17_500_000
    assert "17.5 ms on average; a typical step takes 10.0 ms" in diagnosis_document(diagnosis).verdict
    (card,) = (card for card in findings_part(diagnosis).cards if card.id == "unclaimed_time")
    assert "7.50 ms per step (43 % of 17.5 ms)" in card.sentence and "42.9 %" in card.saving_of
    assert diagnosis.to_json()["average_step_ms"] == 17.5
    assert diagnosis.later_ns is None


def test_if_the_run_goes_on_faster_the_first_line_says_so(tmp_path):
    recorded(tmp_path, [10.0] * 20, flags=FLAGS)
    lines = [{"step": step, "window": "free", "wall_ns": 5 * MS} for step in range(20, 120)]
    for number, line in enumerate(lines):
        line["start_ns"] = (200 + 5 * number) * MS
    with (tmp_path / "samples.jsonl").open("a") as samples:
        samples.writelines(f"{json.dumps(line)}\n" for line in lines)
    trace = TraceBuilder().step(1, 0, 1000).step(2, 1000, 1000)
    for step in (0, 1):
        trace.op("aten::add", 1000 * step, 900, id=step + 1)

    diagnosis = diagnose(case_of(trace, tmp_path))

    assert diagnosis.average_ns == 10 * MS and diagnosis.later_ns == pytest.approx(5 * MS, rel=0.2)
    assert diagnosis.to_json()["later_step_ms"] == diagnosis.later_ns / MS
    assert "10.0 ms" in diagnosis_document(diagnosis).verdict.partition(";")[0]
