"""`analyze --sql`: what people type works, what comes out is safe, and a query sees nothing but the trace."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from parametrized import parametrized
from stepscope.cli.analyze_sql import fit
from stepscope.errors import UsageError
from stepscope.session import open_session
from stepscope.session.sql import refuse_other_than_query, tables_of
from stepscope.session.sql_process import execute
from stepscope.trace.tables import TABLES
from verbs import run_verb

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "tables.md").read_text(), re.DOTALL)


def complete(category: str, name: str, ts: float, dur: float, tid: object = 1, **args: object) -> dict:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(name: str, ts: float, dur: float, correlation: int, category: str = "kernel", **args: object) -> dict:
    common = {"device": 0, "stream": 7, "correlation": correlation, "External id": correlation + 100}
    return complete(category, name, ts, dur, "stream 7", **common, **args)


GEMM, NCCL, COPY = "void gemm<128>(float*)", "ncclDevKernel_AllReduce", "Memcpy HtoD (Pinned -> Device)"
ALLOCATION = {"Device Type": 1, "Device Id": 0, "Addr": 5, "Bytes": 512, "Total Allocated": 512}
COLLECTIVE = {"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 8}
EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 9, "tid": 0, "args": {"name": "python"}},
    {"ph": "M", "name": "thread_name", "pid": 9, "tid": 1, "args": {"name": "main"}},
    complete("cpu_op", "aten::mm", 100, 50, **{"External id": 101, "Input Dims": [[2, 3], [3, 4]]}),
    complete("cuda_runtime", "cudaLaunchKernel", 120, 10, correlation=1),
    complete("cuda_runtime", "cudaLaunchKernel", 140, 5, correlation=2),
    complete("cuda_runtime", "cudaMemcpyAsync", 150, 5, correlation=3),
    complete("user_annotation", "ProfilerStep#1", 90, 500),
    kernel(GEMM, 200, 40, 1),
    kernel(NCCL, 245, 20, 2, **COLLECTIVE),
    kernel(COPY, 300, 2, 3, "gpu_memcpy", bytes=4096),
    complete("gpu_user_annotation", "ProfilerStep#1", 200, 110, "stream 7", device=0, stream=7),
    {"ph": "i", "name": "[memory]", "cat": "cpu_instant_event", "pid": 9, "tid": 1, "ts": 130, "args": ALLOCATION},
    {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 9, "tid": 1, "ts": 120},
]


def put(path: Path, events: list[dict] = EVENTS, **fields: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**fields, "traceEvents": events}))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    return put(tmp_path_factory.mktemp("sql") / "trace.json")


@pytest.fixture(scope="module")
def tables(trace) -> dict[str, pl.DataFrame]:
    return tables_of(open_session(trace, use_cache=False))


def sql(*words: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run_verb("analyze", "--sql", *words, cwd=cwd)


def sql_process(*words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stepscope", "analyze", "--sql", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", **options)


@pytest.mark.parametrize("query", EXAMPLES, ids=lambda query: query.split("\n")[0][:40])
def test_every_query_of_the_documentation_runs_and_finds_something(tables, query):
    refuse_other_than_query(query)

    assert execute(tables, query).height > 0


# A launch that the trace has twice: as a call of the runtime, and as the driver's inside it.
TWICE = [*EVENTS, complete("cuda_driver", "cuLaunchKernel", 122, 5, correlation=1)]
NUM_RANKS = 3
ADDED_UP = ("num", "ms", "bytes")
NUM_JOINED = {"launches l": 3, "h.kind = 'op'": 1, "device_ranges r": 3, "threads t": 6, "collectives c": 1}
"""Rows of the device or the host that each join keeps: those with a partner, each once."""


@pytest.fixture(scope="module")
def one_and_many(tmp_path_factory) -> tuple[dict[str, pl.DataFrame], dict[str, pl.DataFrame]]:
    """The tables of a trace, and of a folder with that trace as each of its ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(NUM_RANKS):
        put(folder / f"rank{rank}.json", TWICE)
    one, all_ranks = (tables_of(open_session(path, use_cache=False)) for path in (folder / "rank0.json", folder))
    return one, all_ranks


@pytest.mark.parametrize("query", EXAMPLES, ids=lambda query: query.split("\n")[0][:40])
def test_every_query_of_the_documentation_adds_up_ranks_and_multiplies_nothing(one_and_many, query):
    one, many = (execute(tables, query) for tables in one_and_many)

    if "num" in one.columns:
        added = pl.col(*[name for name in ADDED_UP if name in one.columns])
        order = [name for name, dtype in one.schema.items() if not dtype.is_float()]
        assert_frame_equal(many.sort(order), one.with_columns(added * NUM_RANKS).sort(order))
    else:
        same = [name for name in one.columns if name != "rank"]
        assert_frame_equal(many.select(same).sort(same), pl.concat([one.select(same)] * NUM_RANKS).sort(same))


def test_every_join_of_the_documentation_keeps_its_rows_once(one_and_many):
    one, _ = one_and_many
    joins = {query: [num for part, num in NUM_JOINED.items() if part in query] for query in EXAMPLES}

    assert all(len(expected) == (" join " in query) for query, expected in joins.items())
    for query, expected in joins.items():
        if expected:
            assert execute(one, query.replace("limit 10", ""))["num"].sum() == expected[0], query


def test_the_documentation_says_what_a_range_leaves_out():
    text = (ROOT / "docs" / "tables.md").read_text()
    before = text[: text.index("join device_ranges")].rpartition("\n\n```sql")[0].rpartition("\n\n")[2]

    assert "autograd" in before.lower() and "`loss.backward()`" in before


def test_there_are_queries_in_the_documentation_for_most_tables():
    assert len(EXAMPLES) >= 8
    used = {table.name for table in TABLES if re.search(rf"(from|join) {table.name}\b", "\n".join(EXAMPLES))}
    assert used >= {"host", "device", "device_ranges", "memory", "threads", "counts", "collectives"}


@pytest.mark.parametrize(
    ("query", "rows"),
    [
        ("select count(*) from device", [(3,)]),
        ("SELECT kind, COUNT(*) AS n FROM device GROUP BY kind ORDER BY n DESC", [("kernel", 2), ("memcpy", 1)]),
        ("select name from device where kind = 'memcpy'", [(COPY,)]),
        ("select count(*) from device where kind in ('kernel', 'memset')", [(2,)]),
        ("select count(*) from device where kind <> 'kernel'", [(1,)]),
        ("select count(*) from device where kind = 'no such kind'", [(0,)]),
        ("select count(*) from device where name like '%gemm%'", [(1,)]),
        ("select count(*) from device where name not like '%gemm%'", [(2,)]),
        ("select count(*) from device where name ilike '%GEMM%'", [(1,)]),
        ("select count(*) from device where name ~ '^(void|nccl)'", [(2,)]),
        ("select upper(left(name, 4)) as a from device where starts_with(name, 'void')", [("VOID",)]),
        ("select replace(name, 'void ', '') as r from device order by event limit 1", [("gemm<128>(float*)",)]),
        ("select kind || ':' || split_part(name, '_', 2) as a from device where event = 8", [("kernel:AllReduce",)]),
        (
            "select case when name like '%nccl%' then 'nccl' else 'other' end as a, count(*) as n "
            "from device group by a order by a",
            [("nccl", 1), ("other", 2)],
        ),
        (
            "select h.name, d.name from host h join device d using (correlation) where d.kind = 'memcpy'",
            [("cudaMemcpyAsync", COPY)],
        ),
        (
            "select d.event, h.name from device d left join host h "
            "on d.external_id = h.external_id and h.kind = 'op' order by d.event limit 2",
            [(7, "aten::mm"), (8, None)],
        ),
        (
            "select start_ns - lag(start_ns + duration_ns) over (order by start_ns) as gap_ns "
            "from device order by start_ns",
            [(None,), (5000,), (35000,)],
        ),
        ("select name from device qualify row_number() over (order by duration_ns desc) = 1", [(GEMM,)]),
        ("select sum(duration_ns) / 1000 as us, sum(duration_ns) * 0.001 as same from device", [(62.0, 62.0)]),
        ("select kind from device group by kind having max(duration_ns) > 2000", [("kernel",)]),
        ("with k as (select * from device) select (select max(duration_ns) from k) as m", [(40000,)]),
        ("select count(distinct name) from host where kind = 'runtime'", [(2,)]),
        ("select name from device where duration_ns = (select max(duration_ns) from device)", [(GEMM,)]),
        (
            "select name from device_ranges union all select name from host where kind = 'op' order by name",
            [("ProfilerStep#1",), ("aten::mm",)],
        ),
        ("select max(name) from device", [(GEMM,)]),
        ("select coalesce(shapes, '-') as s from host where kind = 'op'", [("[[2, 3], [3, 4]]",)]),
        (
            "select d.name from device d join host h "
            "on d.start_ns >= h.start_ns and d.start_ns < h.start_ns + h.duration_ns "
            "where h.kind = 'annotation' and d.kind = 'memcpy'",
            [(COPY,)],
        ),
    ],
)
def test_what_people_ask(tables, query, rows):
    refuse_other_than_query(query)

    assert execute(tables, query).rows() == rows


def test_a_number_with_a_point_is_a_number_and_no_decimal(tables):
    assert execute(tables, "select sum(duration_ns) * 0.001 as us from device").schema == {"us": pl.Float64()}


def test_the_verb_shows_a_table_for_people(trace):
    done = sql(trace, "select name, duration_ns, duration_ns / 7 as x, bytes from device order by event")

    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout == (
        "name                            duration_ns        x  bytes\n"
        "void gemm<128>(float*)                40000  5714.29   null\n"
        "ncclDevKernel_AllReduce               20000  2857.14   null\n"
        "Memcpy HtoD (Pinned -> Device)         2000  285.714   4096\n"
        "(3 rows)\n"
    )


def test_the_table_is_bounded_and_says_so(tmp_path):
    trace = put(tmp_path / "t.json", [complete("cpu_op", "a", i, 1) for i in range(1_200)])

    default = sql(trace, "select event from host").stdout.splitlines()
    three = sql(trace, "select event from host", "--limit", "3").stdout.splitlines()

    assert len(default) == 52
    assert default[-1] == "(50 of 1,200 rows: --limit N shows more, --csv and --json give all)"
    assert three[1:4] == ["    0", "    1", "    2"] and three[4].startswith("(3 of 1,200 rows")
    assert sql(trace, "select event from host where event < 0").stdout == "event\n(0 rows)\n"


def test_json_is_one_list_with_every_row(tmp_path):
    trace = put(tmp_path / "t.json", [complete("cpu_op", "é\u202e\x1b\n\"'", i, 1) for i in range(12_345)])
    query = "select event, name, correlation, event / 2 as half, 'NaN'::double as nan from host order by event"

    done = sql(trace, "--no-cache", query, "--json")
    rows = json.loads(done.stdout)

    assert done.stdout.isascii() and "\x1b" not in done.stdout
    assert len(rows) == 12_345
    assert rows[3] == {"event": 3, "name": "é\u202e\x1b\n\"'", "correlation": None, "half": 1.5, "nan": None}
    assert [row["event"] for row in rows] == list(range(12_345))
    assert json.loads(sql(trace, query, "--json", "--limit", "2").stdout) == rows[:2]
    assert json.loads(sql(trace, "select * from host limit 0", "--json").stdout) == []


def test_csv_has_every_row(tmp_path):
    trace = put(tmp_path / "t.json", [complete("cpu_op", 'a "b", c\nd é', i, 1) for i in range(12_345)])

    done = sql(trace, "select event, name, correlation from host order by event", "--csv")
    rows = list(csv.reader(io.StringIO(done.stdout)))

    assert rows[0] == ["event", "name", "correlation"] and len(rows) == 12_346
    assert rows[12_345] == ["12344", 'a "b", c?d é', ""]
    assert sql(trace, "select event from host limit 0", "--csv").stdout == "event\n"
    assert sql(trace, "select array[1, 2] as a", "--csv").stdout == 'a\n"[1, 2]"\n'


def test_names_cannot_speak_to_the_terminal(tmp_path):
    trace = put(tmp_path / "t.json", [complete("cpu_op", "evil\x1b[2J\u202e\r\nname" + "x" * 900, 1, 1)])

    done = sql(trace, 'select name, 1 as "a\x1bb" from host')

    assert done.returncode == 0
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    assert done.stdout.count("\n") == 3 and max(map(len, done.stdout.splitlines())) < 220
    refused = sql(trace, "select \x1b[2J from host").stderr
    assert "\x1b" not in refused and refused.count("\n") == 1


def test_csv_on_a_terminal_is_safe_too(tmp_path):
    trace = put(tmp_path / "t.json", [complete("cpu_op", "evil\x1b[2J", 1, 1)])
    command = [sys.executable, "-m", "stepscope", "analyze", "--sql", str(trace), "select name from host", "--csv"]
    main, other = os.openpty()
    try:
        subprocess.run(command, stdout=other, check=True)
        shown = os.read(main, 1000).decode()
    finally:
        os.close(main)
        os.close(other)

    assert shown.split() == ["name", "evil?[2J"]


def test_columns_fit_the_terminal():
    assert fit([90, 6, 20], [False, True, False], 60) == [30, 6, 20]
    assert fit([5, 6], [False, True], 60) == [5, 6]
    assert fit([90] * 8, [False] * 8, 60) == [12] * 8
    assert fit([30], [True], 10) == [30]
    assert fit([], [], 10) == []


@pytest.mark.parametrize("query", ["select 'read_csv' as a", "select name from device where name like '%read_csv%'"])
def test_the_name_of_such_a_function_alone_is_no_crime(tables, query):
    refuse_other_than_query(query)
    execute(tables, query)


@pytest.mark.parametrize(
    "query", ["drop table host", "delete from host", "truncate host", "copy host to 'x'", "", ";"]
)
def test_only_queries_are_run(trace, query):
    with pytest.raises(UsageError, match="only queries are run"):
        refuse_other_than_query(query)


@pytest.mark.parametrize(
    "query", ["  (select 1)", "-- why\nselect 1", "/* why */ SELECT 1", "show tables", "values (1)"]
)
def test_every_way_to_begin_a_query(tables, query):
    refuse_other_than_query(query)
    assert execute(tables, query).height


@parametrized(
    ("query", "what"),
    [
        ("select nope from device", 'unable to find column "nope"'),
        ("select * from nope", "relation 'nope' was not found"),
        ("select foo(name) from device", "unsupported function 'foo'"),
        ("select * from device where", "Expected: an expression, found: EOF"),
        ("select name, name from device", "duplicate"),
        ("select 1; select 2", "one (and only one) statement"),
        ("select cast(name as int) from device", "conversion"),
    ],
    quick=4,
)
def test_a_wrong_query_is_one_line_with_the_tables(trace, query, what):
    done = sql(trace, query)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stepscope analyze --sql: ") and done.stderr.count("\n") == 1
    assert what in done.stderr and all(table.name in done.stderr.partition("(tables: ")[2] for table in TABLES)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["nothing.json", "select 1"], "nothing.json does not exist"),
        (["."], "QUERY"),
        ([], "PATH, QUERY"),
        ([".", "select 1"], "is empty"),
        ([".", "select 1", "--limit", "0"], "argument --limit: '0' must be a positive integer"),
        ([".", "select 1", "--limit", "many"], "argument --limit: 'many' must be a positive integer"),
        ([".", "select 1", "--csv", "--json"], "not allowed"),
        (["/dev/null", "select 1"], "/dev/null"),
    ],
)
def test_a_mistake_is_one_line(words, what, tmp_path):
    done = sql(*words, cwd=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    assert what in done.stderr and done.stderr.count("\n") == 1


def test_options_may_stand_anywhere(trace):
    assert sql("--json", trace, "--no-cache", "select 1 as a", "--limit", "5").stdout == '[\n{"a":1}\n]\n'


def test_the_tables_are_listed_with_their_columns():
    done = sql("--tables")

    assert done.returncode == 0
    for table in TABLES:
        assert f"{table.name}: {table.doc}\n" in done.stdout
        for column in table.columns:
            assert re.search(rf"^  {column.name} +(integer|number|text) +{re.escape(column.doc)}$", done.stdout, re.M)


def test_several_traces_are_told_apart_by_rank_and_file(tmp_path):
    put(tmp_path / "rank0.json", EVENTS)
    put(tmp_path / "rank1.json", EVENTS[:8], distributedInfo={"rank": 5})
    query = "select rank, file, count(*) as n from device group by rank, file order by rank"

    rows = json.loads(sql(tmp_path, query, "--json").stdout)

    assert rows == [
        {"rank": 0, "file": str(tmp_path / "rank0.json"), "n": 3},
        {"rank": 5, "file": str(tmp_path / "rank1.json"), "n": 1},
    ]
    for table in TABLES:
        columns = tables_of(open_session(tmp_path, use_cache=False))[table.name].columns
        assert columns == [*table.schema, "rank", "file"]


def test_one_trace_has_the_documented_columns_and_no_others(tables):
    """The same as several have: a query is right for both."""
    for table in TABLES:
        assert tables[table.name].columns == [*table.schema, "rank", "file"]


def test_one_rank_of_a_folder(tmp_path):
    put(tmp_path / "rank0.json", EVENTS)
    put(tmp_path / "rank1.json", EVENTS[:8])
    (tmp_path / "rank2.json").write_text("no trace, and not asked for")
    query = "select rank, count(*) as n from device group by rank"

    assert json.loads(sql(tmp_path, query, "--json", "--rank", "1").stdout) == [{"rank": 1, "n": 1}]
    done = sql(tmp_path, query, "--rank", "7")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1


def test_a_recording_is_a_path_too(tmp_path):
    put(tmp_path / "run" / "trace" / "rank0.json")
    (tmp_path / "run" / "recording.json").write_text("{}")

    assert json.loads(sql(tmp_path / "run", "select count(*) as n from device", "--json").stdout) == [{"n": 3}]


def test_what_is_wrong_with_a_trace_is_said_beside_the_answer(tmp_path):
    trace = put(tmp_path / "cut.json")
    trace.write_text(trace.read_text()[:-200])

    done = sql(trace, "select count(*) as n from device", "--json")

    assert done.returncode == 0 and json.loads(done.stdout) == [{"n": 3}]
    assert done.stderr.startswith("stepscope analyze --sql: cut.json: ")


@pytest.mark.long
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    trace = put(tmp_path / "t.json", [complete("cpu_op", "x" * 100, i, 1) for i in range(3_000)])
    # Several megabytes: more than a pipe takes in when nobody reads it.
    query = "select a.name from host a cross join (select event from host limit 20) b"
    command = f"{sys.executable} -m stepscope analyze --sql {trace} '{query}' --csv | head -1"

    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "name\n", "")


@pytest.mark.long
def test_a_full_disk_is_one_line(trace):
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "stepscope", "analyze", "--sql", str(trace), "select * from host"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)

    assert done.returncode == 2
    assert done.stderr == "stepscope analyze --sql: the answer could not be written: No space left on device\n"


@pytest.mark.long
def test_a_terminal_that_knows_no_accents(tmp_path):
    trace = put(tmp_path / "t.json", [complete("cpu_op", "é∑", 1, 1)])

    done = sql_process(trace, "select name from host", env={**os.environ, "PYTHONIOENCODING": "ascii"})

    assert done.returncode == 0 and done.stdout.splitlines()[1] == "??"
