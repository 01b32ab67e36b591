"""What `stepscope plan` predicts beside what happens: every point predicted, then measured in a process of its own.

    python benchmarks/plan_accuracy.py                          # on a GPU: over 40 points, tables on standard output
    python benchmarks/plan_accuracy.py --markdown plan.md       # and as Markdown
    python benchmarks/plan_accuracy.py --group compile          # torch.compile instead
    python benchmarks/plan_accuracy.py --device cpu --tiny      # the same machinery without a GPU

Measured are `torch.cuda.max_memory_allocated` after the second step and `max_memory_reserved`; a point that runs out
of memory is one whose verdict must be "does not fit". Predictions never touch the GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stepscope.devices.limits import find_device
from stepscope.planner.prediction import FITS, TOO_CLOSE, TOO_LARGE, Planner
from stepscope.sweep import measure, prepare
from stepscope.sweep.grid import Grid, Point
from stepscope.workloads.registry import find
from stepscope.workloads.workload import Built

LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}

QWEN2 = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8, "vocab_size": 50000,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
    "vocab_size": 50272, "word_embed_proj_dim": 1024, "max_position_embeddings": 2048,
}  # fmt: skip

STEP, FORWARD, BOTH = "mode=step", "mode=forward", "mode=forward+backward"
AUTOCAST = "dtype=autocast_bf16"
POINTS = [
    ("cs336", "small", "seq_len=256", STEP),
    ("cs336", "small", "seq_len=512", "attention=sdpa", STEP),
    ("cs336", "small", "seq_len=1024", "attention=builtin", AUTOCAST, STEP),
    ("cs336", "small", "seq_len=512", "checkpoint=1", STEP),
    ("cs336", "medium", "seq_len=512", "attention=naive", AUTOCAST, STEP),
    ("cs336", "medium", "seq_len=1024", "attention=sdpa", "dtype=bf16", STEP),
    ("cs336", "medium", "seq_len=512", "optimizer=fused", STEP),
    ("cs336", "medium", "seq_len=512", FORWARD),
    ("cs336", "large", "seq_len=1024", "attention=sdpa", AUTOCAST, "checkpoint=2", STEP),
    ("cs336", "xl", "seq_len=512", AUTOCAST, STEP),
    ("cs336", "2.7B", "seq_len=256", STEP),
    ("cs336", "2.7B", "seq_len=512", "attention=sdpa", AUTOCAST, STEP),
    ("cs336", "10B", "seq_len=128", FORWARD),
    ("cs336", "10B", "seq_len=128", STEP),
    ("megalodon", "200m", STEP),
    ("megalodon", "200m", AUTOCAST, STEP),
    ("megalodon", "200m", "attention=builtin", BOTH),
    ("megalodon", "forward", "seq_len=1024", FORWARD),
    ("megalodon", "profile", "ema=sequential", "seq_len=512", FORWARD),
    ("hydra", "100m", "gqa=repeated", STEP),
    ("hydra", "100m", AUTOCAST, STEP),
    ("hydra", "100m", "loss=chunked", AUTOCAST, STEP),
    ("hydra", "100m", "loss=fused", AUTOCAST, STEP),
    ("hydra", "100m", AUTOCAST, "checkpoint=1", STEP),
    ("hydra", "250m", "dtype=bf16", BOTH),
    ("hydra", "500m", "batch=1", AUTOCAST, STEP),
    ("nano", "decoder_small", "seq_len=2048", STEP),
    ("nano", "decoder_medium", "seq_len=4096", "dtype=bf16", STEP),
    ("nano", "decoder_medium", "seq_len=4096", "attention=sparse_mask", "dtype=bf16", STEP),
    ("nano", "decoder_small", "seq_len=2048", "attention=sparse_mask", AUTOCAST, BOTH),
    ("nano", "decoder_medium", "seq_len=2048", "checkpoint=1", AUTOCAST, STEP),
    ("tsmoe", "538m", "batch=4", "routing=balanced", AUTOCAST, STEP),
    ("tsmoe", "538m", "batch=4", "routing=balanced", "dispatch=grouped", AUTOCAST, STEP),
    ("tsmoe", "538m", "batch=4", "routing=balanced", "dispatch=capacity", "dtype=bf16", STEP),
    ("tsmoe", "538m", "batch=2", "routing=balanced", "dispatch=capacity", STEP),
    ("tsmoe", "23m", "batch=16", "routing=balanced", "dispatch=tile", AUTOCAST, STEP),
    ("tsmoe", "23m", "batch=16", "routing=balanced", "dispatch=one_hot", AUTOCAST, BOTH),
    ("hf:llama", None, "seq_len=1024", "batch=4", STEP),
    ("hf:llama", None, "seq_len=2048", "batch=2", AUTOCAST, STEP),
    ("hf:llama", None, "seq_len=2048", "batch=2", "dtype=bf16", FORWARD),
    ("hf:gpt2", None, "seq_len=512", "batch=8", STEP),
    ("hf:gpt2", None, "seq_len=1024", "batch=4", AUTOCAST, STEP),
    ("hf:gpt2", None, "seq_len=1024", "batch=8", "dtype=bf16", "optimizer=sgd", STEP),
    ("hf:qwen2", None, "seq_len=1024", "batch=4", STEP),
    ("hf:qwen2", None, "seq_len=2048", "batch=2", AUTOCAST, "attn=eager", STEP),
    ("hf:opt", None, "seq_len=1024", "batch=4", AUTOCAST, STEP),
    ("hf:opt", None, "seq_len=512", "batch=4", "checkpoint=1", STEP),
]
COMPILED = [
    ("cs336", "small", "seq_len=512", "attention=sdpa", AUTOCAST, STEP),
    ("cs336", "small", "seq_len=512", "attention=naive", FORWARD),
    ("cs336", "small", "seq_len=512", "attention=sdpa", "checkpoint=1", AUTOCAST, STEP),
    ("nano", "decoder_small", "seq_len=2048", STEP),
    ("hydra", "100m", AUTOCAST, STEP),
    ("tsmoe", "23m", "batch=16", "routing=balanced", "dispatch=capacity", AUTOCAST, STEP),
    ("hf:short_llama", None, "seq_len=1024", "batch=4", AUTOCAST, STEP),
    ("hf:short_llama", None, "seq_len=1024", "batch=4", "dtype=bf16", FORWARD),
]
FORKING = threading.Lock()
CONFIGS = {
    "llama": LLAMA, "short_llama": LLAMA | {"num_hidden_layers": 4}, "gpt2": GPT2, "qwen2": QWEN2, "opt": OPT,
}  # fmt: skip
TINY = [(name, "tiny", STEP) for name in ("cs336", "megalodon", "hydra", "nano", "tsmoe")]
GROUPS = {"eager": (POINTS, TINY, ()), "compile": (COMPILED, TINY, ("compile=default",))}
"""Points, those of the families' tiny presets, and what is said of each besides."""


def points_of(entries: list[tuple[Any, ...]], folder: Path) -> list[Point]:
    """The points, with Hugging Face configurations written to a folder."""
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config), encoding="utf-8")
    points = []
    for name, preset, *words in entries:
        source = f"hf:{folder / name[3:]}.json" if name.startswith("hf:") else name
        grid = Grid(find(source), {"device": "cpu"})
        given = [*words, *([f"preset={preset}"] if preset else [])]
        points += grid.points([grid.words(given)], False)
    return points


def predicted_all(points: list[Point], device: str, num_processes: int) -> list[dict[str, Any]]:
    """The plans, so many at a time, each in a fork: points do not travel."""
    with ThreadPoolExecutor(num_processes) as pool:
        return list(pool.map(lambda point: in_child(predicted, point, device), points))


def predicted(point: Point, device: str) -> dict[str, Any]:
    """The plan of a point, and how long it took."""
    begin = time.perf_counter()
    try:
        found = Planner(find(point.workload)).predict(point, None if device == "cpu" else find_device(device))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    return {**found.to_json(), "seconds": time.perf_counter() - begin}


def measured(point: Point, device: str) -> dict[str, Any]:
    """The peaks of the third and fourth step."""
    run = {**point.run, "device": device}
    prepare.apply_settings(run)
    workload = find(point.workload)
    try:
        built = prepare.build(workload, workload.config(**point.config), int(run["seed"]), device)
        assert isinstance(built, Built)
        dtype = prepare.weights_dtype(run)
        built.module.to(dtype)
        one_pass = prepare.Pass(built.module, prepare.cast(prepare.make_batch(built, 0, device), dtype), run)
        one_pass()
        one_pass()
        if device == "cpu":
            one_pass.drop_gradients()
            return {"peak_allocated_bytes": measure.traced(one_pass, "cpu", one_pass.tensors(), None).peak_bytes}
        torch.cuda.synchronize()
        if run["compile"] != "off":
            torch.cuda.empty_cache()  # what compiling took
        torch.cuda.reset_peak_memory_stats()
        one_pass()
        one_pass()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return {"oom": True}
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def in_child(function: Any, *arguments: Any) -> Any:
    """What a function returns in a fresh fork, where CUDA may be touched."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            writer.send(function(*arguments))
        except BaseException as error:
            writer.send({"error": f"{type(error).__name__}: {error}"[:200]})

    child = multiprocessing.get_context("fork").Process(target=run)
    with FORKING:  # two threads that fork at once disturb each other
        child.start()
    writer.close()
    try:
        found = reader.recv()
    except EOFError:
        found = {"error": "it died"}
    child.join()
    return found


def row_of(point: Point, plan: dict[str, Any], real: dict[str, Any]) -> dict[str, Any]:
    """Both, and how far apart they are."""
    row = {"point": _name(point), "plan": plan, "real": real, "allocated": None, "reserved": None, "verdict": ""}
    if "error" in plan or "error" in real:
        row["verdict"] = str(plan.get("error") or real.get("error"))
        return row
    if real.get("oom"):
        row["verdict"] = "right" if plan["fits"] in (TOO_LARGE, TOO_CLOSE) else f"WRONG: {plan['fits']}"
        return row
    row["allocated"] = plan["peak_allocated_bytes"] / real["peak_allocated_bytes"] - 1
    if "peak_reserved_bytes" in real:
        row["reserved"] = plan["peak_reserved_bytes"] / real["peak_reserved_bytes"] - 1
        row["verdict"] = "right" if plan["fits"] in (FITS, TOO_CLOSE) else f"WRONG: {plan['fits']}"
    return row


def _name(point: Point) -> str:
    source = Path(point.workload).stem if point.workload.startswith("hf:") else f"{point.workload} {point.preset}"
    shown = ("seq_len", "batch", "attention", "ema", "loss", "dispatch", "checkpoint")
    config = [f"{name}={point.config[name]}" for name in shown if point.config.get(name)]
    run = [str(point.run[name]) for name in ("dtype", "mode")]
    run += [] if point.run["compile"] == "off" else ["compiled"]
    run += [] if point.run["optimizer"] == "adamw" else [f"optimizer={point.run['optimizer']}"]
    return " ".join((source, *config, *run))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows as Markdown, and what they come to."""
    lines = [
        "| point | measured | predicted | error | reserved | error | verdict | plan s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plan, real = row["plan"], row["real"]
        cells = [row["point"], _gib(real.get("peak_allocated_bytes")), _gib(plan.get("peak_allocated_bytes"))]
        cells += [_share(row["allocated"]), _gib(real.get("peak_reserved_bytes")), _share(row["reserved"])]
        cells += ["out of memory: " * bool(real.get("oom")) + row["verdict"], f"{plan.get('seconds', 0):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for name in ("allocated", "reserved"):
        errors = sorted(abs(row[name]) for row in rows if row[name] is not None)
        if errors:
            middle, worst = statistics.median(errors), errors[-1]
            lines.append(f"{name}: {len(errors)} points, median error {middle:.3%}, worst {worst:.3%}")
    wrong = [row["point"] for row in rows if row["allocated"] is None and row["verdict"] != "right"]
    lines.append(f"verdicts or runs that went wrong: {', '.join(wrong) or 'none'}")
    return lines


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**30:.3f} GiB"


def _share(error: float | None) -> str:
    return "" if error is None else f"{error:+.3%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="NVIDIA H200", help="a name of the table of devices, or cpu")
    parser.add_argument("--group", choices=GROUPS, default="eager")
    parser.add_argument("--tiny", action="store_true", help="the families' tiny presets only")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that predict")
    parser.add_argument("--seconds", type=float, default=540, help="stop measuring after so long")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--jsonl", type=Path)
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        entries, tiny, words = GROUPS[arguments.group]
        points = points_of([(*entry, *words) for entry in (tiny if arguments.tiny else entries)], Path(folder))
        plans = predicted_all(points, arguments.device, arguments.processes)
        print(f"{len(points)} points predicted in {time.monotonic() - begin:.0f} s", flush=True)
        rows = []
        for point, plan in zip(points, plans):
            if time.monotonic() - begin > arguments.seconds:
                print("out of time", flush=True)
                break
            rows.append(
                row_of(point, plan, in_child(measured, point, "cpu" if arguments.device == "cpu" else "cuda"))
            )
            row = rows[-1]
            print(
                f"{row['point']:<70} {_share(row['allocated']):>9} {_share(row['reserved']):>9} {row['verdict']}",
                flush=True,
            )
            if arguments.jsonl:
                with arguments.jsonl.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    lines = table(rows)
    print("\n".join(lines))
    if arguments.markdown:
        arguments.markdown.write_text(
            "\n".join([f"torch {torch.__version__}, {sys.platform}", "", *lines, ""]), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
