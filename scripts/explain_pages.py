"""Write docs/explain: a page and a picture for each topic, from the records in docs/explain/records, and the same for an
H200 in docs/explain/h200.

python scripts/explain_pages.py             write the pages
python scripts/explain_pages.py --measure   measure every topic again first: four minutes, on a quiet CPU
python scripts/explain_pages.py --measure links cpu-gpu    these topics only
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rush.explain import ExplainSettings, find, topics
from rush.explain.markdown import index, page
from rush.explain.page import picture
from rush.explain.records import Explanation, explain, make, read
from rush.files import write_json_atomic
from rush.hardware import probe

DOCS = Path(__file__).resolve().parents[1] / "docs" / "explain"
OTHERS = ("h200",)
"""Machines with pages of their own: the records are what `rush explain TOPIC` wrote there."""
NUMBERS = {1: "one", 2: "two", 4: "four", 6: "six", 8: "eight"}


def pages(folder: Path) -> dict[str, str]:
    """Every file that is made from the records, by name: here and in folders for other machines."""
    found = _explained(folder)
    others = {name: _explained(folder / name) for name in OTHERS}
    files = {"README.md": index(found, others)}
    for where, explanations in {"": found, **others}.items():
        for explanation in explanations:
            name = explanation.topic.name
            at = f"{where}/{name}" if where else name
            files[f"{at}.md"] = page(explanation, f"{name}.svg", "../README.md" if where else "README.md")
            files[f"{at}.svg"] = picture(explanation)
    return files


def _explained(folder: Path) -> list[Explanation]:
    return [explain(read(path)) for path in sorted((folder / "records").glob("*.json"))]


def measure(folder: Path, names: Sequence[str] = ()) -> None:
    machine = probe("cpu")
    cores = machine.cpu.num_threads
    for topic in [find(name) for name in names] or topics().values():
        record = make(topic, ExplainSettings(machine, "cpu"))
        # Whose machine it was is nobody's business; what kind is.
        record["machine"]["summary"] = f"a {NUMBERS.get(cores, cores)}-core CPU machine"
        (folder / "records").mkdir(exist_ok=True)
        write_json_atomic(folder / "records" / f"{topic.name}.json", record)


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        measure(DOCS, sys.argv[sys.argv.index("--measure") + 1 :])
    for name, content in pages(DOCS).items():
        (DOCS / name).write_text(content, encoding="utf-8")
