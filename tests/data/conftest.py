"""A small corpus in many units, and a tokenizer trained on it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from rush.data import Preparation, Tokenizer, prepare, sources, train_bpe

LINE = "the quick brown fox jumps over lazy dogs while größere Hunde schlafen 日本語 🦊 and def return"


def make_texts(count: int, seed: int = 0, longest: int = 120) -> list[str]:
    generator = random.Random(seed)
    return [
        f"{i} " + " ".join(generator.choices(LINE.split(), k=generator.randint(1, longest))) + "\n"
        for i in range(count)
    ]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(300)


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Tokenizer:
    return train_bpe(texts, 400)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="session")
def corpus_file(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 8 KiB, so that a small corpus is cut into many."""
    monkeypatch.setattr(sources, "MIN_UNIT_BYTES", 8192)


@pytest.fixture(scope="session")
def preparation(corpus_file: Path, tokenizer_folder: Path) -> Preparation:
    return Preparation(
        source="files", files=(str(corpus_file),), tokenizer=str(tokenizer_folder), validation=0.2
    )


@pytest.fixture(scope="session")
def prepared(preparation: Preparation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of several shards. Tests must not change it; copy it first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "MIN_UNIT_BYTES", 8192)
        return prepare(preparation, tmp_path_factory.mktemp("prepared"), workers=1)


@pytest.fixture(scope="session")
def write_jsonl() -> Callable[[Path, list[str]], Path]:
    def write(path: Path, texts: list[str]) -> Path:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return path

    return write
