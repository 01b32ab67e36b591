"""`stepscope analyze --sql` and whoever wrote the query or the trace: nothing else is read, sent, run or filled."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import polars as pl
import pytest

from parametrized import parametrized
from stepscope.errors import UsageError
from stepscope.render.csv import guarded
from stepscope.session.sql import run_query
from stepscope.session.sql_process import NO_OTHER_FILE
from verbs import run_verb

sql = partial(run_verb, "analyze", "--sql")
SECRET = "root-line:x:0"
FUNCTIONS = ("read_csv", "read_parquet", "read_json", "read_ndjson", "read_ipc", "scan_csv", "READ_CSV", "Read_Csv")
QUOTED = (
    "{}",
    "'{}'",
    '"{}"',
    "`{}`",
    "[{}]",
    "{} ",
    "{}\n",
    "{}/* /* */ */",
    "{}--\n",
    "/**/'{}'/**/",
    "U&'{}'",
    "$${}$$",
)
PLACES = (
    "select * from {f}('{p}')",
    "select x from {f}('{p}')",
    "from {f}('{p}')",
    "explain select * from {f}('{p}')",
    "select '--', * from {f}('{p}')",
    "select '''', * from {f}('{p}')",
    "select * from device where event in (select a from {f}('{p}'))",
    "select * from device d join {f}('{p}') c on d.event = c.a",
    "select * from device d, {f}('{p}') c",
    "select * from device natural join {f}('{p}')",
    "with b as (with c as (select * from {f}('{p}')) select * from c) select * from b",
    "select (select max(a) from {f}('{p}')) as x from device",
    "select event from device union all select * from {f}('{p}')",
    "select * from lateral {f}('{p}')",
    "select * from table({f}('{p}'))",
    "create table c as select * from {f}('{p}')",
    "with c as (select * from {f}('{p}')) select case when x is null then 1 else 2 end from c",
)
OTHER_TEXTS = (
    "select * from '{p}'", 'select * from "{p}"', "select * from `{p}`", "copy device to '{p}.out'",
    "copy (select * from device) to '{p}.out'", "copy device from '{p}'", "set x = 1", "create table x as select 1",
    "create external table x location '{p}'", "insert into device select * from '{p}'", "drop table device",
    "attach '{p}' as x", "install httpfs", "load '{p}'", "pragma x", "select readfile('{p}')",
    "select getenv('HOME')",
    "select pg_read_file('{p}')", "select * from glob('{p}*')", "show columns from '{p}'", "describe '{p}'",
)  # fmt: skip
ALL_IN_ONE = """
import json, sys
import polars as pl
from stepscope.session.sql_process import QueryError, execute, lock
tables = {"device": pl.DataFrame({"event": [1]})}
queries = json.load(sys.stdin)
lock(1 << 30)
said = []
for query in queries:
    try:
        said.append(["answer", str(execute(tables, query))])
    except QueryError as error:
        said.append(["refused", str(error)])
print(json.dumps(said))
"""


def put(folder: Path, name: str) -> Path:
    event = {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 1, "ts": 1, "dur": 1}
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": [event]}))
    return path


@pytest.fixture(scope="module")
def secrets(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("secrets")
    frame = pl.DataFrame({SECRET: [SECRET], "a": [SECRET]})
    frame.write_csv(folder / "secret.csv")
    frame.write_parquet(folder / "secret.parquet")
    frame.write_ndjson(folder / "secret.json")
    frame.write_ipc(folder / "secret.ipc")
    return sorted(folder.iterdir())


def test_no_text_reads_a_file_or_sends_a_request(secrets):
    """GIVEN each function and quoting, in each place of a query, THEN nothing of a file and no request comes out."""
    requests: list[object] = []
    server = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with suppress(OSError):  # it is closed in the end
            requests.append(server.accept())

    threading.Thread(target=listen, daemon=True).start()
    address = f"http://127.0.0.1:{server.getsockname()[1]}/secret.parquet"
    paths = [*map(str, secrets), str(secrets[0].parent / "*"), address, "/dev/stdin", "/proc/self/environ", "~/x.csv"]
    queries = [
        template.format(f=quoted.format(function), p=path)
        for number, template in enumerate(PLACES)
        for function in FUNCTIONS
        for quoted in QUOTED
        for path in [paths[number % len(paths)], address if quoted == "'{}'" else str(secrets[0])]
    ] + [text.format(p=path) for text in OTHER_TEXTS for path in paths]

    done = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE], input=json.dumps(queries), capture_output=True, text=True, check=True
    )
    said = json.loads(done.stdout)

    assert len(said) == len(queries) > 3_000
    told = [(query, what) for query, (_, what) in zip(queries, said) if SECRET in what.replace(query, "")]
    assert not told and not requests
    assert sum(what == NO_OTHER_FILE for _, what in said) > 500  # the functions were reached, and could open nothing
    answered = {query.split()[0] for query, (kind, _) in zip(queries, said) if kind == "answer"}
    assert answered <= {"create", "drop"}  # its own tables only, which end with the process
    assert sorted(secrets[0].parent.iterdir()) == secrets
    server.close()


@pytest.mark.parametrize("quoted", ["read_csv", "'read_csv'", '"read_csv"'])
def test_the_verb_refuses_a_file_in_one_line(tmp_path, secrets, quoted):
    done = sql(put(tmp_path, "aten::mm"), f"select x from {quoted}('{secrets[0]}')")

    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert NO_OTHER_FILE in done.stderr and SECRET not in done.stderr


def test_a_query_that_needs_too_much_memory_is_one_line_and_the_limit_can_be_raised():
    rows = pl.DataFrame({"event": range(1_000)})
    few = "(select event from counts limit 8)"
    query = f"select a.event, b.event as b from counts a cross join counts b cross join {few} c"

    with pytest.raises(UsageError, match=r"more than 64\.0 MiB .* --memory-limit"):
        run_query({"counts": rows}, query, 64 << 20)
    assert run_query({"counts": rows}, query, 1 << 30).height == 8_000_000


def test_a_query_ends_with_the_process_that_asked():
    slow = "select count(*) as n from counts a cross join counts b where a.event * b.event % 7 = 9"
    code = (
        "import polars as pl\nfrom stepscope.session.sql import run_query\n"
        f"run_query({{'counts': pl.DataFrame({{'event': range(200_000)}})}}, {slow!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    worker = wait_for(lambda: children.read_text().split())[0]
    wait_for(lambda: "Max open files            0" in Path(f"/proc/{worker}/limits").read_text())
    process.kill()
    process.wait()

    assert wait_for(lambda: not Path(f"/proc/{worker}").exists())


def wait_for(condition):
    end = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


@parametrized("form", ["=1+1", "@SUM(1)", "+cmd|'/c calc'!A0", "-2+3", "\t=1", "a;=1"], quick=2)
def test_csv_holds_no_formula(tmp_path, form):
    trace = put(tmp_path, form)

    rows = sql(trace, 'select name, 1 as "=x" from host', "--csv").stdout.splitlines()

    assert rows == ["name,'=x", f"{guarded(form)},1"] and guarded(form) != form


def test_no_process_imports_from_the_folder_it_is_run_in(tmp_path):
    """GIVEN a folder from somebody else, with modules beside the trace WHEN it is queried there THEN none runs."""
    trace = put(tmp_path, "aten::mm")
    for name in ("polars", "json", "runpy", "io", "msgspec", "stepscope"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    # As the installed command does it: the folder is not where the first process imports from.
    code = "import sys; del sys.path[0]; from stepscope.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["analyze", "--sql", trace.name, "select name from host", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)

    assert json.loads(done.stdout) == [{"name": "aten::mm"}], done.stderr
    assert not (tmp_path / "mark").exists()
