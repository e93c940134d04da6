"""Our own attention for CPUs: exact, without materializing the score matrix, in C++ with SIMD.

Plain attention on a CPU is a batched matmul, a softmax that reads and writes all scores several times, and
another matmul, with copies between. torch's flash attention for CPUs works in tiles, with library calls too
small to be fast where sequences and head dims are short. This kernel takes 16 queries at a time with all the
keys they see: the scores stay in a core's cache, so nothing is rescaled; the small matmuls keep their tiles
in registers; and keys above the diagonal or in other documents are skipped. It wins most at short sequences.
Threads parallelize over rows and key/value heads, so a single long row with few heads leaves cores idle. The
kernel is built at first use (half a minute, once).
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.techniques.api.evidence import attention_ran
from rush.techniques.api.features import no_score_cap
from rush.techniques.api.seams import needs_kernels, set_attention_core
from rush.techniques.attention.tiled import GROUPED_MEMORY, supported_head_dim
from rush.techniques.attention.triton_attention import DocumentBounds, TritonCore


def apply(build: api.Build, knobs: api.Knobs) -> None:
    set_attention_core(build.model, TritonCore, DocumentBounds())


technique = api.Technique(
    name="cpu_attention",
    stage=api.Stage.MODEL,
    apply=apply,
    requires=(
        api.Requirement(
            "it runs on a CPU; on a GPU use flash_attention, cudnn_attention or triton_attention",
            lambda machine, recipe: machine.device == "cpu",
        ),
        needs_kernels,
        supported_head_dim,
        no_score_cap,
    ),
    conflicts=("cp", "cudnn_attention", "flash_attention", "flex_attention", "triton_attention"),
    claim=api.Claim(
        "attention rate",
        1.3,
        regime="against torch's flash operator for CPUs: fp32, causal, 16 rows of 128 positions, 4 heads of 32, forward and backward",
        source="measured by us on two Neoverse-N1 cores (7.1 against 17.5 ms)",
    ),
    parity=api.Parity.CLOSE,
    evidence=attention_ran(
        kernels=(), ops=("rush::flash_attention_forward", "rush::flash_attention_backward")
    ),
    memory=GROUPED_MEMORY,
    work=(api.WorkEffect("attention", 0.1, "measured on two Neoverse-N1 cores"),),
)
