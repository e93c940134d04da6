"""All files of the guide, by their name under docs/guide, with the marks of their figures still in them."""

from __future__ import annotations

import tomllib
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from scripts.guide.book import Book, Trace
from scripts.guide.charts import CHARTS
from scripts.guide.comparisons import COMPARISONS, Comparisons
from scripts.guide.queries import Queries
from scripts.guide.schematics import SCHEMATICS
from scripts.guide.tables import TABLES, Tables

HERE = Path(__file__).parent
COMMANDS: dict[str, str] = tomllib.loads((HERE / "commands.toml").read_text("utf-8"))
PAGES = {"en": "index.md", "ru": "ru.md"}
DRAWN = {**SCHEMATICS, **CHARTS}


def picture_name(name: str, language: str) -> str:
    return f"pictures/{name}.svg" if language == "en" else f"pictures/{name}.{language}.svg"


def page(book: Book) -> str:
    """The page in the book's language, every figure marked."""
    ask = Queries(book)
    tables = Tables(book, ask)
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(ask.names())
    environment.globals.update({name: getattr(tables, name) for name in TABLES})
    compared = Comparisons(book)
    environment.globals.update({name: getattr(compared, name) for name in COMPARISONS})
    environment.globals.update(picture=partial(_picture, book), type=_commands)
    return environment.get_template(f"{book.language}.md").render()


def _picture(book: Book, name: str) -> str:
    sheet = DRAWN[name](Book(book.language))
    return f"![{sheet.alt}]({picture_name(name, book.language)})"


def _commands(key: str) -> str:
    return f"```sh\n{COMMANDS[key].strip()}\n```"


def drawn(book: Book, name: str) -> str:
    """A picture, its figures marked."""
    return DRAWN[name](book).svg()


def files() -> dict[str, str]:
    return {name: text for name, (text, _) in traced().items()}


def traced() -> dict[str, tuple[str, list[Trace]]]:
    """Every file with its traces."""
    found: dict[str, tuple[str, list[Trace]]] = {}
    for language, name in PAGES.items():
        book = Book(language)
        found[name] = page(book), book.traces
        for one in DRAWN:
            book = Book(language)
            found[picture_name(one, language)] = drawn(book, one), book.traces
    return found
