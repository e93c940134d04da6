"""Pictures of every page in a real Chromium: desktop, phone, dark. A chosen few go into the docs.

python scripts/screenshots.py FOLDER            # all of them, to look at
python scripts/screenshots.py --docs            # docs/pictures/page-*.webp
"""

from __future__ import annotations

import base64
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.report import made_up  # noqa: E402
from tests.report.browser import Browser, Page, find_chromium  # noqa: E402
from tests.report.gallery import draw_pages  # noqa: E402
from tests.report.made_up_run import write_run  # noqa: E402
from tests.watch.test_watch_page import CURVES, Address  # noqa: E402
from tests.watch.test_watch_server import serving  # noqa: E402

VIEWS = {"desktop": (1280, 900, False), "phone": (360, 740, False), "dark": (1280, 900, True)}
CHOSEN = ("ladder-desktop", "ladder-phone", "ladder-dark", "run-desktop", "compare-desktop", "tune-desktop",
          "plan-desktop", "race-desktop", "watch-desktop", "watch-phone", "watch-dark")  # fmt: skip
MOST_BYTES = 150_000


def shoot(page: Page, path: Path) -> None:
    """What is on the screen, as WebP of at most `MOST_BYTES`."""
    for quality in (90, 75, 60, 45):
        taken = page.call("Page.captureScreenshot", format=path.suffix[1:], quality=quality) if path.suffix == ".webp" else page.call("Page.captureScreenshot", format="png")  # fmt: skip
        path.write_bytes(base64.b64decode(taken["data"]))
        if path.stat().st_size <= MOST_BYTES:
            return


def main(folder: Path, suffix: str, chosen: tuple[str, ...] | None) -> None:
    executable = find_chromium()
    if executable is None:
        sys.exit("no Chromium on the PATH; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as made:
        pages: dict[str, Path] = draw_pages(Path(made) / "pages")
        runs = Path(made) / "runs"
        for name, rate, rows in (("plain", 1.0, 240), ("fast", 1.7, 300)):
            write_run(runs / name, rows=rows, steps=300, rate=rate)
        made_up.write(runs / "ladder", made_up.made_up_ladder())
        os.utime(runs / "ladder" / "ladder.json", (1e9, 1e9))
        browser = Browser(executable, Path(made) / "profile")
        with serving(runs) as server:
            for name, (width, height, dark) in VIEWS.items():
                for of, page in {**pages, "watch": Address(server.url)}.items():
                    if chosen is not None and f"{of}-{name}" not in chosen:
                        continue
                    opened = browser.open(page, width=width, height=height, dark=dark)  # type: ignore[arg-type]
                    if of == "watch":
                        opened.until(f"{CURVES} >= 2")
                    prefix = "" if chosen is None else "page-"
                    shoot(opened, folder / f"{prefix}{of}-{name}{suffix}")
                    opened.close()
        browser.close()


if __name__ == "__main__":
    if sys.argv[1:] == ["--docs"]:
        main(ROOT / "docs" / "pictures", ".webp", CHOSEN)
    else:
        target = Path(sys.argv[1])
        target.mkdir(parents=True, exist_ok=True)
        main(target, ".png", None)
