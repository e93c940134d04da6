"""A ladder as the pages show it: plain data read from `ladder.json`, None for what is not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasPath, BeforeValidator, Field, PlainValidator, TypeAdapter

from rush.records import ladder
from rush.records.life import life_words
from rush.report.lenient import (
    Bounded,
    Count,
    Each,
    Flag,
    Json,
    NonEmpty,
    Numbers,
    OrNone,
    Positive,
    PositiveNumber,
    Rates,
    Real,
    Rows,
    Series,
    Table,
    Tables,
    Text,
    Whole,
    Word,
    items,
    shown,
    table,
    text,
    word,
)  # fmt: skip


@dataclass(frozen=True)
class MeasureView:
    """A median with its 95 % interval and the samples behind it."""

    median: PositiveNumber
    low: Real = None
    high: Real = None
    n: Whole = None
    samples: Numbers = ()
    processes: Rows = ()


Measure = OrNone[Bounded[MeasureView]]


@dataclass(frozen=True)
class GainView:
    ratio: PositiveNumber
    low: Real = None
    high: Real = None
    over: Text = None
    real: Annotated[bool | None, PlainValidator(lambda value: value if isinstance(value, bool) else None)] = (
        None
    )
    paired: Whole = None
    """On how many batches the two were compared one by one; None where by their medians."""


@dataclass(frozen=True)
class ParityView:
    verdict: Word
    promise: Annotated[Text, Field(validation_alias="class")] = None
    tolerance: Real = None
    worst: Real = None
    steps: Whole = None
    losses: Series = ()
    reference_losses: Series = ()
    grad_norms: Series = ()
    reference_grad_norms: Series = ()
    worst_tensor: Annotated[Text, Field(validation_alias=AliasPath("worst_tensor", "name"))] = None
    worst_tensor_error: Annotated[
        Real, Field(validation_alias=AliasPath("worst_tensor", "relative_error"))
    ] = None
    why: Text = None


@dataclass(frozen=True)
class LifeView:
    """Whether a rung could be trained with: `ok`, `broken` or `not known`, and the sentence to it."""

    verdict: Word
    description: str


def _life(value: Json) -> Json:
    row = table(value)
    return {**row, "description": (text(life_words(row)) or "").rstrip(".")} if row.get("verdict") else value


@dataclass(frozen=True)
class ClaimView:
    metric: Word
    gain: Real = None
    regime: Text = None
    source: Text = None


@dataclass(frozen=True)
class EvidenceView:
    technique: Annotated[str, word("?")] = "?"
    took_effect: Flag = False
    what: Annotated[str, word("")] = ""


@dataclass(frozen=True)
class KernelView:
    """A kernel (on a CPU an operator) of a profiled step, all its calls together."""

    name: Annotated[str, word("?")]
    kind: Annotated[str, word("other")]
    ms: PositiveNumber
    calls: Real = 0.0


def _technique(item: Json) -> str:
    if not isinstance(item, dict):
        return shown(item)
    knobs = ", ".join(f"{text(key)}={shown(value)}" for key, value in item.items() if key != "name")
    return f"{shown(item.get('name'))}{f' ({knobs})' if knobs else ''}"


def _adds(value: Json) -> tuple[str, ...]:
    """What a rung adds: names, tables of a name with knobs, or a table of overrides."""
    if isinstance(value, dict):
        return tuple(f"{text(key)} = {shown(part)}" for key, part in value.items())
    return tuple(map(_technique, items(value)))


@dataclass(frozen=True)
class RungView:
    index: int
    name: Word
    title: Word
    status: Word
    verdict: Word
    adds: Annotated[tuple[str, ...], PlainValidator(_adds)] = ()
    techniques: Annotated[tuple[str, ...], PlainValidator(_adds)] = ()
    recipe: Text = None
    digest: Text = None
    kept: Annotated[bool, PlainValidator(lambda value: value is not False)] = True
    """Whether the rungs above are built on it."""
    reason: Text = None
    speed: Annotated[Measure, Field(validation_alias="tokens_per_s")] = None
    step: Annotated[Measure, Field(validation_alias="step_ms")] = None
    kinds: Annotated[Rates, Field(validation_alias="tokens_kind")] = field(default_factory=dict)
    mfu: Real = None
    hfu: Real = None
    ceiling_fraction: Real = None
    flops_per_token: Positive = None
    bytes_per_step: Positive = None
    step_tokens: Whole = None
    micro: Whole = None
    sequence: Whole = None
    peak_memory_bytes: Positive = None
    compile_s: Real = None
    warmup_s: Real = None
    warmup_steps: Whole = None
    data_wait_ms: Real = None
    evidence: Each[EvidenceView] = ()
    parity: OrNone[ParityView] = None
    life: OrNone[Annotated[LifeView, BeforeValidator(_life)]] = None
    """None where it was not tried, as in records of earlier versions."""
    gain: OrNone[Bounded[GainView]] = None
    total_gain: OrNone[Bounded[GainView]] = None
    claim: OrNone[ClaimView] = None
    breakdown: Annotated[Rates, Field(validation_alias="breakdown_ms")] = field(default_factory=dict)
    longest: Each[KernelView] = ()
    environment: Table = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether nothing is known to keep it from being trained with."""
        return self.life is None or self.life.verdict != "broken"


@dataclass(frozen=True)
class BatchPointView:
    micro: Count
    status: Annotated[str, word("ok")] = "ok"
    speed: Annotated[Measure, Field(validation_alias="tokens_per_s")] = None
    peak_memory_bytes: Positive = None


@dataclass(frozen=True)
class DriftView:
    first: Positive = None
    again: Positive = None
    ratio: Positive = None
    flagged: Flag = False
    restless: Flag = False
    """Its interval is too wide for any conclusion."""
    paired: Whole = None
    uneven: Flag = False
    """The unequal batches alone may be the reason; they were not compared one by one."""

    @property
    def verdict(self) -> str:
        if self.flagged:
            return "more than its interval allows"
        if self.restless:
            return (
                f"but {'the batches differ too much' if self.uneven else 'the machine was too busy'} to tell"
            )
        return f"within its interval{f', on {self.paired} batches one by one' if self.paired else ''}"


@dataclass(frozen=True)
class InteractionView:
    technique: Annotated[str, word("?")] = "?"
    alone: Positive = None
    in_ladder: Positive = None
    left_out: Positive = None
    sentence: Text = None


_DRAWN = ("matmul", "copy_bytes_per_s", "transfers_bytes_per_s")


def _others(ceilings: Json) -> dict[str, Json]:
    return {key: value for key, value in table(ceilings).items() if key not in _DRAWN and value}


def _numbered(rungs: Json) -> list[dict[str, Any]]:
    rows = []
    for index, row in enumerate(map(table, items(rungs)), start=1):
        name = text(row.get("name")) or f"rung {index}"
        rows.append({**row, "index": index, "name": name, "title": text(row.get("title")) or name})
    return rows


def _by_size(points: tuple[BatchPointView, ...]) -> tuple[BatchPointView, ...]:
    return tuple(sorted(points, key=lambda point: point.micro))


@dataclass(frozen=True)
class LadderView:
    name: Annotated[str, word("unnamed")]
    view: Annotated[str, word("cumulative")]
    started: Text
    finished: Text = None
    machine: Table = field(default_factory=dict)
    matmul: Annotated[Rates, Field(validation_alias=AliasPath("ceilings", "matmul"))] = field(
        default_factory=dict
    )
    copy_bytes_per_s: Annotated[
        Positive, Field(validation_alias=AliasPath("ceilings", "copy_bytes_per_s"))
    ] = None
    transfers: Annotated[Rates, Field(validation_alias=AliasPath("ceilings", "transfers_bytes_per_s"))] = (
        field(default_factory=dict)
    )
    """Measured bytes per second between host and device, by kind."""
    other_ceilings: Annotated[
        Mapping[str, Json], PlainValidator(_others), Field(validation_alias="ceilings")
    ] = field(default_factory=dict)
    peaks: Rates = field(default_factory=dict)
    base_recipe: Annotated[Text, Field(validation_alias=AliasPath("base", "recipe"))] = None
    formulas: Annotated[
        Mapping[str, str],
        PlainValidator(lambda value: {text(key) or "": shown(part) for key, part in table(value).items()}),
    ] = field(default_factory=dict)
    rungs: Annotated[tuple[RungView, ...], BeforeValidator(_numbered)] = ()
    drift: OrNone[NonEmpty[DriftView]] = None
    batch_curve: Annotated[Each[BatchPointView], AfterValidator(_by_size)] = ()
    batch_stops_paying_at: Whole = None
    sequence_limits: Tables = ()
    interactions: Each[InteractionView] = ()
    trained: Annotated[
        bool, PlainValidator(lambda value: value == "trained"), Field(validation_alias="counted")
    ] = False
    """Whether speeds count the tokens learned from, as in fine-tuning, instead of all."""

    @property
    def rate(self) -> str:
        """What a speed is."""
        return "trained tokens per second" if self.trained else "tokens per second"

    def rung(self, name: str | None) -> RungView | None:
        return next((rung for rung in self.rungs if rung.name == name), None)


_MEASURE: TypeAdapter[MeasureView | None] = TypeAdapter(Measure)
_PARITY: TypeAdapter[ParityView | None] = TypeAdapter(OrNone[ParityView])
_LADDER = TypeAdapter(LadderView)
measure, parity = _MEASURE.validate_python, _PARITY.validate_python


def read_ladder(path: Path) -> LadderView:
    """The ladder in a file or in a ladder's folder; a DataError when it is something else."""
    return _LADDER.validate_python(ladder.read_ladder(path))
