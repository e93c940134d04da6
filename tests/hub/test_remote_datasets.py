"""Datasets by id in real processes, against a hub on the loopback interface: Parquet, scripts in their Parquet form, and every error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.hub_server import TOKEN, Hub, running_hub

pytest.importorskip("datasets")
parquet: Any = pytest.importorskip("pyarrow.parquet")
pyarrow: Any = pytest.importorskip("pyarrow")

# Each line of standard input is a task; its answer is a line. Importing `datasets` takes longer than all of them.
READER = """
import json, os, sys, time
time.sleep = lambda seconds: None  # a client that tries again need not wait here
from rush.data.sources import open_source, pinned_source, describe_source
from rush.errors import RushError
from rush.data.hub_client import resolved
for line in sys.stdin:
    source, environment = json.loads(line)
    os.environ.update(environment)
    resolved.cache_clear()
    try:
        said = [document.text for document in open_source(source)]
        answer = {"texts": said, "pinned": pinned_source(source, (), lambda text: None), "described": describe_source(source)}
    except RushError as error:
        answer = {"error": str(error), "code": error.exit_code}
    print(json.dumps(answer), flush=True)
"""


def table(*texts: str, column: str = "text") -> bytes:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({column: list(texts)}), sink)
    return bytes(sink.getvalue().to_pybytes())


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.add(
            "some/pages",
            {
                "data/train-0.parquet": table("a", "b"),
                "data/train-1.parquet": table("c"),
                "README.md": b"# pages",
            },
            kind="dataset",
        )
        script = hub.add("old/script", {"script.py": b"raise SystemExit"}, kind="dataset")
        converted = {
            "default/train/0000.parquet": table("one"),
            "default/partial-test/0000.parquet": table("two"),
            "other/train/0000.parquet": table("three"),
        }
        script.commit(converted, "refs/convert/parquet")
        hub.add("old/alone", {"alone.py": b"raise SystemExit"}, kind="dataset")
        hub.add("some/closed", {"train.parquet": table("secret")}, kind="dataset", gated=True)
        hub.add("some/damaged", {"train.parquet": b"PAR1 and nothing else"}, kind="dataset")
        yield hub


@pytest.fixture(scope="module")
def reader(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    folder = tmp_path_factory.mktemp("reader")
    surroundings = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": "",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", READER], env=surroundings, cwd=folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        yield process
        process.stdin.close()  # type: ignore[union-attr]
        process.wait(20)
        process.stdout.close()  # type: ignore[union-attr]
    assert TOKEN not in (folder / "errors").read_text()


def read(reader: subprocess.Popen[str], source: str, **environment: str) -> dict[str, Any]:
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(json.dumps([source, {"HF_TOKEN": "", **environment}]) + "\n")
    reader.stdin.flush()
    answer: dict[str, Any] = json.loads(reader.stdout.readline())
    return answer


def test_a_dataset_by_id_in_parquet(reader: subprocess.Popen[str], hub: Hub) -> None:
    commit = hub.repos["dataset", "some/pages"].refs["main"]
    found = read(reader, "some/pages")
    assert found["texts"] == ["a", "b", "c"]
    assert found["pinned"] == f"some/pages@{commit}"
    assert read(reader, "hub:some/pages")["pinned"] == f"hub:some/pages@{commit}"


def test_a_commit_is_the_same_source_as_the_name_it_had(reader: subprocess.Popen[str], hub: Hub) -> None:
    before = read(reader, "some/pages")
    repo = hub.repos["dataset", "some/pages"]
    commit = repo.refs["main"]
    repo.commit({**repo.commits[commit], "data/train-1.parquet": table("changed")})
    try:
        old, new = read(reader, f"some/pages@{commit}"), read(reader, "some/pages")
    finally:
        repo.refs["main"] = commit
    assert old["texts"] == ["a", "b", "c"]
    assert new["texts"] == ["a", "b", "changed"]
    assert old["described"] == before["described"] != new["described"]


@pytest.mark.parametrize(
    ("source", "texts"),
    [("old/script", ["one"]), ("old/script::test", ["two"]), ("old/script:other", ["three"])],
)
def test_a_loading_script_is_read_in_its_parquet_form(
    reader: subprocess.Popen[str], hub: Hub, source: str, texts: list[str]
) -> None:
    found = read(reader, source)
    assert found["texts"] == texts
    assert hub.repos["dataset", "old/script"].refs["refs/convert/parquet"] in found["pinned"]
    assert not hub.asked("script.py")


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("some/nothing", 3, "there is no dataset some/nothing"),
        ("some/pages@never", 3, "no revision 'never'"),
        ("some/pages::validation", 3, "validation"),
        ("some/pages:config", 3, "config"),
        ("old/script:absent", 3, "has the configs default, other"),
        ("old/script:other:test", 3, "has the splits train in other"),
        ("old/alone", 3, "loading script, which is not executed"),
        ("some/damaged", 3, "damaged"),
        ("some/closed", 4, "is gated"),
    ],
)
def test_errors_of_the_hub_are_one_sentence(
    reader: subprocess.Popen[str], source: str, code: int, said: str
) -> None:
    found = read(reader, source)
    assert (found.get("code"), said in found.get("error", "")) == (code, True), found


def test_a_gated_dataset_with_a_token(reader: subprocess.Popen[str]) -> None:
    assert read(reader, "some/closed", HF_TOKEN=TOKEN)["texts"] == ["secret"]


@pytest.mark.parametrize(("status", "said"), [(403, "refuses access"), (500, "HTTP 500")])
def test_answers_of_a_hub_that_cannot(
    reader: subprocess.Popen[str], hub: Hub, status: int, said: str
) -> None:
    hub.failing["/api/datasets/some/pages"] = status
    try:
        found = read(reader, "some/pages@" + ("0" * 40))
    finally:
        hub.failing.clear()
    assert found["code"] == 4
    assert said in found["error"]


def test_a_stream_that_is_cut_is_taken_up_again_or_is_one_sentence(
    reader: subprocess.Popen[str], hub: Hub
) -> None:
    path = "data/train-1.parquet"
    hub.cut[path] = [20]
    try:
        assert read(reader, "some/pages")["texts"] == ["a", "b", "c"]
        assert not hub.cut[path], "it was cut"
        hub.cut[path] = [20] * 200
        found = read(reader, "some/pages")
    finally:
        hub.cut.clear()
    assert found["code"] == 4, found
    assert "some/pages" in found["error"]
    assert read(reader, "some/pages")["texts"] == ["a", "b", "c"]


def test_without_network(reader: subprocess.Popen[str], hub: Hub) -> None:
    found = read(reader, "other/pages", HF_ENDPOINT="http://127.0.0.1:9")
    assert read(reader, "some/pages", HF_ENDPOINT=hub.url)["texts"], "and with it again"
    assert found["code"] == 4
    assert "cannot be reached" in found["error"]
    assert "data.files" in found["error"]
