"""The figures are right: phases against a stopwatch, FLOPs and parameters against closed forms."""

import json
from statistics import mean, median

import pytest

from stepscope import read
from stepscope.analysis.time.phases import phase_of

# Every phase sleeps for a time of its own; the script has a stopwatch: {phase: [seconds of step 0, of step 1, ...]}.
SLEEPER = """
import json, sys, time
from collections import defaultdict
from contextlib import contextmanager
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

kind = sys.argv[1]
watch = defaultdict(list)

@contextmanager
def timed(phase):
    begin = time.perf_counter()
    yield
    watch[phase].append(time.perf_counter() - begin)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 27
    def __getitem__(self, index):
        time.sleep(0.040)
        return torch.ones(4)

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.060)
        return gradient

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        x = Slow.apply(self.linear(x))
        if kind == "nested":  # a gradient inside the forward, and a backward inside the backward
            torch.autograd.grad((x.detach().requires_grad_() ** 2).sum(), self.last.bias, allow_unused=True)
            x = checkpoint(self.last, x, use_reentrant=True)
        time.sleep(0.030)
        return x

class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        with timed("optimizer"):  # in here: around it lie torch's own hooks, and the recorder's work after a step
            time.sleep(0.020)
            return super().step(closure)

model = Model()
optimizer = Optimizer(model.parameters(), lr=0.1)
data = Data()
loader = ((data[index][None] for index in range(27)) if kind == "no DataLoader" else iter(DataLoader(data)))
for _ in range(27):
    with timed("data"):
        x = next(loader)
    with timed("forward"):
        loss = model(x).sum()
    with timed("backward"):
        loss.backward()
    optimizer.step()
    with timed("other"):
        optimizer.zero_grad()
        time.sleep(0.050)
print(json.dumps(watch), file=sys.stderr)
"""

TRANSFORMER = """
import json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
import stepscope
from stepscope.recorder.windows import Windows

B, S, D, H, FF, L, V = 2, 24, 16, 4, 40, 3, 50

class Block(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.gain = nn.Parameter(torch.ones(2, D))
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(D, FF, bias=False) for _ in range(2))
        self.down = nn.Linear(FF, D, bias=False)

    def attention(self, x):
        q, k, v = (f(x).view(B, S, H, D // H).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / (D // H) ** 0.5
            mask = torch.ones(S, S).triu(1).bool()
            out = torch.matmul(scores.masked_fill(mask, float("-inf")).softmax(-1), v)
        return self.o(out.transpose(1, 2).reshape(B, S, D))

    def forward(self, x):
        x = x + self.attention(F.rms_norm(x, (D,), self.gain[0]))
        y = F.rms_norm(x, (D,), self.gain[1])
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

class Transformer(nn.Module):
    def __init__(self, fused=False, reentrant=None):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block(fused) for _ in range(L))
        self.head = nn.Linear(D, V, bias=False)
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)

class Experts(nn.Module):
    def __init__(self, num_starved=0):
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.router = nn.Linear(D, 8, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, FF, bias=False), nn.ReLU(), nn.Linear(FF, D, bias=False)) for _ in range(8)
        )
        self.head = nn.Linear(D, V, bias=False)
        self.register_buffer("closed", torch.arange(8) < num_starved)

    def forward(self, tokens):
        x = self.embedding(tokens).flatten(0, 1)
        weights, chosen = self.router(x).masked_fill(self.closed, -1e9).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, rank = torch.where(chosen == index)
            out = out.index_add(0, row, weights[row, rank, None] * expert(x[row]))
        return self.head(x + out).view(B, S, V)

def train(name, model, trains=True):
    torch.manual_seed(0)
    with stepscope.record(name, windows=Windows(warmup=2, clean=2, trace=0)):
        if not trains:
            with torch.no_grad():
                for _ in range(6):
                    model(torch.randint(V, (B, S)))
            return
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(6):
            tokens = torch.randint(V, (B, S))
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

train("inference", Transformer(), trains=False)
train("naive", Transformer())
train("fused", Transformer(fused=True))
train("checkpointed", Transformer(reentrant=False))
train("checkpointed, reentrant", Transformer(reentrant=True))
frozen = Transformer()
frozen.embedding.requires_grad_(False)
frozen.blocks[0].gain.requires_grad_(False)
train("frozen", frozen)
train("experts", Experts())
train("starved experts", Experts(num_starved=3))
"""
B, S, D, FF, L, V = 2, 24, 16, 40, 3, 50
T = B * S
WEIGHTS = 2 * T * (L * (4 * D**2 + 3 * D * FF) + D * V)
ATTENTION = L * 4 * B * S**2 * D
NUM_PARAMETERS = 2 * V * D + L * (4 * D**2 + 3 * D * FF + 2 * D)


@pytest.fixture(
    scope="module",
    params=["DataLoader", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("no DataLoader", "nested"))],
)
def stopwatch(lab, forks, request):
    """(seconds of each step by phase as the script timed them, the run, its card)"""
    options = ("--json", "--warmup", 3, "--clean", 15, "--trace", 5)
    run = lab.script(SLEEPER).run_in_fork(forks, *options, arguments=(request.param,))
    assert run.exit_code == 0, run.stderr
    watch = json.loads(next(line for line in run.stderr.splitlines() if line.startswith("{")))
    # A step ends with its optimizer: what the loop's body does after that belongs to the next one.
    watch["other"].insert(0, 0.0)
    if request.param == "no DataLoader":
        # Nothing tells the data's time from what else stands between a step's end and the next forward.
        watch["data"] = [sum(pair) for pair in zip(watch["data"], watch["other"])]
        watch["other"] = [0.0] * 27
    return watch, run, json.loads(run.stdout)


CLEAN = slice(3, 18)


def seconds_of_steps(watch):
    return [sum(parts) for parts in zip(*watch.values())]


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_a_phase_is_as_long_as_the_stopwatch_says(stopwatch, phase):
    watch, run, card = stopwatch
    clean = run.recording.window("clean")
    belongs = phase_of(clean)
    recorded = [sum(ns for name, ns in sample.host_ns.items() if belongs[name] == phase) / 1e9 for sample in clean]
    step, seconds = median(seconds_of_steps(watch)[CLEAN]), watch[phase][CLEAN]
    # A share of the step: a short phase that waits for a core is longer than the stopwatch inside it says.
    assert median(ours - theirs for ours, theirs in zip(recorded, seconds)) == pytest.approx(0, abs=0.02 * step)
    on_the_card = {entry["name"]: entry["host_ns"] / 1e9 for entry in card["phases"]}
    middle = sorted(range(15), key=lambda place: clean[place].wall_ns)[3:12]
    assert on_the_card[phase] == pytest.approx(mean(seconds[place] for place in middle), abs=0.02 * step)


def _mean_of_middle_ns(run):
    """The card has the mean of the middle half of the steps, the shortest and the longest quarter left out."""
    return mean(sorted(sample.wall_ns for sample in run.recording.window("clean"))[3:12])


def test_the_step_is_as_long_as_its_parts(stopwatch):
    watch, run, card = stopwatch
    steps = seconds_of_steps(watch)[CLEAN]
    assert card["step_ns"]["median"] / 1e9 == pytest.approx(median(steps), rel=0.02)
    assert sum(phase["host_ns"] for phase in card["phases"]) == pytest.approx(_mean_of_middle_ns(run), rel=1e-6)
    assert [row["name"] for row in card["rows"]][:5] == ["data", "forward", "backward", "optimizer", "other"]
    assert sum(row["share"] for row in card["rows"]) == pytest.approx(1, abs=1e-9)
    assert card["num_clean"] == 15
    assert set(run.each("window")) == {"warmup", "clean", "trace_warmup", "trace", "memory", "free"}
    for sample in run.recording.samples:
        if sample.window != "free":
            assert sum(sample.host_ns.values()) == sample.wall_ns


def test_what_watching_costs_is_what_the_stopwatch_says(stopwatch):
    watch, run, card = stopwatch
    steps, effects = seconds_of_steps(watch), {each["window"]: each["ratio"] for each in card["observer_effects"]}
    for window in ("trace", "memory"):
        watched = median(steps[sample.step] for sample in run.recording.window(window))
        assert effects[window] == pytest.approx(watched / median(steps[CLEAN]), rel=0.1)


@pytest.fixture(scope="module")
def cards(lab, forks):
    """The card of each model of TRANSFORMER, recorded one after the other in one process."""
    script = lab.script(TRANSFORMER)
    run = script.python_in_fork(forks, script.path.name)
    assert run.exit_code == 0, run.stderr
    return {path.name: read(path).to_json() for path in script.folder.iterdir() if (path / "samples.jsonl").exists()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "model_flops"),
    [
        ("inference", WEIGHTS + ATTENTION),
        # Every product has two gradients: the first layer's input needs one too, the embedding is trained.
        ("naive", 3 * (WEIGHTS + ATTENTION)),
        ("fused", 3 * (WEIGHTS + ATTENTION // 2)),
        ("checkpointed", 3 * (WEIGHTS + ATTENTION)),
        ("checkpointed, reentrant", 3 * (WEIGHTS + ATTENTION)),
        # Nobody needs the gradient of what goes into the first block's q, k and v; its residual goes on past them.
        ("frozen", 3 * (WEIGHTS + ATTENTION) - 3 * 2 * T * D**2),
    ],
)
def test_model_flops_equal_the_closed_form(cards, name, model_flops):
    flops = cards[name]["flops"]
    assert flops["hidden"] is None
    assert flops["model_flops"] == model_flops
    assert sum(flops["model_flops_by_dtype"].values()) == model_flops
    assert set(flops["model_flops_by_dtype"]) == {"fp32"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "recomputed"),
    [
        ("naive", 0),
        # Recomputed are the blocks, not the head.
        ("checkpointed", WEIGHTS + ATTENTION - 2 * T * D * V),
        ("checkpointed, reentrant", WEIGHTS + ATTENTION - 2 * T * D * V),
    ],
)
def test_recomputed_flops_are_kept_apart(cards, name, recomputed):
    flops = cards[name]["flops"]
    # Non-reentrant checkpointing stops as soon as the last saved tensor is there again: at most one product early.
    assert flops["recomputed_flops"] in (recomputed, recomputed - L * 2 * T * D * FF)
    assert flops["hardware_flops"] == 3 * (WEIGHTS + ATTENTION) + flops["recomputed_flops"]


def test_the_formula_on_the_card_agrees_with_the_count(cards):
    for name in ("inference", "naive", "fused", "checkpointed"):
        flops = cards[name]["flops"]
        # The norms' weights are parameters that no product passes through.
        assert flops["formula_flops"] == pytest.approx(flops["model_flops"], rel=0.02)


def test_parameters_are_exact(cards):
    for name, frozen in [("inference", 0), ("naive", 0), ("checkpointed", 0), ("frozen", V * D + 2 * D)]:
        parameters = cards[name]["parameters"]
        assert parameters["num_total"] == NUM_PARAMETERS
        assert parameters["num_trainable"] == NUM_PARAMETERS - frozen
        assert parameters["bytes_by_dtype"] == {"float32": 4 * NUM_PARAMETERS}
    assert cards["naive"]["flops"]["num_active_parameters"] == NUM_PARAMETERS


@pytest.mark.parametrize("name", ["experts", "starved experts"])
def test_two_experts_of_eight_are_active(cards, name):
    rest, expert = 2 * V * D + 8 * D, 2 * D * FF
    assert cards[name]["parameters"]["num_total"] == rest + 8 * expert
    assert cards[name]["flops"]["num_active_parameters"] == rest + 2 * expert


def test_tokens_of_the_transformer(cards):
    assert {name: card["throughput"]["per_step"] for name, card in cards.items()} == dict.fromkeys(cards, T)
    assert all(card["throughput"]["unit"] == "tokens" for card in cards.values())
