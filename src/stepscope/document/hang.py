"""A hang as people read it: which collective, who did not come, where each rank was last."""

from collections.abc import Iterator

from stepscope.analysis.ranks.hangs import Divergence, Hang, RankCall
from stepscope.document.model import Document, Fact, Facts, Missing, Part, Section, Table
from stepscope.document.sections.many_ranks import numbers
from stepscope.document.tables import columns_of, known
from stepscope.formatting import listed, plural, safe

_MOST_RANKS = 16
_MOST_TEXT = 120


def hang_document(hang: Hang) -> Document:
    sections = [Section("hang", "Hang", tuple(_parts(hang)))]
    return Document(f"Hang in {hang.path}", _verdict(hang), tuple(sections))


def _verdict(hang: Hang) -> str:
    first = hang.first
    if first is None and hang.states:
        least = min(state.silent_s for state in hang.states)
        groups: dict[str, list[int]] = {}
        for state in hang.states:
            place = f" at {safe(state.stack[0])}" if state.stack else ""
            groups.setdefault(f"{safe(state.phase)}{place}", []).append(state.rank)
        where = "; ".join(f"{_ranks(tuple(ranks)).lower()}: {text}" for text, ranks in list(groups.items())[:4])
        return f"No step ended for {least:,.0f} s. Where the ranks were: {where}."
    if first is None:
        lost = f" {_ranks(hang.no_dump)} left no dump." if hang.no_dump else ""
        return f"No collective diverges: {_ranks(hang.ranks)} made the same calls, and none is unfinished.{lost}"
    name, at, who = _named(first), _at(first), tuple(call.rank for call in first.absent)
    if hang.is_deadlock:
        circle = plural(len(hang.divergences), "collective")
        return f"Deadlock: ranks wait for one another in {circle}. {_missing(first)}"
    if first.kind == "unfinished":
        return f"All ranks called {name}{at}, and it does not end. The ranks agree: look at the network and the GPUs."
    if first.kind in ("missing", "point_to_point"):
        return _missing(first)
    what = {"operation": "another operation", "sizes": "other sizes", "dtypes": "another dtype"}[first.kind]
    other = first.absent[0]
    calls = f"{other.collective} {safe(other.shapes)} {other.dtypes}".strip()
    return f"{_ranks(who)} called {what} than {_ranks(first.arrived)} in {name}{at}: {calls}{_at(other)}."


def _at(found: Divergence | RankCall) -> str:
    return f" at {safe(found.place)}" if found.place else ""


def _missing(first: Divergence) -> str:
    who = tuple(call.rank for call in first.absent)
    parts = []
    if who:
        parts.append(f"{_ranks(who)} did not come to {_named(first)}.")
    if first.no_dump:
        verb = "did not come to it either or died" if who else f"did not come to {_named(first)}, or died"
        parts.append(f"{_ranks(first.no_dump)} left no dump: it {verb}.")
    if first.arrived:
        verb = "waits" if len(first.arrived) == 1 else "wait"
        parts.append(f"{_ranks(first.arrived)} {verb}{_at(first)}.")
    for call in first.skipped[:1]:
        parts.append(f"Rank {call.rank} seems to have skipped {call.collective} {call.number:,}{_at(call)}.")
    for last in first.absent[:1]:
        if last.collective and not first.skipped:
            parts.append(f"The last call of rank {last.rank} was {last.collective} {last.number:,}{_at(last)}.")
    return " ".join(parts)


def _named(found: Divergence) -> str:
    what = safe(found.collective) if found.collective else "collective"
    group = f" of group {safe(found.description or found.group)}" if found.description != "default_pg" else ""
    return f"{what} {found.number:,}{group}"


def _ranks(ranks: tuple[int, ...]) -> str:
    """Return ranks in words.

    >>> _ranks((3,)), _ranks((0, 1, 2, 3, 7))
    ('Rank 3', 'Ranks 0-3, 7')
    """
    text = numbers(sorted(ranks))
    more = f"; {len(ranks):,} in all" if len(text) > _MOST_TEXT else ""
    return f"Rank{'s' * (len(ranks) > 1)} {safe(text, _MOST_TEXT)}{more}"


def _parts(hang: Hang) -> Iterator[Part]:
    first = hang.first
    if first is not None:
        yield Facts(known(_facts(first)))
    if len(hang.divergences) > 1:
        columns = columns_of(
            hang.divergences, "group kind collective number shapes place is_consequence",
            arrived=lambda each: _ranks(each.arrived) if each.arrived else "",
        )  # fmt: skip
        columns["absent"] = [_ranks(tuple(c.rank for c in each.absent) + each.no_dump) for each in hang.divergences]
        note = "consequence: the absent ranks wait in another collective of this table"
        yield Table("divergences", "collectives that diverge", columns, note=note)
    if first is not None and first.absent and first.kind != "point_to_point":
        yield _calls("absent", "what the absent ranks called instead, or last", first.absent)
    if hang.states:
        names = "rank host step phase silent_s place stack"
        more = {"place": lambda each: next(iter(each.stack), None), "stack": lambda each: " < ".join(each.stack[1:6])}
        columns = columns_of(hang.states, names, **more)
        note = "where each rank's main thread was when no step had ended for a while"
        screen = ("rank", "phase", "place", "step", "silent_s", "host")
        yield Table("rank_states", "where each rank is", columns, _MOST_RANKS, note=note, screen=screen)
    if hang.last_calls:
        yield _calls("last_calls", "last call of each rank", hang.last_calls)
    if hang.no_dump and hang.ranks:
        yield Missing(f"{_ranks(hang.no_dump)} of {hang.num_ranks:,}: no dump that can be read")
    yield from map(Missing, (safe(note, 400) for note in hang.notes))


def _facts(first: Divergence) -> Iterator[Fact]:
    yield Fact("collective", _named(first), f"{safe(first.shapes)} {first.dtypes}".strip())
    unknown = "" if first.are_members_known else "members as far as they called it: no dump lists them"
    name = f"{safe(first.group)} {safe(first.description)}".strip()
    yield Fact("group", name, f"{_ranks(first.members).lower()}{'; ' + unknown if unknown else ''}")
    yield Fact("came", _ranks(first.arrived).lower() if first.arrived else "")
    yield Fact("did not come", listed(str(call.rank) for call in first.absent[:_MOST_RANKS]))
    yield Fact("called at", safe(first.stack[0]) if first.stack else "", " < ".join(map(safe, first.stack[1:6])))
    for call in first.skipped[:4]:
        yield Fact("skipped", f"{call.collective} {call.number:,}", f"by rank {call.rank}; {safe(call.place or '')}")


def _calls(id: str, title: str, calls: tuple[RankCall, ...]) -> Table:
    names = "rank group collective number shapes dtypes place stack"
    columns = columns_of(calls, names, stack=lambda call: " < ".join(call.stack[1:6]))
    screen = ("rank", "collective", "number", "place", "shapes", "dtypes", "group")
    return Table(id, title, columns, num_shown=_MOST_RANKS, screen=screen)
