"""A run of ten minutes, with two windows taken while it goes on: nanoGPT with one evaluation, under `stepscope run`.

    python benchmarks/whole_run_h200.py OUT [--seconds 600] [--tiny]

OUT/run is the recording with window1 and window2; screens.txt has what the commands printed. Read them where the read
side is installed: `stepscope report OUT/run`.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    stepscope, run = [sys.executable, "-m", "stepscope"], str(asked.out / "run")
    script = [str(ROOT / "benchmarks" / "improve" / "nanogpt.py"), "--seconds", str(asked.seconds), "--evaluate"]
    script += ["--tiny"] if asked.tiny else []
    began = time.monotonic()
    with (asked.out / "screens.txt").open("w") as screens:

        def show(at: float, *words: str) -> None:
            time.sleep(max(0.0, began + at * asked.seconds - time.monotonic()))
            screens.write(f"\n$ stepscope {' '.join(words).replace(str(asked.out), 'OUT')}\n")
            screens.flush()
            code = subprocess.run([*stepscope, *words], stdout=screens, stderr=screens, env=environment).returncode
            screens.write(f"exit code {code}, {time.monotonic() - began:.0f} s after the start\n")
            screens.flush()

        job = subprocess.Popen(
            [*stepscope, "run", "--force", "-o", run, *script], stdout=screens, stderr=screens, env=environment
        )
        show(0.25, "trigger", run, "--trace", "3")
        show(0.45, "watch", run, "--once")
        show(0.7, "trigger", run, "--trace", "2", "--memory")
        show(0.9, "watch", run, "--once")
        return job.wait()


if __name__ == "__main__":
    sys.exit(main())
