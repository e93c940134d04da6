"""Rows divided among ranks: who holds what, blocks that add up to attention, and what can stand beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.errors import RecipeError
from rush.hardware import probe
from rush.models import SIZES, build_model
from rush.models.layers import PlainAttention
from rush.parallel.context_parallel import ChunkDocuments, SequenceSplit
from rush.parallel.ring_attention import RingBlocks
from rush.techniques import check
from rush.techniques.attention.flash_attention import DocumentOffsets, FlashCore
from rush.techniques.parallel.cp import BatchShard
from tests.parallel.rank_work import Result, learn, on_ranks, recipe
from tests.parallel.test_sameness import RING, furthest

SPLITS = [(ranks, balanced) for ranks in (2, 3, 4) for balanced in (True, False)]
LENGTH = 24


def documents(kind: str) -> Tensor | None:
    """Two rows of documents: with boundaries inside and on the edges of chunks, and one that spans them."""
    if kind == "none":
        return None
    sizes = [[3, 9, 1, 11], [24]] if kind == "packed" else [[12, 12], [6, 6, 12]]
    return torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in sizes])


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, 16), (2, 2, LENGTH, 16), (2, 2, LENGTH, 16), (2, 4, LENGTH, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def exact(kind: str) -> tuple[Tensor, ...]:
    """Output and gradients of plain attention over the whole row, in float64."""
    q, k, v, do = inputs(torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = PlainAttention()(q, k, v, documents=documents(kind))
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do))


def error(ours: Tensor, reference: Tensor) -> float:
    return float((ours.detach().double() - reference).norm() / reference.norm())


@pytest.mark.parametrize(("ranks", "balanced"), SPLITS)
def test_chunks_are_dealt_out_once_and_come_back_in_order(ranks: int, balanced: bool) -> None:
    splits = [SequenceSplit(ranks, rank, balanced) for rank in range(ranks)]
    held = [chunk for split in splits for chunk in split.own]
    assert sorted(held) == list(range(splits[0].num_chunks))
    row = torch.arange(2 * LENGTH).view(2, LENGTH)
    parts = torch.stack([split.take(row) for split in splits])
    assert all(bool((part.diff() > 0).all()) for part in parts), (
        "a rank's positions are in the order of the row"
    )
    assert torch.equal(splits[0].in_order(parts, 1), row)


@pytest.mark.parametrize(("ranks", "balanced"), SPLITS)
def test_head_and_tail_even_out_the_pairs_that_ranks_attend_to(ranks: int, balanced: bool) -> None:
    splits = [SequenceSplit(ranks, rank, balanced) for rank in range(ranks)]
    seen = torch.ones(LENGTH, LENGTH).tril().sum(1)[None]
    counted = [int(split.take(seen).sum()) for split in splits]
    assert counted == [splits[0].pairs(rank, LENGTH) for rank in range(ranks)]
    assert (len(set(counted)) == 1) == balanced
    if not balanced:
        assert counted[-1] > 1.9 * ranks / 2 * counted[0]


@pytest.mark.parametrize("kind", ["none", "packed", "edges"])
@pytest.mark.parametrize("kernel", ["plain", "flash on cpu"])
@pytest.mark.parametrize(("ranks", "balanced"), SPLITS)
def test_blocks_add_up_to_attention(ranks: int, balanced: bool, kernel: str, kind: str) -> None:
    q, k, v, do = inputs()
    o, dq, dk, dv = around(SequenceSplit(ranks, 0, balanced), kernel, documents(kind), q, k, v, do)
    for ours, reference in zip((o, dq, dk, dv), exact(kind), strict=True):
        assert error(ours, reference) < 2e-6


def around(
    split: SequenceSplit,
    kernel: str,
    documents_bs: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
) -> tuple[Tensor, ...]:
    """The work of all ranks, one after another: the output and the gradients of whole rows."""
    splits = [SequenceSplit(split.ranks, rank, split.balanced) for rank in range(split.ranks)]
    kvs = [torch.stack([one.take(x, 2) for x in (k, v)]) for one in splits]
    outputs, dqs, dkvs = [], [], [torch.zeros_like(kv, dtype=torch.float32) for kv in kvs]
    for one in splits:
        blocks, own, found = RingBlocks(one, kernel, documents_bs), one.take(q, 2), {}
        hops = [(one.rank - hop) % one.ranks for hop in range(one.ranks)]
        for source in hops:
            blocks.forward(own, kvs[source], source, found)
        o, lse = (torch.cat([found[place][part] for place in range(len(one.own))], 2) for part in (0, 1))
        dq, given = torch.zeros_like(own, dtype=torch.float32), one.take(do, 2)
        for source in hops:
            dkvs[source] += blocks.backward(given, own, kvs[source], o.to(q.dtype), lse, source, dq)
        outputs.append(o)
        dqs.append(dq)
    dk, dv = split.in_order(torch.stack(dkvs), 3)
    return split.in_order(torch.stack(outputs), 2), split.in_order(torch.stack(dqs), 2), dk, dv


@pytest.mark.parametrize("kind", ["none", "packed", "edges"])
def test_a_flash_core_takes_the_last_queries_of_its_keys(kind: str) -> None:
    q, k, v, _ = inputs()
    ids, split = documents(kind), SequenceSplit(2, 1)
    forms = (None, None) if ids is None else ChunkDocuments(DocumentOffsets(), split)(ids, None)
    for chunk, form in zip(split.own, forms, strict=True):
        begin, end = chunk * LENGTH // 4, (chunk + 1) * LENGTH // 4
        keys = k[:, :, :end], v[:, :, :end]
        ours = FlashCore(LENGTH)(q[:, :, begin:end], *keys, documents=form, query_offset=begin)
        assert error(ours, exact(kind)[0][:, :, begin:end]) < 1e-6


def test_document_starts_are_known_up_to_each_chunk() -> None:
    class Told(torch.nn.Module):
        def forward(self, documents_bs: Tensor, starts_n: Tensor | None) -> Any:
            assert starts_n is not None
            return documents_bs.shape[1], starts_n.tolist()

    ids = documents("packed")
    assert ids is not None
    starts = torch.tensor([0, 3, 12, 13, 24, 48, 48], dtype=torch.int32)
    # Rows that end after 6 and after 24 positions: a document behind the end is empty.
    assert ChunkDocuments(Told(), SequenceSplit(2, 0))(ids, starts) == (
        (6, [0, 3, 6, 6, 6, 12, 12]),
        (24, [0, 3, 12, 13, 24, 48, 48]),
    )


def test_a_rank_takes_its_tokens_labels_and_positions_and_counts_its_own() -> None:
    tokens = torch.arange(20).view(2, 10)
    labels = torch.where(tokens % 3 == 0, tokens + 1, IGNORED)
    batch = Batch(tokens, labels, padding=3)
    sharded_dims = [BatchShard(SequenceSplit(2, rank), build_model(SIZES["tiny"])) for rank in (0, 1)]
    parts = [cut(batch) for cut in sharded_dims]
    # Ten positions are filled up to twelve: chunks of three, of which rank 0 has the first and the last.
    assert parts[0].tokens_bt[0].tolist() == [0, 1, 2, 9, 0, 0]
    assert parts[0].positions_bt is not None
    assert parts[0].positions_bt[1].tolist() == [0, 1, 2, 9, 10, 11]
    assert parts[1].tokens_bt[1].tolist() == [13, 14, 15, 16, 17, 18]
    assert sum(part.num_labels for part in parts) == batch.num_labels
    assert sum(part.num_real for part in parts) == batch.num_real
    assert [cut.filled for cut in sharded_dims] == [4, 4]


def test_answers_that_are_compared_are_not_cut() -> None:
    asked = recipe("gpt2", {"cp": 2}, (), "objective.kind=dpo")
    with pytest.raises(RecipeError, match="dpo"):
        check(asked, probe("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("knobs", ["", RING, "{name='cp', exchange='ring', balance=false}"])
@pytest.mark.parametrize(
    ("family", "techniques", "more"),
    [
        ("llama", ["pack_best_fit"], ["batch.micro=2"]),
        ("gpt2", ["flatten"], ["batch.micro=2"]),
        ("llama", ["pack_best_fit", "flash_attention", "accumulate"], ["batch.micro=2"]),
        ("gpt2", ["pad"], ["batch.micro=2"]),
        ("gpt2", ["flash_attention", "fused_adamw"], []),
        ("llama", ["checkpoint_full"], []),
        ("llama", ["checkpoint_selective"], []),
        ("llama", ["{name='compile', scope='block'}"], []),
        ("llama", ["fused_projections"], []),
    ],
)
def test_what_stands_beside_it_does_the_same_on_ranks_as_on_one(
    family: str, techniques: list[str], more: list[str], knobs: str
) -> None:
    reference = on_ranks(1, learn, family, {}, techniques, 3, "", more)[0]
    found = on_ranks(2, learn, family, {"cp": 2}, [*techniques, *filter(None, [knobs])], 3, "", more)
    for ours in found:
        apart = furthest(ours, reference, reordered=True)
        assert max(apart.values()) < 1e-5, apart
    assert all(took_effect for took_effect, _ in found[0]["proofs"].values()), found[0]["proofs"]


@pytest.mark.slow
@pytest.mark.parametrize("knobs", ["", RING])
@pytest.mark.parametrize("precision", ["amp_bf16", "pure_bf16"])
def test_sixteen_bits_differ_by_their_rounding_only(precision: str, knobs: str) -> None:
    reference: Result = on_ranks(1, learn, "llama", {}, [precision], 3)[0]
    found = on_ranks(2, learn, "llama", {"cp": 2}, [precision, *filter(None, [knobs])], 3)
    for ours in found:
        assert furthest(ours, reference)["losses"] < 2e-3
        assert furthest(ours, reference)["gradients"] < 5e-2
    assert all(took_effect for took_effect, _ in found[0]["proofs"].values()), found[0]["proofs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "techniques"),
    [
        ("llama", {"cp": 2, "tp": 2}, []),
        ("gpt2", {"cp": 2, "tp": 2}, [RING]),
        ("llama", {"fsdp": 2, "cp": 2, "tp": 2}, []),
    ],
)
def test_heads_and_positions_are_divided_together(
    family: str, layout: dict[str, int], techniques: list[str]
) -> None:
    reference = on_ranks(1, learn, family, {}, (), 3)[0]
    found = on_ranks(4 * layout.get("fsdp", 1), learn, family, layout, techniques, 3)
    for ours in found:
        apart = furthest(ours, reference, reordered=True)
        assert max(apart.values()) < 1e-5, apart
    assert all(took_effect for took_effect, _ in found[0]["proofs"].values()), found[0]["proofs"]
