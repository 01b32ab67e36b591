"""Kills, full disks and lost processes, many of them: no row lost or doubled, no folder unreadable, no false status.

    python benchmarks/kills.py --keep FILE --cases 1000 [--verbs bench study report cache run] [--only bench 17]

Case N of a verb is the same in every run. Outcomes are appended to KEEP; a second call continues behind the last one.
The exit code is 1 if any case broke a rule. docs/security.md has the counts of a whole run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
SHARES = {"bench": 0.33, "study": 0.2, "report": 0.2, "cache": 0.2, "run": 0.07}


def main() -> int:
    import fault_campaign as faults

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, default=Path("kills.jsonl"))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--verbs", nargs="+", choices=faults.VERBS, default=faults.VERBS)
    parser.add_argument("--only", nargs=2, metavar=("VERB", "N"))
    arguments = parser.parse_args()
    faults.preload(arguments.verbs if not arguments.only else arguments.only[:1])
    if arguments.only:
        print(*faults.check_case(arguments.only[0], int(arguments.only[1])), sep="\n")
        return 0
    done = [json.loads(line) for line in arguments.keep.read_text().splitlines()] if arguments.keep.exists() else []
    known = {(case["verb"], case["number"]) for case in done}
    with arguments.keep.open("a") as kept:
        for verb in arguments.verbs:
            for number in range(round(arguments.cases * SHARES[verb])):
                if (verb, number) in known:
                    continue
                began = time.monotonic()
                fault, code, broken = faults.check_case(verb, number)
                case = {"verb": verb, "number": number, "fault": fault.kind, "where": fault.where, "code": code}
                done.append({**case, "broken": broken, "seconds": round(time.monotonic() - began, 2)})
                print(json.dumps(done[-1]), file=kept, flush=True)
    for verb in arguments.verbs:
        cases = [case for case in done if case["verb"] == verb]
        kinds = ", ".join(f"{num} {kind}" for kind, num in sorted(Counter(case["fault"] for case in cases).items()))
        struck = sum(case["code"] != faults.FINE for case in cases)
        num_broken = sum(bool(case["broken"]) for case in cases)
        print(f"{verb}: {len(cases)} faults ({kinds}), {struck} ended the work, {num_broken} broken")
    broken = [case for case in done if case["broken"]]
    for case in broken[:20]:
        print(case["verb"], case["number"], case["fault"], case["where"], *case["broken"], sep="\n  ")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
