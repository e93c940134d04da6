"""From what was seen to what is proved: each technique of a run judged by its own evidence."""

from __future__ import annotations

from collections.abc import Iterable

from rush.techniques.api.contract import Observation, Proof, Use


def prove(uses: Iterable[Use], seen: Observation) -> dict[str, Proof]:
    """For every technique in use, whether it took effect and what shows it."""
    headless = not seen.facts.get("holds_head", True)
    proved = [use for use in uses if not (headless and use.technique.head_only)]
    return {use.technique.name: use.technique.evidence(seen, use.knobs) for use in proved}
