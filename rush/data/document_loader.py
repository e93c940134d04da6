"""Batches of documents for fine-tuning, in an order computed by a formula, with a state of three numbers.

A packing (`rush.data.packing`) lays out each epoch from the lengths of the documents, the seed and the epoch. A step takes the
next `batches_per_step` micro batches, which are assigned to ranks round-robin. So the samples of a step do not depend on ranks
or workers, and the state is a position: the epoch, and the micro batch in it.

Steps of equally many micro batches hold as many documents as fit. To compare packings, `documents_per_step` makes steps of the
same documents for all of them, in as many micro batches as each needs (except `pack_concat`, which splits documents).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from rush.data.batch import Batch
from rush.data.documents import Documents
from rush.data.loader import SampleNames
from rush.data.order import shuffled
from rush.data.packing import (
    Concat,
    Ints,
    Mix,
    Packing,
    PackingPlan,
    Pad,
    in_order,
    join_plans,
    most_documents,
)
from rush.data.prefetch import PrefetchingLoader, ceil_nearly, check_state
from rush.data.row_tensors import packed_batch, padded_batch
from rush.errors import DataError, RecipeError

Place = tuple[int, int]
"""Epoch, and micro batch in it."""
_SECOND_SHUFFLE = 0x5EED
"""Batches are shuffled by another key than documents."""


class DocumentLoader(PrefetchingLoader[Place]):
    """Steps of micro batches for one rank. `state()` is the position of the next step.

    `paired` documents are the two answers of preferences (`rush.data.documents`): `micro` counts pairs, and rows are all chosen
    answers, then all rejected ones. `references`, one number per document, are passed with the rows.
    """

    def __init__(
        self,
        documents: Documents,
        micro: int,
        sequence: int,
        batches_per_step: int,
        seed: int,
        packing: Packing | None = None,
        shuffle: bool = True,
        paired: bool = False,
        references: npt.NDArray[np.float32] | None = None,
        documents_per_step: int | None = None,
        rank: int = 0,
        world: int = 1,
        workers: int = 0,
        pin: bool = False,
    ) -> None:
        packing = packing or Pad()
        _check(documents, packing, paired)
        if min(micro, sequence, batches_per_step, world) < 1 or batches_per_step % world:
            raise RecipeError(
                f"A step of {batches_per_step} micro batches of {micro} × {sequence} tokens cannot be divided among {world} "
                "rank(s); each must be at least 1, and the micro batches of a step a multiple of the ranks."
            )
        super().__init__(rank, world, workers, pin)
        assert documents_per_step is None or world == 1, "documents_per_step is for one rank"
        if isinstance(packing, Concat):
            documents_per_step = None
        self.layout = BatchLayout(documents, packing, micro, sequence, paired, references)
        self.batches_per_step = batches_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.documents_per_step = documents_per_step
        self._place: Place = (0, 0)
        self._plans: dict[int, tuple[PackingPlan, Ints]] = {}

    def next_step(self, micro_batches: int | None = None) -> Iterator[Batch]:
        """This rank's micro batches of the next step, all ranks' together `micro_batches` or as always; advances the state."""
        start = self._place
        count = self._step_size(start) if micro_batches is None else micro_batches
        assert count % self.world == 0, (count, self.world)
        self._place = self._after(start, count)
        first = self._after(start, self.rank)
        places = [first]
        while len(places) < count // self.world:
            places.append(self._after(places[-1], self.world))
        return self.batches(places)

    def steps_in(self, epochs: float) -> int:
        """Steps in which every document has been read `epochs` times. A packing has its own number of micro batches in every epoch."""
        batches, epoch = 0.0, 0
        while epoch < epochs:
            batches += min(1.0, epochs - epoch) * len(self._plan(epoch)[0])
            epoch += 1
        return max(1, ceil_nearly(batches / self.batches_per_step))

    def epochs_in(self, steps: float) -> float:
        """Passes over the documents after so many steps from the start, each taken to have as many micro batches as the first."""
        return steps * self.batches_per_step / len(self._plan(0)[0])

    @property
    def epoch(self) -> float:
        """Passes over the documents before the next step."""
        epoch, index = self._place
        return epoch + index / len(self._plan(epoch)[0])

    def state(self) -> dict[str, int]:
        return {"seed": self.seed, "epoch": self._place[0], "position": self._place[1]}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Resume from a state: seed, epoch and position."""
        check_state(state)
        self._drop_waiting()
        self._plans.clear()
        self.seed = state["seed"]
        count = len(self._plan(state["epoch"])[0]) if state["epoch"] >= 0 else 0
        if not 0 <= state["position"] < count:
            raise DataError(
                f"The loader state {dict(state)} does not match these documents, which give {count} micro batches in "
                "that epoch. The state belongs to other data, another packing or another batch."
            )
        self._place = (state["epoch"], state["position"])

    def _plan(self, epoch: int) -> tuple[PackingPlan, Ints]:
        """The packing plan of an epoch and, with `documents_per_step`, the first micro batch of each step."""
        if epoch not in self._plans:
            self._plans = {other: plan for other, plan in self._plans.items() if abs(other - epoch) <= 1}
            self._plans[epoch] = self._make_plan(epoch)
        return self._plans[epoch]

    def _make_plan(self, epoch: int) -> tuple[PackingPlan, Ints]:
        count = len(self.layout)
        order = in_order(count)
        if self.shuffle:
            order = shuffled(order, count, self.seed, epoch)
        if self.documents_per_step is not None:
            cuts = range(0, count, self.documents_per_step)
            plans = [self.layout.plan(order[cut : cut + self.documents_per_step], in_order) for cut in cuts]
            return join_plans(plans), np.cumsum([0, *map(len, plans)])

        def mix(things: int) -> Ints:
            if not self.shuffle:
                return in_order(things)
            return shuffled(in_order(things), things, self.seed ^ _SECOND_SHUFFLE, epoch)

        return self.layout.plan(order, mix), in_order(0)

    def _step_size(self, place: Place) -> int:
        if self.documents_per_step is None:
            return self.batches_per_step
        firsts = self._plan(place[0])[1]
        return int(firsts[np.searchsorted(firsts, place[1], side="right")]) - place[1]

    def _after(self, place: Place, count: int) -> Place:
        """The position `count` micro batches later."""
        epoch, index = place[0], place[1] + count
        while index >= (size := len(self._plan(epoch)[0])):
            epoch, index = epoch + 1, index - size
        return epoch, index

    def _following(self, place: Place) -> Place:
        return self._after(place, self.world)

    def _job(self, place: Place) -> Callable[[], Batch]:
        rows = self._plan(place[0])[0].batch(place[1])
        return lambda: self.layout.batch(rows)


class BatchLayout:
    """Documents, a packing and the size of a micro batch: from lengths to plans, from plans to tensors."""

    def __init__(
        self,
        documents: Documents,
        packing: Packing,
        micro: int,
        sequence: int,
        paired: bool = False,
        references: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self.documents, self.packing = documents, packing
        self.micro, self.sequence = micro, sequence
        self.paired, self.references = paired, references
        # The length of a pair is that of the longer answer.
        self.lengths = documents.lengths.reshape(-1, 2).max(1) if paired else documents.lengths
        if paired and (longest := int(self.lengths.max())) > sequence + 1:
            raise DataError(
                f"A preference has an answer of {longest} tokens, more than batch.sequence = {sequence} can hold, and an "
                "answer cannot be cut in two. Raise batch.sequence, or prepare the data with data.too_long=drop."
            )

    def __len__(self) -> int:
        """Documents, or pairs of them."""
        return len(self.lengths)

    def plan(self, order: Ints, mix: Mix) -> PackingPlan:
        return self.packing.plan(self.lengths, order, self.micro, self.sequence, mix)

    def batch(self, rows: list[Ints]) -> Batch:
        """The tensors of a micro batch; without rows, only padding."""
        packing, micro, sequence = self.packing, self.micro, self.sequence
        if self.paired:
            return self._pairs(rows)
        if not packing.isolated:
            return padded_batch(self.documents, rows, micro, packing, sequence)
        num_rows, length = (1, micro * sequence) if packing.one_row else (micro, sequence)
        most = most_documents(self.lengths, length)
        return packed_batch(self.documents, rows, num_rows, length, sequence, most)

    def _pairs(self, rows: list[Ints]) -> Batch:
        """Rows of chosen, then of rejected answers; a micro batch is padded with pairs without labels."""
        pairs = [int(row[0, 0]) for row in rows]
        pairs += (pairs[:1] or [0]) * (self.micro - len(pairs))
        indices = [2 * pair for pair in pairs] + [2 * pair + 1 for pair in pairs]
        nothing = np.zeros((0, 3), np.int64)
        pieces = [
            np.array([[index, 0, self.documents.lengths[index] - 1]])
            if row % self.micro < len(rows)
            else nothing
            for row, index in enumerate(indices)
        ]
        batch = padded_batch(self.documents, pieces, len(pieces), self.packing, self.sequence)
        references = None if self.references is None else torch.from_numpy(self.references[indices])
        # One name per row, for messages.
        names = SampleNames(self.documents, indices)
        return replace(batch, paired=True, samples=names, reference_b=references)


def document_validation(
    documents: Documents,
    packing: Packing | None,
    micro: int,
    sequence: int,
    samples: int | None = None,
    *,
    paired: bool = False,
    references: npt.NDArray[np.float32] | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """The first `samples` documents or pairs (or all), in order, once each; the same batches every time.

    Every rank gets the same number of batches; padding batches have no labels. `pack_concat` attends across documents and drops
    a tail, which would change the loss, so its documents are padded here.
    """
    packing = packing or Pad()
    _check(documents, packing, paired)
    layout = BatchLayout(
        documents, Pad() if isinstance(packing, Concat) else packing, micro, sequence, paired, references
    )
    count = len(layout) if samples is None else min(samples, len(layout))
    plan = layout.plan(in_order(count), in_order)
    for index in range(rank, -(-len(plan) // world) * world, world):
        yield layout.batch(plan.batch(index) if index < len(plan) else [])


def largest_batch(
    documents: Documents, packing: Packing | None, micro: int, sequence: int, *, paired: bool = False
) -> Batch:
    """The micro batch that takes the most memory, of the longest documents."""
    packing = packing or Pad()
    _check(documents, packing, paired)
    layout = BatchLayout(documents, packing, micro, sequence, paired)
    longest = np.argsort(-layout.lengths, kind="stable")
    enough = int(np.searchsorted(np.cumsum(layout.lengths[longest] - 1), micro * sequence)) + 1
    plan = layout.plan(longest[: max(micro, enough)], in_order)
    sizes = [
        sum(int((row[:, 2] - row[:, 1]).sum()) for row in plan.batch(place)) for place in range(len(plan))
    ]
    return layout.batch(plan.batch(int(np.argmax(sizes))))


def _check(documents: Documents, packing: Packing, paired: bool) -> None:
    if len(documents) == 0:
        raise DataError("There is no document, so there is nothing to train on.")
    short = np.flatnonzero(documents.lengths < 2)
    if len(short):
        name = documents.sample_name(int(short[0]))
        raise DataError(
            f"{len(short)} document(s) have fewer than two tokens, the first is {name}; there is nothing to predict in "
            "them. Remove them from the data."
        )
    if not paired:
        return
    if not packing.pairs:
        raise RecipeError(
            f"Packing {packing.name} cannot keep the two answers of a preference together; for objective.kind = "
            '"dpo" use technique pad, or none.'
        )
    if len(documents) % 2:
        raise DataError(
            f"Preferences come as pairs of a chosen and a rejected answer, but there are {len(documents)} documents."
        )
