"""Concatenate and split: all documents in one token stream, a row every `batch.sequence` tokens.

This is how pretraining packs: no padding at all, one shape, no special attention. But rows begin and end in
the middle of documents, and a document sees the ones before it in its row: an answer may attend to another
conversation's question. In pretraining that does little harm; in fine-tuning on short conversations it
changes what is learned, so parity is not judged. `pack_best_fit` and `flatten` waste hardly more and keep
documents whole and isolated. What is left after the last full row of an epoch is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

from rush.data.packing import Concat
from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Observation, Parity, Proof, Stage, Technique
from rush.techniques.packing.packings import fine_tuning, others, packing_stats, use_packing


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    use_packing(build, Concat())


def evidence(seen: Observation, knobs: Mapping[str, Knob]) -> Proof:
    """Rows of one length with more than one document on average, not isolated, and no padding but empty rows."""
    found = packing_stats(seen)
    if found is None:
        return Proof(False, "no row of concatenated documents was seen")
    length = max(length for _, length in found.shapes)
    held = not found.isolated and len(found.shapes) == 1 and found.padding % length == 0
    return Proof(held and found.documents > found.rows, found.say(seen.recompiles))


technique = Technique(
    name="pack_concat",
    stage=Stage.DATA,
    apply=apply,
    requires=(fine_tuning,),
    conflicts=others("pack_concat"),
    claim=Claim(
        "padding share",
        -1.0,
        regime="always; what it costs: best-fit packing in its place was better by 4.7 % in reading comprehension and "
        "16.8 % in following context",
        source="Ding et al. 2024, arXiv:2404.10830",
    ),
    parity=Parity.CHANGES,
    evidence=evidence,
)
