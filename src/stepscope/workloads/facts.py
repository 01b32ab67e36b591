"""A workload described as JSON values: its presets, their parameter counts, and its knobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stepscope.workloads.workload import Built, Workload


def facts_of(workload: Workload[Any], *, has_parameters: bool) -> dict[str, Any]:
    """Return presets, knobs and reference values; parameters are counted on tensors without data."""
    return {
        "name": workload.name,
        "about": workload.about,
        "presets": [
            {"name": preset, "sets": dict(values), **(_parameters(workload, preset) if has_parameters else {})}
            for preset, values in workload.presets.items()
        ],
        "knobs": [{**asdict(knob), "kind": knob.kind.__name__} for knob in workload.knobs()],
        "reference": dict(workload.reference),
    }


def _parameters(workload: Workload[Any], preset: str) -> dict[str, int | None]:
    import torch

    with torch.device("meta"):
        built = workload.build(workload.configure(preset))
    assert isinstance(built, Built)
    total = sum(parameter.numel() for parameter in built.module.parameters())
    return {"num_parameters": total, "num_active_parameters": built.num_active_parameters}
