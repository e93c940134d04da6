"""Every figure of the guide, with the place that it comes from.

A template never holds a measured figure. It asks for one, as in `{{ gain("llama", "flash_attention") }}`, and what it gets is
text between two marks that number a `Trace`: the file, the places in it, and the formula over what stands there. The marks
are removed before a page or a picture is written; a test leaves them in, reads the files itself and recomputes the figures.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rush.hardware.catalog import CATALOG
from rush.report import formatting
from rush.techniques import registry

ROOT = Path(__file__).resolve().parents[2]
WORDS: dict[str, str] = tomllib.loads((Path(__file__).parent / "words.toml").read_text("utf-8"))["ru"]
OPEN, MIDDLE, CLOSE = "\ue000", "\ue001", "\ue002"
MARKED = re.compile(f"{OPEN}(\\d+){MIDDLE}([^{OPEN}{CLOSE}]*){CLOSE}")
UNITS = {
    "PFLOP/s": "Пфлоп/с", "GiB": "ГиБ", "MiB": "МиБ", "KiB": "КиБ", "tok/s": "токенов/с", "ms": "мс", "TFLOP/s": "Тфлоп/с", "TB/s": "ТБ/с",
    "GB/s": "ГБ/с", "s": "с", "kB": "кБ",
}  # fmt: skip
Key = str | int


@dataclass(frozen=True)
class Trace:
    """Where a figure comes from. `formula` is over a, b, c …, the values at `places`; `kind` says how it is written."""

    text: str
    kind: str
    file: str
    formula: str
    places: tuple[tuple[Key, ...], ...]


FORMATS: dict[str, Callable[[float], str]] = {
    "change": formatting.change,
    "ratio": formatting.ratio,
    "times": lambda value: f"{value:g}×",
    "number": formatting.digits,
    "loss": lambda value: f"{value:.3f}",
    "whole": lambda value: formatting.count(round(value)) if value >= 10_000 else str(round(value)),
    "share": formatting.share,
    "percent": lambda value: f"{100 * value:.0f}{formatting.JOIN}%",
    "size": formatting.size,
    "speed": formatting.si,
    "rate": lambda value: formatting.si(value, "FLOP/s"),
    "bytes/s": lambda value: formatting.si(value, "B/s"),
    "ms": formatting.milliseconds,
    "s": formatting.seconds,
}


@cache
def source(file: str) -> Any:
    """What a trace names: a record, the listed claims, a technique's own claim, or a datasheet."""
    kind, _, name = file.partition(" ")
    if kind == "technique":
        return asdict(registry()[name].claim)
    if kind == "datasheet":
        return asdict(CATALOG[name])
    text = (ROOT / file).read_text("utf-8")
    return tomllib.loads(text) if file.endswith(".toml") else json.loads(text)


def at(tree: Any, place: Sequence[Key]) -> Any:
    """What stands at a place; in a list a word picks the item that has it as `name`, `op` or `contender`."""
    for key in place:
        if isinstance(tree, list) and isinstance(key, str):
            tree = next(row for row in tree if key in (row.get("name"), row.get("op"), row.get("contender")))
        else:
            tree = tree[key]
    return tree


class Book:
    """Figures and words in one language, and the traces of all that was asked for."""

    def __init__(self, language: str) -> None:
        self.language = language
        self.traces: list[Trace] = []

    def say(self, english: str) -> str:
        """A word or sentence that code writes, in the book's language."""
        return english if self.language == "en" else WORDS[english]

    def figure(self, kind: str, file: str, formula: str, *places: Sequence[Key]) -> str:
        """A figure, marked with its trace."""
        tree = source(file)
        names = {chr(ord("a") + index): at(tree, place) for index, place in enumerate(places)}
        value = eval(formula, {"__builtins__": {"sum": sum}}, names)
        return self.mark(self.localized(FORMATS[kind](value)), kind, file, formula, places)

    def value(self, file: str, *place: Key) -> Any:
        """What stands there, to draw with."""
        return at(source(file), place)

    def quote(self, text: str, file: str, *place: Key) -> str:
        """Words of a source, with the figures in them."""
        return self.mark(text, "quote", file, "a", (place,))

    def mark(self, text: str, kind: str, file: str, formula: str, places: Sequence[Sequence[Key]]) -> str:
        self.traces.append(Trace(text, kind, file, formula, tuple(map(tuple, places))))
        return f"{OPEN}{len(self.traces) - 1}{MIDDLE}{text}{CLOSE}"

    def localized(self, text: str) -> str:
        """A formatted figure with the decimal sign and the units of the language."""
        if self.language == "en":
            return text
        text = re.sub(r"(?<=\d)\.(?=\d)", ",", text)
        text = re.sub(r"(?<=\d)k\b", f"{formatting.JOIN}тыс.", text)
        text = re.sub(r"(?<=\d)M\b", f"{formatting.JOIN}млн", text)
        for unit, own in UNITS.items():
            text = re.sub(rf"(?<=[\d{formatting.JOIN}]){unit}$", own, text)
        return text


def plain(text: str) -> str:
    """The text without marks."""
    return MARKED.sub(lambda found: found[2], text)
