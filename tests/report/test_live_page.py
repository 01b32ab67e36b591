"""A page that changes, in a real browser and on its server: who gets it, what it shows, and that names stay text."""

from __future__ import annotations

import http.client
import json
from threading import Thread

import pytest

from history_maker import Run, write_history
from hostile_names import NAMES
from parametrized import parametrized
from stepscope.cli.support.page_server import Answer, PageServer
from stepscope.document.model import Bars, Document, Fact, Facts, Notes, Section, Series, Table, Text, Trend, Trends
from stepscope.document.run_status import run_document
from stepscope.findings.run_status import WatchedRun
from stepscope.render.page.live import live_page, live_policy, live_state


def document(verdict: str = "Step 5.", names: tuple[str, ...] = ("data", "forward"), notes: tuple[str, ...] = ()):
    numbers = [float(at) for at, _ in enumerate(names, 1)]
    trends = tuple(Trend(name, name, [1.0, None, 3.0, float("nan")], "per_s", name) for name in names)
    parts = [
        Trends(trends, "5 min"),
        Facts((Fact("run", names[0], names[-1]),)),
        Bars(id="parts", title="where it went", labels=names, series=(Series("time", numbers),), unit="time_ns"),
        Table("ranks", "ranks", {"rank": list(names), "num_steps": numbers}),
        Text(names[0]),
    ]
    return Document(names[0], verdict, (Section("run", "Run", (*([Notes(notes)] if notes else []), *parts)),))


class Served:
    """A server whose document the test changes."""

    def __init__(self) -> None:
        self.document, self.is_over, self.num_asked = document(), False, 0
        self.server = PageServer({"": self.page, "state": self.state}, 0)
        Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def page(self) -> Answer:
        return Answer("text/html", live_page(self.document, 0.05), live_policy())

    def state(self) -> Answer:
        self.num_asked += 1
        return Answer("application/json", live_state(self.document, self.is_over))

    def ask(self, path: str = "", method: str = "GET", **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=10)
        connection.request(method, path, headers=headers)
        return connection.getresponse()

    @property
    def secret(self) -> str:
        return self.server.address.split("/")[3]


@pytest.fixture
def served():
    made = Served()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def tab(served, chromium):
    """The page in a browser; the test fails in the end if it complained or asked anybody else."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page, complaints = context.new_page(), []
    page.set_default_timeout(20_000)
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append("a dialog") or dialog.dismiss())
    page.on(
        "request", lambda request: request.url.startswith(served.server.address) or complaints.append(request.url)
    )
    page.goto(served.server.address)
    page.wait_for_selector("html.ready", state="attached")
    page.is_cut_off = False  # a test that ends the server sets it: the browser then complains itself
    yield page
    context.close()
    assert [each for each in complaints if not (page.is_cut_off and "net::ERR_" in each)] == []


def test_only_who_knows_the_address_gets_an_answer(served):
    ok, secret = f"/{served.secret}/", served.secret
    paths = {
        ok: 200,
        f"{ok}state": 200,
        f"{ok}?x=1": 200,
        "/": 404,
        "/state": 404,
        f"/{secret}": 404,
        f"{ok}../": 404,
    }
    paths |= {f"/{secret[:-1]}/": 404, f"/{secret}x/": 404, "/é/": 404, f"{ok}page": 404, f"//evil.example{ok}": 404}

    assert {path: served.ask(path.replace("é", "%C3%A9")).status for path in paths} == paths
    assert "secret" not in served.ask("/").read().decode() and served.secret not in str(served.ask("/").headers)
    with PageServer({}, 0) as another:
        assert len(secret) >= 22 and secret not in another.address


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("localhost:9999", 200), ("LOCALHOST", 200), ("evil.example", 404), ("", 404),
        ("127.0.0.1.evil.example", 404), ("evil.example:7837", 404), ("user@127.0.0.1:1", 200), ("[::1", 404),
        ("localhost.", 404),
    ],
)  # fmt: skip
def test_a_name_that_somebody_let_resolve_to_this_machine_gets_nothing(served, host, status):
    assert served.ask(f"/{served.secret}/", Host=host).status == status


def test_nothing_but_reading_is_answered(served):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert served.ask(f"/{served.secret}/", method).status == 501
    head = served.ask(f"/{served.secret}/", "HEAD")
    assert head.status == 200 and head.read() == b""
    assert served.server.server_address[0] == "127.0.0.1"


def test_its_headers_let_nothing_in_or_out(served):
    headers = served.ask(f"/{served.secret}/").headers

    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer" and headers["X-Frame-Options"] == "DENY"
    assert "Access-Control-Allow-Origin" not in headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def test_what_changes_is_shown_and_the_rest_stays(served, tab):
    tab.evaluate("document.querySelector('#table-ranks table').id = 'same'")
    served.document = document("Step 6.", notes=("Rank 3 is silent.",))
    tab.wait_for_selector("text=Rank 3 is silent.")

    assert tab.inner_text("#verdict") == "Step 6."
    assert tab.eval_on_selector_all("#parts > div", "all => all.map((one) => one.id)") == [
        "notes-", "trends-", "facts-", "bars-parts", "table-ranks", "text-",
    ]  # fmt: skip
    assert tab.query_selector("#same") is not None  # a reader in the middle of a table is not thrown out of it
    served.document = document("Step 7.")
    tab.wait_for_function("() => !document.getElementById('notes-')")


def test_names_stay_text(served, tab):
    served.document = document(" ".join(NAMES), NAMES, NAMES)
    tab.wait_for_selector("text=<script>alert(1)</script> >> nth=0")

    assert tab.eval_on_selector_all("main script, main img, main a, main iframe", "all => all.length") == 0
    assert tab.evaluate("document.querySelectorAll('main [onerror], main [style]').length") == 0
    assert served.ask(f"/{served.secret}/").read().decode().count("<script>") == 1
    json.loads(served.ask(f"/{served.secret}/state").read())


def test_it_can_be_paused_and_says_when_nobody_answers(served, tab):
    tab.evaluate("() => { const ask = fetch; window.asked = 0; fetch = (...all) => (asked++, ask(...all)) }")
    tab.wait_for_function("() => asked > 1")
    tab.click("#pause")
    assert tab.get_attribute("#pause", "aria-pressed") == "true"
    asked = tab.evaluate("asked")  # counted where they begin: one may still be on its way
    served.document = document("Step 8.")
    tab.wait_for_timeout(300)
    assert tab.evaluate("asked") == asked and tab.inner_text("#verdict") == "Step 5."
    tab.click("#pause")
    tab.wait_for_selector("text=Step 8.")
    tab.is_cut_off = True
    served.server.shutdown()
    served.server.server_close()
    tab.wait_for_selector("text=cannot be reached")
    assert tab.inner_text("#facts-")  # the last figures stay


def test_a_run_that_has_ended_is_asked_no_more(served, tab):
    served.is_over = True
    tab.wait_for_function("() => document.getElementById('read').textContent.startsWith('ended')")
    asked = served.num_asked  # a page that has seen the end has no request on its way
    tab.wait_for_timeout(300)

    assert served.num_asked == asked


@parametrized("width", [320, 1280], quick=1)
def test_it_fits_in_light_and_dark(served, tab, width):
    tab.set_viewport_size({"width": width, "height": 900})
    light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")

    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.is_visible("#verdict")


def test_every_picture_and_button_has_a_name(served, tab):
    found = tab.eval_on_selector_all("svg[role=img]", "all => all.map((one) => one.getAttribute('aria-label'))")

    assert len(found) == 2 and all(text.endswith("Now data") or text.endswith("Now forward") for text in found)
    assert tab.eval_on_selector_all("button", "all => all.every((one) => one.textContent.trim())")
    assert tab.get_attribute("#verdict", "role") == "status" and tab.query_selector("h1") is not None


def test_a_real_run_fits_a_phone_and_follows_its_steps(served, tab, tmp_path):
    settings = {
        "noise": 0.0,
        "ends": None,
        "clock_mhz": lambda step: 1500.0,
        "total_bytes": 80 << 30,
        "save_every": 300,
    }
    run = WatchedRun(write_history(tmp_path, Run(num_steps=1000, **settings)), 2000)
    write_history(tmp_path / "rank1", Run(num_steps=1000, **settings))
    served.document = run_document(run.status())
    tab.wait_for_selector("text=Step 1,000 of 2,000")
    tab.set_viewport_size({"width": 320, "height": 800})

    assert tab.eval_on_selector_all(".trends figure", "all => all.length") == 6
    assert tab.inner_text("#bars-parts h2") == "Where the last 1 min 49 s went"
    assert "1,500 MHz" in tab.inner_text("#table-ranks") and "train.py:40 save" in tab.inner_text("#table-events")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    with (tmp_path / "history.jsonl").open("a") as stream:
        last = {"step": 1000, "num_steps": 5, "window": "free", "start_ns": 10**12, "t": 1.8e9, "wall_ns": 5 * 10**8}
        last |= {"median_ns": 10**8, "max_ns": 10**8, "max_step": 1000, "host_ns": {"data": 5 * 10**8}}
        stream.write(json.dumps(last) + "\n")
    served.document = run_document(run.status())
    tab.wait_for_selector("text=Step 1,005 of 2,000")
