"""Backward passes of a step: which autograd nodes each of them runs, and with which ops."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from stepscope.analysis.structure.nesting import ancestor, matches

MATRIX = re.compile(r"\[\d+(?:, \d+)+\]")
"""The size of a tensor of several dimensions, as a trace writes it."""
_ACCUMULATION = "AccumulateGrad"
_EVALUATES = "autograd::engine::evaluate_function: "
_ADDS = re.compile(r"aten::add_?( |$)")

Node = tuple[int, int]  # autograd's number of the thread that made it, and its number there
Run = tuple[str, ...]  # the ops in a node, with their arguments
_Inside = tuple[list[int], list[str], list[str]]  # rows, names with arguments, and sizes


@dataclass(eq=False)
class Execution:
    """One run of an autograd node."""

    node: Node
    name: str
    start_ns: int
    end_ns: int
    rows: list[int]  # of the host table: the node's own and those of all ops in it
    called: str  # the node itself, with the sizes of the gradients that come in
    run: Run
    made_by: int | None  # the op that made the node
    accumulations: list[int] = field(default_factory=list)  # rows of what puts its results into `.grad`
    is_added: bool = False  # whether one of these adds to a gradient that is there already


@dataclass(eq=False)
class Pass:
    """One run of the autograd engine."""

    step: int
    before: list[int]  # outermost ops of the script between the pass before and this one
    executions: list[Execution] = field(default_factory=list)
    shapes: set[str] = field(default_factory=set)  # of the gradients that it puts into `.grad`

    @property
    def accumulates(self) -> bool:
        return any(one.accumulations for one in self.executions)


def backward_passes(host: pl.DataFrame, steps: Collection[int]) -> list[Pass]:
    """Return the backward passes of some steps by time; none if no node runs more than once in a step.

    The engine runs each node once in a pass, and of those that are ready the one with the highest number: numbers
    from one thread never rise from a node to the next. The script waits for it: its ops are between two passes.
    """
    is_op = host["kind"] == "op"
    is_numbered = (is_op & (host["sequence"] >= 0) & (host["forward_thread"] > 0)).fill_null(False)
    is_node = is_numbered | (is_op & matches(host["name"], _ACCUMULATION))
    is_node &= host["step"].is_in(list(steps)).fill_null(False)
    is_node &= ancestor(host, is_node).gather(host["parent"]).is_null()  # no passes inside of passes
    if not host.filter(is_node & is_numbered).select("step", "forward_thread", "sequence").is_duplicated().any():
        return []
    within = ancestor(host, is_node)
    text = pl.concat_str(pl.col("name", "shapes", "inputs").cast(pl.String), separator=" ", ignore_nulls=True)
    ops = host.select("row", "kind", text.alias("text"), pl.col("shapes").cast(pl.String), within.alias("node"))
    ops = ops.filter(pl.col("kind") == "op").drop_nulls("node").with_columns(pl.col("shapes").fill_null(""))
    by_node = ops.group_by("node", maintain_order=True).agg("row", "text", "shapes")
    inside: dict[int, _Inside] = {node: (rows, texts, shapes) for node, rows, texts, shapes in by_node.iter_rows()}
    is_apart = is_op & within.is_null() & ancestor(host, is_op).gather(host["parent"]).is_null()
    apart = host.filter(is_apart).select("row", "thread", "step", "start_ns").sort("start_ns")
    nodes = host.filter(is_node).sort("start_ns")
    found: list[Pass] = []
    for part in nodes.partition_by("thread", "step", maintain_order=True):
        scripts = host["thread"].gather(part["forward"].drop_nulls()).unique()
        of_script = apart.filter(pl.col("step") == part["step"][0], pl.col("thread").is_in(scripts.implode()))
        found += _passes(part, inside, list(of_script.select("start_ns", "row").iter_rows()))
    return sorted(found, key=lambda one: one.executions[0].start_ns)


def _passes(nodes: pl.DataFrame, inside: Mapping[int, _Inside], apart: Sequence[tuple[int, int]]) -> Iterator[Pass]:
    """Return the passes of one thread in one step, whose script runs the ops `apart`."""
    table = nodes.select(
        "row", "step", pl.col("name").cast(pl.String).str.strip_prefix(_EVALUATES), "start_ns", "end_ns",
        "forward_thread", "sequence", "forward",
    )  # fmt: skip
    current: Pass | None = None
    seen: set[Node] = set()
    last: Node | None = None
    place = 0
    before: list[int] = []
    for row, step, name, start_ns, end_ns, thread, sequence, made_by in table.iter_rows():
        rows, texts, shapes = inside[row]
        while place < len(apart) and apart[place][0] < start_ns:
            before.append(apart[place][1])
            place += 1
        if sequence is None or _ACCUMULATION in name:
            if current is not None and len(rows) > 1:  # else the gradient is handed to the script
                one = current.executions[-1]
                one.accumulations += rows
                one.is_added |= any(_ADDS.match(text) for text in texts)
                current.shapes.update(MATRIX.findall(" ".join(shapes)))
            continue
        node = (thread, sequence)
        rises = last is not None and last[0] == thread and last[1] < sequence
        if current is None or before or rises or node in seen:
            if current is not None:
                yield current
            current, seen, before = Pass(step, before), set(), []
        own = int(len(texts) > 1 and texts[0].startswith(_EVALUATES))
        called, run = texts[own], tuple(texts[own + 1 :])
        current.executions.append(Execution(node, name, start_ns, end_ns, rows, called, run, made_by))
        seen.add(node)
        last = node
    if current is not None:
        yield current
