"""What families add to attention, by the kernels of a GPU: windows, soft caps and scales, against plain attention in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rush.models import AttentionForm
from rush.models.layers import PlainAttention

pytestmark = pytest.mark.gpu
LENGTH, WINDOW = 300, 37


def draw(head_dim: int = 64) -> tuple[Tensor, ...]:
    made = torch.Generator("cuda").manual_seed(0)
    dims = [(2, heads, LENGTH, head_dim) for heads in (6, 2, 2)]
    return tuple(torch.randn(d, generator=made, device="cuda", dtype=torch.bfloat16) for d in dims)


def documents() -> Tensor:
    row = torch.arange(LENGTH, device="cuda")
    return torch.stack((row // 110, (row > 200).long()))


def starts(ids: Tensor) -> Tensor:
    flat = ids.flatten() + 1000 * torch.arange(ids.shape[0], device="cuda").repeat_interleave(LENGTH)
    begins = torch.nonzero(torch.diff(flat, prepend=flat[:1] - 1))[:, 0]
    return torch.cat((begins, begins.new_tensor([flat.numel()]))).to(torch.int32)


def flash(form: AttentionForm) -> tuple[torch.nn.Module, Any]:
    from rush.techniques.attention.flash_attention import DocumentOffsets, FlashCore

    return FlashCore(LENGTH, form), DocumentOffsets()


def triton(form: AttentionForm) -> tuple[torch.nn.Module, Any]:
    from rush.techniques.attention.triton_attention import DocumentBounds, TritonCore

    return TritonCore(form), DocumentBounds()


def cudnn(form: AttentionForm) -> tuple[torch.nn.Module, Any]:
    from rush.techniques.attention.cudnn_attention import CudnnCore

    return CudnnCore(True, False, form), None


def flex(form: AttentionForm) -> tuple[torch.nn.Module, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from rush.techniques.attention.flex_attention import (
        DocumentMask,
        FlexCore,
        Masks,
        causal_mask,
        within_documents,
    )

    def mask(visible: Callable[..., Tensor]) -> Any:
        return create_block_mask(visible, None, None, LENGTH, LENGTH, device="cuda")

    window = form.window
    masks = Masks(mask(causal_mask), None if window is None else mask(within_documents(window)))
    kernel = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return FlexCore(kernel, masks, form), DocumentMask(window)


def gradients(core: torch.nn.Module, given: tuple[Tensor, ...], form_of_documents: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in given]
    out = core(*leaves, documents=form_of_documents)
    made = torch.Generator("cuda").manual_seed(1)
    out.backward(torch.randn(out.shape, generator=made, device="cuda").to(out.dtype))
    return [out.detach().float(), *(x.grad.float() for x in leaves if x.grad is not None)]


CASES = [
    (flash, AttentionForm(window=WINDOW)),
    (flash, AttentionForm(window=WINDOW, scale=0.05)),
    (triton, AttentionForm(window=WINDOW, scale=0.05)),
    (triton, AttentionForm(window=1)),
    (cudnn, AttentionForm(scale=0.05)),
    (flex, AttentionForm(window=WINDOW, softcap=2.0, scale=0.2)),
    (flex, AttentionForm(softcap=2.0)),
]
WIDE = [
    (flash, AttentionForm(window=WINDOW)),
    (triton, AttentionForm(window=WINDOW)),
    (triton, AttentionForm()),
]
"""With Gemma's head dim of 256, whose tiles are others."""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kernel", "form", "head_dim"), [*((*case, 64) for case in CASES), *((*case, 256) for case in WIDE)]
)
def test_a_kernel_attends_as_plain_attention_does(
    kernel: Any, form: AttentionForm, head_dim: int, packed: bool
) -> None:
    if packed and kernel is cudnn:
        pytest.skip("torch does not support packed documents with cuDNN")
    core, document_form = kernel(form)
    given, ids = draw(head_dim), documents() if packed else None
    wanted = gradients(PlainAttention(form), tuple(x.float() for x in given), ids)
    found = gradients(core, given, None if ids is None else document_form(ids, starts(ids)))
    # With a window of one key the gradients of queries and keys are zero: those are held against the largest.
    least = 1e-3 * max(other.norm() for other in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm() / other.norm().clamp_min(least)) < 0.01
    if form.window is not None:
        planted = gradients(
            PlainAttention(replace(form, window=form.window + 1)), tuple(x.float() for x in given), ids
        )
        assert any(
            float((a - b).norm() / b.norm().clamp_min(least)) > 0.02
            for a, b in zip(found, planted, strict=True)
        )
