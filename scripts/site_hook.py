"""What mkdocs needs to make a site of pages that are written for GitHub (`make docs-site`).

Pages link to files all over the repository. A link that leaves `docs/` becomes one to the file on GitHub; a link to a folder
becomes one to its README. The notebook becomes a page, and the techniques come into the navigation by their groups. Nothing
here is needed to read the pages on GitHub.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "examples" / "notebook" / "rush.ipynb"
_LINK = re.compile(r"(?<=\])\((?!https?:|mailto:|#)([^)\s]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    config["nav"] = _filled(config["nav"])
    return config


def on_files(files: Any, config: Any) -> Any:
    files.append(
        File.generated(config, "notebook.md", content=notebook_page(json.loads(NOTEBOOK.read_text("utf-8"))))
    )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return for_site(markdown, DOCS / page.file.src_uri, config["extra"]["repository"])


def for_site(markdown: str, page: Path, repository: str) -> str:
    """The page with links that work on the site; code blocks stay as they are."""

    def replace(match: re.Match[str]) -> str:
        path, _, anchor = match[1].partition("#")
        target = (page.parent / path).resolve()
        tail = f"#{anchor}" if anchor else ""
        if target.is_relative_to(DOCS) and (target.is_file() or (target / "README.md").is_file()):
            inside = path if target.is_file() else f"{path.rstrip('/')}/README.md"
            return f"({inside}{tail})"
        if not target.is_relative_to(ROOT) or not target.exists():
            return match[0]  # mkdocs reports it
        kind = "tree" if target.is_dir() else "blob"
        return f"({repository}/{kind}/main/{target.relative_to(ROOT)}{tail})"

    parts, at = [], 0
    for block in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replace, markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, _LINK.sub(replace, markdown[at:])])


def notebook_page(notebook: dict[str, Any]) -> str:
    """Markdown, code and text results of a notebook; pictures and tables are in the notebook itself."""
    parts = [
        f"[The notebook]({NOTEBOOK.relative_to(ROOT)}) as a page: what was run, and the text that came back.\n"
    ]
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            told = "".join(output.get("text", output.get("data", {}).get("text/plain", [])))
            if told.strip() and "object at 0x" not in told:
                parts.append(f"```text\n{told.rstrip()}\n```")
    first = next((at for at, part in enumerate(parts) if part.startswith("# ")), None)
    if first is None:
        parts.insert(0, "# The notebook")
    else:
        parts.insert(0, parts.pop(first))
    repository = "https://github.com/optimization-rush/optimization-rush/blob/main/"
    return "\n\n".join(parts).replace(
        f"]({NOTEBOOK.relative_to(ROOT)})", f"]({repository}{NOTEBOOK.relative_to(ROOT)})"
    )


def _filled(nav: list[Any]) -> list[Any]:
    """The navigation with the techniques in their groups and the explanations in the places that name them."""
    filled: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            filled.append(
                {name: _filled(part) if isinstance(part, list) else part for name, part in entry.items()}
            )
        elif entry == "TECHNIQUES":
            filled.append({"Techniques": ["techniques/README.md", *_groups()]})
        elif entry == "EXPLAIN":
            pages = sorted(DOCS.glob("explain/**/*.md"), key=lambda page: (len(page.parts), page.name))
            filled.append({"The hardware, measured": [str(page.relative_to(DOCS)) for page in pages]})
        else:
            filled.append(entry)
    return filled


def _groups() -> list[Any]:
    """Sections of docs/techniques/README.md with the pages that each links to."""
    groups, seen = [], set()
    text = (DOCS / "techniques" / "README.md").read_text("utf-8")
    for name, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL):
        pages = [page for page in dict.fromkeys(re.findall(r"\]\((\w+\.md)\)", body)) if page not in seen]
        seen |= {*pages}
        if pages:
            groups.append({name: [f"techniques/{page}" for page in pages]})
    return groups
