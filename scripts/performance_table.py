"""Write the README's performance tables and picture from the records in results/: `python scripts/performance_table.py`.

Every figure comes from a `models.json` or `kernels.json` that the benches wrote; nothing is typed by hand. Of a recipe or
a kernel that was measured more than once on such a machine, the later record counts. Recipes go by what they measured, not by the
name they had. What a record calls equal is judged again by
the rule of now from the losses it holds, since rules become stricter when they are found out. The tables stand between two marks
in README.md, with docs/pictures/beside-baselines.svg above them; without results it says so.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.bench.workloads import FILE, load_workloads  # noqa: E402
from rush.records.kernels import read_kernels  # noqa: E402
from rush.records.models import ModelRecord, read_models  # noqa: E402
from rush.report import headlines  # noqa: E402
from rush.report.baseline_picture import BaselinePair, beside_picture  # noqa: E402
from rush.report.kernels import PASS_WORDS, reached_words  # noqa: E402
from rush.report.models import lengths, table  # noqa: E402
from rush.techniques import Parity  # noqa: E402
from rush.techniques.api.tolerances import PerturbedRun, judge  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "beside-baselines.svg"
BEGIN, END = "<!-- performance: begin, by scripts/performance_table.py -->", "<!-- performance: end -->"


FORMER_TERMS = {"8-bit products": "fp8 matmuls", "head in 8 bits": "fp8 LM head"}
"""What old records call it, and what it is called now."""


def in_terms_of_now(text: str) -> str:
    for former, term in FORMER_TERMS.items():
        text = text.replace(former, term)
    return text


def performance(results: Path) -> str:
    """The text between the marks."""
    parts = [*_models(results), *_kernels(results)]
    return in_terms_of_now("\n".join(parts)) if parts else "Nothing has been measured yet.\n"


def _models(results: Path) -> list[str]:
    parts = []
    for where, found in _by_machine(_measured(results)).items():
        tables = [(row, path) for path, record in found for row in table(record)]
        # A search for the longest that did not come to its end has found none.
        longest = [(row, path) for path, record in found if record["finished"] for row in lengths(record)]
        if tables:
            parts.append(
                f"Whole runs on {where}, ours beside the baseline in the same command; each verdict leads to its record.\n"
            )
            head = (
                "workload",
                "baseline",
                "ours",
                "ratio (95 %)",
                "wanted",
                "peak memory",
                "parity",
                "verdict",
            )
            parts.append(_markdown(head, _linked(tables, results)))
        if longest:
            parts.append(f"The longest sequence that fits, on {where}:\n")
            columns = ("workload", "limit", "reached", "speed there", "peak memory", "published by others")
            parts.append(_markdown(columns, [row for row, _ in longest]))
    return parts


def _by_names_of_now(record: ModelRecord) -> ModelRecord:
    """What was measured has the name that the list of workloads gives these techniques now: recipes change, records do not."""
    known = tomllib.loads(FILE.read_text(encoding="utf-8"))["workloads"]
    for work in record["workloads"]:
        listed = load_workloads([work["name"]])[0].ours if work["name"] in known else ()
        names = {_identity(ours.recipe.techniques): ours.name for ours in listed}
        for ours in work.get("ours", ()):
            measured = _identity(tomllib.loads(ours["rung"]["recipe"]).get("techniques", []))
            ours["rung"]["name"] = names.get(measured, ours["rung"]["name"])
    return record


def _identity(techniques: Sequence[str | Mapping[str, Any]]) -> tuple[str, ...]:
    """Techniques with their knobs, in any order."""
    entries = ({"name": entry} if isinstance(entry, str) else entry for entry in techniques)
    return tuple(sorted(json.dumps(entry, sort_keys=True) for entry in entries))


def _judged_again(record: ModelRecord) -> ModelRecord:
    """With what was called equal and is not by the rule of now."""
    for work in record["workloads"]:
        for ours in work.get("ours", ()):
            found = ours["rung"].get("parity") or {}
            if found.get("verdict") != "equal" or found.get("class") != Parity.STATISTICAL.name:
                continue
            norms = found["grad_norms"], found["reference_grad_norms"]
            perturbed = PerturbedRun(found["twin_losses"], norms[1]) if found.get("twin_losses") else None
            curves = found["losses"], found["reference_losses"], *norms
            judged = judge(Parity.STATISTICAL, "bfloat16", *curves, {}, perturbed)
            if judged.verdict != "equal":
                found["verdict"] = f"{judged.verdict}, judged again"
                ours["target"] |= {"verdict": "missed: it learns something else"}
    return record


def _measured(results: Path) -> list[tuple[Path, ModelRecord]]:
    """What counts of every record, one workload in each, in the order of the workloads."""
    records = {
        path: _judged_again(_by_names_of_now(read_models(path)))
        for path in sorted(results.glob("*/models.json"))
    }
    latest = _latest(
        records,
        lambda record: [
            _title(work["name"], ours["rung"]["name"])
            for work in record["workloads"]
            for ours in work.get("ours", ())
        ],
    )
    order = list(tomllib.loads(FILE.read_text(encoding="utf-8"))["workloads"])
    found: list[tuple[int, Path, ModelRecord]] = []
    for path, record in records.items():
        where = _machine(record["machine"])
        for work in record["workloads"]:
            counts = [
                ours
                for ours in work.get("ours", ())
                if latest[where, _title(work["name"], ours["rung"]["name"])] == path
            ]
            one: ModelRecord = {**record, "workloads": [{**work, "ours": counts}]}
            if counts or "longest" in work:
                place = order.index(work["name"]) if work["name"] in order else len(order)
                found.append((place, path, one))
    return [(path, one) for _, path, one in sorted(found, key=lambda item: item[:2])]


def _kernels(results: Path) -> list[str]:
    parts = []
    records = {path: read_kernels(path) for path in sorted(results.glob("*/kernels.json"))}
    latest = _latest(records, lambda record: [op["op"] for op in record["ops"]])
    for where, found in _by_machine(list(records.items())).items():
        rows = [
            (
                (
                    op["op"],
                    target["size"],
                    PASS_WORDS[target["step"]],
                    target["what"],
                    reached_words(target),
                    target["verdict"],
                ),
                path,
            )
            for path, record in found
            for op in record["ops"]
            if latest[where, op["op"]] == path
            for target in op["targets"]
        ]
        if rows:
            reached = sum(row[-1] == "reached" for row, _ in rows)
            open_ = sum(row[-1] == "not measured" for row, _ in rows)
            parts.append(
                f"Kernels on {where}: {reached} of {len(rows)} targets reached"
                f"{f', {open_} not measured' if open_ else ''}.\n\n"
                "<details><summary>Every kernel, size and pass</summary>\n"
            )
            in_order = sorted(rows, key=lambda row: row[0][0])
            parts.append(
                _markdown(
                    ("kernel", "size", "pass", "target", "reached", "verdict"), _linked(in_order, results)
                )
            )
            parts.append("</details>\n")
    return parts


def pairs(results: Path) -> dict[str, list[BaselinePair]]:
    """By machine, what was asked for and measured, for the picture."""
    found: dict[str, list[BaselinePair]] = {}
    for _, record in _measured(results):
        for work in record["workloads"]:
            for ours in work["ours"]:
                rung, target = ours["rung"], ours["target"]
                if target.get("reached") is None:
                    continue
                peaks = [side.get("peak_memory_bytes") for side in (rung, work["rival"])]
                memory = peaks[0] / peaks[1] if all(peaks) else None
                found.setdefault(_machine(record["machine"]), []).append(
                    BaselinePair(
                        _title(work["name"], rung["name"]),
                        work["rival"]["title"],
                        target["reached"],
                        *target["ci95"],
                        target["at_least"],
                        memory,
                        _short(target),
                    )
                )
    return found


def _title(workload: str, name: str) -> str:
    """What tells ours apart from all others: its name, with the workload's where several have that name (`qlora`)."""
    return name if name.startswith(workload) else f"{workload}: {name}"


def _short(target: Mapping[str, Any]) -> str:
    memory = target.get("memory", {}).get("verdict", "reached")
    if target["verdict"] == memory:
        return str(memory)
    return "memory missed" if memory == "missed" else str(target["verdict"])


def _by_machine(records: Sequence[tuple[Path, Any]]) -> dict[str, list[tuple[Path, Any]]]:
    found: dict[str, list[tuple[Path, Any]]] = {}
    for path, record in records:
        found.setdefault(_machine(record["machine"]), []).append((path, record))
    return found


def _linked(rows: Sequence[tuple[Sequence[str], Path]], results: Path) -> list[Sequence[str]]:
    """The rows, each with its last word as a link to the record."""
    return [(*row[:-1], f"[{row[-1]}]({_link(path, results)})") for row, path in rows]


def _latest(records: Mapping[Path, Any], names: Callable[[Any], list[str]]) -> dict[tuple[str, str], Path]:
    """For each machine and name, the record that counts."""
    in_order = sorted(records.items(), key=lambda item: item[1]["started"])
    return {(_machine(record["machine"]), name): path for path, record in in_order for name in names(record)}


def _machine(machine: dict[str, object]) -> str:
    return f"{headlines.machine_name(machine)}, torch {machine.get('torch')}"


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
    PICTURE.write_text(drawn(ROOT / "results"), encoding="utf-8")


def drawn(results: Path) -> str:
    """The picture, of the machine with the most pairs."""
    where, most = max(pairs(results).items(), key=lambda item: len(item[1]))
    return in_terms_of_now(beside_picture(f"Beside the baselines on {where}", most) + "\n")


if __name__ == "__main__":
    main()
