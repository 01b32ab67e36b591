"""Analyses that several readers ask for: computed once for each trace, case or replay, and kept with it."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

Of = TypeVar("Of")
Answer = TypeVar("Answer")


def once(function: Callable[[Of], Answer]) -> Callable[[Of], Answer]:
    """Return the function of one object with a memory: the object's own, so that both go together."""
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(of: Of) -> Answer:
        answers: dict[str, Any] = vars(of)
        if key not in answers:
            answers[key] = function(of)
        answer: Answer = answers[key]
        return answer

    return kept
