"""Every case of the corpus: the script as it is without Stepscope, and the card as the script is."""

from __future__ import annotations

import importlib.util

import pytest
from case import SCRIPTS
from cases import CASES
from checks import both, both_in_forks, differences, mistakes, run_in_fork, stepscope_command

NUM_ENDLESS = 100_000
FORKED = [pytest.param(case, id=case.id) for case in CASES if case.in_make_test]


def _alone(case):
    # How torch is found and imported is tested by every run of its own, and `make test` has one.
    return pytest.param(case, id=case.id, marks=() if case.id == "sorted_imports" else pytest.mark.long)


def _check(case, bare, recorded):
    assert differences(case, bare, recorded) == []
    assert mistakes(case, recorded.card()) == []
    for rank in range(1, case.ranks):
        assert (recorded.recording / f"rank{rank}" / "recording.json").is_file()


@pytest.mark.parametrize("case", FORKED)
def test_a_script_in_a_process_that_has_torch(case, forks, tmp_path):
    _check(case, *both_in_forks(case, tmp_path, forks))


@pytest.mark.parametrize("case", [_alone(case) for case in CASES])
def test_a_script_as_a_user_runs_it(case, tmp_path):
    for package in case.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: the extra `field` has it")
    _check(case, *both(case, tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "evaluation_first",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("hand_data_add", "rollout_no_grad", "rollout_with_grad")
        ),
    ],
)
def test_exit_after_ends_when_training_was_measured(name, forks, tmp_path):
    (case,) = (case for case in CASES if case.id == name)
    ended = run_in_fork(forks, stepscope_command(case, NUM_ENDLESS, ("--quiet", "--exit-after")), tmp_path / "run")
    assert ended.exit_code == 0, ended.stderr
    num_steps = ended.card()["num_steps"]
    assert 20 <= num_steps < NUM_ENDLESS
    assert mistakes(case, ended.card(), num_steps) == []


def test_every_script_has_a_case_and_every_case_a_script():
    scripts = {str(path.relative_to(SCRIPTS).with_suffix("")) for path in SCRIPTS.rglob("*.py")}
    assert scripts == {case.script for case in CASES}
    assert len({case.id for case in CASES}) == len(CASES)
    assert all(case.steps % case.period == 0 for case in CASES)
