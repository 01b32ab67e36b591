"""What torch.compile did: graph breaks, recompiles, CUDA-graph skips, seconds. Silent when it was not used.

torch writes all of this to a structured log of its own, `torch.__trace`, whenever that log has
a handler. We are one. Nothing is switched on, nothing of Dynamo is imported, and a script that
compiles nothing never comes here.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
MAX_ENTRIES = 200


class CompilerProbe:
    """Collects compile events of this process between `start()` and `stop()`."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self.on_start: Callable[[], None] | None = None
        self._seconds = 0.0
        self._frames: Counter[str] = Counter()
        self._graph_breaks: dict[tuple[str, str], int] = {}
        self._recompiles: list[dict[str, Any]] = []
        self._skips: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._limit_hits: Counter[str] = Counter()
        self._recompile_reasons: dict[tuple[Any, Any], list[str]] = {}
        self._cuda_graphs: dict[str, int] | None = None
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []

    def start(self) -> None:
        self._listen("torch.__trace", self._structured)
        # These two are said as warnings only.
        self._listen("torch._dynamo.convert_frame", self._warning)
        self._listen("torch._inductor.cudagraph_utils", self._warning)

    def stop(self) -> None:
        try:
            self._cuda_graphs = cuda_graphs()
        except (AttributeError, RuntimeError, KeyError):
            self._cuda_graphs = None  # the manager's inside differs between versions of torch
        untold = _num_cuda_graph_skips() - sum(self._skips.values())
        if untold > 0:  # torch says why only where somebody asked for its cudagraphs log
            self._skips['torch did not say why: TORCH_LOGS="cudagraphs" does'] += untold
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
        self._handlers.clear()

    @property
    def used(self) -> bool:
        """Whether anything was compiled."""
        return self.num_compiles > 0

    def report(self) -> dict[str, Any]:
        """Everything seen, as JSON values."""
        return {
            "num_compiles": self.num_compiles,
            "compile_seconds": round(self._seconds, 3),
            "frames": [{"frame": frame, "num_compiles": count} for frame, count in self._frames.most_common()],
            "graph_breaks": [
                {"reason": reason, "place": place, "count": count}
                for (reason, place), count in self._graph_breaks.items()
            ],
            "recompiles": self._recompiles,
            "recompile_limit_hits": [{"frame": text, "count": n} for text, n in self._limit_hits.items()],
            "cuda_graph_skips": [{"reason": reason, "count": n} for reason, n in self._skips.items()],
            "cuda_graphs": self._cuda_graphs,
            "failures": [{"reason": reason, "count": n} for reason, n in self._failures.items()],
        }

    def _listen(self, name: str, receive: Callable[[logging.LogRecord], None]) -> None:
        logger, handler = logging.getLogger(name), _Handler(receive)
        logger.addHandler(handler)
        self._handlers.append((logger, handler))

    def _structured(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        if not isinstance(metadata, dict):
            return
        artifact = metadata.get("artifact")
        name = artifact.get("name") if isinstance(artifact, dict) else None
        frame = (metadata.get("frame_id"), metadata.get("frame_compile_id"))
        if "dynamo_start" in metadata:
            if self.on_start is not None:
                self.on_start()
        elif name == "dynamo_graph_break_reason":
            self._graph_break(str(getattr(record, "payload", "")))
        elif name == "recompile_reasons":
            self._recompile_reasons[frame] = _reasons(getattr(record, "payload", None))
        elif "compilation_metrics" in metadata:
            self._compiled(metadata["compilation_metrics"], frame)

    def _graph_break(self, text: str) -> None:
        # torch 2.7 and later explain; the explanation says more than the heading.
        match = re.search(r"Explanation: (.*)", text) or re.search(r"Graph Break Reason: (.*)", text)
        reason = match.group(1).strip() if match else _first_line(text)
        user_code = text.split("User code traceback:")[-1].split("\nTraceback")[0]
        places = _PLACE.findall(user_code)
        place = "{}:{} in {}".format(*places[-1]) if places else "unknown place"
        if (reason, place) in self._graph_breaks or len(self._graph_breaks) < MAX_ENTRIES:
            self._graph_breaks[reason, place] = self._graph_breaks.get((reason, place), 0) + 1

    def _compiled(self, metrics: dict[str, Any], frame: tuple[Any, Any]) -> None:
        self.num_compiles += 1
        self._seconds += float(metrics.get("entire_frame_compile_time_s") or 0.0)
        where = f"{metrics.get('co_name')} ({metrics.get('co_filename')}:{metrics.get('co_firstlineno')})"
        self._frames[where] += 1
        reasons = self._recompile_reasons.pop(frame, None)
        if reasons and len(self._recompiles) < MAX_ENTRIES:
            self._recompiles.append({"frame": where, "failed_guards": reasons})
        if metrics.get("cudagraph_skip_reason"):
            self._skips[_first_line(metrics["cudagraph_skip_reason"])] += 1
        if metrics.get("fail_reason"):
            self._failures[_first_line(metrics["fail_reason"])] += 1

    def _warning(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "recompile_limit" in text or "cache_size_limit" in text:
            match = re.search(r"function: (.*)", text)
            self._limit_hits[match.group(1).strip() if match else _first_line(text)] += 1
        elif "skipping cudagraphs" in text.lower():
            places = _PLACE.findall(text)
            reason = re.sub(r"\.? Found from :.*", "", _first_line(text))
            self._skips[reason + (", {}:{} in {}".format(*places[-1]) if places else "")] += 1


def _reasons(payload: Any) -> list[str]:
    try:
        values = json.loads(payload) if isinstance(payload, str) else payload
    except ValueError:
        values = payload
    return [str(value).strip() for value in (values if isinstance(values, list) else [values])][:8]


def _first_line(text: Any) -> str:
    """The first line, and the next where the first only announces it ("backend='inductor' raised:")."""
    lines = [line.strip() for line in str(text).strip().splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])


def _num_cuda_graph_skips() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["inductor"]["cudagraph_skips"]) if utils is not None else 0


def cuda_graphs() -> dict[str, int] | None:
    """How many CUDA graphs Inductor holds and for how many distinct sizes at most; None when it has none."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    torch = sys.modules["torch"]
    if trees is None or not torch.cuda.is_initialized():
        return None
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    if manager is None:
        return None
    # One function is registered for each compiled graph and each set of dynamic sizes it was called with.
    sizes = Counter(id(function.model) for function in manager.ids_to_funcs.values())
    recorded = re.search(r"\d+", repr(manager.graph_counter))  # looking at an itertools.count without using it
    return {
        "num_recorded": int(recorded.group()) if recorded else 0,
        "num_compiled_functions": len(sizes),
        "num_distinct_sizes": max(sizes.values(), default=0),
    }


class _Handler(logging.Handler):
    def __init__(self, receive: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._receive(record)
        except Exception:  # a log handler must never disturb the one who logs
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass
