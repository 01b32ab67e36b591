"""What torch.compile did: its report from a recording, and the compiled code in the trace."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from stepscope.analysis.compiler.compile_summary import CompilerSummary, compiler_summary
from stepscope.analysis.compiler.compiled_regions import regions_by_name
from stepscope.errors import if_available
from stepscope.findings.rules.compiler import recompiles
from stepscope.session.case import Case

SCHEMA_VERSION = 1
TRACE_ALONE = "A trace does not show why graphs broke or which guard failed. `stepscope run train.py` records it."


@dataclass(frozen=True)
class Region:
    """Calls of compiled code in a typical traced step."""

    name: str  # `compiled region 0/0 (forward, model.py:12)`
    num_calls: float
    host_ns: float
    is_nested: bool  # whether another region calls it: the graph broke there


@dataclass(frozen=True)
class CompilerReport:
    path: str
    summary: CompilerSummary | None  # null if nothing was compiled, or only a trace was read
    regions: tuple[Region, ...]
    notes: tuple[str, ...]

    def to_json(self, most: int | None = None) -> dict[str, Any]:
        """Return what `--json` prints (docs/compile.md), with at most `most` regions."""
        return {
            "schema_version": SCHEMA_VERSION,
            "path": self.path,
            "compiler": None if self.summary is None else self.summary.to_json(),
            "regions": [dataclasses.asdict(region) for region in self.regions[:most]],
            "notes": list(self.notes),
        }


def compiler_report(case: Case) -> CompilerReport:
    report, notes = case.compile_report, []
    summary = compiler_summary(report, case.clean_ns) if report else None
    calls = if_available(lambda: case.compiled_regions)
    rows = () if calls is None or calls.is_empty() else regions_by_name(calls, case.num_steps, report).to_dicts()
    regions = tuple(Region(**row) for row in rows)
    if summary is None:
        notes += [finding.sentence for finding in if_available(lambda: recompiles(case)) or ()]
        if case.has_recording:
            notes.append("torch.compile compiled nothing in this run.")
        elif regions:
            notes.append(TRACE_ALONE)
        else:
            notes.append("The trace shows no compiled code. Call torch.compile(model) and record again.")
    return CompilerReport(path=str(case.path), summary=summary, regions=regions, notes=tuple(notes))
