"""The result types of `stepscope verify`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from stepscope.analysis.comparison.losses import LossCheck
from stepscope.analysis.comparison.metrics import TOO_FEW, Change
from stepscope.display import Shown
from stepscope.trace.recording import Recording

SCHEMA_VERSION = 1
FASTER, SLOWER = "faster", "slower"
FAILED, NOT_APPLIED, WRONG, INCOMPARABLE = "failed", "not applied", "wrong", "not comparable"
EXIT_WRONG, EXIT_UNDECIDED = 3, 4
MIN_ROUNDS = 4  # with 3 and 3 runs, a two-sided rank test cannot get below p = 0.1


@dataclass(frozen=True)
class Attempt:
    """One run of the script."""

    round: int  # 0 is the rehearsal, which checks that the change takes effect; it is not timed
    recording: Recording | None
    failure: str | None = None  # its error, in one line


@dataclass(frozen=True)
class Plan:
    """What to verify, and how strictly."""

    fix: str
    arithmetic: str
    lowers_to: Sequence[str] = ()
    tolerance_share: float | None = None
    threshold_share: float = 0.02


@dataclass(frozen=True)
class Expected:
    """What `stepscope diagnose` predicts for the fix."""

    saving_ns: float | None
    share: float | None  # `saving_ns` as a share of the recording's step
    upper_bound: bool
    confidence: str | None
    reason: str | None  # why nothing is predicted


@dataclass(frozen=True)
class Round:
    """The time per step of one pair of runs, in nanoseconds."""

    before_ns: float
    after_ns: float


@dataclass(frozen=True)
class Verified:
    """The result for one fix."""

    fix: str  # as typed
    status: str
    """`faster`, `slower`, `no difference shown`, `too few samples`; `wrong`: the losses differ; `failed`: the script
    does not run with it; `not applied`: it changed nothing; `not comparable`."""
    reason: str | None  # why, if the status is not a verdict on times
    change: Change | None = None
    """Change in step time, or in tokens (samples) per second if the batch changed; each sample is a whole run."""
    saving_ns: float | None = None  # per step; null if the batch changed
    rounds: tuple[Round, ...] = ()
    losses: LossCheck | None = None
    expected: Expected | None = None
    changed: Mapping[str, int] = field(default_factory=dict)  # what the fix changed, and how often, in the rehearsal
    left: Mapping[str, int] = field(default_factory=dict)  # what it did not change, and why
    products: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Dtype → its share of a step's FLOPs, without and with the fix."""
    warmup_extra_ns: float | None = None  # how much longer the warm-up takes: compiling, starting workers
    pays_after_steps: int | None = None  # steps until the fix makes up for that; null if it saves nothing
    peak_bytes: tuple[int, int] | None = None  # peak allocated memory without and with it; null without a GPU


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """The result of `stepscope verify`; `to_json()` is what `--json` prints."""

    command: str
    folder: str  # folder with the recordings of all runs
    device_name: str | None
    torch: str | None
    num_rounds: int
    step_ns: float  # the time per step without any fix: the geometric mean of the runs
    apart_share: float  # slowest run without any fix ÷ fastest, minus 1
    fixes: tuple[Verified, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0 if every fix was measured and its losses agree, 3 if one failed or is wrong, else 4."""
        statuses = {each.status for each in self.fixes}
        if statuses & {FAILED, WRONG}:
            return EXIT_WRONG
        return EXIT_UNDECIDED if statuses & {NOT_APPLIED, INCOMPARABLE, TOO_FEW} else 0

    def to_json(self) -> dict[str, Any]:
        """Return one object of plain values (docs/verify.md)."""
        return {"schema_version": SCHEMA_VERSION, "exit_code": self.exit_code, **asdict(self)}
