"""Python runs this at the start of every Python process that a measured script starts.

It makes the process look as it would without Stepscope, and waits for an import of torch. A process that never does
that loads almost nothing. Written for any Python 3: a script may start another one.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

VARIABLE = "STEPSCOPE_CHILD"
FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
SOURCE_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(FOLDER))))  # noqa: PTH120


class Await:
    """Finds nothing: the first time torch or subprocess is looked for, Stepscope's own finders take its place."""

    def __init__(self, options: str) -> None:
        self.options = options
        self.pending = {"torch", "subprocess"}

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self.pending:
            return None
        self.pending.clear()
        sys.meta_path.remove(self)
        begin(self.options)
        for finder in list(sys.meta_path):
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                return spec
        return None


def begin(options: str) -> None:
    """Load the part of Stepscope that measures a child process; a failure must not become the script's."""
    sys.path.insert(0, SOURCE_FOLDER)
    try:
        from stepscope.recorder.processes.start import start

        start(options)
    except Exception:
        pass
    finally:
        sys.path.remove(SOURCE_FOLDER)


def restore() -> "str | None":
    """Return the options, and take them and this folder out of what the script sees."""
    options = os.environ.pop(VARIABLE, None)
    value = os.environ.get("PYTHONPATH", "")
    paths = [path for path in value.split(os.pathsep) if path != FOLDER]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    sys.path_importer_cache.pop(FOLDER, None)
    if options is not None:  # for this process's own children: os.environ does not show it
        os.putenv(VARIABLE, options)
        os.putenv("PYTHONPATH", value)
    return options


def run_next() -> None:
    """Run the sitecustomize that this one hides, if there is one."""
    own = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


if __name__ == "sitecustomize":
    found = restore()
    if found is not None and "torch" in sys.modules:  # imported by a .pth file
        begin(found)
    elif found is not None:
        sys.meta_path.insert(0, Await(found))
    run_next()
