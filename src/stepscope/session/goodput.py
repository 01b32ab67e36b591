"""The goodput of a recording, and of all recordings of its job that lie beside it."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from stepscope.analysis.run.goodput import Goodput, goodput, job_goodput
from stepscope.analysis.run.series import Run
from stepscope.errors import StepscopeError
from stepscope.session.run import read_history, run_of
from stepscope.session.session import Session
from stepscope.trace.kind import Kind
from stepscope.trace.recording import read_facts

MOST_BESIDE = 1000  # folders that are searched for recordings of the same job


def goodput_of(session: Session) -> Goodput | None:
    """Return the goodput of one recording since its process began; None before its first step.

    It is that of the history's blocks, which `watch` reads too, and not of exact steps: one run has one goodput.
    """
    history = read_history(session.path)
    found = goodput(session.run if history is None or not history.blocks else run_of(None, history))
    for other in session.rank_recordings.values():  # the work of a job is that of all its ranks
        own = goodput_of(other)
        other.release()
        if found is not None and own is not None:
            sums = found.num_tokens + own.num_tokens, found.num_samples + own.num_samples
            found = replace(found, num_tokens=sums[0], num_samples=sums[1])
    return found


def job_of(session: Session, own: Goodput | None) -> Goodput | None:
    """Return the goodput of the whole job, with its restarts; None if there is only one recording of it.

    `own` is the goodput of this recording.
    """
    job = session.recording.facts.get("job")
    if not job or own is None or session.run.began is None:
        return None
    runs: list[tuple[Run, Goodput]] = [(session.run, own)]
    folder = session.path.resolve()
    for path in islice(sorted(folder.parent.iterdir()), MOST_BESIDE):
        if path != folder and _job(path) == job:
            other = Session([path], Kind.RECORDING)
            found = goodput_of(other)
            if found is not None and other.run.began is not None:
                runs.append((other.run, found))
    return job_goodput(runs) if len(runs) > 1 else None


def _job(folder: Path) -> str | None:
    try:
        return read_facts(folder, []).get("job")
    except StepscopeError:
        return None
