"""Every damage we could think of, done to a real checkpoint of a real model, must be found and named.

Two checkpoints are saved, the newer one is damaged, and three things must hold: verification refuses it and
names the file, loading refuses it, and the search for the newest good one reports it and takes the older.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from rush.checkpoint import restore
from rush.records.checkpoint_manifest import CheckpointDamaged
from rush.records.checkpoint_store import CheckpointStore, verify
from tests.checkpoint.damages import ALONE, NEW, OLD, damages


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


DAMAGES = damages(ALONE)


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
