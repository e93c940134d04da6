"""Bounds of the numbers of a shape, and their messages."""

from __future__ import annotations

from rush.errors import RecipeError

LARGEST = {
    "vocab_size": 2**24,
    "context": 2**31,
    "hidden": 2**20,
    "num_layers": 2**12,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "head_dim": 2**16,
    "intermediate": 2**24,
}
"""Bounds of the dims: far above any model, and small enough that nothing hangs or overflows before a message."""
LARGEST_NUMBER = 1e30
"""Bound of norm_eps and of RoPE's numbers, which are computed with in fp32."""


def whole(name: str, value: object, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise RecipeError(f"{name} must be a whole number from 1 to {most:,}: found {str(value)[:40]}.")


def positive(name: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < LARGEST_NUMBER:  # type: ignore[operator]
        raise RecipeError(
            f"{name} must be a number greater than 0 and less than {LARGEST_NUMBER:g}: found {value!r:.80}."
        )


def divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
