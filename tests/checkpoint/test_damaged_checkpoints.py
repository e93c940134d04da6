"""Every damage we could think of, done to a real checkpoint of a real model, must be found and named.

Two checkpoints are saved, the newer one is damaged, and three things must hold: verification refuses it and
names the file, loading refuses it, and the search for the newest good one reports it and takes the older.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from rush.checkpoint import restore
from rush.records.checkpoint_manifest import CheckpointDamaged
from rush.records.checkpoint_store import CheckpointStore, verify

FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json", "manifest.json")
NEW, OLD = "step-000020", "step-000010"

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two checkpoints of equal shape and different content."""
    store = CheckpointStore(tmp_path_factory.mktemp("damage") / "checkpoints")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in (10, 20):
        torch.rand(1)  # so that the random state of the two differs as well
        model(torch.arange(11)).square().sum().backward()
        optimizer.step()
        restore.save(store, step, model, optimizer, {"position": step}, {"val_loss": 10 / step})
    return store.folder


def truncate(name: str, keep: float) -> Damage:
    def damage(folder: Path) -> None:
        size = (folder / name).stat().st_size
        os.truncate(folder / name, min(int(size * keep), size - 1))

    return damage


def append(name: str) -> Damage:
    def damage(folder: Path) -> None:
        with open(folder / name, "ab") as file:
            file.write(b"\x00")

    return damage


def flip(name: str, where: float, bit: int) -> Damage:
    def damage(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[int(where * (len(content) - 1))] ^= 1 << bit
        (folder / name).write_bytes(content)

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def swap(first: str, second: str) -> Damage:
    def damage(folder: Path) -> None:
        a, b = (folder / first).read_bytes(), (folder / second).read_bytes()
        (folder / first).write_bytes(b)
        (folder / second).write_bytes(a)

    return damage


def from_other(name: str) -> Damage:
    return lambda folder: shutil.copy(folder.parent / OLD / name, folder / name) and None


def edit(*keys: str, value: object) -> Damage:
    """Change one value in the manifest and write it back as a careful person would."""

    def damage(folder: Path) -> None:
        path = folder / "manifest.json"
        body = json.loads(path.read_text())
        inner = body
        for key in keys[:-1]:
            inner = inner[key]
        assert inner[keys[-1]] != value
        inner[keys[-1]] = value
        path.write_text(json.dumps(body, indent=2) + "\n")

    return damage


def delete_row(folder: Path) -> None:
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["files"]["optimizer.safetensors"]
    path.write_text(json.dumps(body, indent=2) + "\n")


def delete_row_and_file(folder: Path) -> None:
    delete_row(folder)
    (folder / "optimizer.safetensors").unlink()


def overwrite(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def extra_file(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes(b"?") and None


def extra_folder(folder: Path) -> None:
    (folder / "more").mkdir()


def file_becomes_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def file_becomes_link(folder: Path) -> None:
    moved = folder.parent / "model-moved"
    os.rename(folder / "model.safetensors", moved)
    (folder / "model.safetensors").symlink_to(moved)


def holes(folder: Path) -> None:
    """A block of zeros where data was, the length unchanged: what a power cut does to unflushed files."""
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-64:] = bytes(64)
    (folder / "model.safetensors").write_bytes(content)


def reformat(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


def older_manifest(folder: Path) -> None:
    shutil.copy(folder.parent / OLD / "manifest.json", folder / "manifest.json")


DAMAGES: dict[str, tuple[Damage, str]] = {}
for _name in FILES:
    DAMAGES |= {
        f"{_name} truncated by a byte": (truncate(_name, 1.0), _name),
        f"{_name} truncated to half": (truncate(_name, 0.5), _name),
        f"{_name} of zero length": (truncate(_name, 0.0), _name),
        f"{_name} longer by a byte": (append(_name), _name),
        f"{_name} bit flipped at the start": (flip(_name, 0.0, 0), _name),
        f"{_name} bit flipped in the middle": (flip(_name, 0.5, 3), _name),
        f"{_name} bit flipped at the end": (flip(_name, 1.0, 6), _name),
        f"{_name} removed": (remove(_name), _name),
    }
for _name in FILES[:-1]:
    DAMAGES[f"{_name} of the other checkpoint"] = (from_other(_name), _name)
DAMAGES |= {
    "model and optimizer files swapped": (swap(FILES[0], FILES[1]), FILES[0]),
    "state and random files swapped": (swap(FILES[2], FILES[3]), FILES[2]),
    "zeros in the last block": (holes, FILES[0]),
    "manifest step edited": (edit("step", value=21), "manifest.json"),
    "manifest step negative": (edit("step", value=-1), "manifest.json"),
    "manifest sha edited": (edit("files", FILES[0], "sha256", value="0" * 64), "manifest.json"),
    "manifest size edited": (edit("files", FILES[0], "size_bytes", value=7), "manifest.json"),
    "manifest metric edited": (edit("meta", "metrics", "val_loss", value=0.001), "manifest.json"),
    "manifest digest edited": (edit("digest", value="0" * 64), "manifest.json"),
    "manifest of an unknown version": (edit("version", value=2), "version 2"),
    "manifest of another format": (edit("format", value="other"), "manifest.json"),
    "manifest row deleted": (delete_row, "manifest.json"),
    "manifest row and file deleted": (delete_row_and_file, "manifest.json"),
    "manifest of the other checkpoint": (older_manifest, "step 10"),
    "manifest empty": (overwrite("manifest.json", b""), "manifest.json"),
    "manifest not JSON": (overwrite("manifest.json", b"hello"), "manifest.json"),
    "manifest not UTF-8": (overwrite("manifest.json", b'{"format": "\xff"}'), "manifest.json"),
    "manifest a JSON list": (overwrite("manifest.json", b"[1, 2]"), "manifest.json"),
    "manifest written differently": (reformat, "manifest.json"),
    "an extra file": (extra_file("pytorch_model.bin"), "pytorch_model.bin"),
    "a hidden extra file": (extra_file(".model.tmp"), ".model.tmp"),
    "an extra folder": (extra_folder, "more"),
    "a folder in place of a file": (file_becomes_folder, FILES[0]),
    "a link in place of a file": (file_becomes_link, FILES[0]),
}


def test_there_are_more_than_twenty_damages() -> None:
    assert len(DAMAGES) >= 60


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_named_and_the_last_good_one_is_used(
    saved: Path, tmp_path: Path, name: str
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    shutil.copytree(saved, store.folder)
    verify(store.folder / NEW)
    damage, expected = DAMAGES[name]
    damage(store.folder / NEW)

    with pytest.raises(CheckpointDamaged, match=re.escape(expected)) as caught:
        verify(store.folder / NEW)
    assert str(store.folder / NEW) in str(caught.value)
    with pytest.raises(CheckpointDamaged):
        restore.load_weights(store.folder / NEW)

    heard: list[str] = []
    good = store.newest_good(lambda path, problem: heard.append(f"{path.name}: {problem}"))
    assert good is not None
    assert good.path.name == OLD
    assert len(heard) == 1
    assert heard[0].startswith(NEW)
    assert expected in heard[0]


@pytest.mark.parametrize("other", ["step-000021", "step-000007"])
def test_a_checkpoint_renamed_to_another_step_is_found(saved: Path, tmp_path: Path, other: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    shutil.copytree(saved, store.folder)
    os.rename(store.folder / NEW, store.folder / other)
    with pytest.raises(CheckpointDamaged, match="is of step 20"):
        verify(store.folder / other)
    good = store.newest_good(lambda path, problem: None)
    assert good is not None
    assert good.path.name == OLD


def test_two_checkpoints_with_exchanged_names_are_both_found(saved: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    shutil.copytree(saved, store.folder)
    os.rename(store.folder / NEW, store.folder / "aside")
    os.rename(store.folder / OLD, store.folder / NEW)
    os.rename(store.folder / "aside", store.folder / OLD)
    heard: list[str] = []
    assert store.newest_good(lambda path, problem: heard.append(path.name)) is None
    assert heard == [NEW, OLD]


def test_every_single_flipped_bit_of_the_manifest_is_found(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / NEW
    shutil.copytree(saved / NEW, folder)
    path = folder / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged):
            verify(folder)
    path.write_bytes(content)
    verify(folder)
