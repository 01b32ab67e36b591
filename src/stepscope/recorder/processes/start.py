"""The start of a child process: waits for torch, and passes the recording on to the children of this one.

Loads nothing else of Stepscope before torch is imported.
"""

import sys

from stepscope.recorder.processes.imports import AfterImport
from stepscope.recorder.processes.inherit import pass_on

_waiting: list[AfterImport] = []


def start(options: str) -> None:
    """Measure this process if it trains; `options` is `Options.to_json()` of the process that was started first."""

    def torch_is_here() -> None:
        try:
            from stepscope.recorder.processes.child import begin
            from stepscope.recorder.processes.options import Options

            begin(Options.from_json(options))
        except Exception:
            pass  # it must not become an error of the script's `import torch`

    pass_on(options)
    if "torch" in sys.modules:
        torch_is_here()
    else:
        _waiting.append(AfterImport("torch", after=torch_is_here))


def cancel() -> None:
    """Leave this process alone: it is a `stepscope run` of its own, started under another one."""
    for finder in list(sys.meta_path):
        if finder in _waiting or type(finder).__module__ == "sitecustomize":
            sys.meta_path.remove(finder)
    if (child := sys.modules.get("stepscope.recorder.processes.child")) is not None:
        child.cancel()
