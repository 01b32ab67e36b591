"""The whole run on the card and in the report: goodput, cost, series with marks, changes and events."""

import json

import pytest

from handmade import cpu_facts, sample, write_recording
from history_maker import Run, write_history
from stepscope.document.build import section_of
from stepscope.document.card import Card, card_document
from stepscope.document.model import Bars, Facts, Lines, Missing, Table
from stepscope.render.terminal import terminal_text
from stepscope.session import open_session
from stepscope.session.goodput import goodput_of, job_of

CLOCK = {"clock_mhz": lambda step: 1200.0 if step >= 1200 else 1980.0, "total_bytes": 80 << 30}


@pytest.fixture(scope="module")
def section(tmp_path_factory):
    faults = {
        "slower": lambda step: 1.5 if step >= 1200 else 1.0,
        "window_at": (400,),
        "evaluate_every": 500,
        **CLOCK,
    }
    session = open_session(write_history(tmp_path_factory.mktemp("run"), Run(num_steps=2_000, **faults)))
    return section_of(session, "run", price_per_hour=3.6)


def of(section, kind, id):
    return next(part for part in section.parts if isinstance(part, kind) and getattr(part, "id", "") == id)


def test_the_section_has_a_chart_for_every_series(section):
    assert not [part for part in section.parts if isinstance(part, Missing)]
    ids = [part.id for part in section.parts if isinstance(part, Lines)]
    assert ids == [
        f"run_{name}"
        for name in ("step_time", "longest", "time", "throughput", "loss", "memory", "clock", "power", "busy")
    ]


def test_changes_and_windows_are_marked(section):
    marks = {mark.name: mark.x for mark in of(section, Lines, "run_step_time").marks}
    assert marks.pop("window") == 400
    ((name, x),) = marks.items()
    assert name.startswith("+4") and x == pytest.approx(1200, abs=30)
    changes = of(section, Table, "run_changes").columns
    assert changes["step"] == [x] and changes["until_step"] == [1999] and ":" in changes["time_of_day"][0]


def test_goodput_cost_and_findings_are_facts(section):
    facts = {fact.title: fact for part in section.parts if isinstance(part, Facts) for fact in part.rows}
    assert facts.keys() == {"goodput", "peak memory", "cost", "drift", "evaluation_cost"}
    assert "per million tokens" in facts["cost"].value and "1,200 MHz" in facts["drift"].value
    bars = of(section, Bars, "goodput")
    assert bars.labels[0] == "training" and "evaluation" in bars.labels and "start-up" in bars.labels


def test_events_have_their_place_and_the_longest_is_first(section):
    events = of(section, Table, "run_events").columns
    assert events["event"][0] == "evaluation" and events["place"][0] == "train.py:31 evaluate"
    assert events["duration_ns"] == sorted(events["duration_ns"], reverse=True)


def test_a_recording_without_a_history_says_so(tmp_path):
    write_recording(tmp_path, cpu_facts(trace=None), [sample(step) for step in range(8)])
    (part,) = section_of(open_session(tmp_path), "run").parts
    assert isinstance(part, Missing) and "history" in part.text


def test_the_card_shows_what_went_wrong(tmp_path):
    write_history(tmp_path, Run(num_steps=2_000, stall_at=(700,)))
    card = Card.of(open_session(tmp_path), price_per_hour=1.0)
    text = terminal_text(card_document(card), width=100)
    assert "since the start" in text and "stalls" in text and "per million tokens" in text
    told = json.loads(json.dumps(card.to_json()))["whole_run"]
    assert sum(told["goodput"]["rows"].values()) == told["goodput"]["wall_ns"]
    assert told["cost"]["unit"] == "tokens" and [each["id"] for each in told["findings"]] == ["stalls"]


def test_recordings_of_one_job_lie_side_by_side(tmp_path):
    for number, job in enumerate(("7", "7", "8")):
        folder = write_history(tmp_path / str(number), Run(num_steps=500, save_every=200))
        facts = json.loads((folder / "recording.json").read_text())
        (folder / "recording.json").write_text(json.dumps({**facts, "job": job}))
    first = open_session(tmp_path / "0")
    own = goodput_of(first)
    whole = job_of(first, own)
    assert whole is not None and own is not None
    assert whole.num_runs == 2 and whole.num_steps == 2 * own.num_steps
    assert sum(whole.rows.values()) == whole.wall_ns and whole.rows["repeated steps"] > 0
    alone = open_session(tmp_path / "2")
    assert job_of(alone, goodput_of(alone)) is None
