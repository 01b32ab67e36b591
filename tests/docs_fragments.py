# ruff: noqa: F401
"""Runs Python blocks of the documentation, each with the names that a training script has.

    python docs_fragments.py FILE.json

The file has pairs of a page and a block. A block that fails is printed with its page and its error.
"""

from __future__ import annotations

import copy
import gc
import json
import logging
import math
import os
import sys
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.profiler import profile, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import stepscope

# Written for a GPU, run on a CPU.
ON_CPU = {'"cuda"': '"cpu"', ".cuda()": ".cpu()", "torch.cuda.synchronize": "torch.cpu.synchronize"}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.table = nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x).mean()

    def gradient_checkpointing_disable(self) -> None:
        """As of a Hugging Face model."""


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def language_model() -> nn.Module:
    block = nn.Sequential(OrderedDict(norm=nn.LayerNorm(8)))
    return nn.Sequential(OrderedDict(table=nn.Embedding(4, 8), blocks=nn.Sequential(block), head=nn.Linear(8, 16)))


def scalar(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.square().mean()


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16)


# Where a name means something else.
OF_A_PAGE = {
    "precision": {"model": language_model(), "tokens": torch.ones(4, 4, dtype=torch.long)},
    "small_gemms": {"x": halves(32, 16), "up": halves(2, 16, 16), "down": halves(2, 16, 16),
                    "counts": torch.tensor([16, 16]), "inputs": [halves(4, 8)] * 2, "weights": [halves(8, 8)] * 2},
    "needless_copies": {"x": halves(2, 4, 8), "linear": nn.Linear(8, 8).bfloat16()},
    "waiting_for_data": {"batch": {"x": torch.ones(2)}},
    "forward_without_backward": {"model": nn.Linear(8, 16), "x": torch.ones(4, 8), "loss_of": F.cross_entropy,
                                 "y": torch.ones(4, dtype=torch.long)},
    "evaluation_memory": {"model": nn.Linear(8, 16), "correct": 0,
                          "validation": [(torch.ones(4, 8), torch.ones(4, dtype=torch.long))]},
    "graph_without_backward": {"teacher": nn.Linear(8, 16), "x": torch.ones(4, 8)},
    "constant_work": {"self": nn.Module()},
    "discarded_gradients": {"generator": nn.Linear(4, 8), "discriminator": nn.Linear(8, 1), "noise": torch.ones(2, 4),
                            "criterion": F.mse_loss, "zeros": torch.zeros(2, 1)},
    "growing_work": {"pieces": []},
    "independent_calls": {"self": SimpleNamespace(query=nn.Linear(8, 16)), "batch": 2, "length": 4, "heads": 2,
                          "samples": torch.randn(3, 4, 8)},
    "recurrent_loop": {"x": torch.randn(2, 4, 8), "h": torch.zeros(2, 16), "cell": nn.GRUCell(8, 16), "outputs": [],
                       "input_size": 8, "hidden_size": 16, "compiled_cell": lambda inputs, hidden, h: inputs + hidden,
                       "self": SimpleNamespace(input=nn.Linear(8, 16), hidden=nn.Linear(16, 16))},
    "mostly_zeros": {"num_words": 4, "words": torch.ones(3, dtype=torch.long), "num_nodes": 5,
                     "target": torch.tensor([0, 2]), "messages": torch.ones(2, 8)},
    "ignored_labels": {"labels": torch.tensor([-100, -100, 3, 1]), "hidden": torch.randn(4, 8),
                       "head": nn.Linear(8, 5)},
    "longer_side": {"x": torch.randn(16, 8), "steps": 2, "a": 3.4, "b": -4.8, "c": 2.0},
    "repeated_backward": {"net": nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)), "loss_of_policy": scalar,
                          "loss_of_value": scalar, "points": torch.rand(4, 1), "times": torch.rand(4, 1)},
    "repeated_rows": {"x": torch.randn(2, 4, 8), "cond": torch.randn(2, 1, 8),
                      "self": SimpleNamespace(ada=nn.Linear(8, 16), norm=nn.LayerNorm(8))},
}  # fmt: skip


def names() -> dict[str, Any]:
    """Return what a block may use; new for each."""
    model, x = Model(), torch.randn(2, 4, 8)
    loss = model(x)
    loss.backward(retain_graph=True)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, texts = torch.randint(4, (4, 6)), [torch.ones(3), torch.ones(5)]
    q = k = v = torch.randn(1, 2, 128, 16)
    experts = torch.randint(4, (16, 2))
    return {
        **globals(), "model": model, "x": x, "loss": loss, "optimizer": optimizer,
        "parameters": list(model.blocks.parameters()), "q": q, "k": k, "v": v,
        "causal": torch.ones(128, 128, dtype=torch.bool).tril(), "inf": math.inf, "dataset": texts * 8,
        "texts": texts, "rows": texts, "longest": 5, "validation": [x] * 4, "batch_size": 2, "batch": x,
        "batches": [x] * 3, "micro_batches": [x] * 2, "images": torch.ones(1, 3, 8, 8), "step": 100, "i": 0,
        "writer": SimpleNamespace(add_scalar=print), "logger": SimpleNamespace(log=print), "metrics": {},
        "path": "saved.pt", "folder": "saved", "length": 128, "heads": 2, "state": {"model": model.state_dict()},
        "block": model.blocks[0], "losses": [], "total": 0.0, "mask": x > 0, "evaluate": loss_of,
        "train_step": lambda batch: model(batch), "linear": nn.Linear(8, 8), "logits": x, "head": nn.Linear(8, 16),
        "hidden": torch.randn(16, 8, requires_grad=True), "targets": torch.randint(16, (16,)), "experts": experts,
        "num_experts": 4, "num_tokens": 16, "num_chosen": 2, "probabilities": torch.rand(16, 4), "mean": np.ones(3),
        "array": np.ones(3), "averages": [p.detach().clone() for p in model.parameters()], "decay": 0.9,
        "table": torch.randn(8, 4), "index": torch.tensor([1, 1, 2]), "rank": 0, "world_size": 1, "inputs": [x] * 2,
        "weights": [torch.ones(8, 8)] * 2, "weight": torch.ones(8), "size": 8, "eps": 1e-6, "num_rows": 4,
        "width": 8, "encoder": nn.Embedding(4, 8), "tokens": tokens, "out": torch.empty_like(x),
        "self": SimpleNamespace(qkv=nn.Linear(8, 24)), "pad_to_multiple_of": lambda size: torch.stack, "flops": 1e9,
        "log_histograms": print, "best": 0.0,
        "pack_by_tokens": lambda rows, world_size: [rows] * world_size, "peak": 1e12, "arguments": None,
        "data": None, "Trainer": lambda *_, **options: options["callbacks"],
    }  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    Path("dumps").mkdir(exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for page, text in json.loads(Path(sys.argv[1]).read_text()):
        for old, new in ON_CPU.items():
            text = text.replace(old, new)
        try:
            exec(compile(text, page, "exec"), names() | OF_A_PAGE.get(Path(page).stem, {}))
        except Exception as error:
            line = error.__traceback__.tb_next.tb_lineno if error.__traceback__ and error.__traceback__.tb_next else 0
            print(f"failed: {page}, line {line}: {type(error).__name__}: {str(error).splitlines()[0]}")
        gc.enable()
        gc.unfreeze()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
