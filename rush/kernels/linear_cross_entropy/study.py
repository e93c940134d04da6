"""How the fused LM head and loss is measured: forward and backward together, with the gradients of both inputs.

Logits have a standard deviation of 2, as in training; one label in twenty is ignored. The memory that counts is what is
held beyond the results: full logits are the thing to avoid.
"""

from __future__ import annotations

from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels import study
from rush.kernels.linear_cross_entropy import linear_cross_entropy, reference
from rush.kernels.study import Contender, Inputs, Pass, Size, Study, Target, Work


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    tokens, hidden, vocab = size["tokens"], size["hidden"], size["vocabulary"]
    return {
        "hidden": study.normal(device, 1, tokens, hidden).to(dtype).requires_grad_(),
        "weight": study.normal(device, 2, vocab, hidden, scale=2 * hidden**-0.5).to(dtype).requires_grad_(),
        "labels": study.labels(device, tokens, vocab),
    }


def defined(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return reference.linear_cross_entropy(hidden, weight, labels)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """As the plain model: all logits, in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, ignore_index=-100, reduction="sum")


def ours(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden, weight, labels)


def liger(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(
        hidden, weight, labels, ignore_index=-100, reduction="sum"
    )
    return loss


def cut(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    library = import_module("cut_cross_entropy")
    loss: Tensor = library.linear_cross_entropy(hidden, weight, labels, ignore_index=-100, reduction="sum")
    return loss


def work(size: Size, element: int, step: Pass) -> Work:
    """Three matmuls: the logits, and the gradient of each input. Bytes: inputs and gradients."""
    tokens, hidden, vocab = size["tokens"], size["hidden"], size["vocabulary"]
    times = {"forward": 1, "backward": 2, "both": 3}[step]
    return Work(float(times * (tokens + vocab) * hidden * element), 2.0 * times * tokens * hidden * vocab)


def _size(label: str, tokens: int, hidden: int, vocab: int, target: bool = False) -> Size:
    return Size(label, {"tokens": tokens, "hidden": hidden, "vocabulary": vocab}, target)


STUDY = Study(
    op="linear_cross_entropy",
    about="Fused LM head and loss, without the logits of all tokens; three large matmuls, so it is compute-bound.",
    bound="matmul",
    axis="tokens",
    sizes=(
        _size("4k tokens × 2048 × 128,256", 4096, 2048, 128256),
        _size("16k tokens × 2048 × 128,256", 16384, 2048, 128256, target=True),
        _size("16k tokens × 768 × 50,304", 16384, 768, 50304),
    ),
    small=(_size("48 tokens × 32 × 200", 48, 32, 200), _size("96 tokens × 32 × 200", 96, 32, 200)),
    on_cpu=(
        _size("1k tokens × 128 × 2,048", 1024, 128, 2048),
        _size("2k tokens × 128 × 2,048", 2048, 128, 2048),
        _size("512 tokens × 768 × 50,304", 512, 768, 50304),
    ),
    make=make,
    reference=defined,
    contenders=(
        study.ours(ours),
        *study.torch_pair(plain),
        study.liger(liger),
        Contender("cut-cross-entropy", "baseline", cut, study.needs("cut_cross_entropy")),
    ),
    work=work,
    targets=(
        Target("time", ("both",), at_most=1.05, against="compiled torch"),
        Target("time", ("both",), at_most=1.05, against="Liger"),
        Target(
            "memory",
            ("both",),
            at_most=0.10,
            of=lambda size: 2.0 * size["tokens"] * size["vocabulary"],
            of_what="the logits in bf16",
        ),
    ),
    passes=("both",),
    exact=torch.float32,
    series=lambda size: f"{size['hidden']} wide, vocabulary {size['vocabulary']:,}",
)
