"""Steps written by hand whose time is their kernels', launched at once and run without a pause, or their host's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host_cases import H200, case_of

from stepscope.session.case import Case
from trace_builder import AUTOGRAD, MAIN, TraceBuilder

BF16, FP32, INT64, BOOL = "c10::BFloat16", "float", "long int", "bool"
_LEAD_US = 5000
"""A kernel at the beginning that the host is never behind of."""
Outer = tuple[str, list[Any], list[str]]


class Program:
    """A step, op by op; times in microseconds. Every op tells its number, by which a backward names it.

    With a `pace`, every op takes the host so long, and kernels wait for it.
    """

    def __init__(self, pace: float = 0.0, **fields: Any) -> None:
        self.trace = TraceBuilder(**(H200 | fields))
        self.at, self.runs, self.num_ops, self.pace = 10.0, 30.0, 0, pace
        if not pace:
            self.op("aten::add", [[8], [8], []], _LEAD_US)

    def op(
        self,
        name: str,
        shapes: Sequence[Any],
        took: float,
        dtypes: str | Sequence[str] = FP32,
        *,
        inputs: Sequence[str] | None = None,
        strides: Sequence[Any] | None = None,
        around: Sequence[Outer] = (),
        backward: int | None = None,
        recomputed_in: int | None = None,
        kernels: Sequence[str] = (),
    ) -> int:
        """An op with one kernel, or with several that take `took` each; under others, or under autograd's node."""
        self.num_ops += 1
        number, thread = 100 + self.num_ops, MAIN
        length = max(2.0 * (len(around) + 3), self.pace)
        begin, at = self.at, self.at
        node = backward if backward is not None else recomputed_in
        if node is not None:
            thread = AUTOGRAD
            names = {"sequence": node, "forward_thread": 1}
            self.trace.op("autograd::engine::evaluate_function: SomeBackward0", at, length, thread, **names)
            self.trace.op("SomeBackward0", at + 0.5, length - 1, thread, **names)
            at += 1
        own = {} if backward is not None else {"sequence": number, "forward_thread": 0}
        for outer, outer_shapes, outer_dtypes in around:
            args = {
                "Input Dims": outer_shapes,
                "Input type": outer_dtypes,
                "Concrete Inputs": [""] * len(outer_shapes),
            }
            self.trace.op(outer, at, length - 2 * (at - begin) - 1, thread, id=number + 10_000, **own, **args)
            own, at = {}, at + 0.5
        types = [dtypes] * len(shapes) if isinstance(dtypes, str) else list(dtypes)
        args = {
            "Input Dims": list(shapes),
            "Input type": types,
            "Concrete Inputs": list(inputs or [""] * len(shapes)),
        }
        args |= {"Input Strides": list(strides)} if strides else {}
        self.trace.op(name, at, length - 2 * (at - begin) - 1, thread, id=number, **own, **args)
        for kernel in kernels or [f"{name.split('::')[-1]}_kernel"]:
            self.runs = max(self.runs, at + 5.0)
            self.trace.launch(kernel, at + 0.2, (self.runs, took), took=0.1, thread=thread, id=number)
            self.runs += took
        self.at += length
        return number

    def memory(self, num_bytes: int, address: int, total: int, ahead: float = 5.0) -> None:
        """Memory taken, or given back where negative, in the op before; `total` is allocated after it."""
        args = {"Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": num_bytes, "Total Allocated": total}
        args["Total Reserved"] = total
        at, tid = self.at - ahead, MAIN
        self.trace.raw(ph="i", cat="cpu_instant_event", name="[memory]", pid=1, tid=tid, ts=at, s="t", args=args)

    def case(self, recording: Path | None = None) -> Case:
        """Its case, as one step that ends with its last kernel, alone or in a recording."""
        end = max(self.runs, self.at)
        self.trace.call("cudaDeviceSynchronize", self.at, end - self.at)
        self.trace.step(1, 0, end + 10)
        return case_of(self.trace, recording)


def without_shapes() -> Case:
    """A step of which nothing but its kernels is known."""
    trace = TraceBuilder(**H200).step(1, 0, 6000).op("aten::mm", 10, 20, id=7)
    return case_of(trace.launch("gemm", 12, (30, 5000), id=7))
