"""The processes of a recording: its ranks, those that are missing, and processes without a rank."""

import re
from dataclasses import dataclass, replace
from itertools import islice

from stepscope.analysis.time.summary import Summary
from stepscope.session.session import Session
from stepscope.trace.kind import Kind, kind_of

_PROCESS_FOLDER = re.compile(r"process\d+(-\d+)?")


@dataclass(frozen=True)
class Processes:
    world_size: int
    ranks: dict[int, Session]
    """By rank, in order; the one in the folder itself among them."""
    others: tuple[Session, ...]
    """Processes that trained without being a rank, such as those of a hyperparameter search."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The first 100 ranks without a recording: the world can have any size."""
        return tuple(islice((rank for rank in range(self.world_size) if rank not in self.ranks), 100))


def processes_of(session: Session) -> Processes:
    environments = [session.recording.facts.get("environment", {})]
    ranks = {environments[0].get("rank", 0): session}
    for rank, each in session.rank_recordings.items():
        ranks.setdefault(rank, each)
        environments.append(each.recording.facts.get("environment", {}))
        each.release()
    world_size = max(environment.get("world_size", 1) for environment in environments)
    others = [
        Session([folder], Kind.RECORDING, None, session.use_cache)
        for folder in sorted(session.path.glob("process*"))
        if _PROCESS_FOLDER.fullmatch(folder.name) and folder.is_dir() and kind_of(folder) is Kind.RECORDING
    ]
    return Processes(max(world_size, *(rank + 1 for rank in ranks)), dict(sorted(ranks.items())), tuple(others))


def of_all_ranks(summary: Summary, processes: Processes) -> Summary:
    """Return a rank's summary with the throughput of all recorded ranks together, and their time per step."""
    works = []
    for session in processes.ranks.values():
        if (work := session.summary.throughput) is not None:
            works.append(work)
        if session.summary is not summary:
            session.release()
    if summary.throughput is None or summary.loop is None or len(works) < 2:
        return summary
    per_step, per_s = sum(work.per_step for work in works), sum(work.per_s for work in works)
    throughput = replace(summary.throughput, per_step=per_step, per_s=per_s)
    loop = replace(summary.loop, step_ns=per_step / per_s * 1e9)
    return replace(summary, throughput=throughput, loop=loop)
