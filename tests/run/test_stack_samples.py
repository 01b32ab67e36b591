"""Where Python is in the step before the trace: lines of the script, by phase, and findings that name them."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from stepscope.recorder import stack_samples
from stepscope.recorder.stack_samples import StackSampler, line_of

SCRIPT = """
import torch
from torch.utils.data import DataLoader

torch.set_num_threads(1)
words = [f"word{number}" for number in range(20000)]

class Texts:
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.full((16,), self.encode(index))

    def encode(self, index):
        for number, word in enumerate(words):
            if word == "word3000":
                return float(number)

net = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(net.parameters(), 1e-9)
for _ in range(20):
    for batch in DataLoader(Texts(), batch_size=100):
        net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def busy(seconds, phase):
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        phase.now = "data"


def test_a_busy_line_is_seen_in_its_phase():
    phase = SimpleNamespace(now=None)
    sampler = StackSampler(lambda: phase.now)
    busy(0.3, phase)
    found = sampler.stop()

    assert sampler.stop() is None  # a second time
    first = found["lines"][0]
    assert first["phase"] == "data" and first["place"].endswith(" busy") and "test_stack_samples.py" in first["place"]
    assert found["num_samples"] == sum(line["num_samples"] for line in found["lines"]) >= 5


def test_a_package_that_runs_the_loop_has_the_line_and_a_function_of_it_has_not():
    """A stack of five calls of a package inside of a script's is a trainer's; one of two, a helper's."""

    def stack(*files):
        frame = None
        for file in files:
            code = SimpleNamespace(co_filename=file, co_name="f")
            frame = SimpleNamespace(f_code=code, f_lineno=7, f_back=frame)
        return frame

    package = "/env/lib/site-packages/trainer/loop.py"
    assert line_of(stack("/home/me/train.py", package, package)) == "train.py:7 f"
    assert line_of(stack("/home/me/train.py", *[package] * 5)) == "loop.py:7 f"
    assert line_of(stack("/home/me/train.py", *[package] * 5, "/home/me/data.py")) == "data.py:7 f"
    assert line_of(stack(package)) == "loop.py:7 f"
    assert line_of(stack("<string>", stack_samples.__file__)) is None


def test_the_switch_interval_of_the_script_is_its_own():
    before = sys.getswitchinterval()
    sampler = StackSampler(lambda: None)
    child = os.fork()
    if not child:
        os._exit(not (sys.getswitchinterval() == before and sampler.stop() is None))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    sampler.stop()
    assert sys.getswitchinterval() == before
    sampler = StackSampler(lambda: None)
    sys.setswitchinterval(0.25)
    sampler.stop()
    assert sys.getswitchinterval() == 0.25
    sys.setswitchinterval(before)


def test_what_a_function_held_is_freed_by_its_own_thread():
    freed_by = []

    class Held:
        def __del__(self):
            freed_by.append(threading.get_ident())

    def holds():
        held = Held()
        time.sleep(0.001)
        return held is None

    sampler = StackSampler(lambda: None)
    for _ in range(200):
        holds()
    sampler.stop()
    assert freed_by.count(threading.get_ident()) > 190


def test_what_makes_a_batch_in_pure_python_is_named(lab, forks):
    script = lab.script(SCRIPT)
    run = script.run_in_fork(forks, "--warmup", 3, "--clean", 8, "--exit-after", "--quiet")

    lines = run.recording.facts["python"]["lines"]
    seen = {line["place"].partition(" ")[2] for line in lines if line["phase"] == "data"}
    assert "encode" in seen, lines
    said = script.verb("diagnose", "recording").stdout
    assert "in encode (" in " ".join(said.split()) and "or speed up the lines above" in " ".join(said.split())


@pytest.mark.long
def test_without_a_trace_nobody_looks(lab):
    run = lab.script(SCRIPT).run(options=("--warmup", 3, "--clean", 4, "--trace", 0, "--exit-after", "--quiet"))

    assert "python" not in run.recording.facts
