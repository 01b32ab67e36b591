"""Modules of a running script: their names, who calls whom, and what a call was given."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from stepscope.recorder.inputs import batch_size
from stepscope.recorder.model import (
    CalledRoots,
    CallHooks,
    live_modules,
    parameter_facts,
    visible_modules,
)
from stepscope.recorder.patches import Around


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.weight * x * scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()
        self.rest = nn.ModuleList([Inner(), nn.Sequential(Inner(), nn.Identity())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest[1](self.rest[0](self.first(x)))


def fake_compile(module: nn.Module) -> list[str]:
    """What `module.compile()` leaves behind, with a list of its calls in place of a compiler."""
    calls: list[str] = []

    def compiled(*args, **kwargs):
        calls.append("compiled")
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = compiled
    return calls


def hooks(module: nn.Module, log: list[str], name: str = "") -> CallHooks:
    return CallHooks(module, lambda m, a, k: log.append(f"begin {name}"), lambda m: log.append(f"end {name}"))


INTEGERS, FLOATS = torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 3, 8, 8)
LABELS, MASK = torch.zeros(4, dtype=torch.long), torch.ones(4, 16, dtype=torch.bool)


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((INTEGERS,), {}, (64, 4)),
        ((INTEGERS.int(),), {}, (64, 4)),
        ((INTEGERS, INTEGERS[:, :8]), {}, (64, 4)),
        ((), {"input_ids": INTEGERS, "attention_mask": MASK}, (64, 4)),
        ((), {"attention_mask": MASK, "input_ids": INTEGERS}, (64, 4)),
        ((FLOATS,), {}, (None, 4)),
        ((FLOATS, LABELS), {}, (None, 4)),
        ((FLOATS,), {"labels": LABELS}, (None, 4)),
        ((FLOATS, INTEGERS), {}, (None, 4)),  # pictures and their captions
        ((FLOATS[:, 0, 0], INTEGERS), {}, (64, 4)),
        ((LABELS,), {}, (4, 4)),
        (((INTEGERS, LABELS),), {}, (64, 4)),
        (({"x": {"ids": INTEGERS}},), {}, (64, 4)),
        (([[[INTEGERS]]],), {}, (None, None)),
        ((torch.tensor(3.0),), {}, (None, 1)),
        ((torch.zeros(4, 2, dtype=torch.complex64),), {}, (None, 4)),
        ((MASK,), {}, (None, 4)),
        ((torch.zeros(0, 16, dtype=torch.long),), {}, (0, 0)),
        (("text", 3, None), {}, (None, None)),
        ((), {}, (None, None)),
    ],
)
def test_what_a_call_was_given(args, kwargs, expected):
    assert tuple(batch_size(args, kwargs)) == expected


def test_names_are_fully_qualified_and_the_root_has_none():
    assert [name for name, _ in visible_modules(Outer())] == [
        "", "first", "rest", "rest.0", "rest.1", "rest.1.0", "rest.1.1"
    ]  # fmt: skip


def test_nothing_inside_a_compiled_module_is_visible():
    model = Outer()
    fake_compile(model.rest[1])

    assert [name for name, _ in visible_modules(model)] == ["", "first", "rest", "rest.0", "rest.1"]


def test_a_wrapper_of_torch_compile_hides_what_it_wraps():
    wrapper = nn.Module()
    wrapper.add_module("_orig_mod", Outer())

    assert [name for name, _ in visible_modules(wrapper)] == [""]
    alive = {id(module) for module in live_modules()}
    assert id(wrapper) in alive and id(wrapper._orig_mod) not in alive


def test_live_modules_are_all_of_them_but_the_insides_of_compiled_ones():
    plain, compiled = Outer(), Outer()
    fake_compile(compiled)
    alive = {id(module) for module in live_modules()}

    assert {id(module) for module in plain.modules()} <= alive
    assert alive & {id(module) for module in compiled.modules()} == {id(compiled)}


def test_nothing_inside_data_parallel_is_visible():
    model = Outer()
    wrapper = nn.DataParallel(model)

    assert [name for name, _ in visible_modules(wrapper)] == [""]
    alive = {id(module) for module in live_modules()}
    assert id(wrapper) in alive and not alive & {id(module) for module in model.modules()}


def test_hooks_do_not_make_a_module_look_compiled():
    model = Outer()
    handle = hooks(model, [])

    assert len(list(visible_modules(model))) == 7
    handle.remove()


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_see_each_call_with_its_arguments_and_leave_no_trace(compiled):
    module = Inner()
    calls = fake_compile(module) if compiled else []
    before = dict(module.__dict__)
    seen = []
    handle = CallHooks(module, lambda *call: seen.append(call), lambda m: seen.append(m))
    x = torch.ones(2)
    result = module(x, scale=3.0)
    handle.remove()
    module(x)

    assert torch.equal(result, torch.full((2,), 3.0))
    assert len(seen) == 2 and seen[0] == (module, (x,), {"scale": 3.0}) and seen[1] is module
    assert module.__dict__ == before
    assert calls == (["compiled", "compiled"] if compiled else [])


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_of_one_module_nest(compiled):
    module, log = Inner(), []
    if compiled:
        fake_compile(module)
    outer, inner = hooks(module, log, "a"), hooks(module, log, "b")
    module(torch.ones(2))
    outer.remove()
    module(torch.ones(2))
    inner.remove()
    module(torch.ones(2))

    assert log == ["begin a", "begin b", "end b", "end a", "begin b", "end b"]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_end_is_reported_when_the_forward_raises(compiled):
    module, log = Inner(), []
    if compiled:
        fake_compile(module)
    handle = hooks(module, log, "a")
    with pytest.raises(TypeError):
        module("no tensor", scale=None)
    handle.remove()

    assert log == ["begin a", "end a"]


def test_compiling_in_place_under_our_hooks_is_not_undone():
    module, log = Inner(), []
    handle = hooks(module, log)
    calls = fake_compile(module)
    compiled = module._compiled_call_impl
    handle.remove()
    module(torch.ones(2))

    assert module._compiled_call_impl is compiled and calls == ["compiled"]


def test_the_users_own_forward_hooks_run_once_and_inside():
    module, log = Inner(), []
    module.register_forward_pre_hook(lambda m, a: log.append("user begins"))
    module.register_forward_hook(lambda m, a, o: log.append("user ends"))
    handle = hooks(module, log, "ours")
    module(torch.ones(2))
    handle.remove()

    assert log == ["begin ours", "user begins", "user ends", "end ours"]


def test_a_copy_or_a_pickle_of_a_hooked_module_is_not_hooked():
    module, log = Outer(), []
    handles = [hooks(m, log) for m in module.modules()]
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for twin in copies:
        twin(torch.ones(2))
    for handle in handles:
        handle.remove()

    assert log == []
    assert all(list(twin.state_dict()) == list(module.state_dict()) for twin in copies)


def test_roots_are_the_modules_called_from_outside():
    model, other, idle = Outer(), Inner(), Inner()
    search = CalledRoots([*model.modules(), other, idle])
    model(torch.ones(2))
    other(torch.ones(2))
    search.remove()
    idle(torch.ones(2))

    assert list(search.found.values()) == [model, other]


def test_a_module_without_parameters_is_no_root():
    activation, model = nn.ReLU(), Inner()
    search = CalledRoots([activation, model])
    activation(model(torch.ones(2)))
    search.remove()

    assert list(search.found.values()) == [model]


def test_a_forward_that_raises_does_not_hide_the_next_root():
    model = Outer()
    search = CalledRoots(model.modules())
    with pytest.raises(TypeError):
        model("no tensor", "too many")
    model.first(torch.ones(2))
    search.remove()

    assert model.first in search.found.values()


def test_a_compiled_root_is_found_and_keeps_its_compiled_call():
    model = Outer()
    calls = fake_compile(model)
    compiled = model._compiled_call_impl
    search = CalledRoots(module for module in live_modules() if module is model)
    model(torch.ones(2))
    search.remove()

    assert list(search.found.values()) == [model] and calls == ["compiled"]
    assert model._compiled_call_impl is compiled


def test_parameters_are_counted_once_in_bytes_by_dtype():
    weight = nn.Parameter(torch.zeros(4, 3))
    half = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16), requires_grad=False)

    assert parameter_facts([weight, half, weight]) == {
        "num_total": 17,
        "num_trainable": 12,
        "bytes_by_dtype": {"float32": 48, "bfloat16": 10},
    }
    assert parameter_facts([]) == {"num_total": 0, "num_trainable": 0, "bytes_by_dtype": {}}


def test_a_patch_comes_off_unless_somebody_stands_on_it():
    class Owner:
        @staticmethod
        def function(x: int) -> int:
            """Doubles."""
            return 2 * x

    original = Owner.function
    patch = Around(Owner, "function", lambda original, x: original(x) + 1)
    patched = Owner.function
    assert (patched(3), patched.__doc__) == (7, "Doubles.")
    patch.remove()
    assert Owner.function is original

    patch = Around(Owner, "function", lambda original, x: original(x) + 1)
    ours = Owner.function
    theirs = Owner.function = lambda x: 10 * ours(x)
    assert Owner.function(3) == 70
    patch.remove()
    assert Owner.function is theirs and Owner.function(3) == 60
