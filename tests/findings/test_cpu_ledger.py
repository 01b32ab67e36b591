"""The ledger of a step on a CPU adds up, and time without any op has a row."""

from __future__ import annotations

from recorded_cases import run_script

from parametrized import parametrized
from stepscope.findings.diagnose import diagnose
from stepscope.session import open_session

SCRIPT = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
    def forward(self, x):
        {pause}
        return self.layer(x)

torch.set_num_threads(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(512, 256)
for _ in range(40):
    {data}
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def diagnosed(forks, folder, pause="pass", data="pass"):
    run_script(forks, folder, SCRIPT.format(pause=pause, data=data))
    return diagnose(open_session(folder / "run").case)


@parametrized(
    ("where", "row"),
    [({"pause": "time.sleep(0.01)"}, "cpu_python"), ({"data": "time.sleep(0.01)"}, "cpu_between")],
    quick=1,
)
def test_time_without_any_op_has_an_owner(forks, tmp_path, where, row):
    diagnosis = diagnosed(forks, tmp_path, **where)
    ledger = diagnosis.ledger

    assert sum(ledger.parts.values()) == ledger.total_ns
    # The row is a lower bound: what a traced step takes longer, on a busy machine too, is taken from it first.
    typical = {name: ns for name, ns in ledger.parts.items() if name not in ("slow_steps", "between_steps")}
    assert max(typical, key=typical.__getitem__) == row
    pause_ns = ledger.parts[row] / ledger.num_steps
    assert ledger.parts["cpu_products"] > 0 and ledger.limit_share is None
    told = [one for one in diagnosis.findings if row in one.claims]
    assert 0.95 * pause_ns <= sum(one.claims[row] for one in told)
    assert all(one.claims[row] <= pause_ns for one in told) and max(one.claims[row] for one in told) > pause_ns / 2
    assert told[0].saving_low_ns is None, "at most all of it: none of it is certain"
