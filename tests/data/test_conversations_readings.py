"""Conversations whose lengths are drawn: by the stated distribution, of real text, the same every time."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from rush.data.conversations import readings
from rush.data.conversations.readings import (
    ANSWER_SIGMA,
    ANSWER_TOKENS,
    LETTERS_PER_TOKEN,
    MEDIAN_TOKENS,
    SIGMA,
    drawn_answer_tokens,
    drawn_tokens,
)
from rush.data.conversations.rows import plan_rows, read_unit_rows
from rush.errors import DataError

FILE = Path(statistics.__file__)


def letters(row: dict[str, list[dict[str, str]]]) -> int:
    return sum(len(message["content"]) for message in row["messages"])


def test_lengths_are_sampled_from_the_stated_distribution() -> None:
    drawn = sorted(drawn_tokens(f"name {number}") for number in range(4000))
    assert statistics.median(drawn) == pytest.approx(MEDIAN_TOKENS, rel=0.03)
    assert statistics.fmean(drawn) == pytest.approx(1200, rel=0.03)
    assert drawn[3800] == pytest.approx(2410, rel=0.06)
    assert statistics.stdev(math.log(length) for length in drawn) == pytest.approx(SIGMA, rel=0.04)
    assert sum(length > 2048 for length in drawn) / 4000 == pytest.approx(0.094, abs=0.015)


def test_a_conversation_is_as_long_as_it_was_drawn_and_made_of_the_file_s_own_lines() -> None:
    rows = list(readings.readings(str(FILE)))
    assert len(rows) > 5
    text = FILE.read_text()
    for number, (name, row, group) in enumerate(rows):
        assert (name, group) == (f"{FILE}#{number}", str(FILE))
        wanted = LETTERS_PER_TOKEN * drawn_tokens(f"{FILE.parent.name}/statistics#{number}")
        assert letters(row) == pytest.approx(wanted, rel=0.1, abs=60)
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert len(roles) in (6, 8)
        for answer in row["messages"][1::2]:
            assert all(line.strip() in text for line in answer["content"].splitlines())


def test_a_short_file_makes_conversations_as_long_as_any(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text("value = 'the quick brown fox'\n" * 20)
    ((_, row, _),) = readings.readings(str(file))
    assert letters(row) == pytest.approx(
        LETTERS_PER_TOKEN * drawn_tokens(f"{tmp_path.name}/small#0"), rel=0.1
    )
    file.write_text("x = 1\n")
    assert list(readings.readings(str(file))) == []
    file.write_bytes(b"\xff\xfe = 1\n")
    with pytest.raises(DataError, match="cannot be read as Python source"):
        list(readings.readings(str(file)))


def test_it_is_a_source_by_name_and_twice_the_same() -> None:
    (unit, take), *_ = plan_rows("python-readings", (), 3)
    assert take == 3
    first, again = (list(read_unit_rows("python-readings", unit, take)) for _ in range(2))
    assert first == again
    assert len(first) == 3


def test_answers_of_pairs_have_lengths_of_their_own_from_the_stated_distribution() -> None:
    drawn = [
        [drawn_answer_tokens(f"name {number}", which) for number in range(4000)]
        for which in ("chosen", "rejected")
    ]
    for lengths in drawn:
        assert statistics.median(lengths) == pytest.approx(ANSWER_TOKENS, rel=0.04)
        assert statistics.stdev(map(math.log, lengths)) == pytest.approx(ANSWER_SIGMA, rel=0.04)
    assert abs(statistics.correlation(*drawn)) < 0.06


def test_the_chosen_answer_is_the_module_and_the_rejected_one_its_reverse() -> None:
    rows = [row for _, row, _ in readings.reading_pairs(str(FILE))]
    assert len(rows) > 15
    lines = [line.rstrip() for line in FILE.read_text().splitlines() if line.strip()]
    chosen = rows[0]["chosen"].splitlines()
    rejected = rows[0]["rejected"].splitlines()
    assert [line.strip() for line in chosen[:-1]] == [line.strip() for line in lines[: len(chosen) - 1]]
    assert [line.strip() for line in rejected[:-1]] == [
        line.strip() for line in lines[::-1][: len(rejected) - 1]
    ]
    for number, row in enumerate(rows):
        key = f"{FILE.parent.name}/statistics#{number}"
        for which in ("chosen", "rejected"):
            wanted = LETTERS_PER_TOKEN * drawn_answer_tokens(key, which)
            assert len(row[which]) == pytest.approx(wanted, rel=0.1, abs=60)
    (unit, take), *_ = plan_rows("python-reading-pairs", (), 2)
    assert [row.values for row in read_unit_rows("python-reading-pairs", unit, take)]
