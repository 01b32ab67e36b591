"""Options that choose what is read of a path, and the session that they open."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stepscope.cli.support.progress import Progress
from stepscope.session import Session, open_session


def add_source_arguments(parser: argparse.ArgumentParser, rank: str = "rank to read (default: the first)") -> None:
    parser.add_argument("--rank", type=int, metavar="R", help=rank)
    parser.add_argument("--no-cache", action="store_true", help="do not read or write the cache")


@contextmanager
def opened(arguments: argparse.Namespace, path: Path | Sequence[Path] | None) -> Iterator[Session]:
    """Open a path as the options say; while the block reads it, the terminal shows the progress."""
    with Progress("reading") as progress:
        yield open_session(path, rank=arguments.rank, use_cache=not arguments.no_cache, progress=progress)
