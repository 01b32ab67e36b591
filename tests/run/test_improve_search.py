"""The search of `stepscope improve` on made-up runs: what is kept, rejected, tried again and resumed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import stepscope
from handmade import MS, sample, write_recording
from parametrized import parametrized
from stepscope import session
from stepscope.api import improve_order, improve_search
from stepscope.errors import MissingDependencyError, StepscopeError, UsageError
from stepscope.findings.fixes import Chosen
from stepscope.sweep import record_runs
from stepscope.sweep.record_runs import Failure

RUN_S = 10.0


@dataclass
class Machine:
    """Stands for a script and what changes do to it; `run_again` writes the recording that a run would leave."""

    factors: dict[str, float] = field(default_factory=dict)  # change → how many times as fast, alone
    together: dict[frozenset[str], float] = field(default_factory=dict)  # changes → another factor
    losses: dict[str, float] = field(default_factory=dict)  # change → factor of the loss
    failing: dict[str, str] = field(default_factory=dict)
    seedless: float = 0.0
    noise: float = 0.001
    host_ns: dict[str, int] = field(default_factory=lambda: {"data": MS, "forward": 8 * MS, "optimizer": MS})
    killed_at: int | None = None
    killed_by: BaseException = field(default_factory=lambda: SystemExit("killed"))
    runs: list[str] = field(default_factory=list)
    traced: list[str] = field(default_factory=list)
    num_prefetched: int = 0
    micro_batches: int = 1  # of a step
    num_samples: dict[str, int] = field(default_factory=dict)  # of a step with these changes, if they are others
    now_s: float = 0.0
    ledger: Callable[[set[str]], dict[str, float]] | None = None  # what findings promise, with some changes made
    random: random.Random = field(default_factory=lambda: random.Random(1))

    def run_again(self, command, output, options, fix, rehearses, num_traced=0, engine=None):
        is_look = fix is not None and fix.startswith("?")
        text = "" if fix is None or is_look else fix
        if len(self.runs) == self.killed_at:
            self.killed_at = None
            output.mkdir(parents=True)
            (output / "samples.jsonl").write_text('{"step": 0')
            raise self.killed_by
        names = [each for each in text.split("+") if each]
        self.now_s += self.seconds(text, num_traced)
        self.runs.append(text)
        self.traced += [text] if num_traced else []
        speed = self.speed(names)
        loss = 1 + self.random.uniform(-self.seedless, self.seedless)
        for name in names:
            loss *= self.losses.get(name, 1.0)
        host = {name: round(ns / speed) for name, ns in self.host_ns.items()}
        after = {name: round(1.2 * ns) if num_traced else ns for name, ns in host.items()}  # the trace, on a GPU
        windows = [("warmup", host)] * 8 + [("clean", host)] * 20 + [("free", after)] * 20
        losses = [loss * 4 / (n + 1) if n < 28 else None for n in range(48)]
        work = {"num_samples": self.num_samples.get(text, 32), "num_tokens": None}
        work["num_micro_batches"] = self.micro_batches // Chosen(text, (), "").growth
        samples = [
            sample(n, name, host_ns=ns, loss=losses[n], loss_sum=losses[n], **work)
            for n, (name, ns) in enumerate(windows)
        ]
        looked = (fix or "").removeprefix("?").split("+")
        facts = [{"id": each.partition("=")[0], "changed": {each: 1}, "left": {}} for each in looked if each]
        for each in facts if is_look else []:
            if each["id"] not in self.known:
                each |= {"changed": {}, "left": {f"no use for {each['id']}": 1}}
        environment = {"device": "cuda", "device_name": "Made-up", "torch": "2.0"}
        steps = {"num_prefetched": self.num_prefetched}
        write_recording(output, {"environment": environment, "fixes": facts, "steps": steps}, samples)
        for name in names or [""]:
            if name in self.failing:
                return Failure(self.failing[name])
        return None

    def seconds(self, text, num_traced):
        return RUN_S

    def speed(self, names):
        speed = 1.0
        for name in names:
            speed *= self.factors.get(name, 1.0)
        speed = next((s for some, s in self.together.items() if some <= set(names)), speed)
        return speed * (1 + self.random.uniform(-self.noise, self.noise))

    @property
    def known(self) -> set[str]:
        together = {name for some in self.together for name in some}
        return {name.partition("=")[0] for name in {*self.factors, *together, *self.losses, *self.failing}}


@pytest.fixture
def improve(monkeypatch, tmp_path):
    """`improve(machine, …)` runs the search on a made-up machine, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")

    def run(machine, **options):
        monkeypatch.setattr(record_runs, "run_again", machine.run_again)
        monkeypatch.setattr(improve_search.time, "monotonic", lambda: machine.now_s)
        if machine.ledger is not None:

            def expected(survey, best):
                changed = [each for fix in best.facts["fixes"] for each in fix["changed"]]
                return machine.ledger(set() if best is survey else set(changed))

            monkeypatch.setattr(improve_order, "_expected", expected)
        return stepscope.improve("train.py", "--lr", "1", **options)

    return run


def statuses(result):
    return {trial.fix: trial.status for trial in result.trials if trial.status != "nothing to change"}


def test_what_pays_is_kept_and_combined(improve):
    machine = Machine({"autocast": 1.5, "compile": 1.4, "cudnn_benchmark": 1.001, "pageable_copies": 0.8})

    result = improve(machine)

    assert result.kept == ("autocast", "compile") and result.is_finished and result.exit_code == 0
    assert result.gain.factor == pytest.approx(2.1, rel=0.01) and result.gain.num_runs == (3, 3)
    assert 2.0 < result.gain.low < result.gain.factor < result.gain.high < 2.2
    assert result.baseline_ns == pytest.approx(10 * MS, rel=0.01)
    assert statuses(result) == {
        **{"autocast": "kept", "compile": "kept", "cudnn_benchmark": "no gain shown", "pageable_copies": "slower"},
        **{"launch_bound": "slower", "compile=max-autotune-no-cudagraphs": "slower"},
    }
    brought = {trial.fix: trial.gain.factor for trial in result.trials if trial.status == "kept"}
    assert brought == {"autocast": pytest.approx(1.5, rel=0.01), "compile": pytest.approx(1.4, rel=0.01)}
    assert result.code == (
        'with torch.autocast("cuda", dtype=torch.bfloat16):  # around the forward pass, not the backward',
        "model.compile()  # before training",
    )
    assert json.loads(Path(result.folder, "improve.json").read_text())["result"] == json.loads(
        json.dumps(result.to_json())
    )
    shown = " ".join(str(result).split())
    assert "trains 2.1" in shown and "autocast, compile" in shown and "pageable_copies slower: 0.80×" in shown


def test_a_change_and_the_baseline_alternate_and_one_pair_rejects(improve):
    machine = Machine({"autocast": 1.5, "cudnn_benchmark": 1.001})

    improve(machine, fix=["autocast", "cudnn_benchmark"])

    # The survey, a pair of the baseline and autocast, which is clear, one try of cuDNN, and two pairs at the end.
    assert machine.runs == ["", "", "autocast", "autocast+cudnn_benchmark", "", "autocast", "", "autocast"]
    machine = Machine({"autocast": 1.2, "cudnn_benchmark": 1.05})
    improve(machine, fix=["autocast", "cudnn_benchmark"])
    # A smaller gain takes two pairs. The second run of what was kept is the reference of the next, with the first.
    both = "autocast+cudnn_benchmark"
    assert machine.runs[2:7] == ["autocast", "", "autocast", both, both]


def test_nothing_pays_and_the_screen_says_what_was_tried(improve):
    result = improve(Machine({"autocast": 0.9, "unfused_optimizer": 1.0}))

    assert result.kept == () and result.gain is None and result.best_ns == result.baseline_ns
    assert "Nothing paid" in str(result) and "tried autocast, unfused_optimizer" in " ".join(str(result).split())
    assert result.exit_code == 0 and result.code == ()


def test_a_change_that_breaks_the_script_is_rejected_and_the_search_goes_on(improve):
    machine = Machine({"unfused_optimizer": 1.3}, failing={"autocast": "RuntimeError: no such kernel"})

    result = improve(machine)

    assert statuses(result)["autocast"] == "failed" and result.kept == ("unfused_optimizer",)
    assert "failed: RuntimeError: no such kernel" in " ".join(str(result).split())
    assert machine.runs.count("autocast") == 1


def test_a_fast_change_with_other_losses_is_rejected(improve):
    machine = Machine(
        {"autocast": 3.0, "unfused_optimizer": 2.0}, losses={"autocast": 1.03, "unfused_optimizer": 1.002}
    )

    result = improve(machine)

    assert set(statuses(result).values()) == {"wrong"} and result.kept == ()
    assert "losses differ: up to 3.0 % apart" in " ".join(str(result).split())
    assert improve(machine, tolerance=0.05).kept == ("autocast", "unfused_optimizer")


def test_without_a_seed_the_spread_of_the_baseline_is_allowed_and_said(improve):
    machine = Machine({"unfused_optimizer": 2.0}, seedless=0.05)

    result = improve(machine)

    assert result.kept == ("unfused_optimizer",) and result.losses.noise_share > 0.02
    assert "from run to run" in result.warnings[0] and "Seed the script" in result.warnings[0]
    machine = Machine({"autocast": 2.0}, seedless=0.02, losses={"autocast": 1.5})
    assert improve(machine, clean=19).kept == ()


def test_what_pays_only_with_another_change_is_tried_again(improve):
    pair = frozenset({"memory_layout", "autocast"})
    machine = Machine({"autocast": 0.9, "memory_layout": 1.3}, {pair: 3.0})

    result = improve(machine, fix=["autocast", "memory_layout"])

    assert machine.runs[2] == "autocast" and result.kept == ("memory_layout", "autocast")
    assert result.gain.factor == pytest.approx(3.0, rel=0.01)


def test_a_better_mode_of_the_compiler_replaces_the_first(improve):
    result = improve(Machine({"launch_bound": 1.3, "compile": 1.6}))

    assert result.kept == ("compile",) and statuses(result)["launch_bound"] == "replaced"
    assert result.code == ("model.compile()  # before training",)


def test_micro_batches_are_doubled_until_that_does_not_pay(improve):
    factors = {"micro_batch": 1.3, "micro_batch=4": 1.6, "micro_batch=8": 1.5, "autocast": 1.5}
    result = improve(Machine(factors, micro_batches=8))

    assert result.kept == ("autocast", "micro_batch=4") and result.gain.factor == pytest.approx(2.4, rel=0.01)
    found = {name: status for name, status in statuses(result).items() if "micro" in name}
    assert found == {"micro_batch": "replaced", "micro_batch=4": "kept", "micro_batch=8": "slower"}


def test_micro_batches_that_run_out_of_memory_change_the_work_or_are_one_are_not_kept(improve):
    factors = {"micro_batch": 1.3, "micro_batch=4": 1.6, "autocast": 1.5}
    scarce = {"micro_batch=4": "OutOfMemoryError: CUDA out of memory"}
    machines = {
        "memory": Machine(factors, micro_batches=8, failing=scarce),
        "work": Machine(factors, micro_batches=8, num_samples={"autocast+micro_batch": 31}),
        "six": Machine(factors, micro_batches=6),
        "one": Machine(factors),
    }
    kept, reasons = {}, {}
    for name, machine in machines.items():
        result = improve(machine, output=name)
        kept[name] = result.kept[1:]
        reasons[name] = {trial.fix: trial.reason for trial in result.trials if "micro" in trial.fix}

    assert kept == {"memory": ("micro_batch",), "work": (), "six": ("micro_batch",), "one": ()}
    assert reasons == {
        "memory": {"micro_batch": None, "micro_batch=4": scarce["micro_batch=4"]},
        "work": {"micro_batch": "step 0 has 31 samples in 4 micro-batches with it, and 32 samples in 8 without"},
        "six": {"micro_batch": None},
        "one": {"micro_batch": "a step has one micro-batch"},
    }


def test_of_two_that_compile_and_promise_as_much_the_one_with_cuda_graphs_comes_first(improve):
    machine = Machine({"compile": 1.3, "launch_bound": 1.6}, ledger=lambda names: {"unfused_elementwise": 0.3})

    result = improve(machine)

    assert machine.runs[2] == "launch_bound" and result.kept == ("launch_bound",)
    assert result.code == ('model.compile(mode="reduce-overhead")  # before training',)


@dataclass
class ConvolutionsInFloat32(Machine):
    """A ResNet-50 on a fast GPU: with less work for the GPU, the host becomes the bottleneck.

    Its changes work on the GPU's milliseconds; a step takes as long as the slower side.
    """

    factors: dict[str, float] = field(
        default_factory=lambda: (
            {"memory_layout": 1.42, "autocast": 2.0, "cudnn_benchmark": 1.04, "compile": 1.05}
            | {"unfused_optimizer": 1.03, "expandable_segments": 1.0, "fp32_matmul": 1.0}
        )
    )
    compiled: set[frozenset[str]] = field(default_factory=set)  # what the compiler's cache has

    def sides_ms(self, names):
        gpu_ms, host_ms = 58.0, 31.0
        for name in names:
            gpu_ms /= self.factors.get(name, 1.05)
        return gpu_ms, (9.0 if "launch_bound" in names else 33.0 if "compile" in names else host_ms)

    def seconds(self, text, num_traced):
        names = frozenset(text.split("+"))
        graph = names - {"cudnn_benchmark", "unfused_optimizer"}  # which change no compiled code
        compile_s = 0 if not names & {"compile", "launch_bound"} else 15 if graph in self.compiled else 35
        self.compiled.add(graph)
        return 25 + compile_s + (4 if num_traced else 0)

    def speed(self, names):
        gpu_ms, host_ms = self.sides_ms(names)
        noise = 0.05 if host_ms > gpu_ms else 0.002
        return 10 / max(gpu_ms, host_ms) * (1 + self.random.uniform(-noise, noise))

    def promised(self, names):
        self.now_s += 4
        gpu_ms, host_ms = self.sides_ms(names)
        step_ms = max(gpu_ms, host_ms)
        ledger = {"launch_bound": 1 - gpu_ms / step_ms, "autocast": 0.25 * gpu_ms / step_ms}
        ledger |= {} if "memory_layout" in names else {"memory_layout": 0.275}
        return ledger | (
            {} if {"compile", "launch_bound"} & names else {"unfused_elementwise": 0.3 * gpu_ms / step_ms}
        )


def test_a_kept_change_moves_the_bottleneck_and_the_order_follows(improve):
    """GIVEN nine minutes WHEN two changes make the host the bottleneck THEN CUDA graphs come next, then the rest."""
    machine = ConvolutionsInFloat32()
    machine.ledger = machine.promised
    result = improve(machine, minutes=9)

    kept = ("memory_layout", "autocast", "launch_bound", "cudnn_benchmark", "unfused_optimizer")
    assert result.kept == kept and result.gain.factor > 3 and result.gain.low > 3
    assert machine.now_s <= 540 and result.gain.num_runs >= (2, 2)
    layout, low, graphs, tuned, fused = ("+".join(kept[:num]) for num in range(1, 6))
    # One pair each for what is clear; the first reference on top of CUDA graphs is the run that was kept.
    assert (
        machine.runs[:8] == ["", "", layout, low, graphs, tuned, graphs, tuned] and machine.runs[8:10] == [fused] * 2
    )
    promised = {trial.fix: trial.promise_share for trial in result.trials}
    assert promised["launch_bound"] > 0.3 > promised["autocast"] > 0.2 and promised["unfused_optimizer"] is None


def test_a_search_with_new_ledgers_goes_on_after_a_kill(improve):
    whole, machine = ConvolutionsInFloat32(), ConvolutionsInFloat32(killed_at=6)
    whole.ledger, machine.ledger = whole.promised, machine.promised
    first = improve(whole, minutes=9, output="whole")

    with pytest.raises(SystemExit):
        improve(machine, minutes=9)
    assert improve(machine, minutes=9).kept == first.kept and machine.runs == whole.runs


def test_steps_after_a_trace_do_not_count_on_a_gpu_and_prefetched_ones_are_traced_apart(improve):
    kept = ("memory_layout", "autocast", "launch_bound")
    best = ["+".join(kept[:num]) for num in range(1, 4)]
    for num_prefetched, runs in ((0, ["", "", *best]), (8, ["", "", best[0], best[0], best[1], best[2]])):
        machine = ConvolutionsInFloat32(num_prefetched=num_prefetched)
        machine.ledger = machine.promised
        result = improve(machine, fix=kept, output=f"out{num_prefetched}")
        assert result.kept == kept and machine.runs[: len(runs)] == runs
        assert machine.traced == ["", best[0]]  # with one change left, there is no order to choose
        assert result.trials[0].gain.factor == pytest.approx(1.42, rel=0.01)


def test_without_a_new_ledger_the_order_stays(improve):
    machine = ConvolutionsInFloat32()
    machine.ledger = lambda names: {"memory_layout": 0.3, "unfused_optimizer": 0.1} if not names else {}
    improve(machine, minutes=9)

    assert machine.runs[2] == "memory_layout" and machine.runs[3] == "memory_layout+unfused_optimizer"


@parametrized("killed_at", [0, 1, 3, 7], quick=2)
def test_after_a_kill_the_same_call_goes_on_and_repeats_nothing(improve, killed_at):
    whole, machine = Machine({"autocast": 1.5, "compile": 1.4}), Machine({"autocast": 1.5, "compile": 1.4})
    first = improve(whole, output="whole")
    machine.killed_at = killed_at

    with pytest.raises(SystemExit):
        improve(machine)
    result = improve(machine)

    assert machine.runs == whole.runs and result.kept == first.kept
    assert result.gain == first.gain and result.seconds == first.seconds


def test_an_interrupt_before_anything_is_measured_is_one(improve):
    with pytest.raises(KeyboardInterrupt):
        improve(Machine(factors={"compile": 2.0}, killed_at=1, killed_by=KeyboardInterrupt()))


def test_after_an_interrupt_the_same_command_goes_on(improve):
    machine = Machine(factors={"compile": 1.2}, killed_at=4, killed_by=KeyboardInterrupt())
    first = improve(machine)
    assert first.is_interrupted and not first.is_finished and len(machine.runs) == 4
    second = improve(machine)
    assert second.folder == first.folder and second.kept == ("compile",) and second.is_finished
    assert len(machine.runs) == second.num_runs


def test_a_finished_folder_is_not_overwritten_and_resume_goes_on_with_more_time(improve):
    machine = Machine({"autocast": 1.2, "compile": 1.4})
    first = improve(machine, minutes=1.2, output="out")
    num_runs = len(machine.runs)

    assert not first.is_finished and first.kept == ("autocast",) and statuses(first)["compile"] == "not tried"
    assert first.seconds <= 1.2 * 60
    with pytest.raises(UsageError, match="--resume"):
        improve(machine, output="out")
    second = improve(machine, minutes=20, output="out", resume=True)
    assert second.kept == ("autocast", "compile") and second.is_finished
    assert len(machine.runs) >= second.num_runs > num_runs
    with pytest.raises(UsageError, match="no runs of this command"):
        improve(machine, output="out", resume=True, clean=10)


def test_another_call_after_the_end_measures_in_a_new_folder(improve):
    machine = Machine({"autocast": 1.5})

    first, second = (improve(machine, fix="autocast") for _ in range(2))

    assert first.folder != second.folder and len(machine.runs) == 2 * first.num_runs


def test_without_the_reading_side_the_order_is_fixed_and_says_why(improve, monkeypatch):
    def missing():
        raise MissingDependencyError("polars is missing: pip install polars msgspec")

    monkeypatch.setattr(session, "need_read_side", missing)
    result = improve(Machine({"autocast": 1.5}))

    assert (
        result.order
        == "the fixed order; the ledger could not be computed: polars is missing: pip install polars msgspec"
    )


def test_a_phase_that_takes_most_of_the_step_is_looked_at_first(improve):
    machine = Machine({"unfused_optimizer": 2.0, "autocast": 1.5})
    machine.host_ns = {"data": 1, "forward": 4 * MS, "optimizer": 6 * MS}

    result = improve(machine)

    assert machine.runs[2] == "unfused_optimizer" and result.trials[-1].promise_share is None
    kept = next(trial for trial in result.trials if trial.fix == "unfused_optimizer")
    assert kept.promise_share == pytest.approx(0.6)


def test_a_change_of_a_phase_without_time_costs_no_run(improve):
    machine = Machine({"waiting_for_data": 2.0})
    machine.host_ns = {"data": 1, "forward": 9 * MS, "optimizer": MS}

    result = improve(machine, fix="waiting_for_data")

    assert machine.runs == ["", ""] and result.trials[0].reason == "it can save at most 0.0 % of a step"


def test_on_a_noisy_machine_a_true_gain_survives_a_bad_first_pair(improve):
    machine = Machine({"unfused_optimizer": 1.6}, noise=0.3)

    assert improve(machine, fix="unfused_optimizer", minutes=60).kept == ("unfused_optimizer",)


def test_a_script_that_fails_unchanged_is_an_error(improve):
    with pytest.raises(StepscopeError, match="fails without a fix: boom"):
        improve(Machine(failing={"": "boom"}))


@pytest.mark.parametrize("fix", ["small_batch", "autocast+compile", "turbo"])
def test_what_cannot_be_tried_is_a_usage_error(improve, fix):
    with pytest.raises(UsageError):
        improve(Machine(), fix=fix)
