"""Rows of a profiler's database on their way to the tables of a `Trace`."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import polars as pl

from stepscope.errors import TraceError
from stepscope.trace.assemble import Assembler
from stepscope.trace.columns import Columns, Label, Numbers, Thread, with_sound_times
from stepscope.trace.databases.sqlite_file import Database
from stepscope.trace.decode import Decoded
from stepscope.trace.scan import Problems
from stepscope.trace.tables import DEVICE_TABLE, HOST, Trace, TraceFacts

_EMITTED = (
    r"^(?P<op>.*?)(?:, seq = (?P<sequence>\d{1,18}))?(?:, op_id = (?P<id>\d{1,18}))?"
    r"(?:, sizes = (?P<shapes>\[[\[\]\d, -]*\]))?(?:, input_op_ids = \[.*\])?$"
)
"""The text that `torch.autograd.profiler.emit_nvtx` gives an op: the parts that it knows, in this order."""
_OP = r"^\w+::[\w:.]+$|^autograd::engine::evaluate_function: "
_BACKWARD = r"^autograd::engine::evaluate_function: |Backward\d*$|^torch::autograd::"


@dataclass
class EventRows:
    """The events read so far; `threads` numbers the threads by the key that the database has for them."""

    database: Database
    process: int | None
    progress: Callable[[float], None]
    warnings: list[str] = field(default_factory=list)
    frames: dict[str, list[pl.DataFrame]] = field(default_factory=dict)
    counts: Counter[tuple[str, str, str | None]] = field(default_factory=Counter)
    threads: Numbers = field(default_factory=Numbers)
    num_events: int = 0

    def keep(self, source: str, table: str, frame: pl.DataFrame) -> None:
        """Add rows to a table, without those whose times make no sense."""
        if frame.is_empty():
            return
        first = self.num_events
        self.num_events += frame.height
        numbered = frame.with_row_index("event", first).cast({"event": pl.UInt32, "name": pl.Categorical()})
        bad: dict[str, list[int]] = {}
        sound = with_sound_times(numbered, bad)
        self.warnings += [f"{source}: {len(rows):,} rows have {what} and were skipped" for what, rows in bad.items()]
        self.counts["X", source, table] += sound.height
        self.frames.setdefault(table, []).append(sound)

    def keep_on_gpu(self, source: str, kind: str, frame: pl.DataFrame) -> None:
        kinds = pl.lit(kind).cast(DEVICE_TABLE.schema["kind"])
        self.keep(source, DEVICE_TABLE.name, frame.with_columns(kind=kinds))

    def on_thread(self, frame: pl.DataFrame, key: str, kind: str | pl.Expr) -> pl.DataFrame:
        """Return host events with the number of their thread in place of its key."""
        known = frame[key].fill_null(0)
        numbers = {each: self.threads[each] for each in known.unique(maintain_order=True)}
        thread = known.replace_strict(numbers, return_dtype=pl.UInt32).alias("thread")
        kind = pl.lit(kind) if isinstance(kind, str) else kind
        return frame.drop(key).with_columns(thread, kind=kind.cast(HOST.schema["kind"]))

    def has(self, table: str, kind: str) -> bool:
        return any((frame["kind"] == kind).any() for frame in self.frames.get(table, ()))

    def facts(self, gpus: Mapping[int, str | None], versions: Mapping[str, str], base_time_ns: int = 0) -> TraceFacts:
        """Return what such a database says about itself; `gpus` are names by number."""
        return TraceFacts(
            devices=tuple(gpus.get(i) or "unknown device" for i in range(max(gpus, default=-1) + 1)),
            base_time_ns=base_time_ns,
            has_shapes=any(frame["shapes"].count() for frame in self.frames.get(HOST.name, ()) if "shapes" in frame),
            has_stacks=False,
            has_memory=False,
            versions={name: text[:80] for name, text in versions.items() if text},
        )

    def finish(
        self, threads: list[Thread], labels: Iterable[Label], facts: TraceFacts, unknown: Iterable[str]
    ) -> Trace:
        """Return the trace; `unknown` is what such a database cannot tell."""
        if not self.num_events:
            raise TraceError(f"{self.database.path} has no events that can be read")
        assembler = Assembler()
        frames = {name: pl.concat(parts, how="diagonal") for name, parts in self.frames.items()}
        columns = Columns(frames, self.num_events, self.counts, threads, list(labels))
        assembler.add(Decoded(columns, Problems(), 0, is_closed=True, is_lost=False))
        return assembler.finish(self.database.path, facts, [*self.warnings, *unknown])


def json_list(columns: Iterable[pl.Expr | str]) -> pl.Expr:
    """Return numbers of each row as a list, as traces have them: `[8, 1, 1]`."""
    inner = pl.concat_str(columns, separator=", ")
    return pl.concat_str(pl.lit("["), inner, pl.lit("]")).cast(pl.Categorical())


def with_op_parts(ranges: pl.DataFrame) -> tuple[pl.DataFrame, pl.Expr]:
    """Return ranges with what their `text` says, as `emit_nvtx` writes it for an op, and the kind of each."""
    parts = ranges.with_columns(pl.col("text").str.extract_groups(_EMITTED).struct.unnest())
    op, sequence, number = pl.col("op"), pl.col("sequence"), pl.col("record_function")
    parts = parts.rename({"id": "record_function"}).with_columns(
        sequence.cast(pl.Int64),
        number.cast(pl.Int64),
        pl.col("shapes").cast(pl.Categorical()),
        # A thread's number is not recorded: one thread is taken to run every forward.
        forward_thread=pl.when(sequence.is_not_null()).then(op.str.contains(_BACKWARD).cast(pl.Int64)),
        name=pl.when(sequence.is_not_null() | number.is_not_null()).then("op").otherwise("text"),
    )
    is_op = sequence.is_not_null() | (number.is_not_null() & pl.col("name").str.contains(_OP))
    return parts.drop("text", "op"), pl.when(is_op).then(pl.lit("op")).otherwise(pl.lit("annotation"))
