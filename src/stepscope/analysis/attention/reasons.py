"""Why attention did not use flash attention: PyTorch's own message if recorded, else its documented rules."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.memory.module_tree import starred

HALF = ("bfloat16", "float16")
LARGEST_HEAD = 256
LEAST_CAPABILITY = (8, 0)  # flash attention needs Ampere or later
CODES = (
    "mask", "dtype", "head_size", "value_size", "layout", "causal_lengths", "capability", "dropout", "switched_off",
    "preferred", "unsaid", "not_seen",
)  # fmt: skip
"""Reasons against flash attention. The first eight are its rules. `switched_off`: by a setting. `preferred`: PyTorch
tries another backend first. `unsaid`: PyTorch rejects it without a reason. `not_seen`: no rule visible in the trace
rules it out.
"""

# Words by which PyTorch's messages name a rule.
_WORDS = {
    "mask": ("mask",), "dtype": ("dtype",), "head_size": ("head_dim", "head dim", "size of at most"),
    "value_size": ("last dim", "same last dimension"), "layout": ("stride",), "capability": ("sm80", "gpu"),
    "causal_lengths": ("is_causal", "causal"), "dropout": ("dropout",),
}  # fmt: skip
# Names as displayed.
BACKENDS = {"cudnn": "cuDNN", "efficient": "efficient", "math": "math", "flash": "flash", "flex": "flex"}


@dataclass(frozen=True)
class Reason:
    """One reason why a backend was not used."""

    backend: str  # the backend that was not used: `flash`, `efficient` or `cudnn`
    code: str | None  # one of `CODES`; None if PyTorch's message matches none of them
    said: str | None = None  # the message from PyTorch, if recorded

    @property
    def source(self) -> str:
        """`torch` (its message), `recorded` (a setting or choice in the process) or `derived` (from its rules)."""
        if self.said is not None:
            return "torch"
        return "recorded" if self.code in ("switched_off", "preferred", "unsaid") else "derived"

    def to_json(self) -> dict[str, Any]:
        return {"backend": self.backend, "code": self.code, "said": self.said, "source": self.source}


def against_flash(call: Mapping[str, Any], is_on_gpu: bool, capability: tuple[int, int] | None = None) -> list[str]:
    """Return the codes of the documented rules that a call (a row of `attention_summary`) breaks.

    >>> against_flash({"dtype": "float32", "mask": "[64, 64]", "head_size": 64}, is_on_gpu=True)
    ['mask', 'dtype']
    """
    is_broken = {
        "mask": is_on_gpu and call.get("mask") is not None,
        "dtype": is_on_gpu and call.get("dtype") not in (None, *HALF),
        "head_size": is_on_gpu and (call.get("head_size") or 0) > LARGEST_HEAD,
        "value_size": call.get("value_size") not in (None, call.get("head_size")),
        "layout": call.get("is_dense") is False,
        "causal_lengths": is_on_gpu and call.get("is_causal") and call.get("num_queries") != call.get("num_keys"),
        "capability": is_on_gpu and capability is not None and capability < LEAST_CAPABILITY,
        "dropout": not is_on_gpu and (call.get("dropout") or 0) > 0,
    }
    return [code for code, broken in is_broken.items() if broken]


def in_words(code: str, call: Mapping[str, Any]) -> str:
    """Return a reason against flash attention as text, with the call's figures.

    >>> in_words("mask", {"mask": "[64, 64]", "backend": "math"})
    'a mask of shape 64×64 is passed (flash supports only is_causal=True)'
    """
    backend = BACKENDS.get(call["backend"], str(call["backend"]))
    return {
        "mask": f"a mask of shape {shape_of(call.get('mask'))} is passed (flash supports only is_causal=True)",
        "dtype": f"the tensors are {call.get('dtype')} (flash supports {' and '.join(HALF)})",
        "head_size": f"the head size of {call.get('head_size')} is larger than {LARGEST_HEAD}",
        "value_size": f"the value size is {call.get('value_size')} but the query size {call.get('head_size')}",
        "layout": "the last dimension of query, key or value is not contiguous",
        "causal_lengths": f"is_causal is set with {call.get('num_queries')} queries and {call.get('num_keys')} keys",
        "capability": "the device is older than compute capability 8.0",
        "dropout": f"dropout is {call.get('dropout')} (the CPU's fused kernel supports none)",
        "switched_off": "flash is disabled by sdpa_kernel(…) or torch.backends.cuda.enable_flash_sdp(False)",
        "preferred": f"PyTorch tries {backend} first on this device (flash could run)",
        "unsaid": "PyTorch rejects it without giving a reason",
        "not_seen": f"PyTorch prefers {backend} on this device, or a setting or the program chose it (nothing in the "
        "trace rules flash out)",
    }[code]


def shape_of(mask: str | None) -> str:
    """Return a mask's shape as text, or `none`."""
    return "none" if mask is None else mask.strip("[]").replace(", ", "×")


def reasons(
    call: Mapping[str, Any],
    recorded: Iterable[Mapping[str, Any]],
    is_on_gpu: bool,
    capability: tuple[int, int] | None = None,
) -> tuple[Reason, ...]:
    """Return why a call did not use flash attention; empty if it did.

    `recorded` are the calls that `stepscope run` recorded. PyTorch reports only the first broken rule; other broken
    rules follow.
    """
    if call["backend"] in ("flash", "flex"):
        return ()
    derived = against_flash(call, is_on_gpu, capability)
    match = next((entry for entry in recorded if is_same(call, entry)), None)
    if match is None:
        return tuple(Reason("flash", code) for code in derived or ["not_seen"])
    found = [Reason("flash", "switched_off")] if "flash" in match.get("switched_off", ()) else []
    refused = match.get("refused", {})
    said = refused.get("flash", [])
    found += [Reason("flash", None, text) for text in said]
    if "flash" in refused and not said:
        found += [Reason("flash", code) for code in derived] or [Reason("flash", "unsaid")]
    elif said:
        words = {code: any(word in text.lower() for text in said for word in _WORDS[code]) for code in derived}
        found += [Reason("flash", code) for code in derived if not words[code]]
    elif not found:
        found.append(Reason("flash", "preferred"))
    order = [name for name in ("cudnn", "efficient") if name in refused and name != call["backend"]]
    return (*found, *(Reason(name, None, text) for name in order for text in refused[name]))


def is_same(call: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Return whether a recorded call has the same inputs (and module, if both are known) as a row of the trace."""
    query, key = entry.get("query"), entry.get("key")
    if not (query and key and len(query) >= 3 and len(key) == len(query)):
        return False
    sizes = (query[0] if len(query) > 3 else 1, query[-3], query[-2], key[-2], query[-1])
    shown = tuple(call[name] for name in ("batch", "num_heads", "num_queries", "num_keys", "head_size"))
    if sizes != shown or any(entry.get(name) != call[name] for name in ("backend", "dtype")):
        return False
    if (entry.get("mask") is None) != (call["mask"] is None):
        return False
    if call["is_causal"] not in (None, bool(entry.get("is_causal"))):
        return False
    names = (starred(entry.get("module") or None), call.get("module"))
    return None in names or names[0] == names[1] or "" in names


def recorded_callers(table: pl.DataFrame, recorded: Iterable[Mapping[str, Any]]) -> pl.Series:
    """Return the caller of each row of `attention_summary`, from the trace or else from the recording."""
    entries = list(recorded)
    callers = []
    for row in table.iter_rows(named=True):
        match = next((entry for entry in entries if is_same(row, entry)), None) if row["caller"] is None else None
        callers.append((match or {}).get("caller") or row["caller"])
    return pl.Series("caller", callers, dtype=pl.String)
