"""axe finds nothing serious on any page: desktop, phone, dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report import made_up
from tests.report.axe import find_axe, violations
from tests.report.browser import Browser
from tests.report.gallery import RECORDED, draw_pages
from tests.report.made_up_run import write_run
from tests.watch.test_watch_page import CURVES, Address
from tests.watch.test_watch_server import serving

PAGES = (*(name for name in RECORDED if name != "kernels"), "plan", "data", "compare", "explain")
"""Without the page of kernels: its hundreds of pictures take axe longer than the browser is waited for."""
VIEWS = {"desktop": (1280, False), "phone": (360, False), "dark": (1280, True)}


@pytest.fixture(scope="module")
def axe() -> str:
    script = find_axe()
    if script is None:
        pytest.skip("axe-core is not in .axe, and npm cannot fetch it")
    return script


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return draw_pages(tmp_path_factory.mktemp("gallery"))


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious(
    name: str, view: str, browser: Browser, pages: dict[str, Path], axe: str
) -> None:
    width, dark = VIEWS[view]
    page = browser.open(pages[name], width=width, dark=dark)
    assert violations(page, axe) == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious_on_the_live_page(
    view: str, browser: Browser, tmp_path: Path, axe: str
) -> None:
    width, dark = VIEWS[view]
    write_run(tmp_path / "runs/a", rows=60, steps=100)
    made_up.write(tmp_path / "runs/ladder", made_up.made_up_ladder())
    with serving(tmp_path / "runs") as server:
        page = browser.open(Address(server.url), width=width, dark=dark)  # type: ignore[arg-type]
        assert page.until(f"{CURVES} >= 2")
        assert violations(page, axe) == []
        page.close()


@pytest.mark.slow
def test_axe_sees_what_is_wrong(browser: Browser, tmp_path: Path, axe: str) -> None:
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        '<html><head><title>x</title></head><body><img src="data:,"><p style="color:#ccc">pale</p></body></html>'
    )
    page = browser.open(wrong)
    assert {"image-alt", "color-contrast", "html-has-lang"} <= {rule for rule, _, _ in violations(page, axe)}
    page.close()
