"""The gap between two loss curves in per cent of steps, on curves of which it is known."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rush.records.loss_curves import compare_curves
from rush.records.parity import parity_again
from rush.records.step_gap import gap_in_steps, more_steps, more_steps_words, parity_words

RESULTS = Path(__file__).resolve().parents[2] / "results"


def curve(steps: int, slower: float = 1.0, noise: float = 0.0) -> list[float]:
    """A loss that falls as the logarithm of the steps, of a learner that needs `slower` times as many."""
    rng = np.random.default_rng(3)
    return [6.0 - 0.8 * math.log(step / slower) + noise * rng.normal() for step in range(1, steps + 1)]


@pytest.mark.parametrize("slower", [0.97, 1.0, 1.02, 1.05])
@pytest.mark.parametrize("steps", [40, 200])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_steps_that_a_slower_learner_needs_are_found(slower: float, steps: int, noise: float) -> None:
    # Both read the same batches, so the noise is theirs in common; it blurs the slope only.
    found = more_steps(curve(steps, slower, noise), curve(steps, 1.0, noise))
    assert found == pytest.approx(slower - 1, abs=0.15 * abs(slower - 1) + 1e-12)


def test_without_a_clear_fall_nothing_is_said() -> None:
    flat = [3.0 + 0.01 * (-1) ** step for step in range(40)]
    assert more_steps([loss + 0.1 for loss in flat], flat) is None
    rising = [3.0 + 0.1 * step for step in range(40)]
    assert more_steps(rising, rising) is None
    assert more_steps([1.0, 0.9], [1.0, 0.9]) is None
    assert more_steps([math.nan] * 8, [1.0 - 0.1 * step for step in range(8)]) is None
    assert "cannot be said, because plain fp32's loss does not fall" in more_steps_words(None)


def test_a_verdict_on_a_curve_says_the_gap_in_steps() -> None:
    judged = compare_curves(curve(200, 1.03), curve(200), None)
    assert judged.verdict == "equal"
    assert judged.why.endswith("the gap is 2.9\N{NO-BREAK SPACE}% more steps for the same loss")
    assert judged.more_steps == pytest.approx(0.03, rel=0.1)
    worse = compare_curves(curve(200, 1.6), curve(200), None)
    assert worse.verdict == "different"
    assert "more steps for the same loss" in worse.why


def test_equal_is_never_bare_where_only_the_curve_is() -> None:
    record: dict[str, Any] = {
        "verdict": "equal", "class": "STATISTICAL", "measured": "statistical",
        "losses": curve(200, 1.03), "reference_losses": curve(200),
    }  # fmt: skip
    assert parity_words(record) == "equal, 2.9\N{NO-BREAK SPACE}% more steps"
    assert parity_words({**record, "measured": "rounding"}) == "equal"
    assert parity_words({**record, "verdict": "different"}) == "different"
    assert parity_words({**record, "losses": []}) == "equal, gap in steps not known"
    assert parity_words({"verdict": "equal", "class": "CLOSE"}) == "equal"


def test_recorded_fp8_recipes_say_what_they_cost() -> None:
    record = json.loads((RESULTS / "models-fp8-head-h200" / "models.json").read_text())
    parities = [
        parity_again(ours["rung"].get("parity"))
        for workload in record["workloads"]
        for ours in workload["ours"]
    ]
    assert any("% " in gap_in_steps(parity) and "steps" in gap_in_steps(parity) for parity in parities)
