"""Generation: prefill the prompt once, then decode one token at a time with a KV cache.

Each step feeds only the newest token; the cache has the keys and values of all earlier ones. Sampling has four steps: divide
the logits by the temperature, keep the `top_k` largest, of those keep the smallest set with `top_p` of the probability, draw.
Temperature 0 takes the most likely token. Draws happen on the CPU from a generator of the given seed, so a seed gives the same
tokens on every device.

Generation ends at a stop token, at `max_new_tokens`, or when the model's context is full; the iterator's `ended` gives the
reason. It does not slide a window: the keys would have to be recomputed at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rush.errors import DataError, RecipeError
from rush.models import Decoder, check_tokens

Ending = Literal["stop", "length", "context"]

# Prompts are prefilled in chunks, because each chunk computes fp32 logits for all of its tokens.
PREFILL_TOKENS = 256
# Text is decoded from at least this many last tokens before older ones are dropped.
WINDOW_TOKENS = 8


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy; None disables a filter."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise _refused("temperature", self.temperature, "a finite number of at least 0 (0 is greedy)")
        if self.top_k is not None and not (_is_whole(self.top_k) and self.top_k >= 1):
            raise _refused("top_k", self.top_k, "a whole number of at least 1, or none")
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise _refused("top_p", self.top_p, "a number above 0 and up to 1, or none")


class Generation(Iterator[int]):
    """New token ids, one by one. After the last, `ended` says why it was the last."""

    def __init__(self, ids: Iterator[int], stop_ids: frozenset[int], limit: int, room: int) -> None:
        self.ended: Ending | None = None
        self._ids = ids
        self._stop_ids = stop_ids
        self._remaining = min(limit, room)
        self._at_limit: Ending = "length" if limit <= room else "context"

    def __next__(self) -> int:
        if self.ended is None and self._remaining == 0:
            self.ended = self._at_limit
        if self.ended is not None:
            raise StopIteration
        token = next(self._ids)
        if token in self._stop_ids:
            self.ended = "stop"
            raise StopIteration
        self._remaining -= 1
        return token


def generate(
    model: Decoder,
    tokens: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_ids: Iterable[int] = (),
    seed: int = 0,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Generation:
    """Continue `tokens`; the ids come as they are made. A stop token ends the text and is not part of it. The prompt is read
    in pieces of `prefill_tokens`."""
    prompt = [int(token) for token in tokens]
    sampling = Sampling(temperature, top_k, top_p)
    stops = frozenset(stop_ids)
    if not _is_whole(max_new_tokens) or max_new_tokens < 0:
        raise _refused("max_new_tokens", max_new_tokens, "a whole number of at least 0")
    if not _is_whole(seed) or not 0 <= seed < 2**63:
        raise _refused("seed", seed, "a whole number from 0 to 2^63 - 1")
    for stop in stops:
        if not _is_whole(stop) or not 0 <= stop < model.shape.vocab_size:
            raise _refused("stop_ids", stop, f"token ids from 0 to {model.shape.vocab_size - 1}")
    if not prompt:
        raise RecipeError(
            "The prompt is empty: give at least one token (the end-of-text token starts a new text)."
        )
    check_tokens(model.shape, prompt)
    # The last new token is never read back, so it needs no place of its own in the context.
    room = model.shape.context - len(prompt) + 1
    capacity = min(model.shape.context, len(prompt) + max_new_tokens)
    draws = _draws(model, prompt, capacity, sampling, seed, prefill_tokens)
    return Generation(draws, stops, max_new_tokens, room)


def token_probabilities(logits_v: Tensor, sampling: Sampling) -> Tensor:
    """The distribution a token is drawn from: float64, zero for what the filters removed."""
    logits = logits_v.double()
    if sampling.temperature == 0:
        probabilities = torch.zeros_like(logits)
        probabilities[logits.argmax()] = 1.0
        return probabilities
    # Subtracting the largest first keeps a tiny temperature from overflowing.
    logits = (logits - logits.max()) / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return torch.softmax(logits, dim=0)
    kept, ids = torch.sort(logits, descending=True, stable=True)
    kept, ids = kept[: sampling.top_k], ids[: sampling.top_k]
    weights = torch.softmax(kept, dim=0)
    if sampling.top_p is not None:
        before = weights.cumsum(0) - weights  # the probability of all likelier tokens
        enough = before >= sampling.top_p
        enough[0] = False
        weights = weights.masked_fill(enough, 0.0)
    return torch.zeros_like(logits).scatter(0, ids, weights / weights.sum())


def stream_text(tokenizer_decode: Callable[[list[int]], str], ids: Iterable[int]) -> Iterator[str]:
    """Streaming detokenization: never emits a partial character, and everything by the end.

    A character may span several tokens; until it is complete, decoding ends in replacement characters. Up to three of them (a
    character has at most four bytes) are held back. Decoding starts a few tokens back, since some tokenizers treat the first
    token of a text specially.
    """
    window: list[int] = []  # the tokens decoded together: those already shown, then the new ones
    shown = 0  # characters of the window's text that were given out
    for token in ids:
        window.append(token)
        text = tokenizer_decode(window)
        certain = len(text) - _uncertain(text)
        if certain > shown:
            yield text[shown:certain]
            shown = certain
        if certain == len(text) and len(window) >= WINDOW_TOKENS:
            window, shown = _shorter(tokenizer_decode, window, shown)
    rest = tokenizer_decode(window)[shown:] if window else ""
    if rest:
        yield rest


def _draws(
    model: Decoder, prompt: list[int], capacity: int, sampling: Sampling, seed: int, prefill_tokens: int
) -> Iterator[int]:
    device = model.embedding.weight.device
    cache = model.new_cache(batch=1, capacity=capacity)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    read: list[int] = []
    pending, switch = prompt, model.shape.rope_switch
    while True:
        read += pending
        cache.row_tokens = len(read)
        if switch is not None and cache.length <= switch < len(read):
            # From here on RoPE angles differ: the text is prefilled again.
            cache.length, pending = 0, read
        for start in range(0, len(pending), prefill_tokens):
            piece = torch.tensor([pending[start : start + prefill_tokens]], device=device)
            with torch.no_grad():  # not around the yield: the caller's own gradient mode must not change
                logits_v = model(piece, cache=cache)[0, -1]
        token = _draw(logits_v, sampling, generator)
        yield token
        pending = [token]


def _draw(logits_v: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    logits_v = logits_v.cpu()
    if not bool(torch.isfinite(logits_v).all()):
        raise DataError(
            "The model's logits are not finite numbers: its weights are damaged or have diverged."
        )
    if sampling.temperature == 0:
        return int(logits_v.argmax())
    return int(torch.multinomial(token_probabilities(logits_v, sampling), 1, generator=generator))


def _shorter(decode: Callable[[list[int]], str], window: list[int], shown: int) -> tuple[list[int], int]:
    """The fewest last tokens that make sense by themselves, and how long their text is."""
    for length in range(1, len(window)):
        text = decode(window[-length:])
        if text and not _uncertain(text):
            return window[-length:], len(text)
    return window, shown


def _uncertain(text: str) -> int:
    """How many characters at the end may still change."""
    marks = len(text) - len(text.rstrip("\ufffd"))
    return min(marks, 3)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(name: str, found: object, allowed: str) -> RecipeError:
    return RecipeError(f"{name} must be {allowed}: found {found!r}.")
