"""WordNet's files as words with their senses: the base of the text, of the questions and of the multiple choice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

KINDS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


@dataclass(frozen=True)
class Sense:
    """One meaning of a word."""

    kind: str
    gloss: str
    examples: tuple[str, ...]
    synonyms: tuple[str, ...]
    """All words of this meaning, the word itself among them."""
    opposites: tuple[str, ...]
    broader: str | None
    """What it is a kind of."""


def read_words(folder: Path) -> dict[str, list[Sense]]:
    """Every word with its senses, the most usual one first."""
    words: dict[str, list[Sense]] = {}
    for file, kind in KINDS.items():
        rows = _rows(folder / f"data.{file}")
        senses = {place: _sense(row, rows, kind) for place, row in rows.items()}
        for line in (folder / f"index.{file}").read_text(encoding="latin-1").splitlines():
            if line.startswith(" "):
                continue
            fields = line.split()
            places = fields[6 + int(fields[3]) :]
            for place in places:
                sense = senses[place]
                # The index is in small letters; the sense knows how the word is written.
                written = next(
                    (word for word in sense.synonyms if word.lower() == fields[0].replace("_", " ")), None
                )
                if written is not None:
                    words.setdefault(written, []).append(sense)
    return words


def frequent(folder: Path) -> set[str]:
    """The words, in small letters, that WordNet's makers met in the texts they annotated."""
    found = set()
    for file in KINDS:
        for line in (folder / f"index.{file}").read_text(encoding="latin-1").splitlines():
            fields = line.split()
            if not line.startswith(" ") and int(fields[5 + int(fields[3])]) > 0:
                found.add(fields[0].replace("_", " "))
    return found


def describe(word: str, senses: list[Sense]) -> str:
    """A word as a document: a line for each sense."""
    lines = []
    for sense in senses:
        parts = [f"{word} ({sense.kind}): {sense.gloss}."]
        parts += [f'For example: "{example}".' for example in sense.examples]
        others = [other for other in sense.synonyms if other != word]
        if others:
            parts.append(f"Synonyms: {', '.join(others)}.")
        if sense.opposites:
            parts.append(f"Opposite: {', '.join(sense.opposites)}.")
        if sense.broader:
            parts.append(f"A kind of {sense.broader}.")
        lines.append(" ".join(parts))
    return "\n".join(lines)


def _rows(path: Path) -> dict[str, tuple[list[str], list[tuple[str, str, str]], str]]:
    """By offset: the words, the pointers (sign, offset, kind) and the gloss."""
    rows = {}
    for line in path.read_text(encoding="latin-1").splitlines():
        if line.startswith(" "):
            continue
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = [_written(fields[4 + 2 * at]) for at in range(count)]
        start = 5 + 2 * count
        pointers = [
            (fields[start + 4 * at], fields[start + 4 * at + 1], fields[start + 4 * at + 2])
            for at in range(int(fields[start - 1]))
        ]
        rows[fields[0]] = (words, pointers, gloss.strip())
    return rows


def _written(word: str) -> str:
    return re.sub(r"\([a-z]+\)$", "", word).replace("_", " ")


def _sense(
    row: tuple[list[str], list[tuple[str, str, str]], str],
    rows: dict[str, tuple[list[str], list[tuple[str, str, str]], str]],
    kind: str,
) -> Sense:
    words, pointers, gloss = row
    meaning, *rest = re.split(r';\s*(?=")', gloss)
    examples = tuple(example.strip(' ";') for example in rest)
    own = "n" if kind == "noun" else "v" if kind == "verb" else None
    broader = next(
        (rows[place][0][0] for sign, place, of in pointers if sign in ("@", "@i") and of == own), None
    )
    opposites = tuple(rows[place][0][0] for sign, place, _ in pointers if sign == "!" and place in rows)
    return Sense(
        kind=kind,
        gloss=meaning.strip(' ";'),
        examples=tuple(example for example in examples if example),
        synonyms=tuple(dict.fromkeys(words)),
        opposites=tuple(dict.fromkeys(opposites)),
        broader=broader,
    )
