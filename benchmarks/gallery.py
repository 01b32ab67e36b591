"""Measures ten public models for seconds each, and writes the page docs/gallery.md from their recordings.

    python benchmarks/gallery.py OUT               record all: under 280 s on one H200; torch and transformers only
    python benchmarks/gallery.py OUT --only t5     record one
    python benchmarks/gallery.py OUT --tiny        small sizes, for a CPU
    python benchmarks/gallery.py OUT --read docs/gallery.md     the page, on a machine without torch

Recording writes OUT/gallery.tar, to which each model is added as it ends, and OUT/summary.json. A model that fails or
takes too long does not stop the others: the page says what happened. Weights are random and data is made up, so
nothing is downloaded.
"""

import argparse
import ast
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
    head, sections, device = [], [], ""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(out / "gallery.tar") as tar:
            tar.extractall(folder, filter="data")
        for name in SCRIPTS:
            if name not in summary:
                continue
            problem = summary[name]["problem"]
            try:
                card = read("show", Path(folder) / name)
                found = read("diagnose", Path(folder) / name)
            except ValueError as error:
                sections.append(f"## {name}\n\n{about(name)}\n\nNot measured: {problem or error}.\n")
                continue
            device = device or conditions(card)
            head.append(line(name, card, found))
            sections.append(section(name, card, found, problem))
    return INTRODUCTION.format(device=device, rows="\n".join(head)) + "\n" + "\n".join(sections)


def read(verb: str, recording: Path) -> dict[str, Any]:
    """Return what a verb says about a recording as JSON; ValueError if it fails."""
    words = [sys.executable, "-m", "stepscope", verb, str(recording), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src"), **os.environ})
    if done.returncode:
        raise ValueError(done.stderr.strip())
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def about(name: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / "benchmarks" / SCRIPTS[name]).read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0]


def conditions(card: dict[str, Any]) -> str:
    environment = card["environment"]
    return f"{environment['device_name']}, torch {environment['torch']}, Python {environment['python']}"


def milliseconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} ms" if value < 100 else f"{value:,.0f} ms"


def percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}".replace("%", " %")


def saving(finding: dict[str, Any]) -> str:
    if finding["saving_ms"] is None:
        return f"{finding['saving_bytes'] / 2**30:.2f} GiB" if finding["saving_bytes"] else ""
    if finding["saving_low_ms"] is None:
        return f"{'up to ' if finding['upper_bound'] else ''}{milliseconds(finding['saving_ms'])}"
    low, high = milliseconds(finding["saving_low_ms"]), milliseconds(finding["saving_high_ms"])
    return f"{low} to {high} (expected: {milliseconds(finding['saving_ms'])})"


def line(name: str, card: dict[str, Any], found: dict[str, Any]) -> str:
    rate, mfu, ledger = card["throughput"], card["mfu"], found["ledger"]
    causes = [each["id"] for each in found["findings"] if each["id"] != "unclaimed_time"]
    cells = [
        f"[{name}](#{name})",
        milliseconds(found["step_ms"]),
        f"{rate['per_s']:,.0f} {rate['unit']}/s" if rate else "unknown",
        percent(mfu and mfu["share"]),
        percent(ledger and ledger["limit_share"]),
        percent(ledger and sum(each["share"] for each in ledger["rows"] if each["kind"] == "unknown")),
        link(causes[0]) if causes else "none",
    ]
    return f"| {' | '.join(cells)} |"


def section(name: str, card: dict[str, Any], found: dict[str, Any], problem: str | None) -> str:
    parts = [f"## {name}", about(name), card["verdict"]]
    if problem:
        parts.append(f"The run did not end by itself ({problem.splitlines()[0]}): these are its steps until then.")
    if found["ledger"]:
        parts.append(ledger_table(found["ledger"]))
    unclaimed = milliseconds(found["unclaimed_ms"])
    parts.append(f"{found['binds']} No finding explains {unclaimed} of the losses.")
    rows = [f"| {link(each['id'])} | {saving(each)} | {cell(each['sentence'])} |" for each in found["findings"]]
    parts.append(
        "\n".join(["| finding | saves per step | why |", "|---|---|---|", *rows]) if rows else "No findings."
    )
    parts.append(f"Again: `{' '.join(command(name, f'runs/{name}'))}`, then `stepscope diagnose runs/{name}`.")
    return "\n\n".join(parts) + "\n"


def link(rule: str) -> str:
    return f"[{rule}](findings/{rule}.md)"


def ledger_table(ledger: dict[str, Any]) -> str:
    """Return the rows of a ledger, the limit first; small ones of a kind are one row."""
    sys.path.insert(0, str(ROOT / "src"))
    from stepscope.document.ledger import NAMES  # needs Polars, which recording does without

    lines = ["| owner | per step | share | what it is |", "|---|---:|---:|---|"]
    for kind in ("limit", "work", "rates", "loss", "unknown"):
        rows = sorted((each for each in ledger["rows"] if each["kind"] == kind), key=lambda each: -each["ms"])
        large = [each for each in rows if abs(each["share"]) >= SMALL]
        rest = [sum(each[key] for each in rows if each not in large) for key in ("ms", "share")]
        for each in large:
            owner, what = NAMES[each["id"]], cell(each["what"])
            lines.append(f"| {owner} | {milliseconds(each['ms'])} | {percent(each['share'])} | {what} |")
        if rest[1] >= SMALL / 5:
            title = "smaller losses" if kind == "loss" else f"smaller rows of {kind}"
            lines.append(f"| {title} | {milliseconds(rest[0])} | {percent(rest[1])} | |")
    lines.append(f"| **the step** | {milliseconds(ledger['step_ms'])} | 100 % | |")
    return "\n".join(lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


INTRODUCTION = """# Gallery

Ten public models, each trained for some seconds by a short script, as people train them, under `stepscope run`.
Weights are random and data is made up, so nothing is downloaded. Measured on: {device}.

*Limit* is the share of a step that its work needs at the device's peak rates. *Unexplained* is the share without an
owner. A table for each model splits its step without remainder: [the ledger](diagnose.md#the-ledger).

| model | step | throughput | MFU | limit | unexplained | largest finding |
|---|---:|---:|---:|---:|---:|---|
{rows}

All of them again, in a checkout and with transformers installed: `python benchmarks/gallery.py OUT`. This page from
the recordings: `python benchmarks/gallery.py OUT --read docs/gallery.md`.
"""


if __name__ == "__main__":
    sys.exit(main())
