"""Batch-size schedules: tokens per optimizer step over a run, by more or fewer micro batches.

A small batch learns as much per token as a large one only up to the critical batch size, which grows as the loss falls (McCandlish
et al. 2018, arXiv:1812.06162; Merrill et al. 2025, arXiv:2505.23971). So large pretraining runs begin with a smaller batch: Llama 3
405B doubled it twice (Llama team 2024, arXiv:2407.21783), OLMo-core and Megatron-LM have it as a setting. It loses time if a
small batch leaves the devices idle: each step pays for the update, and on several ranks the all-reduce, for fewer tokens.

A schedule is a pure function of the step, so there is no state to save. Micro batches keep their shape: nothing is recompiled
or recaptured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

PHASES = "[{tokens = 16384, until = 0.1}]"


@dataclass(frozen=True)
class BatchSizes:
    """Tokens of every step: `sizes[0]` up to the step `ends[0]`, and so on; the last size from then on."""

    ends: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, step: int) -> int:
        """Tokens of a step, counted from 1."""
        return self.sizes[bisect_left(self.ends, step)]

    def until(self, step: int) -> int:
        """Tokens of all steps up to and including this one."""
        total, before = 0, 0
        for end, size in zip((*self.ends, step), self.sizes, strict=True):
            total += max(0, min(end, step) - before) * size
            before = min(end, step)
        return total

    def step_at(self, tokens: int) -> int:
        """The first step after which so many tokens are read."""
        before, size = 0, self.sizes[0]
        for end, larger in zip(self.ends, self.sizes[1:], strict=True):
            if tokens <= (end - before) * size:
                break
            tokens -= (end - before) * size
            before, size = end, larger
        return before + -(-tokens // size)

    def passes(self, every: int, step: int) -> bool:
        """Whether this step reaches a multiple of so many tokens."""
        return every > 0 and self.until(step) // every > self.until(step - 1) // every


def last_step(until: float, steps: int) -> int:
    """The last step of a phase: `until` itself, or that fraction of all steps."""
    return until if isinstance(until, int) else round(until * steps)


def read_phases(value: object) -> list[dict[str, object]]:
    """The phases of a recipe's batch-size schedule; ValueError with a sentence about what is wrong with them."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ValueError(f"batch.schedule is {value!r}; allowed: a list of tables such as {PHASES}")
    found = []
    for one in value:
        table = one if isinstance(one, Mapping) else getattr(one, "__dict__", {})
        tokens, until = table.get("tokens"), table.get("until")
        good = set(table) == {"tokens", "until"} and _number(tokens)
        if not good or not (_number(until) or (type(until) is float and 0 < until < 1)):
            raise ValueError(
                f"batch.schedule has {dict(table) or one!r}; allowed: a table such as {PHASES[1:-1]}, with the tokens of a step, and the "
                "last step of that size (from 1 on a number of steps, below 1 the fraction of all steps)"
            )
        found.append({"tokens": tokens, "until": until})
    return found


def _number(value: object) -> bool:
    return type(value) is int and 0 < value < 2**63


def check_phases(phases: Sequence[tuple[int, float]], total: int | None, steps: int | None) -> None:
    """Refuse a schedule in which the batch does not grow, or a phase has no step."""
    if not phases:
        return
    if total is None:
        raise ValueError(
            "batch.schedule needs batch.total_tokens, the tokens of a step at its end; give it a value"
        )
    sizes = [*(tokens for tokens, _ in phases), total]
    if any(later <= earlier for earlier, later in pairwise(sizes)):
        raise ValueError(
            f"batch.schedule and batch.total_tokens have steps of {', '.join(f'{size:,}' for size in sizes)} tokens; allowed: each larger "
            "than the one before"
        )
    if steps is None:  # known once the data is prepared
        return
    ends = [0, *(last_step(until, steps) for _, until in phases), steps]
    for place, (before, end) in enumerate(pairwise(ends)):
        if end <= before:
            named = f"until = {phases[place][1]:g}" if place < len(phases) else f"schedule.steps = {steps:,}"
            raise ValueError(
                f"batch.schedule leaves no step of {sizes[place]:,} tokens: {named} is step {end:,}, and the steps before end at step "
                f"{before:,}; give rising values of until, or more schedule.steps"
            )
