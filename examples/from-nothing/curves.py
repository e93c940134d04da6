"""The curves of the story: losses of pretraining with its two kills, of SFT and of DPO, as SVG files that stand alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup
from records import Records

from rush.report.axes import Frame, x_axis, y_axis
from rush.report.svg import Scale, path, picture, tag, ticks, widened

FRAME = Frame(1040, 380, left=64, right=20, top=34, bottom=44)
STYLE = """
svg { font: 13px -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.paper { fill: #fcfbf8; } text { fill: #22262b; } .tick, .axis-title, .note { fill: #565e68; font-size: 12px; }
.grid { stroke: #dedad1; } .axis { stroke: #565e68; } path { fill: none; stroke-width: 1.6; }
.train { stroke: #9bbbe0; } .held { stroke: #2f6db3; stroke-width: 2.2; } .kill { stroke: #a82c2c; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14171b; } text { fill: #e6e4de; } .tick, .axis-title, .note { fill: #a5adb8; } .grid { stroke: #343a43; }
  .train { stroke: #3f618a; } .held { stroke: #6ba3e0; } .kill { stroke: #f39a92; }
}
"""


def pretraining_curve(records: Records) -> str:
    rows = records.rows("pretrain/metrics.jsonl")
    marks = _losses(
        FRAME, rows, "tokens", lambda value: f"{value / 1e6:g}M", "tokens trained on", log_x=False
    )
    tokens = {row["step"]: row["tokens"] for row in rows}
    x = _x_scale(FRAME, rows, "tokens")
    for number, lost in enumerate(records.kills(), 1):
        if lost:
            at = x(tokens[lost[-1]["step"]])
            marks.append(tag("line", class_="kill", x1=at, x2=at, y1=FRAME.top, y2=FRAME.y_end))
            marks.append(tag("text", f"SIGKILL {number}", class_="note", x=at + 5, y=FRAME.top + 12))
    return _drawn(FRAME, f"Loss of pretraining over {rows[-1]['tokens']:,} tokens, with two kills.", marks)


def finetuning_curves(records: Records) -> str:
    height = FRAME.height
    sft = _losses(FRAME, records.rows("sft/metrics.jsonl"), "step", lambda value: f"{value:g}", "step of SFT")
    dpo = _losses(FRAME, records.rows("dpo/metrics.jsonl"), "step", lambda value: f"{value:g}", "step of DPO")
    lower = tag("g", *dpo, transform=f"translate(0 {height:g})")
    whole = Frame(FRAME.width, 2 * height)
    return _drawn(whole, "Losses of SFT (above) and of DPO (below).", [*sft, lower])


def _x_scale(frame: Frame, rows: Sequence[dict[str, Any]], key: str) -> Scale:
    return Scale(0, rows[-1][key], frame.left, frame.x_end)


def _losses(
    frame: Frame,
    rows: Sequence[dict[str, Any]],
    key: str,
    label: Callable[[float], str],
    title: str,
    log_x: bool = False,
) -> list[Markup]:
    """The training loss of every step, and the held-out loss over it."""
    drawn = rows[max(1, len(rows) // 50) :] or rows  # the fall of the first steps would flatten the rest
    held = [(row[key], row["val_loss"]) for row in drawn if row.get("val_loss") is not None]
    low, high = widened([row["loss"] for row in drawn] + [loss for _, loss in held])
    x, y = _x_scale(frame, rows, key), Scale(low, high, frame.y_end, frame.top)
    marks = y_axis(
        frame, y, ticks(low, high, 5), lambda value: f"{value:g}", "loss: each step (pale), held out (dark)"
    )
    marks += x_axis(frame, x, ticks(0, rows[-1][key], 8), label, title)
    marks.append(tag("path", class_="train", d=path([(x(row[key]), y(row["loss"])) for row in drawn])))
    if held:
        marks.append(tag("path", class_="held", d=path([(x(at), y(loss)) for at, loss in held])))
    return marks


def _drawn(frame: Frame, alt: str, marks: Sequence[Markup]) -> str:
    paper = tag("rect", class_="paper", width=frame.width, height=frame.height, rx=8)
    return str(
        picture(
            alt, tag("style", Markup(STYLE)), paper, *marks,
            xmlns="http://www.w3.org/2000/svg", viewBox=frame.view_box, width=frame.width, height=frame.height,
        )
    )  # fmt: skip
