"""How pass times depend on the number of warm-up passes, from the passes of one run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stepscope.analysis.time.statistics import Distribution, describe

PASSES = {
    "forward": ("forward",),
    "forward+backward": ("forward", "backward"),
    "step": ("forward", "backward", "optimizer"),
}
"""Parts of a pass."""


@dataclass(frozen=True)
class WarmUp:
    """One split of a run's passes into warm-up and samples."""

    what: str  # A name in PASSES
    num_warmup: int
    time: Distribution  # nanoseconds of the passes after the warm-up


def by_warmup(
    samples_phase_ns: Mapping[str, Sequence[int]], num_samples: int, counts: Sequence[int]
) -> Iterator[WarmUp]:
    """Return the times of the passes after each number of warm-up passes, if the run is long enough.

    `samples_phase_ns` is a row's: by phase one entry per pass, the first call first.

    >>> found = list(by_warmup({"forward": [90, 10, 11, 12]}, 2, (0, 2)))
    >>> [(each.what, each.num_warmup, each.time.mean) for each in found]
    [('forward', 0, 50.0), ('forward', 2, 11.5)]
    """
    for what, phases in PASSES.items():
        if not all(phase in samples_phase_ns for phase in phases):
            continue
        passes = [sum(times) for times in zip(*(samples_phase_ns[phase] for phase in phases))]
        for count in counts:
            samples = passes[count : count + num_samples]
            if len(samples) == num_samples:
                yield WarmUp(what, count, describe(samples))
