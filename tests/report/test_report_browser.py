"""The report in a real Chromium: clicks, keys, screen sizes, dark mode, print, and strings that attack.

Needs the browser on the PATH (Debian: `apt-get install chromium`); without it these tests are skipped.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rush.report import formatting, write_comparison, write_report
from tests.report import made_up
from tests.report.browser import Browser, Page

PAGES = ("full", "one", "sixty", "hostile", "compare", "odd")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    ladders = {
        "full": made_up.made_up_ladder(),
        "one": made_up.one_rung(),
        "sixty": made_up.sixty_rungs(),
        "hostile": made_up.hostile_ladder(),
        "odd": made_up.odd_ladder(),
    }
    records = {name: made_up.write(folder / name, ladder) for name, ladder in ladders.items()}
    for name, record in records.items():
        write_report(record, folder / f"{name}.html")
    write_comparison([records["full"], records["hostile"]], folder / "compare.html")
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.fixture
def full(browser: Browser, pages: dict[str, Path]) -> Iterator[Page]:
    page = browser.open(pages["full"])
    yield page
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_complaint_and_asks_for_nothing_but_itself(
    name: str, browser: Browser, pages: dict[str, Path]
) -> None:
    page = browser.open(pages[name])
    assert page.complaints() == []
    assert page.requests() == [pages[name].resolve().as_uri()]
    page.close()


# Elements that stick out of the window, unless they may scroll inside their own frame.
OVERFLOWING = """
[...document.querySelectorAll("body *")].filter(e => {
  if (e.closest(".scroll, pre, .said-aloud, .skip")) return e.matches(".scroll, pre")
    && e.getBoundingClientRect().right > innerWidth + 0.5;
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).slice(0, 5).map(e => e.outerHTML.slice(0, 160) + " " + e.getBoundingClientRect().right)
"""


@pytest.mark.parametrize(
    ("name", "width"),
    [("full", 320), ("full", 1280), ("hostile", 390), ("compare", 390), ("odd", 390), ("sixty", 390),
     *(pytest.param(*page, marks=pytest.mark.slow) for page in [
         ("full", 390), ("full", 768), ("full", 900), ("hostile", 900), ("compare", 900), ("odd", 900),
     ])],
)  # fmt: skip
def test_nothing_sticks_out_sideways(name: str, width: int, browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages[name], width=width, height=800)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if width <= 390:  # A phone shows every table whole, without a frame to scroll in.
        hidden = (
            "[...document.querySelectorAll('.scroll, pre')].filter(e => e.scrollWidth > e.clientWidth).length"
        )
        assert page.evaluate(hidden) == 0
    page.close()


def test_text_in_pictures_keeps_a_readable_size_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    page = browser.open(pages["full"], width=390, height=800)
    smallest = page.evaluate(
        """Math.min(...[...document.querySelectorAll("svg text")].filter(t => t.getClientRects().length)
        .map(t => parseFloat(getComputedStyle(t).fontSize) * Math.hypot(t.getScreenCTM().a, t.getScreenCTM().b)))"""
    )
    assert smallest >= 11
    page.close()


# WCAG contrast of every visible text with what is behind it: (ratio, size, text) where it is too low.
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = c => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1);
                      return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const light = c => { const [r, g, b] = rgba(c).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = e => {
    if (e.matches("svg text.on")) return getComputedStyle(e.previousElementSibling).fill;
    for (let n = e; n; n = n.parentElement) {
      const c = getComputedStyle(n).backgroundColor;
      if (rgba(c)[3] === 255) return c;
    }
    return "white";
  };
  const low = []; let seen = 0;
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!own || !e.getClientRects().length || e.matches("script, style, title, .said-aloud")) continue;
    const style = getComputedStyle(e), ink = e.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
    seen += 1;
    if (ratio < (size >= 24 ? 3 : 4.5)) low.push([ratio, ink, behind(e), e.textContent.slice(0, 40)]);
  }
  return [seen, low.slice(0, 8)];
})()
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["full", "compare"])
def test_every_text_has_enough_contrast(
    name: str, dark: bool, browser: Browser, pages: dict[str, Path]
) -> None:
    page = browser.open(pages[name], dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    seen, low = page.evaluate(CONTRAST)
    assert seen > 100
    assert low == []
    page.close()


PAPER = "getComputedStyle(document.body).backgroundColor"
INK = "getComputedStyle(document.body).color"


def test_the_page_follows_the_system_and_the_button_overrules_it(full: Page) -> None:
    light = full.evaluate(PAPER), full.evaluate(INK)
    full.prefer(dark=True)
    dark = full.evaluate(PAPER), full.evaluate(INK)
    assert light[0] != dark[0]
    assert light[1] != dark[1]
    assert full.until("document.querySelector('#theme').textContent === 'Light'")
    full.click("#theme")
    assert full.until("document.querySelector('#theme').textContent === 'Dark'")
    assert (full.evaluate(PAPER), full.evaluate(INK)) == light
    full.prefer(dark=False)
    full.click("#theme")
    assert full.until("document.querySelector('#theme').getAttribute('aria-pressed') === 'true'")
    assert (full.evaluate(PAPER), full.evaluate(INK)) == dark
    assert full.complaints() == []


def test_the_copy_button_copies_the_recipe_to_the_letter(browser: Browser, full: Page) -> None:
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    full.call("Page.bringToFront")
    full.click("details.recipe:nth-of-type(6) summary")
    full.click("[data-copy=recipe-6]")
    assert full.until("document.querySelector('#said').textContent === 'Copied'")
    copied = full.evaluate("navigator.clipboard.readText()")
    assert copied == made_up.made_up_ladder()["rungs"][5]["recipe"]
    assert full.complaints() == []


def test_raw_samples_open_and_close_by_mouse_and_by_key(full: Page) -> None:
    shown = "document.querySelector('details.raw .numbers').checkVisibility()"
    assert not full.evaluate(shown)
    full.click("details.raw summary")
    assert full.until(shown)
    full.click("details.raw summary")
    assert full.until(f"!{shown}")
    full.evaluate("document.querySelector('details.raw summary').focus()")
    full.press("Enter", 13)
    assert full.until(shown)


def test_the_time_bars_change_from_shares_to_time_per_token(full: Page) -> None:
    widths = """[...document.querySelectorAll("#stacks li")].map(li => {
      const parts = [...li.querySelectorAll(".part")].filter(p => p.checkVisibility());
      return parts.reduce((sum, p) => sum + p.getBoundingClientRect().width, 0); })"""
    shares = full.evaluate(widths)
    assert max(shares) == pytest.approx(min(shares), rel=0.05)
    full.click("[data-show=absolute]")
    assert full.until("document.querySelector('[data-show=absolute]').ariaPressed === 'true'")
    times = full.evaluate(widths)
    per_token = [
        sum(rung["breakdown_ms"].values()) / rung["step_tokens"]
        for rung in made_up.made_up_ladder()["rungs"]
        if rung["breakdown_ms"]
    ]
    for width, expected in zip(times, per_token, strict=True):
        assert width / times[0] == pytest.approx(expected / per_token[0], abs=0.04)


def test_the_longest_kernels_of_a_rung_unfold(full: Page) -> None:
    table = "#longest details table"
    assert not full.evaluate(f"document.querySelector('{table}').checkVisibility()")
    full.click("#longest > summary")
    full.click("#longest details > summary")
    assert full.until(f"document.querySelector('{table}').checkVisibility()")
    first = made_up.made_up_ladder()["rungs"][0]["longest"][0]
    shown = full.evaluate(f"document.querySelector('{table} tbody tr').textContent")
    assert first["name"] in shown
    assert formatting.milliseconds(first["ms"]) in shown


def test_bars_on_the_screen_are_as_long_as_their_numbers(full: Page) -> None:
    widths = full.evaluate(
        "[...document.querySelectorAll('.rung .bar.speed')].map(b => b.getBoundingClientRect().width)"
    )
    speeds = [
        rung["tokens_per_s"]["median"] for rung in made_up.made_up_ladder()["rungs"] if rung["tokens_per_s"]
    ]
    for width, speed in zip(widths, speeds, strict=True):
        assert width / widths[0] == pytest.approx(speed / speeds[0], rel=0.01)


def test_the_tab_key_reaches_first_the_skip_link_then_the_theme_and_shows_where_it_is(full: Page) -> None:
    full.press("Tab", 9)
    assert full.until("document.activeElement.className === 'skip'")
    assert full.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    full.press("Tab", 9)
    assert full.until("document.activeElement.id === 'theme'")
    assert full.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    full.press("Enter", 13)
    assert full.until("document.documentElement.dataset.theme === 'dark'")


def test_every_picture_has_a_text_alternative(full: Page) -> None:
    silent = full.evaluate(
        """[...document.querySelectorAll("svg")].filter(s => !s.closest("[aria-hidden=true]")
        && !s.parentElement.closest("svg") && !(s.getAttribute("role") === "img" && s.ariaLabel)).length"""
    )
    assert silent == 0


def test_hostile_strings_run_nothing_and_add_no_element(browser: Browser, pages: dict[str, Path]) -> None:
    # The page offers line breaks (wbr) in a technique's name with knobs, which only one of the two has.
    names = "[...new Set([...document.querySelectorAll('*:not(wbr)')].map(e => e.localName))].sort()"
    clean = browser.open(pages["full"])
    page = browser.open(pages["hostile"])
    assert page.evaluate(names) == clean.evaluate(names)
    assert page.evaluate("document.images.length + document.scripts.length") == 1
    assert made_up.HOSTILE in page.evaluate("document.querySelector('h1').textContent")
    for summary in range(3):
        page.click(f"details.raw:nth-of-type({summary + 1}) summary")
    assert page.complaints() == []
    assert page.requests() == [pages["hostile"].resolve().as_uri()]
    page.close()
    clean.close()


def test_were_a_hole_left_the_policy_would_still_refuse(full: Page) -> None:
    full.evaluate(
        """(() => {
          const script = document.createElement("script");
          script.textContent = "window.broken = 1";
          document.body.append(script);
          document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.broken = 2'>");
          document.body.insertAdjacentHTML("beforeend", "<p id=p style='color: rgb(1, 2, 3)'>x</p>");
        })()"""
    )
    assert (
        full.evaluate("new Promise(done => setTimeout(() => done(typeof window.broken), 100))") == "undefined"
    )
    assert full.evaluate("getComputedStyle(document.querySelector('#p')).color") != "rgb(1, 2, 3)"
    assert full.evaluate("fetch('https://example.org/').then(() => 'sent', () => 'refused')") == "refused"
    assert len(full.complaints()) >= 3


def test_without_script_the_page_is_complete_and_shows_no_dead_button(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page = browser.open(pages["full"])
    buttons = "[...document.querySelectorAll('button')].filter(b => b.checkVisibility()).length"
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate(buttons) == 3 + 17
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.reload()
    assert page.evaluate("document.querySelectorAll('li.rung').length") == 16
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate(buttons) == 0
    page.close()


def test_print_is_light_also_from_a_dark_page_and_makes_a_pdf(
    browser: Browser, pages: dict[str, Path]
) -> None:
    page = browser.open(pages["full"], dark=True)
    page.click("#theme")
    page.click("#theme")
    page.prefer(dark=True, media="print")
    assert page.until(f"{PAPER} === 'rgb(255, 255, 255)'")
    assert not page.evaluate("document.querySelector('nav').checkVisibility()")
    assert page.evaluate("document.querySelector('.wide svg').checkVisibility()")
    page.prefer(dark=True)
    pdf = base64.b64decode(page.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF-")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 20
    page.close()


def test_screenshots_of_the_light_and_the_dark_page_are_full_of_different_pictures(
    browser: Browser, pages: dict[str, Path]
) -> None:
    shots = []
    for dark in (False, True):
        page = browser.open(pages["full"], dark=dark)
        shots.append(base64.b64decode(page.call("Page.captureScreenshot", format="png")["data"]))
        page.close()
    assert all(shot.startswith(b"\x89PNG") and len(shot) > 20_000 for shot in shots)
    assert shots[0] != shots[1]
