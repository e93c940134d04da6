"""Ranks that share the verification of a checkpoint: together they read every byte of every file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.records.checkpoint_manifest import CheckpointDamaged, check_contents, read_manifest
from rush.records.checkpoint_store import CheckpointStore

FILES = {f"part-{number}.bin": bytes([number]) * (10 * number + 1) for number in range(7)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.begin(5)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return store.commit(5, {})


def blind(checkpoint: Path, ranks: int) -> list[int]:
    """The ranks that find nothing wrong."""
    found = []
    for rank in range(ranks):
        try:
            check_contents(checkpoint, read_manifest(checkpoint), (rank, ranks))
        except CheckpointDamaged:
            continue
        found.append(rank)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 9])
def test_whatever_file_is_damaged_one_of_the_ranks_finds_it(checkpoint: Path, ranks: int) -> None:
    assert len(blind(checkpoint, ranks)) == ranks
    for name, content in FILES.items():
        (checkpoint / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        assert len(blind(checkpoint, ranks)) == ranks - 1, f"{name}: the work is shared, and nobody skips it"
        (checkpoint / name).write_bytes(content)
