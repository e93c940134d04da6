"""Models on the hub by id, against a hub on the loopback interface: which files come, once, whole, and what is said when they do not."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rush.data import hub_files
from rush.data.hub_client import parse_id
from rush.errors import DataError, MachineError
from rush.hub.remote import local_config, local_folder, pinned_name
from tests.hub.hub_server import TOKEN, Hub, running_hub

pytest.importorskip("huggingface_hub")
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(range(256)) * 40,
    "pytorch_model.bin": b"a pickle",
    "modeling_evil.py": b"raise SystemExit",
    "README.md": b"# a model",
}
NEEDED = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "rush"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.chdir(tmp_path)
        yield hub


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_id_downloads_what_is_needed_and_nothing_else(hub: Hub) -> None:
    hub.add("some/model", MODEL)
    folder = local_folder("some/model")
    assert names(folder) == NEEDED
    assert all((folder / name).read_bytes() == MODEL[name] for name in NEEDED)
    assert not hub.asked("pytorch_model.bin")
    assert not hub.asked("modeling_evil.py")


def test_a_revision_is_a_branch_or_a_commit(hub: Hub) -> None:
    repo = hub.add("some/model", MODEL)
    first = repo.refs["main"]
    second = repo.commit({**MODEL, "config.json": b'{"model_type": "gpt2"}'}, "next")
    assert (local_folder("some/model@next") / "config.json").read_bytes() == b'{"model_type": "gpt2"}'
    assert (local_folder(f"some/model@{first}") / "config.json").read_bytes() == MODEL["config.json"]
    assert pinned_name("some/model@next") == f"some/model@{second}"
    assert pinned_name("some/model") == f"some/model@{first}"
    with pytest.raises(DataError, match="no revision 'never'"):
        local_folder("some/model@never")


def test_a_second_call_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("some/model", MODEL)
    folder = local_folder("some/model")
    count = len(hub.requests)
    assert local_folder(str(pinned_name("some/model"))) == folder
    assert len(hub.requests) == count, "a commit is looked up in the cache"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert local_folder("some/model") == folder
    assert len(hub.requests) == count


def test_without_network_the_cache_is_used_and_said(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("some/model", MODEL)
    folder = local_folder("some/model")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    said: list[str] = []
    assert local_folder("some/model", said.append) == folder
    assert "cannot be reached" in said[0]
    assert "cache" in said[0]
    with pytest.raises(MachineError, match=r"cannot be reached .*hf download other/model .*HF_HUB_OFFLINE=1"):
        local_folder("other/model")


def test_offline_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("some/model", MODEL)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MachineError, match=r"HF_HUB_OFFLINE is set.*hf download some/model"):
        local_folder("some/model")
    assert not hub.requests


def test_files_that_another_tool_downloaded_are_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import snapshot_download

    hub.add("some/model", MODEL)
    there = snapshot_download("some/model", endpoint=hub.url, cache_dir=Path(os.environ["HF_HOME"], "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert local_folder("some/model") == Path(there)


def sharded(**changes: bytes) -> dict[str, bytes]:
    table = {
        "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    }
    shards = {"model-1.safetensors": b"one", "model-2.safetensors": b"two", "other.safetensors": b"no"}
    index = {"model.safetensors.index.json": json.dumps(table).encode()}
    return {"config.json": b"{}", **index, **shards, **changes}


def test_the_shards_of_the_index_are_taken(hub: Hub) -> None:
    hub.add("some/model", sharded())
    folder = local_folder("some/model")
    assert {name for name in names(folder) if name.endswith("safetensors")} == {"model-1.safetensors", "model-2.safetensors"}  # fmt: skip


def test_a_missing_shard_is_found_before_the_others_are_downloaded(hub: Hub) -> None:
    files = sharded()
    del files["model-2.safetensors"]
    hub.add("some/model", files)
    with pytest.raises(DataError, match=r"incomplete.*model-2\.safetensors"):
        local_folder("some/model")
    assert not hub.asked("model-1.safetensors")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b"pickle"}, r"pytorch_model\.bin, not as safetensors"),
        ({"README.md": b"#"}, r"no config\.json; found README\.md"),
        ({"config.json": b"{}"}, "no weights"),
    ],
)
def test_a_repository_without_safetensors_is_refused(hub: Hub, files: dict[str, bytes], said: str) -> None:
    hub.add("some/model", files)
    with pytest.raises(DataError, match=said):
        local_folder("some/model")
    assert not hub.asked(".bin")


LARGE = {**MODEL, "model.safetensors": os.urandom(12 << 20)}
"""Weights of more than one chunk of a download, which are 10 MB."""


def test_a_connection_that_is_cut_is_taken_up_again(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add("some/model", LARGE)
    hub.cut["model.safetensors"] = [11 << 20]
    assert (local_folder("some/model") / "model.safetensors").read_bytes() == LARGE["model.safetensors"]
    ranges = [headers.get("Range") for headers in hub.asked("model.safetensors")]
    assert ranges == [None, "bytes=10485760-"]


@pytest.mark.slow
def test_an_interrupted_download_goes_on_where_it_stopped(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends with an error; the next one asks for the rest alone."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add("some/model", LARGE)
    hub.cut["model.safetensors"] = [11 << 20, *[1000] * 8]
    with pytest.raises(MachineError, match="cannot be reached"):
        local_folder("some/model")
    hub.cut.clear()
    hub.requests.clear()
    assert (local_folder("some/model") / "model.safetensors").read_bytes() == LARGE["model.safetensors"]
    assert [headers.get("Range") for headers in hub.asked("model.safetensors")] == ["bytes=10485760-"]
    assert not [*Path(os.environ["HF_HOME"]).rglob("*.part")]


@pytest.mark.parametrize("large", [1000, 1 << 30])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_is_found_by_its_hash(hub: Hub, name: str, large: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(hub_files, "LARGE", large)
    hub.add("some/model", MODEL)
    hub.damaged.add(name)
    with pytest.raises(DataError, match=rf"{name} of some/model.* damaged.*run this again"):
        local_folder("some/model")
    hub.damaged.clear()
    assert (local_folder("some/model") / name).read_bytes() == MODEL[name]


def test_a_gated_model_needs_a_token_which_is_written_nowhere(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.add("some/model", MODEL, gated=True)
    with pytest.raises(MachineError, match=r"gated.*Accept its terms at .*some/model.*HF_TOKEN"):
        local_folder("some/model")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    folder = local_folder("some/model")
    assert names(folder) == NEEDED
    said = "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert TOKEN not in said
    assert not any(TOKEN.encode() in path.read_bytes() for path in files)


@pytest.mark.parametrize(
    ("token", "kind", "said"),
    [("", DataError, "no model private/one"), ("hf_wrong", MachineError, "does not know the token")],
)
def test_a_private_model(hub: Hub, token: str, kind: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("private/one", MODEL, private=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(kind, match=said) as error:
        local_folder("private/one")
    assert "hf_wrong" not in str(error.value)


def test_no_such_id(hub: Hub) -> None:
    with pytest.raises(DataError, match=r"no model nobody/nothing on the hub .*nor is there a folder"):
        local_folder("nobody/nothing")


@pytest.mark.parametrize(("status", "said"), [(429, "no more requests"), (500, "HTTP 500"), (403, "refuses access")])  # fmt: skip
def test_other_answers_are_one_sentence(hub: Hub, status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.add("some/model", MODEL)
    hub.failing["/api/models"] = status
    with pytest.raises(MachineError, match=said):
        local_folder("some/model")
    hub.failing = {"/resolve/": status}
    with pytest.raises(MachineError, match=said):
        local_folder("some/model")


def test_a_folder_of_that_name_comes_first(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert local_folder("some/model") == Path("some/model")
    assert local_folder("some/other") == Path("some/other"), "some is a folder here, so this is a path"
    hub.add("some/model", MODEL)
    assert local_folder("hub:some/model").is_relative_to(tmp_path / "hf")


@pytest.mark.parametrize(
    "text", ["runs", "/a/b", "./a/b", "a/b/c", "../a", "a/..", "~/a", "a b/c", "a/b@", ""]
)
def test_what_is_no_id(text: str) -> None:
    assert parse_id(text) is None


def test_only_the_config_is_downloaded_for_a_plan(hub: Hub) -> None:
    hub.add("some/model", MODEL)
    assert local_config("some/model").read_bytes() == MODEL["config.json"]
    assert not hub.asked("model.safetensors")


def test_a_full_disk_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("some/model", MODEL)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            MachineError, match=r"Cannot write model\.safetensors of some/model .*HF_HOME"
        ) as error:
            local_folder("some/model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert isinstance(error.value.__cause__, OSError)
    assert error.value.__cause__.errno == errno.EFBIG


def test_too_little_room_is_said_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch, small_disk: Path) -> None:  # fmt: skip
    hub.add("some/model", {**MODEL, "model.safetensors": b"x" * (2 << 20)})
    monkeypatch.setenv("HF_HOME", str(small_disk))
    with pytest.raises(MachineError, match=r"takes 0\.00 GB.*left.*HF_HOME"):
        local_folder("some/model")
    assert not hub.asked("resolve")


def test_several_processes_of_a_host_download_once(hub: Hub) -> None:
    hub.add("some/model", MODEL)
    hub.slow_s = 0.02
    found: list[Path] = []
    workers = [threading.Thread(target=lambda: found.append(local_folder("some/model"))) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == 3
    assert len(hub.asked("model.safetensors", "GET")) == 1
