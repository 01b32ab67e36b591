"""What torch.compile did: graphs, breaks, recompiles, dynamic sizes, caches, CUDA graphs and seconds.

torch writes all of this to its structured log, `torch.__trace`, if that log has a handler. The probe adds one. It
changes no setting and does not import Dynamo. If nothing is compiled, it costs nothing.
"""

import json
import logging
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepscope.recorder.compiler.provenance import Provenance, compile_id_text
from stepscope.recorder.wall import pass_on

_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_TORCH = f"{Path(torch.__file__).parent}/"
_COMMENT = re.compile(r"\s+# (.*?)\s+# (\S+:\d+ in [^\s(]+)")
MAX_GUARDS = 8
UNKNOWN_PLACE = "unknown place"


def place_of(text: str) -> str | None:
    """Return the innermost line of a traceback outside torch, else the innermost line.

    >>> place_of('File "/me/model.py", line 12, in forward')
    '/me/model.py:12 in forward'
    """
    places = _PLACE.findall(text)
    users = [place for place in places if not place[0].startswith(_TORCH)] or places
    return "{}:{} in {}".format(*users[-1]) if users else None


def break_of(text: str) -> tuple[str, str]:
    # torch 2.7 and later add an explanation, which says more than the heading.
    match = re.search(r"Explanation: (.*)", text) or re.search(
        r"(?:Graph Break )?Reason: (?:Unsupported: )?(.*)", text
    )
    reason = match.group(1).strip() if match else first_line(text)
    user_code = text.split("User code traceback:")[-1].split("\nTraceback")[0]
    return reason, place_of(user_code) or UNKNOWN_PLACE


def reasons(payload: Any) -> list[str]:
    """Return the guards that failed, as torch writes them."""
    try:
        values = json.loads(payload) if isinstance(payload, str) else payload
    except ValueError:
        values = payload
    return [str(value).strip() for value in (values if isinstance(values, list) else [values])][:MAX_GUARDS]


def guard_of(reason: str) -> str:
    """Return only the guard, without its source line, hints and stacks.

    >>> guard_of("0/0: s.step == 0      # return s.a(x)  # me/model.py:29 in forward (HINT: make it a tensor)")
    '0/0: s.step == 0'
    """
    head = reason.split("\nUser stack trace:")[0].split(" (HINT:")[0]
    return _COMMENT.split(head)[0].strip() or first_line(reason)


def guard_place(reason: str) -> str | None:
    """Return the user's line that a guard refers to, or None if this torch does not report it (2.6 does not)."""
    head, _, stack = reason.partition("\nUser stack trace:")
    if stack:
        return place_of(stack)
    match = _COMMENT.search(head)
    # Without a stack, torch names only the innermost file, with its path cut off. Its own files are no help.
    return None if match is None or "nn/modules/" in match.group(2) else match.group(2)


def first_line(text: Any) -> str:
    """Return the first line, plus the second if the first only announces it ("backend='inductor' raised:")."""
    lines = [line.strip() for line in str(text).strip().splitlines() if line.strip()]
    return " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])


def useful_line(error: object) -> str:
    """Return a compiler error as one line.

    torch's first line only says who raised. Triton's gives a place in generated code, and its last line the reason.
    >>> useful_line("backend='inductor' raised:\\nLoweringException: AssertionError: no\\n  target: aten.mm")
    'LoweringException: AssertionError: no'
    """
    text = str(error).split("\nSet TORCHDYNAMO_VERBOSE=1")[0].split("\nfrom user code:")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines = lines[1:]
    if not lines:
        return type(error).__name__
    if match := re.search(r"Explanation: (.*)", text):  # torch 2.7 and later
        return match.group(1).rpartition("): got ")[2].strip()[:500]
    line = f"{lines[0]} {lines[-1]}" if "CompilationError: at " in lines[0] and len(lines) > 1 else lines[0]
    return line[:500]


MAX_ENTRIES = 200
# torch's names for the stages of compiling. Each includes the next one.
FORWARD_STAGES = {
    "dynamo": "dynamo_cumulative_compile_time_us",
    "autograd": "aot_autograd_cumulative_compile_time_us",
    "inductor": "inductor_cumulative_compile_time_us",
    "kernels": "triton_compile_time_us",
}
BACKWARD_STAGES = {**FORWARD_STAGES, "autograd": "backward_cumulative_compile_time_us"}
CACHES = {"fx_graph_cache": "graphs", "aotautograd_cache": "autograd"}
"""The prefixes of torch's cache artifacts, and what each cache holds."""


class CompilerProbe:
    """Collects compile events of this process from `start()` to `stop()`."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self.on_start: Callable[[], None] | None = None
        self.error: str | None = None  # the first, which leaves a gap in the report
        self._seconds = 0.0
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._frames: Counter[str] = Counter()
        self._regions: dict[str, str] = {}
        self._graphs: list[dict[str, Any]] = []
        self._num_graphs = 0
        self._graph_breaks: dict[tuple[str, str], dict[str, Any]] = {}
        self._recompiles: list[dict[str, Any]] = []
        self._skips: Counter[str] = Counter()
        self._failures: dict[str, dict[str, Any]] = {}
        self._limit_hits: Counter[str] = Counter()
        self._recompile_reasons: dict[tuple[Any, Any], list[str]] = {}
        self._dynamic: dict[str, dict[str, Any]] = {}
        self._files: dict[Any, str] = {}
        self._caches: dict[str, Counter[str]] = {}
        self._cuda_graphs: dict[str, int] | None = None
        self._provenance = Provenance()
        self._handlers: list[tuple[logging.Logger, logging.Handler]] = []

    def start(self) -> None:
        # Torch logs the name of a file once. These were logged earlier.
        table = getattr(sys.modules.get("torch._logging.structured"), "INTERN_TABLE", {})
        self._files = {number: name for name, number in table.items()}
        self._listen("torch.__trace", self._structured)
        # These two only log warnings.
        self._listen("torch._dynamo.convert_frame", self._warning)
        self._listen("torch._inductor.cudagraph_utils", self._warning)

    def stop(self) -> None:
        self._cuda_graphs = cuda_graphs()
        utils = sys.modules.get("torch._dynamo.utils")
        num_skips = int(utils.counters["inductor"]["cudagraph_skips"]) if utils is not None else 0
        unexplained = num_skips - sum(self._skips.values())
        if unexplained > 0:  # torch gives reasons only if its cudagraphs log is on
            self._skips['torch did not say why: TORCH_LOGS="cudagraphs" does'] += unexplained
        for logger, handler in self._handlers:
            logger.removeHandler(handler)
        self._handlers.clear()

    @property
    def used(self) -> bool:
        return self.num_compiles > 0

    def report(self) -> dict[str, Any]:
        """Return everything seen as JSON values, in the format of `CompileReport` in `trace/compile_report.py`."""
        return {
            "num_compiles": self.num_compiles,
            "compile_seconds": round(self._seconds, 3),
            "seconds_by_stage": {stage: round(us / 1e6, 3) for stage, us in self._stages.items()},
            "frames": [{"frame": frame, "num_compiles": count} for frame, count in self._frames.most_common()],
            "regions": dict(self._regions),
            "num_graphs": self._num_graphs,
            "graphs": self._graphs,
            "graph_breaks": list(self._graph_breaks.values()),
            "recompiles": self._recompiles,
            "recompile_limit_hits": [{"frame": text, "count": n} for text, n in self._limit_hits.items()],
            "dynamic_dimensions": list(self._dynamic.values()),
            "caches": {name: dict(counts) for name, counts in self._caches.items()},
            "cuda_graph_skips": [{"reason": reason, "count": n} for reason, n in self._skips.items()],
            "cuda_graphs": cuda_graphs() if self._handlers else self._cuda_graphs,
            "failures": list(self._failures.values()),
            "compiled_calls": self._provenance.graphs,
        }

    def _listen(self, name: str, receive: Callable[[logging.LogRecord], None]) -> None:
        logger, handler = logging.getLogger(name), _Handler(receive, self)
        logger.addHandler(handler)
        self._handlers.append((logger, handler))

    def _structured(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None)
        if not isinstance(metadata, dict):
            return
        artifact, payload = metadata.get("artifact"), getattr(record, "payload", None)
        name = artifact.get("name") if isinstance(artifact, dict) else None
        frame = (metadata.get("frame_id"), metadata.get("frame_compile_id"))
        if isinstance(metadata.get("str"), (list, tuple)):
            text, number = metadata["str"]  # torch logs a file's name once, and its number from then on
            self._files[number] = str(text)
        elif "dynamo_start" in metadata:
            if self.on_start is not None:
                self.on_start()
        elif name == "dynamo_graph_break_reason":
            self._graph_break(str(payload or ""))
        elif name == "recompile_reasons":
            self._recompile_reasons[frame] = reasons(payload)
        elif isinstance(name, str) and name.startswith(tuple(CACHES)):
            self._cache(name, payload, frame)
        elif "create_symbol" in metadata:
            self._symbol(metadata["create_symbol"], frame)
        elif "dynamo_output_graph" in metadata:
            self._num_graphs += 1
            self._provenance.captured(frame)
        elif "inductor_output_code" in metadata:
            self._provenance.code(frame, str(payload or ""))
        elif "compilation_metrics" in metadata:
            self._compiled(metadata["compilation_metrics"], frame)
        elif "bwd_compilation_metrics" in metadata:
            self._spent(metadata["bwd_compilation_metrics"], BACKWARD_STAGES)

    def _graph_break(self, text: str) -> None:
        reason, place = break_of(text)
        if (reason, place) not in self._graph_breaks and len(self._graph_breaks) >= MAX_ENTRIES:
            return
        new = {"reason": reason, "place": place, "count": 0}
        entry = self._graph_breaks.setdefault((reason, place), new)
        entry["count"] += 1
        if "falling back to eager" in text or "Skipping frame" in text:  # all of the function
            entry["runs_eagerly"] = True

    def _cache(self, name: str, payload: Any, frame: tuple[Any, Any]) -> None:
        prefix = next(prefix for prefix in CACHES if name.startswith(prefix))
        outcome = name.removeprefix(prefix).strip("_")
        self._caches.setdefault(CACHES[prefix], Counter())[outcome] += 1
        if prefix == "fx_graph_cache":
            facts = json.loads(payload) if isinstance(payload, str) else payload
            key = facts.get("key") if isinstance(facts, dict) else None
            self._provenance.cache(frame, str(key) if key else None)

    def _symbol(self, facts: Any, frame: tuple[Any, Any]) -> None:
        source, value = str(facts.get("source")), str(facts.get("val"))
        entry = self._dynamic.get(source)
        if entry is None:
            if len(self._dynamic) >= MAX_ENTRIES:
                return
            compile_id = compile_id_text(frame)
            entry = {"source": source, "symbol": str(facts.get("symbol")), "sizes": [], "compile_id": compile_id}
            self._dynamic[source] = entry
            stack = facts.get("user_stack")
            lines = [
                f'File "{self._files.get(at.get("filename"), "?")}", line {at.get("line")}, in {at.get("name")}'
                for at in (stack if isinstance(stack, list) else ())
                if isinstance(at, dict)
            ]
            if place := place_of("\n".join(lines)):
                entry["place"] = place
        if value not in entry["sizes"] and len(entry["sizes"]) < MAX_ENTRIES:
            entry["sizes"].append(value)

    def _spent(self, metrics: dict[str, Any], stages: dict[str, str]) -> None:
        """Add the seconds of each stage, without those of the next stage inside it."""
        known = [(stage, us) for stage, field in stages.items() if (us := _number(metrics.get(field)))]
        self._seconds += known[0][1] / 1e6 if known else _number(metrics.get("entire_frame_compile_time_s"))
        for (stage, us), inner in zip(known, [us for _, us in known[1:]] + [0.0]):
            self._stages[stage] += max(0.0, us - inner)

    def _compiled(self, metrics: dict[str, Any], frame: tuple[Any, Any]) -> None:
        self._spent(metrics, FORWARD_STAGES)
        if metrics.get("co_name") is None:
            return  # at the recompile limit torch stops before it reads the function; `_warning` gets its name
        self.num_compiles += 1
        where = f"{metrics.get('co_name')} ({metrics.get('co_filename')}:{metrics.get('co_firstlineno')})"
        self._frames[where] += 1
        compile_id = compile_id_text(frame)
        if len(self._regions) < MAX_ENTRIES:
            self._regions[compile_id] = where
        if _number(metrics.get("graph_op_count")) and len(self._graphs) < MAX_ENTRIES:
            counts = {f"num_{what}s": int(_number(metrics.get(f"graph_{what}_count"))) for what in ("op", "input")}
            counts["num_guards"] = int(_number(metrics.get("guard_count")))
            self._graphs.append({"compile_id": compile_id, "frame": where, **counts})
        failed = self._recompile_reasons.pop(frame, None)
        if failed and len(self._recompiles) < MAX_ENTRIES:
            guards = [guard_of(reason) for reason in failed]
            entry: dict[str, Any] = {"frame": where, "failed_guards": guards}
            if place := guard_place(failed[0]):
                entry["place"] = place
            self._recompiles.append(entry)
        if metrics.get("cudagraph_skip_reason"):
            self._skips[first_line(metrics["cudagraph_skip_reason"])] += 1
        if metrics.get("fail_reason"):
            reason = first_line(metrics["fail_reason"])
            failure = self._failures.setdefault(reason, {"reason": reason, "count": 0})
            failure["count"] += 1
            if metrics.get("fail_user_frame_filename"):
                failure["place"] = f"{metrics['fail_user_frame_filename']}:{metrics.get('fail_user_frame_lineno')}"

    def _warning(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "recompile_limit" in text or "cache_size_limit" in text:
            match = re.search(r"function: (.*)", text)
            self._limit_hits[match.group(1).strip() if match else first_line(text)] += 1
        elif "skipping cudagraphs" in text.lower():
            place = place_of(text)
            reason = re.sub(r"\.? Found from :.*", "", first_line(text))
            self._skips[reason + (f", {place}" if place else "")] += 1


def _number(value: Any) -> float:
    """Return a number from torch's log, or 0 if it is not a finite number."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def cuda_graphs() -> dict[str, int] | None:
    """Return how many CUDA graphs Inductor holds, and for at most how many sizes; None if it has none.

    Also None if this torch version's graph manager has an unknown structure.
    """
    trees, torch = sys.modules.get("torch._inductor.cudagraph_trees"), sys.modules["torch"]
    if trees is None or not torch.cuda.is_initialized():
        return None
    try:
        manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        if manager is None:
            return None
        # One function is registered per compiled graph and per set of dynamic sizes.
        sizes = Counter(id(function.model) for function in manager.ids_to_funcs.values())
        recorded = re.search(r"\d+", repr(manager.graph_counter))  # reads an itertools.count without advancing it
    except (AttributeError, RuntimeError, KeyError):
        return None
    return {
        "num_recorded": int(recorded.group()) if recorded else 0,
        "num_compiled_functions": len(sizes),
        "num_distinct_sizes": max(sizes.values(), default=0),
    }


class _Handler(logging.Handler):
    def __init__(self, receive: Callable[[logging.LogRecord], None], probe: CompilerProbe) -> None:
        super().__init__()
        self._receive, self._probe = receive, probe

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._receive(record)
        except Exception as error:  # a log handler must never disturb the code that logs
            pass_on(error)
            self._probe.error = self._probe.error or f"{type(error).__name__}: {error}"
