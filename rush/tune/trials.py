"""The trials of a search, on the lab's bench: each in a fresh process, each kept as a file.

A step of a large recipe takes many seconds, and a search runs dozens of trials. So trials use smaller steps: the same number
of tokens for all candidates, a power of two below the recipe's. The optimizer step then weighs about a per cent more than in
training. Parity is judged on a small batch; of a model that does not fit in fp32, on fewer layers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rush.lab.ladder.ladder_file import LadderPlan, MeasureConfig, ParityConfig, SearchConfig
from rush.lab.parity.judge import in_further_process, parity_of, timed_reference
from rush.lab.parity.trace import without_speed
from rush.lab.statistics import center
from rush.lab.trial.runner import CURVE_S, Bench
from rush.lab.trial.timing import COMMON, rates, timed
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe
from rush.recipe_io import CONSTANT_BATCH, changed
from rush.records.life import LifeRecord
from rush.records.loss_curves import CLOSE_STEPS, unsteady
from rush.techniques import Parity, registry
from rush.tune.budget import Budget
from rush.tune.forecast import Planner, Prediction
from rush.tune.goal import TrialLimit, TuneResult

RATE = "optimizer.lr"
STEP_S = 0.5
"""Predicted time of a step in trials, at most."""
FEWEST_STEPS = 8
LONG_PROOF, SHORT_PROOF = (200, 2048), (CLOSE_STEPS, 4096)
"""Maximum steps of a parity trace, and tokens per step. The long proof is for techniques that promise no more than the same loss
curve. Seen on an H200: an fp8 LM head that was equal over 100 steps, and half a nat behind after 200."""
CALMER = 4.0
"""Where the loss of plain fp32 itself jumps, parity is traced at a learning rate this many times smaller. Seen with `tiny`: at
4e-3 single steps jump from 6.4 to 9.1, at 1e-3 none does."""
PARITY_SHARE = 0.2
"""Fraction of the budget for tracing plain fp32 and its perturbed run."""
CURVE_SHARE = 0.05
"""Fraction of the budget for plain fp32 on the timed batches, and as much for its perturbed run; at most `CURVE_S`."""
LIMIT_S = 900.0
RANK = MeasureConfig(
    windows=4, window_ms=150.0, warmup_max_steps=10, warmup_max_s=1.0, timed_max_s=4.0, limit_s=LIMIT_S
)
LONG = MeasureConfig(
    windows=12, window_ms=250.0, warmup_max_steps=20, warmup_max_s=3.0, timed_max_s=10.0, limit_s=LIMIT_S
)
UNEVEN = {"windows": 12, "window_ms": 1.0, "warmup_max_steps": COMMON - 1}
"""Batches of conversations differ, and samples of one process vary by a third. So a sample is one step and timing starts at the
ninth, in short and long trials, so that recipes are compared on paired batches (`rush/lab/paired.py`)."""
ONCE = MeasureConfig(
    windows=1, window_ms=1.0, warmup_max_steps=1, warmup_max_s=1.0, timed_max_s=1.0, limit_s=LIMIT_S
)
MEASURES = {"rank": RANK, "confirm": RANK, "length": ONCE}
"""How a kind of trial is timed; all others long."""


@dataclass(frozen=True)
class TuneSettings:
    """Decided once per search and recorded, so that it can be resumed."""

    tokens: int
    """Tokens per step in trials."""
    parity_steps: int = 0
    """0 until the first trial has measured the speed of this machine."""
    parity_micro: int = 1
    parity_tokens: int = 0
    """Tokens per step of a parity trace."""
    parity_changes: dict[str, Any] = field(default_factory=dict)


def kept_of(recipe: Recipe) -> frozenset[str]:
    """The recipe's techniques that decide what is learned, which the reference has too."""
    known = registry()
    return frozenset(
        n for n, _ in recipe.technique_uses() if n in known and known[n].parity is Parity.CHANGES
    )


def plain_of(recipe: Recipe) -> Recipe:
    """Plain fp32, with the recipe's adapters."""
    kept = kept_of(recipe)
    entries = [{"name": n, **knobs} if knobs else n for n, knobs in recipe.technique_uses() if n in kept]
    return changed(recipe, {"techniques": entries})


def trial_tokens(start: Recipe, planned: Sequence[Recipe], planner: Planner) -> int:
    """Tokens per step in trials: the recipe's, halved while a step of the first planned recipe would take too long and all micro
    batches divide it."""
    found, tokens = planner.predict(planned[0]), start.step_tokens
    enough = STEP_S * found.tokens_per_s if isinstance(found, Prediction) else tokens
    fit = math.lcm(*(recipe.micro for recipe in (start, *planned))) * start.batch.sequence
    while tokens > enough and tokens % 2 == 0 and tokens // 2 % fit == 0:
        tokens //= 2
    return tokens


def parity_settings(
    settings: TuneSettings, recipe: Recipe, planner: Planner, slower: float, budget_s: float, *, curves: bool
) -> TuneSettings:
    """A small batch, fewer layers where plain fp32 does not fit, and the steps that fit into the budget of parity.

    `slower`: how many times slower than predicted this machine is. `curves`: whether candidates may promise no more than the
    same loss curve, which takes many steps to prove.
    """
    micro, tokens, changes = recipe.micro, recipe.step_tokens, dict[str, Any]()
    most, largest = LONG_PROOF if curves else SHORT_PROOF
    if tokens > largest:
        micro = max(1, min(micro, largest // recipe.batch.sequence))
        tokens = micro * recipe.batch.sequence
    plain = changed(plain_of(recipe), {"batch.micro": micro, "batch.total_tokens": tokens, **CONSTANT_BATCH})
    layers, found = recipe.shape().num_layers, planner.predict(plain)
    while layers > 1 and recipe.model.init_from is None and isinstance(found, Prediction) and not found.fits:
        layers //= 2
        changes = {"model.shape.num_layers": layers}
        found = planner.predict(changed(plain, changes))
    steps = most
    if isinstance(found, Prediction):
        step_s = slower * tokens / found.tokens_per_s
        steps = max(FEWEST_STEPS, min(most, int(PARITY_SHARE * budget_s / (2 * step_s))))
    return replace(
        settings,
        parity_steps=steps,
        parity_micro=micro,
        parity_tokens=tokens,
        parity_changes=changes,
    )


def trial_plan(
    recipe: Recipe, settings: TuneSettings, measure: MeasureConfig, micro: int | None = None
) -> LadderPlan:
    """How the bench times and traces. Short trials do not depend on the parity settings. Parity is traced at the candidate's micro
    batch where that divides its tokens, because it is part of what is proved."""
    alike = recipe.objective.kind == "lm" or measure is ONCE
    timing = measure if alike else measure.model_copy(update=UNEVEN)
    if measure is not LONG or not settings.parity_steps:
        return LadderPlan("tune", plain_of(recipe), (), timing, ParityConfig(), SearchConfig())
    if micro is None or settings.parity_tokens % (micro * recipe.batch.sequence):
        micro = settings.parity_micro
    batch = {"batch.micro": micro, "batch.total_tokens": settings.parity_tokens, **CONSTANT_BATCH}
    parity = ParityConfig(steps=settings.parity_steps, changes=settings.parity_changes)
    return LadderPlan("tune", changed(plain_of(recipe), batch), (), timing, parity, SearchConfig())


class Trials:
    """The `Laboratory` of a search: benches in one folder, with short and long timings."""

    def __init__(
        self,
        bench: Bench,
        recipe: Recipe,
        settings: TuneSettings,
        planner: Planner,
        budget: Budget,
        *,
        curves: bool,
    ) -> None:
        self.bench, self.recipe, self.plain, self.curves = bench, recipe, plain_of(recipe), curves
        self.settings, self.planner, self.budget = settings, planner, budget
        self.slower = 1.0
        """Predicted speed over the speed of the first trial."""
        self.curve_s = min(CURVE_S, CURVE_SHARE * budget.total_s)
        self._counted: set[float] = set()
        """Times of curves that are on the budget."""

    def reference(self, limit_s: float) -> TuneResult:
        if not self.settings.parity_steps:
            self.settings = parity_settings(
                self.settings, self.recipe, self.planner, self.slower, self.budget.total_s, curves=self.curves
            )
        result = self._traced(limit_s)
        if result.status == "ok" and RATE not in self.settings.parity_changes and self._jumps():
            calmer = {**self.settings.parity_changes, RATE: self.recipe.optimizer.lr / CALMER}
            before, self.settings = self.settings, replace(self.settings, parity_changes=calmer)
            again = self._traced(limit_s - result.wall_s)
            if again.status != "ok":
                self.settings = before
            result = replace(result, wall_s=result.wall_s + again.wall_s)
        self.budget.curve_s = min(result.wall_s, 2 * self.curve_s)
        return result

    def _traced(self, limit_s: float) -> TuneResult:
        outcome = self._bench(LONG).run(
            self.plain, "reference", first=True, timed=False, perturbed=True, limit_s=limit_s, keep_late=False
        )
        return _result(outcome)

    def _jumps(self) -> bool:
        bench = self._bench(LONG)
        wanted = bench.parity_recipe(self.plain)
        plain, perturbed = bench.trace(wanted), bench.trace(wanted, rounded=True)
        if plain is None or perturbed is None:
            return False
        return unsteady(plain["losses"], perturbed["losses"])

    def trial(self, kind: str, recipe: Recipe, limit: TrialLimit) -> TuneResult:
        bench = self._bench(MEASURES.get(kind, LONG), recipe.micro)
        # Memory peaks in the second micro batch: gradients are allocated.
        tokens = 2 * recipe.batch.sequence if kind == "length" else self.settings.tokens
        short = changed(recipe, {"batch.total_tokens": tokens, **CONSTANT_BATCH})
        outcome = bench.run(
            short,
            kind,
            first=kind == "prove",
            limit_s=limit.seconds,
            keep_late=limit.patient,
            slowest=limit.slowest,
        )
        parity = None
        if kind == "prove" and outcome.status == "ok":
            parity = self._parity(bench, short, outcome, limit.seconds)
            if (rate := self.settings.parity_changes.get(RATE)) is not None:
                parity["why"] += (
                    f"; at a learning rate of {rate:g}, since at {self.recipe.optimizer.lr:g} plain fp32 itself jumps"
                )
        result = _result(outcome, parity)
        if not self.settings.parity_steps and result.ok:
            predicted = self.planner.predict(short)
            if isinstance(predicted, Prediction):
                self.slower = max(
                    1.0, predicted.tokens_per_s / center([rates(outcome.found["timing"], "processed")])
                )
        return result

    def _parity(self, bench: Bench, short: Recipe, outcome: Outcome, limit_s: float) -> dict[str, Any]:
        """The ladder's verdict: of the first steps, the timed ones, and those after; and what the earlier processes of the recipe,
        which ranked it, were given and passed on."""
        plain, timed = self._bench(LONG), None
        if without_speed(short).techniques == self.plain.techniques:
            limit_s = max(limit_s - outcome.wall_s, 2 * self.curve_s)
            timed = timed_reference(bench, short, outcome, plain.plan.base, limit_s)
        if timed is not None and timed.wall_s not in self._counted:
            self._counted.add(timed.wall_s)
            self.budget.trials_s += timed.wall_s
            self.budget.curve_s = 0.0
        parity = parity_of(bench, short, plain.parity_recipe(self.plain), outcome, timed)
        for kind in ("rank", "confirm", "decide"):
            other = self._bench(MEASURES.get(kind, LONG), short.micro).known(short, kind)
            if other is not None and other.status == "ok":
                parity = in_further_process(parity, other, outcome)
        return parity

    def life(self, recipe: Recipe, limit_s: float) -> LifeRecord:
        # With the compiler's cache of the trials.
        timed = changed(recipe, {"batch.total_tokens": self.settings.tokens, **CONSTANT_BATCH})
        return self._bench(LONG).life(recipe, limit_s, timed)

    def _bench(self, measure: MeasureConfig, micro: int | None = None) -> Bench:
        plan = trial_plan(self.recipe, self.settings, measure, micro)
        return replace(self.bench, plan=plan, curve_s=self.curve_s, curve_steps=FEWEST_STEPS)


def _result(outcome: Outcome, parity: dict[str, Any] | None = None) -> TuneResult:
    timing = outcome.found.get("timing") or {}
    return TuneResult(
        outcome.status,
        outcome.reason,
        tuple(rates(timing)) if timing else (),
        timing.get("peak_memory_bytes", 0),
        outcome.wall_s,
        outcome.found.get("evidence", ()),
        parity,
        {
            "counted": timing["counted"],
            "processed": center([rates(timing, "processed")]),
            "waits": timing["data_wait_ms"] / 1000 / statistics.median(timing["samples_s"]),
            "hopeless": timing["hopeless"],
            "load": timing["environment"].get("load"),
        }
        if timing
        else {},
        (timed(timing),) if timing else (),
    )
