"""Plans of one rank of DDP, FSDP2 with a policy, hybrid sharding and tensor parallelism, against real gloo ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from parametrized import parametrized

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this build of PyTorch has no torch.distributed", allow_module_level=True)

from gloo_ranks import peak_bytes

from stepscope.cli.main import main
from stepscope.devices.limits import find_device
from stepscope.errors import UsageError
from stepscope.planner.parallel import Parallel, parallel_of
from stepscope.planner.prediction import Planner
from stepscope.sweep.grid import Grid
from stepscope.workloads.registry import find

H200 = find_device("NVIDIA H200")
STEP = {"preset": "tiny", "mode": "step"}
WIDTH = 64
OWN = f"""
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm({WIDTH}), nn.Linear({WIDTH}, 256), nn.Linear(256, {WIDTH})

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Model(nn.Module):
    tp_plan = {{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}}

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def build(batch: int = 512):
    return Model(), lambda: torch.randn(batch, {WIDTH})
"""
SKIP = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(30, 110)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(110, 110), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(110, 5)

    def forward(self, x):
        y = x = self.first(x)
        for layer in self.layers:
            y = layer(y)
        return self.last(x + y)  # the first stage sends to the last one too

    def loss_fn(self, outputs, targets):
        return (outputs - targets).square().mean()

def build(batch: int = 600):
    return Model(), lambda: (torch.randn(batch, 30), torch.randn(batch, 5))
"""
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def workloads(tmp_path):
    """Return a function that makes a workload's name that of this folder's file, if it has one."""
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "skip.py").write_text(SKIP, encoding="utf-8")
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    own = {
        "own": f"{tmp_path}/own.py:build",
        "skip": f"{tmp_path}/skip.py:build",
        "llama": f"hf:{tmp_path}/llama.json",
    }
    return lambda name: own.get(name, name)


def predicted(parallel, workload, values, device=None, limit_bytes=None):
    grid = Grid(find(workload), {"device": "cpu"})
    point = grid.points([grid.words([f"{name}={value}" for name, value in values.items()])], False)[0]
    return Planner(find(workload), parallel, limit_bytes).predict(point, device)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("parallel", "workload", "values"),
    [
        ({"fsdp": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}, "cs336", STEP),
        ({"fsdp": 3, "param_dtype": "bf16"}, "hydra", STEP),
        ({"fsdp": 2, "param_dtype": "bf16"}, "nano", STEP),
        ({"fsdp": 2, "replicas": 2}, "cs336", STEP),
        ({"ddp": 2}, "cs336", STEP),
        ({"ddp": 2}, "cs336", {"preset": "small", "mode": "step", "seq_len": 32, "batch": 1}),
        ({"ddp": 3}, "nano", {**STEP, "dtype": "autocast_bf16"}),
        ({"tp": 2}, "own", {"mode": "step"}),
        ({"tp": 2}, "llama", {"mode": "step", "seq_len": 64, "batch": 2}),
        ({"pp": 2, "num_microbatches": 4}, "cs336", STEP),
        ({"pp": 2, "num_microbatches": 2, "schedule": "gpipe"}, "hydra", STEP),
        ({"pp": 3, "num_microbatches": 3, "split": ("layers.1", "last")}, "skip", {"mode": "step"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
@pytest.mark.filterwarnings("ignore:mkldnn")
def test_one_rank_against_gloo(parallel, workload, values, workloads):
    name = workloads(workload)

    found = predicted(Parallel(**parallel), name, values)

    real = peak_bytes(parallel, name, values)
    assert list(found.stage_peak_bytes or [found.peak_allocated_bytes]) == pytest.approx(
        real if "pp" in parallel else real[:1], rel=0.01
    )
    assert sum(found.live_at_peak.values()) == found.peak_allocated_bytes
    assert found.num_ranks == Parallel(**parallel).num_ranks


def test_ddp_has_a_place_for_every_gradient_in_its_buckets():
    """At a batch of one, the peak is in the optimizer: weights, gradients, buckets, and two numbers for each."""
    found = predicted(Parallel(ddp=4), "cs336", {**STEP, "batch": 1, "seq_len": 8, "optimizer": "fused"}, H200)

    live = found.live_at_peak
    assert live["communication"] == live["gradient"] == live["parameter"] > 0
    assert live["optimizer_state"] > 2 * live["parameter"]
    assert (found.num_ranks, found.fsdp, found.parallel) == (4, None, "DDP")


def test_a_policy_gathers_and_reduces_in_its_dtypes():
    plain = predicted(Parallel(fsdp=4), "cs336", STEP, H200).live_at_peak
    mixed = predicted(Parallel(fsdp=4, param_dtype="bf16", reduce_dtype="fp32"), "cs336", STEP, H200).live_at_peak

    assert 2 * mixed["unsharded_parameter"] == plain["unsharded_parameter"]
    assert mixed["parameter"] == plain["parameter"]  # shards stay in float32


def test_replicas_shard_over_their_own_group():
    hybrid, plain = (predicted(each, "cs336", STEP) for each in (Parallel(fsdp=2, replicas=2), Parallel(fsdp=2)))

    assert hybrid.live_at_peak["parameter"] == plain.live_at_peak["parameter"]
    assert hybrid.num_ranks == 4 and hybrid.parallel == "FSDP2, 2 replicas of 2 ranks"


def test_tensor_parallelism_splits_what_the_models_plan_names(workloads):
    live = predicted(Parallel(tp=4), workloads("own"), {"mode": "step"}, H200).live_at_peak

    split, whole = 256 * WIDTH // 4 * 2 + 256 // 4, WIDTH + 2 * WIDTH  # of a block; whole: norm, and down's bias
    assert live["parameter"] == 3 * 4 * (split + whole)


def test_offloaded_activations_are_not_on_the_device():
    plain, offloaded = (predicted(each, "cs336", STEP, H200) for each in (None, Parallel(offload=True)))

    assert offloaded.live_at_peak.get("activation", 0) < plain.live_at_peak["activation"] / 2
    assert offloaded.peak_allocated_bytes < plain.peak_allocated_bytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fsdp": 2, "ddp": 2}, "--fsdp and --ddp cannot be planned together"),
        ({"ddp": 1}, "from 2 to 16384"),
        ({"tp": "x"}, "must be an integer"),
        ({"fsdp": "4x5000"}, "from 2 to 16384"),
        ({"fsdp": "2x"}, "--fsdp 2x: it must be an integer"),
        ({"fsdp": "0x2"}, "replicas=0"),
        ({"fsdp": 2, "mixed_precision": ":"}, "or two as in bf16:fp32"),
        ({"pp": 2, "microbatches": "-3"}, "--microbatches -3: it must be an integer from 1 on"),
        ({"pp": 0}, "from 2 to 16384"),
        ({"pp": "-2"}, "must be an integer"),
        ({"pp": "a.1,a.1"}, "name every module once"),
        ({"pp": 2, "tp": 2}, "--tp and --pp cannot be planned together"),
        ({"pp": 4, "microbatches": 3}, "for each of 4 stages. Use more, or --schedule gpipe"),
        ({"pp": 4, "microbatches": 0, "schedule": "gpipe"}, "--microbatches 0"),
        ({"pp": 2, "microbatches": "many"}, "--microbatches many"),
        ({"pp": 2, "schedule": "zb"}, "choose from 1f1b, gpipe"),
        ({"microbatches": 4}, "use them with --pp"),
        ({"ddp": 2, "mixed_precision": "bf16"}, "use it with --fsdp"),
        ({"fsdp": 2, "mixed_precision": "int8"}, "choose from bf16"),
    ],
)
def test_options_that_do_not_fit(options, said):
    with pytest.raises(UsageError, match=said):
        parallel_of(**options)


def test_a_stage_has_its_own_weights_and_the_micro_batches_of_its_schedule(workloads):
    skip = workloads("skip")
    piped = Parallel(pp=2, num_microbatches=6, split=("layers.1",))

    early, late = (
        predicted(each, skip, {"mode": "step"}, H200) for each in (piped, replace(piped, schedule="gpipe"))
    )

    weights = 30 * 110 + 110 + 3 * (110 * 110 + 110) + 110 * 5 + 5
    assert early.parameters == late.parameters == weights
    assert early.peak_allocated_bytes == max(early.stage_peak_bytes) and early.num_ranks == len(
        early.stage_peak_bytes
    )
    # Of 1F1B's micro-batches two are alive in the first stage, and the last one sent; of GPipe's, all six.
    microbatch_bytes = 2 * 100 * 110 * 4  # after each of two layers
    assert 3 <= (late.stage_peak_bytes[0] - early.stage_peak_bytes[0]) / microbatch_bytes <= 4


@parametrized(
    ("options", "said"),
    [
        (["--pp", "4"], "the model has 3 blocks in module lists. Name the modules where stages 2 to 4 begin"),
        (["--pp", "layers.1,middle"], "no module 'middle'. Its blocks: layers.0, layers.1, layers.2"),
        (
            ["--pp", "2", "--set", "batch=5"],
            "2 (one for each stage): it must divide the batch, which has 5 rows",
        ),
        (["--pp", "layers"], "each must be a module that is called, not a list"),
        (["--pp", "first"], "something must run before each"),
        (["--pp", "2", "--mode", "forward"], "use --mode step or forward+backward"),
    ],
    quick=3,
)
def test_what_cannot_be_a_pipeline_is_refused(options, said, workloads, capsys):
    assert main(["plan", workloads("skip"), *options]) == 2

    assert said in " ".join(capsys.readouterr().err.split())
    assert not torch.distributed.is_initialized()


@pytest.mark.long
@pytest.mark.timeout(900)  # 15 s of CPU time, on a machine that may be busy
def test_the_fewest_stages_and_the_largest_batch(workloads, capsys):
    words = ["plan", workloads("skip"), "--pp", "2", "--microbatches", "4", "--fit", "700MiB", "--json"]

    assert main(words) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["min_ranks"] == 2 and found["max_batch"] % 4 == 0 and found["max_batch"] > 600
    assert len(found["stage_peak_bytes"]) == found["num_ranks"] == 2


def test_the_verb_says_whose_memory_it_is(capsys):
    assert main(["plan", "cs336", "--preset", "tiny", "--ddp", "2"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "one rank of 2 on NVIDIA H100" in text and "DistributedDataParallel with its defaults" in text

    assert main(["plan", "nano", "--preset", "tiny", "--tp", "2"]) == 2
    assert "no tensor-parallel plan" in capsys.readouterr().err
    assert not torch.distributed.is_initialized()


def test_a_plan_does_not_meet_what_dtensor_kept_of_another_way(workloads):
    for parallel in (Parallel(fsdp=8), Parallel(tp=8)):
        live = predicted(parallel, workloads("own"), {"mode": "step"}, H200).live_at_peak

    assert live["parameter"] == 3 * 4 * (256 * WIDTH // 8 * 2 + 256 // 8 + 3 * WIDTH)


@pytest.mark.parametrize(
    ("workload", "number", "said"),
    [
        ("own", 3, "--tp 3: blocks.0.up.weight has size 256 where the plan splits it"),
        pytest.param("llama", 4, "--tp 4: the model has num_key_value_heads=2", marks=pytest.mark.long),
    ],
)
def test_ranks_that_cannot_share_a_model_evenly_are_refused_in_a_sentence(workload, number, said, workloads, capfd):
    words = ["plan", workloads(workload), "--tp", str(number)] + ["--set", "seq_len=64"] * (workload == "llama")

    assert main(words) == 2

    told = " ".join(capfd.readouterr().err.split())
    assert said in told and "needs equal shares" in told and "Traceback" not in told
    assert "RuntimeError" not in told and told.count("stepscope plan:") == 1


@pytest.mark.long
def test_the_fewest_gpus_and_the_largest_batch_that_fit(capsys):
    sizes = {"batch": 1, "seq_len": 16, "d_model": 1792, "d_ff": 7168, "layers": 2, "heads": 14}
    values = {"preset": "small", "mode": "step", **sizes}
    words = ["plan", "cs336", "--preset", "small", "--fit", "1700MiB"]
    words += [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]

    assert main([*words, "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    number, device = found["min_ranks"], find_device(next(iter(found["fits"])))
    assert number > 2 and found["max_batch"] == 0  # on one GPU
    verdicts = [
        predicted(Parallel(fsdp=ranks), "cs336", values, device, 1700 << 20).fits for ranks in (number - 1, number)
    ]
    assert verdicts[0] != "fits" and verdicts[1] == "fits"
    assert main([*words, "--ddp", "2"]) == 0
    assert "more ranks do not help" in " ".join(capsys.readouterr().out.split())
