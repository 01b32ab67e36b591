"""Larger micro-batches in scripts that run: of Transformers, Accelerate, Lightning, and with options of their own."""

from __future__ import annotations

import json

import pytest

from stepscope.analysis.comparison.micro_batches import why_not_larger
from stepscope.analysis.comparison.verification import Attempt, Plan, gate
from stepscope.findings.fixes import parse_fix

SHORT = ("--warmup", "3", "--clean", "3", "--trace", "0", "--no-memory", "--exit-after", "--quiet")

OPTIONS = """
    import argparse
    parser = argparse.ArgumentParser()
    parser.add_argument("--grad-accum", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()

    import torch
    from torch import nn

    torch.manual_seed(0)
    data = torch.rand(4096, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place = 0
    for _ in range(given.steps):
        for _ in range(given.grad_accum):
            x = data[place : place + given.batch_size]
            place = (place + given.batch_size) % 4096
            ((model(x) - x).square().mean() / given.grad_accum).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINED = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    rows = torch.rand(1024, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def loss_of(model, x):
        return (model(x) - x).square().mean()
"""
ACCELERATE = f"""{TRAINED}
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4, shuffle=True))
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x))
            optimizer.step()
            optimizer.zero_grad()
"""
LIGHTNING = f"""{TRAINED}
    import warnings
    import lightning
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, x, _):
            return loss_of(self.model, x)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", accumulate_grad_batches=4, **quiet)
    trainer.fit(Module(), DataLoader(rows, batch_size=4, shuffle=True))
"""
TRANSFORMERS = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (512, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=1, n_head=1, embd_pdrop=0.0,
                                       attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0))
    given = TrainingArguments("out", use_cpu=True, report_to="none", disable_tqdm=True, max_steps=9,
                              save_strategy="no", logging_strategy="no", per_device_train_batch_size=4,
                              gradient_accumulation_steps=4)
    Trainer(model, given, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("package", "source", "words"),
    [
        (None, OPTIONS, ("--grad-accum", "4", "--batch-size", "4")),
        pytest.param("accelerate", ACCELERATE, (), marks=pytest.mark.long),
        pytest.param("lightning", LIGHTNING, (), marks=pytest.mark.long),
        pytest.param("transformers", TRANSFORMERS, (), marks=pytest.mark.long),
    ],
)
def test_a_step_has_the_same_samples_and_the_same_losses_in_half_as_many_micro_batches(lab, package, source, words):
    if package is not None:
        pytest.importorskip(package), pytest.importorskip("accelerate" if package == "transformers" else package)
    recordings = []
    for fix in ("?micro_batch", "micro_batch"):
        done = lab.script(source).run(*words, options=SHORT, STEPSCOPE_FIX=fix)
        assert done.exit_code == 0, done.stderr
        recordings.append(done.recording)
    before, after = recordings

    assert [fix["left"] for one in recordings for fix in one.facts["fixes"]] == [{}, {}]
    assert {(one.num_samples, one.num_micro_batches) for one in before.samples} == {(16, 4)}
    assert {(one.num_samples, one.num_micro_batches) for one in after.samples} == {(16, 2)}
    assert why_not_larger(before, after, 2) is None
    plan = Plan("micro_batch", "reordered", growth=2)
    losses = gate(plan, [Attempt(0, before)], [Attempt(0, after)])
    assert (losses.verdict, losses.num_steps >= 6) == ("agree", True) and losses.difference_share < 1e-5


def test_own_code_with_constants_is_left_alone_and_told(lab):
    script = lab.script(OPTIONS)
    done = script.run(options=SHORT, STEPSCOPE_FIX="micro_batch")

    assert {sample.num_micro_batches for sample in done.recording.samples} == {8}
    assert done.recording.facts["fixes"][0]["changed"] == {}


@pytest.mark.long
def test_improve_tries_twice_as_large_micro_batches_until_they_do_not_pay(lab):
    """GIVEN a script with tiny micro-batches WHEN it is improved THEN fewer and larger ones are kept and proven."""
    script = lab.script(OPTIONS)
    words = ("improve", "--warmup", 5, "--clean", 10, "--minutes", 30, "--fix", "micro_batch", "--json", "train.py")

    done = script.stepscope(*words, "--grad-accum", "32", "--batch-size", "2")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["kept"] and found["kept"][0].startswith("micro_batch=")
    tried = [trial["fix"] for trial in found["trials"]]
    assert tried[:2] == ["micro_batch", "micro_batch=4"] and found["gain"]["factor"] > 1.5
    assert found["losses"]["verdict"] == "agree" and found["losses"]["arithmetic"] == "reordered"
    growth = parse_fix(found["kept"][0]).growth
    line = f"python … --grad-accum {32 // growth} --batch-size {2 * growth}  # on the command line"
    assert found["code"] == [line]

    refused = json.loads(script.stepscope(*words).stdout)
    assert refused["kept"] == [] and "accumulates 8 micro-batches of 4: make 4 of 8" in refused["trials"][0]["reason"]
