"""Writes the tables of docs/ from the classes they describe. `--check` only reports whether they are up to date.

python scripts/make_docs.py
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import Any

import stepscope
from stepscope.findings.diagnose import all_rules
from stepscope.session.sql import type_in_words
from stepscope.trace import tables

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepscope"

# Page, marker on the page, source file, class.
TABLES = [
    ("docs/recording.md", "trace/recording_facts.py", "RecordingFacts"),
    ("docs/recording.md", "trace/recording.py", "StepSample"),
    ("docs/recording.md", "trace/recording.py", "CounterSample"),
    ("docs/recording.md", "trace/history_file.py", "Process"),
    ("docs/recording.md", "trace/history_file.py", "Block"),
    ("docs/recording.md", "trace/history_file.py", "GpuBlock"),
    ("docs/recording.md", "trace/history_file.py", "Event"),
    ("docs/recording.md", "trace/compile_file.py", "CompileFacts"),
    ("docs/compile.md", "analysis/compiler/compile_summary.py", "CompilerSummary"),
    ("docs/compile.md", "analysis/compiler/compile_summary.py", "Recompiled"),
    ("docs/compile.md", "findings/compiler_report.py", "Region"),
    ("docs/watch.md", "findings/run_status.py", "RunStatus"),
    ("docs/watch.md", "findings/run_status.py", "Part"),
    ("docs/watch.md", "findings/run_status.py", "RankStatus"),
    ("docs/watch.md", "findings/run_status.py", "Event"),
    ("docs/watch.md", "findings/rank_warnings.py", "RunWarning"),
    ("docs/card.md", "analysis/time/summary.py", "Summary"),
    ("docs/card.md", "analysis/time/summary.py", "Throughput"),
    ("docs/card.md", "analysis/time/summary.py", "ObserverEffect"),
    ("docs/card.md", "analysis/time/statistics.py", "Distribution"),
    ("docs/card.md", "analysis/time/phases.py", "Phase"),
    ("docs/card.md", "analysis/time/phases.py", "Row"),
    ("docs/card.md", "analysis/costs/flops.py", "StepFlops"),
    ("docs/card.md", "analysis/costs/flops.py", "Utilization"),
    ("docs/card.md", "analysis/time/summary.py", "CounterSummary"),
    ("docs/card.md", "analysis/time/summary.py", "Gauge"),
    ("docs/bench.md", "analysis/comparison/sweeps.py", "PointSummary"),
    ("docs/tune.md", "analysis/comparison/tuning.py", "Tuning"),
    ("docs/tune.md", "analysis/comparison/tuning.py", "Tried"),
    ("docs/tune.md", "analysis/comparison/tuning.py", "Gain"),
    ("docs/memory.md", "analysis/memory/account.py", "Account"),
    ("docs/memory.md", "analysis/memory/account.py", "LiveAtPeak"),
    ("docs/memory.md", "analysis/memory/account.py", "Part"),
    ("docs/memory.md", "analysis/memory/account.py", "Stage"),
    ("docs/memory.md", "analysis/memory/module_tree.py", "ModuleBytes"),
    ("docs/memory.md", "analysis/memory/account.py", "Large"),
    ("docs/memory.md", "analysis/memory/timeline.py", "Point"),
    ("docs/memory.md", "analysis/memory/account.py", "LeftAlive"),
    ("docs/memory.md", "analysis/memory/snapshot.py", "SnapshotEnd"),
    ("docs/memory.md", "analysis/memory/snapshot.py", "OutOfMemory"),
    ("docs/memory.md", "analysis/memory/scaling.py", "Growth"),
    ("docs/memory.md", "analysis/memory/scaling.py", "AtPeak"),
    ("docs/memory.md", "analysis/memory/scaling.py", "Grown"),
    ("docs/attention.md", "session/reports.py", "AttentionReport"),
    ("docs/attention.md", "analysis/attention/reasons.py", "Reason"),
    ("docs/copies.md", "session/reports.py", "CopiesReport"),
    ("docs/copies.md", "session/reports.py", "WeightCasts"),
    ("docs/hangs.md", "analysis/ranks/hangs.py", "Hang"),
    ("docs/hangs.md", "analysis/ranks/hangs.py", "Divergence"),
    ("docs/hangs.md", "trace/dumps/rank_states.py", "RankState"),
    ("docs/hangs.md", "analysis/ranks/hangs.py", "RankCall"),
    ("docs/diagnose.md", "findings/diagnose.py", "Diagnosis"),
    ("docs/diagnose.md", "findings/finding.py", "Finding"),
    ("docs/whatif.md", "analysis/time/replay.py", "Replayed"),
    ("docs/verify.md", "analysis/comparison/verification.py", "Verification"),
    ("docs/verify.md", "analysis/comparison/verification.py", "Verified"),
    ("docs/verify.md", "analysis/comparison/losses.py", "LossCheck"),
    ("docs/verify.md", "analysis/comparison/verification.py", "Expected"),
    ("docs/improve.md", "analysis/comparison/improvement.py", "Improvement"),
    ("docs/improve.md", "analysis/comparison/improvement.py", "Trial"),
    ("docs/improve.md", "analysis/comparison/improvement.py", "Factor"),
    ("docs/compare.md", "analysis/comparison/compare.py", "Comparison"),
    ("docs/compare.md", "analysis/comparison/compare.py", "Pair"),
    ("docs/compare.md", "analysis/comparison/metrics.py", "Change"),
    ("docs/compare.md", "analysis/comparison/compare.py", "Table"),
    ("docs/compare.md", "analysis/comparison/compare.py", "TableRow"),
    ("docs/compare.md", "analysis/comparison/compare.py", "Differs"),
    ("docs/compare.md", "analysis/comparison/compare.py", "Missing"),
    ("docs/compare.md", "analysis/comparison/compare.py", "GateResult"),
]
TRACE_TABLES_PAGE = "docs/tables.md"
RULES_PAGE = "docs/findings/README.md"
API_PAGE = "docs/api.md"


def table(source: Path, class_name: str) -> str:
    """Return a Markdown table of a class's fields: name, type, and the note beside or below each."""
    text = source.read_text()
    found = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == class_name)
    lines = text.splitlines(keepends=True)[found.lineno - 1 : found.end_lineno]
    tokens = tokenize.generate_tokens(iter(lines).__next__)
    notes = {
        found.lineno - 1 + token.start[0]: token.string.lstrip("# ")
        for token in tokens
        if token.type == tokenize.COMMENT
    }
    rows = [f"{ast.get_docstring(found)}", "", "| field | type | description |", "|---|---|---|"]
    for node, following in zip(found.body, [*found.body[1:], None]):
        if isinstance(node, ast.AnnAssign):
            kind = ast.unparse(node.annotation).replace("|", "or")
            note = _text(following) or notes.get(node.end_lineno or 0, "").replace("|", "\\|")
            note = note[:1].upper() + note[1:] + ("" if not note or note.endswith(".") else ".")
            rows.append(f"| `{ast.unparse(node.target)}` | `{kind}` | {note} |")
    return "\n".join(rows)


def _text(node: ast.stmt | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return " ".join(str(node.value.value).split()).replace("|", "\\|") if is_text else ""


def trace_table(described: tables.Table) -> str:
    """Return a Markdown table of the columns of one of a trace's tables."""
    rows = [described.doc, "", "| column | type | description |", "|---|---|---|"]
    for column in described.columns:
        rows.append(f"| `{column.name}` | {type_in_words(column.dtype)} | {column.doc.replace('|', 'or')} |")
    return "\n".join(rows)


def rules_table() -> str:
    """Return a Markdown table of the rules of `stepscope diagnose`."""
    rows = ["| finding | asks |", "|---|---|"]
    rows += [f"| [`{rule.id}`]({rule.id}.md) | {rule.question} |" for rule in all_rules()]
    return "\n".join(rows)


def api_parts() -> dict[str, str]:
    """Return the functions, results and errors of the Python API as Markdown, from their docstrings."""
    exported = [(name, getattr(stepscope, name)) for name in stepscope.__all__ if name != "__version__"]
    errors = [(name, thing) for name, thing in exported if isinstance(thing, type) and issubclass(thing, Exception)]
    types = [entry for entry in exported if isinstance(entry[1], type) and entry not in errors]
    rows = [f"| `{name}` | {inspect.getdoc(thing)} |" for name, thing in errors]
    return {
        "functions": "\n\n".join(_function(name, thing) for name, thing in exported if not isinstance(thing, type)),
        "results": "\n\n".join(_class(name, thing) for name, thing in types),
        "errors": "\n".join(["| error | is raised if |", "|---|---|", *rows]),
    }


def _function(name: str, function: Any) -> str:
    source = textwrap.dedent(inspect.getsource(function))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    lines = source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    signature = "\n".join(lines).removeprefix(f"def {node.name}").removesuffix(":")
    doc = _prose(inspect.getdoc(function) or "")
    return f"### stepscope.{name}\n\n```python\n{name}{signature}\n```\n\n{doc}"


def _prose(doc: str) -> str:
    """Return a docstring with its example as a block of code."""
    text, prompt, example = doc.partition("\n>>> ")
    lines = [line.removeprefix(">>> ").removeprefix("... ") for line in f"{prompt.lstrip()}{example}".splitlines()]
    code = "\n".join(line.replace("  # doctest: +SKIP", "") for line in lines)
    return f"{text.strip()}\n\n```python\n{code}\n```" if code else text.strip()


def _class(name: str, kind: type) -> str:
    file = inspect.getsourcefile(kind)
    assert file is not None
    made = table(Path(file), kind.__name__)
    if made.endswith("|---|---|---|"):  # no fields
        made = inspect.getdoc(kind) or ""
    parts = {
        member: inspect.getdoc(value) or inspect.getdoc(getattr(value, "func", None)) or ""
        for member, value in vars(kind).items()
        if not member.startswith("_") and (callable(value) or hasattr(value, "__get__")) and inspect.getdoc(value)
    }
    fields = getattr(kind, "__dataclass_fields__", {})
    listed = [f"- `{member}`: {doc.splitlines()[0]}" for member, doc in parts.items() if member not in fields]
    return "\n\n".join(filter(None, (f"### {name}", made, "\n".join(listed))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only report whether they are up to date")
    only_check = parser.parse_args().check
    sections = [(page, name, table(SOURCE / source, name)) for page, source, name in TABLES]
    sections += [(TRACE_TABLES_PAGE, described.name, trace_table(described)) for described in tables.TABLES]
    sections.append((RULES_PAGE, "rules", rules_table()))
    sections += [(API_PAGE, name, text) for name, text in api_parts().items()]
    pages = {page: (ROOT / page).read_text() for page, _, _ in sections}
    for page, name, text in sections:
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, rest = pages[page].split(begin)
        pages[page] = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    stale = [page for page, text in pages.items() if (ROOT / page).read_text() != text]
    if only_check:
        if stale:
            print(f"out of date: {', '.join(stale)}: run python scripts/make_docs.py")
        return int(bool(stale))
    for page in stale:
        (ROOT / page).write_text(pages[page])
        print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
