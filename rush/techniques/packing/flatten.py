"""Padding-free batches: a micro batch is one long row of whole documents with cumulative sequence lengths.

Linear layers and norms work per token, only attention mixes positions; and a varlen kernel takes one row of
documents and their offsets. So only the end of the row is padding (batch.micro × batch.sequence tokens,
always the same shape, which suits a compiler), and that is filled from the documents ahead. Position ids
restart with each document, and none sees another, bit for bit. It wins over `pack_best_fit` where rows are
too short to be filled well; otherwise the two are alike. Without a kernel that skips other documents (plain
attention, or the CPU's) all scores of the long row are computed, batch.micro times as many: it loses there.
Parity is judged on steps of the same documents.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.data.packing import Flatten
from rush.techniques.packing.packings import (
    WINDOW_MEANING,
    fine_tuning,
    others,
    packing_stats,
    use_packing,
    window_seen,
)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    use_packing(build, Flatten(int(knobs["window"])))


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """All micro batches are one row of one length, with several isolated documents."""
    found = packing_stats(seen)
    if found is None:
        return api.Proof(False, "no flattened micro batch was seen")
    held = found.isolated == found.micro_batches == found.rows and len(found.shapes) == 1
    return api.Proof(held and found.documents > found.rows, found.say(seen.compiled.recompiles))


technique = api.Technique(
    name="flatten",
    stage=api.Stage.DATA,
    apply=apply,
    requires=(
        fine_tuning,
        api.Requirement(
            "its micro batch is one row, which accumulate cannot split; lower batch.micro instead",
            lambda machine, recipe: not api.used(recipe, "accumulate"),
        ),
    ),
    conflicts=others("flatten"),
    knobs={"window": api.KnobRange((1024, 128, 8192), WINDOW_MEANING, window_seen)},
    claim=api.Claim(
        "tokens_per_s",
        1.0,
        regime="up to, over padding, where lengths vary as in FLAN; less where they are alike",
        source="Hugging Face blog, Packing with Flash Attention 2, August 2024; Kundu et al. 2024, arXiv:2407.09105",
        relative_to="pad",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
)
