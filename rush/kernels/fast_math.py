# mypy: allow-untyped-defs, allow-untyped-decorators
"""exp2 and 1/x as single hardware instructions, accurate to an ulp or two of fp32.

Triton's own exp2 and division also handle denormals and the ends of the range, which takes three to five more
instructions: too many for a memory-bound kernel with a few dozen per element. Here denormals flush to zero. The
interpreter uses the plain operations.
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
