"""Our recipes against their baselines as one SVG file, for a README: the ratio of speeds, its interval, the target.

A bar is our speed over the baseline's, measured in the same command; the line at 1 is the baseline. A mark shows the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rush.report import formatting
from rush.report.ladder_picture import STYLE
from rush.report.svg import Scale, svg_file, tag, text_at, whisker

WIDTH, HEAD, ROW = 960.0, 84.0, 34.0
BAR_X, BAR_END, MEMORY_X, VERDICT_X = 312.0, 630.0, 736.0, 848.0

OWN_STYLE = """
.wanted { stroke-width: 3; } .baseline { stroke: #c4632f; stroke-width: 1.5; stroke-dasharray: 4 3; }
"""


@dataclass(frozen=True)
class BaselinePair:
    """One of our recipes and its baseline."""

    ours: str
    baseline: str
    ratio: float
    low: float
    high: float
    wanted: float
    memory: float | None
    """Our peak over the baseline's."""
    verdict: str
    reached: bool
    """Whether everything that was wanted is."""


def beside_picture(title: str, pairs: Sequence[BaselinePair]) -> str:
    """All pairs, one row each."""
    height = HEAD + ROW * len(pairs) + 20
    scale = Scale(0, max(max(pair.high, pair.wanted) for pair in pairs), BAR_X, BAR_END)
    marks = [
        tag("style", Markup(STYLE + OWN_STYLE)),
        tag("rect", class_="paper", width=WIDTH, height=height, rx=8),
        text_at(20, 34, title, class_="title"),
    ]
    for x, words in (
        (BAR_X, "tokens/s over the baseline's (dashed: as fast as it; thick mark: wanted)"),
        (MEMORY_X, "peak memory"),
        (VERDICT_X, "verdict"),
    ):
        marks.append(text_at(x, HEAD - 16, words, class_="soft"))
    for place, pair in enumerate(pairs):
        marks += _row(pair, HEAD + ROW * place, scale)
    at_one = scale(1.0)
    marks.append(tag("line", class_="baseline", x1=at_one, x2=at_one, y1=HEAD - 8, y2=height - 14))
    pairs_text = "; ".join(f"{pair.ours} {pair.ratio:.2f} times {pair.baseline}" for pair in pairs)
    return svg_file(f"{title}: {pairs_text}.", WIDTH, height, *marks)


def _row(pair: BaselinePair, top: float, scale: Scale) -> list[Markup]:
    middle = top + 12
    low, high, wanted = scale(pair.low), scale(pair.high), scale(pair.wanted)
    return [
        tag("text", pair.ours, x=20, y=top + 11),
        tag("text", f"beside {pair.baseline}", class_="soft", x=20, y=top + 26),
        tag("rect", class_="bar speed", x=BAR_X, y=top + 2, width=scale(pair.ratio) - BAR_X, height=20, rx=2),
        *whisker(low, high, middle, 3),
        tag("line", class_="whisker wanted", x1=wanted, x2=wanted, y1=top - 2, y2=top + 26),
        tag("text", f"{pair.ratio:.2f}×", x=max(high, wanted) + 8, y=top + 17),
        text_at(MEMORY_X, top + 17, formatting.MISSING if pair.memory is None else f"{pair.memory:.2f}×"),
        tag("text", pair.verdict, class_="good" if pair.reached else "caution", x=VERDICT_X, y=top + 17),
    ]
