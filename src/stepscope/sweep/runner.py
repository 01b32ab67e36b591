"""Runs points one after another: a row from how each process ended and what it left, written when it is complete."""

import hashlib
import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.formatting import plural, size
from stepscope.recorder.run_facts import now
from stepscope.rows import ATTEMPTS, KILLED, LOST, SCHEMA_VERSION, Row
from stepscope.sweep.engines.engine import Engine
from stepscope.sweep.grid import Point
from stepscope.sweep.protocol import CRASHED, EXIT_CANNOT_WRITE, FROM_OUTSIDE, OOM, TIMEOUT, Ending, Request
from stepscope.sweep.results import LOG_FOLDER, RESULT_PREFIX, TRACE_FOLDER, Results, json_of, text_of
from stepscope.sweep.run_knobs import has_backward, without_autotuning
from stepscope.sweep.server import Server
from stepscope.version import __version__
from stepscope.workloads.workload import Workload

# Run knobs that the gate's verdict does not depend on.
_WAKES_AFTER_S = 1.0
IGNORED_BY_GATE = ("warmup", "steps", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Options:
    timeout_s: float = 600.0
    trace: bool = False
    memory_limit_bytes: int | None = None
    compares_dtypes: bool = False
    layers: bool = False


class Runner:
    """`run(point)` returns the point's row; each point runs in its own process."""

    def __init__(self, workload: Workload[Any], server: Server | Engine, results: Results, options: Options) -> None:
        self._gate_sizes = workload.gate
        self._server = server
        self._results, self._folder = results, results.folder.absolute()
        self.options = options
        self._gates: dict[str, dict[str, Any]] = {}
        self._gates_running: set[str] = set()
        self._turn = threading.Condition()

    def run(self, point: Point, probe: bool = False) -> Row:
        key, options = self._gate_key(point), self.options
        trace = self._folder / TRACE_FOLDER / f"{point.hash}.json.gz"
        has_gate = bool(self._gate_sizes) and not probe and not options.layers
        with self._results.writing(), self._one_gate(key if has_gate else None):
            row = measured_row(
                point,
                self._server,
                self._folder,
                self._folder / LOG_FOLDER / f"{point.hash}.txt",
                trace_path=str(trace) if options.trace and not probe else None,
                memory_limit_bytes=options.memory_limit_bytes,
                known_gate=self._gates.get(key),
                probe=probe,
                timeout_s=options.timeout_s,
                compares_dtypes=options.compares_dtypes and not probe,
                layers=options.layers and not probe,
            )
            gate = row.get("gate")
            if gate is not None:
                self._gates.setdefault(key, {**gate, "run_by": point.hash})
        return row

    @contextmanager
    def _one_gate(self, key: str | None) -> Iterator[None]:
        """Let other threads' points with this key wait until its gate has run once, as one after another would."""
        with self._turn:
            self._turn.wait_for(lambda: key not in self._gates_running)
            leads = key is not None and key not in self._gates
            if leads:
                self._gates_running.add(str(key))
        try:
            yield
        finally:
            if leads:
                with self._turn:
                    self._gates_running.discard(str(key))
                    self._turn.notify_all()

    def _gate_key(self, point: Point) -> str:
        """Return a key that is equal for points that look the same to the gate, which has its own sizes."""
        config = {name: value for name, value in point.config.items() if name not in self._gate_sizes}
        run = {name: value for name, value in without_autotuning(point.run).items() if name not in IGNORED_BY_GATE}
        if point.run["mode"] == "step" and point.run["optimizer"] in ("fused", "handwritten"):
            run["optimizer"] = point.run["optimizer"]  # the gate compares these with AdamW
        run["mode"] = has_backward(point.run)
        return hashlib.sha256(json.dumps([config, run], sort_keys=True).encode()).hexdigest()


def run_points(
    points: Sequence[Point],
    results: Results,
    run: Callable[[Point], Row],
    on_row: Callable[[Row, int], None] = lambda row, num_done: None,
    engine: Engine | None = None,
) -> None:
    """Run the points without a row; `on_row` receives each row as it is written and the number of finished points.

    On an engine, several run at a time. Only this thread writes rows.
    """
    done = results.hashes
    num_done = sum(point.hash in done for point in points)
    left = [point for point in points if point.hash not in done]
    rows: Generator[Row, None, None] = (
        (run(point) for point in left) if engine is None else _as_they_end(left, run, engine)
    )
    with closing(rows):
        for row in rows:
            results.append(row)
            num_done += 1
            on_row(row, num_done)
    if engine is not None:
        results.arrange([point.hash for point in points])


def _as_they_end(points: Sequence[Point], run: Callable[[Point], Row], engine: Engine) -> Generator[Row, None, None]:
    """Yield rows as points end, also those that ended before an interruption. Jobs end with this function."""
    threads = ThreadPoolExecutor(engine.num_slots, thread_name_prefix="stepscope-point")
    left: set[Future[Row]] = set()
    try:
        left.update(threads.submit(run, point) for point in points)
        while left:
            # A signal that arrives right before this thread waits is seen when it wakes.
            for future in wait(left, _WAKES_AFTER_S, FIRST_COMPLETED).done:
                left.discard(future)
                yield future.result()
    except GeneratorExit:
        raise
    except BaseException:
        engine.stop()
        threads.shutdown(cancel_futures=True)
        for future in left:
            if not future.cancelled() and future.exception() is None:
                yield future.result()
        raise
    finally:
        engine.stop()
        threads.shutdown(cancel_futures=True)


def identity(point: Point) -> Row:
    """Return the first fields of every row of a point."""
    return {
        "schema_version": SCHEMA_VERSION,
        "hash": point.hash,
        "workload": point.workload,
        "preset": point.preset,
        "config": dict(point.config),
        "run": dict(point.run),
    }


def measured_row(point: Point, server: Server | Engine, folder: Path, log: Path, **options: Any) -> Row:
    """Run a point in its own process and return its row, however it ended. `options` are those of the request.

    OSError if its process could not write: that says nothing about the point.
    """
    request = Request(
        workload=point.workload,
        preset=point.preset,
        config=dict(point.config),
        run=dict(point.run),
        # Its own name: the point of a sweep that was killed just before may still be writing.
        result_path=str(folder / f"{RESULT_PREFIX}{point.hash}.{os.getpid()}.json"),
        log_path=str(log),
        **options,
    )
    started_at, result = now(), Path(request.result_path)
    result.unlink(missing_ok=True)  # of a sweep that was killed
    ending = server.run(request)
    fields = json_of(result)
    result.unlink(missing_ok=True)
    if ending.exit_code == EXIT_CANNOT_WRITE and not fields:
        raise OSError("a point could not write its result or its log. Is the disk full?")
    fields.setdefault("notes", [])
    if ending.timed_out:
        fields.update(status=TIMEOUT, reason=f"killed after {request.timeout_s:g} s in stage {_stage(fields)}")
    elif ending.exit_code:
        fields.update(_failure(ending, request, _stage(fields)))
    elif "status" not in fields:
        fields.update(status=CRASHED, exit_code=0, reason=f"the process exited by itself in stage {_stage(fields)}")
    if fields["status"] == OOM:
        fields["reason"] = _oom_reason(fields)
    status, reason = fields.pop("status"), fields.pop("reason", None)
    if ending.num_neighbors and _is_host_bound(fields):
        others = plural(ending.num_neighbors, "other point")
        fields["notes"].append(f"{others} ran on {ending.node} meanwhile, and the host sets the pace here")
    return {
        **identity(point),
        "status": status,
        "reason": reason,
        **fields,
        **({ATTEMPTS: ending.attempts} if ending.attempts > 1 else {}),
        **({"num_neighbors": ending.num_neighbors} if ending.node else {}),
        "node": ending.node or platform.node(),
        "stepscope": __version__,
        "started_at": started_at,
        "finished_at": now(),
        "seconds": round(ending.seconds, 3),
    }


HOST_BOUND_SHARE = 0.8
"""The host issues a step in this share of its time on the device, or more: other work on the host then slows it."""


def _is_host_bound(fields: Row) -> bool:
    host_ns, device_ns = (sum(fields.get(name) or ()) for name in ("samples_host_ns", "samples_device_ns"))
    return bool(device_ns) and host_ns >= HOST_BOUND_SHARE * device_ns


def _stage(fields: Row) -> str:
    return str(fields.get("stage", "start"))


def _failure(ending: Ending, request: Request, stage: str) -> Row:
    code = ending.exit_code
    if ending.lost_because:
        return {"status": LOST, KILLED: True, "reason": ending.lost_because}
    if ending.lost:
        reason = f"the process that starts points was lost in stage {stage} (exit code {code})"
        return {"status": CRASHED, KILLED: True, "reason": reason}
    if code == -signal.SIGKILL and ending.memory_kill:
        lost = {"asked_bytes": None, "free_bytes": 0, "total_bytes": None}
        reason = "the kernel killed it because the machine ran out of memory"
        return {"status": OOM, "oom": lost, "reason": reason, "signal": "SIGKILL", KILLED: True}
    last = _last_line(Path(request.log_path))
    if code >= 0:
        return {"status": CRASHED, "exit_code": code, "reason": f"exit code {code} in stage {stage}{last}"}
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code in FROM_OUTSIDE:
        return {"status": CRASHED, "signal": name, "reason": f"killed by {name} in stage {stage}", KILLED: True}
    return {"status": CRASHED, "signal": name, "reason": f"{name} in stage {stage}{last}"}


def _oom_reason(fields: Row) -> str:
    facts = fields.get("oom", {})
    asked, free, total = (facts.get(name) for name in ("asked_bytes", "free_bytes", "total_bytes"))
    if asked is None and total is None:
        return str(fields.get("reason"))
    text = f"needed {'an unknown amount of memory' if asked is None else size(asked)}"
    if free is not None:
        text += f" with {size(free)}" + (f" of {size(total)}" if total is not None else "") + " free"
    elif total is not None:
        text += f" more within its limit of {size(total)}"
    return f"{text}, in stage {_stage(fields)}"


def _last_line(log: Path) -> str:
    """Return the line of a point's output that best explains its end."""
    lines = text_of(log).splitlines()
    if any(line.startswith("Fatal Python error") for line in lines):
        places = [line.strip() for line in lines if line.startswith('  File "')]
        own = [place for place in places if "/lib/python" not in place]  # innermost first
        return f", {(own or places or [''])[0]}".rstrip(", ")
    printed = [line.strip() for line in lines if line.strip()]
    return f": {printed[-1][:300]}" if printed else ""
