"""Read the data: formats, rows, roles, duplicates, broken rows, and lengths in tokens.

Every row is read once. Lengths and targets are measured on a sample of rows spread over the file, encoded as
in the run, plus the longest row, so a large file takes only as long as reading it. A row that is not a
conversation is counted with its reason; a line that is not JSON is counted, too, because a run stops there.
"""

from __future__ import annotations

import glob
import hashlib
import heapq
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rush.data.conversations.encode import encode
from rush.data.conversations.formats import detect, read_fields
from rush.data.conversations.rows import Row
from rush.data.conversations.templates import Template
from rush.data.conversations.turns import BadRow, Conversation, Pair, Sample, Text
from rush.data.readers import BadLine, Slice, parse_line, read_lines, read_rows, read_slice
from rush.data.sources import plan_units
from rush.data.tokenizer import Tokenizer
from rush.errors import DataError

MEASURED_ROWS = 2000
MEASURED_LETTERS = 8_000_000
"""Maximum letters to measure; long rows reduce the sample: a tokenizer takes a second for a few million letters."""
TEXT_FIELDS = ("text", "content", "body", "document", "article", "passage", "code")
"""Fields that hold a plain text, the usual one first."""
TALKS = ("chat", "prompt", "instruction")
UNREADABLE = "not JSON"


@dataclass(frozen=True)
class BrokenRows:
    """Rows that cannot be trained on."""

    count: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    first: str = ""
    """File and line of the first one, and why."""

    @property
    def unreadable(self) -> int:
        """Lines that are not JSON objects: a run stops at them."""
        return self.reasons.get(UNREADABLE, 0)


@dataclass(frozen=True)
class RowFacts:
    """Statistics of the rows."""

    rows: int
    formats: dict[str, int]
    first_of: dict[str, str]
    """The first row of each format: file and line."""
    broken: BrokenRows
    duplicates: int
    roles: dict[str, int]
    turns: int
    """Turns of all conversations."""
    tools: int
    """Conversations with tools."""
    text_field: str
    samples: tuple[tuple[str, Sample], ...]
    """A spread of rows with their names, and the longest."""

    @property
    def good(self) -> int:
        return self.rows - self.broken.count


@dataclass(frozen=True)
class LengthFacts:
    """Tokens of the documents, measured on a spread of them; a pair has two documents."""

    documents: int
    mean: float
    median: int
    p95: int
    p99: int
    longest: int
    target_share: float
    measured: int
    histogram: tuple[tuple[int, int, int], ...]
    """From, below, documents: bins that double."""
    each: tuple[int, ...] = ()
    """Tokens of the measured documents."""
    refused: tuple[str, ...] = ()
    """Measured rows that cannot be encoded, with the reason."""

    @property
    def whole(self) -> bool:
        """Whether every document was measured."""
        return self.measured >= self.documents

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return round(self.mean * self.documents)


def read_data(paths: Sequence[str]) -> RowFacts:
    """Read every row of the files."""
    text_field = _text_field(paths)
    collected = _Collected(text_field)
    for row, problem in _rows(paths):
        collected.add(row, problem)
    return collected.facts()


def _rows(paths: Sequence[str]) -> Iterator[tuple[Row, str | None]]:
    """All rows, named after the files as they were given; of a line that is no JSON object, also what is wrong with it."""
    given = {os.path.abspath(os.path.expanduser(path)): path for path in paths}
    for unit in plan_units("files", [glob.escape(path) for path in paths]):
        for piece in unit.slices:
            for row, problem in _slice_rows(piece):
                name = given.get(piece.path, piece.path) + row.name.removeprefix(piece.path)
                yield Row(name, row.values), problem


def _slice_rows(piece: Slice) -> Iterator[tuple[Row, str | None]]:
    if piece.kind == "text":
        yield from ((Row(one.id, {"text": one.text}), None) for one in read_slice(piece, "text"))
    elif piece.kind in ("jsonl", "packed"):
        for number, line in read_lines(piece):
            try:
                yield Row(*parse_line(line, piece.path, number)), None
            except BadLine as bad:
                yield Row(f"{piece.path}:{number}", {}), bad.problem
    else:
        yield from ((Row(name, values), None) for name, values in read_rows(piece))


def _text_field(paths: Sequence[str]) -> str:
    """The field with the text, where the first row is of no other format."""
    row, problem = next(_rows(paths), (Row("", {}), None))
    if problem is not None:
        return "text"
    known = [name for name in TEXT_FIELDS if isinstance(row.values.get(name), str)]
    return known[0] if known else "text"


class _Collected:
    """Counts rows as they come."""

    def __init__(self, text_field: str) -> None:
        self.text_field = text_field
        self.rows = self.broken = self.duplicates = self.turns = self.tools = 0
        self.reasons: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        self.roles: Counter[str] = Counter()
        self.first_broken = ""
        self.first_of: dict[str, str] = {}
        self.seen: set[bytes] = set()
        self.spread: list[tuple[int, int, str, Sample]] = []
        """The rows with the lowest hashes, as a heap with the highest first."""
        self.longest: tuple[int, str, Sample] | None = None

    def add(self, row: Row, problem: str | None) -> None:
        self.rows += 1
        if problem is not None:
            self._break(row.name, UNREADABLE, problem)
            return
        try:
            paired = row.values.get("chosen") is not None and row.values.get("rejected") is not None
            name = detect(row.values, paired=paired, text_field=self.text_field)
            sample, _ = read_fields(row.values, name, paired=paired, text_field=self.text_field)
        except BadRow as bad:
            self._break(row.name, bad.reason, str(bad))
            return
        self.formats[name] += 1
        self.first_of.setdefault(name, row.name)
        self._count(sample)
        self._keep(row.name, sample)

    def _break(self, name: str, reason: str, why: str) -> None:
        self.broken += 1
        self.reasons[reason] += 1
        self.first_broken = self.first_broken or f"{name}: {why}"

    def _count(self, sample: Sample) -> None:
        if isinstance(sample, Text):
            return
        turns = sample.turns if isinstance(sample, Conversation) else sample.prompt + sample.chosen
        self.turns += len(turns)
        self.roles.update(turn.role for turn in turns)
        self.tools += sample.tools_json is not None

    def _keep(self, name: str, sample: Sample) -> None:
        digest = hashlib.blake2b(repr(sample).encode(errors="replace"), digest_size=8).digest()
        if digest in self.seen:
            self.duplicates += 1
        self.seen.add(digest)
        letters = _letters(sample)
        if self.longest is None or letters > self.longest[0]:
            self.longest = (letters, name, sample)
        entry = (-int.from_bytes(digest, "big"), self.rows, name, sample)
        if len(self.spread) < MEASURED_ROWS:
            heapq.heappush(self.spread, entry)
        elif entry > self.spread[0]:
            heapq.heapreplace(self.spread, entry)

    def facts(self) -> RowFacts:
        ordered = [(name, sample) for _, _, name, sample in sorted(self.spread, key=lambda entry: entry[1])]
        if self.longest is not None and self.longest[1:] not in ordered:
            ordered.append(self.longest[1:])
        broken = BrokenRows(self.broken, dict(self.reasons.most_common()), self.first_broken)
        return RowFacts(
            self.rows, dict(self.formats.most_common()), self.first_of, broken, self.duplicates, dict(self.roles.most_common()),
            self.turns, self.tools, self.text_field, tuple(ordered),
        )  # fmt: skip


def _letters(sample: Sample) -> int:
    if isinstance(sample, Text):
        return len(sample.text)
    turns = (
        sample.turns if isinstance(sample, Conversation) else sample.prompt + sample.chosen + sample.rejected
    )
    return sum(len(turn.content) for turn in turns)


def measure(rows: RowFacts, tokenizer: Tokenizer, template: Template | None) -> LengthFacts:
    """Lengths and targets of the documents; DataError where the template refuses the conversations."""
    lengths: list[int] = []
    refused: list[str] = []
    targets = letters = 0
    chosen = _within(rows.samples)
    for name, sample in chosen:
        try:
            found = [_encoded(one, tokenizer, template) for one in _documents(sample)]
        except BadRow as bad:
            refused.append(f"{name}: {bad}")
            continue
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        letters += _letters(sample)
        lengths += [tokens for tokens, _ in found]
        targets += sum(trained for _, trained in found)
    if not lengths:
        raise DataError(f"The data hold no row to train on. {refused[0] if refused else ''}".rstrip())
    longest = max(lengths)
    if len(chosen) < len(rows.samples):  # the longest row was not encoded: by its letters
        longest = max(
            longest, round(sum(lengths) / max(1, letters) * max(_letters(one) for _, one in rows.samples))
        )
    ordered = sorted(lengths)
    each = 2 if "preference" in rows.formats else 1

    def quantile(share: float) -> int:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    bins = Counter(length.bit_length() for length in lengths)
    return LengthFacts(
        documents=each * rows.good,
        mean=sum(lengths) / len(lengths),
        median=quantile(0.5),
        p95=quantile(0.95),
        p99=quantile(0.99),
        longest=longest,
        target_share=targets / sum(lengths),
        measured=len(lengths),
        each=tuple(lengths),
        refused=tuple(refused),
        histogram=tuple((1 << bits - 1 if bits else 0, 1 << bits, bins[bits]) for bits in sorted(bins)),
    )


def _within(samples: Sequence[tuple[str, Sample]]) -> Sequence[tuple[str, Sample]]:
    """As many of the rows as can be encoded in seconds, spread over them."""
    total = sum(_letters(sample) for _, sample in samples)
    stride = -(-total // MEASURED_LETTERS) or 1
    return samples[::stride]


def _documents(sample: Sample) -> list[tuple[Conversation | Text, int]]:
    """The documents of a row, each with the turns of its prompt."""
    if isinstance(sample, Pair):
        return [(one, len(sample.prompt)) for one in sample.conversations]
    return [(sample, 0)]


def _encoded(
    document: tuple[Conversation | Text, int], tokenizer: Tokenizer, template: Template | None
) -> tuple[int, int]:
    """Tokens and targets."""
    sample, prompt_turns = document
    if template is None:
        assert isinstance(sample, Text)
        tokens = len(tokenizer.encode(sample.text, specials=False)) + 1
        return tokens, tokens
    encoded = encode(sample, tokenizer, template, prompt_turns=prompt_turns)
    return len(encoded), encoded.num_trained
