# mypy: allow-untyped-defs, allow-untyped-decorators
"""2ˣ and 1/x as the hardware has them: one instruction each, good to an ulp or two of fp32.

Triton's own exp2 and division also get results below 2⁻¹²⁶ and the far ends of the range right. That takes three to five
more instructions, which a kernel that has a few dozen per element of its memory's time cannot spare. Here what is that
small is zero. The interpreter does not know the hardware's instructions, and takes the plain way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rush.kernels import support

INTERPRETED = tl.constexpr(support.INTERPRETED)

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) is exp2(x · LOG2_E)."""


@triton.jit
def exp2(x):
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x):
    if INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
