"""The global norm of a list of tensors, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grad_norm(tensors: Sequence[Tensor]) -> Tensor:
    """In fp32, or in float64 where a tensor is in that."""
    wide = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in wide]))
    return norm
