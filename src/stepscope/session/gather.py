"""Collects the recordings of a job's ranks, from folders that hosts wrote on their own disks, into one recording."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import RecordingError, StepscopeError, UsageError
from stepscope.session.history import host_of
from stepscope.trace.recording import RECORDING_FILE, SAMPLES_FILE, read_facts
from stepscope.trace.recording_facts import RecordingFacts

_NO_JOB = ("TORCHELASTIC_RUN_ID=none",)  # what torchrun sets if nobody chose an id
_COPY = ".gathering-"


@dataclass(frozen=True)
class Part:
    """The recording of one rank, in one of the folders."""

    rank: int
    folder: Path
    facts: RecordingFacts

    @property
    def identity(self) -> tuple[Any, ...]:
        """What two copies of one recording have in common."""
        return self.facts.get("started_at"), self.facts.get("pid"), host_of(self.folder)

    @property
    def progress(self) -> tuple[int, bool]:
        """How far it is: a later copy of a run that went on has more steps, or has ended."""
        path = self.folder / SAMPLES_FILE
        return path.stat().st_size if path.is_file() else 0, self.facts.get("status") != "interrupted"


@dataclass(frozen=True)
class Gathered:
    folder: Path
    ranks: tuple[int, ...]
    missing: tuple[int, ...]  # ranks of the job that are in no folder; the first 100
    copied: tuple[int, ...]  # ranks that were not there yet, or had changed
    hosts: tuple[str, ...]


def gather(sources: Sequence[Path], output: Path) -> Gathered:
    """Return what was gathered into `output`, which may be one of the sources. It is safe to repeat.

    A rank is copied under another name and then renamed, so that an interrupted copy leaves no half recording.
    """
    found: dict[int, Part] = {}
    here = {part.rank: part for part in _parts(output)} if output.is_dir() else {}
    if output.is_dir() and not here and any(output.iterdir()):
        raise UsageError(f"{output} is not empty and holds no recording: name another folder")
    for source in sources:
        parts = list(_parts(source)) if source.is_dir() else []
        if not parts:
            raise UsageError(
                f"{source} holds no recording: name the folder that `stepscope run -o` wrote on each host"
            )
        for part in parts:
            _add(found, part)
    for part in here.values():
        _add(found, part)
    _refuse_other_jobs(list(found.values()))
    copied = []
    first = min(found)
    for rank, part in here.items():
        if part.folder == output and rank != first:  # another rank was the first until now
            _move(output, output / f"rank{rank}")
            if found[rank] is part:
                found[rank] = Part(rank, output / f"rank{rank}", part.facts)
    for rank, part in sorted(found.items()):
        target = output if rank == first else output / f"rank{rank}"
        if part.folder.resolve() != target.resolve():
            _copy(part.folder, target)
            copied.append(rank)
    world = max(first + 1, *(part.facts.get("environment", {}).get("world_size", 0) for part in found.values()))
    missing = [rank for rank in range(min(world, 1 << 20)) if rank not in found][:100]
    hosts = sorted({host for part in found.values() if (host := host_of(part.folder))})
    return Gathered(output, tuple(sorted(found)), tuple(missing), tuple(copied), tuple(hosts))


def _parts(folder: Path) -> Iterator[Part]:
    """Yield the recordings in a folder: its own, and those of further ranks. Links are not followed."""
    for each in (folder, *sorted(folder.glob("rank*"))):
        if each.is_symlink() and each != folder:
            continue
        try:
            facts = read_facts(each, [])
        except RecordingError:
            continue
        name = each.name.removeprefix("rank")
        is_named = each != folder and name.isdecimal()
        yield Part(int(name) if is_named else facts.get("environment", {}).get("rank", 0), each, facts)


def _add(found: dict[int, Part], part: Part) -> None:
    other = found.get(part.rank)
    if other is not None and other.folder.resolve() != part.folder.resolve():
        if other.identity != part.identity:
            raise UsageError(
                f"{other.folder} and {part.folder} are different recordings of rank {part.rank}: name the folders of "
                "one run"
            )
        if part.progress < other.progress:  # of equal ones the later: what is in place already comes last
            return
    found[part.rank] = part


def _refuse_other_jobs(parts: list[Part]) -> None:
    for name, what in (("job", "jobs"), ("config_hash", "commands or options")):
        values = {part.facts.get(name): part.folder for part in parts if part.facts.get(name) not in (None, *_NO_JOB)}
        if len(values) > 1:
            one, other = list(values.values())[:2]
            raise UsageError(f"{one} and {other} are of different {what}: gather the folders of one run")


def _copy(source: Path, target: Path) -> None:
    """Copy one rank's files and no links; the target has the old files or the new ones."""
    copy = target.parent / f"{_COPY}{target.name}"
    try:
        shutil.rmtree(copy, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy, ignore=_others, symlinks=True)
        _move(copy, target)
        shutil.rmtree(copy)
    except OSError as error:
        shutil.rmtree(copy, ignore_errors=True)
        raise StepscopeError(f"{source} could not be copied to {target}: {error.strerror or error}") from None


def _others(folder: str, names: list[str]) -> list[str]:
    """Return what is not copied: other ranks and processes, links, and what is neither a file nor a folder."""
    return [
        name
        for name in names
        if (path := Path(folder, name)).is_symlink() or not (path.is_file() or path.is_dir()) or _is_of_another(path)
    ]


def _is_of_another(path: Path) -> bool:
    """Return whether a folder in a recording is of another rank or process; its windows belong to it."""
    return path.is_dir() and re.fullmatch(r"rank\d+|process\d+(-\d+)?", path.name) is not None


def _move(source: Path, target: Path) -> None:
    """Move a rank's files into place; recording.json last, which makes a folder a recording."""
    entries = [entry for entry in source.iterdir() if not _is_of_another(entry) and not entry.name.startswith(_COPY)]
    target.mkdir(exist_ok=True)
    for entry in sorted(entries, key=lambda each: each.name == RECORDING_FILE):
        place = target / entry.name
        if place.is_dir():
            shutil.rmtree(place)
        entry.replace(place)
