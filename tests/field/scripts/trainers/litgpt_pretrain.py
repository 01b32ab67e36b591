"""litgpt's pretraining: a validation and a backward that only counts FLOPs before the first step, then two
micro-batches a step, a validation and a checkpoint every 20."""

import contextlib
import os
import sys
import warnings
from pathlib import Path

os.environ["TORCH_COMPILE_DISABLE"] = "1"

import torch
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.pretrain import setup
from torch.utils.data import DataLoader


class Random(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size, self.length = batch_size, max_seq_length

    def train_dataloader(self):
        return DataLoader(torch.randint(64, (256, self.length + 1)), batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(torch.randint(64, (16, self.length + 1)), batch_size=self.batch_size)


warnings.simplefilter("ignore")
num_steps = int(sys.argv[1])
config = Config(name="tiny", block_size=16, vocab_size=64, padded_vocab_size=64, n_layer=1, n_head=2, n_embd=32)
with contextlib.redirect_stdout(sys.stderr):  # it prints times
    setup(
        "tiny", config, Path("out"), precision="32-true", data=Random(), devices=1, logger_name="csv",
        train=TrainArgs(save_interval=20, global_batch_size=8, micro_batch_size=4, max_tokens=128 * num_steps,
                        lr_warmup_steps=2, max_norm=1.0, log_interval=10),
        eval=EvalArgs(interval=20, max_iters=4),
    )  # fmt: skip
saved = torch.load("out/final/lit_model.pth", weights_only=False)["model"]
print(repr(sum(value.sum().item() for value in saved.values())))
