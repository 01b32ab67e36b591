"""The pytest plugin: the fixture `stepscope`, which measures a step and compares it with a stored baseline.

pytest loads this file at every start, so it imports nothing of Stepscope until a test uses the fixture.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stepscope.analysis.comparison.compare import GateResult
    from stepscope.analysis.comparison.metrics import Change
    from stepscope.document.card import Card
    from stepscope.integrations.step_figures import StepFigures

FOLDER = "stepscope_baselines"  # beside the test's file
_PROPERTY = "stepscope"  # of a test's report: what was compared
_COLUMNS = ("figure", "baseline", "now", "change", "limit", "result")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stepscope", "measure training steps (stepscope)")
    update = "write the baselines of the selected tests instead of comparing with them"
    group.addoption("--stepscope-update", action="store_true", help=update)
    group.addoption("--stepscope-summary", metavar="FILE", help="write what was compared to a Markdown file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("stepscope_summary") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(Path(config.getoption("stepscope_summary"))), "stepscope-summary")


@pytest.fixture
def stepscope(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measurer:
    """Measures training steps: `stepscope.measure(step_fn).compare("baseline", step_time="3%")`."""
    return Measurer(request.node, tmp_path_factory.mktemp("stepscope"))


class Measurer:
    """The fixture: measures the steps of one test."""

    def __init__(self, item: pytest.Item, folder: Path) -> None:
        self._item, self._folder, self._num_measured = item, folder, 0

    def measure(
        self, step_fn: Callable[[], Any], *, steps: int = 20, warmup: int = 5, model: Any = None
    ) -> StepResult:
        """Return the figures of a step; `step_fn` does one step, and is called `warmup` + `steps` + 5 times.

        `steps` of them are timed without a profiler. Compiled code is compiled anew, so that graph breaks and
        recompiles do not depend on other tests.
        """
        import gc
        import sys

        from stepscope.api import record
        from stepscope.errors import UsageError
        from stepscope.integrations.step_figures import NUM_TRACED, StepFigures
        from stepscope.recorder.windows import Windows

        if not (isinstance(steps, int) and isinstance(warmup, int) and steps >= 0 and warmup >= 2):
            raise UsageError(f"steps={steps!r}, warmup={warmup!r}: steps must be 0 or more, and warmup 2 or more.")
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
        gc.collect()
        self._num_measured += 1
        folder = self._folder / str(self._num_measured)
        windows = Windows(warmup=warmup, clean=steps, trace=NUM_TRACED)
        with record(folder, model=model, windows=windows) as recorder:
            for _ in range(windows.num_steps):
                step_fn()
                recorder.step()
        card = recorder.result
        if card is None:
            reason = "STEPSCOPE_DISABLE is set, or the tests run under `stepscope run`"
            raise UsageError(f"The step was not measured: {reason}.")
        return StepResult(self._item, card, *StepFigures.of(folder))


class StepResult:
    """A measured step. Each count is an attribute: `result.ops`, `result.flops`, `result.peak_memory`."""

    def __init__(self, item: pytest.Item, card: Card, figures: StepFigures, ops_by_name: dict[str, int]) -> None:
        self._item, self.card, self.figures, self.ops_by_name = item, card, figures, ops_by_name

    def __getattr__(self, name: str) -> int:
        from stepscope.integrations.step_figures import COUNTS

        if name not in COUNTS:
            raise AttributeError(f"a measured step has no {name!r}; its counts are {', '.join(COUNTS)}")
        return self.figures.count(name)

    def __repr__(self) -> str:
        return f"<StepResult: {self.card!r} {dict(self.figures.counts)}>"

    def compare(self, name: str = "baseline", **limits: str) -> None:
        """Return if no figure got worse by more than its limit; otherwise fail the test, and say which did.

        The test is skipped if a limit could not be decided. Without limits, no count may grow. With
        `--stepscope-update`, write the baseline.
        """
        from stepscope.analysis.comparison.compare import FAILED, UNDECIDED
        from stepscope.integrations.step_figures import StepFigures

        path = baseline_path(self._item, name)
        if self._item.config.getoption("stepscope_update"):
            self.figures.compare(self.figures, limits)  # UsageError for limits that no run could check
            self.figures.write(path)
            self._tell([("", "", "", "", "", f"written to {path.name}")])
            return
        base = StepFigures.read(path)
        results = self.figures.compare(base, limits)
        rows = [_row(result, change) for result, change in results]
        self._tell(rows)
        lines = "\n".join(f"  {row[0]}: {row[1]} → {row[2]}, {row[3]} (limit {row[4]}): {row[5]}" for row in rows)
        statuses = {result.status for result, _ in results}
        if FAILED in statuses:
            pytest.fail(
                f"The step is worse than its baseline:\n{lines}\nIf this is intended, run `pytest "
                f"--stepscope-update` and commit {path}.", pytrace=False,
            )  # fmt: skip
        if UNDECIDED in statuses:
            reasons = [f"{result.metric}: {result.reason}" for result, _ in results if result.status == UNDECIDED]
            pytest.skip(f"Not compared: {'; '.join(reasons)}.")

    def _tell(self, rows: list[tuple[str, ...]]) -> None:
        self._item.user_properties.append((_PROPERTY, rows))


def _row(result: GateResult, change: Change | None) -> tuple[str, ...]:
    from stepscope.document.comparison import change_text, figure, interval_text

    limit, outcome = f"{100 * result.limit_share:g} %", f"{result.status}: {result.reason}"
    if change is None:
        return result.metric, "", "", "", limit, outcome
    interval = f" ({interval_text(change)})" if change.low is not None else ""
    before, after = figure(change.base, change.unit), figure(change.new, change.unit)
    return result.metric, before, after, change_text(change) + interval, limit, outcome


def baseline_path(item: pytest.Item, name: str) -> Path:
    """Return where the baseline of a test lies: stepscope_baselines/FILE/TEST.NAME.json beside its file."""
    if not re.fullmatch(r"[\w.-]+", name):
        from stepscope.errors import UsageError

        raise UsageError(f"{name!r} is not a name for a baseline: use letters, digits, '.', '_' and '-'.")
    test = ".".join(item.nodeid.split("::")[1:])
    plain = re.sub(r"[^\w.=-]+", "-", test)[:100]
    if plain != test:  # two tests may differ only in what was replaced
        plain += f"-{zlib.crc32(test.encode()):08x}"
    return item.path.parent / FOLDER / item.path.stem / f"{plain}.{name}.json"


class _Summary:
    """Collects what tests compared, also in processes of pytest-xdist, and writes it as Markdown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[list[str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            found = [rows for name, rows in report.user_properties if name == _PROPERTY]
            self._rows += [[report.nodeid, *row] for rows in found for row in rows]  # type: ignore[attr-defined]

    def pytest_sessionfinish(self) -> None:
        from stepscope.render.markdown.text import escaped, grid

        compared = [row for row in self._rows if row[1]]
        num_failed = sum(row[-1].startswith("failed") for row in compared)
        lines = [f"### Training steps: {num_failed} of {len(compared)} figures got worse", ""]
        rows = [[escaped(cell) for cell in row] for row in self._rows]
        lines += grid(("test", *_COLUMNS), rows, [":--", ":--", "--:", "--:", "--:", "--:", ":--"])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"stepscope: the comparisons are in {self._path}")
