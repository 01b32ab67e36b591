"""Runs code around the first import of a module. Imports nothing, because every child process loads it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # as in `typing`, which takes milliseconds to import
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def _guarded(function: Callable[..., None], *args: object) -> None:
    """Call a function of ours inside an import of the script's."""
    try:
        function(*args)
    except Exception as error:
        from stepscope.recorder.wall import failed

        failed(error)


class AfterImport:
    """Calls a function after the first import of each of some modules, and `before` ahead of it; then removes itself.

    Looking for a module without importing it (`importlib.util.find_spec`) changes nothing. Some packages do that in
    every step, and Python asks each finder: one for many modules costs less than one for each.
    """

    def __init__(self, after: Mapping[str, Callable[[], None]], before: Callable[[], None] | None = None) -> None:
        self._after, self._before = dict(after), before
        if self._after:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the finders after this one find, with a loader that reports the import."""
        if fullname not in self._after or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                _guarded(self._watch, fullname, spec.loader)
                return spec
        return None

    def _watch(self, name: str, loader: object) -> None:
        load = getattr(loader, "exec_module", None)
        if load is None or isinstance(loader, type) or getattr(load, "watcher", None) is self:
            return  # a loader that all modules share, or one that was looked up before
        is_own = "exec_module" in vars(loader)

        def exec_module(module: ModuleType) -> None:
            if is_own:
                loader.exec_module = load  # type: ignore[attr-defined]  # an instance may have its own
            else:
                vars(loader).pop("exec_module", None)
            is_first = name in self._after and self in sys.meta_path
            if is_first and self._before is not None:
                _guarded(self._before)
            load(module)
            if is_first:
                after = self._after.pop(name)
                if not self._after:
                    self.remove()
                _guarded(after)

        exec_module.watcher = self  # type: ignore[attr-defined]  # a function takes any attribute
        loader.exec_module = exec_module  # type: ignore[attr-defined]  # an instance may have its own

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
