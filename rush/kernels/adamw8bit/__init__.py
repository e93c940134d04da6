"""AdamW with 8-bit moments, after Dettmers et al. 2021 (arXiv:2110.02861), and an optimizer around it.

`adamw8bit_` updates parameters (fp32 or bf16) and quantized moments in place, a list of tensors in one launch;
`quantized_zeros` makes such moments and `dynamic_map` its two quantization maps. `RushAdamW8bit` is a
`torch.optim.Optimizer` around it. Moments take 2.03 bytes per parameter. Deterministic.
"""

from __future__ import annotations

from rush.kernels.adamw8bit.optimizer import RushAdamW8bit
from rush.kernels.adamw8bit.quantization_map import dynamic_map
from rush.kernels.adamw8bit.update import QuantizedMoment, adamw8bit_, quantized_zeros

__all__ = ["QuantizedMoment", "RushAdamW8bit", "adamw8bit_", "dynamic_map", "quantized_zeros"]
