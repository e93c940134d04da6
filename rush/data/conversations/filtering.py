"""Read and encode one row, keep or drop it by the policies, and count it."""

from __future__ import annotations

from rush.data.conversations.encode import Encoded, controls_in, encode
from rush.data.conversations.formats import detect, read_fields
from rush.data.conversations.preparation import DocumentPreparation
from rush.data.conversations.rows import Row
from rush.data.conversations.store import DocumentWriter
from rush.data.conversations.templates import Template
from rush.data.conversations.turns import BadRow, Pair, Sample, Text, TooLong, Turn
from rush.data.holdout import split_of
from rush.data.tokenizer import Tokenizer
from rush.errors import DataError

LONG_LETTERS = 1_000_000


def read_row(row: Row, preparation: DocumentPreparation) -> tuple[str, Sample, list[str]]:
    """The format of a row, its sample, and the unused fields."""
    paired, field = preparation.paired, preparation.text_field
    name = preparation.format
    if name == "auto":
        name = detect(row.values, paired=paired, text_field=field)
    return name, *read_fields(row.values, name, paired=paired, text_field=field)


def split_of_row(row: Row, sample: Sample | None, preparation: DocumentPreparation) -> str:
    """The split of a row, by its group (its prompt); of a bad row, by its name."""
    return split_of(group_of_row(row, sample), preparation.seed, preparation.validation)


def group_of_row(row: Row, sample: Sample | None) -> str:
    return row.group or (sample.group if sample is not None else row.name)


def write_row(
    row: Row,
    preparation: DocumentPreparation,
    tokenizer: Tokenizer,
    template: Template,
    writers: dict[str, DocumentWriter],
) -> None:
    """Write a row's documents to its split, or count why it was dropped."""
    sample = None
    try:
        name, sample, unused = read_row(row, preparation)
        counts = writers[split_of_row(row, sample, preparation)].counts
        if preparation.too_long != "cut":
            _check_length(sample, tokenizer, preparation.sequence)
        encoded = _encode(sample, tokenizer, template, preparation.train_on)
        kept = _fitting(encoded, preparation)
    except BadRow as bad:
        _refuse(row, bad, preparation)
        counts = writers[split_of_row(row, sample, preparation)].counts
        counts.rows += 1
        counts.drop(bad.reason, row.name)
        return
    except DataError as error:
        raise DataError(f"{row.name}: {error}") from error
    counts.rows += 1
    counts.use(name, unused)
    counts.note_controls(controls_in(_turns(sample), tokenizer))
    if lost := sum(map(len, encoded)) - sum(map(len, kept)):
        counts.shorten(lost, row.name)
    names = (row.name,) if len(kept) == 1 else (f"{row.name} (chosen)", f"{row.name} (rejected)")
    for document, document_name in zip(kept, names, strict=True):
        writers[split_of_row(row, sample, preparation)].append(document, document_name)


def _refuse(row: Row, bad: BadRow, preparation: DocumentPreparation) -> None:
    """Raise if the policy is error; return if it is drop."""
    if isinstance(bad, TooLong):
        policy, key, instead = preparation.too_long, "data.too_long", "raise batch.sequence"
        more = ", or to 'cut'"
    else:
        policy, key, instead, more = preparation.bad_rows, "data.bad_rows", "fix the row", ""
    if policy == "error":
        raise DataError(
            f"{row.name}: {bad}; {instead}, or set {key} to 'drop' to drop and count such rows{more}."
        ) from bad


def _turns(sample: Sample) -> tuple[Turn, ...]:
    if isinstance(sample, Text):
        return ()
    return sample.prompt + sample.chosen + sample.rejected if isinstance(sample, Pair) else sample.turns


def _check_length(sample: Sample, tokenizer: Tokenizer, limit: int) -> None:
    """Refuse a row of megabytes by its length alone: to encode it would take a minute."""
    letters = (
        len(sample.text) if isinstance(sample, Text) else max(len(turn.content) for turn in _turns(sample))
    )
    if letters > LONG_LETTERS and (fewest := tokenizer.fewest_tokens(letters)) > limit:
        raise TooLong("too long", f"more than {fewest:,} tokens, longer than batch.sequence = {limit:,}")


def _encode(sample: Sample, tokenizer: Tokenizer, template: Template, train_on: str) -> list[Encoded]:
    """One document, or the two of a pair."""
    if not isinstance(sample, Pair):
        return [encode(sample, tokenizer, template, train_on)]
    # For a pair only the answers are targets, whatever train_on says.
    pair = [
        encode(conversation, tokenizer, template, prompt_turns=len(sample.prompt))
        for conversation in sample.conversations
    ]
    starts = [document.trained.index(True) for document in pair]
    if starts[0] != starts[1] or pair[0].tokens[: starts[0]] != pair[1].tokens[: starts[1]]:
        raise DataError(
            f"the template ({template.name}) writes the prompt differently before the two answers, so they cannot be "
            "compared. Set data.template to chatml, llama-3 or plain."
        )
    if pair[0].tokens == pair[1].tokens:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same answer")
    return pair


def _fitting(encoded: list[Encoded], preparation: DocumentPreparation) -> list[Encoded]:
    """The documents, truncated to the sequence with too_long = cut; both of a pair or neither."""
    longest, limit = max(map(len, encoded)), preparation.sequence
    if longest <= limit:
        return encoded
    if preparation.too_long != "cut":
        raise TooLong("too long", f"{longest:,} tokens, longer than batch.sequence = {limit:,}")
    kept = [Encoded(document.tokens[:limit], document.trained[:limit]) for document in encoded]
    if not all(any(document.trained) for document in kept):
        raise TooLong("too long: no answer left", f"no token of the answer is within the first {limit:,}")
    if len(kept) == 2 and kept[0].tokens == kept[1].tokens:
        raise TooLong("too long: no difference left", f"the two answers differ only after {limit:,} tokens")
    return kept
