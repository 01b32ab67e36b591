"""Runs orders as Slurm jobs, one per point, submitted through submitit.

The state of all jobs comes from one `squeue`, which works without Slurm's accounting. Jobs have a name of their own
for each folder: a sweep that continues after its driver was killed first cancels what that driver left.
"""

import hashlib
import math
import pickle
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope.errors import MissingDependencyError, StepscopeError
from stepscope.sweep.engines.engine import DONE, LOST, QUEUED, RUNNING, Engine, Order, SchedulerDown, State
from stepscope.sweep.engines.work import work
from stepscope.sweep.memory import bytes_of

JOB_FOLDER = ".jobs"
POLL_S = 0.5
ASK_EVERY_S = 1.0
MORE_MIN = 10
"""Minutes of a job beyond its point's time limit: a job that Slurm ends says less than a point that times out."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_REASONS = {
    "NODE_FAIL": "node {node} was lost",
    "PREEMPTED": "Slurm preempted a point on {node}",
    "CANCELLED": "a point on {node} was cancelled from outside",
    "TIMEOUT": "a point on {node} reached Slurm's time limit (time_limit_min in [tool.stepscope.engine])",
    "OUT_OF_MEMORY": "a point on {node} ran out of its memory in Slurm (memory_per_point in [tool.stepscope.engine])",
}
_DOWN = (
    "Unable to contact slurm controller", "Connection refused", "Socket timed out", "Zero Bytes were transmitted",
    "Unexpected message received", "Transport endpoint", "controller not responding",
)  # fmt: skip


class SlurmEngine(Engine):
    name = "Slurm"

    def __enter__(self) -> "SlurmEngine":
        try:
            import submitit
        except ModuleNotFoundError:
            raise MissingDependencyError("--on slurm needs submitit: pip install 'stepscope[slurm]'") from None
        folder = (self.folder / JOB_FOLDER).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._executor = submitit.SlurmExecutor(folder, python=self.settings.python)
        except RuntimeError:
            raise StepscopeError("--on slurm: srun not found. Run this on a machine that submits to Slurm.") from None
        self._errors = (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError)
        self.job_name = f"stepscope-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        self._asking, self._submitting = threading.Lock(), threading.Lock()
        self._asked_at = 0.0
        self._known: dict[str, tuple[str, str]] = {}
        self._missing_since: dict[str, float] = {}
        self._reaching(self._cancel_all)
        return self

    def __exit__(self, *_exception: object) -> None:
        with suppress(SchedulerDown, StepscopeError):
            self._cancel_all()
        for link in self._executor.folder.glob(".submission_file_*"):  # submitit's, one per job
            link.unlink(missing_ok=True)

    def submit(self, order: Order, node: str | None) -> Any:
        settings, timeout_s = self.settings, order["timeout_s"]
        more = dict(settings.sbatch)
        if settings.memory_per_point is not None:
            more["mem"] = f"{math.ceil((bytes_of(settings.memory_per_point) or 0) / 2**20)}M"
        wanted = {
            "job_name": self.job_name,
            "time": settings.time_limit_min or math.ceil(timeout_s / 60) + MORE_MIN,
            "cpus_per_task": settings.cpus_per_point,
            "gpus_per_node": settings.gpus_per_point or None,
            "partition": settings.partition,
            "account": settings.account,
            "setup": list(settings.setup) or None,
            "srun_args": list(settings.srun) or None,
            "nodelist": node,
            "additional_parameters": more or None,
        }
        with self._submitting:
            self._executor.update_parameters(**wanted)
            try:
                return self._executor.submit(work, order)
            except self._errors as error:
                self._refuse(str(error))
        raise AssertionError

    def poll(self, job: Any) -> State:
        time.sleep(POLL_S)
        result: Path = job.paths.result_pickle
        state, node = self._states().get(job.job_id, ("", ""))
        if result.exists() and (answered := self._answered(job, result, node)) is not None:
            self._missing_since.pop(job.job_id, None)
            return answered
        if state in _WAITING or state in _ACTIVE:
            self._missing_since.pop(job.job_id, None)
            return State(phase=QUEUED if state in _WAITING else RUNNING, node=node or None)
        # It has ended. A disk that is shared may show its file only later, or first without its content.
        missing_s = time.monotonic() - self._missing_since.setdefault(job.job_id, time.monotonic())
        if missing_s < (self.settings.lag_s if state in ("", "COMPLETED") else POLL_S):
            return State(phase=RUNNING, node=node or None)
        left = f"a point on {node or 'a node'} left no answer; see {job.paths.stderr}"
        return State(phase=LOST, reason=_REASONS.get(state.split()[0] if state else "", left).format(node=node))

    def _answered(self, job: Any, result: Path, node: str) -> State | None:
        """Return the answer of a job; None if its file cannot be read yet."""
        try:
            outcome, value = pickle.loads(result.read_bytes())  # of our own job, in our own folder
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        if outcome != "success":
            return State(phase=LOST, reason=f"a point could not run: {value.strip().splitlines()[-1]}")
        paths = job.paths
        for path in (result, paths.submitted_pickle, paths.submission_file, paths.stdout, paths.stderr):
            path.unlink(missing_ok=True)
        return State(phase=DONE, answer=value, node=node or value.get("node"))

    def cancel(self, job: Any) -> None:
        self._call("scancel", str(job.job_id))

    def _cancel_all(self) -> None:
        self._call("scancel", "--me", "--name", self.job_name)

    def _states(self) -> dict[str, tuple[str, str]]:
        """Return the state and the node of each job by its id, at most a second old."""
        with self._asking:
            if time.monotonic() - self._asked_at >= ASK_EVERY_S:
                words = ("--me", "--name", self.job_name, "--states=all", "--noheader", "--format=%i|%T|%N")
                lines = self._call("squeue", *words).splitlines()
                self._known = {job: (state, node) for job, state, node in (line.split("|") for line in lines)}
                self._asked_at = time.monotonic()
            return self._known

    def _call(self, *words: str) -> str:
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            raise SchedulerDown(f"{words[0]} did not end within 120 s") from None
        except FileNotFoundError:
            raise StepscopeError(f"--on slurm: {words[0]} not found on this machine") from None
        if done.returncode:
            self._refuse(done.stderr)
        return done.stdout

    @staticmethod
    def _refuse(text: str) -> None:
        """Raise SchedulerDown if Slurm did not answer, StepscopeError if it refused."""
        lines = [line.strip() for line in text.splitlines() if "error" in line.lower()] or text.strip().splitlines()
        said = lines[-1] if lines else "no message"
        if any(words.lower() in text.lower() for words in _DOWN):
            raise SchedulerDown(said)
        if "configuration source" in text:
            raise StepscopeError("--on slurm: this machine knows no Slurm cluster. Run this where `sinfo` works.")
        reason = said.rpartition("error: ")[2]
        raise StepscopeError(
            f"Slurm refuses a job: {reason}. Check --gpus-per-point, and partition, account and sbatch in "
            "[tool.stepscope.engine]."
        )
