"""Makes golden data of planted traces: one step of each, without what nobody reads, small enough to keep.

python benchmarks/plant_golden.py FOLDER tests/traces NAME…     of a folder that plant_traces.py left

What the reader does not look at is left out: arrows, most of what a kernel says of its launch, the step before. The
times and everything that rules see of the step are as recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

UNREAD = (
    "Record function id", "Ev Idx", "cbid", "queued", "context", "warps per SM", "blocks per SM", "shared memory",
    "registers per thread", "est. achieved occupancy %", "finished", "Total Reserved", "block", "grid",
)  # fmt: skip
ARROWS = ("ac2g", "fwdbwd")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def shrunk(trace: dict[str, Any]) -> dict[str, Any]:
    """The last step of a trace, with the GPU work that was launched in it."""
    events = trace["traceEvents"]
    steps = [event for event in events if event.get("cat") == "user_annotation" and "ProfilerStep" in event["name"]]
    last = max(steps, key=lambda step: float(step["ts"]))
    start, end = float(last["ts"]), float(last["ts"]) + float(last["dur"])
    calls = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and start <= float(event["ts"]) <= end
    }
    kept = []
    for event in events:
        category = event.get("cat")
        if category in ARROWS or (event["ph"] == "i" and category is None):
            continue
        is_inside = event["ph"] == "M" or category == "Trace" or start <= float(event["ts"]) <= end
        if event["args"]["correlation"] in calls if category in GPU else is_inside:
            args = {key: value for key, value in event.get("args", {}).items() if key not in UNREAD}
            kept.append({**event, "args": args} if args else {k: v for k, v in event.items() if k != "args"})
    return {**trace, "traceEvents": kept}


def main(folder: Path, target: Path, names: list[str]) -> None:
    known = json.loads((folder / "truth.json").read_text())
    path = target / "truth.json"
    truth = json.loads(path.read_text()) if path.is_file() else {}
    target.mkdir(exist_ok=True)
    for name in names:
        for which in ("slow", "fixed"):
            file = f"{name}.{which}.json.gz"
            text = json.dumps(
                shrunk(json.loads(gzip.decompress((folder / file).read_bytes()))), separators=(",", ":")
            )
            (target / file).write_bytes(gzip.compress(text.encode(), 9, mtime=0))
            print(f"{file:48} {(target / file).stat().st_size:9,} bytes")
        truth[name] = known[name]
    path.write_text(json.dumps(truth, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
