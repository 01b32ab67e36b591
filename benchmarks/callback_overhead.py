"""What the callback costs a Trainer: one training in which it is switched on and off, block by block.

    python benchmarks/callback_overhead.py [--tokens 64]
    python benchmarks/callback_overhead.py --device cuda    GPT-2 small, 8 × 512 tokens in bfloat16

Two figures. On a CPU, both are CPU time of the thread that trains, because other processes share the machine; on a
GPU, wall-clock time between synchronizations at the ends of a block. `interleaved` is the median of each block's time
per step over that of the block beside it without the callback, with its bootstrap interval: all effects, caches
included. `own work` is the time in Stepscope's own files per step. A profile function adds it up in blocks of its
own; what that function costs per call is measured first and subtracted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import stepscope
from stepscope.integrations.huggingface import StepscopeCallback
from stepscope.recorder import current
from stepscope.recorder.windows import Windows

STEPS_PER_BLOCK = 30
CONFIG = {"vocab_size": 512, "n_positions": 128, "n_embd": 128, "n_layer": 3, "n_head": 4, "bos_token_id": 0}
CONFIG["eos_token_id"] = CONFIG["bos_token_id"]
LARGE = {"vocab_size": 50304, "n_positions": 512, "n_embd": 768, "n_layer": 12, "n_head": 12}
OFF, ON, PROFILED = "off", "on", "profiled"
OURS = str(Path(stepscope.__file__).parent)


class OwnTime:
    """Adds up the time in frames of the files in a folder, with the C functions that they call."""

    def __init__(self, folder: str = OURS) -> None:
        self.ns = self.num_events = 0
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


class Switch(TrainerCallback):
    """Times blocks of steps, in random order within each round of three. Comes after the callback it switches."""

    def __init__(self, num_windows: int, device: str) -> None:
        self._is_gpu = device == "cuda"
        self.ms: dict[str, list[float]] = {OFF: [], ON: [], PROFILED: []}
        self.own_us: list[float] = []
        self._num_windows = num_windows  # steps before free running
        self._order: list[str] = []
        self._session: Any = None
        self._began_ns = self._num_left = 0
        self._own, self._profile_ns = OwnTime(), profile_ns()

    def _now(self) -> int:
        if self._is_gpu:
            torch.cuda.synchronize()
            return time.perf_counter_ns()
        return time.thread_time_ns()

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        if state.global_step < self._num_windows:
            return
        self._session = self._session or current.session
        self._num_left -= 1
        if self._num_left > 0:
            return
        if self._order:
            self._end_block(self._order.pop())
        if not self._order:
            self._order = random.sample(list(self.ms), len(self.ms))
        self._num_left = STEPS_PER_BLOCK
        if self._order[-1] != OFF:
            self._session.resume()
        self._own = OwnTime()
        self._began_ns = self._now()
        if self._order[-1] == PROFILED:
            sys.setprofile(self._own)

    def _end_block(self, name: str) -> None:
        if name != OFF:
            self._session.catch_up()  # what is left to do for these steps
        sys.setprofile(None)
        self.ms[name].append((self._now() - self._began_ns) / 1e6 / STEPS_PER_BLOCK)
        if name == PROFILED:
            own_ns = self._own.ns - self._own.num_events * self._profile_ns
            self.own_us.append(own_ns / 1e3 / STEPS_PER_BLOCK)
        if name != OFF:
            self._session.suspend()

    def on_train_end(self, *_args: Any, **_kwargs: Any) -> None:
        sys.setprofile(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each kind")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample, at most 128: fewer make shorter steps")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    asked = parser.parse_args()
    rounds, is_gpu = asked.rounds, asked.device == "cuda"
    torch.set_num_threads(1)  # one busy core of a shared machine is steadier than two
    windows = Windows(warmup=2, clean=1, trace=0, memory=0)
    config = {**CONFIG, **(LARGE if is_gpu else {})}
    model = GPT2LMHeadModel(GPT2Config(**config))
    texts = torch.randint(config["vocab_size"], (256, config["n_positions"] if is_gpu else asked.tokens))
    rows = [{"input_ids": row, "labels": row} for row in texts]
    switch = Switch(windows.num_steps + 5, asked.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=windows.num_steps + 6 + rounds * 3 * STEPS_PER_BLOCK,
            per_device_train_batch_size=8,
            logging_steps=STEPS_PER_BLOCK,
            save_strategy="no",
            report_to="none",
            use_cpu=not is_gpu,
            bf16=is_gpu,
            disable_tqdm=True,
        )
        # The switch is called last, when the step has ended for the recorder.
        callbacks = [StepscopeCallback(Path(folder) / "run", windows=windows), switch]
        Trainer(model, arguments, train_dataset=rows, callbacks=callbacks).train()
    each = [on / off for on, off in zip(switch.ms[ON], switch.ms[OFF])]
    ratios = sorted(statistics.median(random.choices(each, k=len(each))) for _ in range(1000))
    step_ms, own_us = statistics.median(switch.ms[OFF]), statistics.median(switch.own_us)
    name = torch.cuda.get_device_name() if is_gpu else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {len(each)} blocks of {STEPS_PER_BLOCK} steps\n")
    print("| figure | step ms | callback per step | ratio | 95 % interval |\n|---|---|---|---|---|")
    added_ms = statistics.median(switch.ms[ON]) - step_ms
    ratio, interval = statistics.median(each), f"{ratios[25]:.4f} to {ratios[975]:.4f}"
    print(f"| interleaved | {step_ms:.1f} | {added_ms:.2f} ms | {ratio:.4f} | {interval} |")
    print(f"| own work | {step_ms:.1f} | {own_us:.0f} µs | {1 + own_us / 1e3 / step_ms:.4f} | |")


if __name__ == "__main__":
    main()
