"""The store of sealed folders, without tensors: naming, sealing, retention, cleaning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rush.errors import MachineError
from rush.records.checkpoint_manifest import MANIFEST_NAME, CheckpointDamaged
from rush.records.checkpoint_store import CheckpointStore, verify
from rush.tensor_file import TensorSource, write_tensors


def put(
    store: CheckpointStore, step: int, val_loss: float | None = None, content: bytes | None = None
) -> Path:
    folder = store.begin(step)
    (folder / "a.bin").write_bytes(content if content is not None else f"weights of {step}".encode())
    (folder / "empty.bin").write_bytes(b"")
    return store.commit(step, {"metrics": {"val_loss": val_loss}, "recipe_hash": "abc"})


def loud(path: Path, problem: str) -> None:
    raise AssertionError(f"{path} called damaged: {problem}")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints")


def test_a_committed_checkpoint_verifies_and_says_what_was_put_in(store: CheckpointStore) -> None:
    path = put(store, 123, 2.5)
    assert path == store.folder / "step-000123"
    found = verify(path)
    assert found.step == 123
    assert found.meta == {"metrics": {"val_loss": 2.5}, "recipe_hash": "abc"}
    assert sorted(found.manifest.files) == ["a.bin", "empty.bin"]
    assert sorted(entry.name for entry in store.folder.iterdir()) == ["step-000123"]


def test_the_manifest_holds_the_hashes_that_sha256sum_computes(store: CheckpointStore) -> None:
    path = put(store, 1)
    files = json.loads((path / MANIFEST_NAME).read_text())["files"]
    for name, row in files.items():
        printed = subprocess.run(
            ["sha256sum", str(path / name)], capture_output=True, text=True, check=True
        ).stdout
        assert printed.split()[0] == row["sha256"]
        assert (path / name).stat().st_size == row["size_bytes"]


def test_what_is_being_written_is_no_checkpoint_and_discarding_leaves_nothing(store: CheckpointStore) -> None:
    (store.begin(5) / "a.bin").write_bytes(b"half")
    assert store.steps() == []
    assert store.newest_good(loud) is None
    store.discard(5)
    store.discard(5)
    assert list(store.folder.iterdir()) == []


def test_a_store_that_was_never_written_to_is_empty(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.newest_good(loud) is None
    assert store.best_good(loud) is None
    assert store.clean() == []
    assert store.retain(1) == []


def test_the_newest_is_the_highest_number_also_beyond_a_million(store: CheckpointStore) -> None:
    for step in (999_999, 1_000_001, 7):
        put(store, step)
    (store.folder / "step-12").mkdir()
    (store.folder / "step-0000008").mkdir()
    (store.folder / "step-000009").write_text("a file")
    assert store.steps() == [7, 999_999, 1_000_001]
    newest = store.newest_good(loud)
    assert newest is not None
    assert newest.step == 1_000_001


def test_damaged_ones_are_reported_newest_first_until_a_good_one_is_found(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        put(store, step)
    flip(store.path(4) / "a.bin")
    (store.path(3) / MANIFEST_NAME).unlink()
    flip(store.path(1) / "a.bin")
    heard: list[tuple[str, str]] = []
    newest = store.newest_good(lambda path, problem: heard.append((path.name, problem)))
    assert newest is not None
    assert newest.step == 2
    assert [name for name, _ in heard] == ["step-000004", "step-000003"]
    assert "a.bin" in heard[0][1]
    assert "manifest.json is missing" in heard[1][1]


def test_committing_over_a_damaged_checkpoint_of_the_step_replaces_it(store: CheckpointStore) -> None:
    put(store, 4)
    flip(store.path(4) / "a.bin")
    put(store, 4, content=b"again")
    assert (verify(store.path(4)).path / "a.bin").read_bytes() == b"again"
    assert sorted(entry.name for entry in store.folder.iterdir()) == ["step-000004"]


@pytest.mark.parametrize(
    ("losses", "keep_last", "left"),
    [
        ([3.0, 2.0, 1.0, 0.5], 2, [3, 4]),
        ([3.0, 0.5, 1.0, 2.0], 1, [2, 4]),
        ([3.0, 0.5, 1.0, 2.0], 3, [2, 3, 4]),
        ([None, None, None], 1, [3]),
        ([2.0, None, None, None], 2, [1, 3, 4]),
        ([float("nan"), 5.0, float("inf"), None], 1, [2, 4]),
        ([1.0, 1.0, 1.0], 1, [1, 3]),
        ([1.0], 5, [1]),
    ],
)
def test_retention_keeps_the_last_ones_and_the_best(
    store: CheckpointStore, losses: list[float | None], keep_last: int, left: list[int]
) -> None:
    for step, loss in enumerate(losses, start=1):
        put(store, step, loss)
    deleted = store.retain(keep_last)
    assert store.steps() == left
    assert deleted == [step for step in range(1, len(losses) + 1) if step not in left]
    assert sorted(entry.name for entry in store.folder.iterdir()) == [store.path(step).name for step in left]
    for step in left:
        verify(store.path(step))


def test_retention_never_deletes_the_only_good_one_though_newer_ones_look_whole(
    store: CheckpointStore,
) -> None:
    for step in (1, 2, 3):
        put(store, step, 1.0 / step)
    flip(store.path(2) / "a.bin")
    flip(store.path(3) / "a.bin")
    assert store.retain(1) == [2]
    newest = store.newest_good(lambda path, problem: None)
    assert newest is not None
    assert newest.step == 1


def test_retention_does_not_count_and_does_not_touch_what_it_cannot_read(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4):
        put(store, step)
    (store.path(4) / MANIFEST_NAME).write_text("{}")
    assert store.retain(2) == [1]
    assert store.steps() == [2, 3, 4]


def test_retention_deletes_nothing_when_nothing_is_good(store: CheckpointStore) -> None:
    for step in (1, 2):
        put(store, step)
        flip(store.path(step) / "a.bin")
    assert store.retain(1) == []
    assert store.steps() == [1, 2]


def test_the_best_is_found_by_validation_loss_and_passed_over_when_damaged(store: CheckpointStore) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        put(store, step, loss)
    best = store.best_good(loud)
    assert best is not None
    assert best.step == 2
    flip(store.path(2) / "a.bin")
    second = store.best_good(lambda path, problem: None)
    assert second is not None
    assert second.step == 3


def test_cleaning_removes_litter_and_brings_back_a_checkpoint_lost_between_two_renames(
    store: CheckpointStore,
) -> None:
    put(store, 1)
    put(store, 2)
    (store.begin(3) / "a.bin").write_bytes(b"half")
    os.rename(store.path(2), store.folder / ".replaced-step-000002")
    (store.folder / ".deleted-step-000000").mkdir()
    (store.folder / "notes.txt").write_text("mine")
    assert [path.name for path in store.clean()] == [".deleted-step-000000", ".writing-step-000003"]
    assert sorted(entry.name for entry in store.folder.iterdir()) == [
        "notes.txt",
        "step-000001",
        "step-000002",
    ]
    newest = store.newest_good(loud)
    assert newest is not None
    assert newest.step == 2


def test_a_link_to_a_checkpoint_verifies_but_a_link_inside_one_does_not(store: CheckpointStore) -> None:
    path = put(store, 1)
    latest = store.folder / "latest"
    latest.symlink_to(path)
    assert verify(latest).step == 1
    target = store.folder / "elsewhere.bin"
    os.rename(path / "a.bin", target)
    (path / "a.bin").symlink_to(target)
    with pytest.raises(CheckpointDamaged, match=r"a\.bin is not a plain file"):
        verify(path)


def test_a_full_disk_while_saving_leaves_the_older_checkpoint_and_no_litter(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    put(store, 1, content=b"a" * 600_000)
    folder = store.begin(2)
    source = TensorSource("U8", (900_000,), lambda: memoryview(b"b" * 900_000))
    with pytest.raises(MachineError, match="disk is full"):
        write_tensors(folder / "a.bin", {"w": source}, {})
    store.discard(2)
    assert sorted(entry.name for entry in store.folder.iterdir()) == ["step-000001"]
    newest = store.newest_good(loud)
    assert newest is not None
    assert newest.step == 1


def test_the_records_package_works_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import rush.records.checkpoint_store, rush.records.metrics, rush.records.run_folder"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
