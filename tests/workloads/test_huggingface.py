"""`hf:`: a local configuration's model with random weights, nothing fetched, nobody else's code run."""

from __future__ import annotations

import importlib.util
import json
import socket
import warnings

import pytest
import torch
from evidence import evidence_of

from stepscope.errors import MissingDependencyError, UsageError
from stepscope.workloads.huggingface import hugging_face

pytest.importorskip("transformers")

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 32}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "vocab_size": 50,
}
SMALL = {"batch": 2, "seq_len": 8}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refused(*_):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)


@pytest.fixture
def workload_of(tmp_path):
    def make(given):
        (tmp_path / "config.json").write_text(json.dumps(given))
        return hugging_face(str(tmp_path))

    return make


def built_of(workload, **values):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        return workload.build(workload.configure(**SMALL, **values))


@pytest.mark.parametrize("given", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_eager_is_sdpa_in_loss_and_gradients(workload_of, given):
    workload = workload_of(given)
    eager, sdpa = (built_of(workload, attn=attn) for attn in ("eager", "sdpa"))
    assert all(p.dtype == torch.float32 for p in sdpa.module.parameters())
    sdpa.module.double(), eager.module.double()
    sdpa.module.load_state_dict(eager.module.state_dict())
    batch = eager.batch()
    assert batch["tokens"].shape == (2, 8) and eager.num_tokens == 16

    losses = [built.module(**batch) for built in (eager, sdpa)]
    for loss in losses:
        loss.backward()

    assert losses[0].shape == ()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for left, right in zip(eager.module.parameters(), sdpa.module.parameters()):
        # Transformers' norms and eager softmax are float32 inside, whatever comes in.
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-6)
    assert sdpa.module(batch["tokens"]).shape == (2, 8, 50)


@pytest.mark.parametrize("claimed", ["eager", "sdpa"])
@pytest.mark.parametrize("ran", ["eager", "sdpa"])
def test_the_attention_is_proven(workload_of, claimed, ran):
    workload = workload_of(LLAMA)
    (proof,) = built_of(workload, attn=claimed).proofs

    assert bool(proof.shows(evidence_of(built_of(workload, attn=ran)))) == (claimed == ran)


def test_checkpointing_recomputes_and_changes_nothing(workload_of):
    workload = workload_of(LLAMA)
    plain, again = built_of(workload), built_of(workload, checkpoint=1)
    again.module.load_state_dict(plain.module.state_dict())
    batch = plain.batch()
    for built in (plain, again):
        built.module(**batch).backward()

    for left, right in zip(plain.module.parameters(), again.module.parameters()):
        torch.testing.assert_close(left.grad, right.grad)
    norms = "aten::silu"
    assert evidence_of(again).ops[norms] == 2 * evidence_of(plain).ops[norms]


def test_fewer_layers(workload_of):
    for given, layers in ((GPT2, "h"), (LLAMA, "layers")):
        built = built_of(workload_of(given), layers=1)
        (blocks,) = [m for name, m in built.module.named_modules() if name.endswith(f".{layers}")]
        assert len(blocks) == 1


def test_dropout_is_off_unless_asked_for(workload_of):
    workload = workload_of(GPT2)
    off, on = built_of(workload), built_of(workload, dropout=True)
    batch = off.batch()

    assert torch.equal(off.module(**batch), off.module(**batch))
    assert not torch.equal(on.module(**batch), on.module(**batch))


def test_a_class_without_token_labels_gives_its_outputs(workload_of):
    built = built_of(workload_of(BERT))
    batch = built.batch()

    assert set(batch) == {"tokens"} and built.module(**batch).shape == (2, 2)


def test_a_file_is_as_good_as_its_folder(tmp_path, workload_of):
    workload_of(GPT2)

    assert "gpt2" in hugging_face(str(tmp_path / "config.json")).about


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**GPT2, "model_type": "gtp2"}, r"'gtp2': did you mean gpt2\?"),
        ({"model_type": "zzzzzz", "auto_map": {"AutoConfig": "evil.Config"}}, "is never run"),
        ({**LLAMA, "architectures": ["NoSuchModel"]}, "NoSuchModel"),
        pytest.param(
            {"model_type": "vit", "architectures": ["ViTModel"]},
            "ViTModel reads pixel_values",
            marks=pytest.mark.long,
        ),
        ({"model_type": "vit"}, "no causal LM"),
    ],
)
def test_what_cannot_be_built_is_one_line(workload_of, given, message):
    with pytest.raises(UsageError, match=message) as caught:
        built_of(workload_of(given))

    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


def test_a_sequence_longer_than_the_positions_is_refused(workload_of):
    workload = workload_of(GPT2)

    with pytest.raises(UsageError, match=r"seq_len=33 .* 32"):
        workload.build(workload.configure(seq_len=33))


def test_files_that_are_none(tmp_path, workload_of):
    (tmp_path / "confg.json").write_text("{")
    with pytest.raises(UsageError, match=r"config\.json not found: did you mean confg\.json\?"):
        hugging_face(str(tmp_path))
    with pytest.raises(UsageError, match="is not valid JSON"):
        hugging_face(str(tmp_path / "confg.json"))
    with pytest.raises(UsageError, match="no model_type"):
        workload_of([1])
    with pytest.raises(UsageError, match="quantized"):
        workload_of({**LLAMA, "quantization_config": {}})


def test_without_transformers_the_command_is_said(monkeypatch, workload_of):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        workload_of(GPT2)


def test_attention_that_transformers_does_not_have_is_refused_with_what_to_take(workload_of):
    gptj = {"model_type": "gptj", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "rotary_dim": 4}
    with pytest.raises(UsageError, match="attn=eager"):
        built_of(workload_of(gptj), attn="sdpa")
    assert built_of(workload_of(gptj), attn="eager").num_tokens == 16
