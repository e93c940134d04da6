"""Packed documents in the plain model: each is computed as if it were alone, and none changes another by a bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from rush.data.batch import IGNORED, Batch
from rush.data.document_loader import BatchLayout
from rush.data.packing import BestFit, Concat, Flatten, Ints, Packing, Pad, in_order
from rush.models import SIZES, Decoder, build_model
from tests.data.small_documents import SmallDocuments

LENGTHS = [9, 21, 5, 30, 2, 17, 12, 26, 3, 11]
DOCUMENTS = SmallDocuments(LENGTHS)
# Weights are float64, but softmax, norms and loss are fp32 by design: a few roundings of 6e-8.
LOSS, GRADIENT = 1e-6, 3e-6
PACKINGS: list[Packing] = [Pad(), Pad(shapes=0), BestFit(), Flatten()]


def small_model(family: str, dtype: torch.dtype = torch.float64) -> Decoder:
    kv_heads = 4 if family == "tiny" else 2
    shape = replace(
        SIZES[family], num_layers=2, hidden=32, num_heads=4, num_kv_heads=kv_heads, head_dim=8, intermediate=48,
        vocab_size=256, context=32,
    )  # fmt: skip
    model = build_model(shape)
    model.init_weights(0)
    with torch.no_grad():  # lively enough for attention to matter
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.to(dtype)


def planned(packing: Packing, micro: int = 3, sequence: int = 32) -> list[tuple[list[Ints], Batch]]:
    layout = BatchLayout(DOCUMENTS, packing, micro, sequence)
    plan = layout.plan(in_order(len(DOCUMENTS)), in_order)
    return [(plan.batch(index), layout.batch(plan.batch(index))) for index in range(len(plan))]


def loss_of(model: Decoder, batch: Batch) -> torch.Tensor:
    rest = {
        name: tensor for name, tensor in batch.tensors().items() if name not in ("tokens_bt", "labels_bt")
    }
    loss: torch.Tensor = model(batch.tokens_bt, batch.labels_bt, **rest)
    return loss


def gradients(model: Decoder) -> torch.Tensor:
    flat = torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )
    model.zero_grad()
    return flat


def alone(model: Decoder, index: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of one document by itself, without any of what packing does."""
    tokens, trained = torch.from_numpy(DOCUMENTS.tokens(index)), torch.from_numpy(DOCUMENTS.trained(index))
    labels = torch.where(trained, tokens, IGNORED)[1:]
    loss = model(tokens[None, :-1], labels[None])
    loss.backward()
    return loss.item(), gradients(model)


def one_by_one(rows: list[Ints], batch: Batch) -> Iterator[tuple[int, Batch]]:
    """Every document of a batch, with the batch in which it alone has labels."""
    for row, pieces in enumerate(rows):
        place = 0
        for document, start, stop in pieces:
            labels_bt = torch.full_like(batch.labels_bt, IGNORED)
            end = place + int(stop - start)
            labels_bt[row, place:end] = batch.labels_bt[row, place:end]
            yield int(document), replace(batch, labels_bt=labels_bt)
            place = end


@pytest.mark.parametrize("family", ["tiny", "llama-tiny"])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_each_document_gives_the_loss_and_gradient_it_gives_alone(packing: Packing, family: str) -> None:
    model = small_model(family)
    seen = []
    for rows, batch in planned(packing):
        for document, labelled in one_by_one(rows, batch):
            loss = loss_of(model, labelled)
            loss.backward()
            gradient = gradients(model)
            expected, expected_gradient = alone(model, document)
            assert loss.item() == pytest.approx(expected, rel=LOSS)
            assert float((gradient - expected_gradient).norm() / expected_gradient.norm()) < GRADIENT
            seen.append(document)
    assert sorted(seen) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("family", ["tiny", "llama-tiny"])
def test_all_packings_but_concat_give_the_same_summed_loss(family: str) -> None:
    model = small_model(family)
    totals, slopes = [], []
    for packing in [*PACKINGS, Concat()]:
        loss = torch.stack([loss_of(model, batch) for _, batch in planned(packing)]).sum()
        loss.backward()
        totals.append(loss.item())
        slopes.append(gradients(model))
    np.testing.assert_allclose(totals[:-1], totals[0], rtol=LOSS)
    for slope in slopes[:-1]:
        assert float((slope - slopes[0]).norm() / slopes[0].norm()) < GRADIENT
    assert abs(totals[-1] / totals[0] - 1) > 1e-3, "concatenated documents see each other"


def test_a_leaking_mask_would_be_noticed() -> None:
    """The bug that packing is known for: without the ids the second document of a row sees the first."""
    model = small_model("llama-tiny")
    ((rows, batch), *_) = planned(Flatten())
    document, labelled = list(one_by_one(rows, batch))[1]
    expected, _ = alone(model, document)
    assert loss_of(model, labelled).item() == pytest.approx(expected, rel=LOSS)
    leaking = replace(labelled, documents_bt=None, starts_n=None)
    assert abs(loss_of(model, leaking).item() / expected - 1) > 1e-3
