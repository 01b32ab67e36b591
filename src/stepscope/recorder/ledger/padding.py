"""How many positions of a step's input are padding, from the values of its token ids, its mask or its frames; and how
many labels the loss ignores."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.recorder.modes import unseen
from stepscope.recorder.values import is_capturing, tensors_in

_LEAST_POSITIONS = 8  # a shorter row is not text
_FEWEST_FEATURES = 4  # of a frame: fewer may be equal by chance
_MOST_ELEMENTS = 1 << 24
_WHOLE = (torch.int64, torch.int32, torch.bool)
_LOSS = "aten.nll_loss_forward"  # (log-probabilities, labels, weight, reduction, the label that is ignored)


class Padding:
    """Counts the padding of the forwards in a window."""

    def __init__(self) -> None:
        self._totals = [0, 0, 0]
        self._labels: list[tuple[int, torch.Tensor, int]] = []  # classes, those ignored and all of each loss
        self.error: str | None = None

    def note(self, args: Any, kwargs: Any) -> None:
        """Read the values of the inputs: this waits for the GPU."""
        masks = [value for name, value in kwargs.items() if "mask" in name and isinstance(value, torch.Tensor)]
        try:
            found = [unseen(_counted, tensor, 0) for tensor in masks]
            tensors = list(tensors_in((args, kwargs)))
            found += [unseen(count, tensor) for count in (_counted, _counted_frames) for tensor in tensors]
        except Exception as error:  # the script's tensors may be of any kind
            self.error = f"{type(error).__name__}: {error}"
            return
        # The tensor that shows most padding: ids end in a pad id, masks in zeros.
        most = min((one for one in found if one is not None), key=lambda one: one[1] / one[0], default=(0, 0, 0))
        self._totals = [total + one for total, one in zip(self._totals, most)]

    def note_loss(self, op: str, args: Any) -> None:
        """Count the ignored labels of a loss; they are read in `table`, when the GPU has done it."""
        if op == _LOSS and not is_capturing():
            labels = args[1]
            self._labels.append((args[0].shape[-1], torch.count_nonzero(labels == args[4]), labels.numel()))

    def table(self) -> dict[str, int]:
        """Return positions, those in use, and those if each batch is padded to its longest, zeros without text; and
        the labels of the losses with most classes, if there are any."""
        table = dict(zip(("num_positions", "num_used", "num_to_longest"), self._totals))
        if self._labels:
            most = max(num_classes for num_classes, _, _ in self._labels)
            labels = [(num_ignored, num) for num_classes, num_ignored, num in self._labels if num_classes == most]
            table["num_labels"] = sum(num for _, num in labels)
            table["num_ignored"] = sum(int(num_ignored) for num_ignored, _ in labels)
        return table


def _counted(tensor: torch.Tensor, pad: int | None = None) -> tuple[int, int, int] | None:
    """Return positions, those in use, and those up to the longest row; None for what is not text.

    `pad` is the value of padding; without it, the one that most rows end or begin with. Labels have negative values,
    and zeros and ones without a name may mean anything: both show no padding.
    """
    is_text = tensor.dim() == 2 and tensor.dtype in _WHOLE and tensor.shape[1] >= _LEAST_POSITIONS
    if not is_text or type(tensor) is not torch.Tensor or tensor.numel() > _MOST_ELEMENTS or tensor.is_meta:
        return None
    rows = tensor.detach().cpu().to(torch.int64)
    if pad is None and (bool((rows < 0).any()) or bool((rows <= 1).all())):
        return None
    num_rows, length = rows.shape
    used = torch.full((num_rows,), length)
    for side in (rows.flip(1), rows):
        value = side[:, 0].mode().values if pad is None else pad
        run = (side == value).to(torch.int64).cumprod(1).sum(1)
        # The first pad id may mark the end of the text. A row with a single value is not padding.
        run = torch.where(run == length, 0, run if pad is not None else (run - 1).clamp(min=0))
        used = torch.minimum(used, length - run)
    return rows.numel(), int(used.sum()), num_rows * int(used.max())


def _counted_frames(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Return the same for frames of features, such as audio, with time in the second or the last dimension: padding
    repeats the last frame, in all features. Rows of different lengths show it; None if there are none."""
    is_whole = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_meta
    if not is_whole or tensor.dim() != 3 or not tensor.is_floating_point() or tensor.numel() > _MOST_ELEMENTS:
        return None
    found = []
    for time in (1, 2):
        frames = tensor.detach().movedim(time, 1)
        num_rows, length, num_features = frames.shape
        if length < _LEAST_POSITIONS or num_features < _FEWEST_FEATURES:
            continue
        run = (frames == frames[:, -1:]).all(2).cpu().flip(1).to(torch.int64).cumprod(1).sum(1)
        # A last frame is no padding by itself, and a row with a single value is none.
        run = torch.where((run == length) | (run == 1), 0, run)
        used = length - run
        if len(set(run.tolist())) > 1:
            found.append((num_rows * length, int(used.sum()), num_rows * int(used.max())))
    return min(found, key=lambda one: one[1] / one[0], default=None)
