"""The Model Context Protocol server of `stepscope mcp`: tools that read, and tools that run code if allowed."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stepscope import api
from stepscope.errors import MissingDependencyError, StepscopeError, UsageError
from stepscope.integrations.agents.answers import MOST_ROWS, ROWS, UNTRUSTED, Answer, answer, command, marked
from stepscope.version import __version__

MOST_FILES = 20_000  # looked at to list runs, or to find links that lead out of the folder
SQL_MEMORY = "512MiB"
MOST_OUTPUT = 64 << 20  # bytes read of what a command prints
INSTRUCTIONS = f"""Stepscope measures PyTorch training steps and explains where their time goes.
Work in a loop: measure (run), find (diagnose, ledger, kernels, modules, memory), predict (the saving that a finding
states, or plan), change the script, prove (compare two runs, or verify a fix). Times are in the unit of the field's
name. Paths are relative to the folder of the server. {UNTRUSTED}"""
_RUN_CODE = "from sys import argv, exit, path; del path[0]; from stepscope.cli.main import main; exit(main(argv[1:]))"
_ENDINGS = (".json", ".json.gz", ".sqlite", "_results.db", ".pickle")
_MARKERS = {"recording.json": "recording", "study.json": "study", "results.jsonl": "sweep"}


def serve(folder: Path, allow_run: bool) -> None:
    """Answer requests on standard input and output until the input ends."""
    try:
        from mcp.types import ToolAnnotations

        from stepscope.integrations.agents.strict_server import StrictServer
    except ImportError:
        raise MissingDependencyError("The MCP SDK is missing: pip install 'stepscope[mcp]'") from None

    os.chdir(folder)
    tools = Tools(Path.cwd().resolve(), allow_run)
    server = StrictServer("stepscope", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    reads, runs = ToolAnnotations(read_only_hint=True, open_world_hint=False), ToolAnnotations(read_only_hint=False)
    for tool in [*tools.reading, *(tools.running if allow_run else ())]:
        hints = reads if tool in tools.reading else runs
        server.add_tool(_guarded(tool), description=inspect.getdoc(tool), annotations=hints)
    try:
        server.run("stdio")
    except Exception as error:
        if not _is_hang_up(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end


def _is_hang_up(error: BaseException) -> bool:
    """Return whether the agent ended without waiting for its answers; tasks raise groups of errors."""
    return isinstance(error, BrokenPipeError) or any(map(_is_hang_up, getattr(error, "exceptions", ())))


def _guarded(tool: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(tool):

        @functools.wraps(tool)
        async def call_later(**arguments: Any) -> Any:
            with _errors(arguments):
                return await tool(**arguments)

        return call_later

    @functools.wraps(tool)
    def call(**arguments: Any) -> Any:
        with _errors(arguments):
            return tool(**arguments)

    return call


@contextmanager
def _errors(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Check the arguments that many tools have, and mark errors: they may quote a file."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        for name, least in (("rows", 1), ("offset", 0)):
            if (value := arguments.get(name, least)) < least:
                raise UsageError(f"{name} is {value}: it must be {least} or more")
        yield
    except StepscopeError as error:
        raise ToolError(marked(error, 1000)) from None


class Tools:
    """The tools of one folder. Their docstrings and signatures are what an agent sees."""

    def __init__(self, folder: Path, allow_run: bool) -> None:
        self._folder, self._allow_run = folder, allow_run
        self.reading: list[Callable[..., Any]] = [
            self.runs, self.analyze, self.diagnose, self.ledger, self.kernels, self.modules, self.memory,
            self.compare, self.plan, self.sql,
        ]  # fmt: skip
        self.running: list[Callable[..., Any]] = [self.run, self.verify, self.improve, self.bench]

    # -- reading --------------------------------------------------------------------------------------------------

    def runs(self, rows: int = ROWS, offset: int = 0) -> Answer:
        """List recordings, sweeps, studies, traces and memory snapshots in the folder, the latest first."""
        found = sorted(self._runs(), key=lambda run: -run["modified_s"])
        paths = [run["path"] for run in found]
        tries = [command("diagnose", paths[0])] if paths else [command("run", "train.py")]
        tries += [command("compare", paths[1], paths[0])] if len(paths) > 1 else []
        data = {"runs": found[offset:], "total": len(found)}
        return answer(f"{len(found)} found.", data, tries, rows, offset=offset)

    def analyze(
        self, path: str | None = None, step: int | None = None, rank: int | None = None, rows: int = 10
    ) -> Answer:
        """Show where the time in a trace or recording goes: GPU busy and idle time by cause, phases, kernels, copies.

        Without a path, it is the latest run. `rows` is the length of each list.
        """
        where = self._path(path)
        found = api.analyze(where, step=step, rank=rank)
        return self._answer(found, where, ["diagnose", "report"], found.to_json(), rows, "analyze", "--json")

    def diagnose(self, path: str | None = None, rank: int | None = None, rows: int = ROWS) -> Answer:
        """Find what makes a step slow: each finding with its cost, evidence and fix, the largest saving first."""
        from stepscope.findings.fixes import FIXES

        where = self._path(path)
        found = api.diagnose(where, rank=rank)
        data = found.to_json()
        del data["ledger"]
        fixes = [name for each in found.findings if (name := each.other_fix or each.id) in FIXES]
        target = where if (where / "recording.json").is_file() else "train.py"
        tries = [command("verify", target, "--fix", each) for each in fixes[:3]]
        tries = tries or [command("improve", "train.py")]
        tries.append(command("report", where))
        return answer(_verdict(found), data, tries, rows, f"Everything: {command('diagnose', where, '--json')}")

    def ledger(self, path: str | None = None, rank: int | None = None) -> Answer:
        """Split a step into the least time its work needs and every loss, without remainder."""
        where = self._path(path)
        found = api.diagnose(where, rank=rank)
        data = found.to_json()
        kept = {name: data[name] for name in ("step_ms", "binds", "ledger", "unclaimed_ms")}
        return answer(_verdict(found), kept, [command("diagnose", where)])

    def kernels(
        self, path: str | None = None, step: int | None = None, rank: int | None = None,
        rows: int = ROWS, offset: int = 0,
    ) -> Answer:  # fmt: skip
        """List the kernels of a trace by total time, and their classes; without a GPU, the ops."""
        return self._table(path, step, rank, rows, offset, ("kernel_classes", "top_kernels", "ops"))

    def modules(
        self, path: str | None = None, step: int | None = None, rank: int | None = None,
        rows: int = ROWS, offset: int = 0,
    ) -> Answer:  # fmt: skip
        """List the modules of the model by time: of the GPU, forward and backward, and of the host."""
        return self._table(path, step, rank, rows, offset, ("modules",))

    def memory(self, path: str | None = None, rows: int = 10) -> Answer:
        """Show what is alive at the peak of memory: by owner, module, op, dtype, and the largest allocations."""
        from stepscope.session import open_session
        from stepscope.session.memory_scaling import analyze_memory

        where = self._path(path)
        found = analyze_memory([open_session(where)])
        data = found.to_json()
        for account in data["accounts"]:
            account.pop("timeline", None)
        return self._answer(found, where, ["diagnose"], data, rows, "analyze", "--memory", "--json")

    def compare(self, base: str, new: str, fail_on: list[str] | None = None, rows: int = 10) -> Answer:
        """Test whether two recordings, sweeps or traces differ beyond noise, and show where.

        `fail_on` has gates such as `step_time:3%`.
        """
        sides = self._path(base), self._path(new)
        found = api.compare(*sides, fail_on=fail_on or ())
        tries = [command("diagnose", sides[1]), command("report", sides[1])]
        rest = f"Everything: {command('compare', *sides, '--json')}"
        return answer(_verdict(found), found.to_json(), tries, rows, rest)

    async def plan(
        self, workload: str, preset: str | None = None, knobs: dict[str, str] | None = None,
        device: str = "NVIDIA H200", rows: int = ROWS,
    ) -> Answer:  # fmt: skip
        """Predict a step's peak memory, whether it fits on a GPU, and its least time, without a GPU.

        `workload` is a name such as `cs336`, or `hf:config.json`; `knobs` are those of `--set`, such as
        {"seq_len": "512"}. Your own `file.py:build` runs code, so it needs --allow-run.
        """
        if not re.fullmatch(r"[\w-]+", workload) and not workload.startswith("hf:") and not self._allow_run:
            raise UsageError(f"{workload} runs code: start the server with `stepscope mcp --allow-run`")
        words = ["plan", self._workload(workload), "--json", f"--device={device}", *_knobs(preset, knobs)]
        return await self._execute(words, 10.0, rows, [command("bench", workload, "--dry-run")])

    def sql(self, path: str, query: str, rows: int = 100) -> Answer:
        """Run one SQL query over the tables of a trace: host, device, syncs, memory, collectives, threads.

        docs/tables.md describes them. Times are in nanoseconds. Use limit and offset for more rows.
        """
        where, rows = self._path(path), min(rows, MOST_ROWS)
        found = api.sql(where, query, memory_limit=SQL_MEMORY, rows=rows + 1)
        has_more = found.height > rows
        data = {"columns": found.columns, "rows": found.head(rows).rows(), "has_more": has_more}
        said = f"The first {rows:,} rows; there are more." if has_more else f"{found.height:,} rows."
        rest = "Sum up in the query, or add `limit` and `offset` to it."
        return answer(said, data, [command("analyze", "--sql", "--tables")], rows, rest)

    # -- running code ---------------------------------------------------------------------------------------------

    async def run(
        self, script: str, arguments: list[str] | None = None, exit_after: bool = True, minutes: float = 30.0
    ) -> Answer:
        """Measure a training script of the folder, unchanged; it ends when the measurement is complete.

        Returns the card. The recording is at `data.recording`.
        """
        words = ["run", "--json", *["--exit-after"] * exit_after, self._script(script), *(arguments or [])]
        return await self._execute(words, minutes, ROWS, [command("diagnose")])

    async def verify(
        self,
        script: str,
        fixes: list[str],
        arguments: list[str] | None = None,
        rounds: int = 4,
        minutes: float = 60.0,
    ) -> Answer:
        """Measure whether fixes pay: alternate runs of the script with and without each, compare times and losses.

        A fix is an id of `stepscope list fixes`, such as `autocast` or `compile`; "+" joins several. For a change by
        hand, it is `NAME=COPY.py`: the finding's id, and a copy of the script with the change.
        """
        each = [f"--fix={self._fix(fix)}" for fix in fixes]
        words = ["verify", "--json", f"--rounds={rounds}", *each, self._script(script), "--", *(arguments or [])]
        return await self._execute(words, minutes, ROWS, [command("improve", script)])

    async def improve(self, script: str, arguments: list[str] | None = None, minutes: float = 20.0) -> Answer:
        """Try what makes the script faster, within that time, and keep what pays with the same losses."""
        words = ["improve", "--json", "--quiet", f"--minutes={minutes:g}", self._script(script), *(arguments or [])]
        return await self._execute(words, 2 * minutes + 10, ROWS, [command("verify", script, "--fix", "list")])

    async def bench(
        self, workload: str, preset: str | None = None, knobs: dict[str, str] | None = None, minutes: float = 30.0
    ) -> Answer:
        """Measure a grid of configurations of a workload; `knobs` may have several values: {"seq_len": "64,128"}."""
        words = ["bench", self._workload(workload), "--json", "--quiet", *_knobs(preset, knobs)]
        return await self._execute(words, minutes, ROWS, [command("plan", workload)])

    # -- parts ----------------------------------------------------------------------------------------------------

    def _answer(
        self, found: Any, where: Path, verbs: list[str], data: dict[str, Any], rows: int, verb: str, *options: str
    ) -> Answer:
        tries = [command(each, where) for each in verbs]
        return answer(_verdict(found), data, tries, rows, f"Everything: {command(verb, where, *options)}")

    def _table(
        self, path: str | None, step: int | None, rank: int | None, rows: int, offset: int, names: tuple[str, ...]
    ) -> Answer:
        where = self._path(path)
        found = api.analyze(where, step=step, rank=rank)
        ranks = found.to_json()["ranks"]
        lists = [{name: each[name] for name in names if each[name]} for each in ranks]
        if any("top_kernels" in each for each in lists):
            for each in lists:
                each.pop("ops", None)
        pages = [{name: listed[offset:] for name, listed in kept.items()} for kept in lists]
        data = {"ranks": [{"rank": each["rank"], **page} for each, page in zip(ranks, pages)]}
        return answer(_verdict(found), data, [command("diagnose", where)], rows, offset=offset)

    def _path(self, path: str | None) -> Path:
        """Return a path inside the folder; UsageError if it, or a link inside it, leads out of it."""
        from stepscope.session.session import latest_run

        where = self._confined(named := latest_run() if path is None else Path(path))
        for number, file in enumerate(where.rglob("*") if where.is_dir() else ()):
            if number >= MOST_FILES:
                raise UsageError(f"{named} has more than {MOST_FILES:,} files: name a recording or a trace inside it")
            if file.is_symlink():
                self._confined(file)
        return where.relative_to(self._folder)

    def _confined(self, path: Path) -> Path:
        try:
            where = (self._folder / path).resolve()
            where.is_dir()
        except (OSError, ValueError) as error:
            raise UsageError(f"{str(path)[:100]!r} is not a path: {error.args[-1]}") from None
        if not where.is_relative_to(self._folder):
            raise UsageError(f"{path} is outside {self._folder}, the folder that this server may read")
        return where

    def _script(self, script: str) -> str:
        where = self._confined(Path(script))
        if not where.is_file():
            raise UsageError(f"{script} is not a file in {self._folder}")
        return f"./{where.relative_to(self._folder)}"

    def _fix(self, fix: str) -> str:
        from stepscope.findings.fixes import parse_change

        change = parse_change(fix)
        return fix if change.script is None else f"{change.finding}={shlex.quote(self._script(change.script))}"

    def _workload(self, workload: str) -> str:
        """Return a workload whose file, if it has one, is in the folder."""
        config = workload.removeprefix("hf:")
        file, colon, function = config.partition(":")
        if config != workload:
            return f"hf:{self._script(config)}"
        if colon:
            return f"{self._script(file)}:{function}"
        if not re.fullmatch(r"\w[\w-]*", workload):
            raise UsageError(f"{workload!r} is not a workload: `stepscope list workloads` has their names")
        return workload

    def _runs(self) -> Iterator[dict[str, Any]]:
        from stepscope.trace.kind import beginning_of

        num_files = 0
        for root, folders, files in os.walk(self._folder):
            num_files += len(files)
            folders[:] = sorted(each for each in folders if num_files < MOST_FILES and not each.startswith("."))
            at = Path(root)
            marker = next((name for name in _MARKERS if name in files), None)
            if marker is not None:
                folders.clear()
                yield self._entry(at, _MARKERS[marker], at / marker)
                continue
            for file in sorted(at / name for name in files if name.endswith(_ENDINGS)):
                with suppress(OSError):
                    is_json = file.name.endswith(_ENDINGS[:2])
                    if not file.is_symlink() and (not is_json or b'"traceEvents"' in beginning_of(file)):
                        yield self._entry(file, "snapshot" if file.suffix == ".pickle" else "trace", file)

    def _entry(self, path: Path, kind: str, file: Path) -> dict[str, Any]:
        where = path.relative_to(self._folder)
        return {"path": str(where), "kind": kind, "modified_s": int(file.lstat().st_mtime)}

    async def _execute(self, words: list[str], minutes: float, rows: int, tries: list[str]) -> Answer:
        """Return what a command of Stepscope prints as JSON; it is killed, with its processes, when time is up."""
        import anyio

        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = await anyio.open_process(
                [sys.executable, "-c", _RUN_CODE, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                cwd=self._folder, start_new_session=True,
            )  # fmt: skip
            try:
                with anyio.fail_after(60 * minutes):
                    code = await process.wait()
            except TimeoutError:
                message = f"stepscope {words[0]} took longer than {minutes:g} minutes: raise `minutes`"
                raise StepscopeError(message) from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with anyio.CancelScope(shield=True):
                    await process.wait()
            printed, told = (_end_of(stream) for stream in (out, err))
        try:
            data = json.loads(printed)
        except ValueError:
            raise StepscopeError(f"stepscope {words[0]} ended with exit code {code}: {told[-600:].strip()}") from None
        data = data if isinstance(data, dict) else {"rows": data}
        if isinstance(data.get("recording"), str):
            data["recording"] = os.path.relpath(data["recording"], self._folder)
        ended = f"ended with exit code {code}" if code else "is done"
        said = marked(data["verdict"], 1000) if data.get("verdict") else f"stepscope {words[0]} {ended}; see `data`."
        return answer(said, {**data, "ended_with": code, "printed": told.splitlines()[-ROWS:]}, tries, rows)


def _verdict(found: Any) -> str:
    from stepscope.api.displays import document_of

    return marked(document_of(found).verdict, 1000)


def _knobs(preset: str | None, knobs: dict[str, str] | None) -> list[str]:
    words = [f"--set={name}={value}" for name, value in (knobs or {}).items()]
    return [f"--preset={preset}", *words] if preset else words


def _end_of(stream: Any) -> str:
    stream.seek(max(0, stream.seek(0, os.SEEK_END) - MOST_OUTPUT))
    text: str = stream.read().decode("utf-8", errors="replace")
    return text
