"""The site: it is built strictly, asks no other host for anything, and every page of the docs is in its navigation."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        found.add(next(name for name in (slug, *(f"{slug}-{n}" for n in range(1, 99))) if name not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_that_a_page_links_to_is_a_heading_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text):
        file = page if not target else (page.parent / target).resolve()
        if file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}"


def test_the_page_of_commands_is_what_the_commands_say() -> None:
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == script("cli_page").page(), "run: make docs"


def test_links_out_of_the_docs_lead_to_the_repository_and_code_stays_as_it_is() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (it comes with .[dev])")
    hook = script("site_hook")
    page = ROOT / "docs" / "tutorials" / "laptop.md"
    said = "[a](../../README.md#install) [b](../techniques) [c](../ladders.md) [d](../../results)\n```\n[e](../../README.md)\n```\n"
    assert hook.for_site(said, page, "https://x") == (
        "[a](https://x/blob/main/README.md#install) [b](../techniques/README.md) [c](../ladders.md) "
        "[d](https://x/tree/main/results)\n```\n[e](../../README.md)\n```\n"
    )


@pytest.mark.slow  # 10 s on a quiet machine
def test_the_site_is_built_strictly_and_asks_no_other_host_for_anything(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed (it comes with .[dev])")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > 100
    asked = r"<(?:script|img|iframe|source|link(?! rel=\"(?:canonical|next|prev)\"))[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
    for page in [*pages, *tmp_path.rglob("*.css")]:
        text = page.read_text("utf-8")
        assert re.findall(asked, text) == [], page
        assert not re.findall(r"@import|url\(['\"]?(?:https?:)?//", text), page
