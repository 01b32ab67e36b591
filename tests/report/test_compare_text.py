"""A comparison as a screen and as Markdown: the verdict first, figures that add up, strangers' names harmless."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from stepscope.analysis.comparison.compare import Comparison, Parts, Subject, compare_pair, decide, parse_gate
from stepscope.analysis.comparison.metrics import Measure
from stepscope.document.comparison import comparison_document
from stepscope.render.markdown.markdown import markdown_of
from stepscope.render.markdown.text import escaped
from stepscope.render.terminal import terminal_text

MS = 1_000_000
BASE_NS = tuple(float(10 * MS + i * 100) for i in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7))
HOSTILE = "<img src=x onerror=alert(1)>|`a` [x](http://evil) @everyone #1\x1b[31m\n## big\u202e"


def subject(factor=1.0, name="run", rows=None, context=None, identity=None, missing=None):
    samples = tuple(factor * ns for ns in BASE_NS)
    middle = sorted(samples)[4] / 2 + sorted(samples)[5] / 2
    parts = Parts("a clean step", "ns", middle, rows or {"forward": 4 * MS, "backward": middle - 4 * MS})
    return Subject(
        name=name,
        measures={"step_time": Measure(middle, samples), "peak_memory": Measure(2**30)},
        identity=identity or {},
        context=context or {},
        tables={"phase": (parts,)},
        missing=missing or {},
    )


def comparison(*pairs, gates=(), only_in_base=()):
    results = decide([parse_gate(text) for text in gates], pairs, only_in_base)
    return Comparison("recording", "runs/main", "runs/mine", 0.02, tuple(pairs), tuple(only_in_base), (), results)


def compare_text(found, num_rows=8, width=100):
    return terminal_text(comparison_document(found, num_rows), width)


def compare_markdown(found):
    return markdown_of(comparison_document(found))


def test_the_verdict_is_the_first_line_and_says_where_it_comes_from():
    found = comparison(compare_pair(subject(), subject(1.2)), gates=["step_time:3%", "mfu:1%"])

    lines = compare_text(found).splitlines()

    assert lines[0].startswith("Slower: a step takes 12.00 ms instead of 10.00 ms, +20.0 % (95 % interval +20.0 %")
    assert "backward (+2.00 ms)" in lines[1]
    text = "\n".join(lines)
    assert "Gates: 1 failed, 1 undecided" in text and "missing data" in text
    assert re.search(r"failed +step_time:3% +\+20.0 %\n +reason: worse by more than the limit", text)
    assert re.search(r"backward +\+2.00 ms +6.00 ms +8.00 ms", text)
    assert re.search(r"step time +10.00 ms +12.00 ms +\+20.0 % +slower", text)


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (1.0, "detect a change of 2.0 %"),
        (1.01, "below the threshold of 2.0 %"),
    ],
)
def test_no_difference_says_what_would_have_been_one(factor, says):
    text = compare_text(comparison(compare_pair(subject(), subject(factor))), width=1000)

    assert text.startswith("No difference shown: ") and says in text
    assert "Where the change comes from" not in text


def test_what_is_refused_says_what_to_type():
    pair = compare_pair(subject(identity={"device": "H100", "dtype": "bf16"}), subject(identity={"device": "H200"}))

    text = compare_text(comparison(pair), width=1000)

    assert text.startswith("Not comparable: ") and "device (H100 and H200)" in text and "--allow device" in text
    assert "whether these are equal: dtype" in text and "step time" not in text


def test_few_samples_are_told_with_their_number():
    few = replace(subject(1.3), measures={"step_time": Measure(13 * MS, (12.9 * MS, 13.1 * MS))})

    text = compare_text(comparison(compare_pair(subject(), few)), width=1000)

    assert text.startswith("Too few samples for a verdict: 10 and 2 steps") and "at least 6" in text
    assert "Where the change comes from" in text, "the deltas are shown all the same"


def test_a_narrow_terminal_is_not_overrun():
    pair = compare_pair(subject(), subject(1.001))

    wide, narrow = (compare_text(comparison(pair), width=width) for width in (120, 70))

    assert "  95 % interval\n" in wide
    assert "  95 % interval\n" not in narrow and "no difference shown" in narrow
    assert max(map(len, narrow.splitlines())) <= 70


def test_reasons_are_never_cut():
    why = f"{'/a/long/temporary/path' * 3}/new: the row is oom: asked for 3 GiB"
    gone = replace(subject(missing={"step_time": why}), measures={})
    pairs = [compare_pair(subject(), new, name=name) for name, new in (("seq=1", gone), ("seq=2", subject()))]

    lines = compare_text(comparison(*pairs, gates=["step_time:3%"]), width=70).splitlines()

    assert " ".join(" ".join(lines).split()).count("/new: the row is oom: asked for 3 GiB") == 2
    assert max(map(len, lines)) <= 70


def test_points_are_a_table_and_the_one_that_changed_most_is_looked_into():
    pairs = [
        compare_pair(subject(), subject(factor), name=f"seq={seq}") for seq, factor in ((1, 1.0), (2, 0.7), (3, 1.1))
    ]
    found = comparison(*pairs, gates=["step_time:3%"], only_in_base=["seq=4"])

    text = compare_text(found)

    assert text.startswith("3 points compared: 1 no difference shown, 1 faster, 1 slower."), text.splitlines()[0]
    assert "at seq=2: −30.0 %" in text.replace("\n", " ")
    assert "Where the change comes from at seq=2" in text and re.search(r"only in base +seq=4", text)
    gates = re.findall(r"(failed|undecided|passed) +step_time:3% +(seq=\d)", text)
    assert gates == [("failed", "seq=3"), ("undecided", "seq=4"), ("passed", "seq=1"), ("passed", "seq=2")]


def test_rows_that_are_not_shown_are_one_row():
    before = {f"module{i}": float(MS) for i in range(10)}
    after = {name: ns * (1 + 0.01 * i) for i, (name, ns) in enumerate(before.items())}
    found = comparison(compare_pair(subject(rows=before), subject(1.2, rows=after)))

    text = compare_text(found, num_rows=3)

    assert re.findall(r"module\d", text) == ["module9", "module8", "module7"]
    assert re.search(r"7 more +\+0.21 ms +7.00 ms +7.21 ms", text)


def hostile():
    rows = {HOSTILE: 4.0 * MS, "backward": 6.0 * MS}
    pair = compare_pair(
        subject(name=HOSTILE, rows=rows, context={HOSTILE: HOSTILE}, missing={"module": HOSTILE}),
        subject(1.2, rows={HOSTILE: 6.0 * MS, "backward": 6.0 * MS}, missing={"module": HOSTILE}),
        name=HOSTILE,
    )
    found = comparison(pair, compare_pair(subject(), subject(), name="b"), only_in_base=[HOSTILE])
    return replace(found, base=HOSTILE, new=HOSTILE)


def test_names_of_strangers_are_harmless_in_a_terminal():
    text = compare_text(hostile())

    assert "onerror" in text and all(c.isprintable() for c in text.replace("\n", ""))
    assert not any(line.startswith("## big") for line in text.splitlines())


def test_names_of_strangers_are_harmless_in_markdown():
    text = compare_markdown(hostile())

    assert "onerror" in text and "\x1b" not in text and "\u202e" not in text
    for line in text.splitlines():
        assert not line.startswith("## big") and "@everyone" not in line
        if line.startswith("<details>"):
            assert "<img" not in line, "the line is HTML, in which Markdown is text"
            continue
        plain = re.sub(r"`[^`]+`", "", re.sub(r"\\[\\`*_\[\]<>|~&]", "", line))  # in a code span, all is text
        assert "<img" not in plain and "](" not in plain and "`" not in plain
        if plain.startswith("|"):
            assert plain.count("|") in (4, 5, 8), line
    assert text.count("<details>") == text.count("</details>")


def test_markdown_for_a_pull_request():
    pair = compare_pair(subject(), subject(1.2, context={"torch": "2.14"}))

    text = compare_markdown(comparison(pair, gates=["step_time:3%"]))

    assert "**Slower: a step takes 12.00 ms instead of 10.00 ms, +20.0 %" in text
    assert "| failed | step\\_time:3% |" in text.replace("\\:", ":")
    assert "| step time | 10.00 ms | 12.00 ms | +20.0 % |" in text
    assert "| backward | +2.00 ms | 6.00 ms | 8.00 ms |" in text
    assert "| torch | none | 2.14 |" in text


def test_escaping_changes_no_ordinary_text():
    assert escaped("a step takes 1.2 ms (+3 %): slower") == "a step takes 1.2 ms (+3 %): slower"
    assert "http:" not in escaped("http://evil.example") and "www." not in escaped("www.evil.example")


@pytest.mark.parametrize(
    ("factor", "rate", "is_said"),
    [(0.9, 0.6, True), (0.9, 1.1, False), (1.0, 0.6, True), (1.2, 0.8, False), (1.2, 1.3, True), (0.9, 0.97, False)],
)
def test_a_throughput_that_contradicts_the_compared_steps_is_in_the_first_sentence(factor, rate, is_said):
    base, new = (
        replace(each, measures={**each.measures, "samples_per_second": Measure(per_s)})
        for each, per_s in ((subject(), 100.0), (subject(factor), 100.0 * rate))
    )
    verdict = comparison_document(comparison(compare_pair(base, new)), 8).verdict
    assert ("But samples/s of the whole loop changed by" in verdict) == is_said
