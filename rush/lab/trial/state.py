"""What the trials of one recipe show so far; the rung state and the scaling point add their own figures to it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rush.lab.paired import Timed
from rush.lab.trial.found import TimingFound
from rush.lab.trial.timing import rates, timed
from rush.lab.trial.trial import Outcome


class TrialState:
    outcomes: list[Outcome]
    refused: str | None
    """Why the recipe cannot be measured at all."""
    idle: str | None = None
    """Why what is required did nothing, whatever its own evidence says."""

    @property
    def evidence(self) -> list[dict[str, Any]]:
        rows = list(self.outcomes[0].found.get("evidence", [])) if self.outcomes else []
        if self.idle is None:
            return rows
        return [
            {
                **row,
                "took_effect": False,
                "what": f"{self.idle}, and its evidence ({row['what']}) proves nothing",
            }
            if row["technique"] in self.required and row["took_effect"]
            else row
            for row in rows
        ]

    @property
    def required(self) -> Collection[str]:
        """Techniques without whose effect there is nothing to report."""
        raise NotImplementedError

    @property
    def status(self) -> str:
        if self.refused is not None:
            return "unsupported"
        if self.outcomes[0].status != "ok":
            return self.outcomes[0].status
        idle = any(e["technique"] in self.required and not e["took_effect"] for e in self.evidence)
        return "no_effect" if idle else "ok"

    @property
    def without_effect(self) -> list[str]:
        """A sentence for each technique that did not take effect."""
        idle = [e for e in self.evidence if not e["took_effect"]]
        return [f"{e['technique']} did not take effect: {e['what']}" for e in idle]

    @property
    def timings(self) -> list[TimingFound]:
        return [o.found["timing"] for o in self.outcomes if o.status == "ok" and "timing" in o.found]

    @property
    def processes(self) -> list[list[float]]:
        """Tokens per second of the counted kind: the samples of every process."""
        return [rates(timing) for timing in self.timings]

    @property
    def timed(self) -> list[Timed]:
        """The same samples with their batches."""
        return [timed(timing) for timing in self.timings]

    @property
    def measured(self) -> bool:
        return bool(self.processes)
