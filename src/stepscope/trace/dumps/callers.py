"""The lines of the user's code in stacks that PyTorch wrote into a dump."""

import re
from typing import Any

MAX_FRAMES = 200  # frames of a stack that are examined
_MOST_TEXT = 200
# Frames of PyTorch, packages and the standard library, which are never the cause.
_NOT_THE_USERS = re.compile(
    r"(?:site|dist)-packages/|/lib/python3|torchinductor_|^<frozen|^<eval_with_key>"
    r"|(?:^|/)torch/(?:_|nn/|optim/|utils/|autograd/|cuda/|amp/|distributed/|fx/|jit/|functional\.py|overrides\.py)"
)


class Callers:
    """Turns lists of frames into text, each once: many entries of a dump share one."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        """By frame identity."""
        self._stacks: dict[int, tuple[str, ...]] = {}
        """By identity of the list of frames."""

    def innermost(self, holder: dict[str, Any]) -> str | None:
        """Return the innermost frame of the user's code, else of Python; None without frames."""
        return next(iter(self.stack(holder)), None)

    def stack(self, holder: dict[str, Any]) -> tuple[str, ...]:
        """Return the frames of the user's code, innermost first; the innermost of Python if there are none."""
        frames = holder.get("frames")
        if id(frames) not in self._stacks:
            self._stacks[id(frames)] = self._stack_of(frames[:MAX_FRAMES] if isinstance(frames, list) else [])
        return self._stacks[id(frames)]

    def _stack_of(self, frames: list[Any]) -> tuple[str, ...]:
        users: list[str] = []
        others: list[str] = []
        for frame in frames:
            name = frame.get("filename") if isinstance(frame, dict) else None
            if not isinstance(name, str) or not (name.endswith(".py") or name.startswith("<")):
                continue  # C++ frames
            is_users = not _NOT_THE_USERS.search(name.replace("\\", "/"))
            (users if is_users else others).append(self._text(frame, name))
        return tuple(users or others[:1])

    def _text(self, frame: dict[str, Any], name: str) -> str:
        if id(frame) not in self._texts:
            file = re.split(r"[\\/]", name)[-1]
            line, function = frame.get("line"), frame.get("name")
            text = f"{file}:{line if isinstance(line, int) else '?'} {function if isinstance(function, str) else '?'}"
            self._texts[id(frame)] = text[:_MOST_TEXT]
        return self._texts[id(frame)]
