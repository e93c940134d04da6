"""A stranger's checkpoint, correctly sealed and full of malice: refused in one message, nothing run, nothing changed.

The seal finds damage, it is no signature: whoever can write a folder can seal it. So everything in it is doubted again.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from rush.checkpoint import restore
from rush.checkpoint.reader import SavedTensors
from rush.checkpoint.tensor_names import save_tensors
from rush.errors import DataError
from rush.records.checkpoint_manifest import CheckpointManifest, FileEntry, describe_files
from rush.records.checkpoint_store import CheckpointStore, verify
from tests.checkpoint.pieces import Table, cut_in_two

WEIGHT, MOMENT = "0.weight", "0.weight/exp_avg"


def run_of(seed: int = 0) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def whole(store: CheckpointStore) -> Path:
    return restore.save(store, 1, *run_of(), {"position": 3})


def bits(run: tuple[nn.Module, Optimizer]) -> list[bytes]:
    states = [*run[0].state_dict().values()]
    states += [value for held in run[1].state_dict()["state"].values() for value in held.values()]
    return [value.numpy().tobytes() for value in states]


def test_pieces_give_what_the_whole_gave(store: CheckpointStore, whole: Path) -> None:
    path = cut_in_two(whole, store, 2)
    other = run_of(seed=5)
    assert bits(other) != bits(run_of())
    assert restore.load(path, *other) == {"position": 3}
    assert bits(other) == bits(run_of())
    weights, expected = restore.load_weights(path), restore.load_weights(whole)
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def piece(body: Table, name: str = WEIGHT, number: int = 0, kind: str = "model") -> dict[str, Any]:
    found: dict[str, Any] = body[kind]["tensors"][name]["pieces"][number]
    return found


def drop(body: Table) -> None:
    body["model"]["tensors"][WEIGHT]["pieces"].pop()


def repeat(body: Table) -> None:
    body["model"]["tensors"][WEIGHT]["pieces"].append(piece(body))


def rename(body: Table) -> None:
    tensors = body["model"]["tensors"]
    tensors["0.gain"] = tensors.pop(WEIGHT)


def empty(body: Table) -> None:
    body["model"]["tensors"][WEIGHT]["pieces"] = []


Change = Callable[[Table], object]
HOSTILE: dict[str, tuple[Change, str]] = {
    "a path upwards": (lambda b: piece(b).update(file="../../x.safetensors"), "no file of this checkpoint"),
    "an absolute path": (lambda b: piece(b).update(file="/etc/x.safetensors"), "no file of this checkpoint"),
    "another kind of file": (lambda b: piece(b).update(file="state.json"), "no file of this checkpoint"),
    "a file name that is none": (lambda b: piece(b).update(file=["a"]), "not a table of pieces"),
    "a file of other tensors": (lambda b: piece(b).update(file="random.safetensors"), "is not there"),
    "the other rank's file": (
        lambda b: piece(b, number=1).update(file="optimizer-00002-of-00002.safetensors"),
        "is not there",
    ),
    "a missing piece": (drop, "reach to 4 of 8 in dim 0"),
    "no piece": (empty, "not a table of pieces"),
    "a piece twice": (repeat, "two of its pieces begin at the same place"),
    "overlapping pieces": (lambda b: piece(b, number=1).update(offset=[2, 0]), "pieces overlap at 2"),
    "a gap": (lambda b: piece(b, number=1).update(offset=[5, 0]), "pieces leave a gap at 4"),
    "a piece outside": (lambda b: piece(b, number=1).update(offset=[4, 1]), "at 1 of dim 1"),
    "an offset below zero": (lambda b: piece(b).update(offset=[-4, 0]), "not a table of pieces"),
    "an offset that is no number": (lambda b: piece(b).update(offset=[0.5, 0]), "not a table of pieces"),
    "an offset of other dims": (lambda b: piece(b).update(offset=[0]), "not a table of pieces"),
    "a huge piece": (lambda b: piece(b, number=1).update(shape=[2**60, 6]), "of 8 in dim 0"),
    "a huge tensor": (lambda b: b["model"]["tensors"][WEIGHT].update(shape=[2**61, 6]), "reach to 8 of"),
    "a tensor too huge": (lambda b: b["model"]["tensors"][WEIGHT].update(shape=[2**70, 6]), "not a table of"),
    "another dtype": (lambda b: b["model"]["tensors"][WEIGHT].update(dtype="F16"), "is float16|says float16"),
    "a dtype that is none": (lambda b: b["model"]["tensors"][WEIGHT].update(dtype="PY"), "not a table of"),
    "another name": (rename, "lacks 0.weight and has the unknown 0.gain"),
    "a tie to nowhere": (lambda b: b["model"]["tied"].update({"a": "b"}), "a is tied to b"),
    "a tie to itself": (lambda b: b["model"]["tied"].update({WEIGHT: WEIGHT}), "is tied to 0.weight"),
    "no tensors": (lambda b: b["model"].update(tensors=[]), "not a table of pieces"),
    "another version": (lambda b: b.update(version=2), "not a table of pieces"),
    "an optimizer's missing piece": (
        lambda b: b["optimizer"]["tensors"][MOMENT]["pieces"].pop(),
        "0.weight/exp_avg .optimizer. is not whole",
    ),
    "an optimizer's other file": (
        lambda b: piece(b, MOMENT, 1, "optimizer").update(file="model-00001-of-00002.safetensors"),
        "the piece of 0.weight/exp_avg at .* is not there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_table_is_refused_and_changes_nothing(
    name: str, store: CheckpointStore, whole: Path
) -> None:
    change, says = HOSTILE[name]
    path = cut_in_two(whole, store, 2, change)
    run = run_of(seed=5)
    before = bits(run)
    with pytest.raises(DataError, match=says) as caught:
        restore.load(path, *run)
    assert caught.value.exit_code == 3
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert bits(run) == before
    if name != "another name" and "optimizer" not in name:  # which weights alone cannot know
        with pytest.raises(DataError):
            restore.load_weights(path)


def seal(folder: Path, step: int, files: dict[str, FileEntry] | None = None) -> None:
    entries = describe_files(folder, {}) if files is None else files
    (folder / "manifest.json").write_text(CheckpointManifest(step, entries, {}).render())


def copy_of(path: Path, to: Path) -> Path:
    to.mkdir()
    for file in path.iterdir():
        if file.name != "manifest.json":
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_links_and_paths_out_of_the_folder_are_refused(store: CheckpointStore, whole: Path) -> None:
    entries = describe_files(copy_of(whole, store.folder / "step-000005"), {})
    secret = store.folder / "secret"
    secret.write_bytes((whole / "model.safetensors").read_bytes())
    linked = copy_of(whole, store.folder / "step-000006")
    (linked / "model.safetensors").unlink()
    os.symlink(secret, linked / "model.safetensors")
    seal(linked, 6, entries)
    with pytest.raises(DataError, match=r"model\.safetensors is not a plain file"):
        restore.load(linked, *run_of())
    upwards = copy_of(whole, store.folder / "step-000007")
    seal(upwards, 7, {**entries, "../secret": entries["model.safetensors"]})
    with pytest.raises(DataError, match=r"\.\./secret is missing"):
        restore.load(upwards, *run_of())


def test_files_that_say_otherwise_than_the_table_are_refused(store: CheckpointStore, whole: Path) -> None:
    for number, wrong in enumerate([torch.zeros(4, 6).half(), torch.zeros(5, 6), torch.zeros(24)]):
        path = copy_of(cut_in_two(whole, store, 2), store.folder / f"step-00001{number}")
        file = path / "model-00001-of-00002.safetensors"
        with SavedTensors(verify(whole), "model") as saved:
            held = {name: saved[name][: (saved[name].shape[0]) // 2] for name in saved}
        file.unlink()
        save_tensors(file, {**held, WEIGHT: wrong}, {})
        seal(path, 10 + number)
        run = run_of(seed=5)
        before = bits(run)
        with pytest.raises(DataError, match=r"pieces\.json says float32\[4, 6\]"):
            restore.load(path, *run)
        assert bits(run) == before


STATES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no groups": lambda s: s["optimizer"].update(groups=7),
    "groups of nothing": lambda s: s["optimizer"].update(groups=[{}]),
    "a state of an unknown parameter": lambda s: s["optimizer"]["state"].update(other={"exp_avg": {"tensor": True}}),
    "cells that are none": lambda s: s["optimizer"]["state"].update({WEIGHT: {"exp_avg": {"run": "rm"}}}),
    "no optimizer": lambda s: s.update(optimizer=None),
    "no random state": lambda s: s.update(random={}),
    "text for random state": lambda s: s["random"].update(python="x"),
    "no step": lambda s: s.pop("step"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_that_makes_no_sense_is_refused_and_changes_nothing(
    name: str, store: CheckpointStore, whole: Path
) -> None:
    path = copy_of(whole, store.folder / "step-000004")
    state = json.loads((path / "state.json").read_text())
    STATES[name](state)
    (path / "state.json").write_text(json.dumps(state))
    seal(path, 4)
    run = run_of(seed=5)
    before = copy.deepcopy(bits(run))
    with pytest.raises(DataError) as caught:
        restore.load(path, *run)
    assert "state.json" in str(caught.value) or "groups" in str(caught.value)
    assert bits(run) == before


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"a":' * 5000], ids=["empty", "cut", "list", "deep"]
)
def test_a_state_that_is_no_json_is_refused(content: bytes, store: CheckpointStore, whole: Path) -> None:
    path = copy_of(whole, store.folder / "step-000004")
    (path / "state.json").write_bytes(content)
    seal(path, 4)
    with pytest.raises(DataError, match=r"state\.json is not the state of a training run"):
        restore.load(path, *run_of())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x80\x04K\x01.", b"[" * 100_000], ids=["empty", "cut", "pickle", "deep"]
)
def test_a_table_that_is_no_json_is_refused(content: bytes, store: CheckpointStore, whole: Path) -> None:
    path = copy_of(cut_in_two(whole, store, 2), store.folder / "step-000004")
    (path / "pieces.json").write_bytes(content)
    seal(path, 4)
    with pytest.raises(DataError, match=r"pieces\.json is not a table of pieces"):
        restore.load(path, *run_of())


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x80\x04K\x01.", (2**62).to_bytes(8, "little") + b"{}"]
)
def test_a_file_that_is_no_safetensors_is_refused(
    content: bytes, store: CheckpointStore, whole: Path
) -> None:
    path = copy_of(cut_in_two(whole, store, 2), store.folder / "step-000004")
    (path / "model-00002-of-00002.safetensors").write_bytes(content)
    seal(path, 4)
    run = run_of(seed=5)
    before = bits(run)
    with pytest.raises(DataError, match="not a readable safetensors file"):
        restore.load(path, *run)
    assert bits(run) == before
