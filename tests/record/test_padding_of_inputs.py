"""Padding is counted in token ids and masks; labels, types and positions are none."""

from __future__ import annotations

import pytest
import torch

from stepscope.recorder.ledger.padding import Padding

LENGTH = 16


def rows(*lengths: int, pad: int = 0, left: bool = False) -> torch.Tensor:
    """Texts of these lengths among rows of 16."""
    ids = torch.full((len(lengths), LENGTH), pad)
    for row, length in enumerate(lengths):
        text = torch.arange(2, 2 + length)
        ids[row, LENGTH - length :] = text if left else ids[row, LENGTH - length :]
        ids[row, :length] = ids[row, :length] if left else text
    return ids


def counted(*args: object, **kwargs: object) -> tuple[int, ...]:
    padding = Padding()
    padding.note(args, kwargs)
    assert padding.error is None
    return tuple(padding.table().values())


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("pad", [0, 50_256])
def test_ids_that_end_or_begin_in_one_value(pad, left):
    assert counted(rows(4, 7, pad=pad, left=left)) == (32, 5 + 8, 2 * 8), "one may be the end of the text"


def test_a_mask_by_its_name():
    ids = torch.arange(2, 34).view(2, LENGTH)
    mask = (rows(4, 12) > 0).long()

    assert counted(ids, attention_mask=mask) == (32, 16, 24)
    assert counted(input_ids=rows(4, 12), attention_mask=mask.bool()) == (32, 16, 24), "exact, where ids are not"


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, LENGTH, dtype=torch.long),
        torch.tensor([[0] * 10 + [1] * 6] * 2),
        torch.tensor([[-100] * 10 + [*range(6)]] * 2),
        torch.arange(LENGTH).expand(2, LENGTH),
    ],
    ids=["a mask of ones", "types of two sentences", "labels without the prompt", "positions"],
)
def test_what_is_no_padding(other):
    num_positions, num_used, _ = counted(torch.arange(2, 34).view(2, LENGTH), other)

    assert num_positions == num_used == 32


def test_labels_that_the_loss_ignores():
    """Of the loss with most classes, in all micro-batches."""
    from stepscope.recorder.ledger.ledger import Ledger

    labels = torch.arange(32) % 50
    labels[:20] = -100
    with Ledger([], [], lambda: "forward") as ledger:
        for _ in range(2):
            torch.nn.functional.cross_entropy(torch.randn(32, 50), labels)
        torch.nn.functional.cross_entropy(torch.randn(8, 3), torch.zeros(8, dtype=torch.long))

    table = ledger.padding.table()
    assert (table["num_labels"], table["num_ignored"]) == (64, 40)


def test_images_have_none():
    assert counted(torch.zeros(2, 3, 8, 8), torch.tensor([1, 2])) == (0, 0, 0)


def test_micro_batches_add_up():
    padding = Padding()
    for lengths in ((4, 7), (15, 15)):
        padding.note((rows(*lengths),), {})

    assert padding.table() == {"num_positions": 64, "num_used": 13 + 32, "num_to_longest": 16 + 32}


def frames(*lengths: int, value: float = 0.0) -> torch.Tensor:
    """Recordings of these lengths among rows of 16 frames of 5 features."""
    torch.manual_seed(0)
    found = torch.full((len(lengths), LENGTH, 5), value)
    for row, length in enumerate(lengths):
        found[row, :length] = torch.randn(length, 5)
    return found


@pytest.mark.parametrize("value", [0.0, -11.5])
def test_frames_that_end_in_copies_of_the_last(value):
    audio = frames(4, 7, 16, value=value)

    assert counted(audio) == (48, 4 + 7 + 16, 3 * 16)
    assert counted(audio.transpose(1, 2)[:2]) == (32, 4 + 7, 2 * 7), "time last, and no row fills the batch"
    assert counted(audio, torch.tensor([4, 7, 16])) == (48, 27, 48), "lengths are no text"


@pytest.mark.parametrize(
    "other",
    [
        frames(16, 16),
        frames(9, 9),  # lengths that do not differ may be features that are not used
        torch.zeros(3, LENGTH, 5),
        frames(4, 7)[:, :, :3],
        frames(4, 7).long(),
        torch.randn(2, 3, LENGTH, LENGTH),
        torch.randn(4, LENGTH).to_sparse(),
    ],
)
def test_frames_without_padding(other):
    assert counted(other) == (0, 0, 0) or counted(other)[0] == counted(other)[1]
