"""Complete investigations, each declared in one folder."""

from stepscope.studies.study import BarsOf, Drawn, LinesOf, Measure, Question, Recordings, Study, Sweep, TableOf
from stepscope.studies.study import question as question
from stepscope.studies.study import table_of as table_of

__all__ = ["BarsOf", "Drawn", "LinesOf", "Measure", "Question", "Recordings", "Study", "Sweep", "TableOf"]
