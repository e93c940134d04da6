"""The decisions with their reasons: small functions over the findings, each with the published practice it follows.

A `Choice` is a value for a key of the recipe and a one-line reason. Published settings are starting points: `rush overfit`
shows whether a configuration can learn, and the validation loss whether it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rush.errors import DataError, RecipeError
from rush.start.inspect import TALKS, LengthFacts, RowFacts

MOST_BROKEN = 0.01
"""Maximum fraction of broken rows that are dropped; more are refused."""
TOY = 50_000_000
"""Parameters below which published learning rates do not apply: the ready recipes for toy models are the guide."""
CHECKS = 10
SAVE_S = 600.0
ALPACA = "Taori et al. 2023, Alpaca"
QLORA = "Dettmers et al. 2023, arXiv:2305.14314"
ZEPHYR = "Tunstall et al. 2023, arXiv:2310.16944"
DPO = "Rafailov et al. 2023, arXiv:2305.18290"
GPT3 = "Brown et al. 2020, arXiv:2005.14165, table 2.1"
CODE_LLAMA = "Rozière et al. 2023, arXiv:2308.12950"
REPEATED = "Muennighoff et al. 2023, arXiv:2305.16264"
HANDBOOK = "Hugging Face's Alignment Handbook, zephyr-7b-dpo-qlora"
GPT3_RATES = (
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1e-4),
)


@dataclass(frozen=True)
class Choice:
    value: Any
    why: str


def choose_objective(rows: RowFacts) -> Choice:
    """The objective for the formats of the rows; formats of two objectives are refused."""
    talks = sum(count for name, count in rows.formats.items() if name in TALKS)
    pairs, texts = rows.formats.get("preference", 0), rows.formats.get("text", 0)
    if not rows.formats:
        raise DataError(f"None of the {rows.rows:,} rows can be trained on; the first: {rows.broken.first}.")
    if pairs and (talks or texts):
        other = next(name for name in rows.formats if name != "preference")
        raise DataError(
            f"The data mix {pairs:,} preferences (the first: {rows.first_of['preference']}) with {talks + texts:,} rows of another "
            f"kind (the first: {rows.first_of[other]}, {other}). A run has one objective: give the files apart, first those to "
            "learn answers from (sft), then the preferences (dpo) with the trained model."
        )
    if pairs:
        return Choice("dpo", f"all {pairs:,} rows have a chosen and a rejected answer")
    if talks and texts:
        return Choice(
            "sft",
            f"{talks:,} conversations and {texts:,} plain texts: answers are the targets, and every token of a plain text",
        )
    if talks:
        kinds = ", ".join(f"{count:,} {name}" for name, count in rows.formats.items())
        return Choice("sft", f"rows with questions and answers ({kinds})")
    return Choice("lm", f"{texts:,} plain texts")


def choose_bad_rows(rows: RowFacts, refused: Sequence[str], measured: int, objective: str) -> Choice:
    """Drop a few broken rows, refuse many; refuse what a run cannot skip."""
    broken = rows.broken
    if broken.unreadable:
        raise DataError(
            f"{broken.unreadable:,} of {rows.rows:,} lines are no JSON objects, and a run stops at the first; the first broken row: "
            f"{broken.first} Remove these lines."
        )
    share = broken.count / rows.rows + len(refused) / max(1, measured + len(refused))
    first = broken.first or next(iter(refused), "")
    if share > MOST_BROKEN:
        kinds = ", ".join(f"{count:,} {reason}" for reason, count in broken.reasons.items())
        raise DataError(
            f"{share:.1%} of the rows cannot be trained on ({kinds or 'refused by the template'}), more than {MOST_BROKEN:.0%}; the "
            f"first: {first}. Fix or remove them, or set data.bad_rows=drop to train without them."
        )
    if not share:
        return Choice("error", "no row is broken, so a broken one would be an error")
    if objective == "lm":
        raise DataError(
            f"{broken.count:,} of {rows.rows:,} rows hold no text; the first: {broken.first}. Remove them: pretraining reads every row."
        )
    return Choice(
        "drop",
        f"{share:.2%} of the rows are broken, below {MOST_BROKEN:.0%}; the first: {first}",
    )


def choose_sequence(lengths: LengthFacts, objective: str, context: int, gpu: bool) -> Choice:
    """Long enough for the longest document, unless it is an outlier."""
    if objective == "lm":
        usual = 2048 if gpu else 256
        value = min(context, usual)
        while value > 64 and lengths.tokens < 64 * value:
            value //= 2
        return Choice(value, f"windows of one token stream; the model reads up to {context:,}")
    wanted, why = lengths.longest, f"the longest document has {lengths.longest:,} tokens"
    if lengths.longest > 2 * lengths.p99:
        wanted = lengths.p99
        why = f"99 % of the documents have at most {wanted:,} tokens, the longest {lengths.longest:,}"
    if objective == "sft":  # short rows cannot be filled well
        least = min(context, 1024 if gpu else 256)
        if wanted < least:
            wanted, why = least, f"{why}; rows of {least:,} hold several"
    value = min(context, -(-wanted // 64) * 64)
    return Choice(value, why if value >= wanted else f"{why}, but the model's context is {context:,}")


def choose_too_long(lengths: LengthFacts, sequence: int, objective: str) -> Choice:
    if lengths.longest <= sequence and (lengths.whole or 1.5 * lengths.longest <= sequence):
        return Choice("error", "no document is longer than the sequence")
    if objective == "dpo":
        return Choice("drop", "a pair with a shortened answer would compare something else")
    if lengths.longest <= sequence:
        return Choice(
            "cut",
            f"of {lengths.documents:,} documents {lengths.measured:,} were measured; a longer one loses its end",
        )
    return Choice("cut", f"documents of up to {lengths.longest:,} tokens lose what is beyond {sequence:,}")


def choose_learning_rate(objective: str, method: str, parameters: int, pretrained: bool) -> Choice:
    """By published practice for this objective, method and size."""
    if parameters < TOY:
        value = {"lm": 2e-3, "sft": 4e-3, "dpo": 1e-3}[objective]
        value = 4e-3 if method != "full" and objective != "dpo" else value
        return Choice(value, "as in the ready recipes for toy models (recipes/*-tiny.toml)")
    if not pretrained:
        rate = min(GPT3_RATES, key=lambda row: abs(row[0] - parameters))[1]
        return Choice(rate, f"from random weights, a model of this size ({GPT3})")
    if objective == "dpo":
        if method == "full":
            return Choice(5e-7, f"full DPO ({ZEPHYR}; {DPO} used 1e-6)")
        return Choice(5e-6, f"DPO with adapters ({HANDBOOK})")
    if method != "full":
        small = parameters <= 13.5e9
        return Choice(
            2e-4 if small else 1e-4, f"adapters, {'up to 13B' if small else '33B and more'} ({QLORA})"
        )
    if objective == "lm":
        return Choice(2e-5, f"further training of a finished model ({CODE_LLAMA}, long-context stage)")
    large = parameters > 10e9
    return Choice(1e-5 if large else 2e-5, f"full fine-tuning, as of {'13B' if large else '7B'} ({ALPACA})")


def choose_epochs(objective: str, documents: int, pretrained: bool) -> Choice:
    """Passes over the data."""
    if objective == "lm":
        if pretrained:
            return Choice(
                1.0,
                "new text for a finished model; up to four passes are nearly as good as new text "
                f"({REPEATED})",
            )
        return Choice(4.0, f"up to four passes are nearly as good as new text ({REPEATED})")
    if objective == "dpo":
        return Choice(1.0 if documents > 20_000 else 3.0, f"preferences: one to three passes ({ZEPHYR})")
    if documents > 100_000:
        return Choice(1.0, f"{documents:,} conversations: one pass ({ZEPHYR})")
    return Choice(3.0, f"three passes ({ALPACA})")


def choose_step_documents(objective: str, method: str, documents: int, epochs: float) -> Choice:
    """Documents (or pairs) per step: published batches, smaller where the data would give too few steps."""
    usual, source = {"dpo": (64, DPO)}.get(objective, (128, ALPACA) if method == "full" else (16, QLORA))
    least_steps = 50
    most = max(1, int(documents * epochs / least_steps))
    if usual <= most:
        return Choice(usual, f"{usual} {'pairs' if objective == 'dpo' else 'documents'} a step ({source})")
    return Choice(
        most, f"{source} takes {usual} a step; so few documents leave {most}, for some {least_steps} steps"
    )


def choose_step_tokens(tokens: int, epochs: float, pretrained: bool) -> Choice:
    """Tokens per step of a corpus."""
    usual = 131_072 if pretrained else 524_288
    most = max(1, int(tokens * epochs / 100))
    if usual <= most:
        return Choice(
            usual,
            "half a million tokens a step (" + GPT3 + ")" if not pretrained else "a quarter of pretraining's",
        )
    return Choice(most, f"{usual:,} would leave too few steps of {tokens:,} tokens; for some 100 steps")


def choose_validation(documents: int, tokens: int, sequence: int, objective: str) -> Choice:
    """Enough documents to see a difference, and few enough to spare."""
    if objective == "lm":
        wanted = 8 * sequence / max(1, tokens)
        why = "at least eight windows"
    else:
        wanted = 200 / max(1, documents)
        why = "some 200 documents where there are enough"
    share = round(min(0.1 if objective != "lm" else 0.2, max(0.01, wanted)), 3)
    return Choice(share, f"{share:.1%} held out: {why}, 1 % to {'20' if objective == 'lm' else '10'} %")


def within_hours(
    epochs: float, epoch_s: float, before_s: float, hours: float | None, error: float
) -> Choice | None:
    """Fewer epochs if the planned time, with its expected error, exceeds the available hours."""
    if hours is None or (epochs * epoch_s + before_s) * (1 + error) <= hours * 3600:
        return None
    fitting = (hours * 3600 / (1 + error) - before_s) / epoch_s
    if fitting <= 0:
        raise RecipeError(
            f"--hours is {hours:g}, less than what comes before the first step ({before_s / 3600:.2g} h by plan): give more."
        )
    digits = 1 - math.floor(math.log10(fitting))
    return Choice(
        math.floor(fitting * 10**digits) / 10**digits,
        f"what fits {hours:g} h with the planner's expected error of {error:.0%}; {epochs:g} would take "
        f"{(epochs * epoch_s + before_s) / 3600:.2g} h",
    )


def choose_intervals(steps: int, step_s: float) -> dict[str, Choice]:
    """Ten validations and samples in a run; checkpoints, which take longer, at most every ten minutes by plan."""
    every = max(1, steps // CHECKS)
    rare = max(every, math.ceil(SAVE_S / step_s))
    saves = (
        Choice(rare, f"every {rare * step_s / 60:.0f} min by plan")
        if rare < steps
        else Choice(0, "at the end: a short run")
    )
    return {
        "run.validate_every": Choice(every, f"{CHECKS} times in some {steps:,} steps"),
        "run.sample_every": Choice(every, "with the validations"),
        "run.save_every": saves,
    }


def power_of_two(value: float) -> int:
    """The nearest power of two, at least 1."""
    found = 1
    while found * 1.5 <= value:
        found *= 2
    return found
