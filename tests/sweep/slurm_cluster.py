"""A Slurm of two nodes on this machine, from the distribution's packages: munge, a controller and two daemons."""

from __future__ import annotations

import getpass
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol")
WAIT_S = 60


def why_not():
    """Return why there can be no Slurm here; None if there can."""
    os.environ["PATH"] += ":/usr/sbin"  # where packages put daemons
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed: apt-get install slurm-wlm munge"
    if os.getuid() != 0:
        return "the daemons start jobs as root"
    return None


class Slurm:
    """`controller`, `daemons` (two) and their processes; `call(…)` runs a command of Slurm."""

    def __init__(self, num_cpus=1):
        self._close = ExitStack()
        # Sockets need short paths.
        self.folder = Path(self._close.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        self.names = ("node0", "node1")
        munge, ports = self.folder / "munge", [_free_port() for _ in range(3)]
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        self.folder.chmod(0o755)
        user, lines = getpass.getuser(), []
        settings = {
            "ClusterName": "stepscope", "SlurmctldHost": platform.node(), "SlurmctldPort": ports[0],
            "AuthType": "auth/munge", "CredType": "cred/munge", "AuthInfo": f"socket={munge}/socket",
            "SlurmUser": user, "SlurmdUser": user, "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool.%n", "SlurmctldPidFile": self.folder / "ctld.pid",
            "SlurmdPidFile": self.folder / "%n.pid", "SlurmctldLogFile": self.folder / "ctld.log",
            "SlurmdLogFile": self.folder / "%n.log", "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none", "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU",
            "ReturnToService": 2, "SlurmdTimeout": 10, "KillWait": 2, "MpiDefault": "none",
            "SlurmdParameters": "config_overrides", "JobRequeue": 1,
            "SchedulerParameters": "sched_min_interval=100000,batch_sched_delay=0",
        }  # fmt: skip
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [
            f"NodeName={name} NodeHostname={platform.node()} NodeAddr=127.0.0.1 Port={port} CPUs={num_cpus}"
            for name, port in zip(self.names, ports[1:])
        ]
        lines += ["PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "state").mkdir()
        for name in self.names:
            (self.folder / f"spool.{name}").mkdir()
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._munged = self._start(
            "munged", "--foreground", "--force", f"--socket={munge}/socket", f"--key-file={munge}/key",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed", "--num-threads=1",
        )  # fmt: skip
        self.controller = self.daemons = None

    def __enter__(self):
        try:
            self.start_controller()
            self.daemons = [self.start_daemon(name) for name in self.names]
            self._wait(lambda: self.call("sinfo", "-h", "-o", "%T").split() == ["idle"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for process in [*(self.daemons or []), self.controller, self._munged]:
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        self._close.close()

    def start_controller(self):
        self.controller = self._start("slurmctld", "-D", "-i")

    def stop_controller(self):
        self.controller.terminate()  # it saves its state; without it, the numbers of jobs begin again
        self.controller.wait()

    def start_daemon(self, name):
        return self._start("slurmd", "-D", "-N", name)

    def lose(self, name):
        """End a node at once: its daemon, and whatever it started."""
        daemon = self.daemons[self.names.index(name)]
        daemon.kill()
        daemon.wait()
        # What a daemon starts is no child of it, but has the node's name in its environment.
        for place in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                variables = place.read_bytes().split(b"\0")
                if f"SLURM_CONF={self.folder}/slurm.conf".encode() in variables and (
                    f"SLURMD_NODENAME={name}".encode() in variables
                ):
                    os.kill(int(place.parent.name), signal.SIGKILL)

    def call(self, *words):
        done = subprocess.run(words, capture_output=True, text=True, env=self.environment)
        return done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"

    def jobs(self, state="RUNNING"):
        """Return the ids of jobs in a state."""
        return [int(line) for line in self.call("squeue", "-h", "-t", state, "-o", "%i").split() if line.isdigit()]

    def _start(self, *words):
        with (self.folder / f"{words[0]}.out").open("ab") as log:
            return subprocess.Popen(words, env=getattr(self, "environment", None), stdout=log, stderr=log)

    def _wait(self, is_there):
        end = time.monotonic() + WAIT_S
        while not is_there():
            if time.monotonic() > end:
                logs = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")]
                raise RuntimeError(f"Slurm did not start: {self.call('sinfo')}\n" + "\n".join(logs))
            time.sleep(0.2)


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
