"""A case of the corpus: a training script, and what is true of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Case:
    """One script, how it is started, and the truth about it."""

    script: str
    """In scripts/, without `.py`."""
    steps: int
    """Training steps, and the script's argument: optimizer updates, unless `updates_per_step` says otherwise."""
    per_step: float | None
    """What one step processes, of all ranks together; None where people would not agree."""
    unit: str = "samples"
    per_step_may_miss_share: float = 0.001
    """More where steps differ in work, and a window may not have all of them."""
    micro_batches: int | None = 1
    """Forwards with a backward in one step; None where it is not asserted."""
    updates_per_step: int = 1
    between: tuple[str, ...] = ()
    """Rows of the loop's time that must be there, beside `training`."""
    seconds_between: dict[str, float] | None = None
    """What the script sleeps between its first and its last step, by row: a row has at least that much."""
    step_ms_at_least: float = 0.0
    """What the script sleeps in a step, on average."""
    absent: tuple[str, ...] = ()
    """Rows that must not be there."""
    name: str = ""
    """Of the case, where one script has several: else the script's own."""
    launch: tuple[str, ...] = ()
    """Words before the script: `-m torch.distributed.run …`, `torchrun …`."""
    ranks: int = 1
    exit_code: int = 0
    training: bool = True
    """False for inference only, where a step is a forward."""
    period: int = 1
    """Steps after which the script repeats itself: `steps` is a multiple."""
    needs: tuple[str, ...] = ()
    """Packages without which the script cannot run."""
    in_make_test: bool = False
    """Whether `make test` runs it, in a process that has torch; `make test-all` runs every one as users do."""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def id(self) -> str:
        return self.name or self.script.partition("/")[2]

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.script}.py"

    def words(self, num_steps: int | None = None) -> list[str]:
        """What follows `python`, or `stepscope run`."""
        return [*self.launch, str(self.path), str(num_steps or self.steps)]
