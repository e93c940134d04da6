"""Write the README's performance table from the records in results/: `python scripts/performance_table.py`.

Every figure comes from a `models.json` or `kernels.json` that the benches wrote; nothing is typed by hand. Of a recipe or
a kernel that was measured more than once on such a machine, the later record counts. The table stands between two marks in README.md; without results it says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.records.kernels import read_kernels  # noqa: E402
from rush.records.models import read_models  # noqa: E402
from rush.report import findings  # noqa: E402
from rush.report.kernels import PASS_WORDS, reached_words  # noqa: E402
from rush.report.models import lengths, table  # noqa: E402

BEGIN, END = "<!-- performance: begin, by scripts/performance_table.py -->", "<!-- performance: end -->"


def performance(results: Path) -> str:
    """The text between the marks."""
    parts = [*_models(results), *_kernels(results)]
    return "\n".join(parts) if parts else "Nothing has been measured yet.\n"


def _models(results: Path) -> list[str]:
    parts = []
    records = {path: read_models(path) for path in sorted(results.glob("*/models.json"))}
    latest = _latest(
        records,
        lambda record: [
            ours["rung"]["name"] for work in record["workloads"] for ours in work.get("ours", ())
        ],
    )
    for path, record in records.items():
        where, link = _machine(record["machine"]), f"([record]({_link(path, results)})):\n"
        for work in record["workloads"]:
            work["ours"] = [
                ours for ours in work.get("ours", ()) if latest[where, ours["rung"]["name"]] == path
            ]
        if pairs := table(record):
            parts.append(f"Whole runs on {where}, ours beside the rival in the same command {link}")
            head = ("workload", "rival", "ours", "ratio (95 %)", "wanted", "peak memory", "parity", "")
            parts.append(_markdown(head, pairs))
        if rows := lengths(record):
            parts.append(f"The longest sequence that fits, on {where} {link}")
            columns = ("workload", "limit", "reached", "speed there", "peak memory", "published by others")
            parts.append(_markdown(columns, rows))
    return parts


def _kernels(results: Path) -> list[str]:
    parts = []
    records = {path: read_kernels(path) for path in sorted(results.glob("*/kernels.json"))}
    latest = _latest(records, lambda record: [op["op"] for op in record["ops"]])
    for path, record in records.items():
        where = _machine(record["machine"])
        rows = [
            (
                op["op"],
                target["size"],
                PASS_WORDS[target["step"]],
                target["what"],
                reached_words(target),
                target["verdict"],
            )
            for op in record["ops"]
            if latest[where, op["op"]] == path
            for target in op["targets"]
        ]
        if rows:
            reached = sum(row[-1] == "reached" for row in rows)
            open_ = sum(row[-1] == "not measured" for row in rows)
            parts.append(
                f"Kernels on {where}: {reached} of {len(rows)} targets reached"
                f"{f', {open_} not measured' if open_ else ''} ([record]({_link(path, results)})).\n\n"
                "<details><summary>Every kernel, size and pass</summary>\n"
            )
            parts.append(_markdown(("kernel", "size", "pass", "target", "reached", ""), rows))
            parts.append("</details>\n")
    return parts


def _latest(records: Mapping[Path, Any], names: Callable[[Any], list[str]]) -> dict[tuple[str, str], Path]:
    """For each machine and name, the record that counts."""
    in_order = sorted(records.items(), key=lambda item: item[1]["started"])
    return {(_machine(record["machine"]), name): path for path, record in in_order for name in names(record)}


def _machine(machine: dict[str, object]) -> str:
    return f"{findings.machine_name(machine)}, torch {machine.get('torch')}"


def _link(path: Path, results: Path) -> str:
    return f"{results.name}/{path.parent.name}/{path.name}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def put(readme: str, text: str) -> str:
    """The README with the text between its marks; a ValueError where it has none."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md needs one line {BEGIN} and one line {END}.")
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}{END}{after}"


def main() -> None:
    readme = ROOT / "README.md"
    readme.write_text(
        put(readme.read_text(encoding="utf-8"), performance(ROOT / "results")), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
