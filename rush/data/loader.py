"""Batches for pretraining, in an order computed by a formula, with a state of three numbers.

The seed fixes one sequence of the samples of all epochs. A step takes the next `samples_per_step` of it (or as many micro batches
as are asked for), split into micro batches, which are assigned to ranks round-robin. So the samples of a step do not depend on the number of ranks, the micro batch
or the number of workers; the state is a position in the sequence, and a run may be resumed with any of them changed.
Legend: b micro batch, t sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self, overload

import numpy as np
import numpy.typing as npt
import torch

from rush.data.batch import IGNORED, Batch
from rush.data.order import shuffled
from rush.data.prefetch import PrefetchingLoader, ceil_nearly, check_state
from rush.errors import DataError, RecipeError


class Steps(Protocol):
    """What training needs of a loader."""

    def next_step(self, micro_batches: int | None = None) -> Iterator[Batch]: ...
    def steps_in(self, epochs: float) -> int: ...
    def epochs_in(self, steps: float) -> float: ...
    @property
    def epoch(self) -> float: ...
    def state(self) -> dict[str, int]: ...
    def load_state(self, state: Mapping[str, int]) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...


class Windows(Protocol):
    """What the loader needs of a dataset."""

    def __len__(self) -> int: ...
    def window(self, index: int) -> npt.NDArray[np.int64]: ...
    def sample_name(self, index: int) -> str: ...


class Named(Protocol):
    def sample_name(self, index: int) -> str: ...


@dataclass(frozen=True)
class SampleNames(Sequence[str]):
    """Sample names, looked up on access: finding a document takes longer than reading its tokens."""

    dataset: Named
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> SampleNames: ...
    def __getitem__(self, place: int | slice) -> str | SampleNames:
        if isinstance(place, slice):
            return SampleNames(self.dataset, self.indices[place])
        return self.dataset.sample_name(self.indices[place])


class Loader(PrefetchingLoader[int]):
    """Steps of micro batches for one rank. `state()` is the position of the next step."""

    def __init__(
        self,
        dataset: Windows,
        samples_per_step: int,
        micro: int,
        seed: int,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        _check_division(samples_per_step, micro, world)
        super().__init__(rank, world, workers, pin)
        if len(dataset) == 0:
            raise DataError("The dataset has no window, so there is nothing to train on.")
        self.dataset = dataset
        self.samples_per_step = samples_per_step
        self.micro = micro
        self.seed = seed
        self.shuffle = shuffle
        self._place = 0  # samples before the next step, over all epochs

    def next_step(self, micro_batches: int | None = None) -> Iterator[Batch]:
        """This rank's micro batches of the next step, all ranks' together `micro_batches` or as always; advances the state."""
        start = self._place
        samples = self.samples_per_step if micro_batches is None else micro_batches * self.micro
        assert samples > 0 and samples % (self.micro * self.world) == 0, samples  # noqa: PT018
        self._place += samples
        return self.batches(range(start + self.rank * self.micro, self._place, self.world * self.micro))

    def steps_in(self, epochs: float) -> int:
        """Steps in which every sample has been read `epochs` times."""
        return max(1, ceil_nearly(epochs * len(self.dataset) / self.samples_per_step))

    def epochs_in(self, steps: float) -> float:
        """Passes over the data after so many steps from the start."""
        return steps * self.samples_per_step / len(self.dataset)

    @property
    def epoch(self) -> float:
        """Passes over the data before the next step."""
        return self._place / len(self.dataset)

    def state(self) -> dict[str, int]:
        epoch, position = divmod(self._place, len(self.dataset))
        return {"seed": self.seed, "epoch": epoch, "position": position}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Resume from a state: seed, epoch and position."""
        check_state(state)
        count = len(self.dataset)
        if state["epoch"] < 0 or not 0 <= state["position"] < count:
            raise DataError(
                f"The loader state {dict(state)} does not match this dataset of {count} windows. "
                "The state belongs to other data or another sequence length."
            )
        self._drop_waiting()
        self.seed = state["seed"]
        self._place = state["epoch"] * count + state["position"]

    def _following(self, place: int) -> int:
        return place + self.world * self.micro

    def _job(self, place: int) -> Callable[[], Batch]:
        places = np.arange(place, place + self.micro, dtype=np.int64)
        return lambda: make_batch(self.dataset, self._indices(places))

    def _indices(self, places: npt.NDArray[np.int64]) -> list[int]:
        count = len(self.dataset)
        epochs, inside = np.divmod(places, count)
        if not self.shuffle:
            return [int(i) for i in inside]
        indices = np.empty_like(inside)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = shuffled(inside[here], count, self.seed, int(epoch))
        return [int(i) for i in indices]


def make_batch(dataset: Windows, indices: list[int]) -> Batch:
    windows = np.stack([dataset.window(index) for index in indices])
    # By numpy: torch would wake its thread pool, which can take longer than the copy.
    tokens, labels = (
        torch.from_numpy(np.ascontiguousarray(part)) for part in (windows[:, :-1], windows[:, 1:])
    )
    return Batch(tokens, labels, SampleNames(dataset, indices))


def validation_batches(
    dataset: Windows, micro: int, samples: int | None = None, *, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """The first `samples` windows (or all), in order, once each; the same batches every time.

    Every rank gets the same number of batches of one shape, for collectives and compiled code; padding rows have no labels.
    """
    count = len(dataset) if samples is None else min(samples, len(dataset))
    for first in range(0, count, micro * world):
        mine = first + rank * micro
        rows = list(range(mine, min(mine + micro, count)))
        batch = make_batch(dataset, rows + [0] * (micro - len(rows)))
        batch.labels_bt[len(rows) :] = IGNORED
        yield Batch(batch.tokens_bt, batch.labels_bt, batch.samples[: len(rows)])


def _check_division(samples_per_step: int, micro: int, world: int) -> None:
    if micro < 1 or world < 1 or samples_per_step < 1:
        raise RecipeError(
            f"batch.micro ({micro}), ranks ({world}) and samples per step ({samples_per_step}) "
            "must each be at least 1."
        )
    if samples_per_step % (micro * world):
        each, rest = divmod(samples_per_step, world)
        legal = [str(m) for m in range(1, each + 1) if each % m == 0] if rest == 0 else []
        advice = (
            f"Legal values of batch.micro here: {', '.join(legal)}."
            if legal
            else f"{samples_per_step} samples cannot be divided among {world} ranks with any batch.micro."
        )
        above = -(-samples_per_step // (micro * world)) * micro * world
        raise RecipeError(
            f"A step of {samples_per_step} samples is not a whole number of micro batches of {micro} "
            f"on {world} rank(s). {advice} Or make a step a multiple of {micro * world}, such as {above}."
        )
