"""What every kernel needs: a way to refuse, to ask for a device, and to become an operator of torch.

Triton decides when a kernel is defined whether it is compiled for a GPU or interpreted on the CPU. So
`INTERPRETED` is settled once, when this module is first imported, by the same variable Triton reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rush.errors import KernelRefusal

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Whether kernels run in Triton's interpreter."""

_INTERPRETED_SMS = 4
"""As many programs as a small GPU would run at once: more than one, so that sums over programs are exercised."""


def need(condition: bool, sentence: str) -> None:
    """Refuse with this sentence unless the condition holds."""
    if not condition:
        raise KernelRefusal(sentence)


def need_device(op: str, *tensors: Tensor) -> None:
    """All on one device, and one that can run the kernel: CUDA, or the CPU when interpreted."""
    devices = {tensor.device for tensor in tensors}
    need(
        len(devices) == 1,
        f"{op} needs its tensors on one device, found {' and '.join(sorted(map(str, devices)))}; move them together.",
    )
    kind = next(iter(devices)).type
    need(
        kind == "cuda" or kind == "meta" or (kind == "cpu" and INTERPRETED),
        f"{op} runs on a CUDA device, found {kind}; move the tensors there, or set TRITON_INTERPRET=1 before Python "
        "starts to have Triton interpret the kernel (slowly, for tests).",
    )


def op(name: str, *, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator `rush::<name>`: opaque to the compiler, visible in a profile."""
    return torch.library.custom_op(f"rush::{name}", mutates_args=tuple(mutates))


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device: how many programs can run side by side at the least."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n: the widths of Triton's blocks."""
    return 1 << max(n - 1, 0).bit_length()
