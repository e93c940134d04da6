from __future__ import annotations

import gc
import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rush.data import Batch, Loader, TokenDataset, validation_batches
from rush.errors import DataError, MachineError, RecipeError


class Numbered:
    """Windows whose every token tells which sample and which place it is."""

    def __init__(self, count: int, sequence: int = 4) -> None:
        self.count, self.sequence = count, sequence

    def __len__(self) -> int:
        return self.count

    def window(self, index: int) -> npt.NDArray[np.int64]:
        return np.arange(self.sequence + 1, dtype=np.int64) + 1000 * index

    def sample_name(self, index: int) -> str:
        return f"sample {index}"


def ids(batch: Batch) -> list[int]:
    return [int(row[0]) // 1000 for row in batch.tokens_bt]


def take(loader: Loader, steps: int) -> list[list[list[int]]]:
    """Sample numbers by step and micro batch."""
    return [[ids(batch) for batch in loader.next_step()] for _ in range(steps)]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [i for step in steps for micro in step for i in micro]


def test_labels_are_the_next_tokens() -> None:
    (batch,) = Loader(Numbered(3), 2, 2, seed=0, shuffle=False).next_step()
    assert batch.tokens_bt.tolist() == [[0, 1, 2, 3], [1000, 1001, 1002, 1003]]
    assert batch.labels_bt.tolist() == [[1, 2, 3, 4], [1001, 1002, 1003, 1004]]
    assert batch.tokens_bt.dtype == batch.labels_bt.dtype == torch.int64
    assert batch.tokens_bt.is_contiguous()
    assert batch.labels_bt.is_contiguous()
    assert tuple(batch.samples) == ("sample 0", "sample 1")


def test_on_real_shards_labels_are_the_token_stream_shifted_by_one(prepared: Path) -> None:
    dataset = TokenDataset(prepared, "train", 16)
    line = np.concatenate([dataset.window(0)[:1], *(dataset.window(i)[1:] for i in range(len(dataset)))])
    loader = Loader(dataset, 8, 4, seed=3)
    for batch in itertools.chain.from_iterable(loader.next_step() for _ in range(20)):
        for tokens, labels, name in zip(batch.tokens_bt, batch.labels_bt, batch.samples, strict=True):
            start = 16 * int(name.split("[")[1].split("]")[0])
            assert tokens.tolist() == line[start : start + 16].tolist()
            assert labels.tolist() == line[start + 1 : start + 17].tolist()


@pytest.mark.parametrize("count", [1, 5, 12, 13])
def test_an_epoch_is_every_window_once_and_the_next_follows_without_a_gap(count: int) -> None:
    found = flat(take(Loader(Numbered(count), 4, 2, seed=1), 3 * count))
    epochs = [found[n * count : (n + 1) * count] for n in range(12)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert count == 1 or len({tuple(epoch) for epoch in epochs}) > 1


def test_without_shuffling_windows_come_in_order() -> None:
    assert flat(take(Loader(Numbered(5), 3, 1, seed=9, shuffle=False), 4)) == [0, 1, 2, 3, 4] * 2 + [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    micro=st.integers(1, 4),
    rounds=st.integers(1, 3),
    world=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 5),
    workers=st.sampled_from([0, 2]),
)
def test_the_ranks_together_take_the_samples_of_one_rank_in_order(
    count: int, micro: int, rounds: int, world: int, seed: int, workers: int
) -> None:
    samples = micro * rounds * world
    alone = take(Loader(Numbered(count), samples, 1, seed), 4)
    ranks = []
    for rank in range(world):
        with Loader(Numbered(count), samples, micro, seed, rank=rank, world=world, workers=workers) as loader:
            ranks.append(take(loader, 4))
    for step in range(4):
        dealt = [ranks[rank][step][turn] for turn in range(rounds) for rank in range(world)]
        assert [i for micro_batch in dealt for i in micro_batch] == [i for (i,) in alone[step]]


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(("workers_before", "workers_after"), [(0, 0), (0, 3), (3, 0), (1, 4)])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 7])
def test_a_new_loader_resumes_exactly_from_a_saved_state(
    world: int, workers_before: int, workers_after: int, steps_before: int
) -> None:
    for rank in range(world):
        common = {"rank": rank, "world": world}
        reference = take(Loader(Numbered(13), 8, 2, 5, **common), 12)  # type: ignore[arg-type]
        with Loader(Numbered(13), 8, 2, 5, workers=workers_before, **common) as first:  # type: ignore[arg-type]
            assert take(first, steps_before) == reference[:steps_before]
            state = json.loads(json.dumps(first.state()))
        with Loader(Numbered(13), 8, 2, 99, workers=workers_after, **common) as second:  # type: ignore[arg-type]
            second.load_state(state)
            assert second.state() == state
            assert take(second, 12 - steps_before) == reference[steps_before:]


@pytest.mark.parametrize(("before", "after"), itertools.permutations([1, 2, 4], 2))
def test_a_state_resumes_with_another_number_of_ranks(before: int, after: int) -> None:
    reference = flat(take(Loader(Numbered(13), 8, 1, 5), 6))
    states = []
    for rank in range(before):
        loader = Loader(Numbered(13), 8, 2, 5, rank=rank, world=before)
        take(loader, 2)
        states.append(loader.state())
    assert all(state == {"seed": 5, "epoch": 1, "position": 3} for state in states)
    parts = []
    for rank in range(after):
        loader = Loader(Numbered(13), 8, 1, 5, rank=rank, world=after)
        loader.load_state(states[0])
        parts.append(take(loader, 4))
    rest = [
        i
        for step in range(4)
        for turn in range(8 // after)
        for rank in range(after)
        for i in parts[rank][step][turn]
    ]
    assert rest == reference[16:]


def test_the_state_counts_returned_steps_not_prefetched_batches() -> None:
    with Loader(Numbered(100), 4, 1, seed=0, workers=4) as loader:
        assert loader.state() == {"seed": 0, "epoch": 0, "position": 0}
        next(loader.next_step())  # a step left before its end, as when a run is stopped
        assert loader.state() == {"seed": 0, "epoch": 0, "position": 4}
        rest = take(loader, 3)
    reference = take(Loader(Numbered(100), 4, 1, seed=0), 4)
    assert rest == reference[1:]


def test_going_back_gives_the_same_samples_again() -> None:
    with Loader(Numbered(30), 4, 2, seed=2, workers=2) as loader:
        start = loader.state()
        first = take(loader, 5)
        loader.load_state(start)
        assert take(loader, 5) == first


def test_prefetched_batches_are_dropped_when_a_state_is_loaded() -> None:
    with Loader(Numbered(30), 4, 2, seed=1, workers=2) as loader:
        take(loader, 1)
        time.sleep(0.2)  # let the workers run ahead in the old order
        loader.load_state({"seed": 2, "epoch": 0, "position": 4})  # the same place in another order
        assert take(loader, 3) == take(Loader(Numbered(30), 4, 2, seed=2), 4)[1:]


def test_other_seeds_give_other_orders() -> None:
    orders = {tuple(flat(take(Loader(Numbered(20), 20, 1, seed), 1))) for seed in range(10)}
    assert len(orders) == 10


class Failing(Numbered):
    def window(self, index: int) -> npt.NDArray[np.int64]:
        if index == 7:
            raise DataError("window 7 is damaged")
        return super().window(index)


def test_an_error_in_a_worker_reaches_the_user_at_its_own_place() -> None:
    with Loader(Failing(20), 2, 1, seed=0, shuffle=False, workers=3) as loader:
        assert flat(take(loader, 3)) == [0, 1, 2, 3, 4, 5]
        step = loader.next_step()
        assert ids(next(step)) == [6]
        with pytest.raises(DataError, match="window 7 is damaged"):
            next(step)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rush-loader")]


def test_workers_end_when_the_loader_is_closed_or_collected() -> None:
    with Loader(Numbered(20), 2, 1, seed=0, workers=3) as loader:
        take(loader, 3)
        assert loader_threads()
    assert not loader_threads()
    forgotten = Loader(Numbered(20), 2, 1, seed=0, workers=3)
    take(forgotten, 3)
    del forgotten
    gc.collect()
    deadline = time.monotonic() + 10
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not loader_threads()


class Slow(Numbered):
    def window(self, index: int) -> npt.NDArray[np.int64]:
        time.sleep(0.02)
        return super().window(index)


def test_workers_prefetch_while_a_step_is_computed() -> None:
    with Loader(Slow(50), 4, 1, seed=0, workers=4) as loader:
        list(loader.next_step())
        time.sleep(0.3)  # the model at work
        start = time.perf_counter()
        list(loader.next_step())
        assert time.perf_counter() - start < 0.05


@pytest.mark.parametrize(
    ("samples", "micro", "world", "said"),
    [
        (
            10,
            4,
            1,
            r"Legal values of batch.micro here: 1, 2, 5, 10\. Or make a step a multiple of 4, such as 12",
        ),
        (12, 4, 2, r"Legal values of batch.micro here: 1, 2, 3, 6\."),
        (10, 1, 4, "10 samples cannot be divided among 4 ranks"),
        (4, 8, 1, "Legal values of batch.micro here: 1, 2, 4"),
        (4, 0, 1, "must each be at least 1"),
        (0, 1, 1, "must each be at least 1"),
    ],
)
def test_a_step_that_does_not_divide_is_refused_with_the_legal_values(
    samples: int, micro: int, world: int, said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        Loader(Numbered(20), samples, micro, seed=0, world=world)


def test_bad_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="Rank 2 of 2"):
        Loader(Numbered(20), 4, 2, seed=0, rank=2, world=2)
    with pytest.raises(RecipeError, match="at least 0"):
        Loader(Numbered(20), 4, 2, seed=0, workers=-1)
    with pytest.raises(DataError, match="no window"):
        Loader(Numbered(0), 4, 2, seed=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="no CUDA device"):
        Loader(Numbered(20), 4, 2, seed=0, pin=True)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"seed": 0, "epoch": 0},
        {"seed": 0, "epoch": 0, "position": 20},
        {"seed": 0, "epoch": 0, "position": -1},
        {"seed": 0, "epoch": -1, "position": 0},
        {"seed": 0, "epoch": 0.0, "position": 0},
        {"seed": 0, "epoch": 0, "position": 0, "more": 1},
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: dict[str, int]) -> None:
    with pytest.raises(DataError, match="state"):
        Loader(Numbered(20), 4, 2, seed=0).load_state(state)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("samples", [None, 1, 10, 1000])
def test_validation_covers_each_window_once_in_equal_shapes_on_every_rank(
    world: int, micro: int, samples: int | None
) -> None:
    def batches(rank: int) -> list[Batch]:
        return list(validation_batches(Numbered(21), micro, samples, rank=rank, world=world))

    ranks = [batches(rank) for rank in range(world)]
    assert len({len(found) for found in ranks}) == 1
    counted = 0
    names: list[str] = []
    for turn in range(len(ranks[0])):
        for rank in range(world):
            batch = ranks[rank][turn]
            assert batch.tokens_bt.shape == batch.labels_bt.shape == (micro, 4)
            counted += int((batch.labels_bt != -100).sum())
            names += batch.samples
            real = len(batch.samples)
            assert (batch.labels_bt[:real] == batch.tokens_bt[:real] + 1).all()
            assert (batch.labels_bt[real:] == -100).all()
    expected = min(samples or 21, 21)
    assert names == [f"sample {i}" for i in range(expected)]
    assert counted == 4 * expected


def test_validation_is_the_same_every_time(prepared: Path) -> None:
    def once() -> Iterator[list[list[int]]]:
        for batch in validation_batches(TokenDataset(prepared, "validation", 32), 4):
            yield batch.tokens_bt.tolist()

    assert list(once()) == list(once())


@pytest.mark.gpu
def test_pinned_batches_are_pinned() -> None:
    with Loader(Numbered(20), 4, 2, seed=0, workers=2, pin=True) as loader:
        assert all(b.tokens_bt.is_pinned() and b.labels_bt.is_pinned() for b in loader.next_step())
