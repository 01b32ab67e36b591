"""Memory that is reserved and lies in no tensor."""

from __future__ import annotations

import pytest
from recorded_cases import GPU, recorded

from stepscope.errors import Unavailable
from stepscope.findings.rules.memory import allocator_churn, memory_pressure
from stepscope.session import open_session

GIB = 1 << 30


def reserved(folder, allocated, held, retries=0, used=0, **facts):
    memory = {
        "peak_allocated_bytes": allocated * GIB,
        "peak_reserved_bytes": held * GIB,
        "driver_used_bytes": used * GIB,
        "driver_total_bytes": 100 * GIB,
        "num_allocator_retries": retries,
    }
    return memory_pressure(recorded(folder, [10.0] * 8, is_gpu=True, memory=memory, **facts))


def test_fragments_in_a_full_memory(tmp_path):
    (finding,) = reserved(tmp_path, 60, 90)

    assert finding.saving_bytes == 30 * GIB
    assert "30.0 GiB (33 %) of 90.0 GiB reserved memory (of 100 GiB on the device)" in finding.sentence
    assert "expandable_segments:True" in finding.fix


def test_the_allocator_had_to_begin_again(tmp_path):
    (finding,) = reserved(tmp_path, 30, 50, retries=3, used=60)

    assert "returned its cache 3 times" in finding.sentence
    assert finding.confidence == "high"


def test_retries_of_every_step_are_told_once(tmp_path):
    """By the rule that tells what they cost."""
    (finding,) = reserved(tmp_path, 30, 50, retries=30, used=60)
    (churn,) = allocator_churn(open_session(tmp_path).case)

    assert "returned its cache" not in finding.sentence
    assert "ran out of memory 30 times" in churn.sentence


def test_expandable_segments_are_not_recommended_twice(tmp_path):
    environment = {**GPU, "variables": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}

    (finding,) = reserved(tmp_path, 60, 90, environment=environment)

    assert "already on" in finding.fix


@pytest.mark.parametrize(
    ("allocated", "held", "retries"),
    [
        pytest.param(85, 90, 0, id="full of tensors"),
        pytest.param(85, 90, 3, id="full of tensors: the allocator has another finding"),
        pytest.param(10, 20, 0, id="room enough"),
        pytest.param(0, 0, 2, id="nothing reserved"),
    ],
)
def test_memory_as_it_should_be(tmp_path, allocated, held, retries):
    assert reserved(tmp_path, allocated, held, retries) == []


def test_a_processor_has_no_allocator_s_figures(tmp_path):
    with pytest.raises(Unavailable, match="on a GPU"):
        memory_pressure(recorded(tmp_path, [10.0] * 8))
