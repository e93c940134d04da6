"""The ladder as one SVG file, for a README or a slide.

The page's own bars stretch with their column; a standalone picture needs fixed positions and embedded colors for light and dark
mode. It has no script and no font, and loads nothing.
"""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from rush.files import write_atomic
from rush.records.ladder import LADDER
from rush.report import formatting, headlines
from rush.report.bars import top_memory, top_speed
from rush.report.ladder import LadderView, RungView, read_ladder
from rush.report.svg import Scale, shortened, svg_file, tag, text_at, whisker
from rush.report.symbols import SIGNS

WIDTH, HEAD, ROW = 960.0, 84.0, 30.0
SPEED_X, SPEED_END, MEMORY_X, MEMORY_END, VERDICT_X = 216.0, 470.0, 592.0, 676.0, 766.0
MOST_LETTERS = 28

STYLE = """
svg { font: 13px -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.paper { fill: #fcfbf8; } text { fill: #22262b; } .soft { fill: #565e68; font-size: 12px; }
.title { font: 600 19px Charter, "Iowan Old Style", Georgia, serif; } .speed { fill: #2f6db3; } .memory { fill: #b58a3c; }
.tried { opacity: 0.4; } .whisker { stroke: #16191d; stroke-width: 1.5; } .line { stroke: #dedad1; }
.good { fill: #0b6b5d; } .caution { fill: #8a5200; } .bad { fill: #a82c2c; } .plain { fill: #565e68; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14171b; } text { fill: #e6e4de; } .soft { fill: #a5adb8; } .speed { fill: #6ba3e0; } .memory { fill: #c9a25a; }
  .whisker { stroke: #ffffff; } .line { stroke: #343a43; }
  .good { fill: #6fd0bb; } .caution { fill: #edb765; } .bad { fill: #f39a92; } .plain { fill: #a5adb8; }
}
"""


def write_picture(ladder_json: Path, svg: Path) -> None:
    """Draw only the ladder itself (speed, memory, verdicts) into a self-contained SVG file."""
    with LADDER.using(ladder_json):
        write_atomic(svg, ladder_picture(read_ladder(ladder_json)) + "\n")


def ladder_picture(ladder: LadderView) -> str:
    top = top_speed([rung.speed for rung in ladder.rungs])
    memory = top_memory(ladder.rungs)
    height = HEAD + ROW * len(ladder.able) + 16
    title = f"{ladder.name} on {headlines.machine_name(ladder.machine)}"
    marks = [
        tag("style", Markup(STYLE)),
        tag("rect", class_="paper", width=WIDTH, height=height, rx=8),
        text_at(20, 34, shortened(title, 90), class_="title"),
    ]
    for x, word in (
        (SPEED_X, f"{ladder.rate} (× cumulative); pale: tried, not built upon"),
        (MEMORY_X, "peak memory"),
        (VERDICT_X, "verdict"),
    ):
        marks.append(tag("text", word, class_="soft", x=x, y=HEAD - 16))
    for at, rung in enumerate(ladder.able):
        marks += _row(rung, HEAD + ROW * at, top, memory)
    return svg_file(f"Ladder {ladder.name}. {headlines.headline(ladder)}", WIDTH, height, *marks)


def _row(rung: RungView, y: float, top: float | None, memory: float | None) -> list[Markup]:
    base = y + 20
    marks = [
        tag("line", class_="line", x1=20, x2=WIDTH - 20, y1=y, y2=y),
        tag("text", shortened(rung.title, MOST_LETTERS), class_=None if rung.kept else "soft", x=20, y=base),
    ]
    if rung.speed and top is not None:
        marks += _speed(rung, y, top)
    if rung.peak_memory_bytes and memory is not None:
        end = Scale(0, memory, MEMORY_X, MEMORY_END)(rung.peak_memory_bytes)
        kind, width = _pale("memory", rung), end - MEMORY_X
        marks.append(tag("rect", class_=kind, x=MEMORY_X, y=y + 10, width=width, height=10, rx=2))
        marks.append(tag("text", formatting.size(rung.peak_memory_bytes), x=end + 7, y=base))
    verdict = headlines.verdict_of(rung)
    sign = tag("path", d=SIGNS[verdict.sign], fill_rule="evenodd", class_=verdict.tone)
    place = f"translate({VERDICT_X:g} {y + 10:g}) scale(0.85)"
    marks.append(tag("g", sign, transform=place))
    words = shortened(rung.verdict, MOST_LETTERS)
    marks.append(text_at(VERDICT_X + 17, base, words, class_=verdict.tone))
    return marks


def _speed(rung: RungView, y: float, top: float) -> list[Markup]:
    assert rung.speed is not None
    scale = Scale(0, top, SPEED_X, SPEED_END)
    end = scale(rung.speed.median)
    marks = [
        tag("rect", class_=_pale("speed", rung), x=SPEED_X, y=y + 7, width=end - SPEED_X, height=16, rx=2)
    ]
    if rung.speed.low is not None and rung.speed.high is not None:
        low, high = scale(max(0.0, rung.speed.low)), scale(rung.speed.high)
        marks += whisker(low, high, y + 15, 4)
        end = max(end, high)
    words = [formatting.speed(rung.speed.median)]
    if rung.real_total:
        words.append(tag("tspan", formatting.ratio(rung.real_total), class_="soft", dx=6))
    marks.append(text_at(end + 7, y + 20, *words))
    return marks


def _pale(kind: str, rung: RungView) -> str:
    """Rungs that later ones do not build on are drawn pale."""
    return kind if rung.kept else f"{kind} tried"
