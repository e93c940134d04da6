"""A hub on the loopback interface: it speaks as much of the Hugging Face hub's protocol over HTTP as its clients need here.

Repositories with commits and branches; their listing; files with ETag, commit and ranges; large files by LFS; uploads (preupload, LFS
batch, commit); gated and private repositories. And what goes wrong: any status, connections that are cut off, damaged bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".parquet", ".bin", ".png")
TOKEN = "hf_aSecretThatIsNowhere"


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """A repository: the files of each commit, and the commit of each branch."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        stamp = json.dumps([len(self.commits), ref, sorted(files)]).encode() + b"".join(files.values())
        sha = hashlib.sha1(stamp).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha

    def find(self, revision: str) -> str | None:
        sha = self.refs.get(revision, revision)
        return sha if sha in self.commits else None


@dataclass
class Hub:
    """The state of the server, and what it was asked."""

    url: str = ""
    repos: dict[tuple[str, str], Repo] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files that were uploaded, by their SHA-256."""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    failing: dict[str, int] = field(default_factory=dict)
    """Parts of paths, and the status they are answered with."""
    cut: dict[str, list[int]] = field(default_factory=dict)
    """Names of files, and after how many bytes the connection is cut off, request by request."""
    damaged: set[str] = field(default_factory=set)
    """Names of files that come with another byte."""
    slow_s: float = 0.0

    def add(self, name: str, files: dict[str, bytes], *, kind: str = "model", **options: bool) -> Repo:
        repo = self.repos[kind, name] = Repo(**options)
        repo.commit(files)
        return repo

    def asked(self, part: str, method: str = "GET") -> list[dict[str, str]]:
        """The headers of the requests whose path has this part."""
        return [headers for how, path, headers in self.requests if how == method and part in path]


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        split = urlsplit(self.path)
        path, self.query = unquote(split.path), parse_qs(split.query)
        self.state.requests.append((self.command, path, dict(self.headers.items())))
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self._chunks() if "chunked" in self.headers.get("Transfer-Encoding", "") else self.rfile.read(length)  # fmt: skip
        time.sleep(self.state.slow_s)
        for part, status in self.state.failing.items():
            if part in path:
                return self._send(status, {"error": "as asked"})
        for pattern, work in _ROUTES:
            if found := re.fullmatch(pattern, path):
                return work(self, *found.groups())
        return self._send(404, {"error": f"no route for {path}"})

    def _chunks(self) -> bytes:
        whole = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            whole += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return whole

    def _send(self, status: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repo(self, kind: str, name: str) -> Repo | None:
        """The repository, if this request may see it; otherwise it has been answered."""
        repo = self.state.repos.get((kind, name))
        given = self.headers.get("Authorization", "")
        if given and given != f"Bearer {TOKEN}":
            message = "Invalid credentials in Authorization header"
            self._send(401, {"error": message}, X_Error_Message=message)
        elif repo is None or (repo.private and not given):
            self._send(404 if given else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        else:
            return repo
        return None

    def _commit(self, kind: str, name: str, revision: str) -> tuple[Repo, str] | None:
        if (repo := self._repo(kind, name)) is None:
            return None
        if (sha := repo.find(revision)) is None:
            self._send(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
            return None
        return repo, sha

    # --- listing ---------------------------------------------------------------------------------

    def info(self, kinds: str, name: str, revision: str | None = None) -> None:
        if (found := self._commit(kinds[:-1], name, revision or "main")) is None:
            return
        repo, sha = found
        names = [{"rfilename": path} for path in repo.commits[sha]]
        self._send(200, {"id": name, "modelId": name, "sha": sha, "private": repo.private, "gated": repo.gated and "manual", "tags": [], "siblings": names, "downloads": 0, "likes": 0})  # fmt: skip

    def tree(self, kinds: str, name: str, revision: str, folder: str | None = None) -> None:
        if (found := self._commit(kinds[:-1], name, revision)) is None:
            return None
        files = found[0].commits[found[1]]
        start = f"{folder}/" if folder else ""
        inside = {path: content for path, content in files.items() if path.startswith(start)}
        deep = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        folders = sorted({path[: i + len(start)] for path in inside for i, c in enumerate(path[len(start) :]) if c == "/"})  # fmt: skip
        shown = [_entry(path, content) for path, content in inside.items() if deep or "/" not in path[len(start) :]]  # fmt: skip
        shown += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in folders if deep or "/" not in path[len(start) :]]  # fmt: skip
        if folder and not inside:
            return self._send(404, {"error": "no such path"}, X_Error_Code="EntryNotFound")
        return self._send(200, shown)

    def paths_info(self, kinds: str, name: str, revision: str) -> None:
        if (found := self._commit(kinds[:-1], name, revision)) is None:
            return
        files = found[0].commits[found[1]]
        asked = parse_qs(self.body.decode()).get("paths") or json.loads(self.body or b"{}").get("paths", [])
        shown = [_entry(path, files[path]) for path in asked if path in files]
        shown += [{"type": "directory", "path": path, "oid": "0" * 40, "size": 0} for path in asked if any(one.startswith(f"{path}/") for one in files)]  # fmt: skip
        self._send(200, shown)

    # --- files -----------------------------------------------------------------------------------

    def resolve(self, datasets: str | None, name: str, revision: str, path: str) -> None:
        if (found := self._commit("dataset" if datasets else "model", name, revision)) is None:
            return None
        repo, sha = found
        if repo.gated and not self.headers.get("Authorization"):
            return self._send(401, {"error": "gated"}, X_Error_Code="GatedRepo", X_Repo_Commit=sha)
        if path not in repo.commits[sha]:
            return self._send(404, {"error": "no such file"}, X_Error_Code="EntryNotFound", X_Repo_Commit=sha)
        content = repo.commits[sha][path]
        entry = _entry(path, content)
        etag = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": sha, "Accept_Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {"X_Linked_Etag": f'"{etag}"', "X_Linked_Size": str(len(content))}
        if path in self.state.damaged:
            content = bytes([content[0] ^ 1]) + content[1:]
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self._pour(200, path, content, headers)
        first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
        headers["Content_Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        return self._pour(206, path, content[first : last + 1], headers)

    def _pour(self, status: int, path: str, content: bytes, headers: dict[str, str]) -> None:
        if self.command == "HEAD" or not self.state.cut.get(path):
            return self._send(status, content, **headers)
        upto = self.state.cut[path].pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[:upto])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(2)
        return None

    # --- uploads ---------------------------------------------------------------------------------

    def create(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid username or password."})
        asked = json.loads(self.body)
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        kind = asked.get("type") or "model"
        if (kind, name) in self.state.repos:
            return self._send(409, {"error": "exists", "url": f"{self.state.url}/{name}"})
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.state.add(name, {".gitattributes": b""}, kind=kind, private=private)
        return self._send(200, {"url": f"{self.state.url}/{name}", "name": name, "id": name})

    def branch(self, kinds: str, name: str, revision: str) -> None:
        if (repo := self._repo(kinds[:-1], name)) is not None:
            repo.refs[revision] = repo.refs["main"]
            self._send(200, {})

    def preupload(self, kinds: str, name: str, revision: str) -> None:
        if self._commit(kinds[:-1], name, revision) is None:
            return None
        if not self.headers.get("Authorization"):
            return self._send(401, {"error": "log in"})
        files = json.loads(self.body)["files"]
        modes = [{"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LFS) else "regular", "shouldIgnore": False} for one in files]  # fmt: skip
        return self._send(200, {"files": modes})

    def batch(self, name: str) -> None:
        objects = [
            {"oid": one["oid"], "size": one["size"], "actions": {"upload": {"href": f"{self.state.url}/lfs/{one['oid']}"}}}
            for one in json.loads(self.body)["objects"]
        ]  # fmt: skip
        self._send(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self._send(400, {"error": "another hash"})
        self.state.stored[oid] = self.body
        return self._send(200, {})

    def commit(self, kinds: str, name: str, revision: str) -> None:
        if (found := self._commit(kinds[:-1], name, revision)) is None:
            return
        repo, sha = found
        files = dict(repo.commits[sha])
        for line in self.body.splitlines():
            said = json.loads(line)
            value = said["value"]
            if said["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif said["key"] == "lfsFile":
                files[value["path"]] = self.state.stored[value["oid"]]
        new = repo.commit(files, revision)
        self._send(
            200, {"success": True, "commitOid": new, "commitUrl": f"{self.state.url}/{name}/commit/{new}"}
        )

    def fine(self, *_: str) -> None:
        self._send(200, {"errors": [], "warnings": []})

    def who(self) -> None:
        self._send(200 if self.headers.get("Authorization") == f"Bearer {TOKEN}" else 401, {"name": "someone", "orgs": []})  # fmt: skip


def _entry(path: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
    if path.endswith(LFS):
        entry["lfs"] = {
            "oid": hashlib.sha256(content).hexdigest(),
            "size": len(content),
            "pointerSize": 130,
        }
    return entry


_NAME, _KINDS = r"([\w.-]+/[\w.-]+)", r"/api/(models|datasets)/"
_REV = r"(refs/convert/[^/]+|refs/pr/\d+|[^/]+)"
_ROUTES = [
    (rf"{_KINDS}{_NAME}", _Handler.info),
    (rf"{_KINDS}{_NAME}/revision/{_REV}", _Handler.info),
    (rf"{_KINDS}{_NAME}/tree/{_REV}(?:/(.+))?", _Handler.tree),
    (rf"{_KINDS}{_NAME}/paths-info/{_REV}", _Handler.paths_info),
    (rf"{_KINDS}{_NAME}/preupload/{_REV}", _Handler.preupload),
    (rf"{_KINDS}{_NAME}/commit/{_REV}", _Handler.commit),
    (rf"{_KINDS}{_NAME}/branch/{_REV}", _Handler.branch),
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.fine),
    (r"/api/whoami-v2", _Handler.who),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"/lfs/([0-9a-f]{64})", _Handler.store),
    (rf"/(datasets/)?{_NAME}/resolve/{_REV}/(.+)", _Handler.resolve),
]
