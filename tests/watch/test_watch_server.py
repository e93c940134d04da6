"""The server of `rush watch` by a real HTTP client: what it tells, what it refuses, how many it serves, how much it reads."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest

from rush.cli import main
from rush.errors import MachineError
from rush.watch import catalog
from rush.watch.server import Server
from tests.report import made_up, made_up_race
from tests.report.made_up_run import append_rows, write_run

PLAIN = (b"Bad Request\n", b"HTTP Version Not Supported\n")
"""What a client gets that does not speak of a version: the first HTTP had no headers."""
ATTACK = "<script>alert(1)</script>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "a", rows=60, steps=100)
    write_run(folder / "b", rows=80)
    made_up.write(folder / "ladder", made_up.made_up_ladder())
    return folder


@pytest.fixture
def server(runs: Path) -> Iterator[Server]:
    with serving(runs) as server:
        yield server


class serving:
    """A server on a free port, in a thread."""

    def __init__(self, *folders: Path) -> None:
        self.server = Server(list(folders))

    def __enter__(self) -> Server:
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        return self.server

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


Answer = tuple[int, dict[str, str], bytes]


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> Answer:
    """One request; `path` follows the token unless it begins with a slash."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    whole = path if path.startswith("/") else f"/{server.token}/{path}"
    connection.putrequest(method, whole, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


def live(server: Server, *runs: tuple[str, str], have: str = "") -> Any:
    words = [("have", have), *(pair for id, seen in runs for pair in (("run", id), ("seen", seen)))]
    status, _, content = ask(server, f"api/live?{urlencode(words)}")
    assert status == 200
    return json.loads(content)


def test_the_list_has_every_run_and_ladder_with_its_status(server: Server) -> None:
    rows = {row["id"]: row for row in live(server)["list"]}
    assert {id: (row["kind"], row["status"]) for id, row in rows.items()} == {
        "0/a": ("run", "interrupted"),
        "0/b": ("run", "finished"),
        "0/ladder": ("ladder", "finished"),
    }
    assert (rows["0/a"]["step"], rows["0/a"]["steps"], rows["0/a"]["model"]) == (60, 100, "tiny")
    assert rows["0/b"]["val_loss"] == pytest.approx(2.1 + 5.0 * 2.718281828 ** (-75 / 60))
    assert "table" not in rows["0/ladder"]  # only where it is asked for
    _, _, content = ask(server, "api/live?table=0/ladder")
    (ladder,) = (row for row in json.loads(content)["list"] if row["kind"] == "ladder")
    assert len(ladder["table"]["rows"]) == len(made_up.made_up_ladder()["rungs"])


def test_a_run_that_is_watched_sends_only_what_is_new(
    server: Server, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rush.watch.live_run.FRESH_S", 0.0)
    first = live(server, ("0/a", "-"))
    run = first["runs"]["0/a"]
    assert run["anew"]
    assert run["at"]["steps"] == list(range(1, 61))
    assert len(run["figures"]["loss"]["mean"]) == 60
    assert run["validations"]["steps"] == [25, 50]
    assert [sample["step"] for sample in run["samples"]] == [60]
    again = live(server, ("0/a", run["seen"]), have=first["version"])
    assert "list" not in again
    assert not {"at", "samples", "validations"} & again["runs"]["0/a"].keys()
    append_rows(runs / "a", range(61, 64))
    more = live(server, ("0/a", run["seen"]))["runs"]["0/a"]
    assert not more["anew"]
    assert more["at"]["steps"] == [60, 61, 62, 63]  # the last one may have grown
    assert more["from"] == 59


def test_the_points_of_a_long_run_are_thinned_and_a_spike_stays(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "long"
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, 5001):
            file.write(
                f'{{"step": {step}, "loss": {77.0 if step == 1234 else 2.0}, "tokens": {step}, "step_s": 1.0}}\n'
            )
    with serving(tmp_path / "runs") as server:
        run = live(server, ("0/long", ""))["runs"]["0/long"]
        assert len(run["at"]["steps"]) <= 800
        assert max(run["figures"]["loss"]["high"]) == 77.0
        assert run["at"]["steps"][-1] == 5000


@pytest.mark.parametrize(
    "path", ["/", "/x/", "/wrong-token/api/live", "//api/live", "/api/live", "/%2e%2e/", "/ä/"]
)
def test_without_the_token_nothing_is_told(server: Server, path: str) -> None:
    status, headers, content = ask(server, quote(path, safe="/%"))
    assert status == 403
    assert content == b"Forbidden\n"
    assert "default-src 'none'" in headers["content-security-policy"]


def test_a_token_that_is_nearly_right_is_wrong(server: Server) -> None:
    for token in (server.token[:-1], server.token + "x", server.token.swapcase(), ""):
        assert ask(server, f"/{token}/api/live")[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", "", "127.0.0.1.evil.example:80"]
)
def test_another_host_is_refused_even_with_the_token(server: Server, host: str) -> None:
    assert ask(server, "api/live", Host=host)[0] == 421
    assert ask(server, "api/live", Host=f"localhost:{server.port}")[0] == 200


def test_two_hosts_are_refused(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.sendall(
            f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nHost: evil.example\r\n\r\n".encode()
        )
        assert b" 421 " in link.recv(4096)


def test_another_origin_is_refused_even_with_the_token(server: Server) -> None:
    for origin in (
        "https://evil.example",
        "null",
        f"http://evil.example:{server.port}",
        "http://127.0.0.1:1",
    ):
        assert ask(server, "api/live", Origin=origin)[0] == 403
    assert ask(server, "api/live", Origin=f"http://127.0.0.1:{server.port}")[0] == 200


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "NONSENSE"]
)
def test_other_methods_are_refused(server: Server, method: str) -> None:
    status, headers, _ = ask(server, "api/live", method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_head_has_the_headers_of_get_and_no_body(server: Server) -> None:
    got, headed = ask(server, ""), ask(server, "", "HEAD")
    assert headed[2] == b""
    assert headed[1]["content-length"] == str(len(got[2]))
    for _, headers, _ in (got, headed):
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "../a/recipe.toml",
        "..%2f..%2fetc/passwd",
        "api/../../x",
        "a/recipe.toml",
        "runs/a",
        "watch.js/..",
        "%00",
    ],
)
def test_paths_lead_nowhere(server: Server, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize(
    "id", ["0/../secret", "../secret", "/etc", "0/a/..", "0//a", "1/a", "0/link", "0/a\x00", ""]
)
def test_only_listed_ids_are_answered(server: Server, runs: Path, id: str) -> None:
    secret = write_run(runs.parent / "secret", rows=5)
    (runs / "link").symlink_to(secret)
    assert live(server, (id, ""))["runs"] == {}
    assert ask(server, f"page?id={quote(id)}")[0] == 404


def test_links_out_of_the_folder_are_not_followed(runs: Path) -> None:
    secret = runs.parent / "secret"
    write_run(secret, rows=5, samples=[{"step": 5, "text": "TOP SECRET"}])
    (runs / "folder").symlink_to(secret)
    (runs / "mixed").mkdir()
    for name in ("metrics.jsonl", "samples.jsonl", "recipe.toml"):
        (runs / "mixed" / name).symlink_to(secret / name)
    (runs / "half").mkdir()
    (runs / "half" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (runs / "half" / "samples.jsonl").symlink_to(secret / "samples.jsonl")
    (runs / "half" / "recipe.toml").symlink_to(secret / "recipe.toml")
    os.mkfifo(runs / "half" / "failure.json")
    with serving(runs) as server:
        found = live(server, ("0/half", ""), ("0/mixed", ""), ("0/folder", ""))
        assert {row["id"] for row in found["list"]} == {"0/a", "0/b", "0/ladder", "0/half"}
        assert "TOP SECRET" not in json.dumps(found)
        assert next(row for row in found["list"] if row["id"] == "0/half").get("model") is None
        assert ask(server, "page?id=0/half")[0] == 404
        os.mkfifo(runs / "a" / "failure.json")  # nobody waits at a pipe
        assert ask(server, "page?id=0/a")[0] == 404
        (runs / "a" / "failure.json").unlink()
        (runs / "a" / "checkpoints").symlink_to(secret)  # on another disk: nothing that the page reads
        assert ask(server, "page?id=0/a")[0] == 200


def test_the_page_of_a_record_is_drawn_from_it_and_cannot_ask_the_server(server: Server, runs: Path) -> None:
    (runs / "a" / "report.html").write_text(ATTACK)
    for id, words in (("0/a", "stopped at step"), ("0/ladder", "The ladder")):
        status, headers, content = ask(server, f"page?id={id}")
        assert status == 200
        assert words in content.decode()
        assert ATTACK not in content.decode()
        assert headers["content-security-policy"].startswith("sandbox allow-scripts;")


def test_hostile_names_and_damaged_records_are_listed_as_text(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / ATTACK.replace("/", "_"), rows=3, samples=[{"step": 3, "text": ATTACK}])
    (runs / "broken").mkdir()
    (runs / "broken" / "ladder.json").write_text(
        '{"rungs": [1, {"name": ["x"]}, {"tokens_per_s": {"median": "x"}}], "finished": {}}'
    )
    (runs / "no-json").mkdir()
    (runs / "no-json" / "tune.json").write_bytes(b"\xff[[[")
    (runs / "odd").mkdir()
    (runs / "odd" / "metrics.jsonl").write_bytes(
        b'\xff\n{"step": 1e999}\n{"step": "x"}\n[]\n{"step": 2, "loss": {}}\n'
    )
    with serving(runs) as server:
        rows = live(server, ("0/odd", ""))
        assert {row["name"] for row in rows["list"]} == {ATTACK.replace("/", "_"), "broken", "no-json", "odd"}
        assert rows["runs"]["0/odd"]["at"]["steps"] == [2]
        assert ask(server, "page?id=0/broken")[0] == 404
        status, headers, _ = ask(server, f"api/live?run={quote('0/' + ATTACK.replace('/', '_'))}")
        assert status == 200
        assert headers["content-type"].startswith("application/json")


def test_lines_that_are_no_http_are_refused_without_repeating_them(server: Server) -> None:
    for line in (
        b"<script>\r\n\r\n",
        b"GET " + b"x" * 70000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port)) as link:
            link.settimeout(10)
            link.sendall(line)
            answer = b"".join(iter(lambda: link.recv(65536), b""))
        assert re.match(rb"HTTP/1.1 (400|403|414|505) ", answer) or answer in PLAIN
        assert b"script" not in answer.split(b"\r\n\r\n", 1)[-1]


def test_an_address_that_is_none_is_a_bad_request(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.sendall(f"GET http://[/ HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode())
        assert link.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert ask(server, f"api/live?{'&'.join(f'run={n}' for n in range(100))}")[0] == 400
    assert ask(server, "api/live?run=%ff%fe&seen=...&have=%00")[0] == 200


def test_a_request_with_a_body_is_refused_and_its_body_is_no_second_request(server: Server) -> None:
    inner = f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as link:
        link.settimeout(10)
        link.sendall(
            f"GET /{server.token}/ HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Length: {len(inner)}\r\n\r\n{inner}".encode()
        )
        answer = b"".join(iter(lambda: link.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def requests(server: Server, number: int, each: int) -> int:
    """How many of `each` requests of one client over one connection are answered with what was asked for."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    good = 0
    for at in range(each):
        id = ("0/a", "0/b")[(number + at) % 2]
        connection.request("GET", f"/{server.token}/api/live?{urlencode({'have': 'x', 'run': id})}")
        answer = connection.getresponse()
        found = json.loads(answer.read())
        good += answer.status == 200 and list(found["runs"]) == [id] and len(found["list"]) == 3
    connection.close()
    return good


def test_fifty_clients_at_once_lose_nothing(server: Server) -> None:
    with ThreadPoolExecutor(50) as pool:
        assert sum(pool.map(lambda n: requests(server, n, 8), range(50))) == 50 * 8


@pytest.mark.slow
def test_fifty_clients_with_two_hundred_requests_each_lose_nothing(server: Server, runs: Path) -> None:
    with ThreadPoolExecutor(51) as pool:
        writer = pool.submit(
            lambda: [append_rows(runs / "a", range(step, step + 1)) for step in range(61, 161)]
        )
        assert sum(pool.map(lambda n: requests(server, n, 200), range(50))) == 50 * 200
        writer.result()
    assert live(server, ("0/a", ""))["runs"]["0/a"]["at"]["steps"][-1] == 160


def test_a_hundred_runs_are_listed_by_the_ends_of_their_files_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "FRESH_S", 0.0)
    runs = tmp_path / "runs"
    one = write_run(runs / "run-000", rows=2000)
    for number in range(1, 100):
        copy = runs / f"run-{number:03d}"
        copy.mkdir()
        for name in ("metrics.jsonl", "recipe.toml", "machine.json"):
            os.link(one / name, copy / name)
    with serving(runs) as server:
        found = live(server)
        assert len(found["list"]) == 100
        assert all(row["step"] == 2000 and row["status"] == "finished" for row in found["list"])
        assert len(json.dumps(found)) < 60_000
        assert server.watch.catalog.files_read == 200  # the end of its metrics and the recipe, of each run
        assert server.watch._live == {}  # no curve was read
        live(server)
        assert server.watch.catalog.files_read == 200
        append_rows(one, range(2001, 2002))  # all of them are links to one file
        assert live(server)["list"][0]["step"] == 2001
        assert server.watch.catalog.files_read == 300


def test_a_port_that_is_taken_is_one_sentence(server: Server, runs: Path) -> None:
    with pytest.raises(MachineError, match=f"127.0.0.1:{server.port}: .*--port"):
        Server([runs], server.port)


def test_the_command_prints_its_address_and_ends_with_ctrl_c(runs: Path) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from rush.cli import main; main()"
    words = [sys.executable, "-c", code, "watch", str(runs)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{url}api/live", timeout=20) as answer:
            assert len(json.load(answer)["list"]) == 3
        process.send_signal(signal.SIGINT)
        assert "Stopped watching" in process.stdout.read()
    assert process.returncode == 0


def test_a_folder_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["watch", str(tmp_path / "nothing")])
    assert left.value.code == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_race_is_listed_with_its_recipes(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "race-tiny"
    folder.mkdir(parents=True)
    (folder / "race.json").write_text(json.dumps(made_up_race.race()))
    _, (row,) = catalog.Catalog([tmp_path / "runs"]).rows()
    assert (row["kind"], row["status"], row["what"]) == ("race", "finished", "2 recipes")
    first, second = row["table"]["rows"]
    assert (first[0], first[2]) == ("A tiny a=1", None)
    assert second[2] == pytest.approx(1.5 / 1.2, rel=0.02)
    assert second[4] == "ok; gross ×1.5"
