"""All panels of a topic in one SVG file, for a README or a slide.

A standalone picture embeds its colors for light and dark mode. It has no script and no font, and loads nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from markupsafe import Markup

from rush.report.panel_svg import draw
from rush.report.panels import Panel
from rush.report.svg import number, shortened, svg_file, tag

STYLE = """
svg { font: 13px -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.paper { fill: #fcfbf8; } text { fill: #22262b; } .tick, .axis-title, .note, .soft { fill: #565e68; font-size: 12px; }
.note { paint-order: stroke; stroke: #fcfbf8; stroke-width: 4px; stroke-linejoin: round; }
.strong { fill: #22262b; font-weight: 600; }
.title { font: 600 19px Charter, "Iowan Old Style", Georgia, serif; } .panel-title { font-weight: 600; font-size: 14px; }
.grid { stroke: #dedad1; } .axis { stroke: #565e68; } .stop { stroke: #565e68; stroke-dasharray: 4 4; }
.whisker { stroke: #16191d; stroke-width: 1.4; fill: none; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; } .formula { stroke-dasharray: 2 4; } .extrapolated { stroke-dasharray: 7 5; }
.cross { stroke: #b3261e; stroke-width: 2.4; fill: none; } .predicted { fill-opacity: .5; stroke-dasharray: 3 3; stroke-width: 1; }
.mark { fill: #16191d; stroke: #fcfbf8; stroke-width: 1.2; }
.dot { stroke: #fcfbf8; stroke-width: 1.2; } .dot.hollow { fill: #fcfbf8; stroke-width: 2; }
COLORS
@media (prefers-color-scheme: dark) {
  .paper { fill: #14171b; } text { fill: #e6e4de; } .tick, .axis-title, .note, .soft { fill: #a5adb8; }
  .note { stroke: #14171b; } .strong { fill: #e6e4de; }
  .grid { stroke: #343a43; } .axis, .stop { stroke: #a5adb8; } .whisker { stroke: #ffffff; }
  .cross { stroke: #ff8a80; } .mark { fill: #ffffff; stroke: #14171b; }
  .dot { stroke: #14171b; } .dot.hollow { fill: #14171b; }
DARK
}
"""
_LIGHT = ("#2f6db3", "#b5533c", "#22776d", "#8c3f78", "#8a6210", "#6a7078")
_DARK = ("#6ba3e0", "#e58d74", "#5cc0b2", "#d38cc2", "#dcb25a", "#9aa1ab")


def standalone(title: str, where: str, panels: Sequence[Panel]) -> str:
    """All panels under one another, as an SVG file that needs nothing else."""
    width, y = 760.0, 74.0
    marks: list[Markup] = []
    for panel in panels:
        drawn = draw(panel, width - 48)
        marks.append(tag("text", panel.title, class_="panel-title", x=24, y=y + 8))
        marks.append(tag("g", *drawn.marks, transform=f"translate(24 {number(y + 22)})"))
        y += drawn.height + 46
        for line in textwrap.wrap(panel.caption, 105):
            marks.append(tag("text", line, class_="soft", x=24, y=y - 14))
            y += 17
    style = STYLE.replace("COLORS", _colors(_LIGHT)).replace("DARK", _colors(_DARK))
    head = [
        tag("style", Markup(style)),
        tag("rect", class_="paper", width=width, height=y, rx=8),
        tag("text", shortened(title, 78), class_="title", x=24, y=34),
        tag("text", shortened(where, 110), class_="soft", x=24, y=54),
    ]
    alt = f"{title}, {where}. " + " ".join(draw(panel, width).alt for panel in panels)
    return svg_file(alt, width, y, *head, *marks)


def _colors(palette: Sequence[str]) -> str:
    rules = []
    for index, color in enumerate(palette, start=1):
        rules.append(f".bar.series-{index}, .dot.series-{index} {{ fill: {color}; }}")
        rules.append(f".curve.series-{index}, .dot.hollow.series-{index} {{ stroke: {color}; }}")
        rules.append(f".dot.hollow.series-{index} {{ fill: none; }}")
        rules.append(f".predicted.series-{index} {{ stroke: {color}; }}")
    return "\n".join(rules)
