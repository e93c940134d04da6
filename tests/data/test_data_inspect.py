from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from rush.data import Tokenizer, corpus_statistics, progress_bar, sample_window
from rush.data.preparation_unit import split_of
from rush.data.prepare import Progress


def test_statistics_are_those_of_the_texts(prepared: Path, texts: list[str], tokenizer: Tokenizer) -> None:
    found = corpus_statistics(prepared)
    json.dumps(found)
    for split in ("train", "validation"):
        chosen = [text for text in texts if split_of(text, 0, 0.2) == split]
        lengths = [len(tokenizer.encode(text)) for text in chosen]
        text_bytes = sum(len(text.encode()) for text in chosen)
        numbers = found["splits"][split]
        assert numbers["documents"] == len(chosen)
        assert numbers["tokens"] == sum(lengths) + len(chosen)
        assert numbers["text_bytes"] == text_bytes
        assert numbers["bytes_per_token"] == text_bytes / sum(lengths)
        assert numbers["document_tokens"]["min"] == min(lengths)
        assert numbers["document_tokens"]["max"] == max(lengths)
        assert abs(numbers["document_tokens"]["median"] - np.median(lengths)) <= 3
        for row in numbers["histogram"]:
            assert row["documents"] == sum(row["from"] <= n < row["below"] for n in lengths)
        assert sum(row["documents"] for row in numbers["histogram"]) == len(chosen)


def test_a_sample_window_shows_the_text_the_model_gets(
    prepared: Path, texts: list[str], tokenizer: Tokenizer
) -> None:
    text = "<|endoftext|>".join(t for t in texts if split_of(t, 0, 0.2) == "train")
    shown = sample_window(prepared, "train", sequence=20)
    assert len(shown["tokens"]) == 21
    assert tokenizer.decode(shown["tokens"]) == shown["text"]
    assert text.startswith(shown["text"].rstrip("�"))
    assert shown["sample"].startswith("train[0] ")
    wrapped = sample_window(prepared, "train", sequence=20, index=shown["windows"])
    assert wrapped == shown


def test_the_progress_bar_shows_the_numbers() -> None:
    drawn = io.StringIO()
    with progress_bar(Console(file=drawn, force_terminal=True, width=120)) as show:
        show(Progress(1, 3, 10, 1000))
        show(Progress(3, 3, 30, 12_345))
    assert "3/3" in drawn.getvalue()
    assert "30 documents, 12,345 tokens" in drawn.getvalue()
