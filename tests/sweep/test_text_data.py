"""The text that a point can be trained on: its tokens, its windows, its batches; and who is refused."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
import torch

from stepscope.errors import UsageError
from stepscope.sweep import train
from stepscope.sweep.grid import Grid
from stepscope.sweep.text_data import Windows, text_batches, tokenized
from stepscope.workloads.registry import find


def like(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(batch, length, dtype=torch.long) for name in ("tokens", "targets")}


def test_the_text_is_small_and_plain():
    text = files("stepscope.sweep").joinpath("text.txt").read_text(encoding="utf-8")
    words = tokenized(text, vocab=100_000)

    assert text.isascii() and len(text) < 200_000
    assert len(words) > 2_000 and len(words.unique()) > 400
    assert (words.bincount().diff() <= 0).all()  # by rank


def test_rare_words_share_the_last_number():
    assert tokenized("a a a b b c d", vocab=3).tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_a_window_goes_round_the_end_and_its_targets_are_the_next_tokens():
    item = Windows(torch.arange(5), length=7)[3]

    assert item["tokens"].tolist() == [3, 4, 0, 1, 2, 3, 4]
    assert item["targets"].tolist() == [4, 0, 1, 2, 3, 4, 0]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_have_the_size_that_the_workload_made(num_workers):
    found = list(text_batches(like(3, 16), vocab=50, num_batches=4, num_workers=num_workers, device="cpu"))

    assert [batch["tokens"].shape for batch in found] == [(3, 16)] * 4
    assert max(int(batch["tokens"].max()) for batch in found) < 50
    assert torch.equal(found[0]["tokens"][:, 1:], found[0]["targets"][:, :-1])


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2, 2)}, {"tokens": torch.zeros(2, 2)}, {}])
def test_what_is_no_language_model_is_refused_in_one_line(batch):
    with pytest.raises(UsageError, match="language model"):
        next(text_batches(batch, 10, 1, 0, "cpu"))


@pytest.mark.long
def test_the_loop_trains_on_the_text(monkeypatch):
    """GIVEN --data text THEN every step has another batch of it, and a loss that falls."""
    (point,) = Grid(find("hydra"), {}).points([{"preset": ["tiny"], "seq_len": [16]}])
    asked = {"workload": "hydra", "preset": "tiny", "config": dict(point.config), "run": dict(point.run)}
    seen = []
    original = train.prepare.Pass.__call__

    def call(one_pass):
        seen.append((one_pass.batch["tokens"].clone(), float(original(one_pass))))

    monkeypatch.setattr(train.prepare.Pass, "__call__", call)
    monkeypatch.setattr(train, "MAX_STEPS", 6)

    assert train.main([json.dumps(asked), "--data", "text"]) == 0
    assert len(seen) == 6 and not torch.equal(seen[0][0], seen[1][0])
    assert seen[-1][1] < seen[0][1]
