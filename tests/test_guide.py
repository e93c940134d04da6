"""The guide "From naive to fast": every figure in it is traced to a record and computed again, and nothing else is a figure."""

from __future__ import annotations

import html
import json
import re
import shlex
import tomllib
from collections import Counter
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rush.hardware.catalog import CATALOG
from rush.plan import target_of
from rush.plan.planning import unmet
from rush.recipe_io import load_recipe
from rush.techniques import registry
from scripts.guide import comparisons, notebook, pages
from scripts.guide.book import CLOSE, MARKED, OPEN, WORDS, Trace, plain
from scripts.guide.plans import RECORD, planned
from tests.test_docs import commands_of

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "guide"
Files = dict[str, tuple[str, list[Trace]]]

NAMES = (
    r"Llama[ -]3\.[12][ -]\d+B|Llama 3 8B|GPT-2(?: 124M)?|\b[AH]\d00\b|(?:fp|bf|tf|TF|NF|float)\d+(?!\d)|e4m3|50[, \u202f]?(?:257|304)|"
    r"128[, ]256|\b(?:[bB]atch|[бБ]атч\w*) \d+|(?:sequence|длин\w+) 2048|\b(?:80|24) (?:GB|ГБ)|\b95(?: %|-процент)|\b8-(?:bit|бит)|(?:multiple of|кратно\w*|"
    r"делится на) 64|2 × 4"
)
"""Numbers that are part of a name, not figures: models, devices, formats, vocabularies, batches, sizes of cards."""
NOT_PROSE = r"<!--.*?-->|```.*?```|`[^`]*`|\]\([^)]*\)"
AXES = {"×0.5", "×0,5", "×1", "×2", "×4", "×8", "×16", "11.9", "12.1", "12.3", "11,9", "12,1", "12,3"}
STEPS_AND_BATCHES = {"1", "2", "3", "4", "5", "6", "8", "16", "32"}
SCALES = {
    "": 1.0, "k": 1e3, "тыс.": 1e3, "M": 1e6, "млн": 1e6, "KiB": 2.0**10, "КиБ": 2.0**10, "MiB": 2.0**20, "МиБ": 2.0**20,
    "GiB": 2.0**30, "ГиБ": 2.0**30, "TFLOP/s": 1e12, "Тфлоп/с": 1e12, "PFLOP/s": 1e15, "Пфлоп/с": 1e15, "GB/s": 1e9,
    "ГБ/с": 1e9, "TB/s": 1e12, "ТБ/с": 1e12, "ms": 1.0, "мс": 1.0, "s": 1.0, "с": 1.0, "×": 1.0, "%": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def made() -> Files:
    return pages.traced()


def said(text: str) -> tuple[float, float]:
    """The number that a figure says, and by how much rounding may have moved it."""
    found = re.fullmatch(
        r"([+−±×]?)([\d \u202f]*[.,]?\d+)\s*([^\d]*)", text.replace("\N{NO-BREAK SPACE}", " ")
    )
    assert found, f"{text!r} is no figure"
    number = re.sub(r"[ \u202f]", "", found[2]).replace(",", ".")
    scale = SCALES[found[3].strip()]
    value = float(number) * scale * (-1 if found[1] == "−" else 1)
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) * scale
    if found[1] in "+−±" and found[1]:  # a change: relative to one
        value += 1
    return value, half * 1.001 + 1e-9


@cache
def whole(file: str) -> Any:
    """A record, a list of claims, a technique's claim or a datasheet; read here, not by the script."""
    kind, _, name = file.partition(" ")
    if kind == "technique":
        return asdict(registry()[name].claim)
    if kind == "datasheet":
        return asdict(CATALOG[name])
    text = (ROOT / file).read_text("utf-8")
    return tomllib.loads(text) if file.endswith(".toml") else json.loads(text)


def read(file: str, place: tuple[str | int, ...]) -> Any:
    """What stands at a place of it."""
    tree = whole(file)
    for key in place:
        if isinstance(tree, list) and isinstance(key, str):
            (tree,) = [row for row in tree if row.get("name", row.get("op")) == key]
        else:
            tree = tree[key]
    return tree


def wrong(trace: Trace) -> str:
    """What is wrong with a figure; empty where it says what its record says."""
    if trace.kind == "name":
        sizes = {size for _, _, size in comparisons.KERNELS}
        as_english = trace.text.replace("токенов", "tokens").replace("голов по", "heads of")
        known = trace.text in AXES | STEPS_AND_BATCHES or as_english in sizes
        return "" if known else f"{trace.text!r} is no known name"
    if trace.kind == "quote":
        original = read(trace.file, trace.places[0])
        if isinstance(original, dict):
            return "" if trace.text in (original["source"], original["ru"]) else f"{trace.text!r} is nobody's"
        return (
            "" if trace.text in (original, WORDS.get(original)) else f"{trace.text!r} is not in {trace.file}"
        )
    letters = {chr(ord("a") + at): read(trace.file, place) for at, place in enumerate(trace.places)}
    value = eval(trace.formula, {}, letters)
    shown, half = said(trace.text)
    return (
        "" if abs(shown - value) <= half else f"{trace.text!r} is not {value} ({trace.file} {trace.places})"
    )


def untraced(name: str, text: str) -> list[str]:
    """Digits that are neither a traced figure nor part of a name."""
    if name.endswith(".svg"):
        words = re.findall(r">([^<]*)</(?:text|tspan)>", text) + re.findall(r'aria-label="([^"]*)"', text)
        text = html.unescape("\n".join(words))
    else:
        text = re.sub(NOT_PROSE, "", text, flags=re.DOTALL)
    return re.findall(r".{0,30}\d.{0,30}", re.sub(NAMES, "", MARKED.sub("", text)))


def problems(made: Files) -> list[str]:
    found = []
    for name, (text, traces) in made.items():
        found += [f"{name}: {each!r} has no source" for each in untraced(name, text)]
        for number, shown in MARKED.findall(text):
            fault = wrong(replace(traces[int(number)], text=shown))
            found += [f"{name}: {fault}"] if fault else []
    return found


def test_every_figure_says_what_its_record_says_and_nothing_else_is_a_figure(made: Files) -> None:
    assert problems(made) == []
    assert sum(len(traces) for _, traces in made.values()) > 1000


def test_the_committed_pages_and_pictures_are_what_the_script_writes(made: Files) -> None:
    stale = [name for name, (text, _) in made.items() if (GUIDE / name).read_text("utf-8") != plain(text)]
    assert stale == [], "run: make docs"
    drawn = {str(path.relative_to(GUIDE)) for path in GUIDE.rglob("*.svg")}
    assert drawn == {name for name in made if name.endswith(".svg")}


@pytest.mark.parametrize("language", pages.PAGES)
def test_a_wrong_figure_and_a_typed_one_are_seen(made: Files, language: str) -> None:
    name = pages.PAGES[language]
    text, traces = made[name]
    missed, planted = [], ""
    for one in MARKED.finditer(text):
        if traces[int(one[1])].kind not in ("name", "quote"):
            at = max(place for place, letter in enumerate(one[2]) if letter.isdigit())
            other = one[2][:at] + str((int(one[2][at]) + 3) % 10) + one[2][at + 1 :]
            missed += [] if wrong(replace(traces[int(one[1])], text=other)) else [other]
            planted = planted or text[: one.start(2)] + other + text[one.end(2) :]
    assert missed == []
    assert len(problems({name: (planted, traces)})) == 1
    typed = text.replace("\n\n", "\n\nIt gains 37 %.\n\n", 1)
    assert len(problems({name: (typed, traces)})) == 1


def test_a_record_that_says_something_else_is_seen(made: Files) -> None:
    """The gain of FlashAttention, as if it were that of the rung beside it."""
    text, traces = made["index.md"]
    swapped = [replace(one, places=tuple(tuple("flex_attention" if key == "flash_attention" else key for key in place) for place in one.places)) for one in traces]  # fmt: skip
    assert len(problems({"index.md": (text, swapped)})) > 5


def test_both_languages_share_every_figure_picture_and_command(made: Files) -> None:
    kept = []
    for language, name in pages.PAGES.items():
        text, traces = made[name]
        figures = Counter((one.kind, one.file, one.formula, one.places) for one in traces)
        pictures = re.findall(r"\(pictures/([\w-]+)(?:\.ru)?\.svg\)", text)
        kept.append((figures, pictures, re.findall(r"```sh\n.*?```", text, re.DOTALL)))
        assert sorted(pictures) == sorted(pages.DRAWN), f"{language}: every picture is shown once"
    assert kept[0] == kept[1]
    assert not re.search(
        r"\d\.\d",
        re.sub(f"{NOT_PROSE}|{NAMES}|arXiv:\\S+|MLPerf 1.0", "", plain(made["ru.md"][0]), flags=re.DOTALL),
    )


def test_claims_have_the_same_figures_in_both_languages() -> None:
    def digits(text: str) -> list[str]:
        return sorted(re.findall(r"\d+", re.sub(r"(?<=\d)[.,\u202f ](?=\d)", "", text)))

    assert {
        english: russian for english, russian in WORDS.items() if digits(english) != digits(russian)
    } == {}


def test_the_recorded_plan_is_what_the_planner_says() -> None:
    assert planned() == json.loads((ROOT / RECORD).read_text("utf-8")), "run: make docs"


def test_every_command_of_the_guide_is_understood() -> None:
    from rush.cli import command

    seen = 0
    for words in commands_of(GUIDE / "index.md"):
        group: Any = command()
        names = list(words)
        while hasattr(group, "commands") and (names or not group.invoke_without_command):
            group = group.commands[names.pop(0)]
        group.make_context("rush", names)
        seen += 1
    blocks = [block.replace("\\\n", " ") for block in pages.COMMANDS.values()]
    lines = [shlex.split(line) for block in blocks for line in block.strip().splitlines()]
    assert seen == len(lines)
    for _, verb, *rest in lines:
        if verb in ("train", "plan") and not rest[0].endswith((".toml", "--check")):
            recipe = load_recipe(rest[0], [word for word in rest[1:] if re.match(r"[\w.]+\+?=", word)])
            assert unmet(recipe, target_of("h200-sxm")) == (), rest


def test_the_notebook_holds_what_its_cells_show() -> None:
    committed = json.loads(notebook.NOTEBOOK.read_text("utf-8"))
    assert notebook.executed(committed) == committed, "run: make docs"
    shown = json.dumps([cell.get("outputs") for cell in committed["cells"]])
    assert shown.count("<svg") >= 4


def test_marks_never_reach_a_file(made: Files) -> None:
    assert not any(mark in plain(text) for text, _ in made.values() for mark in (OPEN, CLOSE))
