"""How many positions of a step's input are padding, from the values of its token ids or its mask."""

from __future__ import annotations

from typing import Any

import torch

from stepscope.recorder.modes import unseen
from stepscope.recorder.values import tensors_in

_LEAST_POSITIONS = 8  # a shorter row is no text
_MOST_ELEMENTS = 1 << 24
_WHOLE = (torch.int64, torch.int32, torch.bool)


class Padding:
    """Counts the padding of the forwards in a window."""

    def __init__(self) -> None:
        self._totals = [0, 0, 0]
        self.error: str | None = None

    def note(self, args: Any, kwargs: Any) -> None:
        """Read the values of the inputs: this waits for the GPU."""
        try:
            found = [one for tensor in tensors_in((args, kwargs)) if (one := unseen(_counted, tensor)) is not None]
        except Exception as error:  # the script's tensors may be of any kind
            self.error = f"{type(error).__name__}: {error}"
            return
        if found:
            # The tensor that shows most padding: ids end in a pad id, masks in zeros, labels in an ignored value.
            most = min(found, key=lambda one: one[1] / one[0])
            self._totals = [total + one for total, one in zip(self._totals, most)]

    def table(self) -> dict[str, int]:
        """Return positions, those in use, and those if each batch is padded to its longest; zeros without text."""
        return dict(zip(("num_positions", "num_used", "num_to_longest"), self._totals))


def _counted(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    is_text = tensor.dim() == 2 and tensor.dtype in _WHOLE and tensor.shape[1] >= _LEAST_POSITIONS
    if not is_text or type(tensor) is not torch.Tensor or tensor.numel() > _MOST_ELEMENTS or tensor.is_meta:
        return None
    rows = tensor.detach().cpu()
    num_rows, length = rows.shape
    # The run of one value at the end of the rows, or at their beginning: one of it may be the end of a text.
    least = torch.full((num_rows,), length)
    for side in (rows.flip(1), rows):
        value = side[:, 0].mode().values
        run = (side == value).to(torch.int64).cumprod(1).sum(1)
        least = torch.minimum(least, length - (run - 1).clamp(min=0))
    if bool((least == 1).any()):  # a row of one value throughout: categories, or a mask of ones
        least = torch.where(least == 1, length, least)
    return rows.numel(), int(least.sum()), num_rows * int(least.max())
