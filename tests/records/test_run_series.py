"""Curves that are read as a file grows: nothing is lost, nothing is read twice."""

from __future__ import annotations

import json
from pathlib import Path

from rush.records.metrics import MetricsRow, RowWriter, truncate_after
from rush.records.run_series import RunSeries, read_series, smoothed
from tests.report.made_up_run import append_rows, row_of, write_run


def test_a_spike_in_ten_thousand_rows_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in range(1, 10_001):
            loss = 99.0 if step == 5_321 else -7.0 if step == 1_345 else 3.0
            file.write(f'{{"step": {step}, "loss": {loss}, "tokens": {step}, "step_s": 0.25}}\n')
    series = read_series(path, most=400)
    assert len(series.buckets) <= 400
    assert series.num_rows == 10_000
    assert sum(one.num_rows for one in series.buckets) == 10_000
    assert max(one.figures["loss"].high for one in series.buckets) == 99.0
    assert min(one.figures["loss"].low for one in series.buckets) == -7.0
    assert sum(one.figures["loss"].total for one in series.buckets) == 99.0 - 7.0 + 3.0 * 9_998
    assert series.seconds == 2_500.0
    assert series.buckets[-1].step == 10_000


def test_reading_as_it_grows_gives_the_same_as_reading_at_once_and_reads_every_byte_once(
    tmp_path: Path,
) -> None:
    folder = write_run(tmp_path / "run", rows=5)
    series = RunSeries(folder / "metrics.jsonl", most=64)
    for first in range(6, 500, 37):
        append_rows(folder, range(first, first + 37))
        assert series.refresh()
        assert not series.refresh()
    whole = read_series(folder / "metrics.jsonl", most=64)
    assert series.buckets == whole.buckets
    assert series.validations == whole.validations
    assert series.bytes_read == (folder / "metrics.jsonl").stat().st_size
    assert series.generation > 0  # buckets were joined


def test_an_unfinished_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(row_of(1)) + "\n"
    path.write_text(line[:30])
    series = read_series(path)
    assert series.num_rows == 0
    path.write_text(line)
    series.refresh()
    assert (series.num_rows, series.num_broken, series.step) == (1, 0, 1)


def test_a_resumed_run_that_cut_rows_away_is_read_anew(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rows=40)
    series = read_series(folder / "metrics.jsonl")
    before = series.generation
    truncate_after(folder / "metrics.jsonl", 30)
    append_rows(folder, range(31, 36))
    assert series.refresh()
    assert series.generation > before
    assert series.num_rows == series.step == 35
    assert [one.step for one in series.buckets] == list(range(1, 36))


def test_broken_lines_and_odd_values_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = ['{"step": 1, "loss": 3.0}', "no json", '{"loss": 1}', "[1]", '{"step": true}', '{"step": 2, "loss": "x"}',
            '{"step": 3, "loss": 1e300, "skipped": true}', '{"step": 4, "loss": null, "not_finite": {"loss": "nan"}}']  # fmt: skip
    path.write_text("\n".join(rows) + "\n" + "x" * (3 << 20) + '\n{"step": 5, "loss": 2.0}\n')
    series = read_series(path)
    assert (series.num_rows, series.num_broken) == (5, 5)
    assert (series.num_skipped, series.num_not_finite, series.first_not_finite) == (1, 1, 4)
    assert [one.figures["loss"].mean for one in series.buckets if "loss" in one.figures] == [3.0, 2.0]


def test_the_final_loss_is_the_mean_over_labels_of_the_last_tenth(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as writer:
        for step in range(1, 21):
            writer.write({"step": step, "loss": float(step), "labels": step})
    final = read_series(tmp_path / "metrics.jsonl").final_loss()
    assert final is not None
    assert final == ((19 * 19 + 20 * 20) / 39, 2)


def test_a_straight_line_stays_where_it_is_when_smoothed() -> None:
    values = [10.0 - 0.01 * at for at in range(1000)]
    assert max(abs(a - b) for a, b in zip(values[10:-10], smoothed(values)[10:-10], strict=True)) < 1e-9
