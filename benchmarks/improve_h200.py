"""Runs `stepscope improve` on three unmodified scripts and writes its screens and JSON to a folder.

    python benchmarks/improve_h200.py OUT --only "resnet50 --batch 256"          6 minutes
    python benchmarks/improve_h200.py OUT --only nanogpt --only hf_trainer      8 minutes
    python benchmarks/improve_h200.py OUT --tiny --minutes 2   small sizes, for a CPU

The same call goes on with the runs from before. Exit code 0 if every factor reaches its bar; `summary.json` has them.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BARS = {"nanogpt": (1.2, 4.0), "resnet50 --batch 256": (3.0, 6.0), "resnet50": (3.0, 8.0), "hf_trainer": (1.25, 4.0)}
"""Script with its arguments → the factor that it must reach, and the minutes it gets."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=list(BARS), action="append")
    parser.add_argument("--minutes", type=float, help="minutes for each script")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    summary = {name: improved(name, asked) for name in asked.only or BARS}
    (asked.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return 0 if all(each["reached"] for each in summary.values()) else 1


def improved(name: str, asked: argparse.Namespace) -> dict[str, object]:
    bar, minutes = BARS[name]
    if name == "hf_trainer" and not all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
        return {"bar": bar, "reached": False, "problem": "transformers or accelerate is not installed"}
    script, *arguments = name.split()
    name = name.replace(" ", "")
    folder, path = asked.out / name, ROOT / "benchmarks" / "improve" / f"{script}.py"
    words = [sys.executable, "-m", "stepscope", "improve", "--minutes", str(asked.minutes or minutes)]
    words += ["-o", str(folder), "--resume", str(path), *arguments, *(["--tiny"] if asked.tiny else [])]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if asked.tiny:
        environment["OMP_NUM_THREADS"] = "1"  # on a busy machine, threads wait for one another
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment)
    print(done.stdout, flush=True)
    (asked.out / f"{name}.txt").write_text(done.stdout)
    if done.returncode:
        return {"bar": bar, "reached": False, "problem": f"exit code {done.returncode}; see the lines above"}
    result = json.loads((folder / "improve.json").read_text())["result"]
    (asked.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    factor = result["gain"]["factor"] if result["gain"] else 1.0
    return {
        "bar": bar,
        "reached": factor >= bar,
        "factor": factor,
        "interval": [result["gain"]["low"], result["gain"]["high"]] if result["gain"] else None,
        "kept": result["kept"],
        "losses": result["losses"] and result["losses"]["verdict"],
        "trials": {each["fix"]: [each["status"], each["reason"]] for each in result["trials"]},
        "seconds": result["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
