"""Made-up races. NOT MEASUREMENTS: every number here is invented, by formulas of which the result is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rush.lab.race.findings import findings_of
from tests.report.made_up import HOSTILE
from tests.report.made_up_benches import MACHINE

Table = dict[str, Any]
STEP_TOKENS, STEPS, EVERY = 1000, 40, 2
RECIPE = 'about = "made up"\n'


def power_law(slower: float = 1.0) -> Callable[[float], float]:
    """A loss over tokens, of a learner that needs `slower` times as many tokens."""
    return lambda tokens: 2.0 + 3.0 * math.exp(-tokens / slower / 20_000)


def run(
    letter: str,
    seed: int,
    curve: Callable[[float], float],
    step_s: float,
    *,
    status: str = "ok",
    steps: int = STEPS,
    legs: int = 4,
    first_s: float = 1.0,
) -> Table:
    """A run whose every leg begins with one slow step."""
    per_leg = STEPS // legs
    ends = list(range(per_leg, steps + 1, per_leg))
    return {
        "contender": letter,
        "seed": seed,
        "status": status,
        "reason": None if status in ("ok", "reached", "running") else "the loss is NaN at step 12.",
        "legs": [
            {
                "first": end - per_leg + 1,
                "last": end,
                "place": at,
                "started": None,
                "wall_s": 30.0,
                "load": 1.0,
            }
            for at, end in enumerate(ends)
        ],
        "losses": [curve(STEP_TOKENS * step) for step in range(1, steps + 1)],
        "step_s": [step_s + (first_s if step % per_leg == 0 else 0.0) for step in range(steps)],
        "validations": [
            {"step": step, "tokens": STEP_TOKENS * step, "loss": curve(STEP_TOKENS * step)}
            for step in range(EVERY, steps + 1, EVERY)
        ],
    }


def race(runs: Sequence[Table] | None = None, **rest: Any) -> Table:
    """A record: A, and B with steps 1.5 times as fast that needs 1.2 times the tokens, over three seeds."""
    if runs is None:
        runs = [
            made
            for number, seed in enumerate((1, 2, 3))
            for made in (
                run("A", seed, power_law(1.0 + 0.01 * number), 0.3),
                run("B", seed, power_law(1.2 + 0.015 * number), 0.2),
            )
        ]
    letters = list(dict.fromkeys(str(one["contender"]) for one in runs))
    record: Table = {
        "format": 1,
        "name": "tiny",
        "started": "2026-11-18T20:00:00+00:00",
        "finished": "2026-11-18T20:30:00+00:00",
        "why_ended": None,
        "machine": MACHINE,
        "contenders": [
            {"letter": letter, "name": f"tiny {letter.lower()}=1", "recipe": RECIPE, "digest": letter,
             "step_tokens": STEP_TOKENS, "steps": STEPS, "techniques": []}
            for letter in letters
        ],
        "seeds": sorted({int(one["seed"]) for one in runs}),
        "tokens": STEP_TOKENS * STEPS,
        "every_tokens": STEP_TOKENS * EVERY,
        "num_legs": 4,
        "until_loss": None,
        "budget_s": None,
        "spent_s": 700.0,
        "validate_sequences": 32,
        "sequence": 128,
        "corpus": {"digest": "d", "source": "python-stdlib", "training_tokens": 3_000_000, "held_out_tokens": 50_000},
        "differences": [["optimizer.lr", *("0.002" for _ in letters)]],
        "runs": list(runs),
        "depths": [],
        "findings": [],
        **rest,
    }  # fmt: skip
    found: Any = record
    record["depths"], record["findings"] = findings_of(found)
    return record


def unfinished_race() -> Table:
    """Interrupted in its second leg; the second seed has not begun."""
    return race(
        [
            run("A", 1, power_law(), 0.3, status="running", steps=20),
            run("B", 1, power_law(1.2), 0.2, status="running", steps=10),
            run("A", 2, power_law(), 0.3, status="waiting", steps=0),
            run("B", 2, power_law(1.2), 0.2, status="waiting", steps=0),
        ],
        finished=None,
    )


def broken_race() -> Table:
    """Three contenders, of which one diverged and one failed."""
    return race(
        [
            run("A", 1, power_law(), 0.3),
            run("B", 1, power_law(), 0.2, status="diverged", steps=10),
            run("C", 1, power_law(), 0.1, status="failed", steps=0),
        ]
    )


def hostile_race() -> Table:
    record = race()
    record["name"] = HOSTILE
    for one in record["contenders"]:
        one["name"] = one["recipe"] = HOSTILE
    record["differences"] = [[HOSTILE, HOSTILE, HOSTILE]]
    record["runs"][0]["reason"] = HOSTILE
    record["why_ended"] = HOSTILE
    record["corpus"]["source"] = HOSTILE
    return record


def empty_race() -> Table:
    return race(
        [
            run("A", 1, power_law(), 0.3, status="waiting", steps=0),
            run("B", 1, power_law(), 0.3, status="waiting", steps=0),
        ],
        finished=None,
    )
