"""A search as a page: its timeline first, then the winner and why the others lost. From the record only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rush.files import write_atomic
from rush.records.gains import judge
from rush.records.step_gap import gap_in_steps, parity_words
from rush.records.tune import (
    TUNE,
    CandidateName,
    CandidateRow,
    TuneRecord,
    judged_again,
    proved,
    read_tune,
    short_names,
)
from rush.report import formatting, headlines
from rush.report.axes import NARROW, WIDE, Frame, x_axis, y_axis
from rush.report.headlines import HeadlineFigure
from rush.report.page import flattened, render
from rush.report.race_words import net_words
from rush.report.svg import Scale, path, picture, tag, ticks, tooltip, widened

TONES = {
    "won": ("good", "up", "the best that was proved, or the unchanged recipe"),
    "ahead": ("good", "up", "took the lead when it was tried"),
    "start": ("plain", "dot", "the unchanged recipe"),
    "lost": ("plain", "level", "was tried, and another is better"),
    "different": ("caution", "unequal", "its loss curve is outside the tolerance of plain fp32"),
    "no effect": ("caution", "ring", "part of it left no trace in the profile"),
    "unusable": ("bad", "barred", "cannot validate, sample, save or resume"),
    "failed": ("bad", "cross", "did not run to its end"),
    "pruned": ("plain", "shrink", "not tried: predicted not to fit or not to pay"),
    "refused": ("plain", "barred", "cannot run on this machine or with this recipe"),
    "not tried": ("plain", "clock", "there was no time left for it"),
}
"""Tone, sign and meaning of every state."""
SAME_MEMORY = 0.01
LETTER = 6.5
"""About how wide a letter of a note is."""
KINDS = {
    "reference": "plain fp32, traced",
    "rank": "short trial",
    "confirm": "short trial, again",
    "decide": "longer trial",
    "prove": "proof",
    "length": "length",
    "life": "short life",
}


def write_tune_report(record: Path, html: Path) -> None:
    """Draw the search recorded in `record` into one self-contained file."""
    with TUNE.using(record):
        write_atomic(html, tune_page(read_tune(record)))


def tune_page(record: TuneRecord) -> str:
    record = judged_again(record)
    rows = record["candidates"]
    return render(
        "tune.html",
        title=f"{record['name']} · tune",
        record=record,
        machine=headlines.machine_name(record["machine"]),
        machine_rows=flattened(record["machine"]),
        headline=headline(record),
        figures=_figures(record),
        lines=(time_line(WIDE, record), time_line(NARROW, record)),
        tried=[row for row in rows if row["round"] > 0],
        others=[row for row in rows if row["round"] == 0 and row["state"] != "refused"],
        refused=[row for row in rows if row["state"] == "refused"],
        recipe=next((row["recipe"] for row in rows if row["key"] == (record["winner"] or {}).get("key")), ""),
        names=short_names(rows),
        tones=TONES,
        beside_words=beside_words,
        parity_words=parity_words,
        used=[state for state in TONES if any(row["state"] == state for row in rows)],
    )


def headline(record: TuneRecord) -> str:
    """The gain, if it is proved by the current rule."""
    winner = record["winner"]
    if winner is None:
        return "The search is not over."
    proof = proof_words(winner)
    if winner["as_it_stood"]:
        return "Nothing that was tried is better and proved; the recipe stays as it was."
    if not proved(winner):
        return f"No gain is proved. Of the recipe that the search ended with: {proof}."
    if "sequence" in winner:
        return f"Sequences of {formatting.count(winner['sequence'])} tokens fit; {proof}."
    if record["objective"] == "memory":
        return f"{memory_words(winner['memory_ratio'])}; {proof}."
    net = net_words(winner.get("net"))
    return f"{gain_words(winner['gain'])}; {proof}." + (f" {net}" if net else "")


def proof_words(winner: Mapping[str, Any]) -> str:
    """Whether the winner was proved to learn the same, and to live."""
    parity, life = winner.get("parity"), winner.get("life")
    found = parity["verdict"] if parity else None
    if parity and parity.get("class") == "CHANGES":
        found = "changes"
    gap = gap_in_steps(parity)
    proof = {
        "equal": "learns the same as plain fp32" + (f" ({gap} for the same loss)" if gap else ""),
        "changes": "what it learns differs by design",
        "different": "does not learn the same as plain fp32",
        None: "not compared with plain fp32",
    }.get(found, "whether it learns the same as plain fp32 is not judged")
    return f"{proof}; short life {life['verdict']}" if life else proof


def memory_words(ratio: float) -> str:
    """The peak memory over that of the unchanged recipe; less than a per cent is nothing."""
    if ratio < 1 - SAME_MEMORY:
        return f"{formatting.change(ratio)} peak memory"
    return f"No less peak memory than the unchanged recipe ({formatting.change(ratio)})"


def gain_words(gain: Mapping[str, Any] | None) -> str:
    """The gain over the unchanged recipe, and what its interval says."""
    if not gain:
        return "Its gain over the unchanged recipe was not measured"
    ratio = formatting.ratio_between(gain["ratio"], gain["ci95"])
    match judge(*gain["ci95"]):
        case "faster":
            return f"{ratio} the speed of the unchanged recipe"
        case "slower":
            return f"Slower than the unchanged recipe: {ratio} its speed"
        case "no gain":
            return f"No faster than the unchanged recipe: {ratio} its speed"
        case _:
            return f"Whether it is faster than the unchanged recipe cannot be told: {ratio} its speed"


def beside_words(gain: Mapping[str, Any] | None) -> str:
    """The winner over a hand-tuned recipe; a note if it is not faster."""
    if not gain:
        return formatting.MISSING
    said = {"no gain": ", no difference", "cannot tell": ", cannot tell"}.get(judge(*gain["ci95"]), "")
    return formatting.ratio_between(gain["ratio"], gain["ci95"]) + said


def _figures(record: TuneRecord) -> list[HeadlineFigure]:
    rows, winner = record["candidates"], record["winner"]
    found = []
    if winner is not None:
        unproved = "" if winner["as_it_stood"] or proved(winner) else ", which is not proved"
        who = "of the unchanged recipe" if winner["as_it_stood"] else f"of the winner{unproved}"
        found.append(HeadlineFigure(formatting.speed(winner["tokens_per_s"]), who))
        found.append(HeadlineFigure(formatting.size(winner["peak_memory_bytes"]), "its peak memory"))
    if winner is not None and "cost_per_million_tokens" in winner:
        found.append(
            HeadlineFigure(formatting.digits(winner["cost_per_million_tokens"]), "cost per million tokens")
        )
    tried = sum(event["kind"] != "reference" for event in record["events"])
    spent = f"{formatting.seconds(record['spent_s'])} of {formatting.seconds(record['budget_s'])}"
    found.append(HeadlineFigure(str(tried), "trials", spent))
    pruned = sum(row["state"] == "pruned" for row in rows)
    found.append(HeadlineFigure(str(pruned), "changes pruned by prediction"))
    return found


def time_line(frame: Frame, record: TuneRecord) -> Markup | None:
    """Every trial as long as it took, as high as it came; the lead as a line over them."""
    memory = record["objective"] == "memory"
    by_key = {row["key"]: row for row in record["candidates"]}
    timed = [(event, by_key.get(event["candidate"])) for event in record["events"]]
    values = [value for _, row in timed if (value := _value(row, memory)) is not None]
    if not values:
        return None
    end = max(record["budget_s"], record["spent_s"], *(e["began_s"] + e["wall_s"] for e, _ in timed))
    low, high = widened([0.0, *values])
    x = Scale(0, end, frame.left, frame.x_end)
    y = Scale(max(0.0, low), high, frame.y_end, frame.top + 12)
    say = formatting.size if memory else formatting.speed
    marks = y_axis(frame, y, ticks(0, high, 5), formatting.size if memory else formatting.tick,
                   "peak memory" if memory else "tokens per second")  # fmt: skip
    marks += x_axis(frame, x, ticks(0, end, 8), lambda at: f"{at:.0f}", "seconds of the search")
    budget = x(record["budget_s"])
    marks.append(tag("line", class_="stop", x1=budget, x2=budget, y1=frame.top, y2=frame.y_end))
    marks += _lead(timed, x, y, memory)
    names = short_names(record["candidates"])
    for event, row in timed:
        marks.append(_trial(event, row, x, y, say, memory))
        marks += _named(event, row, names, x, y, memory)
    marks += _pruned(record["candidates"], x, frame)
    alt = f"Time line of the search: {len(timed)} trials over {formatting.seconds(record['spent_s'])}. {headline(record)}"
    return picture(alt, *marks, class_="curve-picture", viewBox=frame.view_box)


def _value(row: CandidateRow | None, memory: bool) -> float | None:
    if row is None or row["tokens_per_s"] is None:
        return None
    return float(row["peak_memory_bytes"] or 0) if memory else row["tokens_per_s"]["median"]


def _trial(
    event: dict[str, Any], row: CandidateRow | None, x: Scale, y: Scale, say: Any, memory: bool
) -> Markup:
    begin, end = x(event["began_s"]), x(event["began_s"] + event["wall_s"])
    value = _value(row, memory)
    state = row["state"] if row is not None else "start"
    kind = KINDS[event["kind"]]
    description = f"{event['candidate']} ({kind}): " + (say(value) if value is not None else event["status"])
    description += f"; {row['reason']}" if row is not None and row["reason"] else ""
    tone = TONES[state][0] if value is not None or event["kind"] == "reference" else "bad"
    height = y(value) if value is not None else y.start - 8
    thin = 9.0 if event["kind"] in ("rank", "confirm", "length") else 5.0
    return tag("rect", tooltip(description), class_=f"trial {tone}", x=begin, y=height - thin / 2,
               width=max(2.0, end - begin - 1), height=thin, rx=2)  # fmt: skip


def _named(
    event: dict[str, Any],
    row: CandidateRow | None,
    names: dict[str, CandidateName],
    x: Scale,
    y: Scale,
    memory: bool,
) -> list[Markup]:
    """The name of a short trial below its bar, where it is no wider than that."""
    named = names.get(event["candidate"])
    name = named.short if named else event["candidate"]
    value = y.start if row is None else _value(row, memory)
    begin, end = x(event["began_s"]), x(event["began_s"] + event["wall_s"])
    if event["kind"] not in ("rank", "reference") or value is None or end - begin < LETTER * len(name):
        return []
    place = y(value) + 18 if row is not None else y.start - 16
    return [tag("text", name, class_="note", x=(begin + end) / 2, y=place, text_anchor="middle")]


def _pruned(rows: Sequence[CandidateRow], x: Scale, frame: Frame) -> list[Markup]:
    """Pruned candidates, as rings at the time they were considered."""
    marks: list[Markup] = []
    heights: dict[int, int] = {}
    for row in rows:
        if row["state"] == "pruned":
            at = x(row["at_s"]) + 5
            place = round(at / 10)
            heights[place] = heights.get(place, 0) + 1
            description = tooltip(f"{row['key']}: {row['reason']}")
            height = frame.y_end - 10 * heights[place]
            marks.append(tag("circle", description, class_="claimed", cx=at, cy=height, r=3.5))
    return marks


def _lead(
    timed: Sequence[tuple[dict[str, Any], CandidateRow | None]], x: Scale, y: Scale, memory: bool
) -> list[Markup]:
    """The lead as it moved: a line in steps."""
    points: list[tuple[float, float]] = []
    for event, row in timed:
        value = _value(row, memory)
        if (
            row is None
            or value is None
            or event["kind"] != "rank"
            or row["state"] not in ("start", "ahead", "won")
        ):
            continue
        at = x(event["began_s"] + event["wall_s"])
        points += [(at, points[-1][1]), (at, y(value))] if points else [(at, y(value))]
    if not points:
        return []
    points.append((x(max(event["began_s"] + event["wall_s"] for event, _ in timed)), points[-1][1]))
    return [tag("path", tooltip("the lead"), class_="curve speed", d=path(points))]
