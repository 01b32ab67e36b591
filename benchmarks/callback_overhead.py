"""What Stepscope costs a step: trainings in which it is switched on and off, block by block.

    python benchmarks/callback_overhead.py                   under five minutes on a machine with nothing else to do
    python benchmarks/callback_overhead.py --ways callback --step-ms 60 --seconds 60
    python benchmarks/callback_overhead.py --device cuda     the same model on a GPU
    python benchmarks/callback_overhead.py --device cuda --gpt2 --block-s 3     GPT-2 124M in bf16, 16 × 1,024 tokens

Each row is one training in free running, with steps of about the given length: `callback` in a Hugging Face Trainer,
`lightning` in a Lightning Trainer (both with a log line every 10 steps), `run` in a plain loop, as with
`stepscope run`. `wall` and `CPU` are the medians of each block's time per step over that of the block beside it
without Stepscope, with bootstrap intervals: wall-clock time, and CPU time of the process with Stepscope's own thread.
`own work` is the CPU time in Stepscope's files in the thread that trains. A profile function adds it up in blocks of
its own; what that function costs per call is measured first and subtracted. It is an upper limit. `calls` are the
Python functions of Stepscope per step, in that thread. `step ms` is without Stepscope; on a CPU, it is CPU time.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepscope
from stepscope.recorder import current
from stepscope.recorder.windows import Windows

LOG_EVERY = 10
BATCH, LENGTH, WIDTH, WORDS = 8, 64, 256, 512
OFF, ON, PROFILED = "off", "on", "profiled"
OURS = str(Path(stepscope.__file__).parent)
WINDOWS = Windows(warmup=2, clean=1, trace=0, memory=0)
NUM_BEFORE = WINDOWS.num_steps + 5


class OwnTime:
    """Adds up the time in frames of the files in a folder, with the C functions that they call."""

    def __init__(self, folder: str = OURS) -> None:
        self.ns = self.num_events = self.num_calls = 0
        self._folder = folder
        self._is_ours = False
        self._since_ns = 0

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        now = time.thread_time_ns()
        if self._is_ours:
            self.ns += now - self._since_ns
            self.num_events += 1
        top = frame.f_back if event == "return" else frame
        self._is_ours = top is not None and top.f_code.co_filename.startswith(self._folder)
        self.num_calls += self._is_ours and event == "call"
        self._since_ns = time.thread_time_ns()


def profile_ns() -> float:
    """Return what the profile function adds to each event: the least of a few tries with an empty function."""

    def nothing() -> None:
        pass

    tries = []
    for _ in range(20):
        own = OwnTime(__file__)
        sys.setprofile(own)
        for _ in range(1000):
            nothing()
        sys.setprofile(None)
        tries.append(own.ns / own.num_events)
    return min(tries)


class Model(nn.Module):
    """A language model without attention, so that its step is as long as its depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.view(-1, WORDS), labels.view(-1)), "logits": logits}


def gpt2(device: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**({} if device == "cuda" else {"n_layer": 1, "n_embd": 24, "n_head": 2})))


class Switch:
    """Times blocks of steps, in random order within each round of three. Called when a step has ended."""

    def __init__(self, step_ms: float, seconds: float, block_s: float, device: str) -> None:
        self._is_gpu = device == "cuda"
        self._num_steps = max(5, round(block_s * 1e3 / step_ms))  # of a block
        self.num_rounds = max(4, round(seconds * 1e3 / (3 * self._num_steps * step_ms)))
        self.batch_size = BATCH
        self.wall_ms: dict[str, list[float]] = {OFF: [], ON: [], PROFILED: []}
        self.cpu_ms: dict[str, list[float]] = {OFF: [], ON: [], PROFILED: []}
        self.own_us: list[float] = []
        self.calls: list[float] = []
        self._order: list[str] = []
        self._session: Any = None
        self._began = (0, 0)
        self._num_seen = self._num_left = 0
        self._own, self._profile_ns = OwnTime(), profile_ns()

    @property
    def num_steps(self) -> int:
        """Of the whole training."""
        return NUM_BEFORE + 1 + self.num_rounds * 3 * self._num_steps

    def _now(self) -> tuple[int, int]:
        if self._is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter_ns(), time.process_time_ns()

    def step_ended(self) -> None:
        self._num_seen += 1
        if self._num_seen <= NUM_BEFORE:
            return
        self._session = self._session or current.session
        self._num_left -= 1
        if self._num_left > 0:
            return
        if self._order:
            self._end_block(self._order.pop())
        if not self._order:
            self._order = random.sample(list(self.wall_ms), 3)
        self._num_left = self._num_steps
        if self._order[-1] != OFF:
            self._session.resume()
        self._own = OwnTime()
        self._began = self._now()
        if self._order[-1] == PROFILED:
            sys.setprofile(self._own)

    def _end_block(self, name: str) -> None:
        sys.setprofile(None)
        if name != OFF:
            self._session.catch_up()  # what is left to do for these steps
        wall_ns, cpu_ns = (now - began for now, began in zip(self._now(), self._began))
        self.wall_ms[name].append(wall_ns / 1e6 / self._num_steps)
        self.cpu_ms[name].append(cpu_ns / 1e6 / self._num_steps)
        if name == PROFILED:
            own_ns = self._own.ns - self._own.num_events * self._profile_ns
            self.own_us.append(own_ns / 1e3 / self._num_steps)
            self.calls.append(self._own.num_calls / self._num_steps)
        if name != OFF:
            self._session.suspend()


def callback(model: nn.Module, data: TensorDataset, switch: Switch, folder: Path, device: str) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    from stepscope.integrations.huggingface import StepscopeCallback

    class Ends(TrainerCallback):
        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            switch.step_ended()

    arguments = TrainingArguments(
        str(folder / "out"),
        max_steps=switch.num_steps,
        per_device_train_batch_size=switch.batch_size,
        bf16=device == "cuda",
        logging_steps=LOG_EVERY,
        save_strategy="no",
        report_to="none",
        use_cpu=device == "cpu",
        disable_tqdm=True,
    )
    rows = [{"input_ids": row, "labels": row} for (row,) in data]
    # The switch is called last, when the step has ended for the recorder.
    callbacks = [StepscopeCallback(folder / "run", windows=WINDOWS), Ends()]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.pop_callback(PrinterCallback)
    trainer.train()


def lightning(model: nn.Module, data: TensorDataset, switch: Switch, folder: Path, device: str) -> None:
    import lightning.pytorch as pl

    from stepscope.integrations.lightning import StepscopeCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            return self.model(batch[0], labels=batch[0])["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Ends(pl.Callback):
        def on_train_batch_end(self, *_args: Any, **_kwargs: Any) -> None:
            switch.step_ended()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        max_steps=switch.num_steps,
        accelerator=device,
        devices=1,
        callbacks=[StepscopeCallback(folder / "run", windows=WINDOWS), Ends()],
        log_every_n_steps=LOG_EVERY,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        precision="bf16-mixed" if device == "cuda" else "32-true",
    )
    trainer.fit(Module(), DataLoader(data, batch_size=switch.batch_size))


def run(model: nn.Module, data: TensorDataset, switch: Switch, folder: Path, device: str) -> None:
    with stepscope.record(folder / "run", windows=WINDOWS):
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        num_left = switch.num_steps
        while True:
            for (batch,) in DataLoader(data, batch_size=switch.batch_size):
                given = batch.to(device)
                with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                    loss = model(given, labels=given)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                switch.step_ended()
                num_left -= 1
                if not num_left:
                    return


WAYS: dict[str, Callable[[nn.Module, TensorDataset, Switch, Path, str], None]]
WAYS = {"callback": callback, "lightning": lightning, "run": run}


def layer_ms(device: str) -> float:
    """Return what a layer adds to a step."""

    def step_ms(depth: int) -> float:
        model, given = Model(depth).to(device), torch.randint(WORDS, (BATCH, LENGTH), device=device)
        optimizer = torch.optim.AdamW(model.parameters())
        times = []
        now = time.thread_time_ns if device == "cpu" else time.perf_counter_ns
        for _ in range(6):
            began = now()
            model(given, given)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(now() - began)
        return min(times) / 1e6

    return (step_ms(24) - step_ms(4)) / 20


def ratio(times: dict[str, list[float]]) -> str:
    each = [on / off for on, off in zip(times[ON], times[OFF])]
    ratios = sorted(statistics.median(random.choices(each, k=len(each))) for _ in range(1000))
    return f"{statistics.median(each):.4f} ({ratios[25]:.4f} to {ratios[975]:.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--step-ms", nargs="+", type=float, default=[10, 30, 60, 125])
    parser.add_argument("--seconds", type=float, default=18, help="for each row")
    parser.add_argument("--block-s", type=float, default=0.5, help="seconds of a block")
    parser.add_argument("--gpt2", action="store_true", help="--step-ms is then only the length of a block's steps")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # those of the trainers
    torch.set_num_threads(1)  # one busy core of a shared machine is steadier than two
    per_layer_ms = 0.0 if asked.gpt2 else layer_ms(asked.device)
    words, length = (50257, 1024) if asked.gpt2 else (WORDS, LENGTH)
    name = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, blocks of {asked.block_s:g} s, {asked.seconds:.0f} s per row\n")
    print("| way | step ms | blocks | own work per step | own work ratio | calls per step | wall | CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for way in asked.ways:
        for step_ms in asked.step_ms:
            switch = Switch(step_ms, asked.seconds, asked.block_s, asked.device)
            switch.batch_size = 16 if asked.gpt2 else BATCH
            data = TensorDataset(torch.randint(words, (switch.batch_size * switch.num_steps, length)))
            model = gpt2(asked.device) if asked.gpt2 else Model(max(1, round(step_ms / per_layer_ms)))
            with tempfile.TemporaryDirectory() as folder:
                WAYS[way](model, data, switch, Path(folder), asked.device)
            bare_ms = statistics.median((switch.wall_ms if asked.device == "cuda" else switch.cpu_ms)[OFF])
            own_us = statistics.median(switch.own_us)
            own = f"{own_us:.0f} µs | {1 + own_us / 1e3 / bare_ms:.4f} | {statistics.median(switch.calls):.1f}"
            ratios = f"{ratio(switch.wall_ms)} | {ratio(switch.cpu_ms)}"
            print(f"| {way} | {bare_ms:.1f} | {len(switch.own_us)} | {own} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
