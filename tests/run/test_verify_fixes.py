"""Every fix of `stepscope verify` on real torch objects: what it changes, what it leaves, and that it says so."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, IterableDataset

from stepscope.findings.diagnose import all_rules
from stepscope.findings.fixes import FIXES
from stepscope.recorder.fixes import applied as module
from stepscope.recorder.fixes.applied import CHANGES
from stepscope.recorder.model import is_compiled


def changed(fixes):
    return fixes.facts()[0]["changed"]


def left(fixes):
    return fixes.facts()[0]["left"]


def attend():
    q = torch.ones(1, 2, 4, 8)
    return F.scaled_dot_product_attention(q, q, q)


def test_both_sides_know_the_same_fixes_and_findings_have_their_names():
    assert set(FIXES) == set(CHANGES) - {"rounding"}
    of_no_finding = {
        "autocast",
        "compile",
        "sdpa",
        "cudnn_benchmark",
        "threads",
        "expandable_segments",
        "micro_batch",
    }
    assert set(FIXES) - {rule.id for rule in all_rules()} == of_no_finding
    assert {name for fix in FIXES.values() for name in fix.findings} <= {rule.id for rule in all_rules()}


# --- unfused_optimizer


def stepped(optimizer_of):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = optimizer_of(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, model.weight.detach()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_a_looped_optimizer_is_made_fused_and_steps_as_before(apply, kind):
    _, looped = stepped(lambda p: kind(p, 0.1, foreach=False))
    fixes = apply("unfused_optimizer")
    optimizer, fused = stepped(lambda p: kind(p, 0.1, foreach=False))

    assert optimizer.param_groups[0]["fused"] is True and optimizer.param_groups[0]["foreach"] is None
    assert changed(fixes) == {f"{kind.__name__} made with fused=True instead of a loop": 1}
    torch.testing.assert_close(fused, looped)
    fixes.remove()
    assert stepped(lambda p: kind(p, 0.1))[0].param_groups[0]["fused"] is None


def test_an_optimizer_without_a_fused_form_is_made_foreach(apply):
    fixes = apply("unfused_optimizer")
    optimizer, _ = stepped(torch.optim.Rprop)

    assert optimizer.param_groups[0]["foreach"] is True
    assert changed(fixes) == {"Rprop made with foreach=True instead of the default": 1}


class Picky(torch.optim.SGD):
    def __init__(self, params, lr=0.1, foreach=None, fused=None):
        super().__init__(params, lr, foreach=foreach)
        if fused:
            raise RuntimeError("`fused=True` requires other params\nand more")


def test_one_that_refuses_to_be_fused_is_made_foreach(apply, monkeypatch):
    monkeypatch.setattr(torch.optim, "Picky", Picky, raising=False)
    fixes = apply("unfused_optimizer")
    optimizer, _ = stepped(Picky)

    assert optimizer.param_groups[0]["foreach"] is True and len(optimizer.param_groups[0]["params"]) == 2
    assert changed(fixes) == {"Picky made with foreach=True instead of the default": 1}
    assert left(fixes) == {"Picky refused fused=True: `fused=True` requires other params": 1}


class Own(torch.optim.AdamW):
    def step(self, closure=None):
        return None


class Plain(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


def test_what_cannot_be_fused_is_left_and_told(apply):
    parameters = [nn.Parameter(torch.ones(2))]
    fixes = apply("unfused_optimizer")
    torch.optim.AdamW(parameters, fused=True)
    Own(parameters)
    Plain(parameters)

    assert changed(fixes) == {}
    assert left(fixes) == {
        "AdamW is fused already": 1,
        "Own has a step of its own": 1,
        "Plain has neither a fused nor a foreach form": 1,
    }
    assert apply("unfused_optimizer").finish()[0]["nothing_seen"] == "no optimizer was made"


# --- DataLoaders


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (6, 5), (64, 8)])
def test_workers_run_on_spare_cores_as_the_finding_says(apply, monkeypatch, cores, workers):
    monkeypatch.setattr("stepscope.recorder.fixes.changes.num_cores", lambda: cores)
    apply("waiting_for_data")

    assert DataLoader(list(range(8))).num_workers == workers


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loaders_get_more_workers_and_those_of_a_stream_do_not(apply):
    fixes = apply("waiting_for_data=3")
    loader = DataLoader(list(range(8)), 2, num_workers=1)
    many, stream = DataLoader([1], num_workers=5), DataLoader(Stream())

    assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (3, True, 2)
    assert (many.num_workers, stream.num_workers) == (5, 0)
    assert changed(fixes) == {"DataLoaders with num_workers=3 instead of 1": 1}
    assert set(left(fixes)) == {
        "a DataLoader has 5 workers already",
        "a DataLoader of an IterableDataset: each worker would read all of it",
    }


def test_batches_grow_by_the_factor_that_was_asked_for(apply):
    fixes = apply("small_batch=1.5")
    assert [len(batch) for batch in DataLoader(list(range(12)), 4)] == [6, 6]
    assert [len(batch) for batch in DataLoader(list(range(4)), batch_sampler=[[0, 1], [2, 3]])] == [2, 2]
    assert changed(fixes) == {"DataLoaders with batch_size 6 instead of 4": 1}
    assert len(left(fixes)) == 1


def test_nothing_is_pinned_where_there_is_no_gpu(apply):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    fixes = apply("pageable_copies")
    next(iter(DataLoader([1.0]))).to(torch.float64)

    assert changed(fixes) == {} and left(fixes) == {"a DataLoader: there is no GPU to copy to": 1}


# --- settings


def test_attention_runs_on_the_back_end_that_was_asked_for(apply):
    fixes = apply("attention_backend=math")
    with torch.profiler.profile() as profiler:
        attend()
    assert changed(fixes) == {"attention calls of the first two steps on math instead of flash": 1}
    assert "aten::_scaled_dot_product_attention_math" in {event.name for event in profiler.events()}

    fixes.use_roots([])
    attend()
    assert sum(changed(fixes).values()) == 1  # no longer counted
    fixes.remove()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_attention_that_is_there_already_or_set_by_the_script_is_left(apply):
    fixes = apply("attention_backend")
    attend()
    with sdpa_kernel(SDPBackend.MATH):
        attend()

    assert changed(fixes) == {}
    assert left(fixes) == {
        "an attention call runs on flash already": 1,
        "an attention call runs where the script sets the backend itself": 1,
    }


def test_tf32_is_set_whatever_the_script_says_and_counts_on_a_gpu_only(apply):
    fixes = apply("fp32_matmul")
    torch.set_float32_matmul_precision("highest")
    assert torch.get_float32_matmul_precision() == "high"
    fixes.finish()
    if not torch.cuda.is_available():
        assert changed(fixes) == {}
    fixes.remove()
    assert torch.get_float32_matmul_precision() == "highest"


# --- root modules

Pair = namedtuple("Pair", "first second")


class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, kind=None):
        y = self.inner(x)
        self.seen = y.dtype
        return {"dict": {"y": y, "n": 3}, "pair": Pair(y, [y]), None: y}[kind]


def test_a_root_runs_in_bfloat16_and_returns_float32(apply):
    model, x = Many(), torch.ones(2, 4)
    fixes = apply("autocast")
    fixes.use_roots([model])
    fixes.use_roots([model])  # found again: nothing is done twice

    assert model(x).dtype == torch.float32 and model.seen == torch.bfloat16
    assert model(x, "dict")["y"].dtype == torch.float32 and model(x, "dict")["n"] == 3
    pair = model(x, "pair")
    assert type(pair) is Pair and pair.first.dtype == pair.second[0].dtype == torch.float32
    assert changed(fixes) == {"forwards of Many under autocast": 4} and left(fixes) == {}
    model(x).sum().backward()
    assert model.inner.weight.grad.dtype == torch.float32


def test_autocast_is_not_put_around_autocast_nor_around_bfloat16(apply):
    fixes = apply("autocast")
    model = Many()
    fixes.use_roots([model, nn.Linear(4, 4).bfloat16()])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 4))

    assert changed(fixes) == {}
    assert set(left(fixes)) == {
        "Linear has its weights in bfloat16 already",
        "a forward of Many is under the script's own autocast",
    }


@pytest.fixture
def eager_compile(monkeypatch):
    """torch.compile with a back end that generates no code: Dynamo alone takes a second."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, mode=None: compile_(call, backend="eager"))
    yield
    torch._dynamo.reset()


def test_a_root_is_compiled_inside_of_autocast(apply, eager_compile):
    model, compiled = nn.Linear(4, 4), nn.Linear(4, 4)
    compiled.compile()
    fixes = apply("autocast+compile")
    fixes.use_roots([model, compiled])

    assert is_compiled(model) and model(torch.ones(2, 4)).dtype == torch.float32
    for _ in range(3):
        model(torch.ones(2, 4))  # what is counted around it compiles nothing anew
    autocast, compile_ = fixes.finish()
    assert autocast["changed"] == {"forwards of Linear under autocast": 4}
    assert compile_["changed"] == {"Linear compiled": 1, "compiled graphs": 1}
    assert compile_["left"] == {"Linear is compiled already": 1}


def test_compiling_that_comes_to_nothing_is_not_applied(apply, eager_compile):
    fixes = apply("launch_bound")
    fixes.use_roots([nn.Linear(4, 4)])  # and it is never called
    fixes.finish()

    assert changed(fixes) == {}
    assert left(fixes) == {"torch.compile found nothing it could compile": 1}


def test_an_unknown_name_and_a_fault_of_ours_are_told(apply, monkeypatch):
    assert apply("nosuch").finish() == [{"id": "nosuch", "changed": {}, "left": {}, "nothing_seen": "no such fix"}]

    fixes = apply("fp32_matmul")
    monkeypatch.setattr(module.Tf32, "finish", lambda self: 1 / 0)
    fixes.finish()
    assert "ZeroDivisionError" in next(iter(left(fixes)))
