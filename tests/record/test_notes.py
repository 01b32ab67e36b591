"""What is noted of usual steps in C is what Python notes."""

import gc
import importlib.util
import random
import sys
import weakref
from threading import get_ident
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn
from torch.overrides import TorchFunctionMode

from stepscope.recorder.usual import notes
from stepscope.recorder.usual.notes import LONG_WAY, PythonLink, PythonNotes

compiled = pytest.mark.skipif(notes.Notes is PythonNotes, reason="the C part was not built")


class Model(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("fails"):
            raise KeyError("the script's own")
        inside = kwargs.get("inside")
        return inside() if inside is not None else len(args)


class Seen(TorchFunctionMode):
    """A mode of the script that counts what it sees."""

    num = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        Seen.num += 1
        return function(*args, **(kwargs or {}))


def kinds(base: type, link: type) -> tuple[type, type]:
    class Notes(base):  # type: ignore[misc,valid-type]
        __slots__ = ("interpreted",)

        def loss_of(self, args: Any, kwargs: Any) -> Any:
            return args[0] if args else kwargs["tensors"]

        def interpret(self) -> None:
            self.interpreted = (getattr(self, "interpreted", 0), self.num_noted)
            self.num_noted = 0

    class Link(link):  # type: ignore[misc,valid-type]
        def ended_unusually(self) -> None:
            self.ended = True

    return Notes, Link


class Driven:
    """One of the implementations, and all that it answered."""

    def __init__(self, base: type, link: type, models: list[nn.Module]) -> None:
        notes_kind, link_kind = kinds(base, link)
        self.notes, self.answers = notes_kind(), []
        self.links = []
        for model in models:
            one = link_kind()
            one.root, one.key, one.call = weakref.ref(model), id(model), None
            one.most_references = one.most_with_keywords = 100
            self.links.append(one)

    def forward(self, which: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            answer = self.notes.forward(self.links[which], args, kwargs)
        except KeyError as error:
            answer = str(error)
        self.answers.append("long way" if answer is LONG_WAY else answer)

    def state(self) -> Any:
        names = ("is_on", "is_inside", "is_odd", "waits", "fetches", "steps", "num_noted", "num_odd", "first_of_step")
        events = [(kind, _comparable(what)) for kind, _, what in self.notes.events]
        flags = [
            bool(getattr(self.notes, name)) if name[:3] != "num" else getattr(self.notes, name) for name in names
        ]
        links = [getattr(link, "ended", False) for link in self.links]
        return events, flags, self.notes.root, len(self.notes.inputs), links, self.answers


def _comparable(what: Any) -> Any:
    if isinstance(what, tuple):
        key, root, size, seen, was_seen = what
        return key, id(root()), tuple(size), seen is not None and id(seen()), was_seen
    return what


@compiled
@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_events_is_noted_the_same(seed):
    """WHEN the same calls come in any order THEN both note the same, answer the same and raise alike."""
    draw = random.Random(seed)
    models = [Model(), Model()]
    tensors = [torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(2, 3), torch.zeros(4, 7, dtype=torch.long)]
    tensors += [tensors[0].view(3, 4), tensors[0].detach(), nn.Parameter(torch.zeros(5, 2))]
    usual, other = nn.Identity(), nn.Identity()  # anything that can be referred to weakly
    both = [Driven(PythonNotes, PythonLink, models), Driven(notes.Notes, notes.Link, models)]
    for driven in both:
        one = driven.notes
        one.is_on, one.thread, one.optimizer = True, get_ident(), weakref.ref(usual)
        one.due_ns, one.most_steps = 2**62, 5
        one.in_full = one.wants_loss = seed % 3 == 0
        one.is_explicit = seed % 5 == 0
    for _ in range(60):
        what, which = draw.randrange(12), draw.randrange(4) == 0
        given = tuple(draw.choice(tensors) for _ in range(draw.randrange(3)))
        kwargs: dict[str, Any] = draw.choice(({}, {}, {"num": 1}, {"num": None}, {"x": tensors[2]}, {"fails": True}))
        mode, with_grad = draw.randrange(8) == 0, draw.randrange(8) > 0
        models[0].training = draw.randrange(8) > 0
        optimizer, starts = draw.choice((usual, usual, other)), draw.randrange(6) == 0
        for driven in both:
            one = driven.notes
            if what < 4:
                with torch.set_grad_enabled(with_grad):
                    if mode:
                        with Seen():
                            driven.forward(which, given, kwargs)
                    else:
                        driven.forward(which, given, kwargs)
            elif what < 6:
                driven.answers += [one.backward_begins((0.5,), {}), one.backward_ended()]
            elif what == 6:
                driven.answers.append(one.data_begins(starts))
            elif what == 7:
                driven.answers.append(one.data_ended())
            elif what < 10:
                driven.answers += [one.optimizer_begins(optimizer), one.optimizer_ended(optimizer)]
            elif what == 10:
                driven.answers.append(one.optimizer_begins(optimizer))
            else:
                one.end()
                one.is_inside = one.waits = one.fetches = one.steps = False
        assert both[0].state() == both[1].state()
    assert Seen.num == 0


@compiled
def test_something_unusual_inside_a_call():
    """WHEN the noting stops inside a call THEN the link hears of it, whether the call returns or raises."""
    model = Model()
    for base, link in ((PythonNotes, PythonLink), (notes.Notes, notes.Link)):
        for fails in (False, True):
            driven = Driven(base, link, [model])
            driven.notes.is_on, driven.notes.thread = True, get_ident()

            def inside(driven: Driven = driven, fails: bool = fails) -> str:
                driven.notes.is_on = False
                if fails:
                    raise KeyError("inside")
                return "done"

            driven.forward(0, (), {"inside": inside})
            assert driven.links[0].ended and not driven.notes.is_inside
            assert driven.answers == ["'inside'" if fails else "done"]


@compiled
def test_an_error_of_ours_is_no_error_of_the_script(monkeypatch):
    """WHEN noting a forward fails THEN `failed` is told, and the call goes the long way."""
    handled: list[Exception] = []
    model = Model()
    driven = Driven(notes.Notes, notes.Link, [model])
    driven.notes.is_on, driven.notes.thread = True, get_ident()
    driven.notes.events = None
    with monkeypatch.context() as patch:
        patch.setattr(notes, "failed", handled.append)
        notes.use_compiled()
        driven.forward(0, (torch.zeros(1),), {})
    notes.use_compiled()
    assert driven.answers == ["long way"] and handled


@compiled
def test_references_come_and_go():
    """WHEN steps are noted and taken away THEN no object has more references than before."""
    model, given, optimizer = Model(), torch.zeros(4, 3), nn.Identity()
    driven = Driven(notes.Notes, notes.Link, [model])
    one = driven.notes
    one.is_on, one.thread, one.optimizer, one.due_ns = True, get_ident(), weakref.ref(optimizer), 2**62
    one.most_steps = 2**40
    watched = (model, given, optimizer, one, driven.links[0], LONG_WAY, type(one))

    def steps(num: int) -> list[int]:
        for _ in range(num):
            driven.forward(0, (given,), {})
            driven.forward(0, (given,), {})  # the long way
            one.backward_begins((), {})
            one.backward_ended()
            one.optimizer_begins(optimizer)
            one.optimizer_ended(optimizer)
        one.events = []
        driven.answers.clear()
        return [sys.getrefcount(each) for each in watched]

    steps(10)
    assert steps(10) == steps(1000)


@compiled
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_interrupt_while_noting_is_the_scripts(monkeypatch, where):
    """WHEN Ctrl-C comes while something is noted THEN the script gets it, and Stepscope reports no error."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    class Interrupted(notes.Notes):
        __slots__ = ()
        loss_of = interrupted

    handled: list[Exception] = []
    model = Model()
    driven = Driven(notes.Notes, notes.Link, [model])
    driven.notes.is_on, driven.notes.thread = True, get_ident()
    with monkeypatch.context() as patch:
        patch.setattr(notes, "failed", handled.append)
        patch.setattr(notes, "batch_size", interrupted)
        notes.use_compiled()
        with pytest.raises(KeyboardInterrupt):
            if where == "forward":
                driven.forward(0, (torch.zeros(1),), {})
            else:
                one = Interrupted()
                one.is_on, one.thread, one.waits, one.wants_loss = True, get_ident(), True, True
                one.backward_begins((1.0,), {})
    notes.use_compiled()
    assert handled == []


@compiled
def test_what_the_script_raised_is_released_although_we_raise_too():
    """WHEN a call raises and what follows it raises THEN the first error and its frames are released."""
    alive: list[Any] = []

    def ends(_link: Any) -> None:
        raise SystemExit(3)

    class Big: ...

    model = Model()
    for _ in range(5):
        driven = Driven(notes.Notes, notes.Link, [model])
        type(driven.links[0]).ended_unusually = ends
        driven.notes.is_on, driven.notes.thread = True, get_ident()

        def inside(driven: Driven = driven) -> None:
            big = Big()
            alive.append(weakref.ref(big))
            driven.notes.is_on = False
            raise KeyError("the script's own")

        with pytest.raises(SystemExit):
            driven.forward(0, (), {"inside": inside})
    gc.collect()
    assert [each() for each in alive] == [None] * 5


@compiled
def test_a_second_import_leaves_the_first_one_alone(monkeypatch):
    """WHEN the C part is imported again THEN that fails, so that the second notes are Python's."""
    name = "stepscope.recorder.usual._notes"
    first = sys.modules[name]
    monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match="another import"):
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    sys.modules[name] = first
    model = Model()
    driven = Driven(notes.Notes, notes.Link, [model])
    driven.notes.is_on, driven.notes.thread = True, get_ident()
    driven.forward(0, (torch.zeros(1),), {})
    assert driven.answers == [1]
