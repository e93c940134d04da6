"""`rush bench offload`: both contenders generate from the same files, and what is reported is what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rush.bench.offload import bench_offload, weight_bytes, write_random
from rush.cli import app
from rush.errors import RecipeError
from rush.hub.folders import load_model
from rush.models import SIZES
from rush.records.offload import OFFLOAD, OffloadProcess, OffloadRecord, OffloadRow
from rush.report.offload import picture, table_rows, whole_tokens_per_s


def process(seconds: float) -> OffloadProcess:
    return {"load_s": 1.0, "first_token_s": 2.0, "token_s": [seconds] * 3, "device_bytes": 2**30, "host_bytes": 2**31,
            "imports_bytes": 2**20, "ids": [1, 2, 3, 4]}  # fmt: skip


def row(layers: int, contender: str, seconds: float) -> OffloadRow:
    rate = {"median": 1 / seconds, "low": 0.9 / seconds, "high": 1.1 / seconds}
    return {"shape": "llama-3.1-70b", "layers": layers, "of_layers": 80, "weight_bytes": 10**9, "where": "cpu", "contender": contender,
            "status": "ok", "reason": "", "processes": [process(seconds)], "tokens_per_s": rate, "same_ids": True}  # fmt: skip


def made_up() -> OffloadRecord:
    absent: OffloadRow = {
        **row(8, "accelerate", 1.0),
        "status": "absent",
        "reason": "accelerate not installed",
        "processes": [],
    }
    del absent["tokens_per_s"]
    return {"format": 1, "machine": {}, "dtype": "bfloat16", "prompt_tokens": 4, "new_tokens": 4,
            "rows": [row(8, "rush", 1.0), absent, row(16, "rush", 1.8)]}  # fmt: skip


def test_the_rate_of_a_whole_shape_is_a_straight_line_through_fewer_layers() -> None:
    record = made_up()
    assert whole_tokens_per_s(record["rows"], record["rows"][0]) == pytest.approx(1 / (0.2 + 0.1 * 80))
    assert whole_tokens_per_s(record["rows"][:1], record["rows"][0]) is None, "one row is no line"
    whole = {**record["rows"][0], "layers": 80}
    assert whole_tokens_per_s([], whole) == 1.0  # type: ignore[arg-type]


def test_the_table_and_the_picture_are_drawn_from_the_record(tmp_path: Path) -> None:
    record = made_up()
    OFFLOAD.write(tmp_path, record)
    read = OFFLOAD.read(tmp_path)
    first, absent, second = table_rows(read, "llama-3.1-70b")
    assert first[:5] == ["8 of 80", "cpu", "rush", "1 (0.9-1.1)", "~0.122"]
    assert first[5:] == ["1.0 GiB", "2.0 GiB", "the same"]
    assert absent[3:] == ["absent", "", "", "", "accelerate not installed"]
    assert second[4] == "~0.122"
    assert "rush" in picture(read)
    assert "~" not in picture(read)


def test_random_weights_are_a_folder_that_loads_and_are_written_once(tmp_path: Path) -> None:
    shape = SIZES["llama-tiny"]
    folder = write_random(shape, tmp_path / "model", "bfloat16")
    model = load_model(folder, offload="disk")
    assert model.shape.num_layers == shape.num_layers
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    write_random(shape, tmp_path / "model", "bfloat16")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert weight_bytes(shape, "bfloat16") <= stored < weight_bytes(shape, "bfloat16") + 20_000


def test_what_cannot_be_timed_is_refused() -> None:
    for words, match in (
        (["no-such"], "there is no shape 'no-such'"),
        (["llama-tiny", "--where", "tape"], "--where is 'tape'"),
        (["llama-tiny", "--layers", "0"], "--layers is '0'"),
        (["llama-tiny", "--dtype", "int8"], "--dtype is 'int8'"),
    ):
        with pytest.raises(RecipeError, match=match):
            CliRunner().invoke(app, ["bench", "offload", *words], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_contenders_choose_the_same_tokens_and_hold_less_than_the_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    record = bench_offload(
        ["llama-tiny"], tmp_path, layers=[1], new_tokens=4, processes=1, dtype="float32", device="cpu"
    )
    assert len(record["rows"]) == 4
    assert {one["status"] for one in record["rows"]} == {"ok"}
    assert all(one["same_ids"] for one in record["rows"])
    assert all(len(one["processes"][0]["token_s"]) == 3 for one in record["rows"])
    assert OFFLOAD.read(tmp_path) == record
