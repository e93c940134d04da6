"""Best-fit packing: several documents per row, none split, none seeing another.

Within a window of the shuffled order, documents go longest first into the row with the least remaining space
that fits. Rows of `batch.sequence` tokens end up almost full, where padding may fill half of them. Attention
stays within each document and position ids restart with it, so a document is computed as if it were alone:
changing one changes nothing, bit for bit, in another. Plain attention masks for that and still computes all
scores; flash, flex and our Triton kernel skip other documents. A document longer than a row is truncated. A
step holds more documents than with padded rows, so the learning rate may need to change; parity is judged on
steps of the same documents.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.data.packing import BestFit
from rush.techniques.packing.packings import (
    WINDOW_MEANING,
    fine_tuning,
    others,
    packing_stats,
    use_packing,
    window_seen,
)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    use_packing(build, BestFit(int(knobs["window"])))


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """All micro batches have one shape and isolated documents, more than one per row on average."""
    found = packing_stats(seen)
    if found is None:
        return api.Proof(False, "no row of several documents was seen")
    held = found.isolated == found.micro_batches and len(found.shapes) == 1
    return api.Proof(held and found.documents > found.rows, found.say(seen.compiled.recompiles))


technique = api.Technique(
    name="pack_best_fit",
    stage=api.Stage.DATA,
    apply=apply,
    requires=(fine_tuning,),
    conflicts=others("pack_best_fit"),
    knobs={"window": api.KnobRange((4096, 256, 1024, 16384), WINDOW_MEANING, window_seen)},
    claim=api.Claim(
        "tokens_per_s",
        1.0,
        regime="sequences a second, BERT pretraining at sequence 512, where half of the tokens were padding",
        source="Krell et al. 2021, arXiv:2107.02027; best fit: Ding et al. 2024, arXiv:2404.10830",
        relative_to="the base",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
)
