"""The corpus. Every script takes one argument, its number of steps."""

from __future__ import annotations

from case import Case
from loops import BETWEEN, PROCESSES, UPDATES

CASES: tuple[Case, ...] = (*UPDATES, *BETWEEN, *PROCESSES)
