"""Whether the card's throughput is the script's own: nanoGPT eager and compiled, a Hugging Face Trainer, Lightning.

    python benchmarks/own_figures.py OUT [--only lightning] [--tiny]

Each script runs under `stepscope run` and prints its own pace, in ms per step between two synchronizations. The table
has the mean of the lines about the steps that the card's average is about, that average, and how far they are apart.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
NANOGPT = str(ROOT / "benchmarks" / "improve" / "nanogpt.py")
SCRIPTS = {
    "nanogpt eager": [NANOGPT, "--seconds", "18"],
    "nanogpt compiled": [NANOGPT, "--seconds", "36", "--compile"],
    "huggingface": [__file__, "--train", "huggingface"],
    "lightning": [__file__, "--train", "lightning"],
}
PACE = re.compile(r"^step (\d+): ([\d.]+) ms per step", re.M)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=list(SCRIPTS), action="append")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--train", choices=("huggingface", "lightning"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train, asked.tiny)
        return 0
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    print("| script | own ms per step | card's ms per step | apart |\n|---|---:|---:|---:|")
    for name in asked.only or SCRIPTS:
        folder = asked.out / name.replace(" ", "_")
        script, *words = SCRIPTS[name]
        words = [
            script,
            *([str(asked.out)] if script == __file__ else []),
            *words,
            *(["--tiny"] if asked.tiny else []),
        ]
        stepscope = [sys.executable, "-m", "stepscope"]
        done = subprocess.run(
            [*stepscope, "run", "--force", "-o", str(folder), *words], capture_output=True, text=True, env=environment
        )
        (asked.out / f"{folder.name}.txt").write_text(done.stdout + done.stderr)
        shown = subprocess.run(
            [*stepscope, "show", str(folder), "--json"], capture_output=True, text=True, env=environment
        )
        loop = json.loads(shown.stdout)["loop"]
        # Lines with steps of the windows have what probes take between them.
        windows = json.loads((folder / "recording.json").read_text())["windows"]
        first = max(loop["num_steps"] - loop["num_measured"], sum(windows.values()))
        card_ms = loop["step_ns"] / 1e6
        lines = [(int(step), float(ms)) for step, ms in PACE.findall(done.stdout)]
        own_ms = statistics.mean(ms for (begin, _), (_, ms) in pairwise(lines) if begin >= first)
        print(f"| {name} | {own_ms:.3f} | {card_ms:.3f} | {card_ms / own_ms - 1:+.1%} |", flush=True)
    return 0


class Pace:
    """Prints the time per step of a few steps at a time."""

    def __init__(self, every: int) -> None:
        self._every, self._num, self._began = every, 0, time.monotonic()

    def step(self) -> None:
        import torch

        self._num += 1
        if self._num % self._every == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.monotonic()
            print(f"step {self._num}: {(now - self._began) * 1e3 / self._every:.3f} ms per step", flush=True)
            self._began = now


def train(kind: str, tiny: bool) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 128} if tiny else {}
    length, batch, num_steps = (32, 2, 200) if tiny else (512, 16, 400)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=length, **shape))
    texts = torch.randint(shape.get("vocab_size", 50257), (1024, length))
    rows = [{"input_ids": row, "labels": row} for row in texts]
    pace, is_gpu = Pace(20), torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        if kind == "huggingface":

            class Printer(TrainerCallback):
                def on_step_end(self, *_args: object, **_kwargs: object) -> None:
                    pace.step()

            arguments = TrainingArguments(
                folder,
                per_device_train_batch_size=batch,
                max_steps=num_steps,
                bf16=is_gpu,
                report_to=[],
                save_strategy="no",
            )
            Trainer(model, arguments, train_dataset=rows, callbacks=[Printer()]).train()
            return
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: dict[str, torch.Tensor], _index: int) -> torch.Tensor:
                return self.model(**batch).loss

            def on_train_batch_end(self, *_args: object) -> None:
                pace.step()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)

        loader = torch.utils.data.DataLoader(rows, batch_size=batch, shuffle=True)
        lightning.Trainer(
            max_steps=num_steps,
            max_epochs=-1,
            precision="bf16-mixed" if is_gpu else "32-true",
            accelerator="auto" if is_gpu else "cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        ).fit(Module(), loader)


if __name__ == "__main__":
    sys.exit(main())
