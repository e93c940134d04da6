"""A race as a page: which recipe reached the same loss sooner, curves over tokens and time, depths, and the breakdown of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rush.files import write_atomic
from rush.records.race import RACE, RaceRecord, RaceRun, read_race
from rush.records.race_curves import RacePoint, leg_time, mean_curve, raced
from rush.report import formatting, headlines
from rush.report.compare import series_of
from rush.report.notebook import figures as notebook_figures
from rush.report.page import flattened, render
from rush.report.panel_svg import pictures
from rush.report.panels import Curve, Curves, Dot
from rush.report.race_words import (
    MEANINGS,
    finding_words,
    gap_words,
    headline,
    more_words,
    quotient_words,
    rate_of,
    verdict_of,
    warnings,
)

TONES = {
    "sooner": ("good", "up"),
    "later": ("caution", "down"),
    "no difference": ("plain", "level"),
    "cannot tell": ("plain", "query"),
    "one seed": ("caution", "query"),
    "no common loss": ("plain", "barred"),
    "first": ("plain", "dot"),
    "ok": ("good", "dot"),
    "reached": ("good", "dot"),
    "running": ("plain", "up"),
    "waiting": ("plain", "clock"),
    "killed": ("caution", "barred"),
    "diverged": ("bad", "unequal"),
    "failed": ("bad", "cross"),
}
FORMULAS = {
    "gross": "Tokens per second of training over the first recipe's, leg by leg; above 1 its steps are faster.",
    "net": "The first recipe's training time to a validation loss over this one's; above 1 it is there sooner.",
    "to the same loss": "Tokens that this recipe needs for the loss, over those of the first: per cent of its steps.",
    "training time": "The sum of the step times. Warm-up steps, at the start of a leg, count with the median of the leg's other steps; what they "
    "took beyond that stands apart. Validations, samples, saves and starting are no training time.",
    "losses of the depths": "The lowest validation loss that all recipes had reached, with the same seed, after a quarter, half, three quarters and all of the tokens; "
    "between two validations by a straight line.",
    "interval": "95 %, over seeds (of gross: over legs): the bootstrap of the mean, widened by Student's distribution for their number.",
}


@dataclass(frozen=True)
class ContenderView:
    """A contender on the page."""

    letter: str
    series: int
    name: str
    recipe: str
    step_sizes: Sequence[int]
    rate: float | None
    curve: Sequence[RacePoint]
    """The means over seeds."""
    seeds: Sequence[Sequence[RacePoint]]
    finding: Mapping[str, Any] | None
    verdict: str
    training_s: float
    warmup_s: float
    around_s: float
    runs: Sequence[RaceRun]

    @property
    def loss(self) -> float | None:
        return self.curve[-1].loss if self.curve else None


def write_race_report(folder: Path, html: Path) -> None:
    """Draw the race recorded in `folder` into one self-contained file."""
    with RACE.using(folder):
        write_atomic(html, race_page(read_race(folder)))


def race_page(record: RaceRecord) -> str:
    views = contenders_of(record)
    return render(
        "race.html",
        title=f"{record['name']} · race",
        record=record,
        headline=headline(record),
        warnings=warnings(record),
        machine=headlines.machine_name(record["machine"]),
        machine_rows=flattened(record["machine"]),
        views=views,
        curves=[
            (name, pictures(panel))
            for name in ("tokens", "time")
            if (panel := loss_panel(views, over_time=name == "time"))
        ],
        gaps=None if (gap := gap_panel(views, record)) is None else pictures(gap),
        tones=TONES,
        meanings={word: MEANINGS[word] for word in MEANINGS if any(view.verdict == word for view in views)},
        formulas=FORMULAS,
        finding_words=finding_words,
        quotient_words=quotient_words,
        more_words=more_words,
        gap_words=gap_words,
    )


def race_html(record: RaceRecord) -> str:
    """A race in a notebook: its findings, and its curves over time."""
    facts = {"race": headline(record)}
    for view in contenders_of(record):
        found = view.finding
        said = f"{formatting.speed(view.rate)}, validation loss " + (
            f"{view.loss:.4f}" if view.loss is not None else formatting.MISSING
        )
        if found:
            said += f", gross {quotient_words(found['gross'])}, net {quotient_words(found['net'])}, {more_words(found['more_tokens'])}"
        facts[f"{view.letter} {view.name}"] = said
    return str(notebook_figures(facts))


def contenders_of(record: RaceRecord) -> list[ContenderView]:
    findings = {one["contender"]: one for one in record["findings"]}
    base = record["findings"][0]["against"] if record["findings"] else None
    views = []
    for place, one in enumerate(record["contenders"]):
        letter = one["letter"]
        own = [run for run in record["runs"] if run["contender"] == letter]
        times = [leg_time(run, leg) for run in own for leg in run["legs"]]
        points = list(raced(record, letter).values())
        finding = findings.get(letter)
        views.append(
            ContenderView(
                letter,
                series_of(place),
                one["name"],
                one["recipe"],
                one.get("step_sizes") or [one["step_tokens"]],
                rate_of(record, letter),
                mean_curve(points),
                points,
                finding,
                verdict_of(finding) if finding else "first" if letter == base else "",
                sum(time.training_s for time in times),
                sum(time.warmup_s for time in times),
                sum(time.around_s or 0.0 for time in times),
                own,
            )
        )
    return views


def loss_panel(views: Sequence[ContenderView], *, over_time: bool) -> Curves | None:
    """The validation losses: the mean over seeds, and faint every seed."""
    longest = max((run[-1].seconds for view in views for run in view.seeds), default=0.0)
    size, unit = next(
        (one for one in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")) if longest >= 2 * one[0]),
        (1.0, "seconds"),
    )

    def dots(points: Sequence[RacePoint]) -> list[Dot]:
        return [Dot(one.seconds / size if over_time else one.tokens, one.loss) for one in points]

    lines = []
    for view in views:
        if view.curve:
            if len(view.seeds) > 1:
                lines += [Curve("", dots(run), view.series, "faint") for run in view.seeds]
            lines.append(Curve(f"{view.letter} {view.name}", dots(view.curve), view.series))
    if not lines:
        return None
    title = f"{unit} of training" if over_time else "tokens"
    return Curves(
        "Validation loss",
        title,
        "validation loss",
        "",
        "",
        lines,
        x_log=False,
        y_log=False,
        y_from_zero=False,
    )


def gap_panel(views: Sequence[ContenderView], record: RaceRecord) -> Curves | None:
    """Every contender's loss less the first one's at the same tokens, the mean over seeds with its range."""
    if not record["findings"]:
        return None
    base = raced(record, record["findings"][0]["against"])
    lines = []
    for view in views:
        own = raced(record, view.letter)
        pairs = [_differences(base[seed], own[seed]) for seed in base if seed in own]
        if not view.finding or not pairs:
            continue
        common = [tokens for tokens in pairs[0] if all(tokens in one for one in pairs)]
        dots = []
        for tokens in common:
            found = [one[tokens] for one in pairs]
            several = len(found) > 1
            dots.append(
                Dot(tokens, fmean(found), min(found) if several else None, max(found) if several else None)
            )
        if dots:
            lines.append(Curve(f"{view.letter} less {record['findings'][0]['against']}", dots, view.series))
    if not lines:
        return None
    ends = (lines[0].dots[0].x, max(line.dots[-1].x for line in lines))
    lines.append(Curve("", [Dot(x, 0.0) for x in ends], 1, "formula"))
    return Curves(
        "Gap at equal tokens", "tokens", "difference of validation loss", "", "", lines,
        x_log=False, y_log=False, y_from_zero=False,
    )  # fmt: skip


def _differences(first: Sequence[RacePoint], other: Sequence[RacePoint]) -> dict[float, float]:
    losses = {one.tokens: one.loss for one in first}
    return {one.tokens: one.loss - losses[one.tokens] for one in other if one.tokens in losses}
