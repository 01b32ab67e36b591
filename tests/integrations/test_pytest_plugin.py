"""The pytest plugin through pytest's own tester: baselines, limits, counts, the summary, and what it costs."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import stepscope as stepscope_module
from handmade import gpu_recording
from memories import a_step, tensor, write_memory
from stepscope import StepscopeError, Unavailable, UsageError, Windows
from stepscope.integrations.pytest_plugin import baseline_path
from stepscope.integrations.step_figures import StepFigures
from trace_builder import TraceBuilder

pytest_plugins = ["pytester"]

# Forward 2·4·8·2 FLOPs; backward the same for the weight's gradient. The input needs none.
MODEL = """
import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.ones(4, 8)

def train(extra=0):
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(extra):
        inputs.clone()

def measured(stepscope, extra=0):
    return stepscope.measure(lambda: train(extra), steps=6, warmup=2)
"""
ONE_TEST = "from steps import *\n\ndef test_step(stepscope):\n    measured(stepscope, {extra}).compare({limits})\n"
INPUTS = torch.ones(4, 8)
BASELINE = "stepscope_baselines/test_one/test_step.baseline.json"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Import what measuring imports: pytester drops what a test inside this process imported, torch included."""
    windows = Windows(warmup=2, clean=2, trace=3)
    with stepscope_module.record(tmp_path_factory.mktemp("imported") / "run", windows=windows) as recorder:
        for _ in range(9):
            step_of(nn.Linear(8, 2))()
            recorder.step()
    assert StepFigures.of(recorder.folder)[0].counts["ops"]


@pytest.fixture
def project(imported, pytester, monkeypatch):
    monkeypatch.syspath_prepend(pytester.path)
    pytester.makepyfile(steps=MODEL)

    def run(extra=0, limits="", *words):
        pytester.makepyfile(test_one=ONE_TEST.format(extra=extra, limits=limits))
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rs", *words)

    return run


@pytest.fixture
def baseline(project, pytester):
    """A baseline of the step, and a function that changes it."""
    project(0, "", "--stepscope-update").assert_outcomes(passed=1)
    path = pytester.path / BASELINE

    def change(**values):
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def test_pytest_loads_it_and_that_imports_neither_torch_nor_polars(pytester):
    assert [each.value for each in entry_points(group="pytest11", name="stepscope")] == [
        "stepscope.integrations.pytest_plugin"
    ]
    pytester.makepyfile(
        """
        import sys

        def test_nothing_is_imported(pytestconfig):
            assert pytestconfig.getoption("stepscope_update") is False
            ours = sorted(name for name in sys.modules if name.startswith("stepscope"))
            assert ours == [
                "stepscope", "stepscope.display", "stepscope.integrations",
                "stepscope.integrations.pytest_plugin", "stepscope.version",
            ]
            assert not {"torch", "polars", "numpy", "mcp"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest").assert_outcomes(passed=1)


def test_a_baseline_is_a_small_text_beside_the_test(project, pytester):
    project(0, "", "--stepscope-update").assert_outcomes(passed=1)

    text = (pytester.path / BASELINE).read_text()
    values = json.loads(text)
    assert values["torch"] == torch.__version__ and len(values.pop("step_time_ns")) == 6
    assert {name: values[name] for name in ("schema_version", "flops", "graph_breaks", "recompiles")} == {
        "schema_version": 1, "flops": 256, "graph_breaks": 0, "recompiles": 0
    }  # fmt: skip
    assert len(text.splitlines()) == len(values) + 3 and len(text) < 1000
    project().assert_outcomes(passed=1)


def test_what_got_worse_is_named_with_its_figures(project, baseline, pytester):
    before = json.loads((pytester.path / BASELINE).read_text())

    result = project(3)

    result.assert_outcomes(failed=1)
    ops = before["ops"]
    share = f"+{100 * 3 / ops:.1f} %"
    result.stdout.fnmatch_lines(
        [f"*ops: {ops} → {ops + 3}, {share} (limit 0 %): failed: worse by more than the limit"]
    )
    result.stdout.fnmatch_lines(["*copied_bytes: *failed*", "*flops: 256 → 256*passed*"])
    result.stdout.fnmatch_lines(["*pytest --stepscope-update*commit*test_step.baseline.json."])
    project(3, 'ops="100%"').assert_outcomes(passed=1)


def test_another_torch_leaves_the_clock_out_and_compares_counts(project, baseline):
    baseline(torch="2.0.0")

    result = project(0, 'step_time="3%", ops="0%"')
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*Not compared: step_time: missing: the baseline is from *with torch 2.0.0*"])

    result = project(3, 'step_time="3%", ops="0%"')
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*step_time: * → ,*undecided*", "*ops: *failed*"])


def figures(times=range(100, 106), device="cpu", **counts):
    return StepFigures(device, "2.13", tuple(times), counts)


@pytest.mark.parametrize(
    ("base", "status", "reason"),
    [
        (figures(range(10, 16)), "failed", "worse by more than the limit"),
        (figures(range(1000, 1006)), "passed", "no worse"),
        (figures([100, 101]), "undecided", "too few samples: 2 and 6 steps, but each side needs at least 6"),
        (
            figures(device="NVIDIA H100"),
            "undecided",
            "missing: the baseline is from NVIDIA H100 with torch",
        ),
    ],
)
def test_the_step_time_is_tested_as_compare_does(base, status, reason):
    [(result, change)] = figures().compare(base, {"step_time": "3%"})

    assert result.status == status and result.reason.startswith(reason)
    assert (change is None) == ("missing" in reason)


def test_a_count_that_one_side_lacks_never_passes():
    results = figures(ops=3).compare(figures(ops=3, kernels=2), {"ops": "0%", "kernels": "0%", "flops": "0%"})

    assert [result.status for result, _ in results] == ["passed", "undecided", "undecided"]
    assert "this step ran on cpu" in results[1][0].reason
    assert [result.metric for result, _ in figures(ops=3).compare(figures(ops=3, kernels=2), {})] == ["ops"]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"step_tim": "3%"}, "There is no figure 'step_tim' to compare. Choose from step_time, ops,"),
        ({"ops": "3"}, "ops='3' is not a limit. Write a share, such as ops='3%'."),
    ],
)
def test_a_limit_that_is_none_is_a_sentence(limits, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        figures(ops=3).compare(figures(ops=3), limits)


@pytest.mark.parametrize("text", [None, "{", "[]", '{"schema_version": 1, "device": 3}', '{"schema_version": 1}'])
def test_a_baseline_that_is_damaged_or_not_there_is_a_sentence(tmp_path, text):
    path = tmp_path / "step.json"
    if text is not None:
        path.write_text(text)

    message = "There is no baseline .*step.json. Write it" if text is None else "step.json is not a baseline: .*Write"
    with pytest.raises(StepscopeError, match=f"{message}.*`pytest --stepscope-update`"):
        StepFigures.read(path)


@pytest.mark.parametrize("name", ["../elsewhere", "a b", ""])
def test_a_baseline_has_a_plain_name(request, name):
    with pytest.raises(UsageError, match="is not a name for a baseline"):
        baseline_path(request.node, name)


def step_of(model, optimizer=None):
    def train(extra=0):
        model(INPUTS).sum().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(extra):
            INPUTS.clone()

    return train


def test_counts_are_attributes_and_need_no_clock(stepscope):
    model = nn.Linear(8, 2)
    train = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = stepscope.measure(train, steps=6, warmup=2)
    more = stepscope.measure(lambda: train(2), steps=6, warmup=2)

    assert (result.flops, result.graph_breaks, result.recompiles) == (256, 0, 0)
    assert result.ops == sum(result.ops_by_name.values())
    assert result.ops_by_name["aten::linear"] == 1 and "aten::clone" not in result.ops_by_name
    assert "aten::item" not in result.ops_by_name  # Stepscope reads the loss, but not in this step
    assert more.ops == result.ops + 2 and more.ops_by_name["aten::clone"] == 2
    assert more.copied_bytes == result.copied_bytes + 2 * 2 * INPUTS.nbytes
    with pytest.raises(Unavailable, match="kernels are counted on a GPU, and this step ran on "):
        _ = result.kernels
    with pytest.raises(AttributeError, match="its counts are ops, kernels,"):
        _ = result.seconds


def test_the_peak_has_leaks_of_the_step_and_nothing_that_other_tests_left(stepscope):
    model = nn.Linear(8, 2)

    def peak(step_fn):
        return stepscope.measure(step_fn, steps=6, warmup=2).peak_memory

    before = peak(step_of(model))
    left = torch.ones(1_000_000)
    assert peak(step_of(model)) == before
    kept = []
    assert peak(lambda: kept.append(model(INPUTS).exp().sum())) >= before + 5 * INPUTS.shape[0] * 2 * 4
    assert left.nbytes > before


def test_graph_breaks_and_recompiles_do_not_depend_on_earlier_tests(stepscope):
    model = nn.Linear(8, 2).requires_grad_(False)  # with gradients, torch itself warns at a graph break

    def forward(inputs):
        hidden = model(inputs)
        print(end="")
        return hidden.sum()

    compiled = torch.compile(forward, backend="eager", dynamic=False)
    for _ in range(2):
        result = stepscope.measure(lambda: compiled(INPUTS), steps=6, warmup=2)
        assert (result.graph_breaks, result.recompiles) == (1, 0)
    sizes = iter([4, 5, *[4] * 100])
    assert stepscope.measure(lambda: compiled(torch.ones(next(sizes), 8)), steps=6, warmup=2).recompiles >= 1


def test_counts_on_a_gpu_are_those_of_the_middle_traced_step(tmp_path):
    folder = gpu_recording(tmp_path / "run")
    trace = TraceBuilder()
    for step, num_kernels in enumerate((9, 3, 7)):
        at = 10_000 * step
        trace.step(step, at, 9_000).op("aten::mm", at + 5, 1_000, id=step)
        for number in range(num_kernels):
            trace.launch("gemm_kernel", at + 10 + 10 * number, (at + 2_000 + 100 * number, 50), id=step)
        trace.launch(
            "Memcpy HtoD", at + 900, (at + 6_000, 10), call="cudaMemcpyAsync", category="gpu_memcpy", bytes=512
        )
        trace.call("cudaStreamSynchronize", at + 2_000, 1_000)
    trace.write(folder / "trace" / "rank0.json")
    memory = a_step()
    memory["allocations"].append(tensor(7_000, "other"))
    write_memory(folder / "memory.json.gz", memory)

    figures, ops = StepFigures.of(folder)

    assert (figures.count("kernels"), figures.count("synchronizations"), figures.count("ops")) == (3, 1, 1)
    assert figures.count("copied_bytes") == 512 and ops == {"aten::mm": 1}
    assert figures.count("peak_memory") == 3_300  # of the allocator's 4,100: without rounding and the 7,000
    assert figures.device == "NVIDIA H200" and len(figures.step_time_ns) == 4


def test_without_timed_steps_there_are_counts(stepscope):
    result = stepscope.measure(step_of(nn.Linear(8, 2)), steps=0, warmup=2)
    ((gate, _),) = result.figures.compare(result.figures, {"step_time": "3%"})
    assert result.ops and (gate.status, gate.reason) == ("undecided", "missing: no step was timed (steps=0)")


@pytest.mark.parametrize(("steps", "warmup"), [(-3, 5), (2.5, 5), (20, 0)])
def test_numbers_of_steps_that_cannot_be_measured_are_a_sentence(stepscope, steps, warmup):
    with pytest.raises(UsageError, match="steps must be 0 or more, and warmup 2 or more"):
        stepscope.measure(step_of(nn.Linear(8, 2)), steps=steps, warmup=warmup)


def test_an_error_of_the_step_is_the_tests_own(stepscope):
    with pytest.raises(ZeroDivisionError):
        stepscope.measure(lambda: 1 / 0)


def test_nothing_is_measured_if_stepscope_is_disabled(stepscope, monkeypatch):
    monkeypatch.setenv("STEPSCOPE_DISABLE", "1")
    with pytest.raises(UsageError, match="STEPSCOPE_DISABLE is set"):
        stepscope.measure(lambda: None)


@pytest.mark.long
def test_tests_that_differ_in_their_parameters_have_their_own_baselines(project, pytester):
    pytester.makepyfile(
        test_parameters="""
        import pytest
        from steps import *

        class TestSteps:
            @pytest.mark.parametrize("extra", [0, 2], ids=["a/b", "a|b"])
            def test_step(self, stepscope, extra):
                measured(stepscope, extra).compare("main")
        """
    )
    words = ("-p", "no:cacheprovider", "test_parameters.py")
    pytester.runpytest_inprocess(*words, "--stepscope-update").assert_outcomes(passed=2)
    files = sorted(file.name for file in (pytester.path / "stepscope_baselines/test_parameters").iterdir())
    assert len(files) == 2 and all(name.startswith("TestSteps.test_step-a-b--") for name in files)
    pytester.runpytest_inprocess(*words).assert_outcomes(passed=2)


def test_the_summary_is_markdown_for_a_pull_request(project, baseline, pytester):
    project(3, 'ops="0%", flops="0%", kernels="0%"', "--stepscope-summary", "out/summary.md")

    lines = (pytester.path / "out/summary.md").read_text().splitlines()
    assert lines[0] == "### Training steps: 1 of 3 figures got worse"
    assert lines[2] == "| test | figure | baseline | now | change | limit | result |"
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines[4:]]
    assert [row[1] for row in cells] == ["ops", "flops", "kernels"]
    assert cells[1][2:] == ["256", "256", "0.0 %", "0 %", "passed: no worse |"]
    assert "undecided: missing: kernels are counted on a GPU" in cells[2][6]

    project(0, "", "--stepscope-update", "--stepscope-summary", "summary.md")
    assert "written to test\\_step.baseline.json" in (pytester.path / "summary.md").read_text()


def test_the_workflow_in_the_docs_is_one_and_its_options_exist(pytestconfig):
    page = Path(__file__).parents[2] / "docs" / "testing.md"
    [workflow] = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)

    steps = yaml.safe_load(workflow)["jobs"]["step"]["steps"]
    words = steps[-1]["run"].split()
    assert words[0] == "pytest" and all("run" in step or "uses" in step for step in steps)
    for option in re.findall(r"--(stepscope-\w+)", page.read_text(encoding="utf-8")):
        pytestconfig.getoption(option.replace("-", "_"))


@pytest.mark.long
def test_the_summary_has_the_tests_of_all_processes(project, baseline, pytester):
    pytester.makepyfile(test_two=ONE_TEST.format(extra=0, limits=""))
    result = pytester.runpytest_subprocess("-n2", "--stepscope-update", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    result = pytester.runpytest_subprocess("-n2", "--stepscope-summary", "summary.md", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2)
    text = (pytester.path / "summary.md").read_text()
    assert "test\\_one.py" in text and "test\\_two.py" in text
