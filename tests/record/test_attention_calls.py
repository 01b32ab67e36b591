"""Calls of attention as they are seen in the process: what torch chose, and its words for what it refused."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stepscope.recorder.precision import attention_calls
from stepscope.recorder.precision.attention_calls import AttentionCalls, reasons


@pytest.fixture
def calls():
    watching = AttentionCalls(lambda: "blocks.0")
    watching.start()
    yield watching
    watching.stop()


def tensors(*shape, **options):
    torch.manual_seed(0)
    return [torch.randn(shape or (2, 4, 16, 8), requires_grad=True, **options) for _ in range(3)]


def test_a_call_is_written_down_with_its_choice_module_and_caller(calls):
    q, k, v = tensors()
    for _ in range(3):
        scaled_dot_product_attention(q, k, v, is_causal=True)

    (entry,) = calls.table()
    assert (entry["num_calls"], entry["backend"], entry["refused"]) == (3, "flash", {})
    assert (entry["query"], entry["dtype"], entry["is_causal"], entry["mask"]) == (
        [2, 4, 16, 8],
        "float32",
        True,
        None,
    )
    assert (entry["module"], entry["needs_gradient"]) == ("blocks.0", True)
    assert entry["caller"].startswith("test_attention_calls.py:")


def test_a_refusal_is_in_torchs_own_words(calls):
    q, k, v = tensors()
    scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    (entry,) = calls.table()
    assert entry["backend"] == "math"
    assert len(entry["refused"]["flash"]) == 1
    assert "dropout" in entry["refused"]["flash"][0]
    assert "Triggered internally" not in entry["refused"]["flash"][0]


def test_a_layout_is_named_as_the_reason(calls):
    q, k, v = (t.transpose(-1, -2) for t in tensors(2, 4, 8, 16))
    scaled_dot_product_attention(q, k, v)

    assert "stride" in calls.table()[0]["refused"]["flash"][0]


def test_what_autocast_casts_is_seen_after_the_cast(calls):
    q, k, v = tensors()
    with torch.autocast("cpu", torch.bfloat16):
        scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(16, 16, dtype=torch.bool))

    (entry,) = calls.table()
    assert (entry["dtype"], entry["mask"], entry["mask_dtype"]) == ("bfloat16", [16, 16], "bool")


def test_a_back_end_that_is_switched_off_is_not_called_refused(calls):
    q, k, v = tensors()
    with sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, k, v)
        assert not torch.backends.cuda.flash_sdp_enabled()

    (entry,) = calls.table()
    assert (entry["backend"], entry["refused"]) == ("math", {})
    assert "flash" in entry["switched_off"]
    assert torch.backends.cuda.flash_sdp_enabled()


def test_results_gradients_and_warnings_are_those_of_a_run_alone():
    def run():
        q, k, v = tensors()
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        out.sum().backward()
        return out, q.grad, k.grad, v.grad

    alone = run()
    watching = AttentionCalls()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watching.start()
        watched = run()
        scaled_dot_product_attention(*tensors(), dropout_p=0.5)
        watching.stop()

    assert all(torch.equal(one, other) for one, other in zip(alone, watched))
    assert len(watching.table()) == 2


def test_nothing_is_seen_after_the_end():
    watching = AttentionCalls()
    watching.start()
    watching.stop()
    scaled_dot_product_attention(*tensors())

    assert watching.table() == []


def test_a_fault_of_ours_does_not_reach_the_program(calls, monkeypatch):
    monkeypatch.setattr(attention_calls, "ask", lambda *_: 1 / 0)
    q, k, v = tensors()

    assert scaled_dot_product_attention(q, k, v).shape == q.shape
    assert calls.error == "ZeroDivisionError: division by zero"


def test_there_is_a_limit_to_different_calls(calls, monkeypatch):
    monkeypatch.setattr(attention_calls, "MAX_DIFFERENT", 2)
    for length in (4, 8, 12, 16):
        scaled_dot_product_attention(*tensors(1, 1, length, 8))

    assert (len(calls.table()), calls.num_dropped) == (2, 2)


def test_each_back_end_has_its_own_part_of_what_torch_says():
    said = [
        "Memory efficient kernel not used because: (Triggered internally at a.cpp:1.)",
        "Mem Efficient attention has been runtime disabled.",
        "Flash attention kernel not used because:",
        "Flash Attention does not support non-null attn_mask. (Triggered internally at b.h:2.)",
        "CuDNN attention kernel not used because:",
        "cuDNN attention has been runtime disabled.",
    ]

    assert reasons("flash", said) == ["Flash Attention does not support non-null attn_mask."]
    assert reasons("efficient", said) == ["Mem Efficient attention has been runtime disabled."]
    assert reasons("cudnn", said) == ["cuDNN attention has been runtime disabled."]
