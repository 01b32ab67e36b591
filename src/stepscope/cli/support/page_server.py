"""Serves one page that changes, only to this machine and only to who knows its address.

Other users of the machine can reach its ports too, and so can a web page in your own browser whose name resolves to
127.0.0.1. Every address therefore begins with a secret, and the request must name this machine.
"""

import hmac
import secrets
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

HOST, PORT = "127.0.0.1", 7837
_NAMES = ("127.0.0.1", "localhost")
_TIMEOUT_S = 10.0


class Answer(NamedTuple):
    kind: str  # its MIME type
    text: str
    policy: str = "default-src 'none'; frame-ancestors 'none'"


class PageServer(ThreadingHTTPServer):
    """Answers `address` + name for every name in `answers`, the page itself under the name ``.

    OSError if the port is taken; port 0 is any that is free.
    """

    daemon_threads = True

    def __init__(self, answers: Mapping[str, Callable[[], Answer]], port: int) -> None:
        self._secret = secrets.token_urlsafe(16)
        self._answers = answers
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self._secret}/"

    def answer(self, path: str) -> Callable[[], Answer] | None:
        """Return what answers a path; None for every other."""
        secret, slash, name = path.removeprefix("/").partition("/")
        is_known = bool(slash) and hmac.compare_digest(secret.encode(errors="replace"), self._secret.encode())
        return self._answers.get(name) if is_known else None

    def handle_error(self, *_: object) -> None:
        """Say nothing of a browser that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _TIMEOUT_S
    server_version, sys_version = "stepscope", ""

    def do_GET(self) -> None:
        try:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            name = None
        make = self.server.answer(urlsplit(self.path).path) if name in _NAMES else None
        answer = (
            make() if make is not None else Answer("text/plain", "Not found. Open the address that watch printed.\n")
        )
        body = answer.text.encode(errors="replace")
        self.send_response(404 if make is None else 200)
        for header, value in {
            "Content-Type": f"{answer.kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": answer.policy,
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }.items():
            self.send_header(header, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing: the terminal belongs to the run."""
