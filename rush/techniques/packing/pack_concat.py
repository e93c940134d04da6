"""Concatenate and cut: all documents in one line, a row every `batch.sequence` tokens.

This is how pretraining packs: no padding at all, one shape, no special attention. But rows begin and end in the
middle of documents, which then lose their beginning, and a document sees the ones before it in its row: an
answer may attend to another conversation's question. In pretraining that does little harm; fine-tuning on short
conversations learns something else than from each by itself, so what is learned is not compared. `pack_best_fit`
and `flatten` waste hardly more and keep documents whole and apart. What is left after the last full row of an
epoch, less than a row, is dropped.
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
    """Rows of one length with more than one document on average, not told apart, and no padding but empty rows."""
    found = packing_stats(seen)
    if found is None:
        return Proof(False, "no row cut from concatenated documents was seen")
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
