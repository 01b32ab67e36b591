"""Measures ten public models for seconds each, and writes the page docs/gallery.md from their recordings.

    python benchmarks/gallery.py OUT               record all: under 280 s on one H200; torch and transformers only
    python benchmarks/gallery.py OUT --only t5     record one
    python benchmarks/gallery.py OUT --tiny        small sizes, for a CPU
    python benchmarks/gallery.py OUT --read docs/gallery.md     the page, on a machine without torch

Recording writes OUT/gallery.tar, to which each model is added as it ends, and OUT/summary.json. A model that fails or
takes too long does not stop the others: the page says what happened. A script that has changed since must be recorded
again. Weights are random and data is made up, so
nothing is downloaded.
"""

import argparse
import ast
import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "nanogpt": "improve/nanogpt.py",
    "gpt2": "gallery/gpt2.py",
    "llama": "gallery/llama.py",
    "mixtral": "gallery/mixtral.py",
    "mamba": "gallery/mamba.py",
    "bert": "gallery/bert.py",
    "t5": "gallery/t5.py",
    "whisper": "gallery/whisper.py",
    "vit": "gallery/vit.py",
    "resnet50": "improve/resnet50.py",
}
SECONDS, SECONDS_EACH = 270, 45
MAX_BYTES = 38 << 20
"""Of gallery.tar; the files of a recording that would exceed it are left out, the largest first."""
SMALL = 0.005
"""Rows of a ledger below this share are one row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=list(SCRIPTS), action="append")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--read", type=Path, metavar="PAGE", help="write this page from what OUT holds")
    asked = parser.parse_args()
    if asked.read:
        asked.read.write_text(page(asked.out), encoding="utf-8")
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    path = asked.out / "summary.json"
    summary = json.loads(path.read_text()) if path.is_file() else {}
    deadline = time.monotonic() + (SECONDS if not asked.tiny else 3600)
    with tempfile.TemporaryDirectory() as folder:
        for name in asked.only or SCRIPTS:
            left = min(deadline - time.monotonic(), SECONDS_EACH if not asked.tiny else 600)
            summary[name] = record(name, Path(folder) / name, left, asked.tiny)
            summary[name] |= {"left_out": pack(Path(folder) / name, asked.out / "gallery.tar")}
            path.write_text(json.dumps(summary, indent=1) + "\n")
            print(name, json.dumps(summary[name]), flush=True)
    return 1 if any(each["problem"] for each in summary.values()) else 0


def record(name: str, folder: Path, seconds: float, tiny: bool) -> dict[str, Any]:
    """Run a script under `stepscope run` for at most `seconds`. Return how it went."""
    words = [*command(name, str(folder)), *(["--tiny"] if tiny else [])]
    if seconds < 15:
        return {"seconds": 0.0, "problem": "not run: no time was left"}
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    if tiny:
        environment["OMP_NUM_THREADS"] = "1"  # on a busy machine, threads wait for one another
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=seconds)
        problem = f"exit code {process.returncode}: {said[-1500:]}" if process.returncode else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.communicate()
        problem = f"stopped after {seconds:.0f} s"
    return {"seconds": round(time.monotonic() - begun, 1), "problem": problem}


def command(name: str, folder: str) -> list[str]:
    """Return `stepscope run …` for a script, from the repository's root."""
    return ["stepscope", "run", "--exit-after", "-o", folder, f"benchmarks/{SCRIPTS[name]}"]


def pack(folder: Path, archive: Path) -> list[str]:
    """Append a recording to the archive. Return the files that did not fit."""
    left_out = []
    with tarfile.open(archive, "a") as tar:
        for path in sorted(
            (each for each in folder.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size
        ):
            if tar.offset + path.stat().st_size > MAX_BYTES:
                left_out.append(path.relative_to(folder).as_posix())
            else:
                tar.add(path, path.relative_to(folder.parent))
    return left_out


def page(out: Path) -> str:
    summary = json.loads((out / "summary.json").read_text())
    head, sections, kinds, device = [], [], {}, ""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(out / "gallery.tar") as tar:
            tar.extractall(folder, filter="data")
        for name in SCRIPTS:
            if name not in summary:
                continue
            recording = Path(folder) / name
            if problem := "; ".join(filter(None, (summary[name]["problem"], old_script(name, recording)))):
                sections.append(f"## {name}\n\n{about(name)}\n\nNot measured: {problem}.\n")
                continue
            card, found = read("show", recording), read("diagnose", recording)
            device = device or conditions(card)
            kinds |= {each["id"]: each["what"] for each in found["ledger"]["rows"]}
            head.append(line(name, card, found))
            sections.append(section(name, card, found))
    rows = "\n".join(f"| {names()[row]} | {cell(what)} |" for row, what in kinds.items())
    introduction = INTRODUCTION.format(device=device, rows="\n".join(head))
    return introduction + "\n" + "\n".join(sections) + LEGEND.format(rows=rows)


def old_script(name: str, recording: Path) -> str | None:
    """Return that a recording is of another version of its script, if it is."""
    facts = recording / "recording.json"
    recorded = json.loads(facts.read_text())["command"].get("sha256") if facts.is_file() else None
    now = hashlib.sha256((ROOT / "benchmarks" / SCRIPTS[name]).read_bytes()).hexdigest()
    return "the script has changed since" if recorded not in (None, now) else None


def read(verb: str, recording: Path) -> dict[str, Any]:
    """Return what a verb says about a recording as JSON."""
    words = [sys.executable, "-m", "stepscope", verb, str(recording), "--json"]
    done = subprocess.run(
        words, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src"), **os.environ}
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def about(name: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / SCRIPTS[name]).read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0]


def conditions(card: dict[str, Any]) -> str:
    environment = card["environment"]
    return f"{environment['device_name']}, torch {environment['torch']}, Python {environment['python']}"


def milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:#.3g} ms"


def percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}".replace("%", " %")


def saving(finding: dict[str, Any]) -> str:
    if finding["saving_ms"] is None:
        return f"{finding['saving_bytes'] / 2**30:.2f} GiB of memory" if finding["saving_bytes"] else ""
    if finding["saving_low_ms"] is None:
        return f"{'up to ' if finding['upper_bound'] else ''}{milliseconds(finding['saving_ms'])}"
    low, high = milliseconds(finding["saving_low_ms"]), milliseconds(finding["saving_high_ms"])
    return f"{milliseconds(finding['saving_ms'])} ({low} to {high})"


def causes(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in found["findings"] if each["id"] != "unclaimed_time"]


def line(name: str, card: dict[str, Any], found: dict[str, Any]) -> str:
    rate, mfu, ledger = card["throughput"], card["mfu"], found["ledger"]
    step_ms = ledger["step_ms"]
    largest = sorted((each for each in causes(found) if each["saving_ms"]), key=lambda each: -each["saving_ms"])[:3]
    cells = [
        f"[{name}](#{name})",
        milliseconds(step_ms),
        f"{rate['per_s']:,.0f} {rate['unit']}/s" if rate else "unknown",
        percent(mfu and mfu["share"]),
        percent(ledger["limit_share"]),
        percent(sum(each["share"] for each in ledger["rows"] if each["kind"] == "unknown")),
        ", ".join(f"{link(each['id'])} {each['saving_ms'] / step_ms:.0%}".replace("%", " %") for each in largest),
    ]
    return f"| {' | '.join(cells)} |"


def section(name: str, card: dict[str, Any], found: dict[str, Any]) -> str:
    folder = f"runs/{name}"
    parts = [f"## {name}", about(name), f"{card['verdict']} {found['binds']}"]
    rows = [
        f"| {link(each['id'])} | {saving(each)} | {cell(each['sentence'])} | {cell(each['fix'])} |"
        for each in causes(found)
    ]
    table = ["| finding | expected saving per step (90 % interval) | why | fix |", "|---|---|---|---|", *rows]
    parts += ["\n".join(table) if rows else "No findings.", ledger_table(found["ledger"])]
    if found["unclaimed_ms"]:
        largest = [cell(each["sentence"]) for each in found["findings"] if each["id"] == "unclaimed_time"]
        unclaimed = f"No finding explains {milliseconds(found['unclaimed_ms'])} of these losses."
        parts.append(" ".join([unclaimed, *(["The largest parts:"] if largest else [])]))
        parts += ["\n".join(f"- {each}" for each in largest)] if largest else []
    parts.append(f"To reproduce: `{' '.join(command(name, folder))}`, then `stepscope diagnose {folder}`.")
    return "\n\n".join(parts) + "\n"


def link(rule: str) -> str:
    return f"[{rule}](findings/{rule}.md)"


def names() -> dict[str, str]:
    """Return the names of a ledger's rows."""
    sys.path.insert(0, str(ROOT / "src"))
    from stepscope.document.ledger import NAMES  # needs Polars, which recording does without

    return NAMES


def ledger_table(ledger: dict[str, Any]) -> str:
    """Return the rows of a ledger, the limit first; small ones of a kind are one row."""
    lines = ["| a step's time | per step | share |", "|---|---:|---:|"]
    if abs(sum(each["ms"] for each in ledger["rows"]) - ledger["step_ms"]) > 1e-6 * ledger["step_ms"]:
        raise ValueError(f"The rows of this ledger do not add up to its step: {ledger}")
    for kind in ("limit", "work", "rates", "loss", "unknown"):
        rows = sorted((each for each in ledger["rows"] if each["kind"] == kind), key=lambda each: -each["ms"])
        large = [each for each in rows if abs(each["share"]) >= SMALL]
        rest = [each for each in rows if each not in large]
        shown = [(names()[each["id"]], each["ms"], each["share"]) for each in large]
        if rest:
            title = "smaller losses" if kind == "loss" else f"smaller rows ({kind})"
            shown.append((title, sum(each["ms"] for each in rest), sum(each["share"] for each in rest)))
        lines += [f"| {owner} | {milliseconds(ms)} | {percent(share)} |" for owner, ms, share in shown]
    lines.append(f"| **the step** | {milliseconds(ledger['step_ms'])} | 100 % |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


INTRODUCTION = """# Gallery

What Stepscope finds in public models, each trained for some seconds by a short script, written the way such scripts
usually are. Weights are random and data is made up, so nothing is downloaded: the times are real, the losses mean
nothing. Measured on: {device}.

| model | average step | throughput | MFU | limit | unexplained | largest findings, expected saving |
|---|---:|---:|---:|---:|---:|---|
{rows}

*Limit* is the share of a step that its work needs at the device's peak rates. *Unexplained* is the share whose owner
or least time is unknown. For each model below, one table has the findings, and one splits the average step without
remainder: [the ledger](diagnose.md#the-ledger), whose rows are explained [at the end](#what-the-rows-mean). Findings
overlap, so their savings do not add up: torch.compile, for one, is the fix for several. The host was shared,
so steps in which the GPU waits for it vary from run to run.

These savings are predictions. `stepscope improve` made such changes and measured them on the same GPU:
[nanoGPT 1.24×, a Hugging Face Trainer 2.56×, ResNet-50 3.24×](results/h200/improve/README.md).

Whole investigations, each with its report: the [five studies](studies.md)
[nano](results/h200/study-nano/report/report.md), [megalodon](results/h200/study-megalodon/report/report.md),
[hydra](results/h200/study-hydra/report/report.md), [tsmoe](results/h200/study-tsmoe/report/report.md) and
[cs336](results/h200/study-cs336/report/report.md) ([all results](results/README.md)).

To reproduce all of it, in a checkout with transformers, on a GPU: `python benchmarks/gallery.py OUT` records
all models in 4 minutes, `--only t5` one of them, and `--read docs/gallery.md` writes this page.
"""

LEGEND = """
## What the rows mean

| row | what it is |
|---|---|
{rows}
"""


if __name__ == "__main__":
    sys.exit(main())
