"""A small text as training data: read, tokenized and cut into windows by a DataLoader, like a real pipeline.

The text (text.txt) was written for this purpose. A token is a word or punctuation mark, numbered by its rank in
frequency, so a few tokens make up most of the text. Windows start anywhere and wrap around the end.
"""

import re
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files

import torch
from torch.utils.data import DataLoader, RandomSampler

from stepscope.errors import UsageError
from stepscope.workloads.workload import Batch

_TOKEN = re.compile(r"\w+|[^\w\s]")


def tokenized(text: str, vocab: int) -> torch.Tensor:
    """Return the tokens of a text by rank, most frequent first; ranks beyond the vocabulary become its last token.

    >>> tokenized("The cart, the scale: the weight.", vocab=4).tolist()
    [0, 1, 2, 0, 3, 3, 0, 3, 3]
    """
    words = _TOKEN.findall(text.lower())
    rank = {word: index for index, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([min(rank[word], vocab - 1) for word in words])


class Windows:
    """A dataset of all windows of a text: `length` tokens, and for each the next token."""

    def __init__(self, words: torch.Tensor, length: int) -> None:
        self._words, self._length = words, length

    def __len__(self) -> int:
        return len(self._words)

    def __getitem__(self, start: int) -> dict[str, torch.Tensor]:
        window = self._words[torch.arange(start, start + self._length + 1) % len(self._words)]
        return {"tokens": window[:-1], "targets": window[1:]}


def text_batches(like: Batch, vocab: int, num_batches: int, num_workers: int, device: str) -> Iterator[Batch]:
    """Yield batches of the text on the device, shaped like the workload's own batch `like`."""
    if vocab < 1 or set(like) != {"tokens", "targets"} or like["tokens"].dim() != 2:
        raise UsageError(
            "--data text needs a language model: a workload with a knob vocab and batches of tokens and targets"
        )
    batch, length = like["tokens"].shape
    words = tokenized(files(__package__).joinpath("text.txt").read_text(encoding="utf-8"), vocab)
    windows = Windows(words, length)
    loader = DataLoader(
        windows,
        batch_size=batch,
        sampler=RandomSampler(windows, replacement=True, num_samples=batch * num_batches),
        num_workers=num_workers,
        pin_memory=device == "cuda",
    )
    for found in loader:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in found.items()}
