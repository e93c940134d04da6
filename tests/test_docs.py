"""README, CONTRIBUTING and docs name files that exist, functions that are there, and keep to their line length."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rush.cli import command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
GENERATED = ("recipes.md", "cli.md", "first-hour.md")
HAND_WRITTEN = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs") and page.name not in GENERATED]
QUESTION = re.compile(r"^\| [^|]+\? \| `([\w/.]+)` \| `(\w+)` \|$", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"(?<![\w/.-])(?:rush|tests|scripts|examples)/[\w/.-]*\.\w+", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    for name in re.findall(r"`(rush(?:\.\w+)+)", page.read_text("utf-8")):
        *folders, last = name.split(".")
        place = ROOT.joinpath(*folders)
        known = place / last, place / f"{last}.py", place.with_suffix(".py"), place / "__init__.py"
        assert any(path.exists() for path in known), name


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_each_question_about_the_rooms_is_answered_by_its_file() -> None:
    questions = QUESTION.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(questions) == 12
    for file, name in questions:
        assert re.search(rf"^ *(?:def|class) {name}\b", (ROOT / file).read_text("utf-8"), re.MULTILINE), (
            file,
            name,
        )


def test_every_room_is_in_the_table_of_rooms() -> None:
    table = (ROOT / "docs/architecture.md").read_text("utf-8")
    rooms = [path for path in (ROOT / "rush").iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    assert [room.name for room in rooms if f"| `rush/{room.name}/`" not in table] == []


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=_name)
def test_lines_fit_a_screen(page: Path) -> None:
    limit = 100 if page.name == "README.md" else 120
    assert [line for line in _prose(page) if len(line) > limit] == []


def test_the_readme_is_read_in_a_few_minutes() -> None:
    seen = re.sub(r"<!-- run:.*?-->\n", "", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert len(seen.splitlines()) <= 120


@pytest.mark.parametrize("page", [*HAND_WRITTEN, *sorted(ROOT.glob("docs/finetuning/*.md"))], ids=_name)
def test_every_command_that_a_page_shows_is_understood(page: Path) -> None:
    """Names of commands, options and the number of arguments; nothing is run."""
    for words in commands_of(page):
        group: Any = command()
        names = list(words)
        while hasattr(group, "commands") and (names or not group.invoke_without_command):
            assert names, words
            if names[0] == "--help":
                break
            assert names[0] in group.commands, words
            group = group.commands[names.pop(0)]
        try:
            group.make_context("rush", names)
        except Exception as error:
            told = getattr(error, "format_message", None)
            if told is not None:  # and not an exit, as by --help
                pytest.fail(f"{' '.join(words)}: {told()}")


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of every `rush` command in a block of shell commands, and in the README's table."""
    text = page.read_text("utf-8")
    for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("rush "):
                yield shlex.split(line, comments=True)[1:]
    if page == ROOT / "README.md":
        for row in (line for line in text.splitlines() if line.startswith("|")):
            words = [shlex.split(found) for found in re.findall(r"`rush ([^`]+)`", row)]
            yield from (one for one in words if len(one) > 1)


def _prose(page: Path) -> Iterator[str]:
    """Lines that can be wrapped: no table rows, no pictures, nothing that a script writes."""
    text = re.sub(
        r"<!-- \w+: begin.*?: end -->|<!-- run:.*?-->", "", page.read_text("utf-8"), flags=re.DOTALL
    )
    return (line for line in text.splitlines() if not line.startswith(("|", "![")))
