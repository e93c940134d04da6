"""From trials to a rung of the record: figures, evidence, parity, gain and verdict.

A speed without proof is not a finding. A rung whose technique is not seen in the profile has "no effect", whatever its tokens
per second. A rung that is faster without parity is "faster but different". A gain is real only if its interval excludes 1; if
it contains 1, the verdict is "no gain" for a narrow interval and "cannot tell" for a wide one (`rush.records.gains`). A rung
that cannot validate, sample, save or resume is "unusable", however fast.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from rush.lab.ladder.ladder_file import Addition
from rush.lab.paired import Floors, Timed, compare, unevenness
from rush.lab.statistics import (
    ALONE_BY,
    DISTURBED,
    Interval,
    Ratio,
    center,
    disturbed,
    logs_of_medians,
    median_interval,
    undisturbed,
)
from rush.lab.trial.state import TrialState
from rush.lab.trial.timing import KINDS, rates
from rush.lab.trial.trial import Outcome
from rush.models import Shape, flops_per_token
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.gains import TIGHT
from rush.records.ladder import DisturbedRecord, GainRecord, RungRecord
from rush.records.life import LifeRecord, broken, life_words
from rush.records.typed import Measured

MOVED_SHARE = 0.05
"""Memory outside of the device, relative to the peak on it, from which it is reported as moved."""
_ELSEWHERE = "more than the rung before, in host memory and in processes it started"
RESTLESS = 1.5
"""Ratio of the ends of the drift's interval above which the machine is too busy to measure."""
FORMULAS = {
    "tokens_per_s": "tokens of one optimizer step, accumulation included, over the time of the step, the wait for "
    "data included; the median of the processes' medians",
    "ci95": "bootstrap, 4000 draws: processes with replacement, then samples inside each; without a disturbed process",
    "disturbed": f"one process of three or more that is over {100 * DISTURBED:g} % slower than every other of its recipe, and "
    f"{ALONE_BY:g} times as far from them as they are from each other; its rung is measured again",
    "gain": "quotient of two medians; its interval is the bootstrap's, and at least what the spread between processes "
    "of one recipe gives; real only if 1 is outside. Where 1 is inside, it is no gain if both ends are within "
    f"{100 * TIGHT:g} % of 1, and cannot be told if not. Where both were timed on the same batches, and these hold unequal "
    "numbers of tokens, it is the median of the quotients batch by batch (`paired`: how many batches), the bootstrap draws "
    "batches and processes, and the spread between processes is computed from the same batches",
    "flops_per_token": "6 · matmul parameters (LM head included, input embedding not) + 6 · layers · hidden · sequence; 4 in place of the "
    "first 6 where the weights are frozen",
    "mfu": "tokens_per_s · flops_per_token / datasheet peak (dense) of the matmuls' dtype",
    "hfu": "as mfu, with the recomputed forward passes",
    "ceiling_fraction": "tokens_per_s · flops_per_token / matmul rate measured on this machine",
    "peak_memory_bytes": "on a GPU the most that tensors took during the timed steps; on a CPU the most the whole "
    "process was resident, and what the processes it started hold",
    "parity": "against plain fp32 from the same weights on the same batches: loss and gradient norm of every step, every "
    "tensor's gradient at step one, the initial weights and their movement. Promised is the tolerance of the technique's class and "
    "dtype, and six times what a perturbed reference run, which starts from weights rounded to bf16, is off at that step; `measured` "
    "is the finest test that it passes (same bits, rounding, statistical with the gap relative to the decrease of the loss, and in "
    "per cent of steps)",
    "timed": "the timed steps against plain fp32 on the same batches: what the loader returned and what reached the model, and the loss "
    "curve, over as many steps as plain fp32 makes in its time (`compared`)",
    "after_timing": "two more steps of the timed run: from its weights on its batches plain fp32 computes loss and gradients, and "
    "AdamW's formula the update",
    "life": "four steps of `rush train` with a validation, a sample and a checkpoint after every second; then the last two once more in a new "
    "process, resumed from the checkpoint of the second, to the same losses",
    "compile_s": "the first step less a usual one: compiling, loading kernels, growing the allocator",
}  # fmt: skip


@dataclass
class RungState(TrialState):
    """A rung being measured: its recipe and the trials made so far."""

    addition: Addition | None
    """None for the base."""
    name: str
    title: str
    recipe: Recipe | None
    """None if the recipe was refused."""
    outcomes: list[Outcome] = field(default_factory=list)
    refused: str | None = None
    over: RungState | None = None
    """The rung it is compared with."""
    parity: dict[str, Any] | None = None
    life: LifeRecord | None = None
    """None where it was not tried."""
    kept: bool = True
    """Whether the rungs above build on it."""
    num_again: int = 0
    """Processes beyond the planned ones, because one seemed disturbed."""

    @property
    def added(self) -> list[str]:
        name = self.addition.technique_name if self.addition else None
        return [name] if name else []

    @property
    def required(self) -> list[str]:
        return self.added

    @property
    def reason(self) -> str | None:
        if self.refused is not None:
            return self.refused
        reasons = [outcome.reason for outcome in self.outcomes[:1] if outcome.reason]
        if self.moved_bytes:
            reasons.append(f"memory moved elsewhere: {self.moved_bytes / 1e6:,.0f} MB {_ELSEWHERE}")
        if self.life is not None and self.life["problem"]:
            reasons.append(self.life["problem"] if self.unusable else life_words(self.life))
        return "; ".join([*reasons, *self.without_effect]) or None

    @property
    def unusable(self) -> bool:
        """Whether its short life is broken."""
        return broken(self.life)

    @property
    def peak_memory(self) -> list[int]:
        return [t["peak_memory_bytes"] for t in self.timings]

    @property
    def moved_bytes(self) -> int:
        """Memory outside of the device in excess of the rung before, if it is part of the reported peak."""
        if self.over is None or not self.measured or not self.over.measured:
            return 0
        here, below = (min(t.get("elsewhere_bytes", 0) for t in s.timings) for s in (self, self.over))
        return here - below if here - below > MOVED_SHARE * min(self.over.peak_memory) else 0


@dataclass(frozen=True)
class Baselines:
    """The references of the figures: ceilings, datasheet peaks and noise floors."""

    ceilings: Mapping[str, Any] | None
    peaks: Mapping[str, float] | None
    floors: Floors
    smaller: float


def rung_of(state: RungState, base: RungState, baselines: Baselines) -> RungRecord:
    """The record of a rung, from its trials so far."""
    techniques = [name for name, _ in state.recipe.technique_uses()] if state.recipe else []
    rung: RungRecord = {
        "name": state.name,
        "title": state.title,
        "adds": state.addition.adds if state.addition else [],
        "techniques": techniques,
        "recipe": write_toml(state.recipe) if state.recipe else "",
        "digest": state.recipe.digest if state.recipe else "",
        "status": state.status,
        "reason": state.reason,
        **_nothing(),
        "kept": state.kept,
        "evidence": state.evidence,
        "parity": state.parity,
        "life": state.life,
        "claim": _claim(state),
    }
    if state.recipe is not None:
        batch = state.recipe.batch
        rung["flops_per_token"] = _work(state)
        rung["step_tokens"], rung["micro"] = state.recipe.step_tokens, state.recipe.micro
        rung["sequence"] = batch.sequence
    ratio = None
    if state.measured:
        rung |= _figures(state, baselines)
        over = state.over
        if over is not None and over.measured:
            ratio = compare(over.timed, state.timed, baselines.floors)
            rung["gain"] = _gain(ratio, over.name)
        if state is not base and base.measured:
            total = compare(base.timed, state.timed, baselines.floors)
            rung["total_gain"] = _gain(total, base.name)
    rung["verdict"] = verdict_of(state, ratio, baselines.smaller)
    return rung


def verdict_of(state: RungState, gain: Ratio | None, smaller: float) -> str:
    """The verdict. `gain` is over the rung before, None where that one was not measured."""
    if state.status != "ok":
        return state.status.replace("_", " ")
    if state.unusable:
        return "unusable"
    if state.over is None or not state.over.measured:
        return "baseline"  # there is nothing below it: the first rung, or the first that could run
    parity = state.parity["verdict"] if state.parity else "not judged"
    faster = gain is not None and gain.faster
    if parity == "different" or (parity == "not judged" and faster):
        # Without a verdict of equal it is not called equal.
        return "faster but different" if faster else "different"
    if faster:
        return "equal and faster"
    if _is_smaller(state, smaller):
        return "equal and smaller" if parity == "equal" else "smaller but different"
    # Not faster, by the first question above.
    return gain.judged if gain is not None else "cannot tell"


def _is_smaller(state: RungState, smaller: float) -> bool:
    """Whether every process took that much less than every process of the rung before."""
    assert state.over is not None
    if not state.over.measured:
        return False
    return max(state.peak_memory) < (1 - smaller) * min(state.over.peak_memory)


def _nothing() -> RungRecord:
    keys = (
        "tokens_per_s", "step_ms", "tokens_kind", "mfu", "hfu", "ceiling_fraction", "peak_memory_bytes", "compile_s",
        "warmup_s", "warmup_steps", "data_wait_ms", "gain", "total_gain", "breakdown_ms", "longest", "disturbed",
    )  # fmt: skip
    empty: dict[str, Any] = {**dict.fromkeys(keys), "environment": {}}
    return cast(RungRecord, empty)


def _figures(state: RungState, baselines: Baselines) -> RungRecord:
    assert state.recipe is not None
    timings, first = state.timings, state.timings[0]
    speed = median_interval(state.processes)
    kinds = {kind: center([rates(timing, kind) for timing in timings]) for kind in KINDS}
    steps = [[1000 * seconds for seconds in t["samples_s"]] for t in timings]
    work = _work(state)
    dtype = first.get("rate_dtype", first["dtype"])
    peak = (baselines.peaks or {}).get(dtype)
    ceiling = ((baselines.ceilings or {}).get("matmul") or {}).get(dtype)
    mfu = kinds["processed"] * work / peak if peak else None
    again = _recomputed(state.recipe.shape(), work, state.outcomes[0].found.get("block_forwards"))
    figures: dict[str, Any] = {
        "tokens_per_s": measured(speed, state.processes),
        "disturbed": disturbed_of(state),
        "step_ms": measured(median_interval(steps), steps),
        "tokens_kind": kinds,
        "mfu": mfu,
        "hfu": mfu * again if mfu is not None and again is not None else None,
        "ceiling_fraction": kinds["processed"] * work / ceiling if ceiling else None,
        "peak_memory_bytes": int(statistics.median(state.peak_memory)),
        # Only the first process compiled with a cold cache.
        "compile_s": first["compile_s"],
        "warmup_s": first["warmup_s"],
        "warmup_steps": first["warmup_steps"],
        "data_wait_ms": statistics.median(t["data_wait_ms"] for t in timings),
        "breakdown_ms": state.outcomes[0].found.get("breakdown_ms"),
        "longest": state.outcomes[0].found.get("longest"),
        "environment": {**first["environment"], "steady": all(t["steady"] for t in timings)},
    }
    return cast(RungRecord, figures)


def disturbed_of(state: RungState) -> DisturbedRecord | None:
    """The disturbed process of a rung, by its place in `tokens_per_s.processes`."""
    logs = logs_of_medians(state.processes)
    found = disturbed(logs)
    if found is None:
        return None
    median = statistics.median(state.processes[found])
    return {
        "process": found,
        "ratio": median / center(undisturbed(state.processes)),
        "again": state.num_again,
    }


def _work(state: RungState) -> float:
    """FLOPs per token: from the trial, or from the shape before there is one."""
    assert state.recipe is not None
    reported = next((t.get("flops_per_token") for t in state.timings), None)
    return float(reported or flops_per_token(state.recipe.shape(), state.recipe.batch.sequence))


def _recomputed(shape: Shape, work: float, block_forwards: float | None) -> float | None:
    """All FLOPs over the model's own: a forward pass of the blocks is a third of theirs."""
    if not block_forwards:
        return None
    head = 6 * shape.vocab_size * shape.hidden
    return 1 + max(0.0, block_forwards - 1) / 3 * (work - head) / work


def measured(interval: Interval, processes: Sequence[Sequence[float]]) -> Measured:
    return {
        "median": interval.median,
        "ci95": [interval.low, interval.high],
        "n": interval.n,
        "samples": [value for samples in processes for value in samples],
        "processes": [list(samples) for samples in processes],
    }


def _gain(ratio: Ratio, over: str) -> GainRecord:
    return {
        "over": over,
        "ratio": ratio.ratio,
        "ci95": [ratio.low, ratio.high],
        "real": ratio.real,
        "paired": ratio.paired,
    }


def drift_of(first: Sequence[Timed], again: Sequence[Timed], floors: Floors) -> dict[str, Any]:
    """The change of the first recipe when it is measured again at the end."""
    moved = compare(first, again, floors)
    return {
        "first": center([process.rates for process in first]),
        "again": center([process.rates for process in again]),
        "ratio": moved.ratio,
        "ci95": [moved.low, moved.high],
        "flagged": moved.real,
        "restless": moved.high > RESTLESS * moved.low,
        "paired": moved.paired,
        # Samples with such unequal numbers of tokens may differ as much on an idle machine.
        "uneven": moved.paired is None and unevenness([*first, *again]) >= moved.high / moved.low,
    }


def _claim(state: RungState) -> dict[str, Any] | None:
    if state.addition is not None and state.addition.claim is not None:
        return dict(state.addition.claim)
    declared = state.outcomes[0].found.get("techniques", {}) if state.outcomes else {}
    known = [declared[name]["claim"] for name in state.added if name in declared]
    return known[0] if known else None
