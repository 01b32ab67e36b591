"""Whether larger micro-batches do the work of as many more small ones."""

import math
from collections.abc import Iterable

from stepscope.formatting import average
from stepscope.trace.recording import Recording, StepSample

MICRO_BATCH = "micro_batch"  # the fix


def most_micro_batches(recording: Recording) -> int:
    """Return the largest number of micro-batches in a step."""
    return max((sample.num_micro_batches for sample in recording.samples), default=0)


def why_not_larger(before: Recording, after: Recording, growth: int) -> str | None:
    """Return why a run has no micro-batches `growth` times as large, or does other work with them; None if neither.

    The run without them is `before`.
    """
    fixes = [fix for fix in after.facts.get("fixes") or () if fix["id"] == MICRO_BATCH]
    if not any(fix["changed"] for fix in fixes):
        return why_not_applied(before, [reason for fix in fixes for reason in fix["left"]])
    return _other_work(before, after, growth)


def why_not_applied(unchanged: Recording, left: Iterable[str]) -> str:
    """Return why a script's micro-batches cannot be larger, given what the fix says it left."""
    number = most_micro_batches(unchanged)
    if number < 2:
        return "a step has one micro-batch"
    if reason := "; ".join(left):
        return reason
    sample = next(one for one in unchanged.samples if one.num_micro_batches == number)
    small, large = "", "twice the size"
    if sample.num_samples:
        small = f" of {average(sample.num_samples / number)}"
        large = average(2 * sample.num_samples / number)
    return (
        f"the script's own code accumulates {number} micro-batches{small}: make {average(number / 2)} of {large} "
        f"in a copy, then verify --fix {MICRO_BATCH}=COPY.py"
    )


def _other_work(before: Recording, after: Recording, growth: int) -> str | None:
    """Return the first step with other samples than before, or with a wrong number of micro-batches; None if none.

    Padding is a part of the tokens and depends on the micro-batch; of packed sequences, only the tokens are known.
    """
    steps = {sample.step: sample for sample in before.samples}
    pairs = [(steps[sample.step], sample) for sample in after.samples if sample.step in steps]
    for first, second in pairs:
        units = [(first.num_samples, second.num_samples), (first.num_tokens, second.num_tokens)]
        is_same = any(one == other for one, other in units if one)
        if not is_same or second.num_micro_batches != math.ceil(first.num_micro_batches / growth):
            return f"step {first.step} has {_work(second)} micro-batches with it, and {_work(first)} without"
    is_fewer = any(second.num_micro_batches < first.num_micro_batches for first, second in pairs)
    return None if is_fewer else "no step has fewer micro-batches with it"


def _work(sample: StepSample) -> str:
    named = ((sample.num_samples, "samples"), (sample.num_tokens, "tokens"))
    work = next((f"{number:,} {unit}" for number, unit in named if number), "unknown samples")
    return f"{work} in {sample.num_micro_batches}"
