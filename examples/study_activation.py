"""A study of one's own: does the activation matter? `stepscope study examples/study_activation.py --quick`"""

import torch
from torch import nn

from stepscope.document.model import Text
from stepscope.studies import Question, Study, Sweep
from stepscope.studies.figures import compared, table


def build(width: int = 128, activation: str = "gelu"):
    act = {"gelu": nn.GELU(), "relu": nn.ReLU()}[activation]
    return nn.Sequential(nn.Linear(width, 4 * width), act, nn.Linear(4 * width, width)), lambda: torch.randn(
        64, width
    )


def answer(stored):
    rows = stored.rows("widths").ok
    last = rows.where(width=max(rows.values("width")))
    relu, gelu = (last.one(activation=name)["time_median_ns"] for name in ("relu", "gelu"))
    yield Text(f"At width {last.values('width')[0]} ReLU is {compared(relu, gelu, 'GELU')}.")
    yield table("widths", "Forward and backward", rows, "width", "activation", "time_median_ns")


knobs = {"mode": "forward+backward", "activation": ["gelu", "relu"]}
sweep = Sweep(id="widths", workload=f"{__file__}:build", about="", quick=[knobs | {"width": [32, 64]}], full=[knobs])
QUESTIONS = (Question(title="Is ReLU faster?", answer=answer),)
STUDY = Study(name="activation", title="GELU or ReLU?", about="", measures=(sweep,), questions=QUESTIONS)
