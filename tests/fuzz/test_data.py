"""Data of strangers: rows, texts and tables, damaged and hostile, end in documents or in one sentence."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st

from rush.data.conversations.documents_manifest import FORMAT, verify_documents
from rush.data.conversations.filtering import write_row
from rush.data.conversations.inspect_documents import document_examples, document_statistics
from rush.data.conversations.preparation import DocumentPreparation
from rush.data.conversations.prepare import prepare_documents
from rush.data.conversations.rows import Row
from rush.data.conversations.store import DocumentWriter
from rush.data.conversations.templates import find_template
from rush.data.readers import read_rows, read_slice, slice_file
from rush.data.sealed_manifest import write_sealed
from rush.data.shards import SPLITS
from rush.data.tokenizer import END_OF_TEXT, Tokenizer, train_bpe
from tests.fuzz.harness import cases, corpus, explore, fuzz
from tests.fuzz.mutations import HOSTILE_VALUES, mutate_bytes, mutate_json

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]
ROWS = [
    {"messages": CHAT},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]},
    {"messages": CHAT, "tools": TOOLS, "system": "Be kind."},
    {"prompt": "1 + 1?", "completion": "2", "id": 7},
    {"instruction": "Add.", "input": "1, 1", "output": "2"},
    {"text": "A plain text."},
    {"prompt": "q", "chosen": "good", "rejected": "bad"},
    {"chosen": CHAT, "rejected": [*CHAT[:2], {"role": "assistant", "content": "No."}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}, CHAT[2]]},
]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["the quick brown fox jumps over the lazy dog " * 40], 280)


def reader(folder: Path, name: str) -> Callable[[bytes], object]:
    """Reads a file of this name as documents, and as rows."""

    def read(content: bytes) -> object:
        file = folder / name
        file.write_bytes(content)
        pieces = slice_file(file, 1 << 16)
        if not name.endswith(".txt"):
            for piece in pieces:
                list(read_rows(piece))
        return [list(read_slice(piece, "text")) for piece in pieces]

    return read


@cases(0.06)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "rows.jsonl.gz"])
def test_any_file_of_rows_is_read_or_refused(count: int, name: str, tmp_path: Path) -> None:
    import gzip

    table = b'text,id\n"a quoted, cell",1\n"two\nlines",2\nplain,3\n'
    seeds = {
        "rows.jsonl": b'{"text": "one"}\n{"text": "two", "id": 3}\n',
        "rows.csv": table,
        "rows.txt": "Ein Text \u2014 mit Absatz.\n\nUnd noch einer.\n".encode(),
        "rows.jsonl.gz": gzip.compress(b'{"text": "one"}\n' * 20, mtime=0),
    }
    fuzz(f"data/{name}", reader(tmp_path, name), [seeds[name]], count)


def parquet(compression: str) -> bytes:
    columns = {
        "text": [f"row {n} of a table" for n in range(40)],
        "messages": [CHAT] * 40,
        "n": list(range(40)),
    }
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression=compression, row_group_size=16)
    return buffer.getvalue()


@cases(0.05)
def test_any_parquet_file_is_read_or_refused(count: int, tmp_path: Path) -> None:
    seeds = [parquet("none"), parquet("snappy")]
    fuzz("data/rows.parquet", reader(tmp_path, "rows.parquet"), seeds, count, [mutate_bytes])


def encoder(folder: Path, tokenizer: Tokenizer) -> Callable[[bytes], object]:
    """Encodes every line that is a JSON object, as the preparation does: for answers and for pairs."""
    template = find_template("chatml", tokenizer)

    def read(content: bytes) -> object:
        (folder / "talks.jsonl").write_bytes(content)
        for piece in slice_file(folder / "talks.jsonl", 1 << 16):
            for place, (name, values) in enumerate(read_rows(piece)):
                options = DocumentPreparation(
                    paired=place % 3 == 0, vocab_size=280, sequence=256, bad_rows="drop", too_long="drop"
                )
                writers = {split: DocumentWriter(folder, split, "0", 280) for split in SPLITS}
                write_row(Row(name, values), options, tokenizer, template, writers)
        return None

    return read


@cases(0.08)
def test_any_row_of_a_conversation_is_encoded_or_refused(
    count: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    fuzz("data/talks", encoder(tmp_path, tokenizer), [LINES], count)


WORDS = st.sampled_from(
    ["a", "<|im_end|>", END_OF_TEXT, "\ufdd0", "\x1b[2J", " ", "\n", "", "\u202e", "x" * 500]
)
TEXTS = st.lists(WORDS, max_size=4).map("".join)
VALUES = st.one_of(TEXTS, st.sampled_from(HOSTILE_VALUES), st.none())
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "gpt"]), "content": VALUES},
        optional={"weight": VALUES, "tool_calls": VALUES, "name": VALUES},
    ),
    max_size=5,
)
STRANGE_ROWS = st.dictionaries(
    st.sampled_from(
        [
            "messages",
            "conversations",
            "text",
            "prompt",
            "completion",
            "tools",
            "system",
            "chosen",
            "rejected",
            "functions",
        ]
    ),
    st.one_of(VALUES, MESSAGES),
    max_size=4,
)


def written(row: object) -> bytes:
    return json.dumps(row).encode("utf-8", "replace") + b"\n"


@cases(0.05)
def test_any_combination_of_fields_is_encoded_or_refused(
    count: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    explore("data/talks", STRANGE_ROWS.map(written), encoder(tmp_path, tokenizer), count)


@cases(0.02)
def test_any_manifest_of_prepared_documents_is_read_or_refused(
    count: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The checksum of a manifest keeps out damage, not somebody who writes a new checksum."""
    tokenizer.save(tmp_path / "tokenizer")
    talks = tmp_path / "talks.jsonl"
    talks.write_bytes(
        b"".join(written({"messages": [{"role": "user", "content": f"q{n}"}, CHAT[2]]}) for n in range(9))
    )
    asked = DocumentPreparation(
        source="files", files=(str(talks),), tokenizer=str(tmp_path / "tokenizer"), sequence=64
    )
    folder = prepare_documents(asked, tmp_path / "cache", workers=1)
    seed = json.loads((folder / "manifest.json").read_bytes())

    def read(content: bytes) -> object:
        body = json.loads(content)
        if isinstance(body, dict):
            write_sealed(
                folder, {name: value for name, value in body.items() if name != "sha256"} | {"format": FORMAT}
            )
        else:
            (folder / "manifest.json").write_bytes(content)
        verify_documents(folder, full=True)
        return document_statistics(folder), document_examples(folder)

    fuzz("data/manifest", read, [json.dumps(seed).encode()], count, [mutate_json])


def test_the_corpus_of_past_failures_is_there() -> None:
    assert corpus("data/template")
    assert corpus("data/tokenizer")
