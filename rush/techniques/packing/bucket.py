"""Length bucketing: conversations of similar length share a micro batch, so that little is padding.

Within a large window of the shuffled order, documents are sorted by length and split into micro batches;
then the micro batches are shuffled. It needs no special attention, so it works with every attention kernel.
The price: a micro batch holds documents of similar length, so with few micro batches per step the gradient
is noisier, and steps take unequal time. Packing wastes still less, but attention must then isolate
documents. Parity is judged on steps of the same documents.
"""

from __future__ import annotations

import rush.techniques.api.contract as api
from rush.data.packing import Bucket
from rush.techniques.packing.packings import (
    SHAPES,
    allow_shapes,
    few_shapes,
    fine_tuning,
    more_than_one_row,
    others,
    packing_stats,
    use_packing,
    window_seen,
)


def apply(build: api.Build, knobs: api.Knobs) -> None:
    shapes = int(knobs["shapes"])
    use_packing(build, build.facts.note(Bucket(shapes, int(knobs["window"]))))
    allow_shapes(build, shapes)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Less padding in the micro batches than without sorting."""
    found, packing = packing_stats(seen), seen.facts.noted(Bucket)
    if found is None or packing is None or not packing.unsorted["tokens"]:
        return api.Proof(False, "no micro batch of documents sorted by length was seen")
    unsorted = packing.unsorted["padding"] / packing.unsorted["tokens"]
    held = found.documents <= found.rows and not found.isolated and found.padding_share < unsorted
    return api.Proof(held, f"{found.say(seen.compiled.recompiles)}; unsorted it would be {unsorted:.1%}")


technique = api.Technique(
    name="bucket",
    stage=api.Stage.DATA,
    apply=apply,
    requires=(fine_tuning, more_than_one_row, few_shapes("bucket")),
    conflicts=others("bucket"),
    knobs={
        "shapes": SHAPES,
        "window": api.KnobRange(
            (100, 10, 1000), "micro batches whose documents are sorted together", window_seen
        ),
    },
    claim=api.Claim(
        "training time",
        -0.78,
        regime="CamemBERT on X-NLI, rows of up to 493 tokens, one consumer GPU: 4 h 38 to 1 h 01 with rows padded to the "
        "longest, batches of uniform length and mixed precision together",
        source="M. Benesty, Divide Hugging Face Transformers training time by 2 or more, May 2020",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    settings=(api.Setting(), api.Setting({"shapes": 4})),
)
