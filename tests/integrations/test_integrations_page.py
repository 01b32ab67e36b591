"""The examples of docs/integrations.md run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepscope
from parametrized import parametrized
from stepscope.recorder.live.metrics import PREFIX
from stepscope.trace.recording import read_recording

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the trainers
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"```python\n(from stepscope\.integrations\.(\w+) .*?)```", PAGE, re.DOTALL)[::-1])
INPUTS, TARGETS = torch.ones(8, 4), torch.zeros(8, 2)


def huggingface():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments("out", max_steps=4, report_to="none", use_cpu=True, save_strategy="no")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(8, (32, 4))]
    return {"Trainer": Trainer, "model": GPT2LMHeadModel(config), "arguments": arguments, "data": rows}


def lightning():
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 2)

        def training_step(self, batch, _index):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return {"Trainer": lightning.Trainer, "model": Model(), "data": DataLoader(TensorDataset(INPUTS), batch_size=2)}


def accelerate():
    from accelerate import Accelerator

    def train(accelerator):
        model = nn.Linear(4, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            accelerator.backward(model(INPUTS.to(accelerator.device)).mean())
            optimizer.step()

    return {"Accelerator": Accelerator, "train": train}


def ignite():
    from ignite.engine import create_supervised_evaluator, create_supervised_trainer

    model = nn.Linear(4, 2)
    trainer = create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda y, target: (y - target).square().mean()
    )
    return {"trainer": trainer, "evaluator": create_supervised_evaluator(model), "data": [(INPUTS, TARGETS)] * 4}


@parametrized("names", [huggingface, lightning, accelerate, ignite], quick=2, ids=lambda each: each.__name__)
def test_the_example_leaves_a_recording(names, tmp_path, monkeypatch):
    pytest.importorskip({"huggingface": "transformers"}.get(names.__name__, names.__name__))
    monkeypatch.chdir(tmp_path)
    (example,) = [code for code, module in EXAMPLES.items() if module == names.__name__ and "runs/mine" in code]
    exec(example, names())

    assert len(read_recording(tmp_path / "runs" / "mine").samples) == 4
    assert str(stepscope.read(tmp_path / "runs" / "mine"))


def test_every_figure_is_documented():
    source = (ROOT / "src" / "stepscope" / "recorder" / "live" / "metrics.py").read_text(encoding="utf-8")
    names = set(re.findall(r'found\["(\w+)"\]|"(steps)": |"(step_time_ms)": ', source))
    written = {name for found in names for name in found if name} | {"tokens_per_second", "samples_per_second"}

    assert written == set(re.findall(rf"^\| `{PREFIX}(\w+)` \|", PAGE, re.MULTILINE))
