"""Waits outside of collectives declare their kind, and messages through the store carry values, errors, acknowledgements."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from rush.checkpoint.saver import Saver
from rush.errors import DataError
from rush.parallel import Ranks
from rush.parallel.store_channel import FROM_RANK_0, StoreChannel
from rush.parallel.watchdog import Wait, Watchdog
from rush.records.checkpoint_store import CheckpointStore


def watchdog(rank: int = 0) -> Watchdog:
    return Watchdog(HashStore(), rank, 2, 60.0)


def kind(dog: Watchdog) -> str:
    return dog._heartbeat().waits_for.partition("/")[0]


def kind_within(dog: Watchdog, seconds: float = 10.0) -> str:
    """The first wait that the main thread declares; another thread asks."""
    deadline = time.monotonic() + seconds
    while not (found := kind(dog)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_a_wait_has_a_kind_and_each_one_a_name_of_its_own() -> None:
    dog = watchdog()
    assert dog._heartbeat().waits_for == ""
    names = []
    for _ in range(2):
        with dog.waiting(Wait.RANK_0):
            names.append(dog._heartbeat().waits_for)
            with dog.waiting(Wait.SAVE):
                assert kind(dog) == "SAVE"
            assert dog._heartbeat().waits_for == names[-1]
    assert names[0] != names[1]
    assert dog._heartbeat().waits_for == ""


def test_ranks_that_wait_for_rank_0_or_for_all_declare_it() -> None:
    store, dogs, seen = HashStore(), [watchdog(0), watchdog(1)], []
    first, second = (Ranks(rank, 2, store=store, watchdog=dogs[rank]) for rank in range(2))

    def other() -> None:
        first.on_rank0(lambda: seen.append(kind_within(dogs[1])))
        seen.append(first.all_gather_object("a"))

    thread = threading.Thread(target=other)
    thread.start()
    second.on_rank0(lambda: None)
    assert kind_within(dogs[0]) == "ALL_RANKS"
    assert second.all_gather_object("b") == ["a", "b"]
    thread.join()
    assert seen == ["RANK_0", ["a", "b"]]


def test_waiting_for_a_save_declares_it(tmp_path: Path) -> None:
    dog, seen = watchdog(), []
    saver = Saver(CheckpointStore(tmp_path), Ranks(watchdog=dog))
    saver._thread = threading.Thread(target=lambda: seen.append(kind_within(dog)))
    saver._thread.start()
    saver.wait()
    assert seen == ["SAVE"]


def test_a_channel_carries_values_errors_and_acknowledgements() -> None:
    store = HashStore()
    channel, polled = StoreChannel(store, "a"), StoreChannel(store, "a", check=lambda: None)
    assert channel.publish("value", lambda: [1, 2]) == [1, 2]
    assert polled.receive("value", acknowledge=True) == [1, 2]
    channel.wait_acknowledged("value", 1, limit_s=5.0)
    with pytest.raises(DataError, match="no corpus"):
        channel.publish("error", fail)
    with pytest.raises(DataError, match="rank 3: no corpus") as raised:
        polled.receive("error", sender="rank 3: ")
    assert raised.value.__notes__ == [FROM_RANK_0]


def test_a_wait_that_is_abandoned_ends() -> None:
    def abandoned() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        StoreChannel(HashStore(), "a", check=abandoned).receive("never sent")


def fail() -> None:
    raise DataError("no corpus")
