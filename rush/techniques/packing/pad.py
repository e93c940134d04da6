"""Dynamic padding: rows are padded to the longest of their micro batch, not to `batch.sequence`.

Padding tokens have no labels and cost as much as any other. Padding to the longest row of the micro batch
wins the more the shorter the conversations are; one long row among short ones costs its whole micro batch.
Every new length would recompile, so with `compile` lengths are rounded up to one of a few (`shapes`). What
the model computes for a document does not change: causal attention never sees what comes after.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.data.packing import Pad
from rush.techniques.packing.packings import (
    SHAPES,
    allow_shapes,
    few_shapes,
    others,
    packing_stats,
    use_packing,
)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    shapes = int(knobs["shapes"])
    use_packing(build, Pad(shapes))
    allow_shapes(build, shapes)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Micro batches with one document per row and, unless one shape is asked for, rows shorter than batch.sequence."""
    found, shapes = packing_stats(seen), int(knobs["shapes"])
    if found is None:
        return api.Proof(False, "no padded micro batch was seen")
    lengths = {length for _, length in found.shapes}
    fewer = min(lengths) < found.sequence if shapes != 1 else lengths == {found.sequence}
    held = found.documents <= found.rows and not found.isolated and (shapes == 0 or len(lengths) <= shapes)
    return api.Proof(held and fewer, found.say(seen.compiled.recompiles))


technique = api.Technique(
    name="pad",
    stage=api.Stage.DATA,
    apply=apply,
    requires=(
        api.Requirement(
            "it pads conversations: it needs objective.kind = sft or dpo (pretraining reads one token "
            "stream)",
            lambda machine, recipe: recipe.objective.kind != "lm",
        ),
        few_shapes("pad"),
    ),
    conflicts=others("pad"),
    knobs={"shapes": SHAPES},
    claim=api.Claim(
        "processed tokens",
        -0.89,
        regime="at most: the share of padding in GLUE-cola padded to 128 tokens; up to half in common datasets",
        source="Krell et al. 2021, arXiv:2107.02027",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect("activations", 1.0, "unchanged where a conversation fills its row, less elsewhere"),
    ),
    settings=(api.Setting(), api.Setting({"shapes": 4})),
)
