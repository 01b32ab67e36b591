"""The tables of a trace that rules look at: those of its typical steps, each worked out when one asks."""

from __future__ import annotations

from functools import cached_property

import polars as pl

from stepscope.analysis.attention.backends import DISPATCHER, attention_calls
from stepscope.analysis.attention.handwritten import squares
from stepscope.analysis.compiler.compiled_regions import compiled_regions, entering
from stepscope.analysis.kernels.copies import copies
from stepscope.analysis.kernels.elementwise_chains import chains
from stepscope.analysis.kernels.kernels import kernel_sizes
from stepscope.analysis.kernels.logits import logits
from stepscope.analysis.kernels.masked_ops import mask_indexing
from stepscope.analysis.kernels.nan_checks import nan_checks, stack_writing_ops
from stepscope.analysis.kernels.product_loops import product_loops
from stepscope.analysis.kernels.recomputed import recomputed
from stepscope.analysis.kernels.tiles import tiled_products
from stepscope.analysis.memory.allocator_calls import allocator_calls
from stepscope.analysis.precision.casts import casts
from stepscope.analysis.ranks.rank_account import RankAccount, account_of, device_name
from stepscope.analysis.structure.intervals import length_ns, spans, union
from stepscope.analysis.structure.links import Linked, link
from stepscope.analysis.structure.tensor_sizes import with_sizes
from stepscope.analysis.structure.work import work
from stepscope.analysis.time.idle import idle_gaps
from stepscope.analysis.time.replay import Replay, typical_steps
from stepscope.analysis.time.round_trips import round_trips
from stepscope.analysis.time.stalls import stalls
from stepscope.analysis.time.syncs import syncs
from stepscope.analysis.time.thread_silence import quiet_stretches
from stepscope.analysis.time.waits import waits
from stepscope.devices import Device, find_device
from stepscope.errors import Unavailable
from stepscope.trace.tables import Trace


class TraceTables:
    """One rank's trace. What is not in it raises Unavailable, which says what to run to get it."""

    def __init__(self, trace: Trace | None, rank: int) -> None:
        self.rank = rank
        self._trace = trace

    @cached_property
    def _linked(self) -> Linked:
        if self._trace is None:
            raise Unavailable("the recording has no trace: it was made with --trace 0, or ended before its window")
        return link(self._trace)

    @cached_property
    def account(self) -> RankAccount:
        """What `stepscope analyze` shows of the rank."""
        return account_of(self._linked, self.rank)

    @cached_property
    def replay(self) -> Replay:
        """The typical steps of the trace, to be played again."""
        return Replay(self._linked, typical_steps(self._linked))

    @cached_property
    def whole_replay(self) -> Replay:
        """All steps of the trace, to be played again."""
        return Replay(self._linked)

    @property
    def num_steps(self) -> int:
        """How many the typical steps are: what is summed over a table is divided by it."""
        return self.replay.num_steps

    @property
    def has_gpu_work(self) -> bool:
        """Whether there is a trace with work on a GPU in its steps."""
        return self._trace is not None and bool(self.replay.events)

    @cached_property
    def all_work(self) -> pl.DataFrame:
        """The GPU work of the whole trace (`analysis/structure/work.py`)."""
        return work(self._linked)

    @cached_property
    def work(self) -> pl.DataFrame:
        """The GPU work of the typical steps (`analysis/structure/work.py`)."""
        if not self.replay.events:
            if self._linked.trace.facts.is_cut_off:
                raise Unavailable("the trace is cut off, and GPU work is written last: record it again")
            raise Unavailable("the trace has no GPU work: record on a GPU, with ProfilerActivity.CUDA")
        return self.all_work.filter(pl.col("event").is_in(self.replay.events))

    @cached_property
    def busy_ns(self) -> float:
        """How long the GPU was at work in a typical step, on any of its streams."""
        return length_ns(union(spans(self.work))) / self.num_steps

    @cached_property
    def kernel_sizes(self) -> pl.DataFrame:
        """Kernels of a typical step by how long they are (`analysis/kernels/kernels.py`)."""
        return kernel_sizes(self.work).with_columns(pl.col("num_kernels", "total_ns") / self.num_steps)

    @cached_property
    def idle(self) -> pl.DataFrame:
        """When the GPU had no work in the typical steps, and why (`analysis/time/idle.py`)."""
        start_ns, end_ns = self.replay.start_ns, self.replay.end_ns
        inside = idle_gaps(self._linked).filter(pl.col("end_ns") > start_ns, pl.col("start_ns") < end_ns)
        return inside.with_columns(pl.col("start_ns", "end_ns").clip(start_ns, end_ns))

    @cached_property
    def optimizers(self) -> list[str]:
        """The classes of the optimizers that stepped, as the profiler names them."""
        names = self._linked.host["name"].filter(self._linked.host["kind"] == "annotation").unique().cast(pl.String)
        return sorted(names.str.extract(r"^Optimizer\.step#(\w+)\.step$").drop_nulls().unique())

    @cached_property
    def sized(self) -> pl.DataFrame:
        """The same work with the size of its tensors (`analysis/structure/tensor_sizes.py`)."""
        return with_sizes(self.work)

    @cached_property
    def attention(self) -> pl.DataFrame:
        """Calls of scaled dot-product attention in the typical steps (`analysis/attention/backends.py`)."""
        return attention_calls(self._linked, self.work)

    @cached_property
    def collectives(self) -> pl.DataFrame:
        """Communication kernels of the typical steps (`analysis/ranks/collectives.py`)."""
        return self.account.collectives.filter(pl.col("event").is_in(self.replay.events))

    @cached_property
    def products(self) -> pl.DataFrame:
        """Products of matrices in the typical steps, by what they fill (`analysis/kernels/tiles.py`)."""
        return tiled_products(self.work)

    @cached_property
    def product_loops(self) -> pl.DataFrame:
        """Work of loops over products that do not need one another (`analysis/kernels/product_loops.py`)."""
        return product_loops(self.work, self.products)

    @cached_property
    def casts(self) -> pl.DataFrame:
        """Casts between float32 and a lower precision in the typical steps (`analysis/precision/casts.py`)."""
        return casts(self._linked, self.work)

    @cached_property
    def recomputed(self) -> pl.DataFrame:
        """Forward ops that ran again in the backward, in the typical steps (`analysis/kernels/recomputed.py`)."""
        return recomputed(self._linked, self.work)

    @cached_property
    def squares(self) -> pl.DataFrame:
        """Work of hand-written attention in the typical steps (`analysis/attention/handwritten.py`)."""
        return squares(self.sized)

    @cached_property
    def logits(self) -> pl.DataFrame:
        """Work over tokens × vocabulary in the typical steps (`analysis/kernels/logits.py`)."""
        return logits(self.sized)

    @cached_property
    def chains(self) -> pl.DataFrame:
        """Chains of elementwise work that is neither attention's nor the loss's (`elementwise_chains.py`)."""
        others = [table["event"] for table in (self.squares, self.logits)]
        in_attention = self.work.filter(pl.col("root_op").cast(pl.String) == DISPATCHER)["event"]
        return chains(self.sized, {event for events in (*others, in_attention) for event in events})

    @cached_property
    def copies(self) -> pl.DataFrame:
        """What the GPU copied in the typical steps (`analysis/kernels/copies.py`)."""
        return self._all_copies.filter(pl.col("event").is_in(self.replay.events))

    @cached_property
    def round_trips(self) -> pl.DataFrame:
        """Tensors that went to the host and back, in the typical steps (`analysis/time/round_trips.py`)."""
        return self._within(round_trips(self._linked, self._all_copies))

    @cached_property
    def _all_copies(self) -> pl.DataFrame:
        return copies(self._linked)

    @cached_property
    def stalls(self) -> pl.DataFrame:
        """Where the host did nothing for the GPU for long, in the typical steps (`analysis/time/stalls.py`)."""
        return stalls(self._linked, self.replay)

    @cached_property
    def quiet_stretches(self) -> pl.DataFrame:
        """Stalls in which nothing happened that is seen (`analysis/time/thread_silence.py`)."""
        return quiet_stretches(self._linked, self.stalls.filter(pl.col("kind").is_in(["python", "launch"])))

    @cached_property
    def syncs(self) -> pl.DataFrame:
        """Synchronizations of the typical steps, one row each (`analysis/time/syncs.py`)."""
        start = pl.col("start_ns")
        return syncs(self._linked).filter(start >= self.replay.start_ns, start < self.replay.end_ns)

    @cached_property
    def waits(self) -> pl.DataFrame:
        """Where the host waited for the GPU, in the typical steps (`analysis/time/waits.py`)."""
        return self._within(waits(self._linked, self._all_copies))

    @cached_property
    def mask_indexing(self) -> pl.DataFrame:
        """Ops that choose elements by a mask, in the typical steps (`analysis/kernels/masked_ops.py`)."""
        return self._within(mask_indexing(self._linked))

    @cached_property
    def nan_checks(self) -> pl.DataFrame:
        """Tests for NaN that the program read, in the typical steps (`analysis/kernels/nan_checks.py`)."""
        return self._within(nan_checks(self._linked))

    @cached_property
    def stack_writing_ops(self) -> pl.DataFrame:
        """Ops as slow as those that write a stack down, in the typical steps (`analysis/kernels/nan_checks.py`)."""
        return self._within(stack_writing_ops(self._linked))

    @cached_property
    def allocator_calls(self) -> pl.DataFrame:
        """Calls of the driver's allocator, in the typical steps (`analysis/memory/allocator_calls.py`)."""
        return self._within(allocator_calls(self._linked))

    @cached_property
    def compiled_regions(self) -> pl.DataFrame:
        """Calls of compiled code, in the typical steps (`analysis/compiler/compiled_regions.py`)."""
        return self._within(compiled_regions(self._linked))

    def region_entries(self, all_but_first: bool) -> pl.DataFrame:
        """The host's time that graph breaks cost, in the typical steps (`analysis/compiler/compiled_regions.py`)."""
        return self._within(entering(self._linked, self.compiled_regions, all_but_first))

    def phase_stretches(self, phase: str) -> pl.DataFrame:
        """When the host was in a phase, in the typical steps: `start_ns`, `end_ns`."""
        phases = self._linked.steps.phases
        inside = (pl.col("end_ns") > self.replay.start_ns) & (pl.col("start_ns") < self.replay.end_ns)
        return phases.filter(pl.col("phase") == phase, inside).select("start_ns", "end_ns")

    def _within(self, table: pl.DataFrame) -> pl.DataFrame:
        """What begins in the typical steps."""
        return table.filter(pl.col("start_ns") >= self.replay.start_ns, pl.col("start_ns") < self.replay.end_ns)

    @cached_property
    def device(self) -> Device:
        """The device and its peaks."""
        name = device_name(self._linked)
        found = find_device(name) if name else None
        if found is None:
            raise Unavailable(f"the peaks of {name or 'the device'} are not known: docs/measurement.md lists devices")
        return found

    def with_shapes(self) -> None:
        """Unavailable where the trace has no shapes."""
        if self.work["shapes"].null_count() == self.work.height:
            raise Unavailable("the trace has no shapes: record with record_shapes=True")
