from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rush.data import Tokenizer, find_tokenizer, train_bpe
from rush.errors import DataError

ROOT = Path(__file__).parents[2]


@given(text=st.text(max_size=200))
@settings(max_examples=100)
def test_any_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    for specials in (True, False):
        ids = tokenizer.encode(text, specials=specials)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.encode_documents([text]) == [tokenizer.encode(text, specials=False)]


def test_the_name_of_a_special_token_in_a_document_stays_plain_text(tokenizer: Tokenizer) -> None:
    text = "before <|endoftext|> after"
    (ids,) = tokenizer.encode_documents([text])
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text).count(tokenizer.eos_id) == 1  # in a prompt it is the token
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_ids == {"<|endoftext|>": tokenizer.eos_id}


def test_training_reaches_the_vocabulary_and_is_the_same_in_another_process(
    texts: list[str], tokenizer: Tokenizer, corpus_file: Path
) -> None:
    assert tokenizer.vocab_size == 400
    assert tokenizer.json_text == train_bpe(texts, 400).json_text
    script = (
        "from rush.data import open_source, train_bpe\n"
        f"texts = [d.text for d in open_source('files', [{str(corpus_file)!r}])]\n"
        "print(train_bpe(texts, 400).sha256)"
    )
    environment = os.environ | {"RAYON_NUM_THREADS": "1", "PYTHONHASHSEED": "7"}
    other = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert other.stdout.strip() == tokenizer.sha256


def test_merges_are_those_of_textbook_byte_pair_encoding() -> None:
    """Against BPE written the slow way: count pairs, merge the most frequent, again."""
    text = "abababab abcabc" * 5
    trained = train_bpe([text], 257 + 2)
    words = [list(word) for word, _ in tokenizers.pre_tokenizers.ByteLevel(False).pre_tokenize_str(text)]
    merges = []
    for _ in range(2):
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: counts[pair])
        assert list(counts.values()).count(counts[best]) == 1, "the example must not hang on a tie"
        merges.append(list(best))
        words = [_merge(word, best) for word in words]
    assert json.loads(trained.json_text)["model"]["merges"] == merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged


def test_a_corpus_too_small_for_the_vocabulary_says_how_many_merges_it_supports() -> None:
    with pytest.raises(DataError, match=r"supports a vocabulary of 258 \(1 merges\), but 300"):
        train_bpe(["aa bb"[:2]], 300)
    with pytest.raises(DataError, match="at least 257"):
        train_bpe(["aa"], 256)


def test_training_reads_no_more_text_than_allowed(texts: list[str]) -> None:
    def endless() -> object:
        while True:
            yield from texts

    capped = train_bpe(endless(), 300, max_bytes=20_000)  # type: ignore[arg-type]
    assert capped.vocab_size == 300


def test_saved_and_loaded_is_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chatty = Tokenizer(tokenizer.json_text, "<|endoftext|>", "<|endoftext|>", "{{ messages[0].content }}")
    for original in (tokenizer, chatty):
        original.save(tmp_path)
        assert Tokenizer.load(tmp_path) == original
        assert Tokenizer.load(tmp_path / "tokenizer.json") == original
        assert find_tokenizer(str(tmp_path)) == original


def test_the_reference_library_reads_what_was_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def größere(日本語): return 🦊  # and so on\n\n"
    assert reference.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    assert reference.eos_token_id == tokenizer.eos_id
    assert reference.decode(tokenizer.encode(text)) == text


def test_truncation_and_padding_left_in_a_file_are_switched_off(tokenizer: Tokenizer, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    core.enable_truncation(5)
    core.enable_padding(length=50)
    core.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    text = "the quick brown fox jumps over lazy dogs " * 20
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.encode_documents([text, "a"]) == tokenizer.encode_documents([text, "a"])


def test_a_post_processor_adds_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.eos_id)]
    )
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("fox") == tokenizer.encode("fox")


def test_the_vocabulary_reaches_the_largest_id_even_with_holes(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7, "</s>": 3}, unk_token="a"))
    core.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.vocab_size, loaded.eos_id, loaded.bos_id) == (8, 3, None)


def test_special_tokens_come_from_the_configuration(tokenizer: Tokenizer, tmp_path: Path) -> None:
    core = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    core.add_special_tokens(["<start>", "<end>"])
    core.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<end>"}, "bos_token": "<start>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.bos_id, loaded.eos_id) == (400, 401)
    assert loaded.encode("<start>fox<end>") == [400, *tokenizer.encode("fox"), 401]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "No tokenizer at"),
        ({"tokenizer.json": "{}"}, "not a tokenizer.json"),
        ({"tokenizer.json": "not json"}, "not a tokenizer.json"),
        ({"tokenizer.json": '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'}, "holds no vocabulary"),
        (
            {"tokenizer.json": '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'},
            "no end-of-text token",
        ),
    ],
)
def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", r"tokenizer_config\.json:1: not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"eos_token": "<nope>"}', "names '<nope>' as eos_token, which the vocabulary lacks"),
    ],
)
def test_a_broken_configuration_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, config: str, said: str
) -> None:
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["gpt3", "./nothing", "/no/such/tokenizer.json", "a/b/c"])
def test_a_tokenizer_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(DataError, match="No tokenizer"):
        find_tokenizer(name)


def test_a_name_is_looked_for_on_this_machine_first(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.save(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert find_tokenizer("gpt2") == tokenizer


def test_an_unreachable_hub_says_what_to_do_instead(tmp_path: Path) -> None:
    script = (
        "from rush.data import find_tokenizer\nfrom rush.errors import MachineError\n"
        "for name in ('gpt2', 'llama-3', 'owner/name'):\n"
        "    try:\n        find_tokenizer(name)\n"
        "    except MachineError as error:\n"
        "        assert 'copy its tokenizer.json here' in str(error), error\n"
        "    else:\n        raise SystemExit('found ' + name)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, cwd=ROOT)


def test_tokenizers_are_compared_by_their_vocabulary_and_encodings(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    assert tokenizer.difference(train_bpe(texts, 400)) is None
    other = train_bpe([text.swapcase() for text in texts], 400)
    said = tokenizer.difference(other)
    assert said is not None
    assert "of 400 entries differ" in said
    assert tokenizer.difference(train_bpe(texts, 399)) is not None, "one entry more is another tokenizer"
    # The same entries, cut otherwise: digits one by one.
    core = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    core.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    cut = Tokenizer(core.to_str(), tokenizer.eos_token)
    assert tokenizer.difference(cut) == "the vocabulary is the same, but texts are split differently"


def test_another_librarys_copy_of_a_tokenizer_is_the_same_tokenizer(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path / "ours")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "ours")
    theirs("a text that is cut off", truncation=True, max_length=4)  # which stays in the file it writes
    theirs.save_pretrained(tmp_path / "theirs")
    assert Tokenizer.load(tmp_path / "theirs").difference(tokenizer) is None
