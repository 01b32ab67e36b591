"""Cases of one kind, of which `make test` runs some and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def parametrized(names: str | tuple[str, ...], cases: Iterable[Any], *, quick: int, **options: Any) -> Any:
    """Return `pytest.mark.parametrize` with all marked `long` but at most `quick` cases, spread over the list."""
    listed, is_one = list(cases), isinstance(names, str) and "," not in names
    short = [
        number
        for number, case in enumerate(listed)
        if all(mark.name != "long" for mark in getattr(case, "marks", ()))
    ]
    kept = set(short[:: max(1, -(-len(short) // quick))])

    def marked(case: Any) -> Any:
        if isinstance(case, type(pytest.param())):
            return pytest.param(*case.values, marks=[*case.marks, pytest.mark.long], id=case.id)
        return pytest.param(*([case] if is_one else case), marks=pytest.mark.long)

    chosen = [case if number in kept else marked(case) for number, case in enumerate(listed)]
    return pytest.mark.parametrize(names, chosen, **options)
