"""What the backward passes of a step do again although one pass could do it once.

Passes that begin with ones at the same output compute the same on the way, whatever they are asked for. Gradients
that passes add to the same `.grad` are those of the sum of the losses, unless an op reads or clears them in between.
A pass that needs what another one made cannot be joined with it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import polars as pl

from stepscope.analysis.structure.backward_passes import MATRIX, Execution, Pass
from stepscope.analysis.structure.nesting import ancestor

_MOVES = re.compile(
    r"(Sum|Mean|Select|Slice|Split\w*|Unbind|Squeeze|Unsqueeze|View|UnsafeView|Reshape\w*|Expand|Permute|Transpose|"
    r"Alias|T)Backward\d+$"
)
"""Nodes whose result depends on nothing but the gradient that comes in and numbers that the trace has."""
_SEVERAL_OUTPUTS = re.compile(r"(Split\w*|Unbind)Backward\d+$")
_ONE_OUTPUT = re.compile(r"^(?!.*(Rnn|Linalg)).*Backward\d+$")  # not a function of the script, or compiled code
_ONES = "aten::ones_like"
_ZEROS = re.compile(r"aten::(new_)?zeros(_like)?( |$)")  # the gradients of outputs at which a pass does not begin
_ON_GRADIENTS = re.compile(r"^aten::(_foreach_\w+|zero_)$")

_Id = tuple[int | None, ...]
LEAST_ROWS = 4
"""Passes that differ in their outputs, from which on one batched call for all of them is an advantage."""
_Key = tuple[object, ...]


@dataclass(eq=False)
class Repeats:
    """Executions that need not be, and the passes they are in."""

    gone: dict[Execution, None] = field(default_factory=dict)
    passes: dict[Pass, None] = field(default_factory=dict)
    num_needed: int = 0  # how many passes could do what these do


@dataclass(eq=False)
class Repeated:
    """What passes do again from the same output, what they do again for gradients that add up, and passes that
    differ only in the outputs at which they begin."""

    same: Repeats = field(default_factory=Repeats)
    summed: Repeats = field(default_factory=Repeats)
    rows: list[list[Pass]] = field(default_factory=list)  # as of the rows of a Jacobian


def repeated_passes(passes: Sequence[Pass], host: pl.DataFrame) -> Repeated:
    """Return what backward passes (`backward_passes`) do again, each in its step."""
    found = Repeated()
    if not passes:
        return found
    by_step: dict[int, list[Pass]] = defaultdict(list)
    for one in passes:
        by_step[one.step].append(one)
    between = _Between(host)
    for part in by_step.values():
        beginnings = [begin for one in part if (begin := _beginning(one, between)) is not None]
        groups = _same_output(beginnings, between)
        following = _Follow(groups, between, found)
        for one in part:
            following.follow(one)
        found.rows += _rows(beginnings, groups)
    return found


class _Between:
    """What is known of the ops between passes."""

    def __init__(self, host: pl.DataFrame) -> None:
        self._names, self._shapes, self._phases = host["name"], host["shapes"], host["phase"]
        self.has_shapes = host["shapes"].null_count() < host.height
        self.has_inputs = host["inputs"].null_count() < host.height
        is_op = host["kind"] == "op"
        outermost = ancestor(host, is_op & ancestor(host, is_op).gather(host["parent"]).is_null())
        self._with_graph = frozenset(outermost.gather(host["forward"].drop_nulls().unique()).drop_nulls())

    def name(self, row: int) -> str:
        return str(self._names[row])

    def parts(self, rows: Collection[int], shapes: set[str]) -> bool:
        """Return whether ops read or clear gradients of these shapes, or update weights."""
        return any(
            self._phases[row] == "optimizer"
            or _ON_GRADIENTS.match(self.name(row))
            or (row not in self._with_graph and not shapes.isdisjoint(MATRIX.findall(self._shapes[row] or "")))
            for row in rows
            if self.name(row) != _ONES
        )


@dataclass(eq=False)
class _Beginning:
    """How a pass begins that begins with ones: nodes that only move them, and the first that does more."""

    begun: Pass
    moves: list[Execution]
    rest: list[Execution]


def _beginning(one: Pass, between: _Between) -> _Beginning | None:
    if one.accumulates or not one.before or between.name(one.before[-1]) != _ONES:
        return None
    num_moves = next((num for num, each in enumerate(one.executions) if not _MOVES.match(each.name)), None)
    return None if num_moves is None else _Beginning(one, one.executions[:num_moves], one.executions[num_moves:])


@dataclass(eq=False)
class _SameOutput:
    """Passes that begin with ones at the same output; without shapes, at the outputs of the same node."""

    key: _Key
    passes: list[Pass] = field(default_factory=list)
    num_outputs: int = 1

    def slot(self, one: Pass) -> int:
        """Return at which of the outputs a pass is taken to begin: scripts go through them one after the other."""
        return self.passes.index(one) * self.num_outputs // len(self.passes)


def _same_output(beginnings: Sequence[_Beginning], between: _Between) -> dict[Pass, _SameOutput]:
    """Return the groups of passes that are more than the outputs at which they begin."""
    groups: dict[_Key, _SameOutput] = {}
    for one in beginnings:
        anchor = one.rest[0]
        if not between.has_shapes and not _ONE_OUTPUT.match(anchor.name):
            continue
        # With shapes, the call says which outputs have a gradient; with all arguments, what a node does is known.
        does = ((each.called, each.run, None if between.has_inputs else each.node) for each in one.moves)
        key = (*does, anchor.called, anchor.node)
        group = groups.setdefault(key, _SameOutput(key))
        group.passes.append(one.begun)
        if not between.has_shapes:
            splits = [each for each in one.moves if _SEVERAL_OUTPUTS.match(each.name)]
            num_outputs = prod(1 + sum(bool(_ZEROS.match(text)) for text in each.run) for each in splits)
            group.num_outputs = max(group.num_outputs, num_outputs)
    large = [group for group in groups.values() if len(group.passes) > group.num_outputs]
    return {one: group for group in large for one in group.passes}


def _rows(beginnings: Sequence[_Beginning], groups: Mapping[Pass, _SameOutput]) -> list[list[Pass]]:
    """Return passes that do the same after different moves, by what they do; one of those from the same output."""
    found: dict[_Key, dict[object, Pass]] = defaultdict(dict)
    for one in beginnings:
        group = groups.get(one.begun)
        which = one.begun if group is None else (group.key, group.slot(one.begun))
        found[tuple((each.node, each.run) for each in one.rest)].setdefault(which, one.begun)
    return [list(passes.values()) for passes in found.values() if len(passes) >= LEAST_ROWS]


def _is_within(less: Execution, more: Execution) -> bool:
    """Return whether a node does all that it does in one pass in another one, too."""
    return Counter(less.run) <= Counter(more.run)


class _Follow:
    """Follows the passes of one step: what they do again from the same output, and for gradients that add up.

    What a pass that need not run has made (`create_graph=True`) need not be differentiated either: its ops have twins
    in the pass that runs, and of the nodes of twins that a later pass runs, one is left.
    """

    def __init__(self, groups: Mapping[Pass, _SameOutput], between: _Between, found: Repeated) -> None:
        self._groups, self._between, self._found = groups, between, found
        self._twins: dict[int, tuple[int, Repeats]] = {}
        self._kept: dict[_Key, Execution] = {}
        self._summing: dict[_Id, tuple[Execution, Pass]] = {}  # what added to gradients that nothing has read since
        self._shapes: set[str] = set()  # of these gradients
        self._made: set[int] = set()  # ops in these executions
        for group in dict.fromkeys(groups.values()):
            found.same.passes |= dict.fromkeys(group.passes)
            found.same.num_needed += group.num_outputs

    def follow(self, one: Pass) -> None:
        group = self._groups.get(one)
        if self._between.parts(one.before, self._shapes) or any(
            each.made_by in self._made for each in one.executions
        ):
            self._summing, self._shapes, self._made = {}, set(), set()
        ids = [self._id(each) for each in one.executions]
        adds = any(each.is_added and node in self._summing for each, node in zip(one.executions, ids))
        here: dict[_Id, Execution] = {}
        before: dict[Pass, None] = {}  # passes that it could be one with
        for node, execution in zip(ids, one.executions):
            if node in here:
                twins = [self._twins[each.made_by] for each in (execution, here[node]) if each.made_by in self._twins]
                here[node] = self._one_of(here[node], execution, twins[0][1] if twins else self._found.same)
                continue
            here[node] = execution
            if group is not None:
                key = (group.key, group.slot(one), node)
                self._kept[key] = self._one_of(self._kept.get(key), execution, self._found.same)
            elif adds and node in self._summing:
                first, begun = self._summing[node]
                left = self._one_of(first, execution, self._found.summed)
                self._summing[node] = left, one if left is execution else begun
                before[begun] = None
        if before:
            summed = self._found.summed
            summed.num_needed += summed.passes.keys().isdisjoint(before)
            summed.passes |= before | {one: None}
        if one.accumulates:
            self._summing = {node: (execution, one) for node, execution in here.items()} | self._summing
            self._shapes |= one.shapes
            self._made.update(row for execution in one.executions for row in execution.rows)

    def _id(self, one: Execution) -> _Id:
        """Return what names a node, and its twins."""
        if one.made_by is None:
            return (*one.node, None)
        twin = self._twins.get(one.made_by)
        return one.node[0], one.made_by if twin is None else twin[0]

    def _one_of(self, first: Execution | None, again: Execution, into: Repeats) -> Execution:
        """Return the execution that does what both do, without the other; the first if neither does."""
        if first is None:
            return again
        less, more = (again, first) if _is_within(again, first) else (first, again)
        if not _is_within(less, more):
            return first
        into.gone[less] = None
        if less.run == more.run:
            self._twins |= {row: (twin, into) for row, twin in zip(less.rows, more.rows, strict=False)}
        return more
