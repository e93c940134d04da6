"""How GELU is measured. Liger has it only as GEGLU, so it is no contender."""

from __future__ import annotations

from rush.kernels import study
from rush.kernels.gelu import gelu, reference
from rush.kernels.study import Target

STUDY = study.matrix_study(
    "gelu",
    "GPT-2's activation (tanh approximation); elementwise, so it is memory-bound.",
    reference.gelu,
    (study.ours(gelu), *study.torch_pair(reference.gelu)),
    (2, 3),  # read and written; then two read and one written
    (Target("ceiling", ("forward", "both"), at_least=0.85),),
)
