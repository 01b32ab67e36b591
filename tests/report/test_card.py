"""The card as text, JSON and HTML: two by heart, and none that a hostile name can use."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shlex
from pathlib import Path

import pytest

from handmade import MS, cpu_facts, cpu_recording, gpu_facts, gpu_recording, sample, write_recording
from stepscope import read
from stepscope.cli.support.output import print_card
from stepscope.document.card import Card, card_document
from stepscope.render.terminal import terminal_text

COMPILER = {
    "num_compiles": 7,
    "compile_seconds": 12.34,
    "frames": [],
    "graph_breaks": [{"reason": "a print", "place": "/home/me/model.py:12 in forward", "count": 3}],
    "recompiles": [{"frame": "forward (/home/me/model.py:8)", "failed_guards": ["x.size()[0] == 4"]}],
    "recompile_limit_hits": [{"frame": "loss (/home/me/train.py:3)", "count": 1}],
    "cuda_graph_skips": [{"reason": "a cpu device", "count": 1}],
    "cuda_graphs": {"num_recorded": 5, "num_compiled_functions": 2, "num_distinct_sizes": 3},
    "failures": [],
}
EVIL = "\x1b[2J\x07\r\u202e\u200b\x9b"


@pytest.fixture(autouse=True)
def in_an_empty_place(monkeypatch, tmp_path):
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def printed(card: Card, as_json: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_card(card, as_json, stream)
    stream.seek(0)
    return stream.read()


def strictly(text: str) -> dict:
    def no_constant(name: str):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=no_constant)


def lines_of(card: Card) -> dict[str, str]:
    """Every fact and bar of the printed card by its title, with what is wrapped below it."""
    found: dict[str, str] = {}
    title = ""
    for line in str(card).splitlines():
        if line.startswith("  ") and line[2] != " ":
            title, _, rest = line.strip().partition("  ")
            title = title if title not in found else f"{title} 2"
            found[title] = rest.strip()
        elif line.startswith("   "):
            found[title] += f" {line.strip()}"
    return found


CPU = {
    "script": ["train.py --lr 0.1"],
    "device": ["Imaginary CPU 9000", "2.13.0"],
    "typical step": [
        "10.00 ms, p10 10.00 ms, p90 10.00 ms",
        "4 clean steps",
        "CI 10.00 ms to 10.00 ms",
        "host clock",
    ],
    "throughput": ["51,200 tokens/s", "512 tokens per step"],
    "average step": ["10.0 ms of wall-clock time", "mean of 6"],
    "goodput": ["84.0 %"],
    "FLOPs": ["3.07 MFLOP per step", "307 MFLOP/s", "1.000 × (6·N·tokens + attention)"],
    "not counted": ["1 op", "aten.sum"],
    "MFU": ["unknown", "fp32", "Imaginary CPU 9000", "doctor --measure"],
    "parameters": ["1,000, 1,000 trainable, 1,000 active", "3.91 KiB float32"],
    "memory": ["512 MiB resident"],
    "data": ["1.00 ms", "10.0 %", "██"],
    "forward": ["3.00 ms", "30.0 %", "██████"],
    "backward": ["5.00 ms", "50.0 %", "██████████"],
    "optimizer": ["1.00 ms", "10.0 %"],
    "other": ["0 ms", "0.0 %"],
    "training": ["%"],
    "data 2": ["DataLoader"],
    "measuring": ["%"],
    "steps": ["12", "optimizer.step()", "1 optimizer"],
    "warm-up": ["2 steps", "10.00 ms"],
    "overhead": ["trace 2.00×, memory 10.00×"],
    "recording": ["runs/cpu"],
    "next": ["stepscope diagnose runs/cpu, stepscope report runs/cpu --open"],
}
GPU = {
    "script": ["train.py --lr 0.1"],
    "device": ["NVIDIA H200", "2.11.0"],
    "typical step": [
        "10.00 ms, p10 10.00 ms, p90 10.00 ms",
        "4 clean steps",
        "CI 10.00 ms to 10.00 ms",
        "CUDA events",
    ],
    "throughput": ["51,200 tokens/s", "512 tokens per step"],
    "average step": ["10.0 ms of wall-clock time", "mean of 6"],
    "goodput": ["100.0 %"],
    "FLOPs": ["4.95 TFLOP per step", "495 TFLOP/s", "1.000 × (6·N·tokens + attention)"],
    "recomputed": ["495 GFLOP"],
    "not counted": ["1 op", "aten.sum"],
    "MFU": ["50.0 %", "bf16 989.4 TFLOP/s", "NVIDIA H200"],
    "HFU": ["55.0 %"],
    "parameters": ["1.61 B, 1.61 B trainable, 1.61 B active", "6.00 GiB float32"],
    "memory": ["10.0 GiB allocated, 12.0 GiB reserved", "14.0 GiB of 140 GiB", "0 allocator retries"],
    "GPU": ["busy 85.0 % (p95 89.5 %)", "memory controller 50.0 % (p95 50.0 %)", "2 samples"],
    "power": ["500 W (p95 500)", "SM 1,980 MHz, memory 3,201 MHz", "0.00977 J/token", "sw_power_cap 50.0 %"],
    "other process": ["jupyter", "pid 77, 1.00 GiB"],
    "GPU idle": ["15.0 %", "data 25.0 %, forward 25.0 %, backward 25.0 %, optimizer 25.0 %"],
    "compiler": ["7 compiles in 12.3 s, 3 graph breaks, 1 recompile"],
    "graph break": ["/home/me/model.py:12 in forward", "a print"],
    "recompile": ["forward (/home/me/model.py:8)", "x.size()[0] == 4"],
    "recompile limit": ["loss (/home/me/train.py:3)"],
    "CUDA graphs": ["skipped", "a cpu device"],
    "CUDA graphs 2": ["5 recorded", "3 distinct sizes"],
    "data": ["0 ms", "0.0 %"],
    "forward": ["2.50 ms", "25.0 %", "█████"],
    "backward": ["4.50 ms", "45.0 %", "█████████"],
    "optimizer": ["1.00 ms", "10.0 %"],
    "other": ["0 ms", "0.0 %"],
    "idle": ["1.50 ms", "15.0 %", "███"],
    "unattributed": ["500 µs", "5.0 %", "█"],
    "steps": ["12", "optimizer.step()", "1 optimizer"],
    "warm-up": ["2 steps", "10.00 ms"],
    "data 2": ["no DataLoader", "stepscope.phase"],
    "launches": ["100 kernels per step"],
    "overhead": ["trace 1.00×, memory 1.00×"],
    "note": ["trace: the script started a profiler of its own"],
    "recording": ["runs/gpu"],
    "next": ["stepscope diagnose runs/gpu, stepscope report runs/gpu --open"],
}


def assert_card(card: Card, expected: dict[str, list[str]]) -> None:
    shown = lines_of(card)
    assert list(shown) == list(expected)
    for title, words in expected.items():
        assert all(word in shown[title] for word in words), (title, shown[title])


def test_a_cpu_recordings_card():
    assert_card(read(cpu_recording(Path("runs/cpu"))), CPU)


def test_a_gpu_recordings_card():
    notes = [{"about": "trace", "text": "the script started a profiler of its own"}]
    assert_card(read(gpu_recording(Path("runs/gpu"), COMPILER, notes=notes)), GPU)


def test_the_printed_shares_sum_to_a_hundred_per_cent():
    for folder in (cpu_recording(Path("cpu")), gpu_recording(Path("gpu"))):
        shown = str(read(folder)).split("Where a step goes")[1].split("\n\n")[0]
        shares = [float(share) for share in re.findall(r"([\d.]+) %", shown)]

        assert sum(shares) == pytest.approx(100, abs=0.5) and len(shares) >= 5


def test_plain_where_nobody_looks_and_color_on_request():
    card = read(cpu_recording(Path("run")))

    assert "\x1b" not in printed(card)
    plain, colored = str(card), terminal_text(card_document(card), color=True)
    for mark in ("\x1b[1m", "\x1b[2m", "\x1b[0m"):
        assert mark in colored
        colored = colored.replace(mark, "")
    assert [line.rstrip() for line in colored.splitlines()] == plain.splitlines()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_knows_few_letters_gets_question_marks(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_card(read(cpu_recording(Path("run"))), False, stream)

    assert stream.tell() > 0


@pytest.mark.parametrize("make", [cpu_recording, gpu_recording])
def test_json_is_strict_and_says_what_the_text_says(make):
    card = read(make(Path("run")))
    found = strictly(printed(card, as_json=True))

    assert found["schema_version"] == 1 and found["verdict"] == card.verdict
    assert (found["status"], found["num_clean"], found["step_ns"]["median"]) == ("finished", 4, 10 * MS)
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    assert found["flops"]["model_flops"] == card.summary.flops.model_flops
    assert found["recording"] == "run" and found["warnings"] == []


@pytest.mark.parametrize("loss", ["nan", "inf", float("nan"), float("inf")])
def test_json_is_strict_when_the_loss_is_not_a_number(loss):
    card = read(write_recording(Path("run"), cpu_facts(), [sample(i, loss=loss) for i in range(4)]))

    strictly(printed(card, as_json=True))


def poisoned(value: object, keep: tuple[str, ...] = ()) -> object:
    """The same value with something evil at the end of every text in it."""
    if isinstance(value, str):
        return value if value in keep else value + EVIL
    if isinstance(value, list):
        return [poisoned(item, keep) for item in value]
    if isinstance(value, dict):
        return {
            (key + EVIL if key in ("float32", "fp32", "bf16") else key): poisoned(item, keep)
            for key, item in value.items()
        }
    return value


@pytest.mark.parametrize("make", [cpu_facts, gpu_facts])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"status": "failed", "exit_code": EVIL, "exception": f"ValueError: {EVIL}\nmore"},
        {"steps": {"source": "some other way", "num_sources": 1}},
        {"flops": cpu_facts()["flops"] | {"error": "aten.mm: odd\nshape"}},
        {"flops": cpu_facts()["flops"] | {"error": "aten.mm: odd", "by_op": [], "model_flops_by_dtype": {}}},
    ],
    ids=["as it is", "failed", "unknown source", "an error", "an error alone"],
)
def test_no_control_character_of_anybody_reaches_the_terminal(make, extra):
    facts = make(
        notes=[{"about": "trace", "text": f"evil {EVIL}\nnote"}],
        command={"argv": [f"tr{EVIL}ain.py", "--name", "\u202egnp.exe"]},
        **{key: value for key, value in extra.items() if make is cpu_facts or key != "flops"},
    )
    keep = ("optimizer", "forward", "backward", "failed", "finished")
    if "flops" in extra:
        facts["flops"] = extra["flops"]
    counters = [{"t_ns": 1, "gpu_busy_share": 0.5, "power_watts": 1.0, "throttle": [f"heat{EVIL}"]}]
    folder = Path(f"run{EVIL[5:]}")
    samples = [*(sample(i) for i in range(4)), sample(4, "memory")]
    write_recording(folder, poisoned(facts, keep), samples, counters, poisoned(COMPILER))
    text = printed(read(folder))

    assert "heat" in text and "evil" in text
    assert sorted({c for c in text if not c.isprintable()} - {"\n"}) == []
    assert all(line == line.rstrip("\r") for line in text.splitlines())


def test_html_is_escaped():
    bad = "<script>alert('x')</script>&\""
    facts = cpu_facts(command={"argv": [bad]}, notes=[{"about": bad, "text": bad}])
    html = read(write_recording(Path("run"), facts, [sample(i) for i in range(4)]))._repr_html_()

    assert "<script>" not in html and html.count("&lt;script&gt;") >= 3
    assert "A step takes 10.00 ms" in html


def test_a_failed_run_says_how_and_an_api_run_without_an_exit_code_does_not_say_none():
    failed = cpu_recording(Path("a"), status="failed", exit_code=3, exception="ValueError: no")
    api = cpu_facts(status="failed")
    del api["exit_code"]

    assert "failed with exit code 3 (ValueError: no)" in str(read(failed))
    text = str(read(write_recording(Path("b"), api, [sample(i) for i in range(4)])))
    assert "failed" in text and "None" not in text


def test_the_next_command_can_be_typed_as_it_stands():
    folder = Path("my runs/run 1")
    command = lines_of(read(cpu_recording(folder, trace=None)))["next"]

    assert shlex.split(command)[:3] == ["stepscope", "report", str(folder)]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_run_that_was_cut_off_early_still_has_a_card(num_steps):
    facts = {"command": {"argv": ["train.py"]}, "status": "interrupted"}
    text = str(read(write_recording(Path("run"), facts, [sample(i, "warmup") for i in range(num_steps)])))

    assert "interrupted, or still running" in text and "None" not in text


def test_a_run_that_has_not_ended_says_whether_its_process_runs():
    facts = {"command": {"argv": ["train.py"]}, "status": "interrupted", "host": platform.node()}
    for pid, said in ((os.getpid(), "still running"), (2**22 + 1, "interrupted")):  # a number that no process has
        text = str(read(write_recording(Path(said), facts | {"pid": pid}, [])))

        assert f"train.py   {said}\n" in text


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (
            {"steps": {"source": "step()", "num_sources": 1}},
            "each ends with stepscope.step() or where the trainer says so",
        ),
        ({"steps": {"source": "forward", "num_sources": 1}}, "no optimizer stepped"),
        ({"steps": {"source": "optimizer", "num_sources": 2}}, "(2 optimizers)"),
        ({"steps": {"source": "optimizer", "num_lines_dropped": 1234}}, "1,234 lines are not in samples.jsonl"),
        ({"environment": {"device_name": "NVIDIA H200", "torch": "2", "rank": 3, "world_size": 8}}, "rank 3 of 8"),
        ({"environment": {"device_name": "NVIDIA H2000", "torch": "2"}}, "no fp32 peak known for 'NVIDIA H2000'"),
        ({"trace": {"trimmed": "cut to its first step", "file": "trace/rank0.json.gz"}}, "cut to its first step"),
    ],
)
def test_facts_that_have_a_line_of_their_own(facts, said):
    samples = [*(sample(step) for step in range(3)), sample(3, "memory")]
    folder = write_recording(Path("run"), cpu_facts(**facts), samples)

    assert said in " ".join(terminal_text(card_document(read(folder)), 120).split())


def test_samples_that_vary_are_called_noisy_and_warnings_are_shown():
    samples = [sample(i, host_ns={"forward": (5 + 5 * i) * MS}) for i in range(4)]
    folder = write_recording(Path("run"), cpu_facts(), samples)
    with (folder / "samples.jsonl").open("a") as stream:
        stream.write("{cut")
    text = str(read(folder))

    assert re.search(r"noise +p10 to p90 spans [\d.]+ %", text)
    assert "1 line(s) could not be read" in text
