"""`stepscope diagnose`, its what-ifs, and `stepscope list rules`."""

from __future__ import annotations

import json
import re

import pytest

from handmade import cpu_recording
from trace_builder import TraceBuilder
from verbs import run_verb as stepscope


@pytest.fixture
def trace(tmp_path):
    """A host that needs 100 µs for each of ten kernels of 5 µs, twice."""
    builder = TraceBuilder()
    for step in (0, 1):
        begin = 1100 * step
        builder.step(step + 1, begin, 1100)
        for number in range(10):
            at = begin + 100 * number
            builder.op("aten::mm", at, 90, id=at + 1).launch("sgemm", at + 50, runs=(at + 60, 5), id=at + 1)
        builder.call("cudaDeviceSynchronize", begin + 1050, 40)
    return builder.write(tmp_path / "trace.json")


def test_a_launch_bound_trace_is_told_so(trace):
    done = stepscope("diagnose", trace, "--no-cache")

    assert done.returncode == 0, done.stderr
    assert re.search(r"1  launch_bound   saves [\d.]+ to [\d.]+ µs per step \(expected: ", done.stdout)
    assert 'torch.compile(model, mode="reduce-overhead")' in done.stdout
    assert "Passed:" in done.stdout and "Not checked:" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_is_what_the_documentation_says(trace):
    answer = json.loads(stepscope("diagnose", trace, "--no-cache", "--json").stdout)

    assert answer["schema_version"] == 1
    assert not answer["step_is_measured"]
    first = answer["findings"][0]
    assert first["id"] == "launch_bound"
    assert first["saving_ms"] == pytest.approx(answer["step_ms"], rel=0.35)
    assert first["saving_bytes"] is None
    assert first["upper_bound"] is True
    assert first["confidence"] in ("high", "medium", "low")
    assert first["evidence"][0]["rows"][0]["num_kernels"] == 10
    assert {"sentence", "fix", "derived", "falsified_by"} <= first.keys()
    assert all({"id", "reason"} == one.keys() for one in answer["unchecked"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tool.stepscope.diagnose]\nignore = ["launch_bound"]\n', None),
        ('[tool.stepscope.diagnose]\nignore = ["lunch_bound"]\n', "'lunch_bound'"),
        ("[tool.stepscope.diagnose]\nignore = 3\n", "ignore must be a list"),
        ("[tool.stepscope.diagnose]\nignored = []\n", "has no key 'ignored'"),
        ("[tool.stepscope\n", "is not valid TOML"),
    ],
)
def test_rules_are_suppressed_in_pyproject(trace, tmp_path, text, said):
    (tmp_path / "pyproject.toml").write_text(text)
    (tmp_path / "below").mkdir()

    done = stepscope("diagnose", trace, "--no-cache", cwd=tmp_path / "below")

    if said is None:
        assert done.returncode == 0
        assert "Ignored: launch_bound." in done.stdout
        assert "1  launch_bound" not in done.stdout
    else:
        assert done.returncode == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_rules_are_ignored_one_by_one_or_with_commas(trace):
    done = stepscope(
        "diagnose", trace, "--no-cache", "--json", "--ignore", "launch_bound,first_call", "--ignore", "recompiles"
    )

    assert json.loads(done.stdout)["suppressed"] == ["first_call", "launch_bound", "recompiles"], done.stderr


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_recording_without_a_trace_is_checked_as_far_as_it_goes(is_empty, tmp_path):
    cpu_recording(tmp_path / "run")
    if is_empty:  # killed while it was written
        (tmp_path / "run" / "trace").mkdir()
        (tmp_path / "run" / "trace" / "rank0.json.gz").touch()

    done = stepscope("diagnose", tmp_path / "run", "--json")

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["step_is_measured"]
    assert "launch_bound" in [one["id"] for one in answer["unchecked"]]
    assert any("is empty" in warning for warning in answer["warnings"]) == is_empty


@pytest.mark.parametrize("path", ["nothing.json", "."])
def test_what_is_no_trace(path, tmp_path):
    done = stepscope("diagnose", path, cwd=tmp_path)

    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


def test_whatif_plays_the_trace_again(trace):
    unchanged = json.loads(stepscope("diagnose", trace, "--no-cache", "--json", "--host", "1").stdout)
    faster = json.loads(stepscope("diagnose", trace, "--no-cache", "--json", "--scale", "class=gemm:0").stdout)
    quick = json.loads(stepscope("diagnose", trace, "--no-cache", "--json", "--host", "0.5").stdout)

    assert unchanged["before"]["step_ms"] == pytest.approx(unchanged["traced"]["step_ms"], rel=0.001)
    assert unchanged["saving_ms"] == 0
    assert faster["saving_ms"] == pytest.approx(0, abs=0.006)
    assert quick["saving_ms"] == pytest.approx(0.55, rel=0.1)


def test_whatif_of_a_trace_that_is_cut_off_says_so(trace, tmp_path):
    (tmp_path / "cut.json").write_bytes(trace.read_bytes()[:-400])

    done = stepscope("diagnose", tmp_path / "cut.json", "--no-cache", "--host", "0.5")

    assert "the trace is cut off" in done.stdout, done.stderr
    assert "cut off" not in stepscope("diagnose", trace, "--no-cache", "--host", "0.5").stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scale", "class=attention:0.5"], "matches no GPU work"),
        (["--scale", "class=gemm"], "WORK:FACTOR"),
        (["--scale", "class=gemm:-1"], "WORK:FACTOR"),
        (["--scale", "kind=gemm:1"], "FIELD=PATTERN"),
        (["--drop-launches", "gemm"], "FIELD=PATTERN"),
    ],
)
def test_whatif_says_what_it_does_not_understand(trace, words, said):
    done = stepscope("diagnose", trace, "--no-cache", *words)

    assert done.returncode == 2
    assert said in done.stderr


def test_rules_are_listed():
    done = stepscope("list", "rules")

    assert "launch_bound " in done.stdout
    assert json.loads(stepscope("list", "rules", "launch_bound", "--json").stdout)["rules"][0]["id"] == "launch_bound"
    assert stepscope("list", "rules", "lunch").returncode == 2
