"""Trainings with DeepSpeed, in a Trainer and in a plain loop: the same losses, and the steps that were made."""

from __future__ import annotations

import json
import socket
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install deepspeed")
pytest.importorskip("transformers")

from forks import Forks, settings
from stepscope.trace.recording import read_recording

pytestmark = pytest.mark.long  # importing DeepSpeed takes seconds, and none of its processes can be used twice
NUM_STEPS, MICRO_BATCHES, BATCH, LENGTH = 8, 2, 2, 8

PREPARE = f"""
    import json, sys, torch
    from pathlib import Path
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiles C++ for minutes
    stage, num_steps, length = int(sys.argv[1]), {NUM_STEPS}, {LENGTH}
    config = {{
        "train_micro_batch_size_per_gpu": {BATCH}, "gradient_accumulation_steps": {MICRO_BATCHES},
        "zero_optimization": {{"stage": stage}}, "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }}
    torch.manual_seed(0)
    ids = torch.randint(32, (num_steps * {MICRO_BATCHES * BATCH}, length))
"""
LOOP = """
    model = torch.nn.Sequential(torch.nn.Embedding(32, 16), torch.nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    for batch in ids.split(config["train_micro_batch_size_per_gpu"]):
        loss = torch.nn.functional.cross_entropy(engine(batch).view(-1, 32), batch.view(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    Path("losses.json").write_text(json.dumps(losses))
"""
TRAINER = """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
    from stepscope.integrations.huggingface import StepscopeCallback
    from stepscope.recorder.windows import Windows

    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 1}
    windows = Windows(warmup=2, clean=2, trace=0, memory=1)
    trainer = Trainer(
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        TrainingArguments(
            "out", deepspeed=config, max_steps=num_steps, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=5, save_strategy="no", logging_steps=1,
            report_to="none", disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        eval_dataset=[{"input_ids": row, "labels": row} for row in ids[:4]],
        callbacks=[StepscopeCallback("run", windows=windows)] if "callback" in sys.argv else [],
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    Path("losses.json").write_text(json.dumps([type(trainer.model_wrapped).__name__, *losses]))
"""


@pytest.fixture(scope="module")
def forks():
    made = Forks(settings(), "transformers.trainer")
    yield made
    made.close()


def train(forks: Forks, folder: Path, script: str, before: list[str], *words: str) -> list[object]:
    """Run a script in a folder of its own, and return its losses."""
    folder.mkdir()
    (folder / "train.py").write_text(textwrap.dedent(PREPARE) + textwrap.dedent(script))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    exit_code, _, stderr = forks.run([*before, "train.py", *words], folder, environment)
    assert exit_code == 0, stderr
    return json.loads((folder / "losses.json").read_text())


def steps_of(folder: Path) -> list[tuple[object, ...]]:
    recording = read_recording(folder)
    assert recording.status == "finished"
    return [(each.num_tokens, each.num_samples, each.num_micro_batches) for each in recording.samples]


STEPS = [(MICRO_BATCHES * BATCH * LENGTH, MICRO_BATCHES * BATCH, MICRO_BATCHES)] * NUM_STEPS


@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_plain_loop_under_stepscope_run(stage, tmp_path, forks):
    bare = train(forks, tmp_path / "bare", LOOP, [], stage)
    run = ["-m", "stepscope", "run", "--quiet", "-o", "run", "--warmup", "2", "--clean", "2", "--trace", "0"]
    assert train(forks, tmp_path / "recorded", LOOP, run, stage) == bare
    assert steps_of(tmp_path / "recorded" / "run") == STEPS


def test_a_trainer_with_the_callback(tmp_path, forks):
    bare = train(forks, tmp_path / "bare", TRAINER, [], "2")
    assert bare[0] == "DeepSpeedEngine" and len(bare) == 1 + NUM_STEPS
    assert train(forks, tmp_path / "recorded", TRAINER, [], "2", "callback") == bare
    assert steps_of(tmp_path / "recorded" / "run") == STEPS
    samples = read_recording(tmp_path / "recorded" / "run").samples
    assert [each.step for each in samples if "evaluation" in (each.num_times or {})] == [5]
