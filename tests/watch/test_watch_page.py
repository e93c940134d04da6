"""The live page in a real Chromium: curves, axis switch, a run that grows, one that appears, strings that attack."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report import made_up
from tests.report.browser import Browser, Page
from tests.report.made_up_run import append_rows, write_run
from tests.report.test_report_browser import CONTRAST, OVERFLOWING
from tests.watch.test_watch_server import ATTACK, serving


class Address:
    """What the browser of the tests opens instead of a file."""

    def __init__(self, url: str) -> None:
        self.url = url

    def resolve(self) -> Address:
        return self

    def as_uri(self) -> str:
        return self.url


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "a", rows=60, steps=100)
    write_run(folder / "b", rows=80, rate=0.5)
    made_up.write(folder / "ladder", made_up.made_up_ladder())
    os.utime(folder / "b" / "metrics.jsonl", (1e9, 1e9))
    return folder


@pytest.fixture
def page(browser: Browser, runs: Path) -> Iterator[Page]:
    with serving(runs) as server:
        page = browser.open(Address(server.url))  # type: ignore[arg-type]
        assert page.until(f"{CURVES} >= 2")
        yield page
        assert page.complaints() == []
        assert all(url.startswith((server.url, "data:")) for url in page.requests())
        page.close()


CURVES = "document.querySelectorAll('#charts figure:first-child path.curve').length"
LAST_TICK = "[...document.querySelectorAll('#charts figure:first-child text[text-anchor=middle]')].at(-1)?.textContent"


def choose(page: Page, name: str) -> None:
    page.evaluate(
        f"[...document.querySelectorAll('.item')].find(e => e.querySelector('.name').textContent === {name!r}).querySelector('input').click()"
    )


def test_curves_of_chosen_runs_lie_on_top_of_each_other_and_the_axis_switches(page: Page) -> None:
    assert page.evaluate(CURVES) == 2  # the newest run: raw and smoothed
    choose(page, "b")
    assert page.until(f"{CURVES} === 4")
    assert page.evaluate("document.querySelectorAll('#charts circle').length") == 2 + 3  # validations
    assert page.evaluate(LAST_TICK) == "80"
    page.click("input[value=tokens]")
    assert page.evaluate(LAST_TICK) == "150k"
    page.click("input[value=time]")
    assert page.evaluate(LAST_TICK) == "40 s"
    page.click("#raw")
    assert page.evaluate(CURVES) == 2
    assert page.evaluate("document.querySelectorAll('#legend li').length") == 2
    assert "def main()" in page.evaluate("document.querySelector('#samples').innerText")


def test_new_rows_and_new_runs_appear_by_themselves(page: Page, runs: Path) -> None:
    before = page.evaluate(
        "document.querySelector('#charts figure:first-child path.curve').getAttribute('d').length"
    )
    append_rows(runs / "a", range(61, 101))
    assert page.until("document.querySelector('.item .facts').textContent.startsWith('step 100 of 100')")
    assert page.until(f"{LAST_TICK} === '100'")
    after = page.evaluate(
        "document.querySelector('#charts figure:first-child path.curve').getAttribute('d').length"
    )
    assert after > before * 1.3
    write_run(runs / "new", rows=10, steps=20)
    assert page.until("[...document.querySelectorAll('.item .name')].some(e => e.textContent === 'new')")


def test_a_ladder_is_a_table_with_a_link_to_its_page(page: Page) -> None:
    choose(page, "ladder")
    assert page.until("document.querySelectorAll('#tables tbody tr').length > 3")
    link = page.evaluate("document.querySelector('#tables a').getAttribute('href')")
    assert link == "page?id=0%2Fladder"
    page.reload()  # the address remembers what was chosen
    assert page.until("document.querySelectorAll('#tables tbody tr').length > 3")
    assert page.until(f"{CURVES} === 2")


def test_the_keyboard_chooses_runs_and_reads_values(page: Page) -> None:
    page.evaluate("document.querySelector('#charts svg').focus()")
    page.press("End", 35)
    page.press("ArrowLeft", 37)
    assert page.until("/^5\\d steps/.test(document.querySelector('.readout').textContent)")
    page.evaluate("document.querySelectorAll('.item input')[1].focus()")
    page.press(" ", 32)
    assert page.until(f"{CURVES} === 4")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone(browser: Browser, runs: Path, dark: bool) -> None:
    with serving(runs) as server:
        page = browser.open(Address(server.url), width=390, height=800, dark=dark)  # type: ignore[arg-type]
        assert page.until(f"{CURVES} >= 2")
        page.evaluate("document.querySelector('#folders').open = true")
        choose(page, "ladder")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert light == ("rgb(20, 23, 27)" if dark else "rgb(252, 251, 248)")
        assert page.until("document.querySelectorAll('#tables tbody tr').length > 3")
        assert page.evaluate(OVERFLOWING) == []
        seen, low = page.evaluate(CONTRAST)
        assert seen > 60
        assert low == []
        page.close()


def test_hostile_names_and_samples_stay_text(browser: Browser, tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(2)>"
    write_run(tmp_path / "runs" / name, rows=30, samples=[{"step": 30, "text": ATTACK, "why": ATTACK}])
    with serving(tmp_path / "runs") as server:
        page = browser.open(Address(server.url))  # type: ignore[arg-type]
        assert page.until(f"{CURVES} >= 2")
        assert page.until("document.querySelector('#samples pre') !== null")
        assert page.evaluate("document.querySelector('#samples pre').textContent") == ATTACK
        assert page.evaluate("document.querySelectorAll('img, #samples script').length") == 0
        assert page.evaluate("document.querySelector('.item .name').textContent") == name
        assert page.complaints() == []
        page.close()
