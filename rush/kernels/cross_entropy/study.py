"""How cross-entropy is measured: forward and backward together, because some compute the gradient in the forward pass.

Liger's kernel, and ours in place, overwrite the logits with the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels import study
from rush.kernels.cross_entropy import cross_entropy, cross_entropy_, reference
from rush.kernels.study import Contender, Inputs, Size, Study, Target


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    rows, columns = size["rows"], size["columns"]
    logits = study.normal(device, 1, rows, columns, scale=2.0).to(dtype)
    return {"logits": logits.requires_grad_(), "labels": study.labels(device, rows, columns)}


def defined(logits: Tensor, labels: Tensor) -> Tensor:
    return reference.cross_entropy(logits, labels).sum()


def plain(logits: Tensor, labels: Tensor) -> Tensor:
    """As the plain model: in fp32."""
    return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


class _Produced(torch.autograd.Function):
    """Takes the place of the matmul that wrote the logits: nothing else holds them, so they may be overwritten."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def in_place(logits: Tensor, labels: Tensor) -> Tensor:
    produced: Tensor = _Produced.apply(logits)  # type: ignore[no-untyped-call]
    return cross_entropy_(produced, labels)


def liger(logits: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    loss: Tensor = liger_cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return loss


def _size(rows: int, columns: int, label: str, target: bool = True) -> Size:
    return Size(label, {"rows": rows, "columns": columns}, target)


STUDY = Study(
    op="cross_entropy",
    about="The loss of rows of logits and its gradient; a few operations per logit, so it is memory-bound.",
    bound="memory",
    axis="columns",
    sizes=(
        _size(4096, 32768, "4k × 32,768", target=False),
        _size(4096, 50304, "4k × 50,304"),
        _size(4096, 128256, "4k × 128,256"),
    ),
    small=(_size(16, 100, "16 × 100"), _size(16, 1000, "16 × 1,000")),
    on_cpu=tuple(_size(512, columns, f"512 × {columns:,}") for columns in (2048, 8192, 50304)),
    make=make,
    reference=defined,
    contenders=(
        study.ours(cross_entropy),
        Contender("rush, in place", "ours", in_place),
        *study.torch_pair(plain),
        study.liger(liger),
    ),
    work=study.matrix_work(1, 2),  # the logits read; then read again, and their gradient written
    targets=(Target("speed", ("both",), at_least=1.0, against="Liger"),),
    passes=("both",),
)
