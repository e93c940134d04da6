"""Ranks that verify a checkpoint together find what one alone would find, and all of them know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.files import sha256_file
from rush.records.checkpoint_manifest import CheckpointManifest, FileEntry, check_contents
from tests.checkpoint.damages import NEW, OLD
from tests.parallel.damage_work import verify_damaged
from tests.parallel.rank_work import on_ranks


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_damage_is_found_by_all_ranks_and_the_last_good_checkpoint_is_used(
    world: int, tmp_path: Path
) -> None:
    first, *others = on_ranks(world, verify_damaged, world, str(tmp_path))
    assert all(other == first for other in others), "ranks found different things"
    assert first.pop("intact") == NEW
    assert "pieces.json" in first["pieces"]
    assert {f"model-0000{rank + 1}-of-0000{world}.safetensors" for rank in range(2)} <= {*first.pop("pieces")}
    assert len(first) > 120
    for name, case in first.items():
        assert case["took"] == OLD, name
        assert len(case["heard"]) == 1, name
        assert case["expected"] in case["heard"][0], name


@pytest.mark.parametrize("count", range(1, 9))
def test_each_file_is_read_by_exactly_one_of_several_readers(count: int, tmp_path: Path) -> None:
    sizes = {"a": 3, "b": 3, "c": 9, "d": 0, "e": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    files = {name: FileEntry(size, sha256_file(tmp_path / name)) for name, size in sizes.items()}
    manifest = CheckpointManifest(1, files, {})
    read = [check_contents(tmp_path, manifest, (number, count)) for number in range(count)]
    assert sorted(name for part in read for name in part) == sorted(sizes)
