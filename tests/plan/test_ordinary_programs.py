"""What ordinary programs do besides training: defaults that they set, threads, loaders, weights made beforehand."""

from __future__ import annotations

import textwrap

import pytest

from parametrized import parametrized

torch = pytest.importorskip("torch")

from torch.overrides import _get_current_function_mode_stack

from stepscope.devices.limits import find_device
from stepscope.errors import UsageError
from stepscope.planner.prediction import Planner
from stepscope.sweep import measure
from stepscope.sweep.grid import Grid, changed
from stepscope.workloads.registry import find

H200 = find_device("NVIDIA H200")
HEAD = (
    "import threading\nimport torch\nfrom torch import nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
)


@pytest.fixture
def load(tmp_path):
    def run(text):
        file = tmp_path / "train.py"
        file.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
        workload = find(f"{file}:build")
        return workload, Grid(workload, {"device": "cpu"}).points([{}])[0]

    return run


@pytest.fixture
def plan(load):
    def run(text, device=H200):
        workload, point = load(text)
        return Planner(workload).predict(point, device)

    return run


@pytest.mark.parametrize("where", ["build", "step"])
def test_a_default_device_of_the_programs_own_holds_in_its_step_and_ends_with_the_plan(load, where):
    calls = {"build": "", "step": "", where: "torch.set_default_device('cuda')"}
    workload, point = load(f"""
        def build(batch: int = 8):
            {calls["build"]}
            model = nn.Linear(64, 64)
            def step():
                {calls["step"]}
                x = torch.randn(batch, 64)
                assert x.is_cuda
                model(x).sum().backward()
                model.zero_grad()
            return step
    """)
    planner = Planner(workload)
    first, second = (planner.predict(changed(workload, point, batch=batch), H200) for batch in (8, 16))

    assert first.live_at_peak["parameter"] == second.live_at_peak["parameter"] == 4 * 64 * 65
    assert second.peak_allocated_bytes > first.peak_allocated_bytes
    assert _get_current_function_mode_stack() == [] and torch.get_default_device() == torch.device("cpu")
    assert torch.randn(2).device.type == "cpu"


def test_a_default_device_from_before_the_plan_is_there_after_it(plan):
    torch.set_default_device("meta")
    try:
        plan("""
            def build():
                torch.set_default_device("cuda")
                torch.set_default_dtype(torch.float64)
                return nn.Linear(8, 8), lambda: torch.randn(4, 8)
        """)
        assert torch.randn(2).is_meta and torch.randn(2).dtype is torch.float32
    finally:
        torch.set_default_device(None)
    assert _get_current_function_mode_stack() == []


def test_autocast_is_asked_for_without_naming_a_device(plan):
    asks = """
        def build():
            model = nn.Linear(64, 64)
            def step():
                assert not torch.is_autocast_enabled() and not torch.is_autocast_enabled("cuda")
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
                    assert torch.get_autocast_gpu_dtype() is torch.bfloat16
                model(torch.randn(4, 64, device="cuda")).sum().backward()
            return step
    """

    assert plan(asks).parameters == 64 * 65


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("work", ["model(x)", "torch.zeros(4, device='cuda')"], ids=["a ghost", "a new tensor"])
def test_a_thread_that_fails_is_an_error(plan, work):
    with pytest.raises(
        UsageError, match=r"a thread of the program failed, train\.py:9: .*: let that one do the work"
    ):
        plan(f"""
            def build():
                model, x = nn.Linear(64, 64), torch.randn(4, 64)
                def work():
                    {work}
                def step():
                    thread = threading.Thread(target=work)
                    thread.start()
                    thread.join()
                return step
        """)


def test_a_thread_of_its_own_may_do_what_it_likes(plan):
    plan("""
        def build():
            model = nn.Linear(64, 64)
            def step():
                thread = threading.Thread(target=lambda: sum(range(10)))
                thread.start()
                model(torch.randn(4, 64, device="cuda")).sum().backward()
                thread.join()
            return step
    """)


LABELS = """
    import numpy
    labels = list(range(4))
    def build(way: str = "tensor"):
        model = nn.Linear(64, 4)
        table = nn.Embedding(4, 64)
        def step():
            y = {"tensor": lambda: torch.tensor(labels), "numpy": lambda: torch.from_numpy(numpy.arange(4))}[way]()
            nn.functional.cross_entropy(model(torch.randn(4, 64) + table(y)), y).backward()
            assert y.tolist() == labels
        return step
"""


@pytest.mark.parametrize("way", ["tensor", "numpy"])
def test_labels_with_data_in_a_plan_for_a_cpu(load, way):
    pytest.importorskip("numpy")
    workload, point = load(LABELS)
    found = Planner(workload).predict(changed(workload, point, way=way), None)

    assert found.live_at_peak["parameter"] == 4 * (64 * 4 + 4 + 4 * 64)


@pytest.mark.parametrize("when", ["build", "step"])
def test_a_loader_shuffles_on_the_host_wherever_it_is_begun(plan, when):
    found = plan(f"""
        def build():
            model = nn.Linear(64, 4)
            data = TensorDataset(torch.randn(96, 64, device="cpu"), torch.randint(4, (96,), device="cpu"))
            loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=2)
            batches = iter(loader)
            if {when == "build"}:
                next(batches)
            def step():
                x, y = next(batches if {when == "build"} else iter(loader))
                assert not x.is_cuda
                nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
            step()
            batches = iter(loader)
            return step
    """)

    assert found.live_at_peak["parameter"] == 4 * 65 * 4


WEIGHTS_BEFORE = """
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    def build(batch: int = 8):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        MOVE
        def step():
            optimizer.zero_grad()
            model(torch.randn(batch, 64, device=device)).sum().backward()
            optimizer.step()
        return step
"""


@pytest.mark.parametrize("move", ["model.to(device)", "model.cuda()"])
def test_a_model_that_is_made_at_the_top_of_a_file_moves_once(load, move):
    workload, point = load(WEIGHTS_BEFORE.replace("MOVE", move))
    planner = Planner(workload)
    found = planner.predict(point, H200)

    assert found.parameters == 64 * 65
    assert (found.live_at_peak["parameter"], found.live_at_peak["gradient"]) == (4 * 64 * 65, 4 * 64 * 65)
    assert found.live_at_peak["optimizer_state"] >= 2 * 4 * 64 * 65
    with pytest.raises(UsageError, match=r"train\.py:10 build: make the model inside the function"):
        planner.predict(changed(workload, point, batch=16), H200)


@pytest.mark.parametrize("device", [H200, None])
def test_a_model_that_is_not_moved_must_be_made_inside(plan, device):
    with pytest.raises(UsageError, match=r"train\.py:13 step: make the model inside the function"):
        plan(WEIGHTS_BEFORE.replace("MOVE", "pass"), device)


def test_a_wrapper_around_an_optimizer_is_not_another(plan):
    found = plan("""
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, optimizer):
                self.optimizer = optimizer
            state = property(lambda self: self.optimizer.state)
            param_groups = property(lambda self: self.optimizer.param_groups)
            defaults = property(lambda self: self.optimizer.defaults)
            def step(self):
                self.optimizer.step()

        def build():
            model = nn.Linear(64, 64)
            optimizer = Wrapper(torch.optim.AdamW(model.parameters()))
            def step():
                model(torch.randn(4, 64, device="cuda")).sum().backward()
                optimizer.step()
                model.zero_grad()
            return step
    """)

    assert (found.fits, found.unmodelled) == ("fits", ())


@parametrized(
    ("made", "numbers_for_each"),
    [
        ("SGD(model.parameters(), 0.1, fused=True)", 0),
        ("SGD(model.parameters(), 0.1, momentum=0.9, fused=True)", 1),
        ("Adagrad(model.parameters(), fused=True)", 1),
        ("Adam(model.parameters(), fused=True)", 2),
        ("AdamW(model.parameters(), torch.tensor(1e-3), fused=True)", 2),
    ],
    quick=3,
)
def test_every_fused_optimizer_is_known(plan, made, numbers_for_each):
    found = plan(f"""
        def build():
            model = nn.Linear(64, 64, bias=False, device="cuda")
            optimizer = torch.optim.{made}
            def step():
                model(torch.randn(4, 64, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return step
    """)

    counter = 512 if numbers_for_each else 0  # of steps, and no more than a block
    state = found.live_at_peak.get("optimizer_state", 0)
    assert 0 <= state - numbers_for_each * 4 * 64 * 64 <= counter


@pytest.mark.parametrize("step", ["def step(batch):\n  pass", "step = lambda batch, *rest, scale=1: None"])
def test_a_step_that_wants_arguments_is_told_so(plan, step):
    with pytest.raises(UsageError, match=r"cannot be called without arguments.*'batch'"):
        plan(f"def build():\n {step}\n return step")


@pytest.mark.parametrize(
    "step", ["def step(batch=1, *rest):\n  pass", "class Step:\n  def __call__(self): ...\n step = Step()"]
)
def test_a_step_that_can_do_without_runs(plan, step):
    assert plan(f"def build():\n {step}\n return step").parameters == 0


def test_gradients_added_up_take_what_they_really_take(load):
    workload, point = load("""
        def build(every: int = 4):
            model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
            optimizer = torch.optim.AdamW(model.parameters())
            calls = []
            def step():
                calls.append(None)
                model(torch.randn(32, 256)).square().mean().backward()
                if len(calls) % every == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            step.model, step.optimizer = model, optimizer
            return step
    """)
    found = Planner(workload).predict(point, None)
    step = workload.build(workload.config(**point.config)).step
    for _ in range(8):
        step()
    state = [value for values in step.optimizer.state.values() for value in values.values()]
    there = [*step.model.parameters(), *state]
    real = measure.traced(lambda: [step() for _ in range(4)], "cpu", there, None).peak_bytes

    assert found.peak_allocated_bytes == pytest.approx(real, rel=0.01)
