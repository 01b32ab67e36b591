"""Small inputs of every kind, damaged by seed, and the reading verb that each is given to; `benchmarks/fuzz.py`."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import random
import re
import shutil
import signal
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from handmade import cpu_recording, gpu_recording
from memories import a_step, snapshot, write_memory
from verbs import run_verb

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results" / "h200"
MOST_EVENTS = 70  # of a base trace: a case takes milliseconds
MOST_SECONDS = 60
ODD = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**53, 2**63 - 1, 2**63, 2**70, 10**400, -(2**63), 0.5, 1e18, 1e308, -0.0,
    float("nan"), float("inf"), "", "x", "float", "0", "-1", "1e3", "nan", "aten::mm", "\x00", "\ud800",
    "[[2, 2], []]", "[", "ProfilerStep#7", "a" * 3000, [], {}, [[]], [None], {"": None}, [[2, 2], "x"],
    [[4, 8], [8, 2]], [0] * 300,
]  # fmt: skip


def _nested() -> Any:
    """A list deeper than recursion goes."""
    found: Any = []
    for _ in range(900):
        found = [found]
    return found


TOKENS = [
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b'"',
    b"\\",
    b"null",
    b"NaN",
    b"1e999",
    b"\n",
    b"\0",
    b"\xff",
    b"-",
    b"9" * 40,
]

_TEXT_OR_JSON = ("", "--json")
_TRACE_VERBS = [
    "show {}", "show {} --json", "analyze {} --no-cache", "analyze {} --no-cache --json",
    *(f"analyze {{}} --no-cache --{view} {form}" for view in ("memory", "attention", "copies", "compiler")
      for form in _TEXT_OR_JSON),
    "diagnose {} --no-cache", "diagnose {} --no-cache --json", "diagnose {} --no-cache --clean --host 0.5 --json",
    "diagnose {} --no-cache --scale class=gemm:0.5", "report {} --no-cache -o {out}.html",
    "report {} --no-cache -o {out}.md", "report {} --no-cache -o {out}.json",
    "export {} perfetto --no-cache -o {out}.json", "export {} speedscope --no-cache -o {out}.json",
    "export {} csv --no-cache -o {out}",
    "export {} parquet --no-cache -o {out}", "analyze --sql {} --no-cache",
    "compare {} {base} --no-cache", "compare {base} {} --no-cache --json",
]  # fmt: skip
_MEMORY_VERBS = ["show {}", "show {} --json", "analyze {} --memory --json", "analyze {} --memory -o {out}.svg",
                 "analyze {} {base} --memory", "report {} -o {out}.html"]  # fmt: skip
VERBS = {
    "trace": _TRACE_VERBS,
    "ranks": ["show {}", "analyze {} --no-cache --json", "diagnose {} --no-cache --json",
              "report {} --no-cache -o {out}.html", "export {} perfetto --no-cache -o {out}.json",
              "analyze --sql {} --no-cache"],
    "recording": _TRACE_VERBS,
    "memory": 10 * _MEMORY_VERBS,
    "snapshot": 10 * _MEMORY_VERBS,
    "sweep": 8 * ["show {}", "show {} --json", "report {} -o {out}.html", "report {} -o {out}.md",
                  "report {} -o {out}.json", "compare {} {base}", "compare {base} {} --json",
                  "compare {} {base} --markdown"],
}  # fmt: skip
# Traces and recordings take a second where the others take milliseconds: those come more often.
PAIRS = [(kind, verb) for kind, verbs in VERBS.items() for verb in verbs]


class Outcome(NamedTuple):
    number: int
    kind: str
    verb: str
    base: str
    code: int | None
    problem: str | None  # None if every invariant holds


# -- the sound inputs ---------------------------------------------------------------------------------------------


def write_bases(
    folder: Path, more_traces: Sequence[Path] = (), more_recordings: Sequence[Path] = ()
) -> dict[str, list[Path]]:
    """Write every sound input under `folder`; return their paths by kind."""
    folder.mkdir(parents=True)
    traces = []
    for file in [*sorted((HERE / "traces").glob("*.slow.json.gz")), *more_traces]:
        whole = json.loads(gzip.decompress(file.read_bytes()))
        for number in range(2):
            path = folder / "traces" / f"{file.name.partition('.json')[0]}.{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_piece(whole, number)))
            traces.append(path)
    ranks = folder / "ranks"
    ranks.mkdir()
    for rank in range(2):
        piece = json.loads(traces[0].read_text())
        (ranks / f"rank{rank}.json").write_text(
            json.dumps({**piece, "distributedInfo": {"rank": rank, "world_size": 2}})
        )
    breaks = [{"reason": "print", "place": "train.py:3", "count": 2}]
    compiled = {"num_compiles": 2, "graph_breaks": breaks, "frames": [{"frame": "f", "num_compiles": 2}]}
    recordings = [cpu_recording(folder / "cpu"), gpu_recording(folder / "gpu", compiled)]
    for number, each in enumerate(recordings):
        write_memory(each / "memory.json.gz", a_step())
        (each / "trace").mkdir()
        (each / "trace" / "rank0.json").write_bytes(traces[2 * number].read_bytes())
    for source in more_recordings:
        copied = folder / "real" / source.name
        copied.mkdir(parents=True)
        for file in source.iterdir():
            if file.is_file():
                (copied / file.name).write_bytes(file.read_bytes())
        whole = json.loads(gzip.decompress(next((source / "trace").glob("*.gz")).read_bytes()))
        (copied / "trace").mkdir()
        (copied / "trace" / "rank0.json").write_text(json.dumps(_piece(whole, 1)))
        _shorten(copied)
        recordings.append(copied)
    sweeps = []
    for source in sorted(RESULTS.glob("**/results.jsonl")):
        copied = folder / "sweeps" / source.relative_to(RESULTS).parent
        copied.mkdir(parents=True)
        lines = source.read_bytes().splitlines(keepends=True)
        (copied / "results.jsonl").write_bytes(b"".join(lines[:: max(1, len(lines) // 12)]))
        if (source.parent / "sweep.json").is_file():
            shutil.copy(source.parent / "sweep.json", copied)
        sweeps.append(copied)
    snapshots = []
    for protocol in (2, 3, 4, 5):
        snapshots.append(folder / f"snapshot{protocol}.pickle")
        snapshots[-1].write_bytes(pickle.dumps(snapshot(), protocol))
    memories = [write_memory(folder / "memory" / "memory.json.gz", a_step())]
    return {"trace": traces, "ranks": [ranks], "recording": recordings, "memory": memories, "snapshot": snapshots,
            "sweep": sweeps}  # fmt: skip


def _shorten(recording: Path) -> None:
    """Leave some of a recording's lines and allocations: damage in any of them is alike."""
    for name in ("samples.jsonl", "counters.jsonl"):
        if (recording / name).is_file():
            lines = (recording / name).read_bytes().splitlines(keepends=True)
            (recording / name).write_bytes(b"".join(lines[:: 1 + len(lines) // 60]))
    memory = json.loads(gzip.decompress((recording / "memory.json.gz").read_bytes()))
    memory["allocations"] = memory["allocations"][:: 1 + len(memory["allocations"]) // 60]
    write_memory(recording / "memory.json.gz", memory)


def _piece(whole: Any, number: int) -> Any:
    """Return consecutive events of a trace, with the steps around them and the GPU work they launch."""
    events = whole["traceEvents"] if isinstance(whole, dict) else whole
    host = sorted((e for e in events if e.get("ph") == "X" and _stream(e) is None), key=lambda e: float(e["ts"]))
    first = len(host) * (1 + 2 * number) // 5
    chosen = host[first : first + MOST_EVENTS // 2]
    low, high = float(chosen[0]["ts"]), max(float(e["ts"]) + float(e.get("dur", 0)) for e in chosen)
    links = {e.get("args", {}).get("correlation") for e in chosen} - {None}
    device = [e for e in events if _stream(e) is not None and e["args"].get("correlation") in links]
    around = [e for e in host if str(e.get("name", "")).startswith(("ProfilerStep", "Optimizer", "stepscope"))]
    around = [
        e for e in around if float(e["ts"]) <= high and float(e["ts"]) + float(e["dur"]) >= low and e not in chosen
    ]
    rest = [e for e in events if e.get("ph") == "M"][:12]
    rest += [e for e in events if e.get("name") == "[memory]" and low <= float(e["ts"]) <= high][:40]
    fields = {key: value for key, value in whole.items() if key != "traceEvents"} if isinstance(whole, dict) else {}
    return {**fields, "traceEvents": [*rest, *around[:8], *chosen, *device[: MOST_EVENTS // 2]]}


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream") if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") else None


# -- damage -------------------------------------------------------------------------------------------------------


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every container with a key or an index in it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            found.append((value, key))
            _places(inner, found)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found.append((value, index))
            _places(inner, found)
    return found


def _odd(chance: random.Random, old: Any) -> Any:
    if isinstance(old, (int, float)) and not isinstance(old, bool) and chance.random() < 0.4:
        return chance.choice([-old, old * 1000, old // 3 if old == old else 0, old + 1, old - 1, str(old), [old]])
    if isinstance(old, str) and chance.random() < 0.3:
        return chance.choice([old * 50, old[: len(old) // 2], old.upper(), [old], {"name": old}])
    return copy.deepcopy(chance.choice(ODD)) if chance.random() < 0.99 else _nested()


def damage_values(value: Any, chance: random.Random) -> Any:
    """Change one to four values of a JSON document: one place, or one field wherever it occurs."""
    root = [value]
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        try:
            places = _places(root, [])
        except RecursionError:  # it was made too deep
            break
        holder, key = chance.choice(places)
        what = chance.random()
        if what < 0.15:
            del holder[key]
            root = root or [{}]
        elif what < 0.3 and isinstance(key, str):  # everywhere
            new = _odd(chance, holder[key])
            for other, name in places:
                if name == key and isinstance(other, dict) and name in other:
                    other[name] = copy.copy(new)
        elif what < 0.36 and isinstance(key, str):
            for other, name in places:
                if name == key and isinstance(other, dict):
                    other.pop(name, None)
        elif what < 0.42 and isinstance(holder[key], list):
            holder[key] = (holder[key] * chance.choice([2, 3, 50]))[:2000]
        elif what < 0.47 and isinstance(holder[key], list):
            chance.shuffle(holder[key])
        elif what < 0.52 and isinstance(holder[key], list):
            holder[key] = [each for each in holder[key] if chance.random() < 0.3]
        elif what < 0.56 and isinstance(holder, dict):
            holder[chance.choice(["", "name", "step", "args", "ph", "x" * 400])] = holder.pop(key)
        else:
            holder[key] = _odd(chance, holder[key])
    return root[0] if root else {}


def keep_only_some_events(trace: Any, chance: random.Random) -> Any:
    """Leave only some categories of a trace, as other profilers and schedules do."""
    events = trace["traceEvents"]
    categories = sorted({str(event.get("cat")) for event in events})
    chosen = set(chance.sample(categories, chance.randint(1, len(categories))))
    kept = [event for event in events if str(event.get("cat")) in chosen]
    return {**trace, "traceEvents": kept[: chance.choice([1, 2, 3, 10, 1000])] or events[:1]}


def damage_bytes(data: bytes, chance: random.Random) -> bytes:
    for _ in range(chance.choice([1, 1, 2, 5])):
        place = chance.randrange(len(data) + 1)
        what = chance.randrange(5)
        if what == 0:
            data = data[:place]
        elif what == 1:
            data = data[:place] + data[place + chance.choice([1, 1, 5, 100]) :]
        elif what == 2:
            data = data[:place] + chance.choice(TOKENS) + data[place:]
        elif what == 3 and data:
            place = min(place, len(data) - 1)
            data = data[:place] + bytes((chance.randrange(256),)) + data[place + 1 :]
        else:
            other = chance.randrange(len(data) + 1)
            data = data[:place] + data[other : other + 60] + data[place:]
    return data


def damage_file(path: Path, chance: random.Random) -> None:
    """Change one file: its values, its bytes, or what it is."""
    what, data = chance.random(), path.read_bytes()
    if what < 0.04:
        path.unlink()
        chance.choice([
            lambda: os.mkfifo(path), path.mkdir, lambda: path.symlink_to("/dev/zero"),
            lambda: path.symlink_to(path.name), lambda: path.symlink_to("nowhere"), lambda: path.write_bytes(b""),
            lambda: None,
        ])()  # fmt: skip
        return
    try:
        if what < 0.2:
            path.write_bytes(damage_bytes(data, chance))
        else:
            path.write_bytes(_with_other_values(path, data, chance))
    except (
        ValueError,
        EOFError,
        OSError,
        zlib.error,
        pickle.UnpicklingError,
        AttributeError,
        LookupError,
        RecursionError,
    ):
        path.write_bytes(damage_bytes(data, chance))


def _with_other_values(path: Path, data: bytes, chance: random.Random) -> bytes:
    if path.suffix == ".pickle":
        return pickle.dumps(damage_values(pickle.loads(data), chance), chance.choice([2, 4, 5]))
    if path.suffix == ".jsonl":
        lines = data.splitlines()
        for _ in range(chance.choice([1, 1, 3, len(lines)])):
            index = chance.randrange(len(lines))
            lines[index] = _text(damage_values(json.loads(lines[index]), chance)) if lines[index][:1] == b"{" else b""
        return b"\n".join(lines) + b"\n"
    is_compressed = data[:2] == b"\x1f\x8b"
    value = json.loads(gzip.decompress(data) if is_compressed else data)
    if isinstance(value, dict) and isinstance(value.get("traceEvents"), list) and chance.random() < 0.25:
        value = keep_only_some_events(value, chance)
    text = _text(damage_values(value, chance) if chance.random() < 0.9 else value)
    return gzip.compress(text, 1) if is_compressed else text


def _text(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b'{"a":' * 2000 + b"1" + b"}" * 2000


# -- one case -----------------------------------------------------------------------------------------------------


def run_case(number: int, bases: dict[str, list[Path]], folder: Path) -> Outcome:
    """Damage the input of this number, give it to its verb, and check what must hold."""
    chance = random.Random(number)
    kind, verb = PAIRS[number % len(PAIRS)]
    base = chance.choice(bases[kind])
    target = folder / base.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if base.is_dir():
        shutil.copytree(base, target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        for _ in range(chance.choice([1, 1, 2])):
            path = chance.choice(files)
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                damage_file(path, chance)
    else:
        shutil.copy(base, target)
        damage_file(target, chance)
    words = [word.format(target, base=base, out=folder / "out") for word in verb.split()]
    if verb.startswith("analyze --sql"):
        words.append("select count(*) from host")
    code = problem = None
    try:
        with limited(MOST_SECONDS), warnings.catch_warnings():
            warnings.simplefilter("error")
            done = run_verb(*words)
            code = done.returncode
            problem = _broken(verb, done.returncode, done.stdout, done.stderr, folder)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        problem = "".join(traceback.format_exception(error))
    return Outcome(number, kind, verb, base.name, code, problem)


def _broken(verb: str, code: int, out: str, err: str, folder: Path) -> str | None:
    if code not in (0, 2, 4):
        return f"exit code {code}"
    if "Traceback" in err:
        return err
    for text in (out, *(file.read_text() for file in folder.glob("out.*"))):
        if found := re.search(r"This (?:check|section) failed \(.{,200}", text):
            return found[0]
    if code == 2 and len(err.strip().splitlines()) != 1:
        return f"{len(err.strip().splitlines())} lines on stderr: {err[:500]}"
    if code == 0 and "--json" in verb:
        answer = json.loads(out, parse_constant=_not_a_number)
        for rank in answer.get("ranks", ()) if verb.startswith("analyze") and isinstance(answer, dict) else ():
            time = rank.get("gpu_time") if isinstance(rank, dict) else None
            if time and time["busy_ns"] + time["idle_ns"] != time["window_ns"]:
                return f"GPU time does not sum to its window: {time}"
            if time and sum(cause["total_ns"] for cause in rank["idle_causes"]) != time["idle_ns"]:
                return f"idle causes do not sum to the idle time: {time} {rank['idle_causes']}"
    return None


def _not_a_number(constant: str) -> None:
    raise ValueError(f"{constant} in JSON")


class TooLong(BaseException):
    """A verb ran past its limit."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
