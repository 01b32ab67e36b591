"""The clocks and the stragglers of a recording of several ranks; one rank's steps are in memory at a time."""

from pathlib import Path

from stepscope.analysis.ranks.step_clocks import JobClocks, job_clocks, rank_steps
from stepscope.errors import RecordingError, Unavailable
from stepscope.session.history import load
from stepscope.session.session import Session
from stepscope.trace.recording import read_recording

_MOST_ROWS = 100_000  # steps times ranks that are compared
_LEAST_STEPS, _MOST_STEPS = 200, 5000


def clocks_of(session: Session) -> JobClocks:
    """Return the clocks of a recording's ranks; Unavailable if fewer than two have timed steps in common."""
    first = session.recording.facts.get("environment", {}).get("rank", 0)
    folders = {first: session.path, **session.rank_folders}
    most = min(_MOST_STEPS, max(_LEAST_STEPS, _MOST_ROWS // len(folders)))
    found = []
    for rank, folder in sorted(folders.items()):
        try:
            samples = read_recording(folder).samples
        except RecordingError:
            continue
        day_ns, host = _day(folder)
        if (steps := rank_steps(rank, samples, most, day_ns, host)) is not None:
            found.append(steps)
    clocks = job_clocks(found)
    if clocks is None:
        raise Unavailable("clocks of the ranks: fewer than two ranks have timed steps in common")
    return clocks


def _day(folder: Path) -> tuple[int | None, str | None]:
    """Return a rank's time of day minus its clock, and its host, if it has a history."""
    try:
        processes = load(folder).processes
    except RecordingError:
        return None, None
    if not processes:
        return None, None
    last = processes[-1]
    return round(last.began * 1e9) - last.start_ns, last.host
