"""One row-wise layer on the ranks of an axis, as a function that a fresh process can find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

INPUTS, OUTPUTS, POSITIONS = 6, 5, 8


def plain_layer() -> nn.Linear:
    layer = nn.Linear(INPUTS, OUTPUTS)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    return layer


def example() -> tuple[Tensor, Tensor]:
    """An input, and what each output counts in the loss."""
    generator = torch.Generator().manual_seed(4)
    return (
        torch.randn(1, POSITIONS, INPUTS, generator=generator),
        torch.randn(1, POSITIONS, OUTPUTS, generator=generator),
    )


def row_wise(sharded_stream: bool) -> dict[str, Any]:
    """Output and gradients of this rank's shard of the layer; the loss counts the positions that the rank has."""
    from torch.distributed.tensor.parallel import parallelize_module

    from rush.parallel import AXES, join
    from rush.parallel.sharded import full_tensor
    from rush.parallel.tensor_parallel import ResidualStream, RowwiseLinear

    with join({**dict.fromkeys(AXES, 1), "tp": 2}, "cpu") as ranks:
        assert ranks.mesh is not None
        mesh = ranks.mesh["tp"]
        stream, layer, (x, counts) = ResidualStream(mesh, sharded_stream), plain_layer(), example()
        parallelize_module(layer, mesh, RowwiseLinear(stream))
        out = layer(x.chunk(2, dim=-1)[ranks.rank].contiguous())
        (out * stream.local(counts)).sum().backward()
        assert layer.bias is None, "it is added after the sum, by a hook"
        gradients = {
            name: full_tensor(p.grad).tolist() for name, p in layer.named_parameters() if p.grad is not None
        }
        return {"out": out.tolist(), "gradients": gradients}
