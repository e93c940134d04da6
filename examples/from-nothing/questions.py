"""Questions with answers, preferences and multiple choice, made from what gather.py fetched.

    python examples/from-nothing/questions.py --to build/from-nothing

writes, in the formats that `rush` reads:

    questions.jsonl        conversations to fine-tune on (`messages`)
    pairs.jsonl            right answers beside wrong ones (`prompt`, `chosen`, `rejected`)
    test-questions.jsonl, test-pairs.jsonl       the same about words that are in neither of the two
    choices-definitions.jsonl, choices-synonyms.jsonl    multiple choice about those words (`query`, `choices`, `gold`)

A twentieth of the words, by a hash of their letters, is held out: never asked about in fine-tuning. Their entries
are in the pretraining text all the same, as a dictionary would be of little use otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from words import Sense, frequent, read_words

from rush.data.conversations.docstrings import docstring_questions

HERE = Path(__file__).parent
Turns = list[tuple[str, str]]
LETTERS = 300
"""The longest gloss that is an answer."""

DEFINE = (
    "What does {word} mean?", "What does the word {word} mean?", "What is the meaning of {word}?", "Define {word}.",
    "Can you define {word}?", "Explain the word {word}.", "Please tell me what {word} means.", "What is {word}?",
)  # fmt: skip
SYNONYM = ("What is a synonym of {word}?", "Give me a synonym of {word}.", "Which words mean the same as {word}?",
           "Another word for {word}?")  # fmt: skip
OPPOSITE = (
    "What is the opposite of {word}?",
    "Give me the opposite of {word}.",
    "What is the antonym of {word}?",
)
BROADER = (
    "What kind of thing is {word}?",
    "What is {word} a kind of?",
    "Which broader word covers {word}?",
)
SENTENCE = ("Use {word} in a sentence.", "Give me an example of {word}.", "How is {word} used?")
THEN_SYNONYM = ("And a synonym?", "Give me a synonym.", "Is there another word for it?")
THEN_OPPOSITE = ("And the opposite?", "What is its opposite?")
THEN_SENTENCE = ("Use it in a sentence.", "Give me an example.", "How is it used?")
COMPUTING = (
    "What is {word} in computing?",
    "What does {word} mean to a programmer?",
    "Explain {word}, the term of computing.",
)
PACKAGE = (
    "What is the Debian package {word}?",
    "What is the package {word} for?",
    "What does the package {word} contain?",
)
MANUAL = ("What does {word} do in C?", "What is {word} in Linux?", "What does the manual say about {word}?")
DEVIL = ("How does the Devil's Dictionary define {word}?", "What would Ambrose Bierce say about {word}?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, help="gather.py's folder")
    to = parser.parse_args().to
    wordnet = to / "packages" / "wordnet-base" / "usr/share/wordnet"
    usual = frequent(wordnet)
    words = {word: senses for word, senses in read_words(wordnet).items() if good(word, senses[0], usual)}
    asked = {word: senses for word, senses in words.items() if not held_out(word)}
    kept = {word: senses for word, senses in words.items() if held_out(word)}
    talks = [turns for word, senses in asked.items() for turns in talks_about(word, senses)]
    talks += [*computing(to), *packages(to), *manual(to), *devil(to), *elements(to), *small_talk()]
    rows = [{"messages": messages(turns)} for turns in talks]
    rows += python_rows()
    random.Random(1).shuffle(rows)
    write(to / "text" / "questions.jsonl", rows)
    test = [{"messages": messages(next(iter(talks_about(word, senses))))} for word, senses in kept.items()]
    write(to / "text" / "test-questions.jsonl", test)
    write(to / "text" / "pairs.jsonl", list(pairs(asked, most=8000)))
    write(to / "text" / "test-pairs.jsonl", list(pairs(kept, most=2000)))
    write(to / "text" / "choices-definitions.jsonl", list(definitions(kept)))
    write(to / "text" / "choices-synonyms.jsonl", list(synonyms(kept)))


def number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def pick(options: Iterable[Any], *why: str) -> Any:
    options = list(options)
    return options[number(" ".join(why)) % len(options)]


def held_out(word: str) -> bool:
    return number(f"held out {word.lower()}") % 20 == 0


def good(word: str, sense: Sense, usual: set[str]) -> bool:
    """A word to ask about: in use, or one in eight of the others; of letters, with a gloss of a fit length."""
    letters = re.fullmatch(r"[A-Za-z][A-Za-z' -]{2,30}", word)
    wanted = word.lower() in usual or number(f"rare {word}") % 8 == 0
    return bool(letters) and wanted and 10 <= len(sense.gloss) <= LETTERS


def defined(word: str, sense: Sense) -> str:
    return f"The {sense.kind} {word} means: {sense.gloss}."


def said(words: Iterable[str]) -> str:
    """Words as a list in a sentence."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else f"{text}."


def others(word: str, sense: Sense) -> list[str]:
    return [other for other in sense.synonyms if other.lower() != word.lower()][:4]


def same(word: str, sense: Sense) -> str:
    found = others(word, sense)
    many = f"Synonyms of {word} are" if len(found) > 1 else f"A synonym of {word} is"
    return f"{many} {said(found)}."


def talks_about(word: str, senses: list[Sense]) -> Iterator[Turns]:
    """Conversations about a word: what it means, then what else is known of it."""
    first = senses[0]
    answer = defined(word, first)
    more = next(
        (sense for sense in senses[1:] if sense.gloss != first.gloss and len(sense.gloss) < 150), None
    )
    if more is not None and number(f"two {word}") % 3 == 0:
        article = "an" if more.kind[0] == "a" else "a"
        again = "It can also mean" if more.kind == first.kind else f"As {article} {more.kind} it means"
        answer += f" {again}: {more.gloss}."
    turns = [(pick(DEFINE, "define", word).format(word=word), answer)]
    then = list(further(word, first))
    if then and number(f"then {word}") % 2 == 0:
        question, reply, _ = pick(then, "which", word)
        turns.append((question, reply))
    yield turns
    if then:
        _, reply, alone = pick(then, "alone", word)
        yield [(alone, reply)]


def further(word: str, sense: Sense) -> Iterator[tuple[str, str, str]]:
    """A question that follows, its answer, and the same question standing alone."""
    ask = {"word": word}
    if others(word, sense):
        yield pick(THEN_SYNONYM, "s", word), same(word, sense), pick(SYNONYM, "s", word).format(**ask)
    if sense.opposites:
        answer = f"The opposite of {word} is {sense.opposites[0]}."
        yield pick(THEN_OPPOSITE, "o", word), answer, pick(OPPOSITE, "o", word).format(**ask)
    if sense.examples:
        answer = sentence(sense.examples[0])
        yield pick(THEN_SENTENCE, "e", word), answer, pick(SENTENCE, "e", word).format(**ask)
    if sense.broader and sense.kind == "noun":
        question = pick(BROADER, "b", word).format(**ask)
        yield question, f"{sentence(word)[:-1]} is a kind of {sense.broader}.", question


def rows_of(to: Path, source: str) -> Iterator[str]:
    path = to / "raw" / f"{source}.jsonl"
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["text"]


def computing(to: Path) -> Iterator[Turns]:
    for text in rows_of(to, "dict-foldoc"):
        word, _, rest = text.partition("\n\n")
        meaning = re.sub(r"<[^>]*> ?", "", rest.split("\n\n")[0]).strip()
        if 40 <= len(meaning) <= LETTERS and len(word) < 40 and meaning.endswith("."):
            yield [(pick(COMPUTING, word).format(word=word), meaning)]


def packages(to: Path) -> Iterator[Turns]:
    for text in rows_of(to, "descriptions"):
        name, _, rest = text.partition(": ")
        short, _, long = rest.partition("\n")
        first = re.match(r".+?[.!](?=\s|$)", long.split("\n")[0])
        if first and len(first[0]) < LETTERS and number(f"package {name}") % 6 == 0:
            yield [(pick(PACKAGE, name).format(word=name), f"{sentence(short)} {first[0]}")]


def manual(to: Path) -> Iterator[Turns]:
    for text in (*rows_of(to, "manpages"), *rows_of(to, "manpages-dev")):
        found = re.match(r"NAME\n\n([\w.]+).*? - ([^\n]+)", text)
        if found:
            yield [(pick(MANUAL, found[1]).format(word=found[1]), sentence(found[2]))]


def devil(to: Path) -> Iterator[Turns]:
    for text in rows_of(to, "dict-devil"):
        found = re.match(r"([A-Z][A-Z -]+), (?:n|adj|v\.[it])\. (.+)", text)
        if found and len(found[2]) < LETTERS:
            yield [(pick(DEVIL, found[1]).format(word=found[1].lower()), sentence(found[2]))]


def elements(to: Path) -> Iterator[Turns]:
    for text in rows_of(to, "dict-elements"):
        found = re.match(r"(\w+) Symbol: (\w+) Atomic number: (\d+)", text)
        if found:
            yield [(f"What is the symbol of {found[1]}?", f"The symbol of {found[1]} is {found[2]}.")]
            answer = f"The atomic number of {found[1]} is {found[3]}."
            yield [(f"What is the atomic number of {found[1]}?", answer)]


def small_talk() -> Iterator[Turns]:
    chance = random.Random(2)
    for talk in tomllib.loads((HERE / "talk.toml").read_text())["talk"]:
        for question in talk["questions"]:
            for _ in range(24):
                yield [(question, chance.choice(talk["answers"]))]


def python_rows() -> Iterator[dict[str, Any]]:
    """What `rush` itself makes of the standard library's docstrings (the source `python-docstrings`)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py")):
        for _, row, _ in docstring_questions(str(path)):
            if sum(len(message["content"]) for message in row["messages"]) < 1200:
                yield row


def pairs(words: dict[str, list[Sense]], most: int) -> Iterator[dict[str, str]]:
    """The right definition beside a wrong one: another word's, one that repeats itself, one that breaks off."""
    by_kind: dict[str, list[str]] = {}
    for word, senses in words.items():
        by_kind.setdefault(senses[0].kind, []).append(word)
    chosen = sorted(words, key=lambda word: number(f"pair {word}"))[:most]
    for word in chosen:
        sense = words[word][0]
        right = defined(word, sense)
        how = number(f"how {word}") % 4
        other = words[pick(by_kind[sense.kind], "wrong", word)][0]
        start = sense.gloss.split()
        wrong = (
            f"The {sense.kind} {word} means: {other.gloss}."
            if how < 2
            else f"The {sense.kind} {word} means: {' '.join([*start[:4]] * 5)}"
            if how == 2
            else f"The {sense.kind} {word} means: {' '.join(start[: max(1, len(start) // 2)])}"
        )
        if wrong != right:
            yield {"prompt": pick(DEFINE, "pair", word).format(word=word), "chosen": right, "rejected": wrong}


def definitions(words: dict[str, list[Sense]], most: int = 1500) -> Iterator[dict[str, Any]]:
    """Which of four glosses is this word's? The others are those of words of the same kind."""
    glosses: dict[str, list[str]] = {}
    for senses in words.values():
        glosses.setdefault(senses[0].kind, []).append(senses[0].gloss)
    for word in sorted(words, key=lambda word: number(f"choice {word}"))[:most]:
        sense = words[word][0]
        known = {one.gloss for one in words[word]}
        wrong = [gloss for gloss in glosses[sense.kind] if gloss not in known]
        yield choice(f"{word} ({sense.kind}):", f"{sense.gloss}.", [f"{gloss}." for gloss in wrong], word)


def synonyms(words: dict[str, list[Sense]], most: int = 1500) -> Iterator[dict[str, Any]]:
    """Which of four words means the same?"""
    chosen = [word for word in words if others(word, words[word][0])]
    for word in sorted(chosen, key=lambda word: number(f"synonym {word}"))[:most]:
        sense = words[word][0]
        known = {other for one in words[word] for other in one.synonyms}
        wrong = [other for other in chosen if words[other][0].kind == sense.kind and other not in known]
        yield choice(
            f"A synonym of {word} is", f"{others(word, sense)[0]}.", [f"{one}." for one in wrong], word
        )


def choice(query: str, right: str, wrong: list[str], word: str) -> dict[str, Any]:
    chance = random.Random(number(f"options {word}"))
    options = [right, *chance.sample(wrong, 3)]
    chance.shuffle(options)
    return {"query": query, "choices": options, "gold": options.index(right)}


def messages(turns: Turns) -> list[dict[str, str]]:
    return [
        {"role": role, "content": content}
        for question, answer in turns
        for role, content in (("user", question), ("assistant", answer))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    sys.stdout.write(f"{path}: {len(rows):,} rows\n")


if __name__ == "__main__":
    main()
