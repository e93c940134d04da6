from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rush.errors import DataError, RecipeError
from rush.models import SIZES, Decoder, build_model
from rush.sampling import Sampling, generate, stream_text, token_probabilities

SMALL = replace(
    SIZES["llama-tiny"], vocab_size=61, context=48, num_layers=2, hidden=32, head_dim=8, intermediate=40
)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request: pytest.FixtureRequest) -> Decoder:
    shape = SMALL
    if request.param == "gpt2":
        shape = replace(
            SIZES["tiny"], vocab_size=61, context=48, num_layers=2, hidden=32, head_dim=8, intermediate=40
        )
    model = build_model(shape, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
    return model


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


# --- the loop --------------------------------------------------------------------------------------------


def test_greedy_equals_reading_everything_again_at_each_step(model: Decoder) -> None:
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(20):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(generate(model, PROMPT, max_new_tokens=20, temperature=0)) == tokens[len(PROMPT) :]


def test_sampling_equals_drawing_from_uncached_logits(model: Decoder) -> None:
    generator, tokens = torch.Generator().manual_seed(11), list(PROMPT)
    with torch.no_grad():
        for _ in range(20):
            probabilities = torch.softmax(model(torch.tensor([tokens]))[0, -1].double() / 0.8, 0)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    assert list(generate(model, PROMPT, max_new_tokens=20, temperature=0.8, seed=11)) == tokens[len(PROMPT) :]


def test_a_prompt_longer_than_a_piece_is_read_in_pieces(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(generate(model, PROMPT * 3, max_new_tokens=10, temperature=0))
    monkeypatch.setattr("rush.sampling.PREFILL_TOKENS", 5)
    assert list(generate(model, PROMPT * 3, max_new_tokens=10, temperature=0)) == whole


def test_a_seed_repeats_and_seeds_differ(model: Decoder) -> None:
    def run(seed: int) -> list[int]:
        return list(generate(model, PROMPT, max_new_tokens=30, seed=seed))

    torch.manual_seed(1)
    first = run(4)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert run(4) == first
    assert torch.equal(state, torch.get_rng_state())
    assert len({tuple(run(seed)) for seed in range(5)}) == 5


def test_tokens_stream_and_the_gradient_mode_is_the_callers(model: Decoder) -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handle = model.register_forward_hook(count)
    stream = generate(model, PROMPT, max_new_tokens=5)
    assert calls == 0
    for number in range(1, 6):
        next(stream)
        assert calls == number
        assert torch.is_grad_enabled()
    with pytest.raises(StopIteration):
        next(stream)
    assert calls == 5
    handle.remove()


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(model: Decoder) -> None:
    free = list(generate(model, PROMPT, max_new_tokens=15, seed=3))
    stop = free[6]
    stream = generate(model, PROMPT, max_new_tokens=15, seed=3, stop_ids=[stop])
    assert list(stream) == free[: free.index(stop)]
    assert stream.ended == "stop"
    assert list(stream) == []


def test_it_ends_at_the_asked_length_and_says_so(model: Decoder) -> None:
    for length in (0, 1, 7):
        stream = generate(model, PROMPT, max_new_tokens=length)
        assert stream.ended is None
        assert len(list(stream)) == length
        assert stream.ended == "length"


@pytest.mark.parametrize("prompt_length", [1, 40, 47, 48])
def test_it_ends_where_the_context_is_full_and_says_so(model: Decoder, prompt_length: int) -> None:
    stream = generate(model, (PROMPT * 6)[:prompt_length], max_new_tokens=1000)
    assert len(list(stream)) == 48 - prompt_length + 1
    assert stream.ended == "context"


def test_tensors_are_prompts_too(model: Decoder) -> None:
    expected = list(generate(model, PROMPT, max_new_tokens=4, temperature=0))
    assert list(generate(model, torch.tensor(PROMPT), max_new_tokens=4, temperature=0)) == expected


@pytest.mark.parametrize(
    ("error", "prompt", "options", "words"),
    [
        (RecipeError, PROMPT, {"temperature": -0.1}, ("temperature", "-0.1", "at least 0")),
        (RecipeError, PROMPT, {"temperature": float("nan")}, ("temperature", "nan")),
        (RecipeError, PROMPT, {"temperature": float("inf")}, ("temperature", "inf")),
        (RecipeError, PROMPT, {"temperature": "hot"}, ("temperature", "hot")),
        (RecipeError, PROMPT, {"top_k": 0}, ("top_k", "0", "at least 1")),
        (RecipeError, PROMPT, {"top_k": 2.5}, ("top_k", "2.5")),
        (RecipeError, PROMPT, {"top_p": 0.0}, ("top_p", "0.0", "above 0")),
        (RecipeError, PROMPT, {"top_p": 1.01}, ("top_p", "1.01")),
        (RecipeError, PROMPT, {"max_new_tokens": -1}, ("max_new_tokens", "-1")),
        (RecipeError, PROMPT, {"seed": -3}, ("seed", "-3")),
        (RecipeError, PROMPT, {"stop_ids": [61]}, ("stop_ids", "61", "0 to 60")),
        (RecipeError, [], {}, ("empty",)),
        (DataError, [0, 61], {}, ("61", "position 1", "0 to 60")),
        (DataError, [0] * 49, {}, ("49", "48")),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    model: Decoder, error: type[Exception], prompt: list[int], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        generate(model, prompt, **({"max_new_tokens": 3} | options))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_broken_model_is_named_as_such(temperature: float) -> None:
    model = build_model(SMALL)
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(DataError, match="not finite"):
        next(generate(model, PROMPT, max_new_tokens=3, temperature=temperature))


# --- the distribution ------------------------------------------------------------------------------------


def probabilities_by_hand(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None
) -> list[float]:
    """Plain Python, token by token from the likeliest down."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = [math.exp((logits[i] - max(logits)) / temperature) for i in order]
    whole = sum(weights)
    kept: dict[int, float] = {}
    for i, weight in zip(order, weights, strict=True):
        if top_p is not None and kept and sum(kept.values()) >= top_p * whole:
            break
        kept[i] = weight
    total = sum(kept.values())
    return [kept.get(i, 0.0) / total for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.5, 0.93, 1.0])
def test_probabilities_equal_a_computation_by_hand(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(2)) * 3
    found = token_probabilities(logits, Sampling(temperature, top_k, top_p))
    expected = probabilities_by_hand(logits.tolist(), temperature, top_k, top_p)
    assert (found - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12


def test_ties_keep_exactly_k_tokens() -> None:
    found = token_probabilities(torch.zeros(10), Sampling(1.0, top_k=3))
    assert found.tolist() == [1 / 3] * 3 + [0.0] * 7


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-300])
def test_a_vanishing_temperature_is_greedy_and_finite(temperature: float) -> None:
    found = token_probabilities(torch.tensor([1.0, 3.0, 2.0]), Sampling(temperature, top_p=0.9))
    assert found.tolist() == [0.0, 1.0, 0.0]


def test_draws_follow_the_distribution(model: Decoder) -> None:
    """Pearson's chi-square over 400 first tokens, a seed each; and nothing outside the filters."""
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT]))[0, -1].tolist()
    expected = probabilities_by_hand(logits, 1.5, 8, 0.9)
    counts = [0] * len(expected)
    for seed in range(400):
        counts[
            next(generate(model, PROMPT, max_new_tokens=1, temperature=1.5, top_k=8, top_p=0.9, seed=seed))
        ] += 1
    possible = [i for i, probability in enumerate(expected) if probability > 0]
    assert sum(counts[i] for i in possible) == 400
    assert len(possible) > 3
    chi_square = sum((counts[i] - 400 * expected[i]) ** 2 / (400 * expected[i]) for i in possible)
    freedom = len(possible) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


# --- text ------------------------------------------------------------------------------------------------


def decode_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=40))
def test_streamed_bytes_are_the_text_and_no_character_is_broken(text: str) -> None:
    pieces = list(stream_text(decode_bytes, list(text.encode())))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.binary(max_size=40))
def test_any_bytes_stream_to_what_decoding_them_at_once_gives(data: bytes) -> None:
    assert "".join(stream_text(decode_bytes, data)) == decode_bytes(list(data))


def test_a_character_appears_as_soon_as_it_is_whole() -> None:
    data = "aé😀b".encode()
    given_out: list[int] = []

    def feed() -> Iterator[int]:
        for byte in data:
            given_out.append(byte)
            yield byte

    shown = [(piece, len(given_out)) for piece in stream_text(decode_bytes, feed())]
    assert shown == [("a", 1), ("é", 3), ("😀", 7), ("b", 8)]


def test_a_decoder_that_marks_every_byte_of_a_half_character_is_waited_for() -> None:
    def decode(ids: list[int]) -> str:
        whole = decode_bytes(ids)
        if not whole.endswith("\ufffd"):
            return whole
        missing = len(ids) - len(whole[:-1].encode())
        return whole[:-1] + "\ufffd" * missing

    data = "漢😀é!".encode()
    assert decode(list(data[:5])) == "漢\ufffd\ufffd"
    assert list(stream_text(decode, data)) == ["漢", "😀", "é", "!"]


def test_spaces_before_words_survive_a_tokenizer_that_strips_the_first() -> None:
    words = ["▁Hello", "▁wide", "▁", "world", "!"]

    def decode(ids: list[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert "".join(stream_text(decode, range(5))) == decode(list(range(5))) == "Hello wide world!"


def test_decoding_looks_back_a_bounded_number_of_tokens() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    for text in ("wide ünïcödé 😀 " * 50, "漢字" * 100, "😀" * 100):
        assert "".join(stream_text(decode, text.encode())) == text
    assert longest <= 16
