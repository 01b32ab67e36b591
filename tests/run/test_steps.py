"""Steps, micro-batches and tokens, found without edits in every kind of loop."""

import json

import pytest

from stepscope.trace.recording import read_recording

N = 12  # what most loops here run
ALL = list(range(N))

LOOPS = {
    "plain": """
        for _ in range(12):
            train_step()
        """,
    "accumulated": """
        for _ in range(12):
            for _ in range(4):
                (loss_of(model, batch()) / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "scaled": """
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(12):
            scaler.scale(loss_of(model, batch())).backward()
            if step in (0, 3, 6):
                model.head.weight.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        """,
    "alternating": """
        critic = Model()
        critic_optimizer = torch.optim.Adam(critic.parameters())
        for _ in range(12):
            loss_of(critic, batch()).backward()
            critic_optimizer.step()
            train_step()
        """,
    "back to back": """
        first = torch.optim.SGD(model.embedding.parameters(), lr=0.1)
        second = torch.optim.Adam(model.head.parameters())
        for _ in range(12):
            loss_of(model, batch()).backward()
            first.step()
            second.step()
        """,
    "three to one": """
        critic = Model()
        critic_optimizer = torch.optim.Adam(critic.parameters())
        for _ in range(12):
            for _ in range(3):
                loss_of(critic, batch()).backward()
                critic_optimizer.step()
            train_step()
        """,
    "closure": """
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
        tokens = batch()

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, tokens)
            loss.backward()
            return loss

        for _ in range(12):
            optimizer.step(closure)
        """,
    "explicit": """
        import stepscope
        for _ in range(12):
            train_step()
            train_step()
            stepscope.step(tokens=77)
        """,
    "no_grad": """
        with torch.no_grad():
            for _ in range(12):
                model(batch())
        """,
    "inference_mode": """
        with torch.inference_mode():
            for _ in range(12):
                model(batch())
        """,
    "gradients on": """
        for _ in range(12):
            model(batch()).argmax(-1)
        """,
    "evaluated": """
        for step in range(12):
            train_step()
            if step % 5 == 3:
                model.eval()
                with torch.no_grad():
                    for _ in range(3):
                        loss_of(model, batch())
                model.train()
        """,
    "autocast": """
        for _ in range(12):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, batch())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    "ends after the windows": """
        for step in range(1000):
            print("step", step)
            train_step()
        """,
    "tokens given": """
        for _ in range(12):
            train_step()
        """,
    "Hugging Face": """
        import os
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

        config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2)
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(16, (120, 5))]
        settings = TrainingArguments(
            "out", max_steps=30, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        )
        Trainer(GPT2LMHeadModel(config), settings, train_dataset=rows).train()
        """,
    "Lightning": """
        import lightning
        from torch.utils.data import DataLoader

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = model
            def training_step(self, tokens, index):
                return loss_of(self.model, tokens)
            def validation_step(self, tokens, index):
                loss_of(self.model, tokens)
            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters())

        trainer = lightning.Trainer(
            max_steps=40, val_check_interval=20, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )
        tokens = torch.randint(16, (80, 5))
        trainer.fit(Module(), DataLoader(tokens, batch_size=2), DataLoader(tokens[:4], batch_size=2))
        """,
}
OPTIONS = {
    "ends after the windows": ("--warmup", "2", "--clean", "3", "--exit-after"),
    "tokens given": ("--warmup", "2", "--clean", "3", "--trace", "0", "--tokens-per-step", "1000"),
}

TRAINERS = {"Hugging Face": 20, "Lightning": 10}  # tokens of a step; their callbacks are in `make test`

COMPILED = """
import json, sys
from tiny import *

class Printing(Model):
    def forward(self, tokens):
        x = self.embedding(tokens)
        print(end="")  # the break
        return self.head(x)

kind = sys.argv[1]
model = Printing() if kind == "graph break" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
call = torch.compile(model, backend="eager", dynamic=False)
if kind == "module":
    model.compile(backend="eager")
    call = model
if kind == "function":
    call = torch.compile(lambda tokens: model(tokens), backend="eager")
for step in range(14):
    length = 5 + step % 3 if kind == "recompiles" else 5
    loss_of(call, torch.randint(16, (2, length))).backward()
    optimizer.step()
    optimizer.zero_grad()
print(json.dumps(dict(torch._dynamo.utils.counters["frames"])))
"""


@pytest.fixture(scope="module")
def runs(lab):
    return lab.start({name: "from tiny import *\n" + _dedent(loop) for name, loop in LOOPS.items()}, OPTIONS)


def _dedent(loop):
    return "\n".join(line[8:] for line in loop.splitlines())


@pytest.mark.parametrize(
    ("name", "steps", "source", "num_sources", "num_micro_batches"),
    [
        ("plain", ALL, "optimizer", 1, 1),
        ("accumulated", ALL, "optimizer", 1, 4),
        ("scaled", ALL, "optimizer", 1, 1),
        ("alternating", ALL, "optimizer", 2, 1),
        ("back to back", ALL, "optimizer", 2, 1),
        ("three to one", ALL, "optimizer", 2, 1),
        ("explicit", ALL, "step()", 1, 2),
        ("no_grad", ALL, "forward", 1, 1),
        ("inference_mode", ALL, "forward", 1, 1),
        # Only the second forward shows that no backward follows the first.
        ("gradients on", ALL[:-1], "forward", 1, 1),
        ("evaluated", ALL, "optimizer", 1, 1),
        ("autocast", ALL, "optimizer", 1, 1),
        ("tokens given", ALL, "optimizer", 1, 1),
        pytest.param("Hugging Face", list(range(30)), "optimizer", 1, 2, marks=pytest.mark.long),
        pytest.param("Lightning", list(range(40)), "optimizer", 1, 1, marks=pytest.mark.long),
    ],
)
def test_each_step_is_found_once(runs, name, steps, source, num_sources, num_micro_batches):
    run = runs[name]
    assert run.exit_code == 0, run.stderr
    assert run.recording.status == "finished"
    assert run.steps == steps
    assert run.recording.facts["steps"]["source"] == source
    assert run.recording.facts["steps"]["num_sources"] == num_sources
    clean = run.recording.window("clean")
    assert [sample.num_micro_batches for sample in clean] == [num_micro_batches] * len(clean)
    assert run.recording.facts.get("notes", []) == []


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [
        *(("plain", 10), ("accumulated", 40), ("no_grad", 10), ("evaluated", 10), ("explicit", 77)),
        *(("tokens given", 1000), *(pytest.param(*each, marks=pytest.mark.long) for each in TRAINERS.items())),
    ],
)
def test_tokens_of_a_step_are_those_it_was_trained_on(runs, name, num_tokens):
    measured = [sample for sample in runs[name].recording.samples if sample.window != "free"]
    assert [sample.num_tokens for sample in measured] == [num_tokens] * len(measured)
    assert runs[name].card["throughput"]["unit"] == "tokens"
    assert runs[name].card["throughput"]["per_step"] == num_tokens


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in TRAINERS else name for name in LOOPS]
)
def test_every_part_of_every_step_has_an_owner(runs, name):
    measured = [sample for sample in runs[name].recording.samples if sample.window != "free"]
    assert measured
    for sample in measured:
        assert sum(sample.host_ns.values()) == sample.wall_ns


def test_every_window_has_its_steps(runs):
    windows = runs["plain"].each("window")
    assert windows == ["warmup"] * 2 + ["clean"] * 3 + ["trace_warmup", "trace", "memory"] + ["free"] * 4


def test_a_skipped_step_is_a_step_and_is_counted(runs):
    assert runs["scaled"].each("num_skipped")[:8] == [1, 0, 0, 1, 0, 0, 1, 0]
    assert "GradScaler" in runs["scaled"].stdout


def test_forward_and_backward_inside_a_closure_keep_their_names(runs):
    run = runs["closure"]
    assert run.steps == ALL
    for sample in run.recording.window("clean"):
        assert {"forward", "backward", "optimizer"} <= set(sample.host_ns)
        assert sample.num_micro_batches >= 1


def test_inference_has_no_backward(runs):
    for name in ("no_grad", "inference_mode", "gradients on"):
        flops = runs[name].card["flops"]
        assert flops["has_backward"] is False
        assert flops["model_flops"] == 2 * 10 * 8 * 16
        phases = {phase["name"]: phase["host_ns"] for phase in runs[name].card["phases"]}
        assert phases["backward"] == phases["optimizer"] == 0


def test_autocast_shows_in_the_dtype_of_the_flops(runs):
    assert set(runs["autocast"].card["flops"]["model_flops_by_dtype"]) == {"bf16"}
    assert set(runs["plain"].card["flops"]["model_flops_by_dtype"]) == {"fp32"}


def test_exit_after_stops_the_script_after_the_last_window(runs):
    run = runs["ends after the windows"]
    assert run.exit_code == 0, run.stderr
    assert run.recording.status == "finished"
    # After the windows it goes on for long enough to tell the throughput.
    assert run.steps == list(range(len(run.steps)))
    assert 2 + 3 + 1 + 2 + 1 + 20 <= len(run.steps) <= 2 + 3 + 1 + 2 + 1 + 300
    assert [line for line in run.stdout.splitlines() if line.startswith("step ")][-1] == f"step {run.steps[-1]}"
    assert run.card["flops"]["model_flops"] > 0


@pytest.mark.long
def test_every_rank_of_a_ddp_run_has_a_recording(lab):
    script = lab.script(
        """
        from tiny import *
        import torch.distributed
        torch.distributed.init_process_group("gloo")
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(12):
            loss_of(parallel, batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.distributed.destroy_process_group()
        """
    )
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    windows = ("--warmup", 2, "--clean", 3, "--trace", 1)
    run = script.python(*launcher, "-m", "stepscope", "run", "-o", "recording", *windows, "train.py")
    assert run.exit_code == 0, run.stderr
    assert run.stdout.count("Where a step goes") == 1
    for rank, folder in enumerate([run.folder, run.folder / "rank1"]):
        recording = read_recording(folder)
        assert recording.status == "finished"
        assert [sample.step for sample in recording.samples] == ALL
        assert recording.facts["environment"]["rank"] == rank
        assert recording.facts["environment"]["world_size"] == 2
        assert recording.facts["parameters"]["num_total"] == 2 * 16 * 8
        assert (folder / "trace" / f"rank{rank}.json.gz").exists()
        assert json.loads((folder / "recording.json").read_text())["flops"]["error"] is None


@pytest.mark.long
@pytest.mark.parametrize("kind", ["model", "module", "function", "graph break", "recompiles"])
def test_a_compiled_loop_compiles_what_it_always_compiles(lab, kind):
    bare, run = lab.script(COMPILED).both(kind)
    assert run.exit_code == bare.exit_code == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(bare.stdout)
    assert run.steps == list(range(14))
    assert run.card["flops"]["model_flops"] == 3 * 2 * 8 * 16 * (2 * 6 if kind == "recompiles" else 10)
    compiler = run.recording.compiler
    assert "stepscope" not in str(compiler["frames"])
    assert compiler["num_compiles"] == sum(run.each("num_compiles")) == json.loads(bare.stdout)["ok"]
    assert compiler["compile_seconds"] > 0

    breaks = [(entry["place"].rpartition("/")[2], entry["reason"]) for entry in compiler["graph_breaks"]]
    line = next(number for number, text in enumerate(COMPILED.splitlines(), 1) if "# the break" in text)
    assert [place for place, _ in breaks] == ([f"train.py:{line} in forward"] if kind == "graph break" else [])
    assert all("print" in reason for _, reason in breaks)

    assert len(compiler["recompiles"]) == (2 if kind == "recompiles" else 0)  # three lengths
    for entry in compiler["recompiles"]:
        assert entry["frame"].startswith("forward (")
        assert "size mismatch at index 1" in entry["failed_guards"][0]
