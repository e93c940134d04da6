"""The server of `rush watch`: on loopback only, read-only, with a token.

Other pages in a browser can reach a loopback port too, so every request must prove that it comes from our page: a random token
in the path (compared in constant time), our own Host (against DNS rebinding), and no foreign Origin. Only GET and HEAD are
answered. A request names ids of the catalog, never a path. Pages of records are rendered here from the record: a `report.html`
in a folder is untrusted and never served.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import stat
import sys
import threading
from collections import OrderedDict
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from rush.errors import MachineError, RushError
from rush.report.redraw import page_of
from rush.version import __version__
from rush.watch.catalog import Catalog, Entry
from rush.watch.live_run import LiveRun, Seen

MOST_CHOSEN = 12
READ = ("recipe.toml", "metrics.jsonl", "samples.jsonl", "machine.json", "failure.json", "notes.jsonl")
"""The files behind the page of a run."""
MOST_LIVE = 64
MOST_CONNECTIONS = 256
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
DRAWN_POLICY = "sandbox allow-scripts; frame-ancestors 'none'"
"""Content security policy for a record's page, which has its own policy inside: its script cannot send requests to this server."""
ASSETS = {
    "": ("watch.html", "text/html"),
    "watch.js": ("watch.js", "text/javascript"),
    "watch.css": ("watch.css", "text/css"),
}


class Watch:
    """The catalog, and the runs whose curves are in memory."""

    def __init__(self, folders: list[Path]) -> None:
        self.catalog = Catalog(folders)
        self._lock = threading.Lock()
        self._live: OrderedDict[str, LiveRun] = OrderedDict()

    def live(self, entry: Entry) -> LiveRun:
        with self._lock:
            if entry.id not in self._live:
                self._live[entry.id] = LiveRun(entry.path)
            self._live.move_to_end(entry.id)
            while len(self._live) > MOST_LIVE:
                self._live.popitem(last=False)
            return self._live[entry.id]

    def answer(self, query: dict[str, list[str]]) -> dict[str, Any]:
        """The list where it changed, and what is new of the chosen runs."""
        version, rows = self.catalog.rows()
        found: dict[str, Any] = {"version": version}
        if query.get("have") != [version]:
            shown = query.get("table", [])
            found["list"] = [row if row["id"] in shown else _without_table(row) for row in rows]
        seen = query.get("seen", [])
        runs = {}
        for number, id in enumerate(query.get("run", [])[:MOST_CHOSEN]):
            entry = self.catalog.entry(id)
            if entry is not None and entry.kind == "run":
                word = seen[number] if number < len(seen) else ""
                runs[id] = self.live(entry).since(Seen.parse(word))
        found["runs"] = runs
        return found

    def page(self, id: str) -> str | None:
        """The page of a record, drawn now; None where there is none."""
        entry = self.catalog.entry(id)
        if entry is None or not all(_plain(entry.path / name) for name in {*READ, entry.record.name}):
            return None
        try:
            return page_of(entry.path)
        except (RushError, OSError):
            return None


def _without_table(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "table"}


def _plain(path: Path) -> bool:
    """Whether a path is free, or a file that is no link: a pipe would keep its reader waiting for ever."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True
    except OSError:
        return False


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folders: list[Path], port: int = 0) -> None:
        self.watch = Watch(folders)
        self.token = secrets.token_urlsafe(24)
        self._room = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise MachineError(
                f"Cannot listen on 127.0.0.1:{port}: {error.strerror}. Give another --port, or leave it out for a free one."
            ) from error

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    @cached_property
    def hosts(self) -> frozenset[str]:
        return frozenset(f"{name}:{self.port}" for name in ("127.0.0.1", "localhost"))

    @cached_property
    def assets(self) -> dict[str, tuple[str, bytes]]:
        """The page's own files; its style is the reports' with a little more."""
        folder = resources.files("rush.watch").joinpath("page")
        found = {name: (kind, folder.joinpath(file).read_bytes()) for name, (file, kind) in ASSETS.items()}
        kind, style = found["watch.css"]
        common = resources.files("rush.report").joinpath("templates", "style.css").read_bytes()
        return {**found, "watch.css": (kind, common + style)}

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A disconnected client is not reported; anything else is one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, ConnectionError | TimeoutError):
            print(f"rush watch: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = f"rush/{__version__}"
    sys_version = ""
    timeout = 60
    server: Server
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def _respond(self) -> None:
        try:
            refused = self._refusal()
            if refused is None:
                self._answer()
        except ValueError:  # an address that is none, or with too many fields
            refused = HTTPStatus.BAD_REQUEST
        if refused is not None:
            self._send(refused, "text/plain", f"{refused.phrase}\n".encode())

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        name = parts.path.split("/", 2)[2]
        query = parse_qs(parts.query, max_num_fields=64)
        if name in self.server.assets:
            kind, content = self.server.assets[name]
            self._send(HTTPStatus.OK, kind, content)
        elif name == "api/live":
            content = json.dumps(self.server.watch.answer(query), separators=(",", ":")).encode()
            self._send(HTTPStatus.OK, "application/json", content)
        elif name == "page" and (page := self.server.watch.page("".join(query.get("id", [])))) is not None:
            self._send(HTTPStatus.OK, "text/html", page.encode(), DRAWN_POLICY)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"Not Found\n")

    def _refusal(self) -> HTTPStatus | None:
        """Why a request is not answered; None for one of our page's."""
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            return HTTPStatus.MISDIRECTED_REQUEST
        if any(origin not in {f"http://{host}" for host in self.server.hosts} for origin in origins):
            return HTTPStatus.FORBIDDEN
        path = urlsplit(self.path).path.split("/")
        given = path[1] if len(path) > 2 and path[0] == "" else ""
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self.server.token.encode()):
            return HTTPStatus.FORBIDDEN
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # anything after it is not a request
            return HTTPStatus.BAD_REQUEST
        return None

    def _send(self, status: HTTPStatus, kind: str, content: bytes, policy: str = POLICY) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self._send_protection(policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_protection(self, policy: str) -> None:
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Requests that the library refuses: other methods, malformed HTTP. The answer quotes nothing of the request."""
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        content = f"{status.phrase}\n".encode()
        self.send_response(status)
        self.send_header("Connection", "close")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self._send_protection(POLICY)
        self.end_headers()
        if getattr(self, "command", None) != "HEAD":
            self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a log would contain the token."""


def over_ssh(port: int) -> str:
    """How to open the page from another machine."""
    return f"From another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}, then the same address there."
