"""A technique that raises while it is applied."""

from __future__ import annotations

from collections.abc import Mapping

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique

BROKEN = True


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    if BROKEN:
        raise ValueError("planted in apply")


technique = Technique(
    name="in_apply",
    stage=Stage.MODEL,
    apply=apply,
    claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT,
    evidence=lambda seen, knobs: Proof(True, "planted"),
)
