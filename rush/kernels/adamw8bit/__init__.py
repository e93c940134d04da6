"""AdamW with moments in 8 bits, after Dettmers et al. 2021 (arXiv:2110.02861), and the optimizer made of it.

`adamw8bit_` updates parameters (fp32 or bf16) and packed moments in place, a list of tensors in one launch;
`quantized_zeros` makes such moments and `dynamic_map` the two tables it reads. `RushAdamW8bit` is a
`torch.optim.Optimizer` around it. Moments take 2.03 bytes a parameter. Deterministic.
"""

from __future__ import annotations

from rush.kernels.adamw8bit.optimizer import RushAdamW8bit
from rush.kernels.adamw8bit.quantization_map import dynamic_map
from rush.kernels.adamw8bit.update import Packed, adamw8bit_, quantized_zeros

__all__ = ["Packed", "RushAdamW8bit", "adamw8bit_", "dynamic_map", "quantized_zeros"]
