"""Opens the engine that `--on` names."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepscope.errors import UsageError
from stepscope.sweep.engines.engine import Engine, ended_by_sigterm
from stepscope.sweep.engines.settings import ENGINES, LOCAL, RAY, Settings, settings_of
from stepscope.sweep.server import Server, default_start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    """Where a sweep runs: the engine's name and settings, and for `local` how processes start."""

    on: str = LOCAL
    settings: Settings = dataclasses.field(default_factory=Settings)
    start: str | None = None

    @contextmanager
    def open(
        self, folder: Path, device: str, say: Callable[[str], None] | None, keeps_node: bool = False
    ) -> Iterator[Server | Engine]:
        """Yield what runs points. Its jobs end with the block, however that ends."""
        if self.on == LOCAL:
            with Server(self.start or default_start()) as server:
                yield server
            return
        settings = self.settings
        if settings.gpus_per_point is None:
            settings = dataclasses.replace(settings, gpus_per_point=int(device == "cuda"))
        if self.on == RAY:
            from stepscope.sweep.engines.ray_tasks import RayEngine as Chosen
        else:
            from stepscope.sweep.engines.slurm_jobs import SlurmEngine as Chosen  # type: ignore[assignment]  # either
        said = say or (lambda line: None)
        # Ray has a handler of its own for SIGTERM; ours comes after it.
        with Chosen(settings, folder.absolute(), said, keeps_node) as engine, ended_by_sigterm():
            try:
                yield engine
            finally:
                engine.stop()


def where_of(on: str, engine: Mapping[str, Any] | None, start: str | None = None) -> Where:
    """Return where to run from the arguments of a function; UsageError for unknown ones."""
    if on not in ENGINES:
        raise UsageError(f"on={on!r}: choose {', '.join(ENGINES)}")
    if start is not None and on != LOCAL:
        raise UsageError("start is for points on this machine: leave it out with an engine")
    return Where(on=on, settings=settings_of(engine or {}), start=start)


def spread_over(
    on: str, engine: Mapping[str, Any] | None, say: Callable[[str], None] | None = None
) -> Callable[..., Iterator[Any]] | None:
    """Return what calls a function on a cluster's nodes (`Engine.map`), opened when it is used; None for local."""
    if on not in (LOCAL, RAY):  # a job of Slurm takes longer to start than to read a rank
        raise UsageError(f"on={on!r}: choose {LOCAL} or {RAY}")
    where = where_of(on, engine)

    def spread(*task: Any) -> Iterator[Any]:
        with where.open(Path.cwd(), "cpu", say) as opened:
            assert isinstance(opened, Engine)
            yield from opened.map(*task)

    return None if on == LOCAL else spread
