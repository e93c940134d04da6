"""Divided rows on a GPU: each kernel's blocks add up to attention, and cores take the last queries of their keys."""

from __future__ import annotations

import pytest
import torch

from rush.models.layers import PlainAttention
from rush.parallel.context_parallel import ChunkDocuments, SequenceSplit
from rush.techniques.attention.flash_attention import DocumentOffsets, FlashCore
from tests.parallel.rank_work import learn, on_ranks, sharing_a_gpu
from tests.parallel.test_context_parallel import RING, around, error
from tests.parallel.test_sameness import furthest

pytestmark = pytest.mark.gpu
LENGTH = 512


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 4, LENGTH, 64), (2, 2, LENGTH, 64), (2, 2, LENGTH, 64), (2, 4, LENGTH, 64)]
    return [torch.randn(shape, generator=generator).cuda().bfloat16() for shape in shapes]


def exact(documents: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    q, k, v, do = (x.double() for x in inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = PlainAttention()(q, k, v, documents=documents)
    return (o.detach(), *torch.autograd.grad(o, (q, k, v), do))


@pytest.mark.parametrize("kernel", ["plain", "flash on cuda", "cudnn", "triton"])
@pytest.mark.parametrize(("ranks", "balanced"), [(2, True), (4, True), (2, False)])
def test_blocks_of_every_kernel_add_up_to_attention(ranks: int, balanced: bool, kernel: str) -> None:
    if kernel == "triton":
        import rush.kernels.flash_attention  # noqa: F401
    found = around(SequenceSplit(ranks, 0, balanced), kernel, None, *inputs())
    for name, ours, reference in zip(("o", "dq", "dk", "dv"), found, exact(), strict=True):
        assert error(ours, reference) < 1e-2, name


@pytest.mark.parametrize("packed", [False, True])
def test_a_flash_core_takes_the_last_queries_of_its_keys(packed: bool) -> None:
    ids = starts = None
    if packed:
        sizes = torch.tensor([100, 28, 300, 84])
        ids = torch.arange(4).repeat_interleave(sizes).expand(2, LENGTH).cuda()
        starts = torch.tensor([0, 100, 128, 428, 512, 612, 640, 940, 1024, 1024], dtype=torch.int32).cuda()
    reference = exact(ids)
    q, k, v, do = inputs()
    k, v = (x.requires_grad_() for x in (k, v))
    size, sums = LENGTH // 4, [torch.zeros_like(k, dtype=torch.float32) for _ in range(2)]
    for split_rank in (0, 1):
        own = SequenceSplit(2, split_rank)
        forms = (None, None) if ids is None else ChunkDocuments(DocumentOffsets(), own)(ids, starts)
        for chunk, form in zip(own.own, forms, strict=True):
            begin, end = chunk * size, (chunk + 1) * size
            part = q[:, :, begin:end].clone().requires_grad_()
            o = FlashCore(LENGTH)(part, k[:, :, :end], v[:, :, :end], documents=form, query_offset=begin)
            assert error(o, reference[0][:, :, begin:end]) < 1e-2
            dq, dk, dv = torch.autograd.grad(o, (part, k, v), do[:, :, begin:end])
            assert error(dq, reference[1][:, :, begin:end]) < 1e-2
            for total, gradient in zip(sums, (dk, dv), strict=True):
                total.add_(gradient.float())
    for ours, wanted in zip(sums, reference[2:], strict=True):
        assert error(ours, wanted) < 1e-2


@pytest.mark.parametrize("knobs", ["", RING])
@pytest.mark.parametrize("attention", [(), ("flash_attention", "amp_bf16"), ("cudnn_attention", "amp_bf16"),
                                       ("triton_attention",), ("pack_best_fit", "flash_attention", "amp_bf16")])  # fmt: skip
def test_two_ranks_that_share_a_gpu_learn_what_one_learns(attention: tuple[str, ...], knobs: str) -> None:
    if not knobs and {"cudnn_attention", "triton_attention"}.intersection(attention):
        pytest.skip("refused: gathered keys are more than the queries")
    if knobs and "pack_best_fit" in attention:
        pytest.skip("refused: the kernel of a ring's blocks takes no documents")
    reference = on_ranks(1, learn, "llama", {}, attention, 5, "", (), "cuda")[0]
    limit = 5e-2 if "amp_bf16" in attention else 1e-5
    techniques = [*attention, *filter(None, [knobs])]
    for ours in on_ranks(2, sharing_a_gpu, learn, "llama", {"cp": 2}, techniques, 5, "", (), "cuda"):
        apart = furthest(ours, reference, reordered=True)
        assert apart["gradients"] < limit, apart
        assert apart["losses"] < limit, apart
        assert all(took_effect for took_effect, _ in ours["proofs"].values()), ours["proofs"]
