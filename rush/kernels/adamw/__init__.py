"""AdamW over a list of tensors in one launch, and an optimizer around it.

`adamw_` updates parameters and moments in place: parameters and moments in fp32 or bf16 (both moments of a tensor
alike), gradients in either, all contiguous; lr is a float, or a tensor that is read on the device. With
`stochastic_rounding` bf16 weights and second moments are rounded stochastically, reproducibly (see triton.py).
`RushAdamW` is a `torch.optim.Optimizer` with the state of torch's AdamW (step, exp_avg, exp_avg_sq). Deterministic.
"""

from __future__ import annotations

from rush.kernels.adamw.optimizer import RushAdamW
from rush.kernels.adamw.update import adamw_

__all__ = ["RushAdamW", "adamw_"]
