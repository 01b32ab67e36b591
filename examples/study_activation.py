"""A study of one's own: does the activation matter? `stepscope study examples/study_activation.py --quick`"""

import torch
from torch import nn

from stepscope.studies import Question, Study, Sweep, TableOf
from stepscope.studies.figures import speeds


def build(width: int = 128, activation: str = "gelu"):
    act = {"gelu": nn.GELU(), "relu": nn.ReLU()}[activation]
    model = nn.Sequential(nn.Linear(width, 4 * width), act, nn.Linear(4 * width, width))
    return model, lambda: torch.randn(64, width)


def faster(tables):
    rows = tables["widths"].ok
    widest = rows.where(width=max(rows.values("width")))
    return f"At width {widest[0]['width']} {speeds(widest, activation='gelu')}."


knobs = {"mode": "forward+backward", "activation": ["gelu", "relu"]}
sweep = Sweep("widths", f"{__file__}:build", "one pass", quick={**knobs, "width": [32, 64]}, full=knobs)
table = TableOf("widths", "Forward and backward", "widths", "width activation time_median_ns")
question = Question("Is ReLU faster?", faster, (table,))
STUDY = Study(name="activation", title="GELU or ReLU?", about="", measures=(sweep,), questions=(question,))
