"""What a loop does between its training steps: evaluations, rollouts, and where in the script they are."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from torch import is_grad_enabled, nn

from stepscope.recorder.clock import EVALUATION, FORWARD, FORWARD_OF_ANOTHER, FORWARD_WITHOUT_GRADIENTS, ROLLOUT
from stepscope.recorder.frames import place, script_frames
from stepscope.recorder.values import parameters_in

MAX_PLACES = 16
MAX_CALLED = 10_000  # models and lines
FIRST_SEEN = 2  # the step from which on all models and sizes are known
LEAST_STEPS = 3  # in which a model is called without gradients, unless its batch is one that the step trains with
# Functions that call the trained model without gradients. The innermost that matches decides. What is printed or
# shown is to be looked at: training does not read it.
_EVALUATES = re.compile(r"eval|valid|test|estimate|(?:^|_)(?:print|show|display|preview|visuali[sz]e)")
_COLLECTS = re.compile(r"rollout|collect|explor|episode|play")
# What an evaluation calls as well as a rollout: they decide if nothing else does.
_PREDICTS = re.compile(r"predict|infer")
_ACTS = re.compile(r"(?:^|_)act(?:ions?)?(?:_|$)")
_ENVIRONMENTS = frozenset(("gymnasium", "gym", "envpool", "dm_env", "pettingzoo", "procgen", "mani_skill", "brax"))


class Between:
    """Names forwards without gradients, and keeps the places in the script that cause time between steps."""

    def __init__(self, optimizers: Mapping[int, Any]) -> None:
        self.places: dict[str, Counter[str]] = {}
        """What -> `train.py:42 evaluate` -> times."""
        self._last: dict[str, str] = {}
        self._optimizers = optimizers
        self._trained: dict[int, bool] = {}  # root -> whether the optimizers have parameters of it
        self._samples = False
        self._step = 0
        # Root, or line of the script -> its last step, in how many it was, and whether it comes in each.
        self._called: dict[Hashable, tuple[int, int, bool]] = {}
        self._sizes: set[int | None] = set()  # samples of the batches that this step trains with
        self._earlier_sizes: set[int | None] = set()
        self._num_backwards = 0  # of this step
        self.usual_backwards = 0  # of the last step that was followed event by event
        self._kind: str | None = None  # what forwards without gradients are, until training goes on
        self._caller: Any = None  # the function of the script that they come from
        self._first: str | None = None
        self._may_be_rollout = False  # what was called before training

    def another_optimizer(self) -> None:
        """Look again at which models are trained."""
        self._trained.clear()

    def step_begins(self, step: int) -> None:
        self._step = step
        self._earlier_sizes, self._sizes = self._sizes or self._earlier_sizes, set()
        self.usual_backwards, self._num_backwards = self._num_backwards or self.usual_backwards, 0

    def trained_with(self, num_samples: int | None) -> None:
        """Note the size of a batch."""
        self._sizes.add(num_samples)

    def backward_begins(self) -> bool:
        """Return whether this may be the last backward of the step: losses of last backwards are comparable."""
        self.training_goes_on()
        self._num_backwards += 1
        return self._num_backwards >= self.usual_backwards

    def training_goes_on(self) -> None:
        """Look again at who calls the next forward without gradients."""
        self._kind = None
        self._may_be_rollout = False

    def label_without_gradients(self, root: nn.Module, num_samples: Callable[[], int | None]) -> str:
        """Return what a forward without gradients is: part of training, an evaluation, or a rollout.

        It is part of training if its model, or its line of the script, comes in each step, and if its model is a
        teacher, or if it makes something to train with, in training mode and with a batch of a size that the step
        trains with: a GAN's fakes, a target. What the trained model does in each step with fewer samples is a
        rollout, and with more, labels of its own.
        """
        is_trained = self._is_trained(root)
        frame = next((frame for frame in script_frames() if frame.f_code.co_name != "forward"), None)
        caller = None if frame is None else frame.f_code
        is_regular = self._is_in_each_step(id(root))
        if frame is not None:
            is_regular |= self._is_in_each_step((caller, frame.f_lineno))
        if not is_trained and is_regular:
            return FORWARD_OF_ANOTHER
        if self._kind is None or caller is not self._caller:
            self._caller = caller
            is_usual = root.training or is_regular  # else text or pictures to look at
            self._kind = self._named(ROLLOUT if is_usual else EVALUATION)
            if self._kind is None and root.training and is_trained:
                unnamed = self._unnamed(root, num_samples()) if is_regular else FORWARD_WITHOUT_GRADIENTS
                acts = unnamed == FORWARD_WITHOUT_GRADIENTS and _plays()
                self._kind = ROLLOUT if self._samples or acts else unnamed
            self._kind = self._kind or EVALUATION
            self.note_place(self._kind)
        return self._kind

    def _unnamed(self, root: nn.Module, num_samples: int | None) -> str:
        """Return what the trained model does in training mode in each step, by the size of the batch."""
        sizes = self._sizes | self._earlier_sizes
        if self._step < FIRST_SEEN or num_samples in sizes:
            return FORWARD_OF_ANOTHER
        known = [size for size in sizes if size is not None]
        _, num_steps, _ = self._called[id(root)]
        if num_samples is None or num_steps < LEAST_STEPS or not known:
            return FORWARD_WITHOUT_GRADIENTS
        return ROLLOUT if num_samples < min(known) else FORWARD_OF_ANOTHER

    @property
    def before_training(self) -> str:
        """What the forwards before the first backward were: FORWARD if they may be part of the first step."""
        return self._first or EVALUATION

    def called_before_training(self, root: nn.Module) -> None:
        """Look at who calls the first forward of all."""
        if self._first is None:
            named = self._named()
            trains = named is None and root.training
            self._may_be_rollout = trains and not is_grad_enabled()
            acts = self._may_be_rollout and _plays()
            self._first = named or (ROLLOUT if acts else FORWARD if trains else EVALUATION)

    @staticmethod
    def looks_on(root: nn.Module) -> bool:
        """Return whether a model is in evaluation mode, or called by a function that is named as an evaluation."""
        return not root.training or any(_evaluates(frame.f_code.co_name) for frame in script_frames())

    def _named(self, generation: str = ROLLOUT) -> str | None:
        return _kind((frame.f_code.co_name.lower() for frame in script_frames()), generation)

    def _is_in_each_step(self, what: Hashable) -> bool:
        """Return whether something came in the step before too, or in most steps: one of several critics does not."""
        step, num_steps, is_usual = self._called.get(what, (FIRST_SEEN, 0, True))
        if step != self._step or not num_steps:
            num_steps += 1
            # Steps that were joined have had higher numbers.
            is_usual = self._step - step <= 1 or 2 * num_steps > self._step - FIRST_SEEN
            if len(self._called) >= MAX_CALLED:
                self._called.clear()
            self._called[what] = self._step, num_steps, is_usual
        return is_usual

    def outputs_are_sampled(self) -> None:
        """Forwards without gradients whose outputs are sampled choose actions or words: a rollout."""
        if self._kind in (FORWARD_WITHOUT_GRADIENTS, FORWARD_OF_ANOTHER):
            self._kind, self._samples = ROLLOUT, True
        elif self._may_be_rollout:
            self._first, self._may_be_rollout = ROLLOUT, False

    def note_place(self, label: str) -> None:
        """Remember which line of the script does this."""
        frame = next(script_frames(), None)
        found = self.places.setdefault(label, Counter())
        name = f"{place(frame)} {frame.f_code.co_name}" if frame is not None else None
        if name is not None:
            self._last[label] = name
            if name in found or len(found) < MAX_PLACES:
                found[name] += 1

    def last_places(self) -> dict[str, str]:
        """Return the line that did each thing last."""
        return dict(self._last)

    def _is_trained(self, root: nn.Module) -> bool:
        if id(root) not in self._trained:
            groups = [group for optimizer in self._optimizers.values() for group in optimizer.param_groups]
            trained = {id(parameter) for group in groups for parameter in group["params"]}
            parameters = parameters_in(root)
            self._trained[id(root)] = any(id(p) in trained if trained else p.requires_grad for p in parameters)
        return self._trained[id(root)]


@lru_cache(MAX_CALLED)
def _evaluates(name: str) -> bool:
    return bool(_EVALUATES.search(name.lower()))


def _plays() -> bool:
    """Return whether the script imported an environment library: unnamed calls then choose actions."""
    return not _ENVIRONMENTS.isdisjoint(sys.modules)


def _kind(names: Iterable[str], generation: str = ROLLOUT) -> str | None:
    """Return EVALUATION, ROLLOUT or None, from the names of the functions on the stack, innermost first.

    `generation` is what generating text or images counts as, unless another name on the stack decides.

    >>> _kind(["forward", "predict", "evaluate_policy", "collect_rollouts"]), _kind(["predict", "collect_rollouts"])
    ('evaluation', 'rollout')
    >>> _kind(["get_action", "evaluate"]), _kind(["get_action", "<module>"])
    ('evaluation', 'rollout')
    >>> _kind(["generate", "print_samples", "<module>"]), _kind(["generate", "<module>"])
    ('evaluation', 'rollout')
    """
    acts = generates = predicts = False
    for name in names:
        if _evaluates(name):
            return EVALUATION
        if _COLLECTS.search(name):
            return ROLLOUT
        acts |= bool(_ACTS.search(name))
        predicts |= bool(_PREDICTS.search(name))
        generates |= "generat" in name  # an evaluation may generate too
    if acts:
        return ROLLOUT
    return EVALUATION if predicts else generation if generates else None
