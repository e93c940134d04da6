"""How fast a host starts operations: what a step takes at least, however fast the device beside it is.

Eager PyTorch starts one operation after another: Python calls a module, the module an operator, autograd notes it, the
backend launches a kernel; and all of it once more, backward. That is the processor's work, tens of microseconds for each
operation, and where kernels are shorter the device waits. Measured here as in a model: layers of torch's own
transformer, forward and backward, so small that nothing else takes time. Views count like all operators: they launch
nothing, but on the host they cost about as much.
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
    """Timings of launching a small model's operations: their number, and the seconds of each pass over them."""
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
