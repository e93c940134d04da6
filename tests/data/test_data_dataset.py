from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rush.data import Document, TokenDataset, Tokenizer, open_source, read_manifest
from rush.data.holdout import split_of
from rush.errors import DataError, RecipeError


def stream(corpus_file: Path, tokenizer: Tokenizer, split: str) -> tuple[list[int], list[Document]]:
    """The token stream a split must be, from the source itself, and the document of each token."""
    tokens: list[int] = []
    owners: list[Document] = []
    for document in open_source("files", [str(corpus_file)]):
        if split_of(document.text, 0, 0.2) == split:
            ids = [*tokenizer.encode(document.text), tokenizer.eos_id]
            tokens += ids
            owners += [document] * len(ids)
    return tokens, owners


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("sequence", [1, 7, 64, 1000])
def test_windows_are_overlapping_pieces_of_the_token_stream(
    prepared: Path, corpus_file: Path, tokenizer: Tokenizer, split: str, sequence: int
) -> None:
    tokens, _ = stream(corpus_file, tokenizer, split)
    dataset = TokenDataset(prepared, split, sequence)
    assert len(read_manifest(prepared).of(split)) > 3, "windows must cross shards for this to mean something"
    assert dataset.num_tokens == len(tokens)
    expected = [
        tokens[start : start + sequence + 1]
        for start in range(0, len(tokens), sequence)
        if start + sequence + 1 <= len(tokens)
    ]
    assert len(dataset) == len(expected)
    step = max(len(expected) // 500, 1)
    for index in [*range(0, len(expected), step), len(expected) - 1]:
        window = dataset.window(index)
        assert window.dtype == np.int64
        assert window.tolist() == expected[index]


def test_one_window_exactly_is_enough_and_one_token_less_is_not(prepared: Path) -> None:
    tokens = read_manifest(prepared).tokens("validation")
    assert len(TokenDataset(prepared, "validation", tokens - 1)) == 1
    with pytest.raises(
        DataError, match=rf"too short: .* with {tokens} tokens, and one window needs {tokens + 1}"
    ):
        TokenDataset(prepared, "validation", tokens)


def test_a_sample_is_named_by_the_document_it_begins_in(
    prepared: Path, corpus_file: Path, tokenizer: Tokenizer
) -> None:
    _, owners = stream(corpus_file, tokenizer, "train")
    dataset = TokenDataset(prepared, "train", 16)
    for index in range(0, len(dataset), 7):
        assert dataset.sample_name(index) == f"train[{index}] {owners[index * 16].id}"


def test_windows_outside_the_dataset_do_not_exist(prepared: Path) -> None:
    dataset = TokenDataset(prepared, "train", 16)
    for index in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset.window(index)


def test_bad_arguments_are_refused(prepared: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="did you mean 'validation'"):
        TokenDataset(prepared, "valid", 16)
    with pytest.raises(RecipeError, match="at least 1"):
        TokenDataset(prepared, "train", 0)
    with pytest.raises(DataError, match="not prepared data"):
        TokenDataset(tmp_path, "train", 16)
