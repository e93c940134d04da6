"""How RoPE is measured: queries and keys of 16k tokens, in the layout of the linear layers.

Liger's kernel overwrites its inputs; it moves as many bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import study
from rush.kernels.rope import reference, rope
from rush.kernels.study import Inputs, Pass, Size, Study, Work


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    batch, positions, head_dim = size["batch"], size["positions"], size["head_dim"]
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.arange(positions, device=device)[:, None] * frequencies
    angles_btd = torch.cat((angles, angles), dim=-1)[None]
    found = {
        name: study.normal(device, seed, batch, positions, heads, head_dim).to(dtype).transpose(1, 2)
        for seed, (name, heads) in enumerate((("q_bhtd", size["heads"]), ("k_bktd", size["kv_heads"])))
    }
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in found.items()}
    return {**leaves, "cos_btd": angles_btd.cos(), "sin_btd": angles_btd.sin()}


def liger(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, ...]:
    from liger_kernel.ops import LigerRopeFunction

    rotated: tuple[Tensor, ...] = LigerRopeFunction.apply(q_bhtd, k_bktd, cos_btd, sin_btd)
    return rotated


def work(size: Size, element: int, step: Pass) -> Work:
    """Queries and keys read and written in each direction."""
    tokens = size["batch"] * size["positions"]
    values = tokens * (size["heads"] + size["kv_heads"]) * size["head_dim"]
    passes = {"forward": 2, "backward": 2, "both": 4}[step]
    return Work(float(passes * values * element))


def _size(
    label: str, heads: int, head_dim: int, batch: int = 8, positions: int = 2048, target: bool = True
) -> Size:
    dims = {
        "batch": batch,
        "positions": positions,
        "heads": heads,
        "kv_heads": min(8, heads),
        "head_dim": head_dim,
    }
    return Size(label, {**dims, "columns": heads * head_dim}, target)


STUDY = Study(
    op="rope",
    about="Rotates every pair of a query and a key by its position's angle; one pass over the data, so it is memory-bound.",
    bound="memory",
    axis="columns",
    sizes=(
        _size("16k × 2048 (32 heads of 64)", 32, 64),
        _size("16k × 4096 (32 heads of 128)", 32, 128, target=False),
        _size("16k × 8192 (64 heads of 128)", 64, 128),
    ),
    small=(_size("2 × 16 × 64", 4, 16, 2, 16), _size("2 × 16 × 128", 4, 32, 2, 16)),
    make=make,
    reference=reference.rope,
    contenders=(study.ours(rope), *study.torch_pair(reference.rope), study.liger(liger)),
    work=work,
    targets=study.MEMORY_TARGETS,
)
