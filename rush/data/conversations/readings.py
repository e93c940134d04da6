"""Conversations with UltraChat's lengths, from the standard library's sources: to measure the cost of padding.

A user asks for a module, and gets its source in pieces. The text is real; the *lengths* are sampled, because
the cost of padding depends only on them. UltraChat 200k's card gives 207,865 conversations, and a published
version with the turns as one text has 5.8 kB each: some 1,200 tokens at 4.8 letters per token. UltraChat has
7.7 messages per conversation. The shape of its length distribution is not published, so it is our choice:
log-normal with a sigma of 0.5, with a median of 1,060 tokens, a 95th percentile of 2,410, and 9 % above 2,048
(docs/sources.md). It is a distribution like UltraChat's, not UltraChat.

`reading_pairs` does the same for preferences: one question, the beginning of the module as the chosen answer, lines of its
reverse as the rejected one, each with a length of its own. Log-normal with a median of 320 tokens and a sigma of 0.6: a stated
choice for answers of a few paragraphs, taken from no dataset.

How long each conversation is depends on a hash of its name alone, and a file that ends before its conversation does
is read from its beginning again, so short files do not make short conversations.
"""

from __future__ import annotations

import hashlib
import math
import tokenize
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rush.errors import DataError

MEDIAN_TOKENS, SIGMA = 1060.0, 0.5
LETTERS_PER_TOKEN = 4.1
"""Of Python sources with a vocabulary of 32,768 trained on them, including template and questions."""
MEAN_TOKENS = MEDIAN_TOKENS * math.exp(SIGMA**2 / 2)
ROUNDS = (3, 4, 4, 4, 4, 4)
"""Questions in a conversation, by turns: 3.8 on average, with their answers 7.7 messages."""
SHORTEST_FILE = 400
_ASK = (
    "Show me the source of {name} from the beginning.",
    "I would like to read {name}. Where does it start?",
    "Print the first part of {name} for me, please.",
)
_GO_ON = (
    "And then?",
    "Please go on.",
    "What comes after that?",
    "Show me the next part.",
    "Continue from there.",
)

ANSWER_TOKENS, ANSWER_SIGMA = 320.0, 0.6
"""Median tokens of an answer of a pair."""

Rows = Iterator[tuple[str, dict[str, Any], str]]


def readings(path: str) -> Rows:
    """Chat rows of a source file: name, fields, group; as many as its text gives on average."""
    lines, letters, name = _read(path)
    if letters < SHORTEST_FILE:
        return
    endless = cycle(lines)
    for number in range(max(1, round(letters / (MEAN_TOKENS * LETTERS_PER_TOKEN)))):
        key = f"{Path(path).parent.name}/{name}#{number}"
        yield f"{path}#{number}", {"messages": _conversation(key, name, endless)}, path


def reading_pairs(path: str) -> Rows:
    """Preference rows of a source file: name, fields, group; as many as its text gives on average."""
    lines, letters, name = _read(path)
    if letters < SHORTEST_FILE:
        return
    forward, backward = cycle(lines), cycle(lines[::-1])
    mean = ANSWER_TOKENS * math.exp(ANSWER_SIGMA**2 / 2)
    for number in range(max(1, round(letters / (mean * LETTERS_PER_TOKEN)))):
        key = f"{Path(path).parent.name}/{name}#{number}"
        asked = _ASK[int(_share(key, "question") * len(_ASK))].format(name=name)
        answers = [
            _piece(source, drawn_answer_tokens(key, which) * LETTERS_PER_TOKEN)
            for which, source in (("chosen", forward), ("rejected", backward))
        ]
        if answers[0] != answers[1]:
            row = {"prompt": asked, "chosen": answers[0], "rejected": answers[1]}
            yield f"{path}#{number}", row, path


def _read(path: str) -> tuple[list[str], int, str]:
    """The lines of a source file that are not empty, their letters, and the module's name."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Python source ({error}).") from error
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    name = Path(path).stem if Path(path).stem != "__init__" else Path(path).parent.name
    return lines, sum(len(line) + 1 for line in lines), name


def drawn_answer_tokens(key: str, which: str) -> float:
    """Length of an answer of a pair: log-normal, by a hash of its name."""
    return ANSWER_TOKENS * math.exp(ANSWER_SIGMA * NormalDist().inv_cdf(_share(key, which)))


def drawn_tokens(key: str) -> float:
    """Length of a conversation: log-normal, by a hash of its name."""
    return MEDIAN_TOKENS * math.exp(SIGMA * NormalDist().inv_cdf(_share(key, "length")))


def _conversation(key: str, name: str, lines: Iterator[str]) -> list[dict[str, str]]:
    rounds = ROUNDS[int(_share(key, "rounds") * len(ROUNDS))]
    # Questions are part of the length.
    each = drawn_tokens(key) * LETTERS_PER_TOKEN / rounds
    messages: list[dict[str, str]] = []
    for turn in range(rounds):
        choices = _GO_ON if turn else _ASK
        asked = choices[int(_share(key, f"question {turn}") * len(choices))].format(name=name)
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": _piece(lines, each - len(asked))},
        ]
    return messages


def _piece(lines: Iterator[str], letters: float) -> str:
    """The next lines, at least one, up to this many letters."""
    taken: list[str] = []
    so_far = 0
    while not taken or so_far < letters:
        taken.append(next(lines))
        so_far += len(taken[-1]) + 1
    cut = max(1, len(taken[-1]) - max(0, int(so_far - letters)))
    return "\n".join([*taken[:-1], taken[-1][:cut]]).strip() or taken[-1]


def _share(*key: str) -> float:
    """A number strictly between 0 and 1, by a hash of the key."""
    digest = hashlib.blake2b("\0".join(key).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") + 0.5) / 2**64
