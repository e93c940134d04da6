"""Documents in one row, by every attention that takes them: changing one changes nothing, to the bit, in another.

The other documents' content changes, and so do the borders between them; the watched one keeps its place in the row,
because sums are made in the order of places: moved, a document gives the same up to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.data.document_loader import BatchLayout
from rush.data.packing import BestFit, Flatten, Packing, in_order
from rush.models import Decoder
from rush.techniques.api.evidence import compile_counts
from rush.techniques.api.seams import set_attention_core
from rush.techniques.attention.flex_attention import DocumentMask, FlexCore, Masks
from tests.techniques.tiny_runs import TextDocuments, make_run

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:flex_attention called without torch.compile:UserWarning",
    "ignore:mkldnn_matmul failed:UserWarning",
)
BLOCKS = "{name='compile', scope='block'}"
SMALL = ("objective.kind=sft", "model.shape.num_layers=2", "batch.micro=2", "batch.total_tokens=64")
# The interpreter takes its time for every program of a kernel.
TINY = ("objective.kind=sft", "model.shape.num_layers=1", "model.shape.num_heads=2", "model.shape.num_kv_heads=1",
        "model.shape.head_dim=16", "batch.micro=2", "batch.total_tokens=64")  # fmt: skip
NAMES = {BestFit: "pack_best_fit", Flatten: "flatten"}


def packed(packing: Packing, micro: int = 2, sequence: int = 32) -> Batch:
    """A batch with at least three documents in its first row."""
    layout = BatchLayout(TextDocuments(longest=sequence // 2), packing, micro, sequence)
    plan = layout.plan(in_order(40), in_order)
    rows = next(plan.batch(i) for i in range(len(plan)) if len(plan.batch(i)[0]) >= 3)
    return layout.batch(rows)


def spans(batch: Batch) -> list[tuple[int, int]]:
    """First and last place of each document of the first row."""
    assert batch.documents_bt is not None
    ids = batch.documents_bt[0].tolist()
    firsts = [place for place in range(len(ids)) if place == 0 or ids[place] != ids[place - 1]]
    return list(zip(firsts, [*firsts[1:], len(ids)], strict=True))


def watched(batch: Batch) -> tuple[Batch, slice]:
    """Labels for the second document alone, all of it."""
    start, end = spans(batch)[1]
    labels_bt = torch.full_like(batch.labels_bt, IGNORED)
    labels_bt[0, start : end - 1] = batch.tokens_bt[0, start + 1 : end]
    return replace(batch, labels_bt=labels_bt), slice(start, end)


def other_content(batch: Batch, place: slice) -> Batch:
    """All other documents, padding included, say something else."""
    tokens_bt = (batch.tokens_bt * 7 + 13) % 251
    tokens_bt[0, place] = batch.tokens_bt[0, place]
    return replace(batch, tokens_bt=tokens_bt)


def other_borders(batch: Batch, place: slice, longest: int = 32) -> Batch:
    """What was the first document becomes two; what comes after the watched one becomes as few as may be, and other
    content. (No document is longer than `longest`: kernels are told so.)"""
    changed = other_content(batch, place)
    assert changed.documents_bt is not None
    assert changed.positions_bt is not None
    documents_bt, positions_bt = changed.documents_bt.clone(), changed.positions_bt.clone()
    half, length = place.start // 2, documents_bt.shape[1]
    after = torch.arange(length - place.stop, device=documents_bt.device)
    documents_bt[0, :half], documents_bt[0, place.stop :] = 90, 91 + after // longest
    positions_bt[0, half : place.start] = torch.arange(place.start - half)
    positions_bt[0, place.stop :] = after % longest
    ids = documents_bt + 1000 * torch.arange(len(documents_bt), device=documents_bt.device)[:, None]
    line = ids.flatten().tolist()
    starts = [at for at in range(len(line)) if at == 0 or line[at] != line[at - 1]]
    assert changed.starts_n is not None
    starts += [len(line)] * (len(changed.starts_n) - len(starts))
    starts_n = torch.tensor(starts, dtype=torch.int32, device=documents_bt.device)
    return replace(changed, documents_bt=documents_bt, positions_bt=positions_bt, starts_n=starts_n)


def tried(model: Decoder, batch: Batch, place: slice) -> dict[str, Tensor]:
    """What the watched document gives: logits, loss, the gradient of every weight and of every token's vector."""
    rest = {
        name: tensor for name, tensor in batch.tensors().items() if name not in ("tokens_bt", "labels_bt")
    }
    vectors: list[Tensor] = []
    hidden: list[Tensor] = []

    def keep(module: Any, given: Any, vectors_btd: Tensor) -> None:
        vectors_btd.retain_grad()
        vectors.append(vectors_btd)

    handles = [
        model.embedding.register_forward_hook(keep),
        model.final_norm.register_forward_hook(lambda module, given, hidden_btd: hidden.append(hidden_btd)),
    ]
    loss = model(batch.tokens_bt, batch.labels_bt, **rest)
    for handle in handles:
        handle.remove()
    loss.backward()
    with torch.no_grad():
        logits = model.head(hidden[0][0, place])
    found = {"logits": logits, "loss": loss.detach()}
    (vectors_btd,) = vectors
    assert vectors_btd.grad is not None
    found["vectors"] = vectors_btd.grad[0, place]
    others = vectors_btd.grad.clone()
    others[0, place] = 0
    assert not others.any(), "a token of another document has a gradient"
    assert found["vectors"].any()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    model.zero_grad()
    return found


def assert_isolated(model: Decoder, batch: Batch, *, compiled: bool = False) -> None:
    alone, place = watched(batch)
    assert len(spans(batch)) >= 3
    assert place.start >= 2
    before = tried(model, alone, place)
    for change in (other_content, other_borders):
        changed = change(alone, place)
        assert not torch.equal(changed.tokens_bt, alone.tokens_bt)
        after = tried(model, changed, place)
        for name, value in before.items():
            assert torch.equal(value, after[name]), f"{change.__name__}: {name} changed"
    if compiled:
        return
    # The same changes do reach the watched document where nothing keeps it apart.
    together = replace(alone, documents_bt=None, starts_n=None)
    plain = tried_loss(model, together)
    assert plain != tried_loss(model, other_content(together, place))


def tried_loss(model: Decoder, batch: Batch) -> float:
    with torch.no_grad():
        loss: Tensor = model(batch.tokens_bt, batch.labels_bt, positions_bt=batch.positions_bt)
    return float(loss)


def model_of(*techniques: str, family: str = "llama-tiny", overrides: tuple[str, ...] = SMALL) -> Decoder:
    return make_run(*techniques, name=family, overrides=overrides).model


@pytest.mark.parametrize("packing", [BestFit(), Flatten()], ids=lambda packing: packing.name)
@pytest.mark.parametrize("family", ["tiny", "llama-tiny"])
@pytest.mark.parametrize("core", [(), ("flash_attention",)], ids=["plain", "flash"])
def test_isolated_eager(core: tuple[str, ...], family: str, packing: Packing) -> None:
    assert_isolated(model_of(*core, NAMES[type(packing)], family=family), packed(packing))


# One row of one length for both packings: the second finds in the compiler's cache what the first made.
@pytest.mark.parametrize(
    ("core", "packing"),
    [
        ((), BestFit()),
        ((), Flatten()),
        pytest.param(("flash_attention",), Flatten(), marks=pytest.mark.slow),
    ],
    ids=["plain-best_fit", "plain-flatten", "flash-flatten"],
)
def test_isolated_compiled(core: tuple[str, ...], packing: Packing) -> None:
    torch._dynamo.reset()
    model = model_of(*core, NAMES[type(packing)], BLOCKS, overrides=TINY)
    assert_isolated(model, packed(packing, micro=1), compiled=True)


@pytest.mark.parametrize(
    ("others", "packing"),
    [((), BestFit()), ((), Flatten()), ((BLOCKS,), Flatten())],
    ids=["eager-best_fit", "eager-flatten", "compiled-flatten"],
)
def test_isolated_by_our_kernel(others: tuple[str, ...], packing: Packing) -> None:
    from rush.kernels.support import INTERPRETED

    if not INTERPRETED:
        pytest.skip("kernels are compiled on this machine, and the CPU has only the interpreter")
    torch._dynamo.reset()
    model = model_of("triton_attention", NAMES[type(packing)], *others, overrides=TINY)
    assert_isolated(model, packed(packing, micro=1), compiled=bool(others))


def flex_model(kernel: Callable[..., Tensor]) -> Decoder:
    """The flex core as a CPU can run it: all scores, but masked by what the blocks say."""
    from torch.nn.attention.flex_attention import create_block_mask

    model = model_of()
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cpu")
    set_attention_core(model, lambda form: FlexCore(kernel, Masks(causal), form), DocumentMask())
    return model


@pytest.mark.parametrize("packing", [BestFit(), Flatten()], ids=lambda packing: packing.name)
def test_isolated_by_a_mask_in_blocks(packing: Packing) -> None:
    """Forward only: torch has no backward pass of flex attention for CPUs."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    # Every batch has its own mask; the compiler must not take it for something new.
    kernel = torch.compile(flex_attention, backend="aot_eager", fullgraph=True, dynamic=False)
    model, (alone, place) = flex_model(kernel), watched(packed(packing))
    before = logits_of(model, alone)[0, place]
    torch.testing.assert_close(before, logits_of(model_of(), alone)[0, place], rtol=1e-4, atol=1e-5)
    graphs = compile_counts()
    for change in (other_content, other_borders):
        assert torch.equal(before, logits_of(model, change(alone, place))[0, place])
    assert compile_counts() == graphs, "another mask was another graph"


def logits_of(model: Decoder, batch: Batch) -> Tensor:
    model.requires_grad_(requires_grad=False)
    rest = {
        name: tensor for name, tensor in batch.tensors().items() if name not in ("tokens_bt", "labels_bt")
    }
    logits: Tensor = model(batch.tokens_bt, **rest)
    return logits


@pytest.mark.parametrize("packing", [BestFit(), Flatten()], ids=lambda packing: packing.name)
def test_every_core_computes_what_plain_attention_computes(packing: Packing) -> None:
    """Isolation alone could be had by attending to nothing."""
    from rush.kernels.support import INTERPRETED

    alone, place = watched(packed(packing))
    expected = tried(model_of(), alone, place)
    models = {"flash": model_of("flash_attention")}
    if INTERPRETED:
        models["triton"] = model_of("triton_attention")
    for name, model in models.items():
        found = tried(model, alone, place)
        for part, value in expected.items():
            torch.testing.assert_close(found[part], value, rtol=2e-4, atol=2e-5, msg=f"{name}: {part}")


@pytest.mark.parametrize(
    ("length", "borders"),
    [(5, [2]), (128, [100]), (300, []), (300, [190]), (520, [128, 130, 400]), (520, [127, 384])],
)
def test_blocks_of_the_mask_match_the_mask_function(length: int, borders: list[int]) -> None:
    """One row with documents that begin at the borders, one that is a single document."""
    documents_bt = torch.zeros(2, length, dtype=torch.int64)
    documents_bt[0, borders] = 1
    documents_bt = documents_bt.cumsum(1)
    mask = DocumentMask()(documents_bt, None).whole
    dense = mask.to_dense()[:, 0].bool()
    visible = documents_bt[:, :, None] == documents_bt[:, None, :]
    visible &= torch.ones(length, length, dtype=torch.bool).tril()
    for row in range(2):
        for i in range(dense.shape[1]):
            for j in range(dense.shape[2]):
                inside = visible[row, i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                assert bool(dense[row, i, j]) == bool(inside.any()), (row, i, j)
    for row in range(2):
        for i in range(dense.shape[1]):
            found = mask.full_kv_indices[row, 0, i, : mask.full_kv_num_blocks[row, 0, i]].tolist()
            below = [
                j for j in range(i) if visible[row, i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128].all()
            ]
            assert sorted(found) == below, (row, i)


def test_our_kernel_takes_bounds_made_once_and_refuses_other_ones() -> None:
    from rush.errors import KernelRefusal
    from rush.kernels.flash_attention import document_bounds, flash_attention
    from rush.kernels.support import INTERPRETED

    if not INTERPRETED:
        pytest.skip("kernels are compiled on this machine, and the CPU has only the interpreter")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 20, 16, generator=generator) for _ in range(3))
    documents_bt = torch.tensor([[0] * 7 + [1] * 1 + [2] * 12])
    bounds = document_bounds(documents_bt, 1, 20)
    assert torch.equal(
        flash_attention(q, k, v, documents=bounds), flash_attention(q, k, v, documents=documents_bt)
    )
    for wrong in ((bounds[0].long(), bounds[1]), (bounds[0], bounds[1][:, :-1])):
        with pytest.raises(KernelRefusal, match="two contiguous int32 tensors"):
            flash_attention(q, k, v, documents=wrong)
