"""The fixes that `stepscope verify` and `stepscope improve` apply to a script from outside.

`recorder/fixes` implements them; a test keeps the names in sync. Uses only the standard library.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from stepscope.analysis.comparison.losses import BY_HAND, NOT_COMPARABLE, REDUCED, REORDERED, RESAMPLED, SAME
from stepscope.analysis.comparison.micro_batches import MICRO_BATCH
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.analysis.comparison.verification import Expected
    from stepscope.findings.diagnose import Diagnosis

_MODES = ("default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")


@dataclass(frozen=True)
class Fix:
    """One change, with the id of the finding that suggests it, if there is one."""

    id: str
    about: str  # effect on the script
    arithmetic: str
    """How losses may differ: `same`, `reordered`, `reduced`, `resampled`, `not comparable` (`losses.py`)."""
    code: str
    """The same change in the script, for `stepscope improve`; `{value}`, `{device}` and such are filled in."""
    values: tuple[str, ...] = ()  # values allowed after `=`, the default first; `N` stands for any number
    lowers_to: str | None = None
    """The dtype of matrix products with the fix; if their number does not grow, it was not applied."""
    findings: tuple[str, ...] = ()  # findings other than its own whose saving it can achieve


FIXES: Mapping[str, Fix] = {
    fix.id: fix
    for fix in (
        Fix("fp32_matmul", 'torch.set_float32_matmul_precision("high")', REDUCED,
            'torch.set_float32_matmul_precision("high")  # before training', lowers_to="tf32"),
        Fix("autocast", "runs the script's modules under torch.autocast in bfloat16; they return float32", REDUCED,
            'with torch.autocast("{device}", dtype=torch.bfloat16):  # around the forward pass, not the backward',
            lowers_to="bf16", findings=("fp32_matmul",)),
        Fix("unfused_optimizer", "creates torch.optim optimizers with fused=True, or foreach=True if there is no "
            "fused version", REORDERED, "optimizer = AdamW(parameters, …, fused=True)  # or whichever you use"),
        Fix("attention_backend", "restricts scaled_dot_product_attention to this backend", REORDERED,
            "with sdpa_kernel(SDPBackend.{backend}):  # of torch.nn.attention, around the forward pass",
            ("flash", "efficient", "cudnn", "math")),
        Fix("sdpa", "switches a model's own attention to scaled_dot_product_attention (Transformers, timm)",
            REORDERED,
            'Model.from_pretrained(…, attn_implementation="sdpa")  # or model.set_attn_implementation("sdpa")',
            findings=("handwritten_attention",)),
        Fix("launch_bound", 'torch.compile(mode="reduce-overhead") for the script\'s modules: uses CUDA graphs',
            REORDERED, 'model.compile(mode="reduce-overhead")  # before training',
            findings=("unfused_elementwise",)),
        Fix("compile", "torch.compile for the script's modules", REORDERED,
            "model.compile({mode})  # before training", _MODES, findings=("unfused_elementwise",)),
        Fix("memory_layout", "converts modules with 2-D convolutions and their images to channels last", REORDERED,
            "model.to(memory_format=torch.channels_last)  # and images.to(memory_format=torch.channels_last)"),
        Fix("cudnn_benchmark", "torch.backends.cudnn.benchmark = True: cuDNN tries its algorithms", REORDERED,
            "torch.backends.cudnn.benchmark = True  # before training"),
        Fix("pageable_copies", "DataLoaders with pin_memory=True, and non_blocking copies from pinned memory", SAME,
            'DataLoader(…, pin_memory=True)  # and batch.to("cuda", non_blocking=True)'),
        Fix("waiting_for_data", "DataLoaders with more, persistent workers (default: one per spare core, to 8)",
            RESAMPLED,
            "DataLoader(…, num_workers={value}, persistent_workers=True, prefetch_factor=4)", ("", "N")),
        Fix("small_batch", "DataLoaders with batch_size times N; compares tokens per second, not losses",
            NOT_COMPARABLE, "DataLoader(…, batch_size={value} * batch_size)", ("2", "N")),
        Fix(MICRO_BATCH, "with gradient accumulation: micro-batches N times as large, and as many fewer per step, in "
            "Transformers, Accelerate, Lightning, or by options of the script", REORDERED,
            "{said}", ("2", "N"), findings=("small_batch", "launch_bound")),
        Fix("threads", "torch.set_num_threads(N) on a CPU (default: one per core)", REORDERED,
            "torch.set_num_threads({value})  # before training", ("", "N")),
        Fix("expandable_segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", SAME,
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python …  # in the shell",
            findings=("allocator_churn",)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """Fixes applied together, as the user typed them."""

    text: str
    fixes: tuple[Fix, ...]
    finding: str  # whose saving is expected of it
    script: str | None = None  # with the change, if it was made by hand: then there are no fixes

    @property
    def lowers_to(self) -> list[str]:
        """The dtypes to which its fixes lower matrix products."""
        return [fix.lowers_to for fix in self.fixes if fix.lowers_to]

    @property
    def growth(self) -> int:
        """How many times as large it makes micro-batches."""
        parts = [] if self.script is not None else [part.partition("=") for part in self.text.split("+")]
        return next((int(value or 2) for name, _, value in parts if name == MICRO_BATCH), 1)

    @property
    def arithmetic(self) -> str:
        """The largest effect of its fixes on losses."""
        if self.script is not None:
            return BY_HAND
        order = (SAME, REORDERED, REDUCED, RESAMPLED, NOT_COMPARABLE)
        return max((fix.arithmetic for fix in self.fixes), key=order.index)


def parse_change(text: str) -> Chosen:
    """Return the fixes named on the command line, or a change by hand: `NAME=SCRIPT`, or `NAME="SCRIPT ARGUMENTS"`.

    >>> parse_change("host_sync=after.py").script
    'after.py'
    """
    name, _, script = text.partition("=")
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--fix {text}: {error}") from None
    first = next(iter(words), "")
    if first != "-m" and not first.endswith(".py"):
        return parse_fix(text)
    if words == ["-m"]:
        raise UsageError(f"--fix {text}: name a module after -m")
    if not re.fullmatch(r"\w[\w-]*", name):
        raise UsageError(f"--fix {text}: the name of a change by hand has letters, digits, '_' and '-' only")
    return Chosen(f"{name}={words[1] if first == '-m' else PurePath(first).name}", (), name, script)


def parse_fix(text: str) -> Chosen:
    """Return the fixes named on the command line, such as `compile=max-autotune` or `autocast+unfused_optimizer`.

    >>> parse_fix("autocast+compile").arithmetic
    'reduced'
    """
    fixes = []
    for part in text.split("+"):
        name, equals, value = (word.strip() for word in part.partition("="))
        fix = FIXES.get(name)
        if fix is None:
            raise UsageError(
                f"Unknown fix {name!r}. Choose from {', '.join(FIXES)} (see stepscope list fixes). Make any other "
                f"change by hand in a copy of the script, then: stepscope verify … --fix {name}=COPY.py"
            )
        if equals and not _is_allowed(fix, value):
            takes = f"must be {' or '.join(filter(None, fix.values))}" if fix.values else "is not allowed"
            raise UsageError(f"--fix {part.strip()}: the value of {name} {takes}.")
        fixes.append(fix)
    return Chosen("+".join(part.strip() for part in text.split("+")), tuple(fixes), fixes[0].id)


def _is_allowed(fix: Fix, value: str) -> bool:
    if "N" not in fix.values:
        return bool(value) and value in fix.values
    try:
        number = float(value)
    except ValueError:
        return False
    # Workers must be a whole number; a batch may be scaled by any.
    return number > 0 and (fix.arithmetic == NOT_COMPARABLE or value.isdigit())


_BACKENDS = {"flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def code_of(text: str, values: Mapping[str, str | None], device: str) -> list[str]:
    """Return the lines that make the same changes in the script; `values` are those that a run resolved, by id.

    >>> code_of("compile=max-autotune", {}, "cuda")
    ['model.compile(mode="max-autotune")  # before training']
    """
    lines = []
    for part in text.split("+"):
        name, _, value = part.partition("=")
        said = values.get(name) or ""
        value = value or said or next(iter(FIXES[name].values), "")
        mode = f'mode="{value}"' if value != "default" else ""
        backend = _BACKENDS.get(value, "MATH")
        lines.append(FIXES[name].code.format(value=value, said=said, device=device, mode=mode, backend=backend))
    return lines


def expected_of(diagnosis: Diagnosis, chosen: Chosen) -> Expected:
    """Return the saving that a diagnosis predicts for a fix, from the finding with its id, or why there is none."""
    from stepscope.analysis.comparison.verification import Expected

    name = chosen.finding
    finding = next((each for each in diagnosis.findings if name in (each.id, each.other_fix)), None)
    unchecked = next((each.reason for each in diagnosis.unchecked if each.id == name), None)
    if len(chosen.fixes) > 1:
        reason = "savings of several findings cannot be added"
    elif finding is not None:
        step_ns = diagnosis.average_ns
        share = finding.saving_ns / step_ns if finding.saving_ns and step_ns else None
        return Expected(finding.saving_ns, share, finding.upper_bound, finding.confidence, None)
    elif unchecked is not None:
        reason = f"diagnose could not check it: {unchecked}"
    else:
        reason = "diagnose found nothing to gain" if name in diagnosis.clean else "no finding suggests it"
    return Expected(None, None, False, None, reason)
