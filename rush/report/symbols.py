"""The signs of the verdicts: shapes that distinguish them without color, and in any font."""

from __future__ import annotations

SIGNS = {
    "dot": "M6 3.5a2.5 2.5 0 1 0 .01 0z",
    "up": "M6 1.5L11 10H1z",
    "down": "M6 10.5L1 2h10z",
    "level": "M1 4.5h10v3H1z",
    "shrink": "M1 1l4 1v3H2zM11 11l-4-1V7h3zM11 1l-1 4H7V2zM1 11l1-4h3v3z",
    "unequal": "M1 3h5.6L7.8.8l1.4.8L8.4 3H11v2H7.3L6.2 7H11v2H5.1l-1.2 2.2-1.4-.8.8-1.4H1V7h3.4l1.1-2H1z",
    "ring": "M6 1a5 5 0 1 0 .01 0zM6 3a3 3 0 1 1-.01 0z",
    "query": "M2 4.2a4 4 0 1 1 5.2 3.6V8.8H4.8V6a.9.9 0 0 1 .6-.8A1.7 1.7 0 1 0 4.3 4.2zM4.8 9.9h2.4V12H4.8z",
    "barred": "M6 .8A5.2 5.2 0 1 0 6.01.8zM2.5 5h7v2h-7z",
    "cross": "M2.4 1L6 4.6 9.6 1 11 2.4 7.4 6 11 9.6 9.6 11 6 7.4 2.4 11 1 9.6 4.6 6 1 2.4z",
    "clock": "M6 .8A5.2 5.2 0 1 0 6.01.8zM5.2 3h1.6v2.7l2 1.6-1 1.2-2.6-2.1z",
}
"""Drawn in a square of twelve, holes by the even-odd rule."""
