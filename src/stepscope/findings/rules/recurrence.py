"""Rules about recurrent cells that a Python loop steps through time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import polars as pl

from stepscope.analysis.costs.attainable_rates import gemm_ns, traffic_ns
from stepscope.analysis.costs.op_calls import Tensor
from stepscope.analysis.costs.op_costs import operands
from stepscope.analysis.kernels.fusible import FUSIBLE
from stepscope.analysis.structure.intervals import complement, intersect, union
from stepscope.analysis.structure.work import product
from stepscope.devices import Device
from stepscope.findings.rule import Case, Change, Evidence, Finding, on_gpu, one_finding, stretches
from stepscope.findings.rules.matrix_products import products_of
from stepscope.formatting import duration, plural, whole_percent

_CELLS = {
    "aten::gru_cell": "GRU", "aten::lstm_cell": "LSTM", "aten::rnn_tanh_cell": "RNN", "aten::rnn_relu_cell": "RNN"
}  # fmt: skip
"""Cells that torch has as one op, and the class that runs all of their time steps."""
_GATES = ("aten::sigmoid", "aten::tanh", "aten::_thnn_fused_gru_cell", "aten::_thnn_fused_lstm_cell")
_BY_GATES = {1: "RNN", 3: "GRU", 4: "LSTM"}
_SUMS = ("aten::add", "aten::add_")
_CHOOSING = ("aten::argmax", "aten::multinomial", "aten::topk")  # what a decoder makes its next input with
_LEAST_TURNS = 16
_MOST_IN_TURN = 8  # products of one time step: a GRU by hand has six
Sizes = tuple[int, int, int]  # rows, inner size and columns of a product


@dataclass
class _Product:
    """A product in the forward, with the gates that follow before the next one."""

    event: int
    sizes: Sizes
    start_ns: int  # when the program called it
    cell: str | None  # the class of the cell that it is in
    num_tiles: int
    gate_widths: list[int] = field(default_factory=list)
    is_summed: bool = False  # whether a tensor of its result's size, or of an equal part of it, is added to another
    is_joined: bool = False  # whether tensors were concatenated before it

    @property
    def key(self) -> tuple[Any, ...]:
        return self.sizes, bool(self.gate_widths), self.cell


@dataclass(frozen=True)
class _Loop:
    """Turns of a loop over time: the products of all turns, and which of a turn's are of the sequence."""

    products: Sequence[_Product]
    period: int
    cell: str | None  # the class of its cells, None if they are written by hand
    of_input: tuple[bool, ...]  # by place in a turn: whether the product reads the sequence, not the state

    @property
    def turn(self) -> Sequence[_Product]:
        return self.products[: self.period]

    @property
    def num_calls(self) -> int:
        """How often a cell is called: each has one or more stages of products that end with gates."""
        cells = sum(bool(one.gate_widths) for one in self.turn) if self.cell else 1
        return len(self.products) // self.period * cells


@on_gpu
def recurrent_loop(case: Case) -> list[Finding]:
    """Does a Python loop step a recurrent cell through time, where one call could run all time steps?"""
    case.with_shapes()
    found = [(loop, work) for loop in _loops(case) if (work := _trained_work(case, loop)) is not None]
    changes = [_shorter(case.device, loop, work) for loop, work in found]
    if not changes:
        return []
    durations = {event: ns for change in changes for event, ns in change.duration_ns.items()}
    gone = frozenset[int]().union(*(change.gone for change in changes))
    cells = [work for loop, work in found if loop.cell]
    saving_ns = case.saving_ns(_with_host(case, durations, gone, cells))
    if not case.is_worth(saving_ns):
        return []
    loops = [loop for loop, _ in found]
    rows = pl.concat([work for _, work in found])
    names = sorted({f"nn.{loop.cell}Cell" if loop.cell else "a recurrent cell written by hand" for loop in loops})
    num_calls = sum(loop.num_calls for loop in loops) / case.num_steps
    table = case.grouped(rows, "num_kernels", "op", "phase", "shapes", "module")
    whole = rows.filter("is_whole", phase="backward")  # shows that the inputs are parts of a sequence
    indexed = ""
    if case.is_worth(case.total_ns(whole)):
        indexed = (
            f" {duration(case.total_ns(whole), 3)} of it is the backward of indexing one time step, which writes a "
            "gradient of the whole sequence each time."
        )
    return one_finding(
        sentence=f"A Python loop steps {' and '.join(names)} through time: {plural(num_calls, 'call')} per step. "
        f"With their backward, their {case.number_text(rows, 'kernel')} take {case.cost_text(rows)}. Each time step "
        f"has small products of its own{_fill(case, loops)}, and separate kernels for its gates and for adding up "
        f"the weights' gradients, each launched by the host.{indexed}",
        fix=_fix(loops),
        saving_ns=saving_ns,
        derived="the step replayed with the products of the sequence and the gradients of weights as one product of "
        "all time steps at 60 % of the peak; products of the state and one kernel of gates remain for each time step"
        + (", and the host's launches of those" if cells else ", and the host's time for the ops of those"),
        upper_bound=not cells,  # entering a small compiled function takes the host as long as some launches
        confidence="high" if cells and whole.height else "medium",
        falsified_by="replace the loop; the finding is wrong if the input of a time step depends on the result "
        "of the one before, other than through the state",
        places=case.places(rows["event"]),
        evidence=(Evidence("kernels of the loop", table.head(8).to_dicts()),),
    )


def _fill(case: Case, loops: Sequence[_Loop]) -> str:
    tiles = [one.num_tiles for loop in loops for one in loop.turn]
    num_processors = case.device.num_processors
    if not num_processors or sum(tiles) >= num_processors * len(tiles):
        return ""
    share = sum(tiles) / len(tiles) / num_processors
    return f" with tiles for {whole_percent(share)} of the GPU's {num_processors} SMs"


def _fix(loops: Sequence[_Loop]) -> str:
    loop = max(loops, key=lambda loop: (loop.cell is not None, len(loop.products)))
    width = _state_width(loop.turn)
    if loop.cell is not None:
        inner = loop.turn[loop.of_input.index(True)].sizes[1]
        layers = "num_layers=… for layers on top of each other"
        return f"outputs, _ = nn.{loop.cell}({inner}, {width}, batch_first=True)(sequence)  # {layers}"
    num_gates = sum(one.sizes[2] for one, is_input in zip(loop.turn, loop.of_input) if not is_input) // width
    same = f"nn.{_BY_GATES[num_gates]} if it computes the same; else " if num_gates in _BY_GATES else ""
    return f"{same}inputs = self.input(sequence).unbind(1) before the loop, and torch.compile the cell"


# -- loops in the forward -------------------------------------------------------------------------------------------


def _loops(case: Case) -> Iterator[_Loop]:
    """Return loops over time: products of the same sizes again and again, with gates in each turn."""
    for run in _runs_of_products(case):
        place = 0
        while place < len(run):
            lengths = [_length(run, place, period) for period in range(1, _MOST_IN_TURN + 1)]
            length = max(lengths)
            if length:
                period = lengths.index(length) + 1
                loop = _loop(case, run[place : place + length], period)
                if loop is not None:
                    yield loop
            place += max(1, length)


def _runs_of_products(case: Case) -> list[list[_Product]]:
    """Return the forward's products by time; attention, a choice or a backward ends a run."""
    sizes = {row["event"]: row for row in products_of(case).iter_rows(named=True)}
    columns = ("event", "phase", "class", "op", "root", "root_op", "shapes", "dtypes", "shape")
    work = case.sized.filter(pl.col("kind") == "kernel", pl.col("root").is_not_null())
    work = work.sort("step", "device", "stream", "start_ns").select("step", "device", "stream", *columns)
    called_ns = case.linked.host["start_ns"].gather(work["root"])
    runs: list[list[_Product]] = [[]]
    last, is_joined = None, False
    texts = pl.col(pl.Categorical, pl.Enum).cast(pl.String)
    for row, start_ns in zip(work.with_columns(texts).iter_rows(named=True), called_ns):
        place = (row["step"], row["device"], row["stream"])
        op, kind = str(row["op"]).removesuffix("_"), str(row["class"])
        is_border = kind.startswith(("attention", "softmax")) or op in _CHOOSING
        is_border |= row["phase"] in ("backward", "optimizer")
        if place != last or is_border:
            runs.append([])
        last, run = place, runs[-1]
        if is_border:
            continue
        if one := sizes.get(row["event"]):
            cell, shape = _CELLS.get(row["root_op"]), (one["num_rows"], one["inner"], one["num_columns"])
            if one["batch"] == 1:
                run.append(_Product(row["event"], shape, start_ns, cell, one["num_tiles"], is_joined=is_joined))
            else:
                runs.append([])
            is_joined = False
        elif run and (op in _GATES or (op == "aten::relu" and row["root_op"] == "aten::rnn_relu_cell")):
            tensors = (one for one in operands(row["shapes"], row["dtypes"]) if isinstance(one, Tensor))
            run[-1].gate_widths += [one.shape[-1] for one in tensors if len(one.shape) > 1]
        elif run and op in _SUMS and not run[-1].gate_widths:
            run[-1].is_summed |= _is_part(row["shape"], run[-1].sizes)
        is_joined |= op == "aten::cat"
    return runs


def _is_part(shape: list[int] | None, sizes: Sizes) -> bool:
    """Return whether a tensor is as large as a product's result, or one of the equal parts that gates are."""
    last = shape[-1] if shape else 0
    return last > 0 and prod(shape or ()) == sizes[0] * last and sizes[2] % last == 0


def _length(run: Sequence[_Product], place: int, period: int) -> int:
    """Return how many products from here on repeat with a period whose last product has gates; 0 if too few."""
    end = place + period
    if end > len(run) or not run[end - 1].gate_widths:
        return 0
    while end < len(run) and run[end].key == run[end - period].key:
        end += 1
    turns = (end - place) // period
    return turns * period if turns >= _LEAST_TURNS else 0


def _loop(case: Case, products: Sequence[_Product], period: int) -> _Loop | None:
    """Return a loop if its turns are recurrent cells: torch's own, or products of a state that become its gates."""
    turn = products[:period]
    starts = [one.start_ns for one in products[::period]]
    if sorted(set(starts)) != starts:  # one op runs all of the turns
        return None
    cells = {one.cell for one in turn}
    width = _state_width(turn)
    cell = turn[0].cell if len(cells) == 1 else None
    of_input: list[bool] = []
    is_recurrent = False
    stage: list[_Product] = []
    for one in turn:
        stage.append(one)
        if not one.gate_widths:
            continue
        # What multiplies the state has its width as inner size, and comes last where the sequence is as wide.
        states = [part for part in stage if part.sizes[1] == width] or [one]
        if len(states) == len(stage):
            states = states[len(states) // 2 :]
        of_input += [part not in states and part.sizes[2] == one.sizes[2] for part in stage]
        is_summed = one.is_summed and states[-1].sizes[1] == width
        is_joined = states[-1].is_joined and states[-1].sizes[1] > width
        is_recurrent |= (is_summed or is_joined) and states[-1].sizes[2] % width == 0
        stage = []
    num_processors = case.device.num_processors
    is_small = num_processors is None or max(one.num_tiles for one in turn) < num_processors
    if cell is None and not (is_recurrent and is_small and cells == {None}):
        return None
    return _Loop(products, period, cell, tuple(of_input))


def _state_width(turn: Sequence[_Product]) -> int:
    return min(width for one in turn for width in one.gate_widths)


# -- work of a loop -------------------------------------------------------------------------------------------------


def _trained_work(case: Case, loop: _Loop) -> pl.DataFrame | None:
    """Return the work of a loop and its backward with its `turn` and `is_whole`; None if its turns share no weight.

    The gradients of a weight are added up once for each of its uses but one: layers with a weight each have no such
    sums. `is_whole` marks work on tensors larger than a turn's, which are those of the whole sequence.
    """
    starts = pl.Series([one.start_ns for one in loop.products[:: loop.period]])
    table = case.sized.filter(pl.col("root").is_not_null()).with_columns(
        pl.col("op", "phase", "class", "root_op", "module").cast(pl.String)
    )
    table = table.with_columns(case.linked.host["start_ns"].gather(table["root"]).alias("called_ns"))
    is_forward = pl.col("phase").ne_missing("backward")
    forward = table.filter(is_forward, pl.col("called_ns") >= starts[-2]).sort("called_ns", "start_ns")
    # The last turn has as much work as the one before.
    num_before = int((forward["called_ns"] < starts[-1]).sum())
    end_ns = forward["called_ns"][: 2 * num_before].max()
    inside = table.filter(pl.col("called_ns").is_between(starts[0], end_ns)).sort("start_ns")
    turns = starts.search_sorted(inside["called_ns"], side="right").cast(pl.Int64) - 1
    largest = sum(one.sizes[0] * one.sizes[2] for one in loop.turn)  # a fused cell keeps fewer numbers
    weights = {tuple(sorted(one.sizes[1:])) for one in loop.turn}
    num_elements = inside["shape"].list.eval(pl.element().product()).list.first()
    texts = inside.select("phase", "op", "shape").iter_rows()
    is_sum = [
        phase == "backward" and op in _SUMS and tuple(sorted(shape or ())) in weights for phase, op, shape in texts
    ]
    if 2 * sum(is_sum) < len(starts):
        return None
    is_whole = (num_elements > largest).fill_null(False) & inside["class"].is_in(FUSIBLE) & ~pl.Series(is_sum)
    return inside.with_columns(turns.alias("turn"), is_whole.alias("is_whole"))


def _shorter(device: Device, loop: _Loop, work: pl.DataFrame) -> Change:
    """Return the change that leaves each time step its products of the state and its gates."""
    kept = _kept(loop)
    places = {one.event: place % loop.period for place, one in enumerate(loop.products)}
    num_before: Counter[Any] = Counter()  # by turn and kind
    merged: dict[Any, list[dict[str, Any]]] = {}
    gates: dict[tuple[int, str], list[dict[str, Any]]] = {}
    gone: set[int] = set()
    for _, part in work.group_by("call", maintain_order=True):
        rows = list(part.iter_rows(named=True))
        kind = _kind(loop, rows, places, kept)
        if kind is not None:
            turn = rows[0]["turn"]
            num_before[turn, kind] += 1
            if num_before[turn, kind] > kept[kind]:
                merged.setdefault(kind, []).extend(rows)
        elif rows[0]["is_whole"]:
            gone.update(part["event"] if rows[0]["phase"] == "backward" else ())
        elif rows[0]["class"] in FUSIBLE and not rows[0]["call_flops"]:
            gates.setdefault((rows[0]["turn"], rows[0]["phase"]), []).extend(rows)
    durations: dict[int, float] = {}
    for kind, rows in merged.items():
        gone.update(row["event"] for row in rows)
        if kind[0] != _SUM:
            event = max(rows, key=lambda row: row["duration_ns"])["event"]
            now_ns = sum(row["duration_ns"] for row in rows)
            durations[event] = min(now_ns, _together_ns(device, rows, prod(kind[1]) // loop.turn[0].sizes[0]))
    # One kernel remains for the gates of each stage, as long as the longest.
    num_stages = sum(bool(one.gate_widths) for one in loop.turn)
    for rows in gates.values():
        rows.sort(key=lambda row: -row["duration_ns"])
        gone.update(row["event"] for row in rows[num_stages:])
    return Change(duration_ns=durations, gone=frozenset(gone - durations.keys()))


_FORWARD, _BACKWARD, _SUM, _REDUCTION = "forward", "backward", "sum", "reduction"


def _kind(loop: _Loop, rows: Sequence[dict[str, Any]], places: dict[int, int], kept: Counter[Any]) -> Any:
    """Return what one call for all time steps could do of an op's work, None for other work."""
    place = next((places[row["event"]] for row in rows if row["event"] in places), None)
    if place is not None:
        return (_FORWARD, loop.turn[place].sizes) if loop.of_input[place] else None
    row = rows[0]
    if row["phase"] != "backward":
        return None
    if row["call_flops"]:
        kind: Any = (_BACKWARD, _sizes(row))
    elif row["op"] in _SUMS:
        kind = (_SUM, tuple(sorted(row["shape"] or ())))
    else:
        kind = (_REDUCTION, tuple(row["shape"] or ())) if row["class"] == "reduction" else None
    return kind if kind in kept else None


def _kept(loop: _Loop) -> Counter[Any]:
    """Return how many calls of each kind remain in each turn."""
    kept: Counter[Any] = Counter()
    for one, is_input in zip(loop.turn, loop.of_input):
        rows, inner, columns = one.sizes
        kept[_FORWARD, one.sizes] = 0
        kept[_BACKWARD, (rows, columns, inner)] += not is_input
        # cuDNN makes the gradients of all weights from all time steps at once. By hand, the state's are added up.
        is_added = not is_input and loop.cell is None
        for sizes in {(inner, rows, columns), (columns, rows, inner)}:
            kept[_BACKWARD, sizes] += is_added
        kept[_SUM, tuple(sorted((inner, columns)))] += is_added
        kept[_SUM, (columns,)] += is_added
        kept[_REDUCTION, (rows, columns)] += is_added
    return kept


def _sizes(row: dict[str, Any]) -> Sizes | None:
    sizes = product(row["op"], operands(row["shapes"], row["dtypes"]))
    return sizes and sizes[1:]


def _together_ns(device: Device, rows: Sequence[dict[str, Any]], weight_elements: int) -> float:
    """Return how long one call takes that does the work of equal ones, in ns."""
    flops, moved = (sum(row[name] or 0 for row in rows) for name in ("flops", "bytes"))
    if not flops:
        return traffic_ns(device, moved)
    products = [row for row in rows if row["flops"]]
    dtype, sizes = products[0]["peak_dtype"], _sizes(products[0])
    if dtype not in device.peak_flops or sizes is None:
        return float("inf")
    # One product reads the weight, or writes its gradient, once.
    high, inner, wide = sizes
    again = (len(products) - 1) / len(products) * weight_elements / (high * inner + inner * wide + high * wide)
    return gemm_ns(device, dtype, flops, round(moved * (1 - again)))


def _with_host(
    case: Case, durations: dict[int, float], gone: frozenset[int], cells: Sequence[pl.DataFrame]
) -> Change:
    """Return the change with the host's time: of a loop over cells, only the launches that remain."""
    change = case.without(gone, durations)
    if not cells:
        return change
    members = pl.concat(cells)["event"]
    whole = case.without(members, durations, is_loop=True)
    launches = case.linked.device.filter(pl.col("event").is_in(members.filter(~members.is_in(list(gone))).implode()))
    kept = case.linked.host.select("start_ns", "end_ns").gather(launches["launch"].drop_nulls().unique())
    free = complement(union(kept), case.replay.start_ns, case.replay.end_ns)
    host = [part for part in (change.host, whole.host) if part is not None]
    spans = union(pl.concat([part.select("start_ns", "end_ns") for part in host]))
    return replace(whole, gone=gone, host=stretches(intersect(spans, free)))
