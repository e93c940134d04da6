"""Test a tokenizer.json: load it, and encode and decode a few texts. Runs in the restricted child.

This detects backtracking regular expressions, normalizers that grow a text a million-fold and absurd ids; they end a child and
not a training run. An input that only a certain word triggers cannot be tested, so the growth of replacements is bounded by
arithmetic. This file imports nothing from rush: the child loads it alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import tokenizers

LARGEST_ID = (1 << 24) - 1
LARGEST_GROWTH = 10_000
TOKENS_PER_CHARACTER = 64
_PROSE = "it is a truth universally acknowledged that a single man in possession of a good fortune must be in want of a wife "
PROBES = (
    "".join(map(chr, range(32, 127))),
    _PROSE * 20,
    (_PROSE * 20).replace(" ", ""),
    *(letter * 4000 for letter in "a 0!\n"),
    "ab" * 2000 + "!",
    "a b " * 1000 + "!",
    "def f(x_1):\n    return {'a': [x_1 ** 2]}\n\n" * 40,
    "Na\u00efve \u0394\u03b9\u03bf\u03bd\u03cd\u03c3\u03b9\u03bf\u03c2 \u6771\u4eac \u043c\u0438\u0440 \U0001f600 \u00e9\u0301 "
    * 40,
)
"""Words, white space, numbers and code, with runs long enough for a regular expression to get lost in."""


class Refused(Exception):
    """A sentence about what is wrong with the tokenizer."""


def try_tokenizer(text: str) -> int:
    """The largest id of a tokenizer that loads, encodes and decodes; `Refused` says why one does not."""
    try:
        core = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise Refused(f"is not a tokenizer.json of the tokenizers library ({_first_line(error)})") from error
    core.no_truncation()
    core.no_padding()
    vocabulary = core.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise Refused("holds no vocabulary")
    largest = max(vocabulary.values())
    if largest > LARGEST_ID:
        raise Refused(f"holds a token with the id {largest:,}; allowed are ids up to {LARGEST_ID:,}")
    _check_growth(json.loads(text))
    for literal in (False, True):
        core.encode_special_tokens = literal
        for probe in PROBES:
            _try_text(core, probe)
    return int(largest)


def _try_text(core: Any, probe: str) -> None:
    try:
        ids = core.encode(probe, add_special_tokens=False).ids
        back = core.decode(ids[: len(probe)], skip_special_tokens=False)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise Refused(f"cannot encode ordinary text ({_first_line(error)})") from error
    most = TOKENS_PER_CHARACTER * len(probe)
    if len(ids) > most or len(back) > most:
        raise Refused(
            f"makes {max(len(ids), len(back)):,} tokens or characters of a text of {len(probe):,} characters"
        )


def _check_growth(tree: Any) -> None:
    for part in ("normalizer", "decoder"):
        growth = math.prod(_replacements(tree.get(part)))
        if growth > LARGEST_GROWTH:
            raise Refused(
                f"has a {part} whose replacements can make a text {LARGEST_GROWTH:,} times as long or longer"
            )


def _replacements(node: Any) -> Iterator[int]:
    """How many characters each replacement writes for at least one."""
    if isinstance(node, dict):
        content = node.get("content")
        if node.get("type") == "Replace" and isinstance(content, str):
            yield max(1, len(content))
        for value in node.values():
            yield from _replacements(value)
    elif isinstance(node, list):
        for value in node:
            yield from _replacements(value)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
