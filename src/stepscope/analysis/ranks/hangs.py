"""Why ranks hang: the first collective on which their flight-recorder dumps disagree, and who did not come to it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any, NamedTuple

from stepscope.display import Shown
from stepscope.trace.dumps.flight_recorder import Call, Dump, Dumps, Signature
from stepscope.trace.dumps.rank_states import RankState

SCHEMA_VERSION = 1
WORLD = "default_pg"  # what PyTorch calls the group of all ranks
_LEAST_APART_NS = 60 * 10**9  # clocks of hosts may differ by some of it
# Collectives for which each rank must bring as many elements, and those for which it must get as many.
_SAME_INPUTS = ("all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter", "_reduce_scatter")
_SAME_OUTPUTS = ("all_gather", "_allgather", "_all_gather")


@dataclass(frozen=True)
class RankCall:
    """What a rank did at a collective, or last."""

    rank: int
    collective: str | None  # None if it called nothing that its dump still has
    number: int | None  # which collective of its group
    group: str | None
    shapes: str
    dtypes: str
    place: str | None  # the user's line that called it
    stack: tuple[str, ...]  # the user's lines, innermost first


@dataclass(frozen=True)
class Divergence:
    """A collective that not all ranks of its group called alike."""

    kind: str
    """`missing` (ranks did not come), `operation`, `sizes` or `dtypes` (ranks called something else), `unfinished`
    (all came, and it does not end), `point_to_point` (a send or receive without its partner)."""
    group: str
    description: str  # of the group, in PyTorch's words
    members: tuple[int, ...]
    are_members_known: bool  # False: those with a call in the group; its list of ranks is in no dump
    number: int  # which collective of the group, from 1
    collective: str | None  # None if it is no longer in the buffer of any rank
    shapes: str
    dtypes: str
    place: str | None  # the user's line that called it
    stack: tuple[str, ...]
    arrived: tuple[int, ...]  # ranks that called it
    absent: tuple[RankCall, ...]  # the others: what each called instead, or last
    no_dump: tuple[int, ...]  # members of which no dump could be read
    skipped: tuple[RankCall, ...]
    """Of absent ranks whose calls equal the others' next ones from some collective on: that collective."""
    is_consequence: bool  # its absent ranks wait in another one
    start_ns: int | None  # when the first rank called it, on that rank's clock


@dataclass(frozen=True, repr=False)
class Hang(Shown):
    """What the dumps of all ranks say about a hang."""

    path: str
    num_ranks: int  # ranks that there must be
    ranks: tuple[int, ...]  # ranks with a dump
    no_dump: tuple[int, ...]
    divergences: tuple[Divergence, ...]  # at most one per group, the cause first
    is_deadlock: bool  # ranks wait for one another in different groups
    last_calls: tuple[RankCall, ...]  # of every rank with a dump
    notes: tuple[str, ...]
    states: tuple[RankState, ...] = ()  # of a recording: where each rank was

    @property
    def first(self) -> Divergence | None:
        """The collective to look at first; None if no dump disagrees."""
        return next(iter(self.divergences), None)

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return what `analyze --hang --json` prints (docs/hangs.md)."""
        fields = asdict(self)
        for name in ("divergences", "last_calls", "states"):
            fields[name] = list(fields[name][:most])
        return {"schema_version": SCHEMA_VERSION, **fields}


class _Group(NamedTuple):
    """A process group: its ranks with a dump, and what each called, by number."""

    name: str
    description: str
    members: tuple[int, ...]
    is_known: bool
    calls: dict[int, dict[int, Call]]  # by rank, then number
    first: dict[int, int]  # by rank: the first number that its buffer has for sure; -1 if nothing is known
    last: dict[int, int]


def hang_of(dumps: Dumps, states: Sequence[RankState] = ()) -> Hang:
    """Return the first collective on which the dumps disagree, and everything that follows from it."""
    if not dumps.ranks:
        known = tuple(state.rank for state in states)
        return Hang(str(dumps.folder), len(known), (), known, (), False, (), (), tuple(states))
    notes = list(dumps.problems)
    ranks = _without_old(dumps.ranks, notes)
    listed = (rank for dump in ranks.values() for _, members in dump.groups.values() for rank in members)
    world = range(max([*dumps.ranks, *dumps.unread, *listed]) + 1)
    groups = list(_groups(ranks, world))
    found = [each for group in groups if (each := _divergence(group)) is not None]
    found += _point_to_point(ranks, groups)
    if num_cut := sum(not dump.is_whole for dump in ranks.values()):
        notes.append(
            f"the buffers of {num_cut} ranks no longer have their first calls: what diverged before is not seen. "
            "A larger TORCH_FR_BUFFER_SIZE keeps more"
        )
    ordered, is_deadlock = _causes_first(found)
    return Hang(
        path=str(dumps.folder),
        num_ranks=len(world),
        ranks=tuple(ranks),
        no_dump=tuple(rank for rank in world if rank not in ranks),
        divergences=tuple(ordered),
        is_deadlock=is_deadlock,
        last_calls=tuple(_rank_call(rank, dump.calls[-1] if dump.calls else None) for rank, dump in ranks.items()),
        notes=tuple(notes),
        states=tuple(states),
    )


def _without_old(ranks: Mapping[int, Dump], notes: list[str]) -> dict[int, Dump]:
    """Return the dumps of one attempt: a folder may still have files of an earlier one.

    The ranks of one job cannot call the same collective further apart than its timeout.
    """
    times = {rank: {(c.group, c.number): c.created_ns for c in dump.calls} for rank, dump in ranks.items()}
    ends = {rank: max(of.values(), default=0) for rank, of in times.items()}
    newest = max(ends.values())
    kept = {}
    for rank, dump in ranks.items():
        timeout_ns = max((call.timeout_ms for call in dump.calls), default=0) * 10**6
        apart = max(_LEAST_APART_NS, 2 * timeout_ns)
        others = [times[other] for other in ranks if other != rank and newest - ends[other] <= apart]
        shared = [abs(at - other[key]) for other in others for key, at in times[rank].items() if key in other]
        if dump.calls and newest - ends[rank] > apart and (not shared or median_low(shared) > apart):
            seconds = (newest - ends[rank]) // 10**9
            notes.append(
                f"{dump.path.name} was left out: its last call is {seconds:,} s older than the others', so it is of "
                "an earlier attempt, or its host's clock is wrong"
            )
        else:
            kept[rank] = dump
    return kept


def _groups(ranks: Mapping[int, Dump], world: Sequence[int]) -> Iterator[_Group]:
    """Yield every process group, in the order in which the ranks first use them.

    A name can mean different groups on different ranks: those with other members are apart.
    """
    listed = {rank: {name: group for name, group in dump.groups.items() if group[1]} for rank, dump in ranks.items()}
    keys: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for rank, dump in ranks.items():
        for name in dict.fromkeys([call.group for call in dump.calls] + list(dump.last_numbers)):
            keys.setdefault((name, listed[rank].get(name, ("", ()))[1]), []).append(rank)
    # A rank whose dump does not list the members belongs to the only group of that name that could be meant.
    for name, members in [key for key in keys if not key[1]]:
        for rank in list(keys[name, members]):
            named = [key for key in keys if key[0] == name and rank in key[1]]
            if len(named) == 1:
                keys[named[0]].append(rank)
                keys[name, ()].remove(rank)
    for (name, members), callers in keys.items():
        if not callers:
            continue
        described = [dump.groups[name][0] for dump in ranks.values() if dump.groups.get(name, ("", ()))[0]]
        is_world = name == "0" or WORLD in described
        expected = members or (tuple(world) if is_world else tuple(sorted(callers)))
        yield _group(name, described[0] if described else "", expected, bool(members) or is_world, ranks)


def _group(
    name: str, description: str, members: tuple[int, ...], is_known: bool, ranks: Mapping[int, Dump]
) -> _Group:
    calls: dict[int, dict[int, Call]] = {}
    first, last = {}, {}
    for rank in (rank for rank in members if rank in ranks):
        dump = ranks[rank]
        of: dict[int, Call] = {}
        for call in dump.calls:
            if call.group == name and call.peers is None:
                of.setdefault(call.number, call)
        known = 1 if dump.is_whole else min(of, default=dump.last_numbers.get(name, -2) + 1)
        calls[rank], first[rank] = of, known
        last[rank] = max([*of, dump.last_numbers.get(name, 0)])
    return _Group(name, description, members, is_known, calls, first, last)


def _divergence(group: _Group) -> Divergence | None:
    """Return the first collective of a group that its ranks did not call alike; None if there is none."""
    known = [rank for rank in group.calls if group.first[rank] >= 0]
    numbers = sorted({number for rank in known for number in group.calls[rank]})
    ends = {group.last[rank] + 1 for rank in known if group.last[rank] < max(group.last[r] for r in known)}
    for number in sorted({*numbers, *ends}):
        here = {rank: group.calls[rank][number] for rank in known if number in group.calls[rank]}
        gone = [rank for rank in known if group.last[rank] < number]
        if gone and (here or number in ends):
            return _made("missing", group, number, here, gone)
        if kind := _disagreement(here.values()):
            usual = _usual(here, kind)
            return _made(kind, group, number, here, [rank for rank in here if rank not in usual], usual)
    pending = [n for n in numbers if any(n in of and not of[n].is_finished for of in group.calls.values())]
    without = [rank for rank in group.members if rank not in group.calls]
    if pending:
        here = {rank: of[pending[0]] for rank, of in group.calls.items() if pending[0] in of}
        return _made("missing" if without else "unfinished", group, pending[0], here, [])
    if without and group.is_known and numbers:  # nothing is known to wait, and ranks are missing
        here = {rank: of[numbers[-1]] for rank, of in group.calls.items() if numbers[-1] in of}
        return _made("missing", group, numbers[-1], here, [])
    return None


def _disagreement(calls: Iterable[Call]) -> str | None:
    """Return in what calls that should be one collective differ; None if in nothing that matters."""
    signatures = {call.signature for call in calls}
    kinds = ("operation", "sizes", "dtypes")
    return next((kind for kind in kinds if len({_aspect(each, kind) for each in signatures}) > 1), None)


def _aspect(signature: Signature, kind: str) -> Any:
    if kind == "operation":
        return signature.collective
    if kind == "dtypes":
        return signature.dtypes
    if signature.collective.startswith(_SAME_OUTPUTS):
        return signature.num_output_elements
    if signature.collective.startswith(_SAME_INPUTS):
        return signature.num_input_elements or signature.num_output_elements
    return None


def _usual(here: Mapping[int, Call], kind: str) -> list[int]:
    """Return the ranks that made the call that most ranks made; of two as frequent, that of the lowest rank."""
    aspects = {rank: _aspect(call.signature, kind) for rank, call in here.items()}
    most, _ = Counter(aspects.values()).most_common(1)[0]
    return [rank for rank, aspect in aspects.items() if aspect == most]


def _made(
    kind: str,
    group: _Group,
    number: int,
    here: Mapping[int, Call],
    absent: Sequence[int],
    arrived: Sequence[int] | None = None,
) -> Divergence:
    usual = sorted(here if arrived is None else arrived)
    seen = _rank_call(0, here[usual[0]] if usual else None)
    instead = {rank: here.get(rank) or _last_call(group, rank, number) for rank in absent}
    skipped = ((rank, _skipped(group, rank, usual)) for rank in absent)
    return Divergence(
        kind=kind,
        group=group.name,
        description=group.description,
        members=group.members,
        are_members_known=group.is_known,
        number=number,
        collective=seen.collective,
        shapes=seen.shapes,
        dtypes=seen.dtypes,
        place=seen.place,
        stack=seen.stack,
        arrived=tuple(usual),
        absent=tuple(_rank_call(rank, each) for rank, each in instead.items()),
        no_dump=tuple(rank for rank in group.members if rank not in group.calls),
        skipped=tuple(_rank_call(rank, each) for rank, each in skipped if each is not None),
        is_consequence=False,
        start_ns=min((here[rank].created_ns for rank in usual), default=None),
    )


def _last_call(group: _Group, rank: int, number: int) -> Call | None:
    of = group.calls[rank]
    return of[max(before)] if (before := [each for each in of if each < number]) else None


def _skipped(group: _Group, rank: int, usual: Sequence[int]) -> Call | None:
    """Return the collective from which on a rank makes the calls that the others make one later; None if none.

    Two calls are the same if their signature and their lines are.
    """
    if not usual or rank in usual:
        return None
    own, others = group.calls[rank], group.calls[usual[0]]

    def what(call: Call | None) -> Any:
        return call and (call.signature, call.stack)

    for number in sorted(own):
        if number not in others or what(own[number]) == what(others[number]):
            continue
        rest = [each for each in own if each >= number and each + 1 in others]
        is_shifted = bool(rest) and all(what(own[each]) == what(others[each + 1]) for each in rest)
        return others[number] if is_shifted else None
    return None


def _point_to_point(ranks: Mapping[int, Dump], groups: Sequence[_Group]) -> Iterator[Divergence]:
    """Yield the first send or receive of each pair of ranks that has no partner, as far as the buffers are whole."""
    for group in groups:
        sides: dict[tuple[int, int], dict[int, list[Call]]] = {}
        for rank in group.calls:
            for call in ranks[rank].calls if ranks[rank].is_whole else ():
                if call.group == group.name and call.peers and max(call.peers) < len(group.members):
                    pair = group.members[call.peers[0]], group.members[call.peers[1]]
                    sides.setdefault(pair, {}).setdefault(rank, []).append(call)
        for pair, of in sides.items():
            if not all(rank in ranks and ranks[rank].is_whole for rank in pair) or pair[0] == pair[1]:
                continue
            more, less = sorted(pair, key=lambda rank: -len(of.get(rank, ())))
            if num := len(of.get(more, ())) - len(of.get(less, ())):
                call = of[more][-num]
                whole = ranks[less].calls
                made = _made("point_to_point", group, call.number, {more: call}, [])
                last = _rank_call(less, whole[-1] if whole else None)
                yield replace(made, absent=(last,), no_dump=(), members=tuple(sorted(pair)))


def _causes_first(found: Sequence[Divergence]) -> tuple[list[Divergence], bool]:
    """Return the divergences with causes before what follows from them, and whether they wait in a circle.

    A rank that is absent from one collective because it waits in another is not to blame.
    """
    made = []
    for one in found:
        missing = {call.rank for call in one.absent} or set(one.no_dump)
        waits = [missing & {*other.arrived} for other in found if other is not one]
        is_waited_for = bool(missing) and missing <= set().union(*waits)
        made.append(replace(one, is_consequence=is_waited_for and one.kind in ("missing", "point_to_point")))
    is_deadlock = bool(made) and all(each.is_consequence for each in made)
    made.sort(key=lambda each: (each.is_consequence, each.kind == "unfinished", each.start_ns or 0))
    return made, is_deadlock


def _rank_call(rank: int, call: Call | None) -> RankCall:
    if call is None:
        return RankCall(rank, None, None, None, "", "", None, ())
    signature, stack = call.signature, call.stack
    inputs, outputs = signature.inputs, signature.outputs
    shapes = inputs if inputs == outputs or not outputs else f"{inputs} → {outputs}".strip(" →")
    place = stack[0] if stack else None
    return RankCall(rank, signature.collective, call.number, call.group, shapes, signature.dtypes, place, stack)
