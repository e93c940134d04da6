"""The pages in a real Chromium: no complaint, nothing sideways on a phone, contrast, dark mode, print, attacks."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rush.explain.page import write
from rush.explain.records import explain
from rush.records.explain import ExplainRecord
from tests.explain import made_up
from tests.report.browser import Browser, Page
from tests.report.made_up import HOSTILE
from tests.report.test_report_browser import CONTRAST, OVERFLOWING


def _made_up(name: str) -> ExplainRecord:
    return made_up.record(name, made_up.EVERY[name]())


RECORDS: dict[str, Callable[[], ExplainRecord]] = {
    **{name: partial(_made_up, name) for name in made_up.EVERY},
    "attention-oom": lambda: made_up.record("attention", made_up.attention(oom=True), device="cuda"),
    "cpu-gpu-none": lambda: made_up.record("cpu-gpu", made_up.cpu_gpu(kind="cpu", compiler=False)),
    "links-gpus": lambda: made_up.record("links", made_up.links(kind="cuda", gpus=4), device="cuda"),
    "flash-attention-cpu": lambda: made_up.record("flash-attention", made_up.flash_attention(kind="cpu")),
    "memory-gpu": lambda: made_up.record("memory", made_up.memory(kind="cuda"), device="cuda"),
    "fusion-none": lambda: made_up.record("fusion", made_up.fusion(compiled=False), load=2.0),
    "precision-none": lambda: made_up.record("precision", made_up.precision(half_gain=None)),
}
"""Made when they are drawn: their intervals take long, and every worker reads their names."""


def hostile(value: Any, key: str = "") -> Any:
    """Every string that is free text replaced by an attack."""
    if isinstance(value, dict):
        return {name: hostile(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [hostile(part, key) for part in value]
    free = ("why", "missing", "summary", "os", "model", "torch", "measured", "python", "status")
    return HOSTILE if isinstance(value, str) and key in free else value


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Set RUSH_SHOTS to a folder to keep pages and screenshots and look at them."""
    kept = os.environ.get("RUSH_SHOTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("pages")
    records = {name: make() for name, make in RECORDS.items()}
    records |= {f"hostile-{name}": hostile(records[name]) for name in ("roofline", "precision-none", "fusion-none")}  # fmt: skip
    return {name: write(explain(record), folder / name)["report"] for name, record in records.items()}


@pytest.fixture(scope="module")
def shown(browser: Browser, pages: dict[str, Path]) -> Iterator[Callable[..., Page]]:
    """Each page in one tab for all tests that only look at it; a tab takes longer to open than to look at."""
    tabs: dict[str, Page] = {}

    def show(name: str, width: int = 1280) -> Page:
        if name not in tabs:
            tabs[name] = browser.open(pages[name])
        tabs[name].resize(width, 900)
        return tabs[name]

    yield show
    for tab in tabs.values():
        tab.close()


@pytest.mark.parametrize(
    "name", [*RECORDS, "hostile-roofline", "hostile-precision-none", "hostile-fusion-none"]
)
def test_a_page_opens_without_a_complaint_and_fits_every_screen(
    name: str, shown: Callable[..., Page], pages: dict[str, Path]
) -> None:
    page = shown(name)
    assert page.complaints() == []
    assert page.requests() == [pages[name].resolve().as_uri()]
    for width in (320, 390, 900, 1280):
        page.resize(width, 800)
        assert page.evaluate(OVERFLOWING) == [], width
        assert page.evaluate("document.documentElement.scrollWidth") <= width


OUTSIDE = """
[...document.querySelectorAll("svg.curve-picture")].filter(s => s.getClientRects().length).flatMap(s => {
  const frame = s.getBoundingClientRect();
  return [...s.querySelectorAll("text")].filter(t => { const b = t.getBoundingClientRect();
    return b.right > frame.right + 1 || b.left < frame.left - 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1; })
    .map(t => t.textContent);
})
"""
OVERLAPPING = """
[...document.querySelectorAll("svg.curve-picture")].filter(s => s.getClientRects().length).flatMap(s => {
  const boxes = [...s.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, p], i) => boxes.slice(i + 1).filter(([b, q]) =>
    Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2 && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 5)
    .map(([b]) => a + " | " + b));
})
"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", RECORDS)
def test_labels_stay_inside_their_picture_and_off_each_other(
    name: str, width: int, shown: Callable[..., Page]
) -> None:
    page = shown(name, width)
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate(OVERLAPPING) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["precision", "occupancy", "fusion-none"])
def test_every_text_has_enough_contrast(
    name: str, dark: bool, browser: Browser, pages: dict[str, Path]
) -> None:
    page = browser.open(pages[name], dark=dark)
    seen, low = page.evaluate(CONTRAST)
    assert seen > 60
    assert low == []
    page.close()


def test_hostile_strings_run_nothing_and_add_no_element(browser: Browser, pages: dict[str, Path]) -> None:
    names = "[...new Set([...document.querySelectorAll('*')].map(e => e.localName))].sort()"
    clean, page = browser.open(pages["roofline"]), browser.open(pages["hostile-roofline"])
    assert page.evaluate(names) == clean.evaluate(names)
    assert page.evaluate("document.images.length + document.scripts.length") == 1
    assert HOSTILE in page.evaluate("document.querySelector('.where').textContent")
    assert page.complaints() == []
    clean.close()
    page.close()


def test_every_picture_has_a_text_alternative(shown: Callable[..., Page]) -> None:
    for name in RECORDS:
        silent = "[...document.querySelectorAll('svg')].filter(s => !(s.getAttribute('role') === 'img' && s.ariaLabel)).length"  # fmt: skip
        assert shown(name).evaluate(silent) == 0


def test_print_is_light_also_from_a_dark_page(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["attention"], dark=True)
    page.prefer(dark=True, media="print")
    assert page.until("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
    assert page.evaluate("document.querySelector('.wide svg').checkVisibility()")
    page.prefer(dark=True)
    pdf = base64.b64decode(page.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF-")
    page.close()


def test_the_picture_file_opens_by_itself(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["attention"].with_name("picture.svg"), width=800)
    assert page.complaints() == []
    assert page.evaluate("document.documentElement.localName") == "svg"
    page.close()


@pytest.mark.slow
def test_screenshots_of_all_pages_are_pictures(browser: Browser, pages: dict[str, Path]) -> None:
    for name, path in pages.items():
        shots = {}
        for how, width, dark in (("wide", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
            page = browser.open(path, width=width, dark=dark)
            height = min(6000, page.evaluate("document.documentElement.scrollHeight"))
            page.resize(width, height)
            shots[how] = base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"])
            page.close()
            if os.environ.get("RUSH_SHOTS"):
                path.with_name(f"{how}.png").write_bytes(shots[how])
        assert all(shot.startswith(b"\x89PNG") and len(shot) > 20_000 for shot in shots.values()), name
        assert len(set(shots.values())) == 3
    assert json.loads(pages["attention"].with_name("explain.json").read_text())["topic"] == "attention"
