"""What is wrong with the ranks of a run that goes on: silent, dead, ended early, missing, damaged files."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from stepscope.formatting import elapsed, plural, safe
from stepscope.session.watch import SILENT_S, Rank


@dataclass(frozen=True)
class RunWarning:
    """Something that is wrong, or was."""

    id: str  # of a rule; or `silent_rank`, `dead_rank`, `ended_rank`, `missing_ranks`, `damaged_history`
    about: str  # the rank, or the number among those of a rule: with the id, what stays while the text changes
    text: str


def rank_warnings(ranks: Sequence[Rank]) -> Iterator[RunWarning]:
    """Yield what is wrong with the ranks; what is wrong with the figures is for the rules to say."""
    world = max((rank.facts.get("environment", {}).get("world_size", 1) for rank in ranks), default=1)
    present = {rank.number for rank in ranks}
    if missing := [str(number) for number in islice((each for each in range(world) if each not in present), 9)]:
        names = ", ".join(missing[:8]) + (", …" if len(missing) > 8 else "")
        yield RunWarning("missing_ranks", "", f"Not recorded: rank {names} of {world:,}.")
    is_over = all(rank.is_over for rank in ranks)
    for state in ("died", "silent", "failed", "finished"):
        of_state = [rank for rank in ranks if rank.state == state]
        if state == "finished":  # not all ranks end in the same second
            of_state = [rank for rank in of_state if not is_over and rank.silent_s > SILENT_S]
        yield from _ranks_in_trouble(of_state)
    for rank in ranks:
        if rank.history.problems:
            problems = " ".join(f"{problem}." for problem in rank.history.problems)
            yield RunWarning("damaged_history", rank.name, f"In the history of {rank.name}, {problems}")


def _ranks_in_trouble(ranks: Sequence[Rank]) -> Iterator[RunWarning]:
    """Yield a sentence per rank of one state, or one for many."""
    if len(ranks) > _MOST_NAMED:
        behind = min(ranks, key=lambda rank: rank.num_steps)
        did = _DID[behind.state].format(since=f"at least {elapsed(min(rank.silent_s for rank in ranks))}")
        names = listed_ranks(ranks)
        which = f"furthest behind: {behind.name}{_where(behind)} after {plural(behind.num_steps, 'step')}"
        yield RunWarning(_IDS[behind.state], "many", f"{len(ranks):,} ranks {did} ({names}); {which}.")
        return
    for rank in ranks:
        did = _DID[rank.state].format(since=elapsed(rank.silent_s)).replace("have", "has")
        why = {
            "died": ": its process is gone, and the recording was not finished",
            "silent": "; its process is still running" if rank.is_alive else "",
            "failed": f": {safe(error, 200).rstrip('.')}" if (error := rank.facts.get("exception")) else "",
        }.get(rank.state, "")
        who = f"{rank.name[:1].upper()}{rank.name[1:]}{_where(rank)}"
        after = f"after {plural(rank.num_steps, 'step')}"
        yield RunWarning(_IDS[rank.state], rank.name, f"{who} {did} {after}{why}.")


_MOST_NAMED = 3
_IDS = {"died": "dead_rank", "silent": "silent_rank", "failed": "ended_rank", "finished": "ended_rank"}
_DID = {"died": "died", "silent": "have been silent for {since}", "failed": "failed", "finished": "finished"}


def listed_ranks(ranks: Sequence[Rank]) -> str:
    """Return the numbers of the first ranks: `0, 1, 2, …`."""
    names = [rank.name.removeprefix("rank ") for rank in ranks[:8]]
    return ", ".join([*names, "…"] if len(ranks) > len(names) else names)


def _where(rank: Rank) -> str:
    process = rank.history.processes[-1] if rank.history.processes else None
    return f" (process {process.pid} on {safe(process.host, 60)})" if process else ""
