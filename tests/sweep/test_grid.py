"""Grids: products, pairs, TOML, functions, and the right word for every mistake."""

from __future__ import annotations

import sys
import textwrap

import pytest
from sweep_runs import gated

from stepscope.errors import UsageError
from stepscope.sweep.grid import Grid, changed, read_grids, renamed
from stepscope.workloads.registry import find

needs_toml = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")


@pytest.fixture
def grid():
    return Grid(gated(), {"device": "cpu"})


def told(points, *names):
    return [tuple({"preset": p.preset, **p.config, **p.run}[name] for name in names) for p in points]


def test_listed_values_multiply_in_the_order_they_are_written(grid):
    points = grid.points([grid.words(["width=2,3", "variant=plain,same"])])

    assert told(points, "width", "variant") == [(2, "plain"), (2, "same"), (3, "plain"), (3, "same")]


def test_every_knob_has_a_value_and_a_preset_is_only_a_name_for_some(grid):
    (point,) = grid.points([grid.words(["preset=wide"])])
    (same,) = grid.points([grid.words(["width=16"])])

    assert point.config == {"variant": "plain", "width": 16, "batch": 4}
    assert point.run["mode"] == "step" and point.run["device"] == "cpu" and len(point.run) == 10
    assert point.hash == same.hash and point.preset == "wide" and same.preset == "small"


def test_a_hash_is_the_same_tomorrow(grid):
    (point,) = grid.points([{}])

    assert point.hash == "cb95fc0dbf8f"
    assert changed(gated(), point, batch=5).hash != point.hash
    assert renamed(point, {"max_batch": 1}).hash != renamed(point, {"max_batch": 2}).hash != point.hash


def test_a_point_is_run_once(grid):
    assert len(grid.points([grid.words(["width=2,2", "width=2"]), {"width": [2]}])) == 1


def test_zip_pairs_and_single_values_go_with_each(grid):
    points = grid.points([grid.words(["width=2,3", "batch=5,6", "variant=same"])], paired=True)

    assert told(points, "width", "batch", "variant") == [(2, 5, "same"), (3, 6, "same")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["widht=2"], "did you mean width"),
        (["mod=step"], "did you mean mode"),
        (["variant=plane"], "did you mean plain"),
        (["mode=forwards"], "did you mean forward"),
        (["preset=smal"], "did you mean small"),
        (["presets=small"], "did you mean preset"),
        (["width=wide"], "an integer"),
        (["batch=0"], "must be 1 or more"),
        (["steps=0"], "must be 1 or more"),
        (["width"], "write key=value"),
        (["width="], "write key=value"),
    ],
)
def test_a_mistake_is_refused_with_the_nearest_right_word(grid, words, message):
    with pytest.raises(UsageError, match=message):
        grid.points([grid.words(words)])


@pytest.mark.parametrize(
    ("workload", "word", "smallest"),
    [
        ("cs336", "layers=0", 1),
        ("cs336", "heads=-1", 1),
        ("cs336", "d_model=0", 1),
        ("cs336", "checkpoint=-1", 0),
        ("nano", "random_keys=-1", 0),
        ("norm", "width=0", 1),
    ],
)
def test_what_counts_things_counts_at_least_one_unless_none_is_the_default(workload, word, smallest):
    grid = Grid(find(workload), {"device": "cpu"})

    with pytest.raises(UsageError, match=f"{word}: must be {smallest} or more"):
        grid.points([grid.words([word])])
    assert grid.points([grid.words([f"{word.partition('=')[0]}={smallest}"])])


def test_a_number_of_a_users_own_may_be_anything(grid):
    assert told(grid.points([grid.words(["width=-3"])]), "width") == [(-3,)]


def test_lists_of_different_lengths_cannot_be_paired(grid):
    with pytest.raises(UsageError, match="width has 2, batch has 3"):
        grid.points([grid.words(["width=2,3", "batch=1,2,3"])], paired=True)


@needs_toml
def test_a_toml_file_has_common_values_and_grids_of_its_own(grid, tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(
        textwrap.dedent("""
            variant = ["plain", "same"]
            mode = "forward"
            [[grid]]
            width = 2
            [[grid]]
            width = [4, 8]
            batch = [1, 2]
            variant = "same"
        """)
    )

    grids, paired = read_grids(str(path))

    assert not paired
    assert told(grid.points(grids), "width", "batch", "variant", "mode") == [
        (2, 4, "plain", "forward"),
        (2, 4, "same", "forward"),
        (4, 1, "same", "forward"),
        (4, 2, "same", "forward"),
        (8, 1, "same", "forward"),
        (8, 2, "same", "forward"),
    ]


@needs_toml
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("width = [", "is not valid TOML"),
        ("width = []", "a list of values"),
        ("[width]\na = 1", "a list of values"),
        ("[grid]\nwidth = 1", "\\[\\[grid\\]\\]"),
        ("zip = 1", "zip must be"),
        ("[[grid]]\nzip = true\nwidth = [1, 2]", "above the first"),
    ],
)
def test_a_wrong_toml_file_is_refused(tmp_path, text, message):
    (tmp_path / "grid.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_grids(str(tmp_path / "grid.toml"))


def test_a_function_gives_points(grid, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def points():\n  for width in (1, 2):\n    yield dict(width=width, batch=width * 2)\n")

    grids, _ = read_grids(f"{path}:points")

    assert told(grid.points(grids), "width", "batch") == [(1, 2), (2, 4)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("mine.py:point", "did you mean points"),
        ("other.py:points", "not found"),
        ("mine.py:number", "must return a list"),
        ("mine.py:words", "a dictionary of knobs"),
        ("grid.yaml", "file.py:function"),
        ("none.toml", "cannot be read"),
    ],
)
def test_a_wrong_source_is_refused(tmp_path, monkeypatch, source, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def points(): return []\ndef number(): return 1\ndef words(): return ['width=1']\n"
    )
    if source.endswith(".toml") and sys.version_info < (3, 11):
        pytest.skip("tomllib")
    with pytest.raises(UsageError, match=message):
        read_grids(source)


def test_a_workload_whose_knob_is_the_sweeps_own_is_refused(tmp_path):
    from stepscope.workloads.registry import find

    path = tmp_path / "clash.py"
    path.write_text("def build(mode: str = 'x'):\n  return lambda: 1\n")
    with pytest.raises(UsageError, match="reserved for sweeps"):
        Grid(find(f"{path}:build"), {})
