"""`rush data inspect`, as a person uses it, and bad fine-tuning data as a person would have it.

Every bad file ends in one message that names the place, the right exit code and no traceback.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rush.cli import main
from rush.data import Tokenizer, train_bpe
from rush.data.conversations import DocumentSet
from rush.report.documents import documents_page
from tests import real_text

RECIPE = """
[model]
name = "tiny"
shape = {{ vocab_size = 320 }}
[data]
source = "files"
files = ["{folder}/good.jsonl"]
tokenizer = "{folder}/tokenizer"
template = "plain"
validation = 0.2
[objective]
kind = "sft"
[batch]
micro = 2
sequence = 64
[optimizer]
lr = 1e-3
[schedule]
steps = 2
"""
TEXTS = [f"what is number {n}? it is {n} and the fox jumps over it" for n in range(60)]


def ask(question: str = "what is it?", answer: str = "the fox") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


GOOD = [{"messages": ask(f"what is number {n}?", f"it is {n}")} for n in range(40)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a recipe, a tokenizer and good data."""
    folder = tmp_path_factory.mktemp("inspect")
    before = {key: os.environ.get(key) for key in ("RUSH_CACHE", "HF_HUB_OFFLINE", "COLUMNS")}
    os.environ |= {"RUSH_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    train_bpe(TEXTS, 300).save(folder / "tokenizer")
    (folder / "good.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    yield folder
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def call(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["data", *map(str, words)])
    out, err = capfd.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), out, err


def test_the_targets_stand_in_brackets_where_there_is_no_colour(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capfd, "inspect", world / "recipe.toml", "--examples", "40")
    assert code == 0, err
    assert "No rows were dropped or truncated." in out
    marked = re.findall(r"⟦(.*?)⟧", out, re.DOTALL)
    assert len(marked) > 20
    for text in marked:
        assert re.fullmatch(r"it is \d+<\|endoftext\|>", text)
    assert re.search(r"train +\d+ +\d+", out)
    assert "Lengths in tokens: train" in out


def test_the_targets_are_coloured_on_a_terminal(
    world: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = call(capfd, "inspect", world / "recipe.toml", "--at", "1")
    assert re.search(r"Assistant:\n\x1b\[30;42mit is \d+<\|endoftext\|>\x1b\[0m", out)
    assert "⟦" not in out


def test_json_and_the_folder_say_the_same(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capfd, "inspect", world / "recipe.toml", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads(call(capfd, "inspect", found["folder"], "--json")[1])
    documents = DocumentSet(found["folder"], "train")
    assert found["splits"]["train"]["documents"] == len(documents)
    tokenizer = Tokenizer.load(Path(found["folder"]) / "tokenizer")
    first = found["examples"][0]
    assert "".join(piece["text"] for piece in first["pieces"]) == tokenizer.decode(documents.tokens(0))
    prepared = json.loads(call(capfd, "prepare", world / "recipe.toml", "--json")[1])
    assert prepared == {key: value for key, value in found.items() if key != "examples"}
    code, out, _ = call(capfd, "verify", found["folder"])
    assert code == 0
    assert "intact" in out


class Page(HTMLParser):
    """The text inside <mark>, and whether anything is fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.marked: list[str] = []
        self.elsewhere: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "mark":
            self.inside = True
            self.marked.append("")
        given = [value or "" for name, value in attrs if name in ("src", "href")]
        self.elsewhere += [value for value in given if not value.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "mark"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.marked[-1] += data


def test_the_page_marks_the_targets_and_needs_nothing_else(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": ask("what <b>is</b> & isn't?", "<script>alert(1)</script> & so")}, *GOOD]
    (world / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = world / "page.html"
    words = (
        "inspect",
        world / "recipe.toml",
        f"data.files=['{world}/odd.jsonl']",
        "data.validation=0.05",
        "batch.sequence=128",
        "--html",
        page,
    )
    code, out, err = call(capfd, *words)
    assert code == 0, err
    assert f"Written: {page}" in out
    parsed = Page()
    parsed.feed(page.read_text())
    assert parsed.elsewhere == []
    assert parsed.marked[1] == "<script>alert(1)</script> & so<|endoftext|>"  # [0] explains the colour


def test_no_text_of_a_prepared_folder_is_run_as_a_script(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = call(capfd, "inspect", world / "recipe.toml", "--json", "--at", "0")
    found = json.loads(out)
    hostile = "<script>alert(1)</script>"

    def infected(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: infected(each) for name, each in value.items()}
        return (
            [infected(each) for each in value]
            if isinstance(value, list)
            else hostile
            if isinstance(value, str)
            else value
        )

    page = documents_page(infected(found), infected(found["examples"]))
    assert page.count("alert(1)") >= 5
    assert "<script>alert" not in page
    assert "Content-Security-Policy" in page


def test_control_characters_of_the_data_are_shown_and_not_obeyed(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": ask("\x1b[2Jgone", "\x07\x1b]0;owned")}, *GOOD]
    (world / "control.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, out, _ = call(
        capfd, "inspect", world / "recipe.toml", f"data.files=['{world}/control.jsonl']", "--at", "0"
    )
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "␛[2Jgone" in out


def line(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


USER, ASSISTANT = ask()
DPO = ("objective.kind=dpo",)
# What the file's third line is, what is asked besides, the exit code, and what is said.
BAD: dict[str, tuple[Any, tuple[str, ...], int, str]] = {
    "a role that is missing": (line({"content": "x"}, ASSISTANT), (), 3, r"bad\.jsonl:3: messages\[0\] has no role"),
    "a role nobody knows": (line({"role": "wizard", "content": "x"}, ASSISTANT), (), 3, r":3: .* has the role 'wizard'. Allowed: system, user, assistant"),
    "roles out of order": (line(ASSISTANT, USER), (), 3, r":3: turn 1 is the assistant's where the user's is due"),
    "two questions in a row": (line(USER, USER, ASSISTANT), (), 3, r":3: turn 2 is the user's where the assistant's is due"),
    "no answer": (line(USER), (), 3, r":3: the last turn is the user's, so there is no answer"),
    "an empty answer": (line(USER, {"role": "assistant", "content": "  "}), (), 3, r":3: turn 2, the assistant's, is empty"),
    "an answer that calls a tool": (line(USER, {**ASSISTANT, "tool_calls": [{}]}), (), 3, r":3: messages\[1\] has tool_calls.*data\.bad_rows"),
    "a weight that is none": (line(USER, {**ASSISTANT, "weight": 0.3}), (), 3, r":3: messages\[1\] has the weight 0\.3"),
    "a number of 5,000 digits": ('{"prompt": ' + "9" * 5000 + "}", (), 3, r":3: not readable as JSON \(a number"),
    "a line nested too deeply": ('{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}", (), 3, r":3: not readable as JSON \(lists"),
    "an answer that is no text": (line(USER, {"role": "assistant", "content": 7}), (), 3, r":3: .*content must be a text; found int"),
    "an empty conversation": (line(), (), 3, r":3: messages must be a list of messages; found an empty list"),
    "fields of no format": ({"title": "x"}, (), 3, r":3: no format has the fields title.*Allowed: messages; prompt and completion"),
    "fields of another format": ({"prompt": "x", "completion": "y"}, ("data.format=chat",), 3, r":3: the format 'chat' needs the field messages"),
    "a line that is no JSON": ("{oops", (), 3, r":3: not valid JSON"),
    "a line that is no object": ("[1, 2]", (), 3, r":3: expected a JSON object, found list"),
    "a line that is no UTF-8": (b"\xff\xfe", (), 3, r":3: not UTF-8"),
    "longer than the sequence": (line(*ask("w " * 200)), (), 3, r":3: \d+ tokens, longer than batch\.sequence = 64; raise batch\.sequence, or set data\.too_long"),
    "half a surrogate in a preference": ({"prompt": "x", "chosen": "y", "rejected": "a \ud800"}, DPO, 3, r"rejected holds half of a surrogate pair"),
    "chosen equal to rejected": ({"prompt": "x", "chosen": "y", "rejected": "y"}, DPO, 3, r"chosen and rejected are the same answer"),
    "pairs without a prompt": ({"chosen": "x", "rejected": "y"}, DPO, 3, r"there is no field prompt"),
    "pairs of two conversations": ({"chosen": ask("a?"), "rejected": ask("b?")}, DPO, 3, r"do not answer the same question: their first turns differ"),
    "conversations for preferences": (line(USER, ASSISTANT), DPO, 3, r"preferences need the fields chosen and rejected; found messages"),
    "preferences for conversations": ({"prompt": "x", "chosen": "y", "rejected": "z"}, (), 3, r"chosen and rejected are for objective\.kind = 'dpo'"),
    "a preference format without the objective": (line(USER, ASSISTANT), ("data.format=preference",), 2, r"is for objective\.kind = 'dpo'"),
    "a tokenizer too large for the model": (line(USER, ASSISTANT), ("model.shape.vocab_size=299",), 3, r"has 300 entries, more than the model's vocabulary of 299"),
    "an unknown template": (line(USER, ASSISTANT), ("data.template=chatlm",), 2, r"did you mean 'chatml'"),
    "an unknown source": (line(USER, ASSISTANT), ("data.source=ultrachatt", "data.files=[]"), 2, r"did you mean 'ultrachat'"),
    "a hub that cannot be reached": (line(USER, ASSISTANT), ("data.source=ultrachat", "data.files=[]"), 4, r"ultrachat_200k.*data\.files"),
    "a policy that is none": (line(USER, ASSISTANT), ("data.too_long=ignore",), 2, r"data\.too_long"),
    "an example that is not there": (line(USER, ASSISTANT), ("--at", "400"), 2, r"--at is 400"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_one_message_and_an_exit_code(
    world: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    bad, changes, code, said = BAD[case]
    if code == 4:
        pytest.importorskip("datasets")
    lines = [json.dumps(row).encode() for row in GOOD[:2]]
    lines += [
        bad if isinstance(bad, bytes) else bad.encode() if isinstance(bad, str) else json.dumps(bad).encode()
    ]
    lines += [json.dumps(row).encode() for row in GOOD[2:]]
    if changes == DPO:
        lines = lines[2:3] if "conversations for" not in case else lines
    (world / "bad.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found, out, err = call(
        capfd, "inspect", world / "recipe.toml", f"data.files=['{world}/bad.jsonl']", *changes
    )
    message = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err).split())
    assert found == code, message
    assert re.search(said, message), message
    assert "Traceback" not in err
    assert message.count("error:") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "x", "completion": ""}] * 4, r"nothing to train on.*4 dropped \(empty answer"),
        ([{"messages": ask("w " * 200)}] * 3, r"nothing to train on.*3 dropped \(too long: no answer left"),
    ],
)
def test_when_nothing_is_left_the_reasons_are_said(
    world: Path, capfd: pytest.CaptureFixture[str], rows: list[dict[str, Any]], said: str
) -> None:
    (world / "none.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"data.files=['{world}/none.jsonl']", "data.bad_rows=drop", "data.too_long=cut")
    code, _, err = call(capfd, "inspect", world / "recipe.toml", *words)
    assert code == 3
    assert re.search(said, " ".join(err.split())), err


def test_what_was_left_out_is_shown_with_its_reason(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        *GOOD,
        {"messages": ask("x", "")},
        {"messages": ask("w " * 200)},
        {"messages": ask("x", "w " * 200)},
    ]
    (world / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (
        f"data.files=['{world}/mixed.jsonl']",
        "data.bad_rows=drop",
        "data.too_long=cut",
        "data.validation=0.01",
    )
    _, out, _ = call(capfd, "inspect", world / "recipe.toml", *words)
    flat = " ".join(out.split())
    assert re.search(r"empty answer 1 ", flat)
    assert re.search(r"too long: no answer left 1 ", flat)
    assert re.search(r"cut 1 [\d,]+ tokens lost: \S+/mixed\.jsonl:43", flat)
    found = json.loads(call(capfd, "inspect", world / "recipe.toml", *words, "--json")[1])
    assert found["splits"]["train"]["examples"]["cut"] == [f"{world}/mixed.jsonl:43"]


def test_a_corpus_and_a_folder_of_something_else_are_refused(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capfd, "inspect", "tiny")
    assert code == 2
    assert "rush data show" in err
    code, _, err = call(capfd, "inspect", world / "tokenizer")
    assert code == 3
    assert "it has no manifest.json" in " ".join(err.split())
    code, _, err = call(capfd, "inspect", world / "tokenizer", "data.limit=3")
    assert code == 2
    assert "cannot change" in err


def inspected(world: Path, capfd: pytest.CaptureFixture[str], name: str, content: str, *words: str) -> str:
    (world / name).write_text(content)
    code, out, err = call(capfd, "inspect", world / "recipe.toml", f"data.files=['{world}/{name}']", *words)
    assert code == 0, err
    return out


def test_columns_that_were_not_used_are_named(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    turns = [{**USER, "name": "Ann"}, ASSISTANT]
    rows = [*({**row, "score": 0.5, "source": None} for row in GOOD), {"messages": turns, "id": 7}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    page = world / "unused.html"
    out = inspected(world, capfd, "unused.jsonl", text, "--html", str(page))
    said = "Columns that were not used: id (1 rows), messages[].name (1 rows), score (40 rows)."
    assert said in " ".join(out.split())
    assert said in page.read_text()
    assert "not used" not in inspected(
        world, capfd, "used.jsonl", text.replace(', "score": 0.5', "").splitlines()[0]
    )


def test_a_system_column_and_weights_are_seen(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    turns = [USER, {**ASSISTANT, "content": "bad", "weight": 0}, USER, {**ASSISTANT, "weight": 1}]
    row = json.dumps({"system": "be a pirate", "messages": turns}) + "\n"
    out = inspected(world, capfd, "told.jsonl", row, "data.validation=1e-9", "batch.sequence=128")
    assert "System:\nbe a pirate" in out
    assert re.findall(r"⟦(.*?)⟧", out) == ["the fox<|endoftext|>"]
    assert "not used" not in out


def test_csv_is_rows(world: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = 'prompt,completion,id\n"what, then?",the fox,1\nwhat is it?,the dog,2\n'
    out = inspected(world, capfd, "rows.csv", table, "data.validation=1e-9")
    assert re.findall(r"⟦(.*?)⟧", out) == ["the fox<|endoftext|>"]
    assert "data.validation = 1e-09 holds none of so few documents: one is held out instead." in " ".join(
        out.split()
    )
    assert "User:\nwhat, then?" in out
    assert "not used: id (2 rows)" in out


def test_a_preference_that_cannot_be_written_is_dropped(
    world: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"q {n}", "chosen": "yes", "rejected": r}
        for n, r in enumerate(("no", "a \ud800", "never"))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    words = (*DPO, "data.bad_rows=drop", "data.validation=1e-9")
    assert re.search(r"not a text +1 +\S+half\.jsonl:2", inspected(world, capfd, "half.jsonl", text, *words))


def test_the_examples_of_the_help_work_when_pasted(
    world: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rush.cli.inspect import inspect

    monkeypatch.chdir(world)
    lines_of_code = [
        text for path in real_text.files() for text in path.read_text().splitlines() if text.strip()
    ]
    rows = [{"messages": ask(f"line {n}?", text)} for n, text in enumerate(lines_of_code)]
    (world / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [text.strip() for text in (inspect.__doc__ or "").splitlines() if text.startswith("      rush ")]
    assert len(lines) == 2
    for text in lines:
        if "talks.jsonl" in text:  # the other one is read by a test of the recipe
            code, _, err = call(capfd, *shlex.split(text)[2:])
            assert code == 0, err
            assert (world / "talks.html").is_file()
