"""Initial weights: a pure function of the shape, the seed and the tensor's name.

Each tensor is sampled on the CPU in fp32 with its own generator, seeded by the run's seed and the tensor's name. So the
values do not depend on the device, on the order of tensors, or on which tensors a rank holds, and the global random state is
unchanged. Sampling takes some ten seconds per billion parameters and core. A large tensor is sampled in blocks on all
cores, each with its own generator, and the next tensor is sampled while one is copied to the model's device.

All families use a normal distribution with standard deviation 0.02. GPT-2 scales the two projections that write to the
residual stream by 1/sqrt(2·layers), because that many independent terms add up there. Norms begin as the identity.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rush.models.counts import ParameterSpec, list_parameters
from rush.models.shape import Shape

STANDARD_DEVIATION = 0.02
BLOCK = 1 << 20
"""Values drawn from one generator; part of what a seed means."""


def initial_values(
    shape: Shape, seed: int, wanted: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The name and initial value of every (wanted) parameter, one at a time."""
    specs = [spec for spec in list_parameters(shape) if wanted is None or wanted(spec.name)]
    with ThreadPoolExecutor(1) as ahead:
        drawing = None
        for spec, following in zip(specs, [*specs[1:], None], strict=False):
            value = drawing.result() if drawing else initial_value(shape, spec, seed)
            drawing = ahead.submit(initial_value, shape, following, seed) if following else None
            yield spec.name, value


def initial_value(shape: Shape, spec: ParameterSpec, seed: int) -> Tensor:
    """The initial value of one parameter, on the CPU in fp32."""
    if spec.name.endswith(".bias"):
        return torch.zeros(spec.dims, device="cpu", dtype=torch.float32)
    if spec.role.endswith("norm"):
        start = 0.0 if shape.structure.norm_offset else 1.0
        return torch.full(spec.dims, start, device="cpu", dtype=torch.float32)
    value = torch.empty(spec.dims, device="cpu", dtype=torch.float32)
    blocks, deviation = torch.split(value.flatten(), BLOCK), _standard_deviation(shape, spec)

    def draw(number: int) -> None:
        name = spec.name if number == 0 else f"{spec.name}:{number}"
        generator = torch.Generator(device="cpu").manual_seed(tensor_seed(seed, name))
        blocks[number].normal_(0.0, deviation, generator=generator)

    if len(blocks) == 1:
        draw(0)
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(draw, range(len(blocks))))
    return value


def _standard_deviation(shape: Shape, spec: ParameterSpec) -> float:
    if shape.structure.scaled_outputs and spec.role in ("attention_out", "mlp_down"):
        return STANDARD_DEVIATION / math.sqrt(2 * shape.num_layers)
    return STANDARD_DEVIATION


def tensor_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes 63 bits without wrapping
