"""The views of `stepscope analyze`, `--attention`, `--copies`, `--compiler`: screens, JSON, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from analyze_verb import analyze

from stepscope.document.sections.attention import attention_document
from stepscope.document.sections.compiler import compiler_document
from stepscope.document.sections.copies import copies_document
from stepscope.findings.compiler_report import compiler_report
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.reports import AttentionReport, AttentionRow, attention_report, copies_report
from trace_builder import TRACES, TraceBuilder


def real(name: str) -> Path:
    path = Path(TRACES) / "h200" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not here: set STEPSCOPE_TRACES to the folder of the real traces")
    return path


def test_attention_names_the_mask_and_fits_80_columns():
    report = attention_report(open_session(real("mask_blocks_flash"), use_cache=False).case)
    text = terminal_text(attention_document(report), 80)

    assert "6 on cuDNN" in text
    assert "8×1×4096×4096" in text
    assert "derived = PyTorch's documented rules" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_the_compilers_screen_of_a_trace_names_what_it_plans_for_again():
    report = compiler_report(open_session(real("recompiles"), use_cache=False).case)
    text = terminal_text(compiler_document(report), 80)

    assert "shapes change from step to step" in " ".join(text.split())
    assert "[8, 12, 656, 64], [8, 12, 664, 64]" in " ".join(text.split())
    assert "compiled region 2/0" in text
    assert max(map(len, text.splitlines())) <= 80


def test_attention_as_json():
    done = analyze("--attention", "--no-cache", "--json", real("mask_blocks_flash"))

    found = json.loads(done.stdout)
    (call,) = found["calls"]
    assert (call["backend"], call["mask"], call["num_calls"]) == ("cudnn", "[8, 1, 4096, 4096]", 6.0)
    assert [reason["code"] for reason in call["reasons"]] == ["mask"]


def test_json_has_all_rows_or_as_many_as_asked_for(tmp_path):
    trace = TraceBuilder().step(1, 0, 5000)
    for number, op in enumerate(("aten::contiguous", "aten::clone", "aten::to")):
        trace.op(op, 1000 * number, 900).op("aten::copy_", 1000 * number + 10, 800)
    path = trace.write(tmp_path / "trace.json")
    whole, cut = (json.loads(analyze("--copies", "--json", *top, path).stdout) for top in ((), ("--top", "2")))

    assert len(whole["copies"]) == 3 and cut["copies"] == whole["copies"][:2]
    row = AttentionRow({"op": "sdpa"}, ())
    report = AttentionReport("trace.json", None, True, 1, None, (row, row, row), ())
    assert [len(report.to_json(most)["calls"]) for most in (None, 2)] == [3, 2]


def test_copies_of_the_planted_trace_save_what_the_fix_was_measured_to_save():
    report = copies_report(open_session(real("contiguous_copies"), use_cache=False).case)

    truth = json.loads((Path(TRACES) / "h200" / "truth.json").read_text())["contiguous_copies"]
    measured_ns = (truth["slow_ms"] - truth["fixed_ms"]) * 1e6
    assert report.saving_ns == pytest.approx(measured_ns, rel=0.1)
    assert [row["op"] for row in report.rows if row["phase"] == "forward"] == [
        "aten::contiguous",
        "aten::to",
        "aten::clone",
    ]
    assert sum(row["saving_ns"] for row in report.rows) >= report.saving_ns * 0.95
    text = terminal_text(copies_document(report), 80, num_rows=2)
    assert max(map(len, text.splitlines())) <= 80
    assert "1 more" in text


def test_a_trace_of_the_host_alone_has_copies_with_a_saving(tmp_path):
    trace = TraceBuilder().step(1, 0, 100).step(2, 100, 100)
    for start in (10, 110):
        strides = [[16, 1], [1, 16], []]
        given = {"Input Dims": [[16, 16]] * 2 + [[]], "Input type": ["float", "float", "Scalar"]}
        trace.op("aten::contiguous", start, 30).op(
            "aten::copy_", start + 5, 20, **given, **{"Input Strides": strides}
        )
    report = copies_report(open_session(trace.write(tmp_path / "trace.json"), use_cache=False).case)

    (row,) = report.rows
    assert (row["what"], row["cause"], row["num_calls"], row["total_ns"]) == ("layout", "called", 1.0, 20_000)
    assert row["saving_ns"] == pytest.approx(20_000, rel=0.5)
    assert "GPU" not in terminal_text(copies_document(report), 80)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--attention", "--copies", "x"), "--attention and --copies"),
        (("--copies", "--memory", "x"), "--memory and --copies"),
        (("--copies", "nothing.json"), "nothing.json does not exist"),
        (("--attention", "a", "b"), "--attention reads one path"),
        (("--copies", "--step", "1", "x"), "--step does not go with --copies"),
        (("--attention", "-o", "a.svg", "x"), "-o draws memory over time"),
    ],
)
def test_mistakes_are_one_line(words, message):
    done = analyze(*words)

    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_without_either_says_so(tmp_path):
    path = TraceBuilder().step(1, 0, 50).op("aten::mm", 10, 10).write(tmp_path / "trace.json")
    case = open_session(path, use_cache=False).case

    assert "No scaled_dot_product_attention" in terminal_text(attention_document(attention_report(case)))
    assert "No copy, cast, contiguous or clone" in terminal_text(copies_document(copies_report(case)))
