"""Options that verbs share: values as people type them, what to read of a path, the points of a workload."""

from __future__ import annotations

import argparse
import atexit
import gc
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.api.reading import spread_over
from stepscope.cli.support.answers import files_in
from stepscope.cli.support.output import Progress
from stepscope.session import Session, open_session

if TYPE_CHECKING:
    from stepscope.sweep.engines.start import Where
    from stepscope.sweep.grid import Axes, Point
    from stepscope.sweep.results import Place
    from stepscope.workloads.workload import Workload


def positive(text: str) -> int:
    """Return a positive integer.

    >>> positive("8")
    8
    """
    return int(_above_zero(text, int, "integer"))


def seconds(text: str) -> float:
    """Return a positive number, such as seconds or minutes.

    >>> seconds("1.5")
    1.5
    """
    return _above_zero(text, float, "number")


def _above_zero(text: str, kind: type[int] | type[float], noun: str) -> float:
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive {noun}")
    return number


def chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the options that an API function calls by the same names."""
    return {name: getattr(arguments, name) for name in names}


def add_price_argument(parser: argparse.ArgumentParser) -> None:
    about = "price of the whole job per hour, in any currency"
    parser.add_argument("--price-per-hour", type=seconds, metavar="PRICE", help=about)


def share(text: str) -> float:
    """Return a percentage as a share.

    >>> share("2%")
    0.02
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be a percentage, such as 2%")
    return float(found.group(1)) / 100


def words(texts: Iterable[str]) -> list[str]:
    """Return the values of an option that may be repeated or separated by commas.

    >>> words(["device,dtype", "ranks"])
    ['device', 'dtype', 'ranks']
    """
    return [word.strip() for text in texts for word in text.split(",") if word.strip()]


# Flags for the knobs that are set most; each is also a key of --set.
RUN_FLAGS = {
    "mode": "inference, forward, forward+backward, step",
    "dtype": "fp32, tf32, bf16, fp16, autocast_bf16, autocast_fp16",
    "compile": "off, default, reduce-overhead, max-autotune …",
    "sdpa": "attention backend: free (any), flash, efficient, math, cudnn",
    "optimizer": "adamw, fused, handwritten, sgd",
    "bf16-reduction": "reduced-precision bf16 reductions: auto, on, off",
    "warmup": "warm-up passes before the first sample (default 3)",
    "steps": "number of samples (default 10)",
    "seed": "seed for weights and data (default 0)",
    "device": "cpu, cuda (default: cuda if available)",
}


def add_point_arguments(parser: argparse.ArgumentParser, about: str, flags: Iterable[str]) -> None:
    """Add WORKLOAD, --preset, --set and some of RUN_FLAGS."""
    add = parser.add_argument
    add("workload", metavar="WORKLOAD", help=about)
    add("--preset", metavar="A,B", help="presets of the workload")
    add("--set", action="append", default=[], metavar="KEY=V1,V2", help="values for a knob, such as seq_len")
    for name in flags:
        add(f"--{name}", metavar="V1,V2", help=RUN_FLAGS[name])


def add_sweep_arguments(parser: argparse.ArgumentParser, timeout_s: float | None = 600.0) -> None:
    """Add the options of every verb that writes rows to a folder."""
    add, default = parser.add_argument, "see docs/tune.md" if timeout_s is None else f"{timeout_s:g}"
    limit = f"time limit per point in seconds (default: {default})"
    add("--timeout", type=seconds, default=timeout_s, metavar="S", help=limit)
    add("--start", choices=("fork", "spawn"), help="how to start processes (default: fork)")
    add_engine_arguments(parser)
    add("-o", "--output", type=Path, metavar="DIR", help="folder for the results (default: runs/…)")
    add("--resume", action="store_true", help="continue an interrupted run")
    add("--json", action="store_true", help="print JSON instead of text")
    add("--quiet", action="store_true", help="suppress progress output")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add where points run: docs/engines.md."""
    from stepscope.sweep.engines.settings import ENGINES, LOCAL

    add = parser.add_argument
    add("--on", choices=ENGINES, default=LOCAL, help="where points run (default: local)")
    add("--gpus-per-point", type=int, metavar="N", help="GPUs per point on an engine (default: 1 with CUDA)")


def typed_engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return `on` and `engine`, the latter with the settings of `[tool.stepscope.engine]`."""
    from stepscope.cli.support.settings import engine_settings
    from stepscope.sweep.engines.settings import LOCAL

    settings = engine_settings() if arguments.on != LOCAL else {}
    if arguments.gpus_per_point is not None:
        settings["gpus_per_point"] = arguments.gpus_per_point
    return {"on": arguments.on, "engine": settings}


def typed_where(arguments: argparse.Namespace, start: str | None = None) -> Where:
    """Return where points run."""
    from stepscope.sweep.engines.start import where_of

    return where_of(**typed_engine(arguments), start=start)


def typed_axes(arguments: argparse.Namespace, flags: Iterable[str]) -> Axes:
    """Return what was typed after --preset, --set and those flags, as axes of a grid."""
    from stepscope.sweep.grid import Grid, listed

    names = [name.replace("-", "_") for name in flags]
    typed = {name: text for name, text in chosen(arguments, "preset", *names).items() if text is not None}
    preset = [f"preset={typed.pop('preset')}"] if "preset" in typed else []
    return listed(Grid.words([*preset, *arguments.set, *(f"{name}={values}" for name, values in typed.items())]))


def typed_points(
    arguments: argparse.Namespace, flags: Iterable[str], **defaults: Any
) -> tuple[Workload[Any], list[Point]]:
    """Return the workload that was typed, and the points of its axes."""
    from stepscope.sweep.grid import find_workload, grid_points

    workload = find_workload(arguments.workload)
    return workload, grid_points(workload, typed_axes(arguments, flags), **defaults)


def place_of(arguments: argparse.Namespace, verb: str, subject: str) -> Place:
    """Return where the rows go, with the command that was typed and the one that continues it."""
    from stepscope.sweep.results import Place, default_folder

    folder = arguments.output or default_folder(verb, subject)
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if "-o" not in words and not any(word.startswith(("--output", "-o")) for word in words):
        words += ["-o", str(folder)]
    return Place(
        folder=folder,
        command=shlex.join(["stepscope", *sys.argv[1:]]),
        resume=arguments.resume,
        resume_command=shlex.join(["stepscope", *words, "--resume"]),
    )


def add_source_arguments(parser: argparse.ArgumentParser, rank: str = "rank to read (default: the first)") -> None:
    parser.add_argument("--rank", type=int, metavar="R", help=rank)
    parser.add_argument("--no-cache", action="store_true", help="do not read or write the cache")


def add_spread_argument(parser: argparse.ArgumentParser) -> None:
    """Add where ranks are read: docs/scale.md."""
    about = "where ranks are read (default: local)"
    parser.add_argument("--on", choices=("local", "ray"), default="local", help=about)


SMALL_BYTES = 4 << 20  # compressed; a trace takes about a sixteenth of its JSON


def keep_queries_in_one_thread(path: Path) -> None:
    """Let Polars have one thread if a path is small: handing over 2,000 small queries takes longer than running them.

    Call it before Polars is imported.
    """
    num_bytes = 0
    for file in files_in(path) if path.is_dir() else [str(path)]:
        with suppress(OSError):  # it was removed meanwhile
            num_bytes += Path(file).stat().st_size // (1 if file.endswith(".gz") else 16)
        if num_bytes > SMALL_BYTES:
            return
    os.environ.setdefault("POLARS_MAX_THREADS", "1")


@contextmanager
def opened(arguments: argparse.Namespace, path: Path | Sequence[Path] | None) -> Iterator[Session]:
    """Open a path as the options say; while the block reads it, the terminal shows the progress."""
    gc.disable()  # hardly any cycles are made, and collections would walk every row: a third of a report's time
    atexit.register(gc.freeze)  # as would the last collections, when Python ends: 80 ms
    with Progress("reading") as progress:
        spread = None
        if getattr(arguments, "on", "local") != "local":
            from stepscope.cli.support.settings import engine_settings

            spread = spread_over(arguments.on, engine_settings(), progress.above(quiet=False))
        yield open_session(
            path, rank=arguments.rank, use_cache=not arguments.no_cache, progress=progress, spread=spread
        )
