"""Each stage removes what a few plain lines of Python say it should, and reports it."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove")

from rush.data import train_bpe
from rush.data.clean import clean, parse_pipeline, row_files
from rush.errors import DataError, RecipeError

Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several units from a few hundred rows, so that stages have something to merge."""
    monkeypatch.setattr(row_files, "MIN_UNIT_BYTES", 20_000)


def run(folder: Path, content: Rows, *stages: dict[str, Any], **settings: Any) -> tuple[Rows, dict[str, Any]]:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in content))
    pipeline = parse_pipeline({"stage": list(stages), **settings})
    report = clean(pipeline, [str(source)], folder / "out.jsonl", workers=1)
    assert report is not None
    kept = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert report["documents"]["read"] == len(content)
    assert report["documents"]["kept"] == len(kept)
    return kept, report


def random_rows(count: int = 400, seed: int = 0) -> Rows:
    chance = random.Random(seed)
    words = [f"{a}{b}" for a in "bcdfgklmn" for b in ("a", "e", "ira", "olt", "uk")]
    return [
        {
            "id": index,
            "text": " ".join(chance.choices(words, k=chance.randint(1, 60))),
            "tags": [f"t{int(chance.paretovariate(0.7))}" for _ in range(chance.randint(0, 5))],
        }
        for index in range(count)
    ]


def test_lengths_in_words_and_tokens_and_items(tmp_path: Path) -> None:
    content = random_rows()
    tokenizer = train_bpe((row["text"] for row in content), 300)
    tokenizer.save(tmp_path / "tokenizer")
    kept, report = run(
        tmp_path,
        content,
        {"kind": "words", "min": 5, "max": 50},
        {"kind": "tokens", "max": 60, "tokenizer": str(tmp_path / "tokenizer")},
        {"kind": "items", "field": "tags", "min": 1, "max": 4},
    )
    after_words = [row for row in content if 5 <= len(row["text"].split()) <= 50]
    after_tokens = [row for row in after_words if len(tokenizer.encode(row["text"])) <= 60]
    expected = [row for row in after_tokens if 1 <= len(row["tags"]) <= 4]
    assert kept == expected
    sizes = [len(content), len(after_words), len(after_tokens), len(expected)]
    assert [stage["removed"] for stage in report["stages"]] == [
        before - after for before, after in itertools.pairwise(sizes)
    ]
    assert all(stage["removed"] > 0 for stage in report["stages"])
    for example in report["stages"][0]["examples"]:
        assert example["reason"].split(",")[0].split()[0] == str(len(example["row"]["text"].split()))


@pytest.mark.parametrize("count", ["occurrences", "documents"])
def test_rare_items_are_counted_over_all_units(tmp_path: Path, count: str) -> None:
    content = random_rows()
    content[3]["tags"] = ["once twice"] * 6  # often, but in one document
    kept, report = run(
        tmp_path, content, {"kind": "rare_items", "field": "tags", "min_count": 5, "count": count}
    )
    seen = Counter(
        tag for row in content for tag in (set(row["tags"]) if count == "documents" else row["tags"])
    )
    assert kept == [row for row in content if all(seen[tag] >= 5 for tag in row["tags"])]
    assert (content[3] in kept) == (count == "occurrences")
    for example in report["stages"][0]["examples"]:
        rarest = min(seen[tag] for tag in example["row"]["tags"])
        assert f"seen {rarest} time" in example["reason"]


def test_rare_items_only_count_what_reached_the_stage(tmp_path: Path) -> None:
    """The order of stages is the order in which they act."""
    content = [{"text": "short", "tags": ["x"]}] * 4 + [{"text": "long enough text", "tags": ["x"]}]
    words = {"kind": "words", "min": 3}
    rare = {"kind": "rare_items", "field": "tags", "min_count": 5}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert len(run(tmp_path / "a", content, words, rare)[0]) == 0
    assert len(run(tmp_path / "b", content, rare, words)[0]) == 1


def test_a_regex_must_or_must_not_match(tmp_path: Path) -> None:
    content = [{"text": text} for text in ("see http://x", "plain", "PLAIN", "none")]
    kept, report = run(
        tmp_path, content, {"kind": "regex", "must_match": "(?i)plain|http", "must_not_match": "https?://"}
    )
    assert [row["text"] for row in kept] == ["plain", "PLAIN"]
    assert {example["reason"] for example in report["stages"][0]["examples"]} == {
        "'http://' matches 'https?://'",
        "nothing matches '(?i)plain|http'",
    }


def test_of_exact_duplicates_the_first_in_the_input_is_kept(tmp_path: Path) -> None:
    chance = random.Random(1)
    content = random_rows(300)
    for index in range(150):
        content.append({**chance.choice(content), "id": 1000 + index})
    kept, report = run(tmp_path, content, {"kind": "exact_duplicates"})
    first: dict[str, Any] = {}
    for row in content:
        first.setdefault(row["text"], row)
    assert kept == list(first.values())
    assert report["stages"][0]["removed"] == len(content) - len(first)


def test_exact_duplicates_by_fields_ignoring_case_and_white_space(tmp_path: Path) -> None:
    content = [
        {"id": 0, "text": "A  b", "n": 1},
        {"id": 1, "text": "a b\n", "n": 1},
        {"id": 2, "text": "a b", "n": 2},
        {"id": 3, "text": "ab", "n": 1},
    ]
    stage = {"kind": "exact_duplicates", "fields": ["text", "n"], "ignore_case": True, "ignore_space": True}
    kept, _ = run(tmp_path, content, stage)
    assert [row["id"] for row in kept] == [0, 2, 3]


def test_near_duplicates_are_found_across_units_and_the_first_is_kept(tmp_path: Path) -> None:
    """Against all pairs, compared by brute force: nearly equal ones go, unlike ones all stay."""
    chance = random.Random(2)
    content = [row for row in random_rows(600, seed=3) if len(row["text"].split()) >= 40]
    copies = []
    for row in chance.sample(content, 40):
        words = row["text"].split()
        words[chance.randrange(len(words))] = "changed"
        copies.append({**row, "id": row["id"] + 10_000, "text": " ".join(words)})
    mixed = content + copies
    kept, report = run(tmp_path, mixed, {"kind": "near_duplicates", "buckets": 30, "hashes_per_bucket": 4})

    def grams(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return set(zip(*(words[shift:] for shift in range(5)), strict=False))

    def likeness(one: str, two: str) -> float:
        return len(grams(one) & grams(two)) / len(grams(one) | grams(two))

    originals = {row["id"]: row for row in content}
    found = [row for row in copies if row not in kept]
    assert all(row in kept for row in content)  # none of the first ones, and no chance meeting
    sure = [row for row in copies if likeness(row["text"], originals[row["id"] - 10_000]["text"]) > 0.75]
    assert len(sure) > 20
    assert all(row in found for row in sure)
    lines = {f"in.jsonl:{number}": row for number, row in enumerate(mixed, start=1)}
    for example in report["stages"][0]["examples"]:
        stays = lines[example["reason"].removeprefix("much like ")]
        assert stays["id"] == example["row"]["id"] - 10_000


def test_numbers_distinguish_near_duplicates_unless_ignored(tmp_path: Path) -> None:
    question = "how much is the sum of the two numbers that now follow"
    content = [{"text": f"{question} {number} and {number + 3}"} for number in range(20)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    stage: dict[str, Any] = {"kind": "near_duplicates", "buckets": 4, "hashes_per_bucket": 20}
    assert len(run(tmp_path / "a", content, stage)[0]) == 20
    assert len(run(tmp_path / "b", content, {**stage, "ignore_numbers": True})[0]) == 1


def test_the_minhash_of_a_long_document_in_chunks_is_that_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature

    from rush.data.clean.duplicates import NearSignatures, WhitespaceTokenizer, near_config

    pipeline = parse_pipeline({"stage": [{"kind": "near_duplicates"}]})
    ours = NearSignatures(str(tmp_path / "a"), str(tmp_path / "b"), pipeline.stage[0])  # type: ignore[arg-type]
    plain = MinhashDedupSignature(
        str(tmp_path / "c"), near_config(pipeline.stage[0]), language=WhitespaceTokenizer()
    )  # type: ignore[arg-type]
    monkeypatch.setattr("rush.data.clean.duplicates.SHINGLES_AT_ONCE", 7)
    for count in (1, 7, 8, 50):
        shingles = np.random.default_rng(0).integers(0, 2**63, size=(count, 1)).astype(np.uint64)
        assert ours.get_signature(shingles) == plain.get_signature(shingles)


def test_languages_are_identified(tmp_path: Path) -> None:
    pytest.importorskip("py3langid")
    texts = {
        "en": "The soup is simmered over a low heat until the vegetables are soft and the broth is clear.",
        "de": "Die Suppe wird bei schwacher Hitze gekocht, bis das Gemüse weich und die Brühe klar ist.",
        "fr": "La soupe est mijotée à feu doux jusqu'à ce que les légumes soient tendres et le bouillon clair.",
    }
    content = [{"id": code, "text": text} for code, text in texts.items()]
    kept, report = run(tmp_path, content, {"kind": "language", "languages": ["en", "fr"]})
    assert [row["id"] for row in kept] == ["en", "fr"]
    assert report["stages"][0]["examples"][0]["reason"].startswith("language de (")
    unknown = parse_pipeline({"stage": [{"kind": "language", "languages": ["english"]}]})
    with pytest.raises(RecipeError, match="'english' is not a language code"):
        clean(unknown, [str(tmp_path / "in.jsonl")], tmp_path / "b.jsonl")


def test_a_missing_field_is_an_error_or_a_counted_removal(tmp_path: Path) -> None:
    content = [{"text": "a b c", "tags": ["x"]}, {"text": "a b c"}, {"text": "a b c", "tags": None}]
    stage = {"kind": "rare_items", "field": "tags", "min_count": 2}
    with pytest.raises(DataError, match=r"in\.jsonl:2: no field 'tags'.*Fields found: text\."):
        run(tmp_path, content, stage)
    kept, report = run(tmp_path, [*content, content[0]], stage, on_missing="drop")
    assert kept == [content[0], content[0]]
    assert (report["stages"][0]["removed"], report["stages"][0]["missing_field"]) == (2, 2)


def test_examples_are_few_spread_and_the_same_every_time(tmp_path: Path) -> None:
    content = [{"id": index, "text": "word"} for index in range(3000)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    run(tmp_path / "a", content, {"kind": "words", "min": 2})
    run(tmp_path / "b", content, {"kind": "words", "min": 2})
    sample = (tmp_path / "a" / "out.removed" / "01-words.jsonl").read_text()
    assert sample == (tmp_path / "b" / "out.removed" / "01-words.jsonl").read_text()
    ids = [json.loads(line)["row"]["id"] for line in sample.splitlines()]
    assert len(ids) == 20
    assert max(ids) > 1500
    assert min(ids) < 1500
