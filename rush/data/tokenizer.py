"""Tokenizers: a thin wrapper over Hugging Face `tokenizers`.

Truncation and padding of a `tokenizer.json` are disabled: documents are encoded whole. No special tokens are added around a
text; the shard writer adds the end-of-document token. Text such as `<|endoftext|>` in a corpus is encoded as ordinary characters
(`specials=False`) and cannot end a document.

A tokenizer.json is untrusted: it is tested in a restricted child before it is loaded here (`rush/data/tokenizer_trial.py`).

The offline default is a byte-level BPE trained on the corpus: every text has an encoding that decodes to itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from rush.data.chat import render
from rush.data.readers import json_problem
from rush.data.tokenizer_trial import check_tried, mark_tried
from rush.errors import DataError
from rush.files import write_atomic

END_OF_TEXT = "<|endoftext|>"
# Usual end-of-text tokens, for a tokenizer.json without tokenizer_config.json.
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>", "<|eot_id|>")
# Names of added tokens that are control tokens, whatever the file declares: <think>, <|user|>, </s>, [INST].
_MARKUP = re.compile(r"<\S+>|\[\S+\]")
LONGEST_RUN = 4096
SMALLEST_BPE = 256 + 1
# Steps before the model after which a text may have fewer letters (composing four into one is allowed for).
_DROPPING = (
    "Removed",
    "Whitespace",
    "Strip",
    "Replace",
    "BertNormalizer",
    "BertPreTokenizer",
    "Precompiled",
    "Punctuation",
)
LARGEST_FILE = 256 << 20
# Words, numbers, code, other scripts, spaces, which tokenizers with equal vocabularies may split differently.
_PROBE = "The quick brown fox's 3 rings: 12345.678 \u20ac\n\tdef f(x_1):  return {'a': [x_1 ** 2]}\nNa\u00efve \u0394\u03b9 \u6771\u4eac \u043c\u0438\u0440!"


@dataclass(frozen=True)
class Tokenizer:
    """Load with `Tokenizer.load(path)`, find by name with `find_tokenizer`, train with `train_bpe`."""

    json_text: str  # the content of tokenizer.json, which is the tokenizer
    eos_token: str
    bos_token: str | None = None
    chat_template: str | None = None

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From a Hugging Face folder, or a tokenizer.json (the files next to it are read too)."""
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise DataError(
                f"No tokenizer at {path}: {file} does not exist. Give a tokenizer.json or its folder."
            )
        json_text = _read_text(file)
        check_tried(json_text, str(file))
        core = _parse(json_text, str(file))
        config = _read_config(file.parent)
        template_file = file.parent / "chat_template.jinja"
        template = _read_text(template_file) if template_file.is_file() else config.get("chat_template")
        return cls(
            json_text=json_text,
            eos_token=_end_token(core, config, str(file)),
            bos_token=_known_token(core, config, "bos_token", str(file)),
            chat_template=_default_template(template, str(file.parent)),
        )

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as other libraries expect them."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
            "bos_token": self.bos_token,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        config = {key: value for key, value in config.items() if value is not None}
        write_atomic(folder / "tokenizer.json", self.json_text.encode())
        write_atomic(folder / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())

    @functools.cached_property
    def _core(self) -> tokenizers.Tokenizer:
        return _parse(self.json_text, "tokenizer.json")

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A second instance: encoding special tokens as text is a setting of the whole object."""
        core = _parse(self.json_text, "tokenizer.json")
        core.encode_special_tokens = True
        return core

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A third instance, to which all control tokens are text: those that are not special are declared so here."""
        if self.control_ids == self.special_ids:
            return self._literal
        tree = json.loads(self.json_text)
        for token in tree["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self.control_ids
        core = _parse(json.dumps(tree), "tokenizer.json")
        core.encode_special_tokens = True
        return core

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: ids may have gaps, and an embedding needs a row for each."""
        return max(self._core.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def eos_id(self) -> int:
        found = self._core.token_to_id(self.eos_token)
        assert found is not None
        return int(found)

    @property
    def bos_id(self) -> int | None:
        return None if self.bos_token is None else self._core.token_to_id(self.bos_token)

    @functools.cached_property
    def special_ids(self) -> dict[str, int]:
        added = self._core.get_added_tokens_decoder()
        return {token.content: id_ for id_, token in sorted(added.items()) if token.special}

    @functools.cached_property
    def control_ids(self) -> dict[str, int]:
        """The special tokens, and added tokens that mark something (`<think>`, `[INST]`) though they are not declared special.

        Other added tokens (runs of spaces, words of a domain) are vocabulary. A user's text must not forge a control token.
        """
        added = self._core.get_added_tokens_decoder()
        return {
            token.content: id_
            for id_, token in sorted(added.items())
            if token.special or _MARKUP.fullmatch(token.content)
        }

    @functools.cached_property
    def hides_controls(self) -> bool:
        """Whether a normalizer makes control tokens of other letters (`<THINK>`), so that they cannot be seen in a text."""
        added = self._core.get_added_tokens_decoder().values()
        marks = [token for token in added if token.content in self.control_ids]
        return self._core.normalizer is not None and any(token.normalized for token in marks)

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.json_text.encode()).hexdigest()

    def fewest_tokens(self, letters: int) -> int:
        """A lower bound for the tokens of a text: 0 where there is none, as the tokenizer drops or fuses letters."""
        return 0 if self._longest_token is None else letters // (4 * self._longest_token)

    @functools.cached_property
    def _longest_token(self) -> int | None:
        core = self._core
        steps = json.dumps(_state(core.pre_tokenizer)) + json.dumps(_state(core.normalizer))
        if _state(core.model).get("type") != "BPE" or getattr(core.model, "fuse_unk", True):
            return None
        if any(name in steps for name in _DROPPING):
            return None
        return max(map(len, core.get_vocab(with_added_tokens=True)))

    def difference(self, other: Tokenizer) -> str | None:
        """How another tokenizer encodes differently, for messages; None where it does not.

        By content: file formatting, templates and added special tokens may differ.
        """
        mine, theirs = ({id_: token for token, id_ in t._core.get_vocab().items()} for t in (self, other))
        unlike = sorted(id_ for id_ in mine.keys() | theirs.keys() if mine.get(id_) != theirs.get(id_))
        if unlike:
            first = unlike[0]
            return (
                f"{len(unlike):,} of {max(len(mine), len(theirs)):,} entries differ (number {first:,} is "
                f"{mine.get(first)!r} in one and {theirs.get(first)!r} in the other)"
            )
        if self.encode(_PROBE, specials=False) != other.encode(_PROBE, specials=False):
            return "the vocabulary is the same, but texts are split differently"
        return None

    def encode(self, text: str, *, specials: bool = True) -> list[int]:
        """Ids of a text, nothing added. `specials=False` encodes the names of special tokens as plain text."""
        core = self._core if specials else self._literal
        with _answering("encode"):
            return list(core.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which no control token is found, special or not."""
        with _answering("encode"):
            return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many documents, each as plain text; faster than one by one."""
        with _answering("encode"):
            encoded = self._literal.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        with _answering("decode"):
            return self._core.decode([int(i) for i in ids], skip_special_tokens=False)

    def render_chat(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = False, **options: Any
    ) -> str:
        """The conversation rendered by the tokenizer's chat template (sandboxed); the options are those of `rush.data.chat`."""
        if self.chat_template is None:
            raise DataError(
                "This tokenizer has no chat template (neither chat_template.jinja nor a chat_template in "
                "tokenizer_config.json). Use an instruction-tuned model's tokenizer, or plain prompts."
            )
        return render(
            self.chat_template,
            messages,
            add_generation_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            **options,
        )


def train_bpe(texts: Iterable[str], vocab_size: int, max_bytes: int | None = None) -> Tokenizer:
    """A byte-level BPE over at most `max_bytes` of text, with exactly `vocab_size` entries."""
    trained = train_bpe_up_to(texts, vocab_size, max_bytes)
    if (reached := trained.vocab_size) != vocab_size:
        raise DataError(
            f"The corpus supports a vocabulary of {reached} ({reached - SMALLEST_BPE} merges), but {vocab_size} "
            f"was asked for. Use more text, or data.vocab_size={reached}, or less."
        )
    return trained


def train_bpe_up_to(texts: Iterable[str], vocab_size: int, max_bytes: int | None = None) -> Tokenizer:
    """A byte-level BPE with at most `vocab_size` entries: as many as the text has merges for."""
    if vocab_size < SMALLEST_BPE:
        raise DataError(
            f"A byte-level vocabulary has at least {SMALLEST_BPE} entries (256 bytes and {END_OF_TEXT}), "
            f"but {vocab_size} was asked for."
        )
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_without_long_runs(_up_to(texts, max_bytes)), trainer=trainer)
    trained = Tokenizer(core.to_str(), eos_token=END_OF_TEXT)
    mark_tried(trained.json_text)
    return trained


def _without_long_runs(texts: Iterable[str]) -> Iterator[str]:
    """Texts whose words and gaps have at most 4,096 characters: a merge takes the square of a word's length."""
    for text in texts:
        if len(text) <= LONGEST_RUN or _longest_run(text) <= LONGEST_RUN:
            yield text
            continue
        start = 0
        for run in re.finditer(r"\S+|\s+", text):
            for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
                yield text[start:cut]
                start = cut
        yield text[start:]


def _longest_run(text: str) -> int:
    """The length of the longest word or gap, in linear time."""
    gap = max((len(found.group()) for found in re.finditer(r"\s{64,}", text)), default=0)
    return max(gap, max(map(len, text.split()), default=0))


def _up_to(texts: Iterable[str], max_bytes: int | None) -> Iterable[str]:
    used = 0
    for text in texts:
        used += len(text.encode())
        if max_bytes is not None and used > max_bytes:
            return
        yield text


def _parse(json_text: str, name: str) -> tokenizers.Tokenizer:
    try:
        core = tokenizers.Tokenizer.from_str(json_text)
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise DataError(
            f"{name} is not a tokenizer.json of the tokenizers library ({str(error).splitlines()[0]})."
        ) from error
    core.no_truncation()
    core.no_padding()
    if not core.get_vocab(with_added_tokens=True):
        raise DataError(f"{name} holds no vocabulary.")
    return core


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer.json; empty if there is none."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


@contextlib.contextmanager
def _answering(verb: str) -> Iterator[None]:
    """Turn a failure of the library into a message; its panics (a regular expression that gives up) are not Exceptions."""
    try:
        yield
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"The tokenizer cannot {verb} this text ({why}). Use another tokenizer.") from error


def _read_text(file: Path) -> str:
    try:
        if (size := file.stat().st_size) > LARGEST_FILE:
            raise DataError(f"{file} has {size:,} bytes; a tokenizer's file has at most {LARGEST_FILE:,}.")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the tokenizer file {file}: {error}.") from error


def _read_config(folder: Path) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(_read_text(file))
        except (ValueError, RecursionError) as error:
            line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(f"{file}{line}: {json_problem(error)}.") from error
        if not isinstance(content, dict):
            raise DataError(f"{file}: expected a JSON object, found {type(content).__name__}.")
        merged |= content
    return merged


def _known_token(core: tokenizers.Tokenizer, config: dict[str, Any], key: str, name: str) -> str | None:
    token = config.get(key)
    content = token.get("content") if isinstance(token, dict) else token
    if content is None:
        return None
    if not isinstance(content, str) or not _encodable(content):
        raise DataError(f"{name}: {key} in tokenizer_config.json must be a text; found {content!r}.")
    if core.token_to_id(content) is None:
        raise DataError(
            f"{name}: tokenizer_config.json names {content!r} as {key}, which the vocabulary lacks."
        )
    return str(content)


def _end_token(core: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> str:
    declared = _known_token(core, config, "eos_token", name)
    if declared is not None:
        return declared
    known = [token for token in _END_NAMES if core.token_to_id(token) is not None]
    if not known:
        raise DataError(
            f"{name}: no end-of-text token. Put eos_token in the tokenizer_config.json beside it "
            f"(looked for {', '.join(_END_NAMES)})."
        )
    return known[0]


def _encodable(text: str) -> bool:
    return not any(0xD800 <= ord(letter) < 0xE000 for letter in text)


def _default_template(template: Any, folder: str) -> str | None:
    """The template named default, where a tokenizer has a list of them."""
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((e.get("template") for e in template if e.get("name") == "default"), None)
    if template is None:
        return None
    if not isinstance(template, str) or not _encodable(template):
        raise DataError(
            f"{folder}: chat_template must be a text or a list of name and template; found {type(template).__name__}."
        )
    return template
