"""Runs one order of a sweep on a node, in a process of its own, and returns the files that it left.

Everything is written to a folder of this node's own disk and sent back in the answer, so that a sweep needs no disk
that is shared.
"""

import atexit
import dataclasses
import fcntl
import io
import os
import pickle
import platform
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from stepscope.errors import StepscopeError
from stepscope.sweep.protocol import Request
from stepscope.sweep.record_runs import PARENT_VARIABLE, run_process
from stepscope.sweep.server import Server, default_start
from stepscope.version import __version__

MOST_LOG_BYTES = 1 << 20
_servers: dict[tuple[str | None, ...], Server] = {}


def work(order: dict[str, Any]) -> dict[str, Any]:
    """Run an order and return its answer: plain values and the bytes of files."""
    restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    answer: dict[str, Any] = {"id": order["id"], "node": node_name(), "num_restarts": restarts}
    if order["version"] != __version__:
        versions = f"{answer['node']} has Stepscope {__version__}, this sweep {order['version']}"
        return {**answer, "refused": f"{versions}. Install the same version on every node"}
    if "call" in order:
        return {**answer, **_call(order["call"])}
    try:
        with tempfile.TemporaryDirectory(prefix="stepscope-") as name, neighbors() as met:
            found = _point(order, Path(name)) if "request" in order else _process(order["process"], Path(name))
        return {**answer, **found, "num_neighbors": len(met)}
    except OSError as error:
        return {**answer, "refused": f"{answer['node']} cannot run a point: {error}"}


def node_name() -> str:
    """Return this machine's name as Slurm knows it, else as the system does."""
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def _point(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    result, log, trace = folder / "result.json", folder / "log.txt", order["request"]["trace_path"]
    files = {"result_path": str(result), "log_path": str(log), "trace_path": trace and str(folder / "traces" / trace)}
    request = Request(**{**order["request"], **files})
    ending = _server(order["working_folder"]).run(request)
    return {
        "ending": dataclasses.asdict(ending),
        "result": _bytes(result),
        "log": (_bytes(log) or b"")[-MOST_LOG_BYTES:],
        "trace": _bytes(Path(request.trace_path)) if request.trace_path else None,
    }


def _server(folder: str) -> Server:
    """Return the server of this process: a worker that runs many points imports torch once."""
    key = (folder, *(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")))
    if key not in _servers:
        for old in list(_servers):
            _servers.pop(old).__exit__()
        _servers[key] = Server(default_start(), Path(folder) if Path(folder).is_dir() else None)
        atexit.register(_servers[key].__exit__)
    return _servers[key]


def _process(wanted: dict[str, Any], folder: Path) -> dict[str, Any]:
    if not Path(wanted["folder"]).is_dir():
        refused = f"{wanted['folder']} does not exist on {node_name()}. Mount it on every node"
        return {"refused": refused}
    output, log = folder / "output", folder / "log.txt"
    known = {"{python}": sys.executable, "{output}": str(output)}
    environment = {name: text for name, text in os.environ.items() if name not in wanted["unset"]}
    environment |= {**wanted["set"], PARENT_VARIABLE: str(os.getpid())}
    words = [known.get(word, word) for word in wanted["words"]]
    failure = run_process(words, Path(wanted["folder"]), environment, log, wanted["timeout_s"])
    return {
        "failure": None if failure is None else dataclasses.asdict(failure),
        "log": (_bytes(log) or b"")[-MOST_LOG_BYTES:],
        "output": _archive(output),
    }


def _call(wanted: dict[str, Any]) -> dict[str, Any]:
    """Call a function of Stepscope that reads a file, with as many threads as this worker has cores."""
    if not Path(wanted["path"]).exists():
        return {"refused": f"{wanted['path']} does not exist on {node_name()}. Mount it on every node"}
    os.environ.setdefault("POLARS_MAX_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))  # Ray sets the latter
    try:
        value = getattr(import_module(wanted["module"]), wanted["function"])(*pickle.loads(wanted["arguments"]))
        return {"value": pickle.dumps(value)}
    except StepscopeError as error:
        return {"error": pickle.dumps(error)}


def _archive(folder: Path) -> bytes | None:
    if not folder.is_dir():
        return None
    with io.BytesIO() as stream:
        with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
            archive.add(folder, ".")
        return stream.getvalue()


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@contextmanager
def neighbors() -> Iterator[set[str]]:
    """Yield the names of other points that ran on this machine meanwhile; complete when the block ends.

    Each point holds a locked file. One that starts writes its name into the files of those that run.
    """
    met: set[str] = set()
    folder = Path(tempfile.gettempdir()) / f"stepscope-points-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    own = folder / f"{os.getpid()}-{time.monotonic_ns()}"
    stream = _locked(own)
    while not own.exists():  # another point met it before it was locked, and took it for one that was left behind
        stream.close()
        stream = _locked(own)
    with stream:
        for other in folder.iterdir():
            if other != own and _is_held(other):
                met.add(other.name)
                with suppress(OSError), other.open("a") as others:
                    others.write(f"{own.name}\n")
        try:
            yield met
        finally:
            met.update(own.read_text().split())
            own.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str]:
    stream = path.open("x+")
    fcntl.flock(stream, fcntl.LOCK_EX)
    return stream


def _is_held(path: Path) -> bool:
    """Return whether the point of a file still runs; the file of one that was killed is removed."""
    with suppress(FileNotFoundError), path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        path.unlink(missing_ok=True)
    return False
