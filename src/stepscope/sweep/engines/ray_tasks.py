"""Runs orders as tasks of a Ray cluster. Ray's own retries are off, because a sweep counts them."""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from stepscope.errors import MissingDependencyError, StepscopeError
from stepscope.formatting import plural
from stepscope.sweep.engines.engine import DONE, LOST, QUEUED, RUNNING, Answer, Engine, Order, SchedulerDown, State
from stepscope.sweep.memory import bytes_of

POLL_S = 0.2
CHECK_S = 2.0  # between two looks at the head
HEAD_TIMEOUT = "RAY_gcs_rpc_server_reconnect_timeout_s"


class _Job:
    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.node: str | None = None


class RayEngine(Engine):
    name = "Ray"
    _head_seen = 0.0

    def __enter__(self) -> "RayEngine":
        try:
            import ray
        except ModuleNotFoundError:
            raise MissingDependencyError("--on ray needs Ray: pip install 'stepscope[ray]'") from None
        self._ray = ray
        self._head_lock = threading.Lock()
        self._owns = not ray.is_initialized()
        if self._owns:
            # Ray ends a process that does not reach its head for 60 s. We say so first, and end in order.
            os.environ.setdefault(HEAD_TIMEOUT, str(int(self.settings.patience_s) + 60))
            try:
                ray.init(
                    address=self.settings.address,
                    runtime_env=dict(self.settings.runtime_env) or None,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,  # what matters of its errors is said by `_reason`
                )
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                reason = (
                    str(error).splitlines()[0].partition(". ")[0].rstrip(".")
                )  # what follows is about Ray's options
                raise StepscopeError(
                    f"Cannot reach a Ray cluster at {self.settings.address}: {reason}. Start one "
                    "with `ray start --head`, or name it: address in [tool.stepscope.engine]."
                ) from None
        self._head = ray.get_runtime_context().gcs_address
        settings = self.settings
        wanted = {"num_cpus": settings.cpus_per_point, "num_gpus": settings.gpus_per_point or 0}
        if settings.memory_per_point is not None:
            wanted["memory"] = bytes_of(settings.memory_per_point) or 0
        largest = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(
            each.get("CPU", 0) >= wanted["num_cpus"] and each.get("GPU", 0) >= wanted["num_gpus"] for each in largest
        ):
            told = f"{plural(wanted['num_cpus'], 'CPU')} and {plural(wanted['num_gpus'], 'GPU')}"
            self._say(f"no node of the Ray cluster has {told} now; points stay queued until one joins")
        self._task = ray.remote(num_returns="streaming", max_retries=0, **wanted)(_stream)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._owns:
            self._ray.shutdown()

    def _check_head(self) -> None:
        """Raise SchedulerDown if the cluster's head is gone: Ray itself would wait for it without a word."""
        with self._head_lock:
            if time.monotonic() - self._head_seen < CHECK_S:
                return
            host, _, port = self._head.rpartition(":")
            try:
                socket.create_connection((host.strip("[]"), int(port)), timeout=CHECK_S).close()
            except OSError as error:
                raise SchedulerDown(f"the cluster's head at {self._head} is gone ({error})") from None
            self._head_seen = time.monotonic()

    def submit(self, order: Order, node: str | None) -> _Job:
        self._check_head()
        if node is None:
            return _Job(self._task.remote(order))
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        near = NodeAffinitySchedulingStrategy(node_id=node, soft=True)
        return _Job(self._task.options(scheduling_strategy=near).remote(order))

    def poll(self, job: _Job) -> State:
        ready, _ = self._ray.wait([job.stream], timeout=POLL_S)
        self._check_head()  # afterwards: a wait that began before the head's end says nothing about it
        if not ready:
            return State(phase=RUNNING if job.node else QUEUED, node=job.node)
        try:
            answer = self._ray.get(next(job.stream))
        except StopIteration:
            return State(phase=LOST, reason=f"a task on {job.node} ended without an answer")
        except self._ray.exceptions.RayError as error:
            return State(phase=LOST, reason=self._reason(job, error))
        if job.node is None:
            job.node = answer["node_id"]
            return State(phase=RUNNING, node=job.node)
        return State(phase=DONE, answer=answer, node=job.node)

    def cancel(self, job: _Job) -> None:
        with suppress(Exception):  # it has ended, or the cluster has
            self._ray.cancel(job.stream, force=True)

    def _reason(self, job: _Job, error: Exception) -> str:
        where = "a node" if job.node is None else f"node {self._name(job.node)}"
        if isinstance(error, self._ray.exceptions.RayTaskError):
            return f"a point could not start on {where}: {str(error.cause or error).splitlines()[-1]}"
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        is_dead = job.node is not None and job.node not in alive
        if is_dead or isinstance(error, self._ray.exceptions.NodeDiedError):
            return f"{where} was lost"
        return f"a worker on {where} was lost ({type(error).__name__})"

    def _name(self, node_id: str) -> str:
        known = {node["NodeID"]: node["NodeManagerHostname"] for node in self._ray.nodes()}
        return f"{known.get(node_id, '')} {node_id[:8]}".strip()


def _stream(order: Order) -> Iterator[Answer]:
    """Yield first where a point runs, then its answer."""
    import ray

    from stepscope.sweep.engines.work import work

    yield {"node_id": ray.get_runtime_context().get_node_id()}
    yield work(order)
