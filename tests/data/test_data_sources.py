from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rush.data import describe_source, open_source, sources
from rush.data.sources import plan_units, read_unit
from rush.errors import DataError, MachineError, RecipeError

FINEWEB_ROW = {
    "text": "", "id": "<urn:uuid:0>", "dump": "CC-MAIN-2024-10", "url": "https://example.org/",
    "file_path": "s3://x/y.warc.gz", "language": "en", "language_score": 0.97, "token_count": 3,
    "score": 3.4, "int_score": 3,
}  # fmt: skip


def fineweb_folder(folder: Path, texts: list[str], files: int = 3) -> Path:
    """Parquet files in the published schema of FineWeb-Edu."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    rows = [FINEWEB_ROW | {"text": text, "id": str(i)} for i, text in enumerate(texts)]
    per_file = -(-len(rows) // files)
    for n in range(files):
        table = pyarrow.Table.from_pylist(rows[n * per_file : (n + 1) * per_file])
        pyarrow.parquet.write_table(table, folder / f"{n:03d}_00000.parquet", row_group_size=5)
    return folder


def texts_of(*args: object) -> list[str]:
    return [document.text for document in open_source(*args)]  # type: ignore[arg-type]


def test_local_files_in_the_fineweb_edu_schema_are_read_under_its_name(tmp_path: Path) -> None:
    texts = [f"page {i}" for i in range(40)]
    folder = fineweb_folder(tmp_path / "sample" / "10BT", texts)
    assert texts_of("fineweb-edu", [f"{tmp_path}/**/*.parquet"], "text", None) == texts
    assert texts_of("fineweb-edu", [f"{folder}/*.parquet"], "url", 2) == ["https://example.org/"] * 2


def test_local_files_in_the_redpajama_schema_are_read_under_its_name(tmp_path: Path) -> None:
    rows = [
        {"text": f"text {i}", "meta": '{"timestamp": "2023"}', "red_pajama_subset": "arxiv"} for i in range(9)
    ]
    (tmp_path / "arxiv_sample.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert texts_of("redpajama", [f"{tmp_path}/*.jsonl"], "text", None) == [row["text"] for row in rows]


def test_a_hub_dataset_is_streamed_with_the_documents_of_its_files(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    texts = [f"page {i}" for i in range(40)]
    folder = fineweb_folder(tmp_path / "dataset", texts)
    assert texts_of(f"hub:{folder}", [], "text", None) == texts
    units = plan_units(f"hub:{folder}")
    assert [len(list(read_unit(unit, "text"))) for unit in units] == [14, 14, 12]
    # With a limit every file gives its share.
    assert texts_of(f"hub:{folder}", [], "text", 4) == ["page 0", "page 1", "page 14", "page 28"]
    with pytest.raises(DataError, match=r"no field 'body'\. Fields found: dump, file_path, id"):
        texts_of(f"hub:{folder}", [], "body", None)


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MachineError, match=r"fineweb-edu.*data\.files"):
        texts_of("fineweb-edu", [], "text", None)


def test_a_dataset_that_does_not_exist_is_a_clear_refusal(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="Check the name"):
        texts_of(f"hub:{tmp_path / 'empty'}", [], "text", None)


@pytest.mark.parametrize("source", ["hub:", "hub:a/b:c:d:e"])
def test_a_malformed_hub_name_is_refused(source: str) -> None:
    with pytest.raises(RecipeError, match="OWNER/NAME"):
        texts_of(source, [], "text", None)


def test_an_unknown_source_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match="did you mean 'fineweb-edu'"):
        texts_of("fineweb-edo", [], "text", None)


@pytest.mark.parametrize(
    ("source", "files"), [("files", []), ("python-stdlib", ["a.txt"]), ("hub:a/b", ["a.txt"])]
)
def test_a_source_that_contradicts_the_files_is_refused(source: str, files: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"data\.files"):
        texts_of(source, files, "text", None)


def test_globs_are_recursive_sorted_and_name_each_file_once(tmp_path: Path) -> None:
    for name in ("b/two.txt", "a/one.txt", "a/deep/three.txt", "a/skip.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    patterns = [f"{tmp_path}/**/*.txt", f"{tmp_path}/a/*.txt", str(tmp_path / "a" / "skip.md")]
    assert texts_of("files", patterns, "text", None) == [
        "a/deep/three.txt", "a/one.txt", "b/two.txt", "a/skip.md",
    ]  # fmt: skip


def test_a_pattern_without_a_match_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing matches '.*nope\*\.txt'"):
        texts_of("files", [f"{tmp_path}/nope*.txt"], "text", None)
    with pytest.raises(DataError, match="It is a folder"):
        texts_of("files", [str(tmp_path)], "text", None)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"The corpus is empty: 1 file\(s\) with 0 bytes"):
        texts_of("files", [f"{tmp_path}/*.jsonl"], "text", None)


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 100])
def test_a_limit_takes_the_first_documents(
    tmp_path: Path, limit: int, write_jsonl: Callable[[Path, list[str]], Path]
) -> None:
    texts = [f"t{i}" for i in range(8)]
    write_jsonl(tmp_path / "a.jsonl", texts[:4])
    write_jsonl(tmp_path / "b.jsonl", texts[4:])
    assert texts_of("files", [f"{tmp_path}/*.jsonl"], "text", limit) == texts[:limit]


def test_a_limit_below_one_is_refused(corpus_file: Path) -> None:
    with pytest.raises(RecipeError, match="at least 1"):
        texts_of("files", [str(corpus_file)], "text", 0)


@pytest.mark.usefixtures("small_units")
def test_units_together_are_the_source_in_order(corpus_file: Path, texts: list[str]) -> None:
    units = plan_units("files", [str(corpus_file)])
    assert len(units) > 10
    assert [unit.index for unit in units] == list(range(len(units)))
    assert [d.text for unit in units for d in read_unit(unit, "text")] == texts


def test_the_standard_library_is_a_document_per_file_without_its_tests() -> None:
    documents = list(open_source("python-stdlib", limit=None))
    again = [d.id for d in open_source("python-stdlib")]
    assert [d.id for d in documents] == again
    assert len(set(again)) == len(again) > 300  # a distribution may leave some modules out
    assert sum(len(d.text) for d in documents) > 5_000_000
    assert not [i for i in again if "/test/" in i or "/tests/" in i or "site-packages" in i]
    (dataclasses_text,) = [d.text for d in documents if d.id.endswith("/dataclasses.py")]
    assert "def dataclass(" in dataclasses_text


def test_the_description_of_a_source_changes_when_a_file_does(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = describe_source("files", [str(path)])
    assert describe_source("files", [str(path)]) == first
    json.dumps(first)
    os.utime(path, ns=(1, 1))
    touched = describe_source("files", [str(path)])
    path.write_text("longer")
    os.utime(path, ns=(1, 1))
    assert len({json.dumps(d) for d in (first, touched, describe_source("files", [str(path)]))}) == 3
    assert describe_source("files", [str(path)], "body") != describe_source("files", [str(path)])


def test_reading_local_files_imports_no_optional_dependency(corpus_file: Path) -> None:
    script = (
        "import sys\nfrom rush.data import open_source\n"
        f"assert len(list(open_source('files', [{str(corpus_file)!r}]))) == 300\n"
        "heavy = {'torch', 'pyarrow', 'datasets', 'datatrove', 'ray', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


def test_tables_prepared_as_text_once_are_not_found_again(tmp_path: Path) -> None:
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_text("text\nhello\n")
    table, lines = (
        describe_source("files", [str(tmp_path / name)])["files"][0] for name in ("a.csv", "a.jsonl")
    )
    assert table["rows"] == "csv"
    assert set(lines) == {"path", "bytes", "mtime_ns"}
    assert [document.text for document in open_source("files", [str(tmp_path / "a.csv")])] == ["hello"]


def test_packages_are_read_beside_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are installed, without the files that programs wrote; whoever has none of them reads the library alone."""
    monkeypatch.setattr(sources, "PACKAGES", ("tqdm", "no_such_package_at_all"))
    library = sum(len(unit.slices) for unit in plan_units("python-stdlib"))
    both = [piece.path for unit in plan_units("python-packages") for piece in unit.slices]
    assert len(both) > library
    assert any(path.endswith("tqdm/std.py") for path in both)
    described = describe_source("python-packages")
    assert described["packages"] == ["tqdm"]
    assert described == describe_source("python-packages")
    monkeypatch.setattr(sources, "PACKAGES", ("no_such_package_at_all",))
    assert sum(len(unit.slices) for unit in plan_units("python-packages")) == library
    assert described["sha256"] != describe_source("python-packages")["sha256"]
