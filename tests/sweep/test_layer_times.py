"""Times of single layers: which they are, that each is its own, and that a point's row has them cold and warm."""

from __future__ import annotations

import time

import torch
from torch import nn

from stepscope.sweep import measure
from stepscope.sweep.measure import layers_of, median_layers_ns, timed_layers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 1)})

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[1]):  # the last one twice
            x = block(x)
        return self.heads["a"](x)


def test_layers_are_what_is_called_outermost():
    assert list(layers_of(Model())) == ["embedding", "blocks.0", "blocks.1", "heads.a"]


def test_a_layer_has_its_own_time_and_all_of_its_calls(monkeypatch):
    """GIVEN a clock that goes on by 1 at each look THEN a call takes 1, and a layer called twice 2."""
    ticks = iter(range(1000))
    monkeypatch.setattr(measure.time, "perf_counter_ns", lambda: next(ticks))
    model = Model()

    with timed_layers(model, "cpu") as times_ns:
        model(torch.tensor([1, 2]))
    model(torch.tensor([1, 2]))  # the hooks are gone

    assert times_ns == {"embedding": 1, "blocks.0": 1, "blocks.1": 2, "heads.a": 1}
    assert next(ticks) == 10


def test_of_several_passes_the_median_counts():
    model = Model()
    sleeps = iter([1.0, 0.0, 0.0])
    model.embedding.register_forward_hook(lambda *_: time.sleep(next(sleeps)))

    found = median_layers_ns(lambda: model(torch.tensor([1])), model, 3, "cpu")

    assert found["embedding"] < 1_000_000_000 and found.keys() == layers_of(model).keys()
