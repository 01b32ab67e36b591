"""Whole investigations, each declared in one file."""

from stepscope.studies.study import Measure, Question, Recordings, Study, Sweep

__all__ = ["Measure", "Question", "Recordings", "Study", "Sweep"]
