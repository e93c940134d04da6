"""Launch rate: how many operator calls per second the host can make.

Each eager operator takes tens of microseconds of host time (module, dispatcher, autograd, kernel launch), forward and backward;
where kernels are shorter, the device waits. Measured with torch's own transformer layers, forward and backward, too small to
take other time. Views count as operators: they launch no kernel, but take about as much host time.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rush.hardware.samples import Sample

LAYERS, WIDTH, HEADS, TOKENS = 4, 32, 4, 16
REPEATS = 30


def launching(device: str, *, budget_s: float = 1.0) -> Sample:
    """The number of operator calls of a small model's pass, and the seconds of each pass."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, device="meta"
    )
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    inputs = torch.full((1, TOKENS, WIDTH), 0.5, device=device)
    _pass(model, inputs)
    with OperationCount() as counted:
        _pass(model, inputs)
    seconds: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(seconds) < 3 or (len(seconds) < REPEATS and time.perf_counter() < deadline):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        _pass(model, inputs)
        seconds.append(time.perf_counter() - began)
    return Sample("eager operations, forward and backward", float(counted.number), tuple(seconds))


def _pass(model: nn.Module, inputs: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(inputs).sum().backward()


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators as they are dispatched, below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))
