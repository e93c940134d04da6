"""The loader of documents: a line of micro batches, cut into steps, from a state of three numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rush.data.batch import IGNORED, Batch
from rush.data.document_loader import DocumentLoader, document_validation, largest_batch
from rush.data.packing import BestFit, Bucket, Concat, Flatten, Packing, Pad
from rush.errors import DataError, MachineError, RecipeError
from tests.data.small_documents import SmallDocuments, realistic_lengths

PACKINGS: list[Packing] = [Pad(), Bucket(shapes=4, window=3), Concat(), BestFit(window=9), Flatten(window=9)]
LENGTHS = realistic_lengths(53, longest=33)


def loader_of(packing: Packing, lengths: list[int] = LENGTHS, **options: Any) -> DocumentLoader:
    given: dict[str, Any] = {"micro": 2, "sequence": 32, "batches_per_step": 4, "seed": 7, **options}
    return DocumentLoader(SmallDocuments(lengths), packing=packing, **given)


def content(batches: Iterable[Batch]) -> list[Any]:
    return [
        ({name: tensor.tolist() for name, tensor in batch.tensors().items()}, [*batch.samples], batch.padding)
        for batch in batches
    ]


def steps(loader: DocumentLoader, count: int) -> list[Any]:
    return [content(loader.next_step()) for _ in range(count)]


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_an_epoch_holds_every_document_once_and_the_next_follows_in_another_order(packing: Packing) -> None:
    loader = loader_of(packing, batches_per_step=1)
    epochs: list[list[str]] = [[], []]
    while loader.state()["epoch"] < 2:
        epoch = loader.state()["epoch"]
        (batch,) = loader.next_step()
        epochs[epoch] += batch.samples
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        if isinstance(packing, Concat):
            # A document may lie across rows; the tail is less than a row.
            assert len(set(epoch)) >= len(LENGTHS) - 16
        else:
            assert Counter(epoch) == Counter(f"document {index}" for index in range(len(LENGTHS)))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@settings(max_examples=12, deadline=None)
@given(start=st.integers(0, 25), seed=st.integers(0, 2**63))
def test_it_resumes_from_any_step(packing: Packing, start: int, seed: int) -> None:
    loader = loader_of(packing, seed=seed)
    for _ in range(start):
        loader.next_step()
    state = json.loads(json.dumps(loader.state()))
    assert set(state) == {"seed", "epoch", "position"}
    resumed = loader_of(packing, seed=0)
    resumed.load_state(state)
    assert steps(loader, 3) == steps(resumed, 3)
    assert loader.state() == resumed.state()


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_a_step_holds_the_same_batches_whatever_the_ranks(packing: Packing, world: int) -> None:
    alone = steps(loader_of(packing), 9)
    ranks = [steps(loader_of(packing, rank=rank, world=world), 9) for rank in range(world)]
    for step, whole in enumerate(alone):
        dealt: list[Any] = [None] * 4
        for rank in range(world):
            dealt[rank::world] = ranks[rank][step]
        assert dealt == whole


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_workers_change_nothing_even_if_steps_are_not_read_to_the_end(packing: Packing) -> None:
    plain = loader_of(packing)
    with loader_of(packing, workers=3) as worked:
        for step in range(12):
            if step % 3 == 2:
                next(worked.next_step())
                plain.next_step()
                continue
            assert content(worked.next_step()) == content(plain.next_step())
        state = plain.state()
        assert worked.state() == state
        worked.load_state({**state, "epoch": 1, "position": 0})
        plain.load_state({**state, "epoch": 1, "position": 0})
        assert steps(worked, 2) == steps(plain, 2)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_another_seed_is_another_order(packing: Packing) -> None:
    assert steps(loader_of(packing, seed=1), 2) != steps(loader_of(packing, seed=2), 2)
    assert steps(loader_of(packing, seed=1), 2) == steps(loader_of(packing, seed=1), 2)


def test_without_shuffling_documents_come_in_order() -> None:
    loader = loader_of(Pad(), shuffle=False)
    names = [name for batch in loader.next_step() for name in batch.samples]
    assert names == [f"document {index}" for index in range(8)]


@pytest.mark.parametrize(
    "packing", [packing for packing in PACKINGS if packing.name != "pack_concat"], ids=str
)
def test_steps_of_the_same_documents_are_the_same_for_every_packing(packing: Packing) -> None:
    plain = loader_of(Pad(), micro=2, batches_per_step=3)
    loader = loader_of(packing, documents_per_step=6)
    for _ in range(20):
        ours, theirs = list(loader.next_step()), list(plain.next_step())
        if plain.state()["epoch"] != loader.state()["epoch"] or plain.state()["epoch"]:
            break  # the last step of an epoch has fewer documents here, and begins the next one there
        assert sorted(n for b in ours for n in b.samples) == sorted(n for b in theirs for n in b.samples)
        assert sum(b.num_labels for b in ours) == sum(b.num_labels for b in theirs)


def test_pairs_stay_together_chosen_first() -> None:
    lengths = realistic_lengths(14, longest=33)
    references = np.arange(14, dtype=np.float32)
    loader = loader_of(
        Pad(shapes=4), lengths, paired=True, micro=3, references=references, batches_per_step=1
    )
    seen: list[int] = []
    for _ in range(3):
        (batch,) = loader.next_step()
        assert batch.paired
        assert batch.tokens_bt.shape[0] == 6
        assert batch.reference_b is not None
        real = [int(name.split()[1]) for name in batch.samples]
        assert batch.reference_b.tolist() == real
        filled = (batch.labels_bt != IGNORED).any(1).tolist()
        assert filled[:3] == filled[3:]
        for pair in range(3):
            chosen, rejected = real[pair], real[3 + pair]
            assert (chosen % 2, rejected) == (0, chosen + 1)
            if filled[pair]:
                seen += [chosen, rejected]
                tokens = SmallDocuments(lengths).tokens(rejected)
                assert batch.tokens_bt[3 + pair, : len(tokens) - 1].tolist() == tokens[:-1].tolist()
    assert sorted(seen) == list(range(14))
    assert loader.state() == {"seed": 7, "epoch": 1, "position": 0}


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_validation_takes_the_first_documents_once_with_the_same_number_of_batches_on_every_rank(
    packing: Packing, world: int
) -> None:
    documents = SmallDocuments(LENGTHS)
    ranks = [
        list(document_validation(documents, packing, 2, 32, samples=21, rank=rank, world=world))
        for rank in range(world)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    names = [name for batches in ranks for batch in batches for name in batch.samples]
    assert Counter(names) == Counter(f"document {index}" for index in range(21))
    again = list(document_validation(documents, packing, 2, 32, samples=21, rank=0, world=world))
    assert content(again) == content(ranks[0])
    labels = sum(batch.num_labels for batches in ranks for batch in batches)
    assert labels == sum(int(documents.trained(index)[1:].sum()) for index in range(21))


def test_bad_input_is_refused_in_a_sentence() -> None:
    with pytest.raises(DataError, match="no document"):
        loader_of(Pad(), [])
    with pytest.raises(
        DataError, match=r"1 document\(s\) have fewer than two tokens, the first is document 1"
    ):
        loader_of(Pad(), [5, 1, 7])
    with pytest.raises(DataError, match="pairs of a chosen and a rejected answer, but there are 3"):
        loader_of(Pad(), [5, 6, 7], paired=True)
    with pytest.raises(DataError, match=r"an answer of 60 tokens, more than batch\.sequence = 32"):
        loader_of(Pad(), [5, 60], paired=True)
    for packing in (Bucket(), Concat(), BestFit(), Flatten()):
        with pytest.raises(
            RecipeError, match=f"{packing.name} cannot keep the two answers of a preference together"
        ):
            loader_of(packing, [5, 6], paired=True)
    with pytest.raises(RecipeError, match=r"cannot be divided among 3 rank\(s\)"):
        loader_of(Pad(), world=3)
    with pytest.raises(RecipeError, match="Rank 2 of 2 does not exist"):
        loader_of(Pad(), rank=2, world=2)
    with pytest.raises(RecipeError, match="at least 0"):
        loader_of(Pad(), workers=-1)
    if not torch.cuda.is_available():
        with pytest.raises(MachineError, match="no CUDA device"):
            loader_of(Pad(), pin=True)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"seed": 1, "epoch": 0}, "Not a loader state"),
        ({"seed": 1, "epoch": 0, "position": 1.0}, "Not a loader state"),
        ({"seed": 1, "epoch": -1, "position": 0}, "does not match these documents"),
        ({"seed": 1, "epoch": 0, "position": 27}, "which give 27 micro batches"),
    ],
)
def test_a_state_of_other_data_is_refused(state: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        loader_of(Pad()).load_state(state)


@pytest.mark.parametrize(
    "packing", [Pad(), Pad(shapes=0), Bucket(shapes=0), Concat(), BestFit(), Flatten()], ids=lambda p: p.name
)
def test_no_batch_of_an_epoch_is_larger_than_the_largest(packing: Packing) -> None:
    documents = SmallDocuments(realistic_lengths(150, longest=40))
    largest = largest_batch(documents, packing, 4, 64)
    loader = DocumentLoader(documents, 4, 64, batches_per_step=1, seed=3, packing=packing)
    while loader.state()["epoch"] == 0:
        (batch,) = loader.next_step()
        assert batch.tokens_bt.numel() <= largest.tokens_bt.numel()
    assert largest.num_labels > 0
    if packing == Pad(shapes=0):
        assert largest.tokens_bt.shape == (4, max(documents.lengths) - 1)


def test_the_largest_batch_of_preferences_holds_the_longest_answers() -> None:
    lengths = realistic_lengths(40, longest=40)
    largest = largest_batch(SmallDocuments(lengths), Pad(shapes=0), 3, 64, paired=True)
    assert largest.paired
    assert largest.tokens_bt.shape == (6, max(lengths) - 1)
