"""Results in a notebook: a picture and a few figures, from records only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rush.records.gains import over_original
from rush.records.metrics import MetricsRow
from rush.records.start import StartRecord
from rush.records.step_gap import parity_words
from rush.records.tune import TuneRecord, judged_again, proved
from rush.report import formatting
from rush.report.axes import Frame, x_axis, y_axis
from rush.report.race_words import net_words
from rush.report.svg import Scale, path, svg_file, tag, ticks, widened

FRAME = Frame(720, 300, top=26)
STYLE = """
.loss { fill: none; stroke: #2f6db3; stroke-width: 1.5; } .val { fill: #b4541a; } .grid { stroke: #dedad1; }
.axis { stroke: #8a8f98; } .tick, .axis-title { font: 12px sans-serif; fill: #565e68; }
"""


def run_html(rows: Sequence[MetricsRow], facts: Mapping[str, str]) -> str:
    """The loss curve of a run over its steps, validations as dots, and its figures."""
    return str(loss_picture(rows) + figures(facts))


def loss_picture(rows: Sequence[MetricsRow]) -> Markup:
    """The loss of every step; a dot where there was a validation."""
    if not rows:
        return Markup("")
    low, high = widened(
        [value for row in rows for value in (row["loss"], row.get("val_loss")) if value is not None]
    )
    steps = [row["step"] for row in rows]
    x = Scale(min(steps) - 0.5, max(steps) + 0.5, FRAME.left, FRAME.x_end)
    y = Scale(low, high, FRAME.y_end, FRAME.top)
    marks = [tag("style", Markup(STYLE))]
    marks += y_axis(FRAME, y, ticks(low, high, 5), formatting.tick, "loss (dots: validation)")
    whole = sorted({round(at) for at in ticks(x.low, x.high, 6) if at >= 1})
    marks += x_axis(FRAME, x, whole, lambda value: f"{value:,.0f}", "step")
    marks.append(tag("path", class_="loss", d=path([(x(row["step"]), y(row["loss"])) for row in rows])))
    for row in rows:
        if row.get("val_loss") is not None:
            marks.append(tag("circle", class_="val", cx=x(row["step"]), cy=y(row["val_loss"]), r=3.5))
    alt = f"Loss over {len(rows)} steps, from {rows[0]['loss']:.4f} to {rows[-1]['loss']:.4f}."
    return Markup(svg_file(alt, FRAME.width, FRAME.height, *marks))


def plan_html(record: Mapping[str, Any]) -> str:
    """What fits and how fast, of a plan's record."""
    facts = {
        "fits": "yes" if record["fits"] else "no",
        "tokens/s per device": formatting.si(record["tokens_per_s_per_device"]),
        **{f"memory: {part}": formatting.size(size) for part, size in record["memory_bytes"].items()},
        "expected error": ", ".join(
            f"{what} ±{share:.0%}" for what, share in record["expected_error"].items()
        ),
    }
    return str(figures(facts))


def tune_html(record: TuneRecord) -> str:
    """The winner of a search."""
    winner = judged_again(record)["winner"]
    if winner is None:
        return str(figures({"winner": "none yet"}))
    gain, parity = winner["gain"] if proved(winner) else None, winner["parity"]
    facts = {
        "winner": winner["what"],
        "speed": over_original(gain) or formatting.MISSING,
        "peak memory": formatting.size(winner["peak_memory_bytes"]),
        **({"race": net} if (net := net_words(winner.get("net"))) else {}),
        "parity with plain fp32": parity_words(parity) if parity else "not proved",
    }
    return str(figures(facts))


def start_html(record: StartRecord) -> str:
    """The decisions for a model and data, and the planner's prediction."""
    plan = record["plan"]
    facts = {row["key"]: f"{row['value']} ({row['why']})" for row in record["decisions"]}
    facts["memory"] = f"{formatting.size(plan['memory_bytes'])} of {formatting.size(plan['limit_bytes'])}"
    facts["time"] = f"{plan['hours']:.2g} h, {plan['steps']:,} steps"
    return str(figures(facts))


def figures(facts: Mapping[str, str]) -> Markup:
    """A table of two columns."""
    rows = [
        tag("tr", tag("th", name, style="text-align:left"), tag("td", value)) for name, value in facts.items()
    ]
    return tag("table", *rows)
