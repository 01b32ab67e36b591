"""What `stepscope improve` decides and finds: which changes pay, how much faster they make a script together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

from stepscope.analysis.comparison.losses import LossCheck
from stepscope.analysis.comparison.significance import Difference, difference_of_runs
from stepscope.display import Shown

SCHEMA_VERSION = 1
LEAST_GAIN = 0.02  # a change must make a step shorter by more than this share
CLEAR_GAIN = 0.2  # one pair is enough for a change that saves more than this share, and more than noise explains
MOST_PAIRS = 4  # of runs without and with a change, until a gain is called not reproducible
EXIT_NOTHING_TRIED = 4

KEPT, NO_GAIN, SLOWER, WRONG, FAILED = "kept", "no gain shown", "slower", "wrong", "failed"
REPLACED, NOT_APPLIED, NOT_TRIED, UNDECIDED = "replaced", "nothing to change", "not tried", "undecided"
OPEN = (NOT_TRIED, UNDECIDED)
INTERRUPTED = "interrupted"  # why something was not tried


@dataclass(frozen=True)
class Factor:
    """How many times as fast: the first time per step ÷ the second."""

    factor: float
    low: float | None  # lower end of the 95 % interval; null with fewer than two runs on each side
    high: float | None
    num_runs: tuple[int, int]  # without and with the change
    is_significant: bool


@dataclass(frozen=True)
class Trial:
    """One change that was tried on top of those kept before, or was not, and why."""

    fix: str
    on_top_of: tuple[str, ...]
    status: str
    """`kept`; `replaced`: kept until another value of it was faster; `no gain shown`; `slower`; `wrong`: the losses
    differ; `failed`: the script does not run with it; `nothing to change`; `undecided`, `not tried`: time was up."""
    reason: str | None = None
    gain: Factor | None = None  # compared with runs of the changes kept before it, in alternation
    losses: LossCheck | None = None  # compared with the unchanged script
    changed: Mapping[str, int] = field(default_factory=dict)  # what it changed in the script, and how often
    promise_share: float | None = None  # what the last ledger before it promised, as a share of that step


@dataclass(frozen=True, repr=False)
class Improvement(Shown):
    """The result of `stepscope improve`; `to_json()` is what `--json` prints."""

    command: str
    folder: str  # folder with the recordings of all runs
    device_name: str | None
    torch: str | None
    baseline_ns: float  # the time per step of the unchanged script: the geometric mean of its runs
    best_ns: float  # the same with all changes that are kept
    kept: tuple[str, ...]  # the changes that pay, in the order in which they were found
    gain: Factor | None  # of all of them together, compared with the unchanged script; null if none is kept
    losses: LossCheck | None  # with all of them, compared with the unchanged script
    trials: tuple[Trial, ...]
    code: tuple[str, ...]  # lines that make the changes in the script
    order: str  # where the order of trials comes from
    peak_bytes: tuple[int, int] | None  # peak allocated memory without and with the changes; null without a GPU
    num_runs: int
    seconds: float
    limit_s: float
    is_finished: bool  # whether everything was tried; false if the time was up, or it was interrupted
    warnings: tuple[str, ...] = ()
    by_hand: Mapping[str, float] = field(default_factory=dict)
    """Findings about the best whose fix is a change in the script, which is not tried, with the share of a step that
    it is expected to save."""

    @property
    def is_interrupted(self) -> bool:
        return any(trial.reason == INTERRUPTED for trial in self.trials)

    @property
    def exit_code(self) -> int:
        """0 if anything was measured besides the unchanged script, else 4."""
        is_measured = any(trial.status not in (NOT_APPLIED, NOT_TRIED) for trial in self.trials)
        return 0 if is_measured or self.is_finished else EXIT_NOTHING_TRIED

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain values (docs/improve.md)."""
        return {"schema_version": SCHEMA_VERSION, "exit_code": self.exit_code, **asdict(self)}


def factor_of(before_ns: Sequence[float], after_ns: Sequence[float]) -> Factor:
    """Return how many times as fast runs are, each given by its time per step.

    >>> found = factor_of([10.0, 10.1], [5.0, 5.1])
    >>> round(found.factor, 2), found.is_significant
    (1.99, True)
    """
    num_runs = len(before_ns), len(after_ns)
    if min(num_runs) < 2:
        factor = geometric_mean(before_ns) / geometric_mean(after_ns)
        return Factor(factor, None, None, num_runs, False)
    found: Difference = difference_of_runs(before_ns, after_ns)
    return Factor(1 / found.ratio, 1 / found.high, 1 / found.low, num_runs, found.is_significant)


def verdict(before_ns: Sequence[float], after_ns: Sequence[float], noise_share: float) -> str | None:
    """Return `kept`, `no gain shown` or `slower` for pairs of runs; None if another pair is needed.

    `noise_share` is how far runs of the same program are apart. One pair is enough to drop what does not pay, if that
    noise cannot hide a gain, or to keep what saves far more than noise explains: the best is measured again at the
    end. To be kept for less, a change must pay in two pairs or more, beyond chance.

    >>> verdict([10.0], [10.1], 0.01), verdict([10.0], [10.1], 0.2), verdict([10.0], [9.0], 0.01)
    ('no gain shown', None, None)
    >>> verdict([10.0], [7.0], 0.01), verdict([10.0], [7.0], 0.2)
    ('kept', None)
    >>> verdict([10.0, 10.1], [8.0, 8.1], 0.01)
    'kept'
    >>> verdict([10.0] * 4, [12.0, 40.0, 9.0, 13.0], 0.2), verdict([10.0] * 4, [12.0, 12.1, 12.2, 12.1], 0.2)
    ('no gain shown', 'slower')
    """
    found, num_pairs, least = factor_of(before_ns, after_ns), len(after_ns), 1 / (1 - LEAST_GAIN)
    if found.factor > least and found.is_significant:
        return KEPT
    if num_pairs == 1 and found.factor > max(1 / (1 - CLEAR_GAIN), (1 + noise_share) ** 3):
        return KEPT
    is_surely_below = found.high is not None and found.high < least
    is_open = num_pairs < MOST_PAIRS and found.factor * (1 + noise_share) ** (1 / math.sqrt(num_pairs)) > least
    if is_open and not is_surely_below:
        return None
    # As in `verify`, an interval that contains 1 shows nothing. One pair has none: noise must not explain it.
    is_shown = found.is_significant or (num_pairs == 1 and found.factor * (1 + noise_share) ** 3 < 1)
    return SLOWER if is_shown and found.factor < 1 - LEAST_GAIN else NO_GAIN


def trial_line(trial: Trial) -> str:
    """Return a finished trial as one line of progress."""
    factor = "" if trial.gain is None else f"  {trial.gain.factor:.2f}×"
    return f"{trial.status:<17} {trial.fix}{factor}{f'  {trial.reason}' if trial.reason else ''}"
