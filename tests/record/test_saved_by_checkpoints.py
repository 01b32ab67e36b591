"""What a checkpoint starts again from is saved by the checkpointed module, whichever of its ops is the last."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.utils.checkpoint import checkpoint

from stepscope.recorder.clock import FORWARD
from stepscope.recorder.ledger.ledger import Ledger
from stepscope.recorder.ledger.nodes import SHOWS_SAVED_TENSORS


class Block(nn.Module):
    def __init__(self, width, next_width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 256), nn.Linear(256, next_width)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, call, use_reentrant):
        super().__init__()
        self.call, self.use_reentrant = call, use_reentrant
        self.blocks = nn.ModuleList([Block(16, 32), Block(32, 64)])
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(self.call(block), x, use_reentrant=self.use_reentrant)
        return self.head(x).mean()


@pytest.mark.skipif(not SHOWS_SAVED_TENSORS, reason="this torch does not show what is saved")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("call", [lambda block: block, lambda block: partial(block.__call__)], ids=["block", "call"])
def test_the_input_of_a_checkpoint_is_the_checkpointed_modules(call, use_reentrant):
    model = Model(call, use_reentrant)
    ledger = Ledger([model], [], lambda: FORWARD)
    ledger.start()
    try:
        loss = model(torch.randn(100, 16, requires_grad=True))
        ledger.backward_begins(tensors=loss)
        saved = {entry["module"]: entry["bytes"] for entry in ledger.memory()["saved"]}
    finally:
        ledger.stop()

    widths = {"blocks.0": 16, "blocks.1": 32, "head": 64}
    assert {name: saved.get(name) for name in widths} == {name: 100 * width * 4 for name, width in widths.items()}
