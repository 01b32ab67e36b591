"""Memory and time of `analyze`, `diagnose` and `report` for 8, 64 and 512 ranks made from the files of real ones.

    python benchmarks/many_ranks.py BASE.json... --ranks 8 64 512 [--verbs analyze diagnose report]

A base is an uncompressed trace whose `distributedInfo` has a rank. Rank R is base R modulo their number, with another
rank in it. Peak memory at 512 ranks should be at most 1.3 times that at 8, and CPU time linear.
"""

from __future__ import annotations

import argparse
import gzip
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RANK = re.compile(rb'("distributedInfo": \{[^}]*"rank": )\d+')


def make_ranks(bases: list[Path], num_ranks: int, folder: Path) -> None:
    contents = [base.read_bytes() for base in bases]
    for rank in range(num_ranks):
        data = RANK.sub(rb"\g<1>%d" % rank, contents[rank % len(contents)], count=1)
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(data, 1))


def measure(words: list[str]) -> tuple[float, float]:
    """Return CPU seconds and peak memory in MiB of a command, in a process of its own."""
    program = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    command = [sys.executable, "-c", program, sys.executable, "-m", "stepscope", *words]
    seconds, kib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-2:]
    return float(seconds), int(kib) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bases", type=Path, nargs="+", metavar="BASE")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], metavar="N")
    parser.add_argument("--verbs", nargs="+", default=["analyze", "diagnose", "report"], metavar="VERB")
    options = parser.parse_args()
    print(f"{'verb':<10}{'ranks':>6}{'CPU s':>9}{'peak MiB':>10}{'of first':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for verb in options.verbs:
            first = None
            for num in options.ranks:
                ranks = Path(folder) / f"{num}"
                if not ranks.exists():
                    ranks.mkdir()
                    make_ranks(options.bases, num, ranks)
                output = ["-o", f"{folder}/{num}.html"] if verb == "report" else []
                seconds, mib = measure([verb, "--no-cache", str(ranks), *output])
                first = first or mib
                print(f"{verb:<10}{num:>6}{seconds:>9.1f}{mib:>10.0f}{mib / first:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
