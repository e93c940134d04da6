from __future__ import annotations

import dataclasses
import fcntl
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rush.data import (
    Preparation,
    Progress,
    TokenDataset,
    Tokenizer,
    prepare,
    read_manifest,
    train_bpe,
    verify_shards,
)
from rush.data.preparation_unit import split_of
from rush.data.prepare import fingerprint
from rush.data.shards import map_shard
from rush.errors import DataError, MachineError, RecipeError


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names_of(folder: Path, split: str) -> list[str]:
    manifest = read_manifest(folder)
    mapped = [map_shard(folder, manifest, shard) for shard in manifest.of(split)]
    return [m.document_name(i) for m in mapped for i in range(len(m.starts) - 1)]


@pytest.mark.usefixtures("small_units")
def test_the_result_does_not_depend_on_the_number_of_workers(
    preparation: Preparation, prepared: Path, tmp_path: Path
) -> None:
    folder = prepare(preparation, tmp_path, workers=3)
    assert folder.name == prepared.name
    assert contents(folder) == contents(prepared)
    verify_shards(folder, full=True)


def test_every_document_is_in_exactly_one_split_and_none_is_lost(
    prepared: Path, corpus_file: Path, texts: list[str]
) -> None:
    expected: dict[str, list[str]] = {"train": [], "validation": []}
    for line, text in enumerate(texts, start=1):
        expected[split_of(text, 0, 0.2)].append(f"{corpus_file}:{line}")
    assert names_of(prepared, "train") == expected["train"]
    assert names_of(prepared, "validation") == expected["validation"]
    assert 30 < len(expected["validation"]) < 90


def test_the_split_of_a_document_does_not_depend_on_its_position_or_repetition(
    tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable[[Path, list[str]], Path], texts: list[str]
) -> None:
    """The leak test: shuffled, duplicated, spread over files, no text is ever on both sides."""
    write_jsonl(tmp_path / "a.jsonl", texts[::-1])
    write_jsonl(tmp_path / "b.jsonl", texts[100:] + texts[:50])
    folder = prepare(
        Preparation("files", (f"{tmp_path}/*.jsonl",), tokenizer=str(tokenizer_folder), validation=0.2),
        tmp_path / "cache",
        workers=1,
    )
    tokenizer = Tokenizer.load(folder / "tokenizer")
    sides: dict[str, set[str]] = {}
    for split in ("train", "validation"):
        manifest = read_manifest(folder)
        for shard in manifest.of(split):
            mapped = map_shard(folder, manifest, shard)
            for start, stop in zip(mapped.starts, mapped.starts[1:], strict=False):
                text = tokenizer.decode(mapped.tokens[start : stop - 1])
                sides.setdefault(text, set()).add(split)
    assert set(sides) == set(texts)
    assert all(len(found) == 1 for found in sides.values())
    assert {text: found.copy().pop() for text, found in sides.items()} == {
        text: split_of(text, 0, 0.2) for text in texts
    }


def test_the_split_follows_the_seed_and_the_fraction(texts: list[str]) -> None:
    def held_out(seed: int, fraction: float) -> set[str]:
        return {text for text in texts if split_of(text, seed, fraction) == "validation"}

    assert held_out(0, 0.0) == set()
    assert held_out(0, 0.1) < held_out(0, 0.3)  # a larger fraction only adds
    assert held_out(0, 0.3) != held_out(1, 0.3)
    many = sum(split_of(str(n), 5, 0.25) == "validation" for n in range(20_000))
    assert abs(many / 20_000 - 0.25) < 0.015


def test_an_unchanged_source_is_reused_and_a_changed_one_is_prepared_again(
    tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable[[Path, list[str]], Path], texts: list[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts[:50])
    base = Preparation("files", (str(path),), tokenizer=str(tokenizer_folder), validation=0.2)
    folder = prepare(base, tmp_path / "cache", workers=1)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert prepare(base, tmp_path / "cache", workers=1) == folder
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    others = [
        dataclasses.replace(base, seed=1),
        dataclasses.replace(base, validation=0.3),
        dataclasses.replace(base, limit=40),
        dataclasses.replace(base, vocab_size=500),
        dataclasses.replace(base, tokenizer="train", vocab_size=300),
        dataclasses.replace(base, tokenizer="train", vocab_size=301),
    ]
    folders = {prepare(other, tmp_path / "cache", workers=1) for other in others}
    write_jsonl(path, texts[:51])
    folders.add(prepare(base, tmp_path / "cache", workers=1))
    assert len(folders | {folder}) == len(others) + 2


def test_another_tokenizer_at_the_same_path_is_prepared_again(
    tmp_path: Path, corpus_file: Path, texts: list[str]
) -> None:
    base = Preparation("files", (str(corpus_file),), tokenizer=str(tmp_path / "tokenizer"))
    train_bpe(texts, 300).save(tmp_path / "tokenizer")
    first = prepare(base, tmp_path / "cache", workers=1)
    train_bpe(texts[:150], 300).save(tmp_path / "tokenizer")
    assert prepare(base, tmp_path / "cache", workers=1) != first


def test_a_trained_tokenizer_sees_only_training_documents_from_all_over_the_corpus(
    tmp_path: Path, write_jsonl: Callable[[Path, list[str]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rush.data.sources.MIN_UNIT_BYTES", 2000)
    texts = [f"{'abcdefgh'[n // 100] * 12} {n}" for n in range(800)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    seen: list[str] = []

    def spy(stream: Iterable[str], vocab_size: int, max_bytes: int | None) -> Tokenizer:
        seen.extend(stream)
        return train_bpe(seen, vocab_size)

    monkeypatch.setattr(importlib.import_module("rush.data.prepare"), "train_bpe", spy)
    base = Preparation("files", (str(path),), vocab_size=270, validation=0.3, tokenizer_bytes=4000)
    folder = prepare(base, tmp_path / "cache", workers=1)
    assert all(split_of(text, 0, 0.3) == "train" for text in seen)
    assert {text[0] for text in seen} == set("abcdefgh")
    assert 3000 < sum(map(len, seen)) < 6000
    assert Tokenizer.load(folder / "tokenizer").vocab_size == 270 == read_manifest(folder).vocab_size


@pytest.mark.usefixtures("small_units")
def test_progress_counts_up_to_the_whole(preparation: Preparation, tmp_path: Path) -> None:
    reports: list[Progress] = []
    folder = prepare(preparation, tmp_path, workers=1, progress=reports.append)
    manifest = read_manifest(folder)
    assert [r.units for r in reports] == list(range(reports[-1].total_units + 1))
    assert reports[-1].documents == 300
    assert reports[-1].tokens == manifest.tokens("train") + manifest.tokens("validation")


@pytest.mark.usefixtures("small_units")
def test_an_error_in_a_worker_process_reaches_the_user_and_finished_units_are_kept(
    tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable[[Path, list[str]], Path], texts: list[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    good = path.read_text()
    path.write_text(good + '{"text": broken\n')
    os.utime(path, ns=(1, 1))
    base = Preparation("files", (str(path),), tokenizer=str(tokenizer_folder))
    with pytest.raises(DataError, match=r"a\.jsonl:301: not valid JSON"):
        prepare(base, tmp_path / "cache", workers=2)
    (folder,) = (tmp_path / "cache").iterdir()
    assert not (folder / "manifest.json").exists()
    kept = len(list((folder / "units").iterdir()))
    assert kept >= 1
    with pytest.raises(DataError, match="not prepared data"):
        TokenDataset(folder, "train", 16)


def test_two_preparations_of_one_folder_exclude_each_other(
    preparation: Preparation, tmp_path: Path, prepared: Path
) -> None:
    folder = tmp_path / prepared.name
    folder.mkdir()
    with (folder / "lock").open("w") as held:
        held.write("4321")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MachineError, match=r"prepared by another process \(pid 4321\)"):
            prepare(preparation, tmp_path, workers=1, wait=False)
        found: list[Path] = []
        waiting = threading.Thread(target=lambda: found.append(prepare(preparation, tmp_path, workers=1)))
        waiting.start()
        time.sleep(0.4)
        assert not found
        assert not (folder / "manifest.json").exists()
    waiting.join(30)
    assert found == [folder]


@pytest.mark.usefixtures("small_units")
def test_force_prepares_again_over_damage(preparation: Preparation, prepared: Path, tmp_path: Path) -> None:
    folder = prepare(preparation, tmp_path, workers=1)
    (folder / "train" / "00000.bin").write_bytes(b"x")
    with pytest.raises(DataError, match="damaged"):
        prepare(preparation, tmp_path, workers=1)
    assert contents(prepare(preparation, tmp_path, workers=1, force=True)) == contents(prepared)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(preparation: Preparation, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 400 entries, more than the vocabulary of 300"):
        prepare(dataclasses.replace(preparation, vocab_size=300), tmp_path)
    padded = prepare(dataclasses.replace(preparation, vocab_size=70_000), tmp_path, workers=1)
    assert (read_manifest(padded).vocab_size, read_manifest(padded).dtype) == (70_000, "<u4")


def test_a_corpus_whose_documents_are_all_empty_is_refused(
    tmp_path: Path, tokenizer_folder: Path, write_jsonl: Callable[[Path, list[str]], Path]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(DataError, match="The corpus is empty"):
        prepare(Preparation("files", (str(path),), tokenizer=str(tokenizer_folder)), tmp_path, workers=1)


def test_a_cache_that_cannot_be_written_is_a_machine_error(preparation: Preparation, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="Cannot write prepared data"):
        prepare(preparation, tmp_path / "file", workers=1)


@pytest.mark.parametrize("validation", [-0.1, 1.0, 1.5])
def test_a_validation_fraction_outside_its_range_is_refused(validation: float) -> None:
    with pytest.raises(RecipeError, match="fraction"):
        Preparation(validation=validation, vocab_size=300)


def test_bad_arguments_are_refused(preparation: Preparation, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="needs a vocabulary size"):
        Preparation()
    with pytest.raises(RecipeError, match="at least 1"):
        prepare(preparation, tmp_path, workers=0)
    with pytest.raises(DataError, match="No tokenizer"):
        prepare(dataclasses.replace(preparation, tokenizer="./missing"), tmp_path)


def test_the_fingerprint_is_plain_and_repeatable(preparation: Preparation) -> None:
    key, tokenizer = fingerprint(preparation)
    assert fingerprint(preparation)[0] == key
    assert len(key) == 64
    assert tokenizer is not None
    json.dumps(preparation.describe())
