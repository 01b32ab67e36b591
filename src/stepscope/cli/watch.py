"""Watch a run that goes on: throughput, loss, memory, where time goes, every rank, and what is wrong.

On a terminal, this is a screen that refreshes itself; press q to leave it. In a pipe or a dumb terminal, it prints a
line now and then. With --serve, it is a web page on this machine. It ends with the run. Without RUN, it watches the
latest run under runs/. The training does not notice.

examples:
  stepscope watch
  stepscope watch runs/train-20260101-120000 --steps 100000
  stepscope watch --once
  stepscope watch --json | jq .per_s
  stepscope watch --serve
"""

import argparse
import gc
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from stepscope.cli.support.options import positive, seconds
from stepscope.cli.support.output import is_terminal, write
from stepscope.errors import UsageError

if TYPE_CHECKING:
    from stepscope.findings.run_status import RunStatus, WatchedRun

SCREEN_S, LINE_S = 2.0, 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, about = parser.add_argument, f"time between updates (default: {SCREEN_S:g}; lines: {LINE_S:g})"
    add("run", type=Path, nargs="?", metavar="RUN", help="recording (default: the latest run)")
    add("--steps", type=positive, metavar="N", help="total steps of the run, for the time left")
    add("--every", type=seconds, metavar="SECONDS", help=about)
    add("--once", action="store_true", help="print the run as it is now, and exit")
    add("--json", action="store_true", help="print one JSON object per update (docs/watch.md)")
    add("--serve", action="store_true", help="show it as a web page, only on this machine")
    add("--port", type=positive, metavar="PORT", help="port of --serve (default: 7837, or a free one)")


def main(arguments: argparse.Namespace) -> int:
    from stepscope.api.watching import watched

    if arguments.port and not arguments.serve:
        raise UsageError("--port is for --serve")
    if arguments.serve and (arguments.json or arguments.once):
        raise UsageError("--serve shows a page: leave out --json and --once")
    gc.set_threshold(200_000, 20, 20)  # the history of a week is many objects, and none of them is garbage
    run = watched(arguments.run, arguments.steps)
    if arguments.serve:
        return _serve(run, arguments.every or SCREEN_S, arguments.port)
    from stepscope.cli.support.screen import can_draw

    if arguments.once or arguments.json or not can_draw():
        return _print(run, arguments)
    return _draw(run, arguments.every or SCREEN_S)


def _print(run: "WatchedRun", arguments: argparse.Namespace) -> int:
    """Print a run once, or line by line until it ends or nobody is reading."""
    from stepscope.document.run_status import line_of

    known: set[tuple[str, str]] = set()
    printed_s = -LINE_S
    while True:
        status = run.status()
        new = [warning for warning in status.warnings if (warning.id, warning.about) not in known]
        is_last, now = status.is_over or arguments.once, time.monotonic()
        is_due = now - printed_s >= (arguments.every or LINE_S)
        if arguments.json and (is_due or is_last):
            parts = [json.dumps(status.to_json(), allow_nan=False), "\n"]
        elif arguments.once or (is_last and is_terminal(sys.stdout)):
            parts = [_text(status, _width()), "\n"]
        elif is_due or is_last or new:
            clock = time.strftime("%H:%M:%S")
            parts = [f"{clock}  warning: {warning.text}\n" for warning in new] if not arguments.json else []
            parts += [f"{clock}  {line_of(status)}\n"] if is_due or is_last else []
        else:
            parts = []
        printed_s = now if is_due else printed_s
        known = {(warning.id, warning.about) for warning in status.warnings}
        if not write(parts) or is_last:
            return 0
        time.sleep(min(SCREEN_S, arguments.every or SCREEN_S))


def _draw(run: "WatchedRun", every_s: float) -> int:
    """Draw a run until it ends or the user presses q. The last screen stays on the terminal."""
    from stepscope.cli.support.screen import Screen

    with Screen() as screen:
        screen.draw("Reading the history …", "")
        status = run.glance()  # goodput and warnings come a moment later
        read_s = -every_s
        while not status.is_over:
            columns, _ = screen.size
            clock = time.strftime("%H:%M:%S")
            screen.draw(_text(status, max(40, columns)), f"q quits   read at {clock}")
            if "q" in screen.wait(max(0.0, every_s - (time.monotonic() - read_s))).lower():
                break
            if time.monotonic() - read_s >= every_s:
                status, read_s = run.status(), time.monotonic()
    write([_text(run.status() if status.is_over else status, _width()), "\n"])
    return 0


def _serve(run: "WatchedRun", every_s: float, port: int | None) -> int:
    """Serve a run as a page until it is interrupted; the page stays when the run has ended."""
    from threading import Thread

    from stepscope.cli.support.page_server import HOST, PORT, Answer, PageServer
    from stepscope.document.run_status import run_document, verdict_of
    from stepscope.render.page.live import live_page, live_policy, live_state

    shared = _Shared(run, every_s)

    def page() -> Answer:
        return Answer("text/html", live_page(run_document(shared.status()), every_s), live_policy())

    def state() -> Answer:
        status = shared.status()
        return Answer("application/json", live_state(run_document(status), status.is_over))

    status = shared.status()
    try:
        server = PageServer({"": page, "state": state}, PORT if port is None else port)
    except (OSError, OverflowError) as error:
        if port is not None:
            raise UsageError(f"port {port} cannot be used: {getattr(error, 'strerror', error)}") from None
        server = PageServer({"": page, "state": state}, 0)
    with server:
        Thread(target=server.serve_forever, daemon=True).start()
        tunnel = f"ssh -N -L {server.server_port}:{HOST}:{server.server_port} {socket.gethostname()}"
        write([f"{server.address}\nOnly this machine can open it; from another one, first run `{tunnel}`.\n"])
        write(["Press Ctrl-C to stop.\n"])
        try:
            while not (status := shared.status()).is_over:
                time.sleep(every_s)
            write([f"{verdict_of(status)} The page stays until you press Ctrl-C.\n"])
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0
        finally:
            server.shutdown()


class _Shared:
    """The status of a run for several readers: it is read at most once per update, by one of them."""

    def __init__(self, run: "WatchedRun", every_s: float) -> None:
        self._run, self._every_s = run, every_s
        self._lock = Lock()
        self._known: tuple[float, RunStatus] | None = None

    def status(self) -> "RunStatus":
        with self._lock:
            now = time.monotonic()
            if self._known is None or (now - self._known[0] >= self._every_s / 2 and not self._known[1].is_over):
                self._known = now, self._run.status()
            return self._known[1]


def _text(status: "RunStatus", width: int) -> str:
    from stepscope.document.run_status import run_document
    from stepscope.render.terminal import terminal_text

    color = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
    return terminal_text(run_document(status), width, color)


def _width() -> int:
    return max(40, min(120, shutil.get_terminal_size((100, 24)).columns))
