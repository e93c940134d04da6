"""Requirements on features of a model's shape, which several techniques have alike. Each names what to use instead."""

from __future__ import annotations

from rush.techniques.api.contract import Requirement

no_windows = Requirement(
    "its kernel has no sliding window, which this model's layers have; use flash_attention, flex_attention or triton_attention "
    "(on a CPU flash_attention or cpu_attention)",
    lambda machine, recipe: not recipe.shape().has_windows,
)
no_score_cap = Requirement(
    "its kernel has no soft cap of scores, which this model has; use flex_attention (on a CPU plain attention: no attention "
    "technique)",
    lambda machine, recipe: recipe.shape().attention_softcap is None,
)
no_logit_cap = Requirement(
    "its kernel has no soft cap of logits, which this model has; use chunked_loss",
    lambda machine, recipe: recipe.shape().logit_softcap is None,
)
