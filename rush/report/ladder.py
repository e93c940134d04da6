"""A ladder as the pages show it: plain data read from `ladder.json`, None for unknown values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AliasPath,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
)

from rush.records import ladder
from rush.records.gains import Judgement, judge, judged_again
from rush.records.life import life_words
from rush.records.parity import parity_again
from rush.records.race import NetRecord
from rush.report import lenient
from rush.report.lenient import Json, items, shown, table, text, word


def under(*path: str) -> Any:
    """The record's field, if it has another name or is inside a table."""
    return Field(validation_alias=AliasPath(*path))


@dataclass(frozen=True)
class MeasureView:
    """A median with its 95 % interval and the samples behind it."""

    median: lenient.PositiveNumber
    low: lenient.Real = None
    high: lenient.Real = None
    n: lenient.Whole = None
    samples: lenient.Numbers = ()
    processes: lenient.Rows = ()


def careful_ratio(value: MeasureView, base: MeasureView) -> tuple[float, float | None, float | None]:
    """value / base with the widest interval that the two intervals allow."""
    low = value.low / base.high if value.low is not None and base.high else None
    high = value.high / base.low if value.high is not None and base.low else None
    return value.median / base.median, low, high


Measure = lenient.OrNone[lenient.Bounded[MeasureView]]


@dataclass(frozen=True)
class GainView:
    ratio: lenient.PositiveNumber
    low: lenient.Real = None
    high: lenient.Real = None
    over: lenient.Text = None
    real: Annotated[bool | None, PlainValidator(lambda value: value if isinstance(value, bool) else None)] = (
        None
    )
    paired: lenient.Whole = None
    """The number of paired batches; None if medians were compared."""

    @property
    def judged(self) -> Judgement:
        """The verdict of its interval; without an interval it cannot tell."""
        return judge(self.low, self.high) if self.low is not None and self.high is not None else "cannot tell"


@dataclass(frozen=True)
class DisturbedView:
    """A process that another program slowed down: its speed relative to the others, and how often its rung was measured again."""

    ratio: lenient.PositiveNumber
    again: lenient.Whole = None


@dataclass(frozen=True)
class ParityView:
    verdict: lenient.Word
    promise: Annotated[lenient.Text, under("class")] = None
    measured: lenient.Text = None
    """The finest test it passed, whatever was promised; None in older records."""
    gap: lenient.Real = None
    """Difference of the mean loss over the second half of the steps, relative to the decrease of the loss."""
    tolerance: lenient.Real = None
    worst: lenient.Real = None
    steps: lenient.Whole = None
    losses: lenient.Series = ()
    reference_losses: lenient.Series = ()
    grad_norms: lenient.Series = ()
    reference_grad_norms: lenient.Series = ()
    worst_tensor: Annotated[lenient.Text, under("worst_tensor", "name")] = None
    worst_tensor_error: Annotated[lenient.Real, under("worst_tensor", "relative_error")] = None
    why: lenient.Text = None


@dataclass(frozen=True)
class LifeView:
    """Whether a rung could be trained with: `ok`, `broken` or `not known`, and the sentence to it."""

    verdict: lenient.Word
    description: str


def _life(value: Json) -> Json:
    row = table(value)
    return {**row, "description": (text(life_words(row)) or "").rstrip(".")} if row.get("verdict") else value


def net_row(value: Json) -> NetRecord | None:
    """The net of a rung; nothing where it is not what it should be."""
    try:
        return _NET.validate_python(value, strict=True)
    except ValidationError:
        return None


_NET = TypeAdapter(NetRecord)


@dataclass(frozen=True)
class ClaimView:
    metric: lenient.Word
    gain: lenient.Real = None
    regime: lenient.Text = None
    source: lenient.Text = None
    relative_to: lenient.Text = None
    """None in older records."""


@dataclass(frozen=True)
class EvidenceView:
    technique: Annotated[str, word("?")] = "?"
    took_effect: lenient.Flag = False
    what: Annotated[str, word("")] = ""


@dataclass(frozen=True)
class KernelView:
    """A kernel (on a CPU an operator) of a profiled step, all its calls together."""

    name: Annotated[str, word("?")]
    kind: Annotated[str, word("other")]
    ms: lenient.PositiveNumber
    calls: lenient.Real = 0.0


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
    name: lenient.Word
    title: lenient.Word
    status: lenient.Word
    verdict: lenient.Word
    adds: Annotated[tuple[str, ...], PlainValidator(_adds)] = ()
    techniques: Annotated[tuple[str, ...], PlainValidator(lambda value: tuple(map(shown, items(value))))] = ()
    recipe: lenient.Text = None
    digest: lenient.Text = None
    kept: Annotated[bool, PlainValidator(lambda value: value is not False)] = True
    """Whether the rungs above are built on it."""
    reason: lenient.Text = None
    speed: Annotated[Measure, under("tokens_per_s")] = None
    step: Annotated[Measure, under("step_ms")] = None
    kinds: Annotated[lenient.Rates, under("tokens_kind")] = field(default_factory=dict)
    mfu: lenient.Real = None
    hfu: lenient.Real = None
    ceiling_fraction: lenient.Real = None
    flops_per_token: lenient.Positive = None
    bytes_per_step: lenient.Positive = None
    step_tokens: lenient.Whole = None
    micro: lenient.Whole = None
    sequence: lenient.Whole = None
    peak_memory_bytes: lenient.Positive = None
    compile_s: lenient.Real = None
    warmup_s: lenient.Real = None
    warmup_steps: lenient.Whole = None
    data_wait_ms: lenient.Real = None
    evidence: lenient.Each[EvidenceView] = ()
    parity: lenient.OrNone[ParityView] = None
    life: lenient.OrNone[Annotated[LifeView, BeforeValidator(_life)]] = None
    """None where it was not tried, as in records of earlier versions."""
    net: Annotated[Any, PlainValidator(net_row)] = None
    """What a race said; None where there was none."""
    disturbed: lenient.OrNone[DisturbedView] = None
    gain: lenient.OrNone[lenient.Bounded[GainView]] = None
    total_gain: lenient.OrNone[lenient.Bounded[GainView]] = None
    claim: lenient.OrNone[ClaimView] = None
    breakdown: Annotated[lenient.Rates, under("breakdown_ms")] = field(default_factory=dict)
    longest: lenient.Each[KernelView] = ()
    environment: lenient.Table = field(default_factory=dict)

    @property
    def real_total(self) -> float | None:
        """The cumulative gain, or loss, where it is beyond noise."""
        total = self.total_gain
        return total.ratio if total and total.judged in ("faster", "slower") else None

    @property
    def usable(self) -> bool:
        """Whether it is not known to be unusable."""
        return self.life is None or self.life.verdict != "broken"


@dataclass(frozen=True)
class BatchPointView:
    micro: lenient.Count
    status: Annotated[str, word("ok")] = "ok"
    speed: Annotated[Measure, under("tokens_per_s")] = None
    peak_memory_bytes: lenient.Positive = None


@dataclass(frozen=True)
class DriftView:
    first: lenient.Positive = None
    again: lenient.Positive = None
    ratio: lenient.Positive = None
    flagged: lenient.Flag = False
    restless: lenient.Flag = False
    """Its interval is too wide for any conclusion."""
    paired: lenient.Whole = None
    uneven: lenient.Flag = False
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
    alone: lenient.Positive = None
    in_ladder: lenient.Positive = None
    left_out: lenient.Positive = None
    sentence: lenient.Text = None


_DRAWN = ("matmul", "copy_bytes_per_s", "transfers_bytes_per_s")


def _others(ceilings: Json) -> dict[str, Json]:
    return {key: value for key, value in table(ceilings).items() if key not in _DRAWN and value}


def _numbered(rungs: Json) -> list[dict[str, Any]]:
    """The rungs with their index, and with the verdicts by the current rule from the recorded intervals and curves."""
    rows = []
    for index, row in enumerate(map(table, items(rungs)), start=1):
        name = text(row.get("name")) or f"rung {index}"
        parity = parity_again(row.get("parity"))
        verdict = judged_again(text(row.get("verdict")) or "", table(row.get("gain")), parity)
        title = text(row.get("title")) or name
        rows.append(
            {**row, "index": index, "name": name, "title": title, "verdict": verdict, "parity": parity}
        )
    return rows


def _by_size(points: tuple[BatchPointView, ...]) -> tuple[BatchPointView, ...]:
    return tuple(sorted(points, key=lambda point: point.micro))


@dataclass(frozen=True)
class LadderView:
    name: Annotated[str, word("unnamed")]
    view: Annotated[str, word("cumulative")]
    started: lenient.Text
    finished: lenient.Text = None
    trials_s: lenient.Positive = None
    machine: lenient.Table = field(default_factory=dict)
    matmul: Annotated[lenient.Rates, under("ceilings", "matmul")] = field(default_factory=dict)
    copy_bytes_per_s: Annotated[lenient.Positive, under("ceilings", "copy_bytes_per_s")] = None
    transfers: Annotated[lenient.Rates, under("ceilings", "transfers_bytes_per_s")] = field(
        default_factory=dict
    )
    """Measured bytes per second between host and device, by kind."""
    other_ceilings: Annotated[Mapping[str, Json], PlainValidator(_others), under("ceilings")] = field(
        default_factory=dict
    )
    peaks: lenient.Rates = field(default_factory=dict)
    base_recipe: Annotated[lenient.Text, under("base", "recipe")] = None
    formulas: Annotated[
        Mapping[str, str],
        PlainValidator(lambda value: {text(key) or "": shown(part) for key, part in table(value).items()}),
    ] = field(default_factory=dict)
    claim: lenient.OrNone[ClaimView] = None
    """The gain of the whole ladder over its first rung."""
    rungs: Annotated[tuple[RungView, ...], BeforeValidator(_numbered)] = ()
    drift: lenient.OrNone[lenient.NonEmpty[DriftView]] = None
    batch_curve: Annotated[lenient.Each[BatchPointView], AfterValidator(_by_size)] = ()
    batch_stops_paying_at: lenient.Whole = None
    sequence_limits: lenient.Tables = ()
    interactions: lenient.Each[InteractionView] = ()
    trained: Annotated[bool, PlainValidator(lambda value: value == "trained"), under("counted")] = False
    """Whether speeds count the tokens learned from, as in fine-tuning, instead of all."""

    @property
    def rate(self) -> str:
        """What a speed is."""
        return "trained tokens per second" if self.trained else "tokens per second"

    @property
    def able(self) -> tuple[RungView, ...]:
        """The rungs that this machine can run."""
        return tuple(rung for rung in self.rungs if rung.verdict != "unsupported")

    @property
    def unable(self) -> tuple[RungView, ...]:
        """The rungs that cannot run here, listed separately with their reasons."""
        return tuple(rung for rung in self.rungs if rung.verdict == "unsupported")

    def rung(self, name: str | None) -> RungView | None:
        return next((rung for rung in self.rungs if rung.name == name), None)


_MEASURE: TypeAdapter[MeasureView | None] = TypeAdapter(Measure)
_PARITY: TypeAdapter[ParityView | None] = TypeAdapter(lenient.OrNone[ParityView])
_LADDER = TypeAdapter(LadderView)
measure, parity = _MEASURE.validate_python, _PARITY.validate_python


def read_ladder(path: Path) -> LadderView:
    """The ladder in a file or in a ladder's folder; a DataError when it is something else."""
    return _LADDER.validate_python(ladder.read_ladder(path))
