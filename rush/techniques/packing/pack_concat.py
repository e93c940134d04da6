"""Concatenate and split: all documents in one token stream, a row every `batch.sequence` tokens.

This is how pretraining packs: no padding at all, one shape, no special attention. But rows begin and end in
the middle of documents, and a document sees the ones before it in its row: an answer may attend to another
conversation's question. In pretraining that does little harm; in fine-tuning on short conversations it
changes what is learned, so parity is not judged. `pack_best_fit` and `flatten` waste hardly more and keep
documents whole and isolated. What is left after the last full row of an epoch is dropped.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.data.packing import Concat
from rush.techniques.packing.packings import fine_tuning, others, packing_stats, use_packing


def apply(build: api.Build, knobs: api.Knobs) -> None:
    use_packing(build, Concat())


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Rows of one length with more than one document on average, not isolated, and no padding but empty rows."""
    found = packing_stats(seen)
    if found is None:
        return api.Proof(False, "no row of concatenated documents was seen")
    length = max(length for _, length in found.shapes)
    held = not found.isolated and len(found.shapes) == 1 and found.padding % length == 0
    return api.Proof(held and found.documents > found.rows, found.say(seen.compiled.recompiles))


technique = api.Technique(
    name="pack_concat",
    stage=api.Stage.DATA,
    apply=apply,
    requires=(fine_tuning,),
    conflicts=others("pack_concat"),
    claim=api.Claim(
        "padding share",
        -1.0,
        regime="always; what it costs: best-fit packing in its place was better by 4.7 % in reading comprehension and "
        "16.8 % in following context",
        source="Ding et al. 2024, arXiv:2404.10830",
    ),
    parity=api.Parity.CHANGES,
    evidence=evidence,
)
