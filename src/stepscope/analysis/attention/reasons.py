"""Why attention did not run on flash: in torch's words where a recording has them, else by its documented rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from stepscope.analysis.memory.module_tree import starred

HALF = ("bfloat16", "float16")
LARGEST_HEAD = 256
LEAST_CAPABILITY = (8, 0)
"""Flash attention runs on Ampere and later."""
CODES = (
    "mask", "dtype", "head_size", "value_size", "layout", "causal_lengths", "capability", "dropout", "switched_off",
    "preferred", "unsaid", "not_seen",
)  # fmt: skip
"""What can stand against flash: the first eight are its rules; `switched_off` by a setting, `preferred`: torch asks
another back end first and flash could run; `unsaid`: torch refuses and gives no reason; `not_seen`: no rule that a
trace shows stands against it, so that a setting or the program chose otherwise."""


BACK_ENDS = {"cudnn": "cuDNN", "efficient": "efficient", "math": "math", "flash": "flash", "flex": "flex"}
"""As they are written."""


@dataclass(frozen=True)
class Reason:
    """One reason why a back end did not run."""

    backend: str
    """The one that did not: `flash`, `efficient` or `cudnn`."""
    code: str | None
    """One of `CODES`; None of torch's own words that are none of them."""
    said: str | None = None
    """Torch's own words, as a recording has them."""

    @property
    def source(self) -> str:
        """`torch`: said by it; `recorded`: a setting or a choice seen in the process; `derived`: from its rules."""
        if self.said is not None:
            return "torch"
        return "recorded" if self.code in ("switched_off", "preferred", "unsaid") else "derived"

    def to_json(self) -> dict[str, Any]:
        return {"backend": self.backend, "code": self.code, "said": self.said, "source": self.source}


def against_flash(call: Mapping[str, Any], is_on_gpu: bool, capability: tuple[int, int] | None = None) -> list[str]:
    """The codes of the documented rules that a call (a row of `attention_summary`) breaks; empty where it breaks none
    that the trace shows.

    >>> against_flash({"dtype": "float32", "mask": "[64, 64]", "head_size": 64}, is_on_gpu=True)
    ['mask', 'dtype']
    """
    codes = []
    if is_on_gpu and call.get("mask") is not None:
        codes.append("mask")
    if is_on_gpu and call.get("dtype") is not None and call["dtype"] not in HALF:
        codes.append("dtype")
    if is_on_gpu and (call.get("head_size") or 0) > LARGEST_HEAD:
        codes.append("head_size")
    if call.get("value_size") is not None and call["value_size"] != call.get("head_size"):
        codes.append("value_size")
    if call.get("is_dense") is False:
        codes.append("layout")
    if is_on_gpu and call.get("is_causal") and call.get("num_queries") != call.get("num_keys"):
        codes.append("causal_lengths")
    if is_on_gpu and capability is not None and capability < LEAST_CAPABILITY:
        codes.append("capability")
    if not is_on_gpu and (call.get("dropout") or 0) > 0:
        codes.append("dropout")
    return codes


def in_words(code: str, call: Mapping[str, Any]) -> str:
    """What stands against flash, with what the call was given.

    >>> in_words("mask", {"mask": "[64, 64]", "backend": "math"})
    'a mask of 64×64 is given: flash takes none but is_causal=True'
    """
    backend = BACK_ENDS.get(call["backend"], str(call["backend"]))
    return {
        "mask": f"a mask of {shape_of(call.get('mask'))} is given: flash takes none but is_causal=True",
        "dtype": f"the tensors are {call.get('dtype')}: flash takes {' and '.join(HALF)}",
        "head_size": f"a head of {call.get('head_size')} is wider than {LARGEST_HEAD}",
        "value_size": f"values are {call.get('value_size')} wide, queries {call.get('head_size')}",
        "layout": "the last dimension of query, key or value is not in one piece",
        "causal_lengths": f"is_causal with {call.get('num_queries')} queries and {call.get('num_keys')} keys",
        "capability": "the device is older than compute capability 8.0",
        "dropout": f"dropout of {call.get('dropout')}: the CPU's fused kernel has none",
        "switched_off": "flash was switched off: sdpa_kernel(…) or torch.backends.cuda.enable_flash_sdp(False)",
        "preferred": f"flash could run: PyTorch asks {backend} first on this device",
        "unsaid": "PyTorch refuses it and does not say why",
        "not_seen": f"nothing in the trace stands against flash: PyTorch prefers {backend} on this device, or a "
        "setting or the program chose it",
    }[code]


def shape_of(mask: str | None) -> str:
    """A mask's shape, or that there is none."""
    return "none" if mask is None else mask.strip("[]").replace(", ", "×")


def reasons(
    call: Mapping[str, Any],
    recorded: Iterable[Mapping[str, Any]],
    is_on_gpu: bool,
    capability: tuple[int, int] | None = None,
) -> tuple[Reason, ...]:
    """Why a call that did not run on flash did not; empty where it did.

    `recorded`: what `stepscope run` wrote down of calls in the process. Torch names the first rule that a call
    breaks; those of the documented rules that it broke besides follow.
    """
    if call["backend"] in ("flash", "flex"):
        return ()
    derived = against_flash(call, is_on_gpu, capability)
    match = next((entry for entry in recorded if is_same(call, entry)), None)
    if match is None:
        return tuple(Reason("flash", code) for code in derived or ["not_seen"])
    found = [Reason("flash", "switched_off")] if "flash" in _texts(match.get("switched_off")) else []
    refused = match.get("refused")
    refused = refused if isinstance(refused, Mapping) else {}
    said = _texts(refused.get("flash"))
    found += [Reason("flash", None, text) for text in said]
    if "flash" in refused and not said:
        found += [Reason("flash", code) for code in derived] or [Reason("flash", "unsaid")]
    elif said:
        found += [Reason("flash", code) for code in derived if not _says(code, said)]
    elif not found:
        found.append(Reason("flash", "preferred"))
    order = [name for name in ("cudnn", "efficient") if name in refused and name != call["backend"]]
    return (*found, *(Reason(name, None, text) for name in order for text in _texts(refused[name])))


def is_same(call: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    """Whether a recorded call was given what a row of the trace's was; by its module too, where both have one."""
    query, key = entry.get("query"), entry.get("key")
    if not (isinstance(query, list) and isinstance(key, list) and len(query) >= 3 and len(key) == len(query)):
        return False
    mask = entry.get("mask")
    if (mask is None) != (call["mask"] is None) or entry.get("backend") != call["backend"]:
        return False
    sizes = (query[0] if len(query) > 3 else 1, query[-3], query[-2], key[-2], query[-1])
    shown = tuple(call[name] for name in ("batch", "num_heads", "num_queries", "num_keys", "head_size"))
    if sizes != shown or entry.get("dtype") != call["dtype"]:
        return False
    causal = call["is_causal"]
    if causal is not None and bool(entry.get("is_causal")) != causal:
        return False
    names = (starred(str(entry["module"])) if entry.get("module") else None, call.get("module"))
    return None in names or names[0] == names[1] or "" in names


def recorded_callers(table: pl.DataFrame, recorded: Iterable[Mapping[str, Any]]) -> pl.Series:
    """Who called each row of `attention_summary`: as the trace has it, else as the recording has."""
    entries = list(recorded)
    callers = []
    for row in table.iter_rows(named=True):
        match = next((entry for entry in entries if is_same(row, entry)), None) if row["caller"] is None else None
        callers.append(row["caller"] if match is None or not match.get("caller") else str(match["caller"]))
    return pl.Series("caller", callers, dtype=pl.String)


def _texts(value: Any) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


_WORDS = {
    "mask": ("mask",), "dtype": ("dtype",), "head_size": ("head_dim", "head dim", "size of at most"),
    "value_size": ("last dim", "same last dimension"), "layout": ("stride",), "capability": ("sm80", "gpu"),
    "causal_lengths": ("is_causal", "causal"), "dropout": ("dropout",),
}  # fmt: skip


def _says(code: str, said: Iterable[str]) -> bool:
    return any(word in text.lower() for text in said for word in _WORDS.get(code, ()))
