"""`rush data clean` as a person types it: the table, the JSON, and one sentence for each mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("datatrove")

from rush.cli import main

PIPELINE = """
[[stage]]
kind = "words"
min = 3

[[stage]]
name = "rare things"
kind = "rare_items"
field = "things"
min_count = 2
"""
ROWS = [
    {"text": "a text of five words", "things": ["salt", "leek"]},
    {"text": "short", "things": ["salt"]},
    {"text": "another text that is long", "things": ["salt", "saffron"]},
    {"text": "one more of the same", "things": ["leek"]},
]


class Desk:
    """A folder with a pipeline and some rows, and a way to call the command line there."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self.capsys = capsys
        self.file("pipeline.toml", PIPELINE)
        self.file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))

    def file(self, name: str, content: str | bytes) -> str:
        (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    def clean(self, *words: str, pipeline: str = "pipeline.toml") -> tuple[int, str, str]:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["data", "clean", pipeline, *words])
        said = self.capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    return Desk(tmp_path, capsys)


def test_the_table_says_what_each_stage_removed_and_shows_examples(desk: Desk) -> None:
    code, out, _ = desk.clean("rows.jsonl", "-o", "out.jsonl")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["words", "4", "1", "25.0%", "3"] in lines
    assert ["rare", "things", "3", "1", "33.3%", "2"] in lines
    assert "rows.jsonl:2: 1 word, fewer than 3" in out
    assert "rows.jsonl:3: 'saffron' seen 1 time, fewer than 2" in out
    assert "Wrote out.jsonl: 2 of 4 documents (50.0%)" in out
    assert [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()] == [ROWS[0], ROWS[3]]
    assert sorted(path.name for path in Path("out.removed").iterdir()) == [
        "01-words.jsonl",
        "02-rare-things.jsonl",
        "report.json",
    ]
    assert sorted(path.name for path in Path().iterdir()) == ["out.jsonl", "out.removed", "pipeline.toml", "rows.jsonl"]  # fmt: skip


def test_json_is_the_report_that_is_kept(desk: Desk) -> None:
    code, out, _ = desk.clean("rows.jsonl", "-o", "out.jsonl", "--json")
    assert code == 0
    report = json.loads(out)
    assert report == json.loads(Path("out.removed/report.json").read_text())
    assert report["documents"] == {"read": 4, "unreadable": 0, "kept": 2}
    assert [stage["removed"] for stage in report["stages"]] == [1, 1]


def test_nothing_left_is_an_empty_file_and_said(desk: Desk) -> None:
    desk.file("all.toml", '[[stage]]\nkind = "words"\nmin = 100\n')
    code, out, _ = desk.clean("rows.jsonl", "-o", "out.jsonl", pipeline="all.toml")
    assert code == 0
    assert "0 of 4 documents (0.0%)" in out
    assert Path("out.jsonl").read_bytes() == b""


STAGE = '[[stage]]\nkind = "words"\nmin = 3\n'
MISTAKES: list[tuple[str, dict[str, str | bytes], list[str], int, str]] = [
    ("an unknown key", {"pipeline.toml": STAGE + "maxx = 4\n"}, [], 2, "stage 1 (words): maxx is not a key here; did you mean 'max'?"),
    ("an unknown kind", {"pipeline.toml": '[[stage]]\nkind = "wrods"\n'}, [], 2, "no stage of kind 'wrods'; did you mean 'words'?"),
    ("an empty pipeline", {"pipeline.toml": "# nothing\n"}, [], 2, "the pipeline has no [[stage]]"),
    ("a bad expression", {"pipeline.toml": "[[stage]]\nkind = \"regex\"\nmust_match = '[a'\n"}, [], 2, "'[a', which is not a regular expression"),
    ("no TOML", {"pipeline.toml": "stage ="}, [], 2, "is not valid TOML"),
    ("an output that exists", {"out.jsonl": "precious"}, [], 2, "exists already; choose another --output, or add --force"),
    ("an output of unknown kind", {}, ["-o", "out.csv"], 2, "--output is out.csv; allowed: a name with the extension .jsonl"),
    ("a format that is not the name's", {}, ["--format", "parquet"], 2, "--format is parquet, but the extension of --output out.jsonl is of jsonl"),
    ("an option without a value", {}, ["--option", "partition"], 2, "write it as name=value"),
    ("an option nobody knows", {}, ["--option", "foo=1"], 2, "The local executor has no option 'foo'; allowed: randomize_start_duration, start_method, workers."),
    ("an option of Slurm nobody knows", {}, ["--executor", "slurm", "--option", "partition=a", "--option", "time=1", "--option", "qoss=b"], 2, "did you mean 'qos'?"),
    ("an option that is no number", {}, ["--option", "workers=many"], 2, "The option workers is 'many'; allowed is a whole number of at least 1."),
    ("an option that is no way to start", {}, ["--option", "start_method=frok"], 2, "did you mean 'fork'?"),
    ("no such input", {}, ["absent.jsonl"], 3, "No file matches 'absent.jsonl'"),
    ("a folder as input", {}, ["."], 3, "is a folder; write its files"),
    ("an input of unknown kind", {"notes.txt": "hello"}, ["notes.txt"], 3, "rows are read from .jsonl"),
    ("an empty input", {"rows.jsonl": ""}, [], 3, "There is nothing to clean"),
    ("a missing field", {"rows.jsonl": '{"body": "x"}\n'}, [], 3, "rows.jsonl:1: no field 'text', which the stage words needs. Fields found: body."),
    ("a field of the wrong type", {"rows.jsonl": '{"text": 3}\n'}, [], 3, "rows.jsonl:1: 'text' holds a number, expected text"),
    ("a list that is a text", {"rows.jsonl": '{"text": "a b c", "things": "salt"}\n'}, [], 3, "rows.jsonl:1: 'things' is text, expected a list"),
    ("a list that is a table", {"rows.jsonl": '{"text": "a b c", "things": {"a": 1}}\n'}, [], 3, "'things' is a table, expected a list"),
    ("a line that is no JSON", {"rows.jsonl": '{"text": "a b c", "things": []}\n{"text\n'}, [], 3, "rows.jsonl:2: not valid JSON"),
    ("a number of 5,000 digits", {"rows.jsonl": '{"n": ' + "9" * 5000 + "}\n"}, [], 3, "rows.jsonl:1: not readable as JSON (a number of more than 4,300 digits)"),
    ("a line that is no object", {"rows.jsonl": "[1]\n"}, [], 3, "rows.jsonl:1: expected a JSON object, found list"),
    ("bytes that are no text", {"rows.jsonl": b'{"text": "\xff\xfe"}\n'}, [], 3, "rows.jsonl:1: not UTF-8 text"),
    ("a broken archive", {"rows.jsonl.gz": b"\x1f\x8b\x08nonsense"}, ["rows.jsonl.gz"], 3, "the compressed file is damaged"),
    ("a broken Parquet file", {"a.parquet": "PAR1 no"}, ["a.parquet"], 3, "not a readable Parquet file"),
    ("a CSV row with too many cells", {"a.csv": "text,things\na b c,x,y\n"}, ["a.csv"], 3, "a.csv:2: 3 cells under 2 columns"),
    ("a tokenizer that is not there", {"pipeline.toml": '[[stage]]\nkind = "tokens"\nmax = 9\ntokenizer = "./absent.json"\n'}, [], 3, "No tokenizer at ./absent.json"),
    ("a tokenizer with a name nobody knows", {"pipeline.toml": '[[stage]]\nkind = "tokens"\nmax = 9\ntokenizer = "gpt3"\n'}, [], 3, "did you mean 'gpt2'? Allowed: OWNER/NAME on the hub, a path to tokenizer.json, gpt2, llama-3."),
    ("Slurm where there is none", {}, ["--executor", "slurm", "--option", "partition=a", "--option", "time=1"], 4, "There is no sbatch here"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "words", "code", "sentence"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES])  # fmt: skip
def test_a_mistake_is_one_sentence_with_its_exit_code(
    desk: Desk,
    files: dict[str, str | bytes],
    words: list[str],
    code: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "slurm" in words:  # it may be installed here
        monkeypatch.setenv("PATH", "")
    for name, content in files.items():
        desk.file(name, content)
    has_input = any(not word.startswith("-") for word in words[:1])
    arguments = words if has_input else ["rows.jsonl", *words]
    found, out, err = desk.clean(*(arguments if "-o" in words else [*arguments, "-o", "out.jsonl"]))
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert found == code, err
    assert len(said) == 1, err
    assert sentence in said[0]
    assert "Traceback" not in err
    assert out == ""
    if "out.jsonl" not in files:
        assert not Path("out.jsonl").exists()
    else:
        assert Path("out.jsonl").read_text() == "precious"


def test_unreadable_rows_are_counted_when_asked(desk: Desk) -> None:
    desk.file("rows.jsonl", Path("rows.jsonl").read_text() + "broken\n")
    code, out, _ = desk.clean("rows.jsonl", "-o", "out.jsonl", "--skip-unreadable")
    assert code == 0
    assert ["(unreadable)", "5", "1", "20.0%", "4"] in [line.split() for line in out.splitlines()]
    assert "rows.jsonl:5: not valid JSON" in out


def test_a_missing_extra_is_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from rush.data.clean import language

    language._identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.delitem(sys.modules, "py3langid.langid", raising=False)
    desk.file("pipeline.toml", '[[stage]]\nkind = "language"\nlanguages = ["en"]\n')
    code, _, err = desk.clean("rows.jsonl", "-o", "out.jsonl")
    assert code == 4
    assert 'pip install "optimization-rush[language]"' in err


def test_options_of_the_executor_have_their_types(desk: Desk) -> None:
    words = ("--option", "workers=1", "--option", "start_method=fork")
    assert desk.clean("rows.jsonl", "-o", "out.jsonl", *words)[0] == 0


def test_a_stage_is_not_told_to_train_its_tokenizer(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    desk.file("pipeline.toml", '[[stage]]\nkind = "tokens"\nmax = 9\ntokenizer = "gpt2"\n')
    code, _, err = desk.clean("rows.jsonl", "-o", "out.jsonl")
    assert code == 4
    said = " ".join(err.split())
    assert "set the tokenizer of the tokens stage to its path." in said
    assert "train" not in said.partition("error:")[2]
