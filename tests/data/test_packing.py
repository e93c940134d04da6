"""Plans of packings: everything once, nothing beyond its row, little waste, and the tensors say what the plan says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rush.data.batch import IGNORED, Batch
from rush.data.document_loader import BatchLayout
from rush.data.packing import (
    BestFit,
    Bucket,
    Concat,
    Flatten,
    Packing,
    Pad,
    best_fit,
    fill_rows,
    in_order,
    most_documents,
    padded_tokens,
)
from rush.errors import DataError
from tests.data.small_documents import SmallDocuments, realistic_lengths

PACKINGS: list[Packing] = [
    Pad(),
    Pad(shapes=0),
    Bucket(shapes=4, window=3),
    Concat(),
    BestFit(window=7),
    Flatten(window=5),
]
WHOLE = [packing for packing in PACKINGS if not isinstance(packing, Concat)]
lengths_of = st.lists(st.integers(2, 40), min_size=1, max_size=60)


def shuffle_of(seed: int) -> Any:
    return lambda count: np.random.default_rng(seed).permutation(count)


def planned(packing: Packing, lengths: list[int], micro: int, sequence: int, seed: int = 0) -> Any:
    order = shuffle_of(seed)(len(lengths))
    return packing.plan(np.array(lengths), order, micro, sequence, shuffle_of(seed + 1))


def sizes_of(row: Any) -> list[int]:
    return [int(stop - start) for _, start, stop in row]


@pytest.mark.parametrize("packing", WHOLE, ids=str)
@settings(max_examples=60, deadline=None)
@given(lengths=lengths_of, micro=st.integers(1, 5), sequence=st.integers(1, 45), seed=st.integers(0, 9))
def test_every_position_of_every_document_is_there_once(
    packing: Packing, lengths: list[int], micro: int, sequence: int, seed: int
) -> None:
    plan = planned(packing, lengths, micro, sequence, seed)
    found = sorted(
        tuple(map(int, piece)) for index in range(len(plan)) for row in plan.batch(index) for piece in row
    )
    covered = [(document, place) for document, start, stop in found for place in range(start, stop)]
    assert covered == [
        (document, place) for document, length in enumerate(lengths) for place in range(length - 1)
    ]
    # A document is cut only where it alone is too long.
    assert len(found) == sum(-(-(length - 1) // sequence) for length in lengths)
    assert plan.dropped == 0


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@settings(max_examples=60, deadline=None)
@given(lengths=lengths_of, micro=st.integers(1, 5), sequence=st.integers(1, 45), seed=st.integers(0, 9))
def test_no_row_and_no_batch_is_beyond_its_capacity(
    packing: Packing, lengths: list[int], micro: int, sequence: int, seed: int
) -> None:
    if isinstance(packing, Concat) and sum(lengths) < sequence:
        return
    plan = planned(packing, lengths, micro, sequence, seed)
    capacity = micro * sequence if packing.one_row else sequence
    limit = most_documents(np.array(lengths), capacity)
    for index in range(len(plan)):
        rows = plan.batch(index)
        assert 1 <= len(rows) <= (1 if packing.one_row else micro)
        for row in rows:
            assert 1 <= sum(sizes_of(row)) <= capacity
            assert not packing.isolated or len(row) <= limit
            assert max(sizes_of(row)) <= sequence
            if isinstance(packing, Pad | Bucket):
                assert len(row) == 1


@settings(max_examples=80, deadline=None)
@given(lengths=lengths_of, micro=st.integers(1, 5), sequence=st.integers(1, 45), seed=st.integers(0, 9))
def test_concat_is_the_token_stream_without_the_stated_tail(
    lengths: list[int], micro: int, sequence: int, seed: int
) -> None:
    if sum(lengths) < sequence:
        with pytest.raises(DataError, match=r"less than one row of batch\.sequence"):
            planned(Concat(), lengths, micro, sequence, seed)
        return
    plan = planned(Concat(), lengths, micro, sequence, seed)
    order = shuffle_of(seed)(len(lengths))
    line = [(int(document), place) for document in order for place in range(lengths[document])]
    found = [
        (int(document), place)
        for index in range(len(plan))
        for row in plan.batch(index)
        for document, start, stop in row
        for place in range(start, stop)
    ]
    assert found == line[: len(line) // sequence * sequence]
    assert plan.dropped == len(line) % sequence
    assert all(sum(sizes_of(row)) == sequence for index in range(len(plan)) for row in plan.batch(index))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_a_plan_is_a_function_of_lengths_order_and_shuffle(packing: Packing) -> None:
    lengths = realistic_lengths(200)
    first, again, other = (planned(packing, lengths, 4, 64, seed) for seed in (3, 3, 4))
    assert all(
        np.array_equal(getattr(first, part), getattr(again, part)) for part in ("pieces", "rows", "batches")
    )
    assert not np.array_equal(first.pieces, other.pieces)


def first_fit(sizes: list[int], capacity: int) -> int:
    """Rows that first-fit needs, in the order given: the plainest of its kind."""
    space: list[int] = []
    for size in sizes:
        found = next((row for row, left in enumerate(space) if left >= size), None)
        if found is None:
            space.append(capacity)
            found = len(space) - 1
        space[found] -= size
    return len(space)


@pytest.mark.parametrize("mean", [8.0, 20.0, 45.0])
def test_best_fit_wastes_less_than_first_fit(mean: float) -> None:
    """Over many draws; in a single one (about once in three thousand) first-fit can be lucky by a row."""
    draws = [realistic_lengths(200, seed, mean=mean) for seed in range(60)]
    ours = [len(best_fit(sizes, 64, most=10_000)) for sizes in draws]
    theirs = [first_fit(sizes, 64) for sizes in draws]
    assert all(rows <= other + 1 for rows, other in zip(ours, theirs, strict=True))
    needed = sum(-(-sum(sizes) // 64) for sizes in draws)
    assert sum(ours) < sum(theirs) or sum(ours) == needed


def test_a_document_goes_into_the_fullest_row_that_has_room() -> None:
    """Into the emptiest, three rows would be needed."""
    sizes = [2, 3, 4, 5, 6]
    rows = best_fit(sizes, 10, most=10)
    assert [[sizes[place] for place in row] for row in rows] == [[6, 4], [5, 3, 2]]


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(1, 64), min_size=1, max_size=80))
def test_no_two_rows_of_best_fit_would_fit_into_one(sizes: list[int]) -> None:
    rows = best_fit(sizes, 64, most=10_000)
    loads = sorted(sum(sizes[place] for place in row) for row in rows)
    assert len(loads) == 1 or loads[0] + loads[1] > 64


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=80),
    window=st.integers(1, 30),
    most=st.integers(1, 9),
)
def test_rows_are_filled_in_order_and_from_the_window_ahead(sizes: list[int], window: int, most: int) -> None:
    rows = list(fill_rows(sizes, 50, most, window))
    assert sorted(place for row in rows for place in row) == list(range(len(sizes)))
    taken: set[int] = set()
    for row in rows:
        assert 0 < sum(sizes[place] for place in row) <= 50
        assert len(row) <= most
        for place in row:
            first_left = next(place for place in range(len(sizes)) if place not in taken)
            assert first_left <= place < first_left + window
            taken.add(place)
    # A row ends because it is full, or because nothing in the window fits.
    left = set(range(len(sizes)))
    for row in rows:
        left -= set(row)
        space = 50 - sum(sizes[place] for place in row)
        if left and len(row) < most:
            assert all(sizes[place] > space for place in left if place < min(left) + window)


def test_padding_shrinks_from_packing_to_packing() -> None:
    lengths = realistic_lengths(2000, seed=1)
    shares = {}
    for packing in (Pad(shapes=8), Bucket(shapes=8), BestFit(), Flatten()):
        tokens, padding = padded_tokens(planned(packing, lengths, 4, 64), packing, 4, 64)
        shares[packing.name] = padding / tokens
    assert shares["pad"] > 0.35
    assert shares["bucket"] < 0.25
    assert shares["pack_best_fit"] < 0.03
    assert shares["flatten"] < 0.02


def test_a_row_with_the_maximum_number_of_documents_is_closed_early() -> None:
    lengths = [2] * 3000 + [257] * 300
    most = most_documents(np.array(lengths), 256)
    plan = planned(BestFit(window=4000), lengths, 4, 256)
    assert most == 64
    assert max(len(row) for index in range(len(plan)) for row in plan.batch(index)) == 64


# From plans to tensors.


def batches_of(
    packing: Packing, documents: SmallDocuments, micro: int, sequence: int
) -> list[tuple[Any, Batch]]:
    layout = BatchLayout(documents, packing, micro, sequence)
    plan = layout.plan(shuffle_of(5)(len(documents)), shuffle_of(6))
    return [(plan.batch(index), layout.batch(plan.batch(index))) for index in range(len(plan))]


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_tokens_and_labels_are_those_of_the_documents(packing: Packing) -> None:
    documents = SmallDocuments(realistic_lengths(41, longest=33))
    for rows, batch in batches_of(packing, documents, 3, 32):
        real = 0
        for row, pieces in enumerate(rows):
            place = 0
            for document, start, stop in pieces:
                tokens, trained = documents.tokens(document), documents.trained(document)
                for position in range(start, stop):
                    assert batch.tokens_bt[row, place] == tokens[position]
                    has_label = position + 1 < len(tokens) and bool(trained[position + 1])
                    wanted = tokens[position + 1] if has_label else IGNORED
                    assert batch.labels_bt[row, place] == wanted
                    place += 1
            assert (batch.labels_bt[row, place:] == IGNORED).all()
            real += place
        assert (batch.labels_bt[len(rows) :] == IGNORED).all()
        assert batch.num_real == real
        assert [*batch.samples] == [f"document {document}" for row in rows for document, _, _ in row]


def test_no_label_is_lost_but_those_of_the_tail() -> None:
    documents = SmallDocuments(realistic_lengths(41, longest=33))
    trained = sum(int(documents.trained(index)[1:].sum()) for index in range(len(documents)))
    for packing in WHOLE:
        assert sum(batch.num_labels for _, batch in batches_of(packing, documents, 3, 32)) == trained, packing


@pytest.mark.parametrize("packing", [BestFit(), Flatten()], ids=str)
def test_positions_restart_in_each_document_and_document_ids_differ(packing: Packing) -> None:
    documents = SmallDocuments(realistic_lengths(41, longest=33))
    shapes = set()
    for rows, batch in batches_of(packing, documents, 3, 32):
        assert batch.positions_bt is not None
        assert batch.documents_bt is not None
        assert batch.starts_n is not None
        shapes.add((batch.tokens_bt.shape, batch.starts_n.shape))
        assert batch.starts_n.dtype == torch.int32
        length = batch.tokens_bt.shape[1]
        for row, pieces in enumerate(rows):
            ends = np.cumsum(sizes_of(pieces))
            for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                assert batch.positions_bt[row, start:end].tolist() == list(range(end - start))
                assert (batch.documents_bt[row, start:end] == number).all()
            # What comes after the last document is none of them.
            assert not (batch.documents_bt[row, ends[-1] :] < len(pieces)).any()
        # The beginnings say the same as the ids: a new one at every change of row or id, and where positions restart.
        line = batch.positions_bt.flatten()
        begins = [place for place in range(len(line)) if line[place] == 0]
        starts = batch.starts_n.tolist()
        assert [start for start, end in pairwise(starts) if end > start] == begins
        assert starts[-1] == batch.tokens_bt.numel()
        ids = batch.documents_bt.flatten().tolist()
        changes = [place for place in range(len(ids)) if place % length == 0 or ids[place] != ids[place - 1]]
        assert changes == begins
        assert max(end - start for start, end in pairwise(starts)) <= 32
    assert len(shapes) == 1, "a compiler must see one shape"


def test_pad_gives_at_most_its_number_of_shapes() -> None:
    documents = SmallDocuments(realistic_lengths(300, longest=65))
    for shapes, allowed in ((1, {64}), (4, {16, 32, 48, 64}), (8, set(range(8, 65, 8)))):
        found = {batch.tokens_bt.shape for _, batch in batches_of(Pad(shapes=shapes), documents, 2, 64)}
        assert {shape[1] for shape in found} <= allowed
        assert len(found) > 1 or shapes == 1
    for rows, batch in batches_of(Pad(shapes=0), documents, 2, 64):
        assert batch.tokens_bt.shape[1] == max(sum(sizes_of(row)) for row in rows)


def test_a_document_longer_than_a_row_is_split_into_documents() -> None:
    documents = SmallDocuments([100, 9])
    ((rows, batch),) = batches_of(Flatten(), documents, 4, 32)
    assert sorted((int(d), int(a), int(b)) for d, a, b in rows[0]) == [
        (0, 0, 32),
        (0, 32, 64),
        (0, 64, 96),
        (0, 96, 99),
        (1, 0, 8),
    ]
    assert batch.positions_bt is not None
    assert int(batch.positions_bt.max()) == 31


def test_parts_of_a_packed_batch_have_their_document_starts() -> None:
    documents = SmallDocuments(realistic_lengths(60, longest=33))
    _, batch = batches_of(BestFit(), documents, 4, 32)[0]
    parts = batch.split(2)
    assert [part.tokens_bt.shape for part in parts] == [(2, 32), (2, 32)]
    for part in parts:
        assert part.starts_n is not None
        assert part.positions_bt is not None
        starts = part.starts_n.tolist()
        line = part.positions_bt.flatten().tolist()
        assert [a for a, b in pairwise(starts) if b > a] == [place for place in range(64) if line[place] == 0]
        assert starts[-1] == 64


def test_an_empty_micro_batch_is_all_padding() -> None:
    documents = SmallDocuments([9, 9])
    for packing in (Pad(), BestFit(), Flatten()):
        batch = BatchLayout(documents, packing, 2, 32).batch([])
        assert batch.num_labels == 0
        assert batch.padding == batch.tokens_bt.numel() == 64


def test_the_order_without_a_shuffle_is_the_order_given() -> None:
    plan = Pad().plan(np.array([3, 4, 5]), np.array([2, 0, 1]), 2, 8, in_order)
    assert plan.pieces.tolist() == [[2, 0, 4], [0, 0, 2], [1, 0, 3]]
