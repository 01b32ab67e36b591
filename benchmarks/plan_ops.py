"""What `stepscope plan` knows of single ops: the peak of each, predicted, then measured on a GPU.

    python benchmarks/plan_ops.py                     # on a GPU: one row a case, worst first
    python benchmarks/plan_ops.py --predict           # the predictions alone, for an H200, without a GPU
    python benchmarks/plan_ops.py --only fft,conv     # cases whose name has one of these in it

A case is a step: some ops forward, and backward where they have one. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from plan_accuracy import in_child
from torch import Tensor, nn
from torch.nn import functional

B, S, D, H, V = 4, 1024, 1024, 16, 32000
HALF = torch.bfloat16
CASES: dict[str, Callable[[], Callable[[], Any]]] = {}


def case(name: str, **variants: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a maker of steps, once for each of its variants."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        for variant, values in (variants or {"": {}}).items():
            CASES[f"{name} {variant}".strip()] = lambda values=values: make(**values)
        return make

    return register


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that wants a gradient."""
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_()


def whole(high: int, *shape: int) -> Tensor:
    """Whole numbers below `high`."""
    return torch.randint(high, shape, device=DEVICE)


def differentiated(leaves: list[Tensor], forward: Callable[[], Tensor]) -> Callable[[], None]:
    """A step: forward, sum, backward; gradients are dropped at its start."""

    def step() -> None:
        for tensor in leaves:
            tensor.grad = None
        out = forward()
        out.backward(torch.ones_like(out))

    return step


def layer(module: nn.Module, x: Tensor) -> Callable[[], None]:
    module = module.to(DEVICE, x.dtype)
    return differentiated([x, *module.parameters()], lambda: module(x))


def unary(
    function: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype = torch.float32
) -> Callable[[], None]:
    x = leaf(*(shape or (B, S, 4 * D)), dtype=dtype)
    return differentiated([x], lambda: function(x))


# Transforms
LENGTHS = {f"{n}": {"n": n} for n in (512, 1024, 2048, 4096, 8192, 16384, 32768)}
case("rfft", **LENGTHS)(lambda n: unary(lambda x: torch.fft.rfft(x).real, (1 << 24) // n, n))
case("rfft padded", **LENGTHS)(lambda n: unary(lambda x: torch.fft.rfft(x, n=2 * n).real, (1 << 24) // n, n))
case("fft", **LENGTHS)(lambda n: unary(lambda x: torch.fft.fft(x).real, (1 << 24) // n, n))
case("fft odd")(lambda: unary(lambda x: torch.fft.rfft(x).real, 4096, 3 * 1024))


@case("irfft", **LENGTHS)
def _irfft(n: int) -> Callable[[], None]:
    x = leaf((1 << 24) // n, n // 2 + 1, 2)
    return differentiated([x], lambda: torch.fft.irfft(torch.view_as_complex(x), n=n))


@case("convolution by fft", **LENGTHS)
def _by_fft(n: int) -> Callable[[], None]:
    rows = (1 << 23) // n
    x, k = leaf(2, n // 2, rows // 2 or 1), leaf(rows // 2 or 1, n // 2)

    def forward() -> Tensor:
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=n) * torch.fft.rfft(k, n=n)
        return torch.fft.irfft(spectrum, n=n)[..., : n // 2].transpose(1, 2)

    return differentiated([x, k], forward)


# Norms, softmax, losses
DTYPES: dict[str, dict[str, Any]] = {"fp32": {"dtype": torch.float32}, "bf16": {"dtype": HALF}}
case("layer_norm", **DTYPES)(lambda dtype: layer(nn.LayerNorm(D), leaf(4 * B, S, D, dtype=dtype)))
case("rms_norm", **DTYPES)(lambda dtype: layer(nn.RMSNorm(D), leaf(4 * B, S, D, dtype=dtype)))
case("group_norm", **DTYPES)(lambda dtype: layer(nn.GroupNorm(32, 256), leaf(8, 256, 64, 64, dtype=dtype)))
case("batch_norm", **DTYPES)(lambda dtype: layer(nn.BatchNorm2d(256), leaf(8, 256, 64, 64, dtype=dtype)))
case("softmax", **DTYPES)(lambda dtype: unary(lambda x: functional.softmax(x, -1), B, H, S, S, dtype=dtype))
case("log_softmax", **DTYPES)(lambda dtype: unary(lambda x: functional.log_softmax(x, -1), S, V, dtype=dtype))
case("logsumexp")(lambda: unary(lambda x: torch.logsumexp(x, -1), S, V))
case("dropout", **DTYPES)(lambda dtype: unary(lambda x: functional.dropout(x, 0.1), dtype=dtype))
case("gelu", **DTYPES)(lambda dtype: unary(functional.gelu, dtype=dtype))
case("silu times")(lambda: unary(lambda x: functional.silu(x) * x))
case("variance")(lambda: unary(lambda x: x.var(-1)))
case("std over rows")(lambda: unary(lambda x: x.std(0)))
case("maximum of rows")(lambda: unary(lambda x: x.max(-1).values))
case("cumsum", **DTYPES)(lambda dtype: unary(lambda x: x.cumsum(1), dtype=dtype))
case("norm of all")(lambda: unary(lambda x: x.norm()))
case("mean of all", **DTYPES)(lambda dtype: unary(lambda x: x.mean(), dtype=dtype))
case("sum over rows", **DTYPES)(lambda dtype: unary(lambda x: x.sum((0, 1)), dtype=dtype))
case("sort")(lambda: unary(lambda x: x.sort(-1).values))
case("topk")(lambda: unary(lambda x: x.topk(8, -1).values))
case("pad")(lambda: unary(lambda x: functional.pad(x, (1, 1))))
case("interpolate")(lambda: unary(lambda x: functional.interpolate(x, scale_factor=2.0), 4, 64, 128, 128))
case("max pool")(lambda: unary(lambda x: functional.max_pool2d(x, 2), 8, 64, 256, 256))
case("average pool")(lambda: unary(lambda x: functional.avg_pool2d(x, 2), 8, 64, 256, 256))


@case("cross_entropy", **DTYPES)
def _cross_entropy(dtype: torch.dtype) -> Callable[[], None]:
    x, y = leaf(S, V, dtype=dtype), whole(V, S)
    return differentiated([x], lambda: functional.cross_entropy(x.float(), y))


@case("cross_entropy smoothed")
def _smoothed() -> Callable[[], None]:
    x, y = leaf(S, V), whole(V, S)
    return differentiated([x], lambda: functional.cross_entropy(x, y, label_smoothing=0.1))


# Indexing
@case("embedding", few={"number": 2048}, many={"number": 65536})
def _embedding(number: int) -> Callable[[], None]:
    weight, index = leaf(V, D), whole(V, number)
    return differentiated([weight], lambda: functional.embedding(index, weight))


@case("indexing")
def _indexing() -> Callable[[], None]:
    x, index = leaf(V, D), whole(V, 32768)
    return differentiated([x], lambda: x[index])


@case("indexing by a mask")
def _masked() -> Callable[[], None]:
    x, mask = leaf(V, D), torch.ones(V, D, dtype=torch.bool, device=DEVICE)
    return differentiated([x], lambda: torch.where(mask, x, 0.0))


@case("index_select")
def _index_select() -> Callable[[], None]:
    x, index = leaf(V, D), whole(V, 32768)
    return differentiated([x], lambda: x.index_select(0, index))


@case("gather")
def _gather() -> Callable[[], None]:
    x, index = leaf(V, D), whole(V, V, D)
    return differentiated([x], lambda: x.gather(0, index))


@case("index_add")
def _index_add() -> Callable[[], None]:
    x, index = leaf(V, D), whole(1024, V)
    return differentiated([x], lambda: x.new_zeros(1024, D).index_add(0, index, x))


@case("scatter_add")
def _scatter_add() -> Callable[[], None]:
    x, index = leaf(V, D), whole(1024, V, D)
    return differentiated([x], lambda: x.new_zeros(1024, D).scatter_add(0, index, x))


@case("argsort of indices")
def _argsort() -> Callable[[], None]:
    x, index = leaf(1 << 22), whole(64, 1 << 22)
    return differentiated([x], lambda: x[index.argsort(stable=True)])


@case("bincount")
def _bincount() -> Callable[[], None]:
    x, index = leaf(64), whole(64, 1 << 24)
    return differentiated([x], lambda: x * torch.bincount(index, minlength=64))


# Products
case("linear", **DTYPES)(lambda dtype: layer(nn.Linear(D, 4 * D), leaf(B, S, D, dtype=dtype)))
case("linear odd", **DTYPES)(lambda dtype: layer(nn.Linear(1001, 4001), leaf(B, S, 1001, dtype=dtype)))


@case("einsum of heads")
def _einsum() -> Callable[[], None]:
    q, k = leaf(B, S, H, 64), leaf(B, S, H, 64)
    return differentiated([q, k], lambda: torch.einsum("bqhd,bkhd->bhqk", q, k))


@case(
    "conv1d",
    wide={"channels": 256, "width": 3, "groups": 1},
    depthwise={"channels": 1024, "width": 4, "groups": 1024},
)
def _conv1d(channels: int, width: int, groups: int) -> Callable[[], None]:
    return layer(nn.Conv1d(channels, channels, width, groups=groups, padding=width - 1), leaf(8, channels, 4096))


@case("conv2d", **DTYPES)
def _conv2d(dtype: torch.dtype) -> Callable[[], None]:
    return layer(nn.Conv2d(64, 128, 3, padding=1), leaf(16, 64, 128, 128, dtype=dtype))


@case("patches", **DTYPES)
def _patches(dtype: torch.dtype) -> Callable[[], None]:
    return layer(nn.Conv2d(3, 768, 16, stride=16), leaf(32, 3, 224, 224, dtype=dtype))


@case("lstm")
def _lstm() -> Callable[[], None]:
    module, x = nn.LSTM(512, 512, batch_first=True).to(DEVICE), leaf(16, 256, 512)
    return differentiated([x, *module.parameters()], lambda: module(x)[0])


# Attention
ATTENTION = {
    f"{name} {width} {causal}": {"dtype": dtype, "width": width, "is_causal": causal == "causal"}
    for name, dtype in (("fp32", torch.float32), ("bf16", HALF))
    for width in (32, 64, 80, 128, 256)
    for causal in ("causal", "full")
}


@case("sdpa", **ATTENTION)
def _sdpa(dtype: torch.dtype, width: int, is_causal: bool) -> Callable[[], None]:
    q, k, v = (leaf(B, H, S, width, dtype=dtype) for _ in range(3))
    return differentiated([q, k, v], lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal))


@case("sdpa masked", **{f"{k} {n}": {**d, "kind": k} for n, d in DTYPES.items() for k in ("bool", "float", "row")})
def _sdpa_masked(dtype: torch.dtype, kind: str) -> Callable[[], None]:
    q, k, v = (leaf(B, H, S, 64, dtype=dtype) for _ in range(3))
    shape = (B, 1, 1, S) if kind == "row" else (B, 1, S, S)
    mask = torch.ones(shape, device=DEVICE, dtype=dtype if kind == "float" else torch.bool)
    return differentiated([q, k, v], lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@case("sdpa grouped", **DTYPES)
def _sdpa_grouped(dtype: torch.dtype) -> Callable[[], None]:
    q, k, v = leaf(B, H, S, 64, dtype=dtype), leaf(B, 4, S, 64, dtype=dtype), leaf(B, 4, S, 64, dtype=dtype)
    return differentiated(
        [q, k, v], lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    )


@case("sdpa dropout", **DTYPES)
def _sdpa_dropout(dtype: torch.dtype) -> Callable[[], None]:
    q, k, v = (leaf(B, H, S, 64, dtype=dtype) for _ in range(3))
    return differentiated([q, k, v], lambda: functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1))


@case("multihead attention")
def _multihead() -> Callable[[], None]:
    module, x = nn.MultiheadAttention(D, H, batch_first=True).to(DEVICE), leaf(B, S, D)
    return differentiated([x, *module.parameters()], lambda: module(x, x, x, need_weights=False)[0])


@case("transformer layer", **DTYPES)
def _transformer(dtype: torch.dtype) -> Callable[[], None]:
    return layer(nn.TransformerEncoderLayer(D, H, batch_first=True), leaf(B, S, D, dtype=dtype))


# Optimizers
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"make": torch.optim.AdamW},
    "adamw fused": {"make": torch.optim.AdamW, "fused": True},
    "adamw loop": {"make": torch.optim.AdamW, "foreach": False},
    "adam amsgrad": {"make": torch.optim.Adam, "amsgrad": True},
    "sgd momentum": {"make": torch.optim.SGD, "momentum": 0.9},
    "rmsprop": {"make": torch.optim.RMSprop},
    "adagrad": {"make": torch.optim.Adagrad},
    "adafactor": {"make": torch.optim.Adafactor},
    "nadam": {"make": torch.optim.NAdam},
    "lion-like adamax": {"make": torch.optim.Adamax},
}


@case("optimizer", **OPTIMIZERS)
def _optimizer(make: Any, **values: Any) -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(16))).to(DEVICE)
    optimizer, x = make(model.parameters(), lr=1e-3, **values), torch.randn(B, D, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


@case("clip_grad_norm", loop={"foreach": False}, foreach={"foreach": None})
def _clip(foreach: bool | None) -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(16))).to(DEVICE)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(B, D, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()

    return step


DEVICE = "cuda"


def build(name: str = "linear fp32") -> Callable[[], Any]:
    """The step of a case: what `stepscope plan benchmarks/plan_ops.py:build --set name=…` plans."""
    return CASES[name]()


def predicted(name: str) -> dict[str, Any]:
    """The peak that is planned for, on an H200."""
    from stepscope.devices.limits import find_device
    from stepscope.planner.prediction import Planner
    from stepscope.sweep.grid import Grid
    from stepscope.workloads.registry import find

    try:
        workload = find(f"{Path(__file__)}:build")
        grid = Grid(workload, {"device": "cpu"})
        [point] = grid.points([{"name": [name]}], False)
        found = Planner(workload).predict(point, find_device("NVIDIA H200"))
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:160]}
    return {"bytes": found.peak_allocated_bytes, "unmodelled": list(found.unmodelled)}


def measured(name: str) -> dict[str, Any]:
    """The peak of the third step on the GPU that is here."""
    try:
        step = build(name)
        step()
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:160]}
    return {"bytes": torch.cuda.max_memory_allocated()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="no GPU: the predictions alone")
    parser.add_argument("--measure", action="store_true", help="the measurements alone")
    parser.add_argument("--only", default="", help="parts of names, by commas")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--jsonl", type=Path, help="write the rows here")
    parser.add_argument("--measured", type=Path, help="rows measured before: predict anew, measure nothing")
    arguments = parser.parse_args()
    names = [name for name in CASES if any(part in name for part in arguments.only.split(","))]
    begin = time.perf_counter()
    if not arguments.measure:
        predicted(names[0])  # what it imports, forks have
    with ThreadPoolExecutor(arguments.processes) as pool:
        plans = [{} for _ in names]
        if not arguments.measure:
            plans = list(pool.map(lambda name: in_child(predicted, name), names))
        if arguments.measured:
            stored = [json.loads(line) for line in arguments.measured.read_text(encoding="utf-8").splitlines()]
            by_name = {row["name"]: row["measured"] for row in stored}
            peaks = [by_name.get(name, {"error": "not measured"}) for name in names]
        elif arguments.predict:
            peaks = [{} for _ in names]
        else:
            peaks = list(pool.map(lambda name: in_child(measured, name), names))
    rows = [{"name": n, "predicted": p, "measured": m} for n, p, m in zip(names, plans, peaks)]
    for row in rows:
        have = [row[side].get("bytes") for side in ("predicted", "measured")]
        row["error"] = have[0] / have[1] - 1 if all(have) else None
    for row in sorted(rows, key=lambda row: -abs(row["error"] or 0)):
        texts = [_text(row[side]) for side in ("predicted", "measured")]
        error = "" if row["error"] is None else f"{row['error']:+8.2%}"
        notes = "; ".join(row["predicted"].get("unmodelled", []))[:80]
        print(f"{row['name']:32} {texts[0]:>12} {texts[1]:>12} {error:>9}  {notes}")
    if arguments.jsonl:
        arguments.jsonl.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} cases, {time.perf_counter() - begin:.0f} s", file=sys.stderr)


def _text(side: dict[str, Any]) -> str:
    return f"{side['bytes'] / 2**20:.1f} MiB" if "bytes" in side else str(side.get("error", ""))[:70]


if __name__ == "__main__":
    main()
