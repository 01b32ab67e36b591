"""The corpus. Every script takes one argument, its number of steps."""

from __future__ import annotations

from case import Case
from loops import BETWEEN, PROCESSES, UPDATES
from trainers import TRAINERS

CASES: tuple[Case, ...] = (*UPDATES, *BETWEEN, *PROCESSES, *TRAINERS)
