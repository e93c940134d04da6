"""The field's words (docs/words.md): phrases that an engineer would have to translate do not come back."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "rush",
    "scripts",
    "examples",
    "docs",
    "recipes",
    "ladders",
    "pipelines",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
)
ENDINGS = (".py", ".toml", ".md", ".h", ".cpp", ".cu", ".html", ".js", "Makefile")
EXCEPT = {
    "docs/words.md": "lists the phrases",
    "docs/guide/ru.md": "is in Russian",
    "docs/first-hour.md": "shows recorded output",
    "docs/from-nothing.md": "shows recorded conversations",
    "scripts/performance_table.py": "reads the names in old records",
    "rush/data/conversations/readings.py": "has sentences of a conversation",
}
"""Files that are not searched, and why."""
PHRASES = {
    r"\b(?:8-bit|half) products?\b": "fp8 matmul, fp16 matmul",
    r"\bheads? in 8 bits\b": "fp8 LM head",
    r"\bround\w* by chance\b": "stochastic rounding",
    r"\brounded to the nearest(?! integer)\b": "round-to-nearest",
    r"\bshort accumulators?\b": "fast accumulation",
    r"\bturned over\b": "transposed",
    r"\b(?:made|computed|calculated) again\b": "recomputed; repeated",
    r"\bspoil(?:s|ed|t|ing)?\b": "non-finite; damaged",
    r"\bwords of (?:a|the) vocabulary\b|\bcut vocabular": "tokens; vocab shard",
    r"\blines? of tokens\b": "token stream",
    r"\bgains? and offsets?\b": "weight and bias",
    r"\bin money\b": "cost",
    r"\bas (?:it|they) stands?\b": "unchanged",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bvouch": "verify",
    r"\bforet(?:ell|old)": "predict",
    r"\bhand(?:s|ed|ing)? over\b": "pass",
    r"\bstrangers?\b": "untrusted",
    r"\brules? of now\b": "the current rule",
    r"\b(?:goes|going|went|go) on\b": "continue; resume",
    r"\bheld against\b": "compared with",
    r'(?-i:(?:"""|^\s*# )Of [a-z])': "a sentence with its subject first",
}
"""What not to write, and what to write instead."""


def _files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = listed.stdout.split("\0") if listed.returncode == 0 else []
    return [
        ROOT / name
        for name in names
        if name.endswith(ENDINGS) and name not in EXCEPT and (ROOT / name).exists()
    ]


TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in _files()}


@pytest.mark.skipif(not TEXTS, reason="it needs a git checkout")
@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_written_in_the_fields_words(phrase: str) -> None:
    found = [
        f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit.group(0).strip()!r}"
        for name, text in TEXTS.items()
        for hit in re.finditer(phrase, text, re.IGNORECASE | re.MULTILINE)
    ]
    assert found == [], f"write instead: {PHRASES[phrase]}"


def test_the_search_finds_a_phrase_in_each_of_its_forms() -> None:
    examples = "rounds by chance. It was mended and goes on. A stranger's file. head in 8 bits; as it stands; computed again"
    hits = [phrase for phrase in PHRASES if re.search(phrase, examples, re.IGNORECASE | re.MULTILINE)]
    assert len(hits) == 7
