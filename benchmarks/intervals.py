"""How well `diagnose` estimates: rank, saving and interval of every case whose saving was measured.

    python benchmarks/intervals.py FOLDER...     each with a truth.json beside traces or recordings

A cause that several findings share a fix with is judged by what the fix saves in total. "left out" is the coverage of
intervals whose factors were fitted to the other cases of the same kind: what an unknown case can expect.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope import diagnose
from stepscope.findings.diagnose import Diagnosis, all_rules
from stepscope.findings.finding import Finding
from stepscope.findings.saving_interval import COVERAGE, FACTORS, fitted, kind_of

CAUSES = {
    "resnet_layout": ["memory_layout"], "padded_batches": ["padding"], "types_embedding": ["serialized_scatter"],
    "checkpoint_often": ["checkpoint_cost", "noisy_steps"], "rope_every_layer": ["unfused_elementwise"],
    "compiled_with_prints": ["graph_breaks"], "weight_average": ["parameter_loop"],
    "nanogpt_eager": ["unfused_elementwise"], "empty_cache": ["allocator_churn"],
    "math_attention": ["handwritten_attention"], "grad_checkpoint": ["checkpointing_with_free_memory"],
    "cpu_offload_op": ["synchronization", "device_round_trip"], "fp32_no_tf32": ["fp32_matmul"],
    "mask_blocks_flash": ["attention_mask"], "data_stall": ["waiting_for_data"],
    "loop_optimizer": ["unfused_optimizer"], "recompiles": ["recompiles"], "contiguous_copies": ["needless_copies"],
    "launch_bound": ["launch_bound"], "picture_segmenter_in_planar_layout": ["memory_layout"],
    "distances_by_broadcast_subtraction": ["unfused_elementwise"],
    "one_module_per_attention_head": ["split_products"],
    "word_scores_for_unlabelled_positions": ["full_logits"], "numpy_doubles_leak_into_the_loss": ["float64_work"],
    "contrastive_product_in_plain_float32": ["fp32_matmul"],
    "averaged_weights_kept_on_the_cpu": ["synchronization", "device_round_trip"],
    "advantages_by_a_loop_over_time": ["launch_bound"], "noise_drawn_on_the_cpu": ["host_stall", "pageable_copies"],
    "linear_attention_in_quadratic_order": ["product_order"],
    "recurrent_cells": ["launch_bound"], "small_micro_batches": ["launch_bound"],
    "deterministic_algorithms": ["serialized_scatter", "torch_switches"],
}  # fmt: skip
"""What was wrong, by case; a plant without an entry is named after its rule."""
BYTES_ALONE = ("big_vocabulary", "full_logits")  # fixes that save memory and no time
TELLING = (0.25, 0.5)  # errors of a saving that should hold for most cases, and for all


@dataclass(frozen=True)
class Judged:
    name: str
    place: int | None
    told_ms: float | None
    low_ms: float
    high_ms: float
    true_ms: float
    kind: str
    leading: str  # what came first


def cases(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    for name, known in json.loads((folder / "truth.json").read_text()).items():
        ways = (folder / f"{name}.slow.json.gz", folder / f"{name}.json.gz", folder / name)
        path = next((way for way in ways if way.exists()), None)
        if path is not None and "slow_ms" in known:
            yield name, path, known


def judged(name: str, path: Path, known: dict[str, Any]) -> Judged | None:
    """What a diagnosis says of a case, None if nothing was planted or its fix saves no time."""
    if "fixed_ms" not in known or name in BYTES_ALONE or known["fixed_ms"] >= known["slow_ms"]:
        return None
    quartiles = known.get("saving_quartiles_ms")
    true_ms = quartiles[1] if quartiles else known["slow_ms"] - known["fixed_ms"]
    rule = max((rule.id for rule in all_rules() if name.startswith(rule.id)), key=len, default=name)
    wanted = CAUSES.get(name, [rule])
    diagnosis = diagnose(path, use_cache=False)
    ids = [finding.id for finding in diagnosis.findings]
    place = min((ids.index(id) + 1 for id in wanted if id in ids), default=None)
    leading = ", ".join(ids[:2])
    if place is None:
        return Judged(name, None, None, 0.0, 0.0, true_ms, "", leading)
    finding = diagnosis.findings[place - 1]
    assert diagnosis.ledger is not None
    told, low, high = whole(diagnosis, finding)
    return Judged(name, place, told, low, high, true_ms, kind_of(finding, diagnosis.ledger), leading)


def whole(diagnosis: Diagnosis, finding: Finding) -> tuple[float, float, float]:
    """The saving of a finding's fix with its interval, in ms: that of its group if it leads one."""
    group = next((group for group in diagnosis.groups if group.findings[0] == finding.id), None)
    of = group or finding
    return tuple((ns or 0.0) / 1e6 for ns in (of.saving_ns, of.saving_low_ns, of.saving_high_ns))


def main(folders: list[Path]) -> None:
    rows = [one for folder in folders for case in cases(folder) if (one := judged(*case)) is not None]
    print("| case | place | told | interval | measured | error | inside | kind |")
    print("|---|---:|---:|---|---:|---:|---|---|")
    for row in rows:
        if row.place is None:
            print(f"| {row.name} | missed: {row.leading} | | | {row.true_ms:.1f} ms | | | |")
            continue
        error, inside = (row.told_ms or 0) / row.true_ms - 1, row.low_ms <= row.true_ms <= row.high_ms
        print(
            f"| {row.name} | {row.place} | {row.told_ms:.1f} ms | {row.low_ms:.1f} to {row.high_ms:.1f} | "
            f"{row.true_ms:.1f} ms | {error:+.0%} | {'yes' if inside else 'no'} | {row.kind} |",
            flush=True,
        )
    told = [row for row in rows if row.told_ms]
    print(f"\n{sum((row.place or 9) <= 2 for row in rows)} of {len(rows)} causes among the first two findings.")
    for most in TELLING:
        num = sum(abs((row.told_ms or 0) / row.true_ms - 1) <= most for row in told)
        print(f"{num} of {len(told)} savings within {most:.0%}.")
    held = sum(row.low_ms <= row.true_ms <= row.high_ms for row in told)
    print(f"{held} of {len(told)} intervals contain the measured saving ({COVERAGE:.0%} stated).")
    left_out = 0
    for row in told:
        ratios = [one.true_ms / (one.told_ms or 1) for one in told if one.kind == row.kind and one is not row]
        low, high = fitted(ratios)
        left_out += low <= row.true_ms / (row.told_ms or 1) <= high
    print(f"{left_out} of {len(told)} with factors from the other cases of their kind (left out).")
    for kind in FACTORS:
        ratios = sorted(one.true_ms / (one.told_ms or 1) for one in told if one.kind == kind)
        low, high = fitted(ratios)
        shown = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{kind}: {len(ratios)} cases, measured ÷ told {low:.2f} to {high:.2f} ({shown})")


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
