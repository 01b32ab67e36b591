"""Runs the release checklist: everything that must hold before a tag, in order, and stops at nothing.

python scripts/release_check.py --set VERSION
python scripts/release_check.py [--torch] [VERSION]

The first writes the version into the code and CITATION.cff, and makes its section of the changelog out of what is
unreleased. The second checks the version, its changelog section and the package's addresses, builds the wheel and the
sdist, checks them with twine and check-wheel-contents, installs the wheel into an empty environment and uses it, and
builds the documentation. With VERSION, the version in the code must be that one. With --torch, the installed wheel
also measures a script, with the CPU build of torch from constraints.txt. Needs a network: build, twine and
check-wheel-contents are installed into an environment of their own. Exits with 1 if anything failed.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("build", "twine", "check-wheel-contents", "setuptools>=68", "wheel")
MAX_INSTALLED_MB = 120
URLS = ("Documentation", "Source", "Issues", "Changelog")
# A wheel's common verbs, on files that are in the repository.
USES = (
    ("--version",),
    ("doctor",),
    ("list", "rules"),
    ("show", "tests/compatibility/recording-1"),
    ("diagnose", "tests/compatibility/recording-1"),
    ("analyze", "tests/traces/full_logits.slow.json.gz", "--json"),
    ("report", "tests/compatibility/recording-1", "-o", "{folder}/page.html"),
    ("show", "tests/compatibility/sweep-1"),
)


class Failed(Exception):
    """A check that failed; the message says why."""


def run(*words: object, **options: object) -> str:
    """Return what a command prints; Failed with its last lines."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        **{"cwd": ROOT, "env": environment, **options},  # type: ignore[call-overload]
    )
    if done.returncode:
        raise Failed(f"{' '.join(str(word) for word in words[1:6])}: {(done.stdout + done.stderr)[-1500:].strip()}")
    return str(done.stdout)


def environment(folder: Path, *packages: object, python: object = sys.executable) -> Path:
    """Make an environment with these packages. Return its Python."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    if packages:
        run(inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
    return inside


def set_version(number: str, date: str) -> None:
    """Write a version, and the date of its release, wherever they stand."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", number):
        raise Failed(f"{number} is not a version of three numbers")
    for name, pattern, text in (
        ("src/stepscope/version.py", r'^__version__ = ".*"$', f'__version__ = "{number}"'),
        ("CHANGELOG.md", "^## Unreleased$", f"## Unreleased\n\n## {number} ({date})"),
        ("CITATION.cff", r"(^(version|date-released): .*\n)*\Z", f"version: {number}\ndate-released: {date}\n"),
    ):
        old = (ROOT / name).read_text(encoding="utf-8")
        new, num = re.subn(pattern, text, old, count=1, flags=re.MULTILINE)
        if not num:
            raise Failed(f"{name} has no line {pattern}")
        (ROOT / name).write_text(new, encoding="utf-8")


def version(wanted: str | None) -> str:
    found = re.search(r'__version__ = "([^"]+)"', (ROOT / "src/stepscope/version.py").read_text())
    if found is None or not re.fullmatch(r"\d+\.\d+\.\d+", found[1]):
        raise Failed("src/stepscope/version.py has no version of three numbers")
    if wanted and found[1] != wanted:
        raise Failed(f"the version is {found[1]}, not {wanted}")
    cited = re.search(r"^version: *(\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    if cited and cited[1].strip("\"'") != found[1]:
        raise Failed(f"CITATION.cff says {cited[1]}")
    return found[1]


def changelog(number: str) -> None:
    """The changelog's first section with entries is the one of this version."""
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    titles = [section.splitlines()[0] for section in sections if "\n- " in section]
    if not titles or number not in titles[0]:
        raise Failed(f"the first section with entries is {titles[0] if titles else 'missing'!r}: name it {number}")


def urls() -> None:
    """The package says where it comes from."""
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.urls]")[2].partition("\n[")[0]
    if missing := [name for name in URLS if name not in table]:
        raise Failed(f"[project.urls] of pyproject.toml lacks {', '.join(missing)}")


def build(python: Path, folder: Path) -> Path:
    """Build both archives into `folder`. Return the wheel."""
    run(python, "-m", "build", "--quiet", "--outdir", folder)
    (wheel,), (_,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel


def use(wheel: Path, folder: Path) -> str:
    python = environment(folder / "empty", wheel)
    size = sum(path.stat().st_size for path in (folder / "empty" / "lib").rglob("*") if path.is_file()) / 1e6
    pip = sum(
        path.stat().st_size for path in (folder / "empty" / "lib").glob("*/site-packages/pip/**/*") if path.is_file()
    )
    size -= pip / 1e6
    for words in USES:
        run(python.with_name("stepscope"), *(word.format(folder=folder) for word in words))
    if size > MAX_INSTALLED_MB:
        raise Failed(f"installed it takes {size:.0f} MB, more than {MAX_INSTALLED_MB}")
    return f"{len(USES)} commands, {size:.0f} MB installed"


def measure(wheel: Path, folder: Path) -> str:
    pins = dict(re.findall(r"^(torch|numpy)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    python = environment(folder / "torch", wheel, *(f"{name}=={pin}" for name, pin in pins.items()))
    run(python.with_name("stepscope"), "demo", "--no-open", cwd=folder)
    card = json.loads(run(python.with_name("stepscope"), "show", "runs/demo", "--json", cwd=folder))
    return str(card["verdict"])


def main(arguments: list[str]) -> int:
    failed: list[str] = []

    def check(name: str, function: Callable[[], object]) -> object:
        try:
            found = function()
        except (Failed, OSError, ValueError) as error:
            failed.append(name)
            print(f"FAILED  {name}: {error}", flush=True)
            return None
        print(f"ok      {name}{f': {found}' if found else ''}", flush=True)
        return found

    if arguments[:1] == ["--set"]:
        check("set", lambda: set_version("".join(arguments[1:2]), time.strftime("%Y-%m-%d", time.gmtime())))
        return 1 if failed else 0
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        number = check("version", lambda: version(wanted))
        if number:
            check("changelog", lambda: changelog(str(number)))
        check("project URLs", urls)
        if run("git", "status", "--porcelain"):
            print("note    the working tree has changes that are not committed", flush=True)
        tools = check("tools", lambda: environment(folder / "tools", *TOOLS))
        wheel = tools and check("wheel and sdist", lambda: build(Path(str(tools)), folder / "dist"))
        if wheel:
            made = sorted((folder / "dist").iterdir())
            check("twine", lambda: run(tools, "-m", "twine", "check", "--strict", *made) and None)
            check("check-wheel-contents", lambda: run(tools, "-m", "check_wheel_contents", wheel) and None)
            check("install and use", lambda: use(Path(str(wheel)), folder))
            if "--torch" in arguments:
                check("measure", lambda: measure(Path(str(wheel)), folder))
        site = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder / "site"]
        check("documentation", lambda: run(*site) and None)
        check(
            "generated tables",
            lambda: run(sys.executable, "scripts/make_docs.py", "--check", env=_with_source()) and None,
        )
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "ready")
    return 1 if failed else 0


def _with_source() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT / "src")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
