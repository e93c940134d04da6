"""What the guide's pictures are drawn with: boxes, arrows, bars and words over `rush.report.svg`, narrow enough for a phone.

A picture is 480 wide and its words are large: in a phone's column they are still read. It has its colors for a light and a
dark page inside, as every picture of the project that stands alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from rush.report.ladder_picture import STYLE
from rush.report.svg import svg_file, tag, text_at
from scripts.guide.book import Book

WIDTH = 480.0
OWN = """
svg { font-size: 15px; } .soft, .small { font-size: 13px; } .head { font-weight: 600; } .mono { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 13px; }
.compute { fill: #2f6db3; } .store { fill: #b58a3c; } .host { fill: #8c3f78; } .idle { fill: #d9d5cb; } .gain { fill: #22776d; } .lost { fill: #b5533c; }
.hollow { fill: none; stroke: #8a9099; stroke-width: 1.4; } .dashed { stroke-dasharray: 5 4; } .faded { opacity: 0.35; }
text.on { fill: #ffffff; } text.onidle { fill: #22262b; } .arrow { stroke: #565e68; stroke-width: 2; fill: none; } .tip { fill: #565e68; } .rule { stroke: #dedad1; }
.s0 { fill: #8c3f78; } .s1 { fill: #2f6db3; } .s2 { fill: #22776d; } .s3 { fill: #b58a3c; } .s4 { fill: #b5533c; } .s5 { fill: #6a7078; } .s6 { fill: #d9d5cb; }
.line1 { stroke: #2f6db3; } .line2 { stroke: #22776d; } .line3 { stroke: #b5533c; } .line { fill: none; stroke-width: 2.5; }
@media (prefers-color-scheme: dark) {
  .compute, .s1 { fill: #3f7cc0; } .store, .s3 { fill: #a37c35; } .host, .s0 { fill: #a4578f; } .idle, .s6 { fill: #3a4049; } .gain, .s2 { fill: #2c8a7e; }
  .lost, .s4 { fill: #b85f48; } .s5 { fill: #7b828c; } .hollow { stroke: #8a9099; } text.onidle { fill: #e6e4de; } .arrow { stroke: #a5adb8; } .tip { fill: #a5adb8; }
  .rule { stroke: #343a43; } .line1 { stroke: #6ba3e0; } .line2 { stroke: #5cc0b2; } .line3 { stroke: #e58d74; }
}
"""


class Sheet:
    """A picture being drawn, in a book's language."""

    def __init__(self, book: Book, alt: str) -> None:
        self.book, self.alt, self.marks = book, book.say(alt), list[Markup]()
        self.bottom = 0.0

    def word(self, x: float, y: float, text: str, class_: str = "", anchor: str | None = None) -> None:
        """A word of ours, in the language; words that are the same in every language go through `raw`."""
        self.raw(x, y, self.book.say(text), class_, anchor)

    def raw(self, x: float, y: float, text: str, class_: str = "", anchor: str | None = None) -> None:
        self.marks.append(text_at(x, y, text, class_=class_ or None, anchor=anchor))
        self.bottom = max(self.bottom, y + 6)

    def box(
        self, x: float, y: float, width: float, height: float, class_: str, text: str = "", on: str = "on"
    ) -> None:
        """A box with a word in its middle; a word that starts with = is the same in every language."""
        rx = 3 if min(width, height) > 8 else 1
        self.marks.append(tag("rect", class_=class_, x=x, y=y, width=width, height=height, rx=rx))
        self.bottom = max(self.bottom, y + height)
        if text:
            said = text[1:] if text.startswith("=") else self.book.say(text)
            self.marks.append(
                text_at(x + width / 2, y + height / 2 + 5, said, class_=on or None, anchor="middle")
            )

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """A straight arrow along an axis."""
        self.marks.append(tag("line", class_="arrow", x1=x1, y1=y1, x2=x2, y2=y2))
        if x1 == x2:
            side = 6 if y2 > y1 else -6
            tip = f"M{x2 - 5:g} {y2 - side:g}L{x2:g} {y2 + side / 3:g}L{x2 + 5:g} {y2 - side:g}Z"
        else:
            side = 6 if x2 > x1 else -6
            tip = f"M{x2 - side:g} {y2 - 5:g}L{x2 + side / 3:g} {y2:g}L{x2 - side:g} {y2 + 5:g}Z"
        self.marks.append(tag("path", class_="tip", d=tip))

    def lane(
        self, y: float, name: str, parts: Sequence[tuple[float, float, str, str]], height: float = 26
    ) -> None:
        """A lane of a time line: its name above it, then parts from a start for a width, with a class and a word."""
        self.word(16, y, name, "small soft")
        self.marks.append(
            tag("line", class_="rule", x1=16, x2=WIDTH - 16, y1=y + 9 + height, y2=y + 9 + height)
        )
        for start, width, class_, text in parts:
            self.box(
                16 + start, y + 8, width, height, class_, text, "onidle" if class_ == "idle" else "on small"
            )

    def rule(self, y: float) -> None:
        self.marks.append(tag("line", class_="rule", x1=16, x2=WIDTH - 16, y1=y, y2=y))

    def svg(self) -> str:
        height = self.bottom + 16
        style = tag("style", Markup(STYLE + OWN))
        paper = tag("rect", class_="paper", width=WIDTH, height=height, rx=8)
        return svg_file(self.alt, WIDTH, height, style, paper, *self.marks) + "\n"
