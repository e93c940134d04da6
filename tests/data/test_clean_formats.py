"""Rows come out as they went in, from every format into every format."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datatrove")

from rush.data.clean import clean, parse_pipeline
from rush.errors import DataError, RecipeError

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
WORDS = parse_pipeline({"stage": [{"kind": "words", "min": 2}]})
LINES = [
    b'{"text":"two words",  "n": 1.50, "odd": NaN}',
    b'{"text":"one"}',
    b"",
    '{"text":"grüne Suppe","b":[1,{"c":null}]}\r'.encode(),
    b'{"n": 12345678901234567890123, "text": "two \\u00e4"}',
]


def report_of(found: dict[str, Any] | None) -> dict[str, Any]:
    assert found is not None
    return found


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_kept_lines_of_jsonl_are_the_same_bytes(tmp_path: Path, ending: str) -> None:
    raw = b"\n".join(LINES)
    source = tmp_path / f"in{ending}"
    if ending.endswith(".zst"):
        with arrow.output_stream(str(source), compression="zstd") as stream:
            stream.write(raw)
    else:
        source.write_bytes(gzip.compress(raw) if ending.endswith(".gz") else raw)
    clean(WORDS, [str(source)], tmp_path / "out.jsonl", workers=1)
    kept = [line.rstrip(b"\r") for line in LINES if b"text" in line and b'"one"' not in line]
    assert (tmp_path / "out.jsonl").read_bytes() == b"\n".join(kept) + b"\n"
    clean(WORDS, [str(source)], tmp_path / "packed.jsonl.gz", workers=1)
    packed = (tmp_path / "packed.jsonl.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "out.jsonl").read_bytes()
    assert packed[4:8] == bytes(4)  # no time in the header
    assert (tmp_path / "packed.removed" / "report.json").is_file()


def table() -> Any:
    day = datetime.date(2024, 2, 29)
    return arrow.table(
        {
            "text": arrow.array(["two words", "one", "three words here", "a b"]),
            "when": arrow.array([day, None, day, day]),
            "small": arrow.array([1, 2, 3, 4], arrow.int8()),
            "nested": arrow.array([[{"x": 1.5}], [], None, [{"x": None}]], arrow.list_(arrow.struct([("x", arrow.float32())]))),
            "kind": arrow.array(["p", "q", "p", "q"]).dictionary_encode(),
        }
    )  # fmt: skip


def test_parquet_keeps_its_schema_and_values(tmp_path: Path) -> None:
    parquet.write_table(table(), tmp_path / "in.parquet", row_group_size=2)
    clean(WORDS, [str(tmp_path / "in.parquet")], tmp_path / "out.parquet", workers=1)
    out = parquet.read_table(tmp_path / "out.parquet")
    expected = parquet.read_table(tmp_path / "in.parquet").take([0, 2, 3])
    assert out.schema.equals(expected.schema)
    assert out.equals(expected)


def test_parquet_becomes_lines_of_json(tmp_path: Path) -> None:
    parquet.write_table(table(), tmp_path / "in.parquet")
    report = report_of(clean(WORDS, [str(tmp_path / "in.parquet")], tmp_path / "out.jsonl", workers=1))
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    expected = {"text": "two words", "when": "2024-02-29", "small": 1, "nested": [{"x": 1.5}], "kind": "p"}
    assert first == expected
    assert report["stages"][0]["examples"][0]["document"] == "in.parquet:row 1"


def test_lines_become_parquet_with_every_field_that_any_row_has(tmp_path: Path) -> None:
    rows = [{"text": "a b", "n": 1}, {"text": "c d", "n": 2.5, "tags": ["x"]}, {"text": "e"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    clean(WORDS, [str(tmp_path / "in.jsonl")], tmp_path / "out.parquet", workers=1)
    out = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert out == [{"text": "a b", "n": 1.0, "tags": None}, {"text": "c d", "n": 2.5, "tags": ["x"]}]


def test_a_field_of_two_types_does_not_fit_in_parquet(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a b", "n": 1}\n{"text": "a b", "n": "x"}\n')
    with pytest.raises(DataError, match=r"field 'n' has more than one type.*write a \.jsonl file"):
        clean(WORDS, [str(tmp_path / "in.jsonl")], tmp_path / "out.parquet", workers=1)
    assert not (tmp_path / "out.parquet").exists()


def test_csv_with_lists_in_json_and_line_ends_in_cells(tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["title", "ingredients", "text"])
        for number in range(6):
            items = ["salt", "leek", *(["saffron"] if number == 3 else [])]
            writer.writerow([f"dish, {number}", json.dumps(items), 'boil\nand "eat"'])
    stage = {"kind": "rare_items", "field": "ingredients", "min_count": 2}
    pipeline = parse_pipeline({"stage": [stage]})
    report = report_of(clean(pipeline, [str(tmp_path / "in.csv")], tmp_path / "out.jsonl", workers=1))
    kept = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["title"] for row in kept] == [f"dish, {number}" for number in (0, 1, 2, 4, 5)]
    assert kept[0] == {"title": "dish, 0", "ingredients": '["salt", "leek"]', "text": 'boil\nand "eat"'}
    example = report["stages"][0]["examples"][0]
    assert example["document"] == "in.csv:8"  # each record before it takes two lines
    assert example["reason"] == "'saffron' seen 1 time, fewer than 2"


def test_a_folder_gets_a_file_for_each_unit_and_the_report_beside_them(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "from {name}"}}\n{{"text": "short"}}\n')
    clean(WORDS, [str(tmp_path / "*.jsonl")], tmp_path / "out", workers=1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data-00000.jsonl", "removed", "report.json"]  # fmt: skip
    assert (tmp_path / "out" / "data-00000.jsonl").read_text() == '{"text": "from a"}\n{"text": "from b"}\n'
    assert len((tmp_path / "out" / "removed" / "01-words.jsonl").read_text().splitlines()) == 2


def test_unreadable_rows_are_an_error_with_their_line_or_counted(tmp_path: Path) -> None:
    broken = [b'{"text": "a b"}', b'{"text": ', b'["a b"]', b'{"text": "\xff"}', b'{"text": "\\ud800 x"}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(broken))
    with pytest.raises(DataError, match=r"in\.jsonl:2: not valid JSON"):
        clean(WORDS, [str(tmp_path / "in.jsonl")], tmp_path / "out.jsonl", workers=1)
    skipping = WORDS.model_copy(update={"on_unreadable": "skip"})
    report = report_of(clean(skipping, [str(tmp_path / "in.jsonl")], tmp_path / "out.jsonl", workers=1))
    assert report["documents"] == {"read": 5, "unreadable": 4, "kept": 1}
    sample = (tmp_path / "out.removed" / "00-unreadable.jsonl").read_text().splitlines()
    reasons = {json.loads(line)["document"]: json.loads(line)["reason"] for line in sample}
    assert reasons["in.jsonl:3"] == "expected a JSON object, found list"
    assert reasons["in.jsonl:4"] == "not UTF-8 text (byte 0xff)"
    assert "surrogate" in reasons["in.jsonl:5"]


def test_what_is_not_ours_is_never_replaced(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a b"}\n')
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(RecipeError, match=r"exists already; choose another --output, or add --force"):
        clean(WORDS, [str(source)], tmp_path / "out.jsonl", workers=1)
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    clean(WORDS, [str(source)], tmp_path / "out.jsonl", workers=1, force=True)
    assert (tmp_path / "out.jsonl").read_text() == '{"text": "a b"}\n'
    with pytest.raises(RecipeError, match="would replace the input"):
        clean(WORDS, [str(source)], source, workers=1, force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    with pytest.raises(RecipeError, match="not written by a cleaning"):
        clean(WORDS, [str(source)], tmp_path / "mine", workers=1, force=True)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".csv", ".csv.gz"])
def test_a_byte_order_mark_costs_no_row_and_is_not_written(tmp_path: Path, ending: str) -> None:
    raw = b'{"text": "a b"}\n{"text": "c d"}\n' if "jsonl" in ending else b"text\na b\nc d\n"
    raw = b"\xef\xbb\xbf" + raw
    source = tmp_path / f"in{ending}"
    source.write_bytes(gzip.compress(raw) if ending.endswith(".gz") else raw)
    report = report_of(clean(WORDS, [str(source)], tmp_path / "out.jsonl", workers=1))
    assert report["documents"] == {"read": 2, "unreadable": 0, "kept": 2}
    lines = (tmp_path / "out.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": "a b"}, {"text": "c d"}]
