"""How attention is measured: causal, 16k tokens in longer and longer sequences, head dims 64 and 128.

Queries, keys and values have the layout of the linear layers. The exact result is computed one head at a time and
recomputed for its gradients, since the scores of all heads at once would not fit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from rush.kernels import study
from rush.kernels.flash_attention import flash_attention, reference
from rush.kernels.study import Call, Contender, Inputs, Pass, Size, Study, Target, Work

NAMES = ("q_bhtd", "k_bktd", "v_bktd")


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    dims = size["batch"], size["sequence"], size["heads"], size["head_dim"]
    drawn = (study.normal(device, seed, *dims).to(dtype).transpose(1, 2) for seed in range(3))
    return {name: tensor.detach().requires_grad_() for name, tensor in zip(NAMES, drawn, strict=True)}


def plain(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> Tensor:
    return reference.attention(q_bhtd, k_bktd, v_bktd)


def by_head(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> Tensor:
    rows = []
    for row in zip(*(torch.split(tensor, 1) for tensor in (q_bhtd, k_bktd, v_bktd)), strict=True):
        heads = zip(*(torch.split(tensor, 1, 1) for tensor in row), strict=True)
        rows.append(torch.cat([_again(*head) for head in heads], dim=1))
    return torch.cat(rows)


def _again(*head: Tensor) -> Tensor:
    out: Tensor = checkpoint(reference.attention, *head, use_reentrant=False, preserve_rng_state=False)
    return out


def ours(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> Tensor:
    return flash_attention(q_bhtd, k_bktd, v_bktd, causal=True)


def sdpa(backend: SDPBackend) -> Call:
    """torch's operator, held to one backend."""

    def call(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q_bhtd, k_bktd, v_bktd, is_causal=True)

    return call


def flash_attn(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    swapped: list[Any] = [tensor.transpose(1, 2) for tensor in (q_bhtd, k_bktd, v_bktd)]
    out: Tensor = flash_attn_func(*swapped, causal=True)
    return out.transpose(1, 2)


def work(size: Size, element: int, step: Pass) -> Work:
    """Two matmuls over half the score matrix forward, five backward. Bytes: four tensors forward, eight backward."""
    values = size["batch"] * size["heads"] * size["sequence"] * size["head_dim"]
    forward = 2.0 * values * size["sequence"]
    flops = {"forward": forward, "backward": 2.5 * forward, "both": 3.5 * forward}[step]
    tensors = {"forward": 4, "backward": 8, "both": 12}[step]
    return Work(float(tensors * values * element), flops)


def _size(sequence: int, head_dim: int, tokens: int = study.TOKENS, width: int = 2048) -> Size:
    dims = {
        "batch": tokens // sequence,
        "sequence": sequence,
        "heads": width // head_dim,
        "head_dim": head_dim,
    }
    return Size(f"{sequence}, head dim {head_dim}", dims)


STUDY = Study(
    op="flash_attention",
    about="Exact causal attention without the score matrix in memory; two large matmuls, so it is compute-bound.",
    bound="matmul",
    axis="sequence",
    sizes=tuple(_size(sequence, dim) for dim in (64, 128) for sequence in (1024, 2048, 4096, 8192)),
    small=tuple(_size(sequence, 64, tokens=64, width=128) for sequence in (32, 64)),
    on_cpu=tuple(
        _size(sequence, dim, tokens=2048, width=128) for dim in (32, 64) for sequence in (128, 512, 2048)
    ),
    make=make,
    reference=by_head,
    contenders=(
        study.ours(ours),
        *study.torch_pair(plain),
        Contender("SDPA flash", "baseline", sdpa(SDPBackend.FLASH_ATTENTION)),
        Contender("SDPA cuDNN", "baseline", sdpa(SDPBackend.CUDNN_ATTENTION), study.needs_cuda),
        Contender("SDPA efficient", "baseline", sdpa(SDPBackend.EFFICIENT_ATTENTION), study.needs_cuda),
        Contender("flash-attn", "baseline", flash_attn, study.needs("flash_attn")),
    ),
    work=work,
    targets=(Target("speed", ("forward", "backward"), at_least=1.0, against="SDPA flash"),),
    passes=("forward", "backward", "both"),
    series=lambda size: f"head dim {size['head_dim']}",
)
