"""One row per step, through crashes, full disks and resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.errors import DataError, MachineError
from rush.records.metrics import MetricsRow, RowWriter, read_rows, truncate_after


def write_steps(path: Path, first: int, last: int) -> None:
    with RowWriter(path, MetricsRow) as writer:
        for step in range(first, last + 1):
            writer.write({"step": step, "loss": 1 / step, "tokens": 1000 * step})


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path, MetricsRow)]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_rows_come_back_exactly_as_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 5)
    assert list(read_rows(path, MetricsRow)) == [
        {"step": s, "loss": 1 / s, "tokens": 1000 * s} for s in range(1, 6)
    ]


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RowWriter(path, MetricsRow) as writer:
        writer.write({"step": 1})
        assert steps(path) == [1]


def test_nan_and_infinity_are_null_and_named_and_the_line_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RowWriter(path, MetricsRow) as writer:
        writer.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1})
    row = json.loads(path.read_text(), parse_constant=refuse_constant)
    assert row == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.1,
                   "not_finite": {"loss": "nan", "grad_norm": "inf"}}  # fmt: skip


@pytest.mark.parametrize("cut", range(1, 45))
def test_a_last_line_torn_anywhere_is_left_out_and_the_next_row_is_not_glued_to_it(
    tmp_path: Path, cut: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines)[: -min(cut, len(lines[-1]))])
    assert steps(path) == [1, 2]
    write_steps(path, 3, 4)
    assert steps(path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "broken", [b'{"step": 2, "lo\n', b"[1]\n", b'{"loss": 1}\n', b'{"step": true}\n', b"\x00\xff\n", b"\n"]
)
def test_a_broken_line_in_the_middle_is_an_error_with_its_line_number(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + broken + b'{"step": 3}\n')
    with pytest.raises(DataError, match="line 2 ") as caught:
        list(read_rows(path, MetricsRow))
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="line 2 "):
        truncate_after(path, 3)


def test_truncating_keeps_the_very_bytes_of_the_rows_up_to_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 10)
    before = path.read_bytes().splitlines(keepends=True)
    assert truncate_after(path, 7) == 7
    assert path.read_bytes() == b"".join(before[:7])
    write_steps(path, 8, 12)
    assert steps(path) == list(range(1, 13))


def test_truncating_cuts_whatever_a_power_cut_left_behind_the_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 4)
    good = path.read_bytes()
    for rubbish in (
        b"\x00" * 50,
        b"\x00\x00\n\x00\n",
        b'{"step": 5}\n\x00\n{"step": 6}\n',
        b'{"step": 5, "lo',
    ):
        path.write_bytes(good + rubbish)
        assert truncate_after(path, 4) == 4
        assert path.read_bytes() == good


def test_truncating_to_the_beginning_or_a_missing_file_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert truncate_after(path, 3) == 0
    assert not path.exists()
    write_steps(path, 1, 3)
    assert truncate_after(path, 0) == 0
    assert path.read_bytes() == b""


def test_a_step_cannot_be_written_twice_not_even_by_a_second_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    with (
        RowWriter(path, MetricsRow) as writer,
        pytest.raises(AssertionError, match="step 3 written after step 3"),
    ):
        writer.write({"step": 3})


def test_a_full_disk_is_a_message_and_the_file_keeps_only_whole_rows(small_disk: Path) -> None:
    path = small_disk / "metrics.jsonl"
    with RowWriter(path, MetricsRow) as writer:

        def fill() -> None:
            for step in range(1, 100):
                writer.write({"step": step, "not_finite": {"note": "x" * 30_000}})

        with pytest.raises(MachineError, match="disk is full"):
            fill()
        assert path.read_bytes().endswith(b"\n")
        kept = steps(path)
        assert kept == list(range(1, len(kept) + 1))
        assert 10 < len(kept) < 99
