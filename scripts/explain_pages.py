"""Write docs/explain from the records in docs/explain/records, which `rush explain TOPIC` measured."""

from __future__ import annotations

from pathlib import Path

from rush.explain.markdown import index, page
from rush.explain.records import explain, picture, read

DOCS = Path(__file__).parents[1] / "docs" / "explain"


def pages(folder: Path) -> dict[str, str]:
    """Every file of the folder that is made from the records, by name."""
    found = [explain(read(path)) for path in sorted((folder / "records").glob("*.json"))]
    files = {"README.md": index(found)}
    for explanation in found:
        name = explanation.topic.name
        files[f"{name}.md"] = page(explanation, f"{name}.svg")
        files[f"{name}.svg"] = picture(explanation)
    return files


if __name__ == "__main__":
    for name, content in pages(DOCS).items():
        (DOCS / name).write_text(content, encoding="utf-8")
