"""Installs the wheel and the sdist into empty environments, uses them there, and prints a table of what works.

python scripts/install_matrix.py [--python PATH]... [--torch VERSION]... [--dist FOLDER]

Each Python (default: this one) gets both archives without torch, which must read, and for each torch one environment
with everything and one with only torch beside Stepscope, which must record. A torch that would bring CUDA libraries
is not downloaded: its row says so. Without --dist the archives are built and checked first. Needs a network. Exits
with 1 if anything failed.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

from release_check import TOOLS, USES, Failed, build, environment, run

SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(40):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RECORD = (("run", "-o", "runs/tiny", "train.py"), ("show", "runs/tiny"))
USE = (
    *RECORD,
    ("analyze", "runs/tiny"),
    ("diagnose", "runs/tiny"),
    ("report", "runs/tiny"),
    ("demo", "--no-open"),
)
SIZES = """
import importlib.metadata, json
print(json.dumps({
    each.name: sum(path.stat().st_size for file in each.files or () if (path := each.locate_file(file)).is_file())
    for each in importlib.metadata.distributions()
}))
"""
PIP = ("-m", "pip", "install", "--disable-pip-version-check")


def sizes(python: Path) -> dict[str, float]:
    """Return the installed MB of each package, with its bytecode."""
    found = json.loads(run(python, "-c", SIZES))
    return {name: size / 1e6 for name, size in found.items() if name not in ("pip", "setuptools")}


def cuda_of(python: Path, *packages: object) -> list[str]:
    """Return the packages of CUDA that installing these would bring; Failed if there is nothing to install."""
    report = run(python, *PIP, "--quiet", "--dry-run", "--report", "-", *packages)
    names = [each["metadata"]["name"] for each in json.loads(report)["install"]]
    return [name for name in names if name.startswith(("nvidia", "cuda"))]


def use(python: Path, words: tuple[tuple[str, ...], ...], folder: Path, cwd: Path | None = None) -> str:
    """Run these verbs. Return how many worked; Failed at the first that does not."""
    for each in words:
        options = {"cwd": cwd} if cwd else {}
        run(python.with_name("stepscope"), *(word.format(folder=folder) for word in each), **options)
    return f"{len(words)} commands"


def reads(base: str, archive: Path, folder: Path) -> tuple[str, dict[str, float]]:
    """Install an archive alone, and read stored recordings, sweeps and traces."""
    python = environment(folder, archive, python=base)
    return use(python, USES, folder), sizes(python)


def records(base: str, wheel: Path, torch: str, folder: Path, alone: bool) -> tuple[str, dict[str, float]]:
    """Install torch and the wheel, with its dependencies or `alone`; measure a script and read its recording."""
    python = environment(folder, python=base)
    if found := cuda_of(python, f"torch=={torch}", "numpy"):
        return f"not run: pip brings {len(found)} CUDA packages ({found[0]}, …)", {}
    run(python, *PIP, "--quiet", f"torch=={torch}", "numpy")
    run(python, *PIP, "--quiet", *(["--no-deps"] if alone else []), wheel)
    (folder / "train.py").write_text(SCRIPT)
    done = use(python, RECORD if alone else USE, folder, folder)
    return (done if alone else f"{done}; {use(python, USES, folder)} on older files"), sizes(python)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PATH", help="an interpreter (default: this one)")
    parser.add_argument("--torch", action="append", default=[], metavar="VERSION", help="such as 2.13.0+cpu")
    parser.add_argument("--dist", type=Path, help="folder with a wheel and an sdist")
    asked = parser.parse_args()
    rows, failed, installed = [], 0, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist = asked.dist or folder / "dist"
        if not asked.dist:
            tools = environment(folder / "tools", *TOOLS)
            wheel = build(tools, dist)
            run(tools, "-m", "twine", "check", "--strict", *dist.iterdir())
            run(tools, "-m", "check_wheel_contents", wheel)
            print("wheel and sdist: built; twine and check-wheel-contents pass", file=sys.stderr, flush=True)
        (wheel,), (sdist,) = dist.resolve().glob("*.whl"), dist.resolve().glob("*.tar.gz")
        for base in asked.python or [sys.executable]:
            version = run(base, "-c", "import platform; print(platform.python_version(), platform.machine())").strip()
            cases = [("none", "wheel", reads, (wheel,)), ("none", "sdist", reads, (sdist,))]
            for torch in asked.torch:
                cases.append((torch, "wheel", records, (wheel, torch)))
                cases.append((torch, "wheel, nothing else", records, (wheel, torch)))
            for number, (torch, what, function, words) in enumerate(cases):
                place = folder / f"{len(rows)}-{number}"
                options = {"alone": "else" in what} if function is records else {}
                try:
                    result, size = function(base, *words, place, **options)  # type: ignore[operator]
                except (Failed, OSError, ValueError) as error:
                    result, size, failed = f"FAILED: {error}", {}, failed + 1
                total = f"{sum(size.values()):,.0f} MB" if size else ""
                rows.append(f"| {version} | {torch} | {what} | {result} | {total} |")
                print(rows[-1], file=sys.stderr, flush=True)
                installed = installed or size
    print(f"On {platform.platform()}:\n\n| Python | torch | installed | what ran | size |\n|---|---|---|---|---:|")
    print("\n".join(rows))
    print("\n| package | installed |\n|---|---:|")
    for name, size in sorted(installed.items(), key=lambda each: -each[1]):
        print(f"| {name} | {size:.1f} MB |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
