from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rush.data import TokenDataset, read_manifest, verify_shards
from rush.data.shards import Manifest, Shard, ShardWriter, map_shard, token_dtype, write_manifest
from rush.errors import DataError
from rush.files import sha256_file


def make_manifest(shards: tuple[Shard, ...], vocab_size: int, eos_id: int = 0) -> Manifest:
    return Manifest(token_dtype(vocab_size).str, vocab_size, eos_id, "", "", {}, shards)


def write_shard(folder: Path, documents: list[list[int]], vocab_size: int, eos_id: int = 0) -> Shard:
    writer = ShardWriter(folder, "train", "00000", vocab_size, eos_id)
    for number, ids in enumerate(documents):
        writer.append(ids, f"döcument {number}", len(ids))
    shard = writer.finish()
    assert shard is not None
    return shard


@settings(max_examples=40)
@given(
    documents=st.lists(st.lists(st.integers(0, 99_999), max_size=20), min_size=1, max_size=8),
    vocab_size=st.sampled_from([100_000, 70_000 + 30_000, 1 << 20]),
)
def test_documents_are_read_back_with_their_boundaries_and_names(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    shard = write_shard(folder, documents, vocab_size, eos_id=7)
    mapped = map_shard(folder, make_manifest((shard,), vocab_size), shard)
    for number, ids in enumerate(documents):
        start, stop = mapped.starts[number], mapped.starts[number + 1]
        assert mapped.tokens[start:stop].tolist() == [*ids, 7]
        assert mapped.document_name(number) == f"döcument {number}"
    assert (shard.documents, shard.tokens) == (len(documents), sum(len(ids) + 1 for ids in documents))


@pytest.mark.parametrize(
    ("vocab_size", "expected"), [(257, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4"), (128_256, "<u4")]
)
def test_ids_take_two_bytes_where_the_vocabulary_allows(
    tmp_path: Path, vocab_size: int, expected: str
) -> None:
    last = vocab_size - 1
    shard = write_shard(tmp_path, [[last, 1]], vocab_size)
    raw = (tmp_path / "train" / "00000.bin").read_bytes()
    assert np.frombuffer(raw, dtype=expected).tolist() == [last, 1, 0]
    assert shard.bytes["bin"] == 3 * int(expected[-1])


@pytest.mark.parametrize("bad", [10, 11, 70_000, -1])
def test_an_id_outside_the_vocabulary_is_not_written(tmp_path: Path, bad: int) -> None:
    writer = ShardWriter(tmp_path, "train", "00000", vocab_size=10, eos_id=0)
    writer.append([1, 2], "first", 2)
    with pytest.raises(DataError, match=rf"id {bad} at position 1 of second \(shard train/00000, offset 4\)"):
        writer.append([9, bad, 3], "second", 2)
    writer.abandon()


def test_an_abandoned_shard_leaves_no_file(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "train", "00000", vocab_size=10, eos_id=0)
    writer.append([1], "first", 1)
    assert not (tmp_path / "train" / "00000.bin").exists()
    writer.abandon()
    assert list((tmp_path / "train").iterdir()) == []


def test_the_format_on_disk_is_as_documented(prepared: Path) -> None:
    """Read with nothing but numpy and json, as another program would."""
    manifest = json.loads((prepared / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["dtype"]) == ("rush-tokens", 1, "<u2")
    documents = 0
    for shard in manifest["shards"]:
        stem = prepared / shard["split"] / shard["name"]
        tokens = np.fromfile(f"{stem}.bin", dtype="<u2")
        starts, names = np.fromfile(f"{stem}.idx", dtype="<i8").reshape(2, -1)
        assert len(tokens) == shard["tokens"] == starts[-1]
        assert (tokens == manifest["eos_id"]).nonzero()[0].tolist() == (starts[1:] - 1).tolist()
        assert len(starts) - 1 == shard["documents"]
        assert names[-1] == Path(f"{stem}.ids").stat().st_size
        documents += shard["documents"]
    assert documents == 300 == sum(split["documents"] for split in manifest["splits"].values())


# Each damage is done to a copy of a good folder; `quick` says whether opening must already notice.
def first(folder: Path, suffix: str) -> Path:
    return folder / "train" / f"00000.{suffix}"


def flip_a_bit(folder: Path, suffix: str = "bin") -> None:
    content = bytearray(first(folder, suffix).read_bytes())
    content[len(content) // 2] ^= 1
    first(folder, suffix).write_bytes(bytes(content))


def truncate(folder: Path, suffix: str = "bin") -> None:
    first(folder, suffix).write_bytes(first(folder, suffix).read_bytes()[:-2])


def swap_shards(folder: Path) -> None:
    other = folder / "train" / "00001.bin"
    content = first(folder, "bin").read_bytes()
    shutil.copy(other, first(folder, "bin"))
    other.write_bytes(content)


def swap_equal_sizes(folder: Path) -> None:
    content = bytearray(first(folder, "bin").read_bytes())
    content[0:2], content[2:4] = content[2:4], content[0:2]
    first(folder, "bin").write_bytes(bytes(content))


def edit(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        body = json.loads((folder / "manifest.json").read_text())
        change(body)
        (folder / "manifest.json").write_text(json.dumps(body))

    return damage


DAMAGES: dict[str, tuple[Callable[[Path], object], bool, str]] = {
    "flipped bit in tokens": (flip_a_bit, False, "00000.bin is damaged"),
    "flipped bit in bounds": (lambda f: flip_a_bit(f, "idx"), False, "00000.idx is damaged"),
    "flipped bit in names": (lambda f: flip_a_bit(f, "ids"), False, "00000.ids is damaged"),
    "truncated tokens": (truncate, True, "00000.bin is damaged"),
    "truncated bounds": (lambda f: truncate(f, "idx"), True, "00000.idx is damaged"),
    "grown tokens": (
        lambda f: first(f, "bin").write_bytes(first(f, "bin").read_bytes() + b"\0\0"), True, "00000.bin",
    ),
    "empty tokens": (lambda f: first(f, "bin").write_bytes(b""), True, "00000.bin is damaged"),
    "missing tokens": (lambda f: first(f, "bin").unlink(), True, "00000.bin is missing"),
    "missing names": (lambda f: first(f, "ids").unlink(), True, "00000.ids is missing"),
    "missing split": (lambda f: shutil.rmtree(f / "validation"), True, "is missing"),
    "swapped shards": (swap_shards, True, "is damaged"),
    "swapped tokens": (swap_equal_sizes, False, "00000.bin is damaged"),
    "missing manifest": (lambda f: (f / "manifest.json").unlink(), True, "no manifest.json"),
    "broken manifest": (lambda f: (f / "manifest.json").write_text("{"), True, "not valid JSON"),
    "manifest of another kind": (lambda f: (f / "manifest.json").write_text("[]"), True, "not a manifest"),
    "manifest of another version": (edit(lambda b: b.update(version=2)), True, "version 2"),
    "edited vocabulary": (edit(lambda b: b.update(vocab_size=9)), True, "edited or damaged"),
    "edited count": (edit(lambda b: b["shards"][0].update(tokens=5)), True, "edited or damaged"),  # type: ignore[index]
    "shard left out": (edit(lambda b: b["shards"].pop()), True, "edited or damaged"),  # type: ignore[attr-defined]
    "seal removed": (edit(lambda b: b.pop("sha256")), True, "edited or damaged"),
    "another tokenizer": (
        lambda f: (f / "tokenizer" / "tokenizer.json").write_text("{}"), False, "not the tokenizer",
    ),
    "missing tokenizer": (lambda f: shutil.rmtree(f / "tokenizer"), False, "tokenizer.json is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_detected_and_named(prepared: Path, tmp_path: Path, name: str) -> None:
    damage, quick, said = DAMAGES[name]
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    verify_shards(folder, full=True)
    damage(folder)
    with pytest.raises(DataError, match=said):
        verify_shards(folder, full=True)
    if quick:
        with pytest.raises(DataError, match=said):
            TokenDataset(folder, "train", 16)
    else:
        TokenDataset(folder, "train", 16)


def resealed(folder: Path, manifest: Manifest, change: Callable[[Shard], Shard]) -> None:
    """A manifest that agrees with the damaged files: only the content itself can give it away."""
    shards = tuple(change(shard) for shard in manifest.shards)
    names = ("dtype", "vocab_size", "eos_id", "tokenizer_sha256", "key", "preparation")
    write_manifest(folder, Manifest(**{n: getattr(manifest, n) for n in names}, shards=shards))


def rehash(folder: Path) -> Callable[[Shard], Shard]:
    def change(shard: Shard) -> Shard:
        sums = {suffix: sha256_file(shard.path(folder, suffix)) for suffix in shard.sha256}
        return Shard(
            shard.split, shard.name, shard.documents, shard.tokens, shard.text_bytes, shard.bytes, sums
        )

    return change


def test_an_id_outside_the_vocabulary_is_found_even_if_every_checksum_matches(
    prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    tokens = np.fromfile(first(folder, "bin"), dtype="<u2")
    tokens[33] = 400
    tokens.tofile(first(folder, "bin"))
    resealed(folder, read_manifest(folder), rehash(folder))
    said = r"00000\.bin: token id 400 at offset 33 is outside the vocabulary of 400"
    with pytest.raises(DataError, match=said):
        verify_shards(folder, full=True)
    dataset = TokenDataset(folder, "train", 16)
    dataset.window(1)
    with pytest.raises(DataError, match=said):
        dataset.window(2)


def test_document_boundaries_that_do_not_match_the_tokens_are_found_even_if_every_checksum_matches(
    prepared: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(prepared, folder)
    starts = np.fromfile(first(folder, "idx"), dtype="<i8")
    starts[1] += 1
    starts.tofile(first(folder, "idx"))
    resealed(folder, read_manifest(folder), rehash(folder))
    with pytest.raises(DataError, match="does not end with the end token"):
        verify_shards(folder, full=True)


def test_the_content_hash_does_not_depend_on_the_source(prepared: Path) -> None:
    manifest = read_manifest(prepared)
    written = json.loads((prepared / "manifest.json").read_text())["content_sha256"]
    assert manifest.content_sha256 == written
    renamed = Manifest(manifest.dtype, 400, 0, "other", "other", {"source": "other"}, manifest.shards)
    assert renamed.content_sha256 == written
    fewer = Manifest(manifest.dtype, 400, 0, "", "", {}, manifest.shards[:-1])
    assert fewer.content_sha256 != written
