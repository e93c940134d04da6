"""`rush explain` as a person and as a program use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.cli import main
from tests.explain import made_up


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *words])
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    path = tmp_path / "attention.json"
    path.write_text(json.dumps(made_up.record("attention", made_up.attention())))
    return path


def test_alone_it_lists_the_topics_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    out = capsys.readouterr().out
    for name in made_up.EVERY:
        (line,) = [line for line in out.splitlines() if line.startswith(name)]
        assert len(line) > 40
    assert call("--json") == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(made_up.EVERY)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["atention"], "did you mean 'attention'?"),
        (["xyz"], "allowed: attention, batch, cpu-gpu"),
        (["batch", "--model", "tiny"], "--model is not an option of the topic batch"),
        (["attention", "--device", "gpu"], "--device 'gpu' is not known here"),
        (["roofline", "--model", "gpt2-124"], "did you mean 'gpt2-124m'"),
        (["roofline", "--sequence", "9999"], "256 tokens that tiny reads"),
        (["--from", "nothing.json"], "no record at nothing.json"),
        (["--from", "."], "is a folder"),
        (["--from", "attention.json", "--quick"], "leave out --quick"),
        (["memory", "--from", "attention.json"], "is about attention, not about memory"),
    ],
)
def test_bad_words_end_in_one_sentence_and_exit_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], record: Path
) -> None:
    assert call(*words) == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "Traceback" not in said
    assert not Path("runs").exists()


def test_a_broken_record_is_exit_3(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record.write_text("{}")
    assert call("--from", str(record)) == 3
    assert "format is None; this version reads format 'rush explain'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_exit_4(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("taken").write_text("a file")
    assert call("--from", str(record), "--out", "taken") == 4
    assert "Cannot write" in capsys.readouterr().err


def test_a_record_is_drawn_again_without_measuring(record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--from", str(record)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Why FlashAttention is fast" in out
    assert "flash is ×4.00" in out
    assert "●" in out
    page = Path("runs/explain-attention/report.html")
    assert str(page) in out
    assert "flash is ×4.00" in page.read_text(encoding="utf-8")
    assert json.loads(Path("runs/explain-attention/explain.json").read_text()) == json.loads(
        record.read_text()
    )


@pytest.mark.parametrize("name", sorted(made_up.EVERY))
@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_every_topic_fits_the_terminal(
    name: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    path = Path("record.json")
    path.write_text(json.dumps(made_up.record(name, made_up.EVERY[name]())))
    assert call("--from", str(path), "--out", "out") == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()[:-1]) <= int(columns)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_topic_is_measured_and_written_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("precision", "--quick", "--device", "cpu", "--out", "here", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["record"]["topic"] == "precision"
    assert told["record"]["quick"] is True
    assert told["words"]
    assert {Path(path).name for path in told["files"].values()} == {
        "explain.json",
        "report.html",
        "picture.svg",
    }
    assert all(Path(path).is_file() for path in told["files"].values())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_options_of_roofline_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("roofline", "--quick", "--device", "cpu", "--model", "llama-tiny", "--batch", "1", "--sequence", "32", "--json")  # fmt: skip
    assert call(*words) == 0
    data = json.loads(capsys.readouterr().out)["record"]["data"]
    assert (data["model"], data["batch"], data["sequence"]) == ("llama-tiny", 1, 32)
