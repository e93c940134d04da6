from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rush.data import readers
from rush.data.readers import read_slice, slice_file
from rush.errors import DataError


def read_all(path: Path, slice_bytes: int, text_field: str = "text") -> list[readers.Document]:
    return [d for piece in slice_file(path, slice_bytes) for d in read_slice(piece, text_field)]


@pytest.mark.parametrize("slice_bytes", [1, 7, 100, 1_000, 10**9])
def test_jsonl_gives_the_same_documents_and_line_numbers_for_any_slice_size(
    tmp_path: Path, slice_bytes: int
) -> None:
    texts = ["a", "zwei\nZeilen", "日本語" * 20, " ", "last"]
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": t}) for t in texts]
    lines.insert(2, "")  # a blank line still counts as a line
    path.write_text("\n".join(lines), encoding="utf-8")  # and the last line has no line end
    found = read_all(path, slice_bytes)
    assert [d.text for d in found] == texts
    assert [d.id for d in found] == [f"{path}:{n}" for n in (1, 2, 4, 5, 6)]


@pytest.mark.parametrize("slice_bytes", [1, 60, 10**9])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "cut off', "not valid JSON"),
        ('["text"]', "expected a JSON object, found list"),
        ('{"body": "x", "url": "y"}', "no field 'text'. Fields found: body, url"),
        ('{"text": 3}', "the text is int"),
        ('{"text": null}', "the text is NoneType"),
        ('{"text": "\\ud800"}', "surrogate"),
    ],
)
def test_a_broken_line_is_refused_with_file_and_line_number(
    tmp_path: Path, slice_bytes: int, line: str, said: str
) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(f'{{"text": "one"}}\n\n{{"text": "three"}}\n{line}\n{{"text": "five"}}\n')
    with pytest.raises(DataError) as caught:
        read_all(path, slice_bytes)
    assert f"{path}:4:" in str(caught.value)
    assert said in str(caught.value)


def test_compressed_jsonl_reads_as_plain_jsonl(tmp_path: Path, texts: list[str]) -> None:
    import pyarrow

    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(raw)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    with pyarrow.output_stream(tmp_path / "a.jsonl.zst", compression="zstd") as stream:
        stream.write(raw)
    for packed in ("a.jsonl.gz", "a.jsonl.zst"):
        found = read_all(tmp_path / packed, 100)
        assert [d.text for d in found] == texts
        assert found[7].id == f"{tmp_path / packed}:8"


def test_a_truncated_compressed_file_is_refused(tmp_path: Path, texts: list[str]) -> None:
    raw = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(gzip.compress(raw)[:-200])
    with pytest.raises(DataError, match="damaged"):
        read_all(path, 100)


@pytest.mark.parametrize("slice_bytes", [1, 500, 10**9])
def test_parquet_gives_the_same_rows_for_any_slice_size(tmp_path: Path, slice_bytes: int) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [f"row {i} " + "x" * i for i in range(50)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": list(range(50)), "text": texts}), path, row_group_size=7)
    found = read_all(path, slice_bytes)
    assert [d.text for d in found] == texts
    assert [d.id for d in found] == [f"{path}:row {n}" for n in range(50)]
    assert len(slice_file(path, 1)) == 8
    with pytest.raises(DataError, match=r"no field 'body'. Fields found: id, text"):
        read_all(path, slice_bytes, "body")


def test_a_null_in_parquet_is_refused_with_its_row(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), path)
    with pytest.raises(DataError, match="row 1: the text is NoneType"):
        read_all(path, 100)


def test_a_file_that_only_claims_to_be_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_text("not parquet at all")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read_all(path, 100)


def test_a_small_text_file_is_one_document_to_the_byte(tmp_path: Path) -> None:
    text = "line one\r\n\n\n  line two\ttab\x00\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    (found,) = read_all(path, 1)
    assert (found.text, found.id) == (text, str(path))


@given(
    paragraphs=st.lists(st.text(alphabet="ab ü🦊\n", min_size=1, max_size=60), min_size=1, max_size=40),
    slice_bytes=st.integers(1, 400),
)
def test_a_large_text_file_is_split_without_losing_a_byte(
    tmp_path_factory: pytest.TempPathFactory, paragraphs: list[str], slice_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "TEXT_DOCUMENT_BYTES", 16)
        patch.setattr(readers, "TEXT_WHOLE_BYTES", 48)
        path = tmp_path_factory.mktemp("text") / "large.txt"
        text = "\n\n".join(paragraphs)
        path.write_bytes(text.encode())
        found = read_all(path, slice_bytes)
        assert "".join(d.text for d in found) == text
        assert [d.text for d in found] == [d.text for d in read_all(path, 10**9)]
        if len(text.encode()) > 48:
            assert [d.id for d in found] == [f"{path}#{n}" for n in range(len(found))]
            assert max(len(d.text.encode()) for d in found) <= 2 * 16 + 4


def test_a_large_text_file_is_split_at_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    paragraphs = [f"paragraph {i}: " + "word " * 200 + "\n\n" for i in range(600)]
    path.write_text("".join(paragraphs))
    found = read_all(path, 10**9)
    assert len(found) > 5
    assert all(d.text.endswith("\n\n") and d.text.startswith("paragraph") for d in found)


def test_text_that_is_not_utf8_is_refused_with_its_position(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("größe".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8 text \(byte 0xf6 at position 2\)"):
        read_all(path, 100)
    lines = tmp_path / "latin.jsonl"
    lines.write_bytes(b'{"text": "ok"}\n' + '{"text": "größe"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        read_all(lines, 100)


def test_empty_documents_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": ""}\n{"text": "x"}\n{"text": ""}\n')
    assert [d.text for d in read_all(path, 100)] == ["x"]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.zip", "a.arrow"])
def test_formats_that_are_not_read_are_named_with_those_that_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match=r"Allowed: \.jsonl"):
        slice_file(tmp_path / name, 100)


def test_a_json_file_is_a_list_of_rows_or_an_object_that_holds_one(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": "zwei ä"}]
    for name, tree in (("list", rows), ("inside", {"version": 1, "data": rows})):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(tree, indent=1))
        assert [(d.text, d.id) for d in read_all(path, 10)] == [
            ("one", f"{path}:row 0"),
            ("zwei ä", f"{path}:row 1"),
        ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1}\n{"a": 2}\n', "name it .jsonl"),
        ("[{", "not valid JSON"),
        ("7", "expected a list of JSON objects, found int"),
        ('{"a": [], "b": []}', "expected a list of JSON objects, found dict"),
        ("[1]", "row 0: expected a JSON object, found int"),
    ],
)
def test_a_json_file_that_is_no_list_of_objects_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_all(path, 100)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"Cannot read .*dangling\.txt: No such file"):
        slice_file(tmp_path / "dangling.txt", 100)


def test_a_missing_extra_is_named() -> None:
    from rush.errors import MachineError

    with pytest.raises(MachineError, match=r'optimization-rush\[parquet\]"'):
        readers.import_extra("no_such_module_at_all", "parquet", "Reading Parquet files")


MARK = b"\xef\xbb\xbf"


@pytest.mark.parametrize("slice_bytes", [1, 10**9])
@pytest.mark.parametrize("packed", [False, True])
def test_a_byte_order_mark_is_no_part_of_the_first_row(
    tmp_path: Path, slice_bytes: int, packed: bool
) -> None:
    raw = MARK + b'{"text": "one"}\n{"text": "two"}\n'
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    found = read_all(path, slice_bytes)
    assert [(d.text, d.id) for d in found] == [("one", f"{path}:1"), ("two", f"{path}:2")]


def test_a_byte_order_mark_is_no_part_of_a_text_or_a_column(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(MARK + b"hello")
    (tmp_path / "a.csv").write_bytes(MARK + b"text,id\nhello,1\n")
    (tmp_path / "only.jsonl").write_bytes(MARK)
    assert [d.text for name in ("a.txt", "a.csv") for d in read_all(tmp_path / name, 100)] == [
        "hello",
        "hello",
    ]
    assert read_all(tmp_path / "only.jsonl", 100) == []


@pytest.mark.parametrize("slice_bytes", [1, 10**9])
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "x", "n": ' + "9" * 5000 + "}", "a number of more than 4,300 digits"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ],
)
def test_a_line_that_pythons_json_cannot_parse_is_refused_with_its_number(
    tmp_path: Path, slice_bytes: int, line: str, said: str
) -> None:
    path = tmp_path / "much.jsonl"
    path.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(DataError, match=f"{path}:2: not readable as JSON .*{said}"):
        read_all(path, slice_bytes)


@pytest.mark.parametrize("name", ["a.csv", "a.CSV", "a.tsv", "a.csv.gz", "a.tsv.gz", "a.csv.zst"])
def test_csv_is_read_as_rows(tmp_path: Path, name: str) -> None:
    comma = "\t" if ".tsv" in name else ","
    raw = f'id{comma}text\n1{comma}"two\nlines, ""quoted"""\n\n2{comma}plain\n'.encode()
    if name.endswith(".zst"):
        pyarrow = pytest.importorskip("pyarrow")
        with pyarrow.output_stream(str(tmp_path / name), compression="zstd") as file:
            file.write(raw)
    else:
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    found = read_all(tmp_path / name, 5)
    assert [d.text for d in found] == ['two\nlines, "quoted"', "plain"]
    assert [d.id for d in found] == [f"{tmp_path / name}:{line}" for line in (2, 5)]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"text,id\nx\n", ":2: 1 cells under 2 columns"),
        (b"text,text\nx,y\n", ":1: a column name occurs twice"),
        (b'text\n"x', "not valid CSV"),
        (b"text\n\xff\n", "not UTF-8 text"),
        (b"body\nx\n", ":2: no field 'text'. Fields found: body"),
    ],
)
def test_a_broken_csv_file_is_refused_with_its_line(tmp_path: Path, raw: bytes, said: str) -> None:
    (tmp_path / "a.csv").write_bytes(raw)
    with pytest.raises(DataError) as caught:
        read_all(tmp_path / "a.csv", 100)
    assert said in str(caught.value)
    assert "a.csv" in str(caught.value)
