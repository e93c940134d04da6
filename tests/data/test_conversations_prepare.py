"""From rows to documents on disk: the right ones, the same bytes every time, and every row accounted for."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rush.data import Documents, Tokenizer
from rush.data.conversations import (
    Conversation,
    DocumentPreparation,
    DocumentSet,
    encode,
    find_template,
    prepare,
    prepare_documents,
    read_document_manifest,
    verify_documents,
)
from rush.data.conversations.docstrings import docstring_pairs, docstring_questions
from rush.data.conversations.inspect_documents import document_examples, document_statistics
from rush.errors import DataError, MachineError, RecipeError

LINE = "the quick brown fox jumps over lazy dogs while größere Hunde schlafen"
WORDS = LINE.split()

Write = Callable[[list[dict[str, Any]]], Path]


def talks(count: int, seed: int = 0, longest: int = 30) -> list[dict[str, Any]]:
    """Conversations of one to three questions."""
    generator = random.Random(seed)

    def say() -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(1, longest)))

    rows = []
    for number in range(count):
        messages = []
        for _ in range(generator.randint(1, 3)):
            messages += [
                {"role": "user", "content": f"{number} {say()}"},
                {"role": "assistant", "content": say()},
            ]
        rows.append({"messages": messages})
    return rows


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def asked(tokenizer_folder: Path) -> DocumentPreparation:
    return DocumentPreparation(
        source="files",
        tokenizer=str(tokenizer_folder),
        vocab_size=400,
        sequence=4096,
        template="plain",
        validation=0.2,
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def trained_text(documents: DocumentSet, index: int) -> str:
    tokenizer = Tokenizer.load(documents.folder / "tokenizer")
    return tokenizer.decode(documents.tokens(index)[documents.trained(index)])


def test_documents_are_the_encoded_rows(
    write: Write, asked: DocumentPreparation, tokenizer: Tokenizer, tmp_path: Path, small_units: None
) -> None:
    rows = talks(200)
    path = write(rows)
    folder = prepare_documents(replace(asked, files=(str(path),)), tmp_path / "cache", workers=1)
    template = find_template("plain", tokenizer)
    expected = {
        f"{path}:{line}": encode(Conversation.of(row["messages"]), tokenizer, template)
        for line, row in enumerate(rows, start=1)
    }
    manifest = read_document_manifest(folder)
    assert len(manifest.shards) > 4  # several units, so that documents are found across shards
    seen = []
    for split in ("train", "validation"):
        documents = DocumentSet(folder, split)
        as_protocol: Documents = documents
        assert len(as_protocol) == len(documents.lengths) == manifest.documents(split)
        assert not documents.paired
        tokens = trained = 0
        for index in range(len(documents)):
            label, name = documents.sample_name(index).split(" ", 1)
            assert label == f"{split}[{index}]"
            assert documents.tokens(index).tolist() == expected[name].tokens
            assert documents.trained(index).tolist() == expected[name].trained
            assert documents.tokens(index).dtype == np.int64
            assert documents.trained(index).dtype == np.bool_
            assert documents.lengths[index] == len(expected[name])
            tokens += len(expected[name])
            trained += expected[name].num_trained
            seen.append(name)
        assert (manifest.tokens(split), manifest.trained(split)) == (tokens, trained)
        with pytest.raises(IndexError):
            documents.tokens(len(documents))
    assert sorted(seen) == sorted(expected)
    assert 10 < manifest.documents("validation") < 80
    assert manifest.losses() == ""
    assert Tokenizer.load(folder / "tokenizer").chat_template == template.source


def test_the_same_bytes_twice_for_any_number_of_workers(
    write: Write, asked: DocumentPreparation, tmp_path: Path, small_units: None
) -> None:
    wanted = replace(asked, files=(str(write(talks(120))),), limit=110)
    folders = [prepare_documents(wanted, tmp_path / f"cache{n}", workers=n) for n in (1, 2)]
    first, second = map(snapshot, folders)
    assert len(first) > 12
    assert first == second
    before = {path: path.stat().st_mtime_ns for path in folders[0].rglob("*") if path.name != "lock"}
    assert prepare_documents(wanted, tmp_path / "cache1") == folders[0]
    assert before == {path: path.stat().st_mtime_ns for path in folders[0].rglob("*") if path.name != "lock"}
    assert read_document_manifest(folders[0]).total.rows == 110


@pytest.mark.parametrize(
    "changes",
    [
        {"template": "chatml"}, {"train_on": "all"}, {"sequence": 4095}, {"too_long": "cut"}, {"bad_rows": "drop"},
        {"format": "chat"}, {"validation": 0.3}, {"limit": 30}, {"vocab_size": 401}, {"seed": 1},
    ],
)  # fmt: skip
def test_what_changes_the_documents_changes_the_folder(
    write: Write, asked: DocumentPreparation, tmp_path: Path, changes: dict[str, Any]
) -> None:
    asked = replace(asked, files=(str(write(talks(40))),))
    first = prepare_documents(asked, tmp_path / "cache", workers=1)
    assert prepare_documents(replace(asked, **changes), tmp_path / "cache", workers=1) != first


def test_the_content_hash_does_not_depend_on_paths(
    asked: DocumentPreparation, write: Write, tmp_path: Path
) -> None:
    path = write(talks(40))
    moved = tmp_path / "a much longer name.jsonl"
    digests = []
    for file in (path, moved):
        folder = prepare_documents(replace(asked, files=(str(file),)), tmp_path / "cache", workers=1)
        digests.append(read_document_manifest(folder).content_sha256)
        path.replace(moved) if path.exists() else None
    assert digests[0] == digests[1]
    other = prepare_documents(
        replace(asked, files=(str(moved),), train_on="all"), tmp_path / "cache", workers=1
    )
    assert read_document_manifest(other).content_sha256 not in digests  # other targets are other data


def test_an_interrupted_preparation_resumes_with_the_missing_units(
    write: Write,
    asked: DocumentPreparation,
    tmp_path: Path,
    small_units: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = replace(asked, files=(str(write(talks(120))),))
    whole = snapshot(prepare_documents(wanted, tmp_path / "whole", workers=1))
    run, done = prepare.run_documents, []

    def until_the_third(job: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job.name)
        return run(job)

    monkeypatch.setattr(prepare, "run_documents", until_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare_documents(wanted, tmp_path / "cache", workers=1)
    (folder,) = (tmp_path / "cache").iterdir()
    with pytest.raises(DataError, match=r"not prepared data: it has no manifest\.json"):
        DocumentSet(folder, "train")
    again: list[str] = []
    monkeypatch.setattr(prepare, "run_documents", lambda job: again.append(job.name) or run(job))
    assert prepare_documents(wanted, tmp_path / "cache", workers=1) == folder
    assert not set(again) & set(done)
    assert snapshot(folder) == whole


def pairs(count: int) -> list[dict[str, Any]]:
    generator = random.Random(3)

    def say() -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(2, 20)))

    return [
        {"prompt": f"{n} {say()}", "chosen": f"good {say()}", "rejected": f"bad {say()}"}
        for n in range(count)
    ]


def test_pairs_are_neighbors_and_differ_after_one_prompt(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    rows = pairs(60)
    folder = prepare_documents(
        replace(asked, files=(str(write(rows)),), paired=True), tmp_path / "cache", workers=1
    )
    seen = 0
    for split in ("train", "validation"):
        documents = DocumentSet(folder, split)
        assert documents.paired
        assert len(documents) % 2 == 0
        for index in range(0, len(documents), 2):
            name = documents.sample_name(index)
            row = rows[int(name.removesuffix(" (chosen)").rsplit(":", 1)[1]) - 1]
            assert name.endswith(" (chosen)")
            assert documents.sample_name(index + 1).endswith(" (rejected)")
            assert trained_text(documents, index) == row["chosen"] + "<|endoftext|>"
            assert trained_text(documents, index + 1) == row["rejected"] + "<|endoftext|>"
            starts = [int(np.argmax(documents.trained(index + inner))) for inner in (0, 1)]
            assert starts[0] == starts[1]
            prompts = [documents.tokens(index + inner)[: starts[0]].tolist() for inner in (0, 1)]
            assert prompts[0] == prompts[1]
            seen += 1
    assert seen == 60


def test_in_two_conversations_only_the_turns_after_the_shared_prompt_are_targets(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    shared = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"},
              {"role": "user", "content": "over"}]  # fmt: skip
    rows = [{"chosen": [*shared, {"role": "assistant", "content": "dogs"}],
             "rejected": [*shared, {"role": "assistant", "content": "lazy"}]}]  # fmt: skip
    wanted = replace(asked, files=(str(write(rows)),), paired=True, validation=0.0)
    documents = DocumentSet(prepare_documents(wanted, tmp_path / "cache", workers=1), "train")
    assert [trained_text(documents, index) for index in (0, 1)] == ["dogs<|endoftext|>", "lazy<|endoftext|>"]


def test_too_long_rows_are_refused_dropped_or_truncated_and_counted(
    write: Write, asked: DocumentPreparation, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = talks(80)
    path = write(rows)
    template = find_template("plain", tokenizer)
    lengths = [len(encode(Conversation.of(row["messages"]), tokenizer, template)) for row in rows]
    limit = sorted(lengths)[60]
    asked = replace(asked, files=(str(path),), sequence=limit)
    first = next(n for n, length in enumerate(lengths) if length > limit)
    said = rf"rows\.jsonl:{first + 1}: {lengths[first]:,} tokens, longer than batch\.sequence = {limit:,}; raise .*'drop'.*'cut'"
    with pytest.raises(DataError, match=said):
        prepare_documents(asked, tmp_path / "cache", workers=1)
    over = sum(length > limit for length in lengths)
    dropped = read_document_manifest(
        prepare_documents(replace(asked, too_long="drop"), tmp_path / "cache", workers=1)
    )
    assert dropped.total.dropped == {"too long": over}
    assert dropped.total.rows == 80
    assert dropped.total.documents == 80 - over
    assert dropped.total.examples["too long"][0] == f"{path}:{first + 1}"
    assert f"Of 80 rows: {over} dropped (too long, as {path}:" in dropped.losses()
    folder = prepare_documents(replace(asked, too_long="cut"), tmp_path / "cache", workers=1)
    total = read_document_manifest(folder).total
    assert total.cut + sum(total.dropped.values()) == over
    assert total.tokens == sum(min(length, limit) for length in lengths) - limit * sum(total.dropped.values())
    for split in ("train", "validation"):
        documents = DocumentSet(folder, split)
        assert documents.lengths.max() <= limit
        assert all(documents.trained(index).any() for index in range(len(documents)))


def test_a_truncation_that_leaves_no_answer_or_no_difference_drops_the_row(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    long = " ".join(["fox"] * 60)
    talk = write([{"prompt": long, "completion": "x"}, {"prompt": "x", "completion": long}])
    asked = replace(asked, sequence=40, too_long="cut", validation=0.0)
    manifest = read_document_manifest(
        prepare_documents(replace(asked, files=(str(talk),)), tmp_path / "a", workers=1)
    )
    assert manifest.total.dropped == {"too long: no answer left": 1}
    assert (manifest.total.documents, manifest.total.cut) == (1, 1)
    rows = write([{"prompt": "x", "chosen": f"{long} a", "rejected": f"{long} b"},
                  {"prompt": "x", "chosen": "short", "rejected": f"{long} b"}])  # fmt: skip
    wanted = replace(asked, files=(str(rows),), paired=True)
    folder = prepare_documents(wanted, tmp_path / "b", workers=1)
    manifest = read_document_manifest(folder)
    assert manifest.total.dropped == {"too long: no difference left": 1}
    assert manifest.total.documents == 2
    assert sorted(DocumentSet(folder, "train").lengths)[1] == 40


def test_bad_rows_are_refused_with_their_line_or_counted_by_reason(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    rows = talks(20)
    rows.insert(7, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]})
    rows.insert(12, {"messages": [{"role": "wizard", "content": "x"}]})
    rows.append({"messages": [{"role": "user", "content": "y"}, {"role": "assistant", "content": " "}]})
    path = write(rows)
    wanted = replace(asked, files=(str(path),))
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl:8: turn 2, the assistant's, is empty; fix the row, or set data\.bad_rows",
    ):
        prepare_documents(wanted, tmp_path / "cache", workers=1)
    total = read_document_manifest(
        prepare_documents(replace(wanted, bad_rows="drop"), tmp_path / "cache", workers=1)
    ).total
    assert total.dropped == {"empty answer": 2, "unknown role": 1}
    # Which split a row without a readable sample falls to depends on its file's path, and with it the order here.
    assert {reason: set(names) for reason, names in total.examples.items()} == {
        "empty answer": {f"{path}:8", f"{path}:23"},
        "unknown role": {f"{path}:13"},
    }
    assert (total.rows, total.documents) == (23, 20)


def test_invalid_json_always_stops_the_preparation(asked: DocumentPreparation, tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(talks(1)[0]) + '\n{"messages": [\n')
    wanted = replace(asked, files=(str(path),), bad_rows="drop")
    with pytest.raises(DataError, match=r"broken\.jsonl:2: not valid JSON"):
        prepare_documents(wanted, tmp_path / "cache", workers=1)


def test_nothing_left_is_refused_with_the_reasons(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    row = {"prompt": "x", "completion": ""}
    wanted = replace(asked, files=(str(write([row] * 3)),), bad_rows="drop")
    with pytest.raises(DataError, match=r"nothing to train on.*Of 3 rows: 3 dropped \(empty answer, as"):
        prepare_documents(wanted, tmp_path / "cache", workers=1)


def test_a_split_without_documents_says_so(write: Write, asked: DocumentPreparation, tmp_path: Path) -> None:
    folder = prepare_documents(
        replace(asked, files=(str(write(talks(5))),), validation=0.0), tmp_path / "cache", workers=1
    )
    with pytest.raises(
        DataError, match=r"validation split .* holds no document: 5 in total.*data\.validation"
    ):
        DocumentSet(folder, "validation")
    with pytest.raises(RecipeError, match="Unknown split 'test'"):
        DocumentSet(folder, "test")


def test_damage_is_noticed(write: Write, asked: DocumentPreparation, tmp_path: Path) -> None:
    folder = prepare_documents(replace(asked, files=(str(write(talks(30))),)), tmp_path / "cache", workers=1)
    verify_documents(folder, full=True)

    def damaged(name: str) -> Path:
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        return copy

    cut = damaged("cut")
    file = cut / "train" / "00000.trn"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"00000\.trn is damaged: \d+ bytes, the manifest says"):
        DocumentSet(cut, "train")
    flipped = damaged("flipped")
    file = flipped / "train" / "00000.trn"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    with pytest.raises(DataError, match="does not match its checksum"):
        verify_documents(flipped, full=True)
    edited = damaged("edited")
    manifest = edited / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"trained": ', '"trained": 1', 1))
    with pytest.raises(DataError, match="was edited or damaged"):
        read_document_manifest(edited)
    (edited / "tokenizer" / "tokenizer.json").unlink()
    gone = damaged("gone")
    (gone / "train" / "00000.bin").unlink()
    with pytest.raises(DataError, match=r"00000\.bin is missing"):
        DocumentSet(gone, "train")


def test_a_tokenizer_of_another_model_is_refused(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    wanted = replace(asked, files=(str(write(talks(2))),), vocab_size=399)
    with pytest.raises(
        DataError, match=r"has 400 entries, more than the model's vocabulary of 399: it is not this model's"
    ):
        prepare_documents(wanted, tmp_path / "cache", workers=1)


def test_a_tokenizer_can_be_trained_on_the_conversations(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    wanted = replace(asked, files=(str(write(talks(60))),), tokenizer="train", vocab_size=300)
    folder = prepare_documents(wanted, tmp_path / "cache", workers=1)
    assert Tokenizer.load(folder / "tokenizer").vocab_size == 300
    again = prepare_documents(wanted, tmp_path / "other", workers=1)
    assert snapshot(folder) == snapshot(again)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": "chatt"}, "data.format is 'chatt'; did you mean 'chat'"),
        ({"too_long": "ignore"}, "data.too_long is 'ignore'"),
        ({"bad_rows": "keep"}, "data.bad_rows is 'keep'"),
        ({"train_on": "prompt"}, "objective.train_on is 'prompt'"),
        ({"paired": True, "format": "chat"}, "need pairs of answers"),
        ({"format": "preference"}, "which is for objective.kind = 'dpo'"),
        ({"validation": 1.5}, "it is a fraction"),
        ({"sequence": 1}, "at least 2 tokens"),
        ({"limit": 0}, "data.limit is 0"),
        ({"tokenizer": "train", "vocab_size": None}, "needs a vocabulary size"),
    ],
)  # fmt: skip
def test_a_preparation_that_contradicts_itself_is_refused(
    asked: DocumentPreparation, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        replace(asked, **changes)


# --- sources ---


ULTRACHAT = [
    {"prompt": row["messages"][0]["content"], "prompt_id": str(number), "messages": row["messages"]}
    for number, row in enumerate(talks(40, seed=5))
]
ULTRAFEEDBACK = [
    {
        "prompt": row["prompt"],
        "prompt_id": str(number),
        **{
            kind: [{"content": row["prompt"], "role": "user"}, {"content": row[kind], "role": "assistant"}]
            for kind in ("chosen", "rejected")
        },
        "messages": [
            {"content": row["prompt"], "role": "user"},
            {"content": row["chosen"], "role": "assistant"},
        ],
        "score_chosen": 8.0,
        "score_rejected": 3.5,
    }
    for number, row in enumerate(pairs(40))
]


def write_parquet(path: Path, rows: list[dict[str, Any]], groups: int = 16) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=groups)
    return path


@pytest.mark.parametrize(
    ("source", "rows", "paired"), [("ultrachat", ULTRACHAT, False), ("ultrafeedback", ULTRAFEEDBACK, True)]
)
def test_local_copies_of_published_data_are_read_by_name(
    write: Write,
    asked: DocumentPreparation,
    tmp_path: Path,
    source: str,
    rows: list[dict[str, Any]],
    paired: bool,
) -> None:
    """JSONL, Parquet and a dataset's folder give the same documents."""
    pytest.importorskip("datasets")
    parquet = write_parquet(tmp_path / "dataset" / "train.parquet", rows)
    digests = set()
    for name, files in ((source, [write(rows)]), (source, [parquet]), (f"hub:{parquet.parent}", [])):
        wanted = replace(asked, source=name, files=tuple(map(str, files)), paired=paired, validation=0.0)
        folder = prepare_documents(wanted, tmp_path / "cache", workers=1)
        manifest = read_document_manifest(folder)
        assert manifest.documents("train") == len(rows) * (2 if paired else 1)
        digests.add(manifest.content_sha256)
    assert len(digests) == 1


def test_published_data_without_a_hub_says_what_to_do(
    asked: DocumentPreparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MachineError, match=r"HuggingFaceH4/ultrachat_200k.*data\.files"):
        prepare_documents(replace(asked, source="ultrachat"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"source": "ultrachatt"}, "did you mean 'ultrachat'"),
        ({"source": "python-docstrings", "files": ("x",)}, "data.files is given"),
        ({"source": "files"}, "data.files is empty"),
    ],
)
def test_a_source_that_cannot_be_is_refused(
    asked: DocumentPreparation, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        prepare_documents(replace(asked, **changes), tmp_path / "cache")


def test_text_files_are_texts(asked: DocumentPreparation, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick fox")
    wanted = replace(asked, files=(str(tmp_path / "a.txt"),), validation=0.0)
    documents = DocumentSet(prepare_documents(wanted, tmp_path / "cache", workers=1), "train")
    assert documents.trained(0).tolist() == [False] + [True] * (int(documents.lengths[0]) - 1)


# --- docstrings ---


SOURCE = '''"""A module about foxes.

And more."""
import sys
sys.exit("this file was run")


class Fox:
    """An animal that jumps."""

    def jump(self, height: int = 3) -> None:
        """Jump over lazy dogs."""

    def _hide(self):
        """Nobody asks about this."""


def count(foxes, *, sleeping=False):
    """Return the number of foxes.

    Sleeping ones only where asked."""


def silent():
    pass
'''


def test_docstrings_become_questions_without_running_anything(tmp_path: Path) -> None:
    path = tmp_path / "foxes.py"
    path.write_text(SOURCE)
    rows = list(docstring_questions(str(path)))
    assert rows == list(docstring_questions(str(path)))
    talks = [row["messages"] for _, row, _ in rows]
    answers = [message["content"] for talk in talks for message in talk if message["role"] == "assistant"]
    assert {
        "A module about foxes.",
        "An animal that jumps.",
        "Jump over lazy dogs.",
        "Return the number of foxes.",
    } <= set(answers)
    assert "foxes.count(foxes, *, sleeping=False)" in answers
    assert "It has these methods: jump." in answers
    assert "A module about foxes.\n\nAnd more." in answers
    assert not any("Nobody" in answer or "silent" in answer for answer in answers)
    assert max(map(len, talks)) == 6  # a class is talked about in three questions
    assert {group for _, _, group in rows} == {"foxes", "foxes.Fox", "foxes.count"}
    questions = [talk[0]["content"] for talk in talks]
    assert len(set(questions)) > 5


def test_wrong_docstrings_differ_from_right_ones(tmp_path: Path) -> None:
    path = tmp_path / "foxes.py"
    path.write_text(SOURCE)
    rows = [row for _, row, _ in docstring_pairs(str(path))]
    assert len(rows) == 4
    for row in rows:
        assert row["chosen"] != row["rejected"]
        assert row["chosen"] in SOURCE
    kinds: Counter[str] = Counter()
    for file in ("textwrap.py", "shutil.py", "argparse.py", "subprocess.py"):
        for _, row, _ in docstring_pairs(os.path.join(os.path.dirname(ast.__file__), file)):
            right, wrong = row["chosen"].split(), row["rejected"].split()
            unlike = [n for n, (one, other) in enumerate(zip(right, wrong, strict=False)) if one != other]
            if wrong == right[:-1]:
                kinds["broken off"] += 1
            elif sorted(wrong) == sorted(right) and len(unlike) == 2 and unlike[1] == unlike[0] + 1:
                kinds["swapped"] += 1
            elif wrong == right[:3] * (len(wrong) // 3):
                kinds["repeated"] += 1
            else:
                kinds["another"] += 1
    total = sum(kinds.values())
    assert all(
        0.1 < kinds[kind] / total < 0.5 for kind in ("broken off", "swapped", "repeated", "another")
    ), kinds


def test_the_offline_default_is_plenty_and_its_held_out_objects_are_not_trained_on(
    asked: DocumentPreparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(sys.modules)
    wanted = replace(
        asked, source="python-docstrings", sequence=512, too_long="drop", limit=800, validation=0.1
    )
    folder = prepare_documents(wanted, tmp_path / "cache", workers=1)
    assert not {name for name in set(sys.modules) - before if name in ("antigravity", "this", "turtle")}
    manifest = read_document_manifest(folder)
    assert manifest.total.rows == 800
    assert 0.3 < manifest.trained("train") / manifest.tokens("train") < 0.8
    names = {}
    for split in ("train", "validation"):
        documents = DocumentSet(folder, split)
        found = [documents.sample_name(index).rsplit(" ", 1)[1] for index in range(len(documents))]
        names[split] = {name.split("#")[0] for name in found}
    assert names["validation"]
    assert not names["train"] & names["validation"]


# --- looking ---


def test_statistics_and_examples_are_those_of_the_documents(
    write: Write, asked: DocumentPreparation, tmp_path: Path
) -> None:
    folder = prepare_documents(replace(asked, files=(str(write(talks(60))),)), tmp_path / "cache", workers=1)
    found = document_statistics(folder)
    json.dumps(found)
    documents = DocumentSet(folder, "train")
    numbers = found["splits"]["train"]
    assert numbers["documents"] == len(documents)
    assert numbers["tokens"] == documents.lengths.sum()
    assert numbers["trained_share"] == numbers["trained"] / numbers["tokens"]
    assert numbers["document_tokens"]["max"] == documents.lengths.max()
    assert len(numbers["histogram"]) <= 12
    for bin in numbers["histogram"]:
        inside = (documents.lengths >= bin["from"]) & (documents.lengths < bin["below"])
        assert bin["documents"] == inside.sum()
    tokenizer = Tokenizer.load(folder / "tokenizer")
    for place, example in enumerate(document_examples(folder, "train", count=4)):
        index = len(documents) * place // 4
        assert example["name"] == documents.sample_name(index)
        assert "".join(piece["text"] for piece in example["pieces"]) == tokenizer.decode(
            documents.tokens(index)
        )
        targets = "".join(piece["text"] for piece in example["pieces"] if piece["trained"])
        assert targets == trained_text(documents, index)
        assert example["trained"] == sum(piece["tokens"] for piece in example["pieces"] if piece["trained"])
    (one,) = document_examples(folder, "train", at=7)
    assert one["name"] == documents.sample_name(7)
    with pytest.raises(RecipeError, match=r"--at is 9999, but the train split holds"):
        document_examples(folder, "train", at=9999)
