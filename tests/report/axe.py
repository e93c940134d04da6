"""axe-core, which looks for what keeps people with other senses and devices from a page. A development tool, never shipped.

It is fetched with npm once, into the ignored folder `.axe`, and known by its SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.report.browser import Page

FOLDER = Path(__file__).resolve().parents[2] / ".axe"
VERSION = "4.14.0"
SHA256 = "20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878"
SERIOUS = ("serious", "critical")


def find_axe() -> str | None:
    """The script; None where it is not there and cannot be fetched."""
    script = FOLDER / "package" / "axe.min.js"
    if not script.is_file() and (npm := shutil.which("npm")):
        FOLDER.mkdir(exist_ok=True)
        command = [npm, "pack", f"axe-core@{VERSION}", "--silent"]
        if subprocess.run(command, cwd=FOLDER, capture_output=True, check=False, timeout=60).returncode == 0:
            with tarfile.open(FOLDER / f"axe-core-{VERSION}.tgz") as archive:
                for name in ("package/axe.min.js", "package/LICENSE"):
                    archive.extract(name, FOLDER, filter="data")
    if not script.is_file():
        return None
    content = script.read_bytes()
    assert hashlib.sha256(content).hexdigest() == SHA256, f"{script} is not axe-core {VERSION}; remove it"
    return content.decode()


def violations(page: Page, script: str) -> list[tuple[str, str, str]]:
    """What is serious: rule, help, the first element. Everything is opened first: what is folded is part of the page."""
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.evaluate(f"{script}; 0")
    found: list[dict[str, Any]] = page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations.map(v => "
        "({id: v.id, impact: v.impact, help: v.help, html: v.nodes[0].html.slice(0, 200), n: v.nodes.length})))"
    )
    return [
        (row["id"], f"{row['impact']}: {row['help']}", row["html"])
        for row in found
        if row["impact"] in SERIOUS
    ]
