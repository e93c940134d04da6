"""Write docs/performance.md's tables and its picture from the records in results/: `python scripts/performance_table.py`.

Every figure comes from a `models.json` or `kernels.json` that the benches wrote; nothing is typed by hand. What was measured
more than once is one row: the median of all records, not the best or the last (`rush.bench.combine`). What
`run.deterministic` costs a recipe comes from `scripts/same_bits.py --cost`. The tables stand between two marks, with
docs/pictures/beside-baselines.svg above them; without results it says so. The picture of the classic climb,
docs/pictures/llama-3.2-1b-h200.svg, is drawn too.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.bench.combine import (  # noqa: E402
    CombinedRecord,
    combined,
    kernel_targets,
    machine_kind,
    model_records,
    title_of,
)
from rush.bench.limit import AttentionRate, attention_rates, share_of_limit  # noqa: E402
from rush.hardware.machine import Machine  # noqa: E402
from rush.lab.statistics import Floor, ratio_of_medians  # noqa: E402
from rush.plan.spec import spec_of  # noqa: E402
from rush.plan.target import target_here  # noqa: E402
from rush.recipe_io import parse  # noqa: E402
from rush.records.kernels import read_kernels  # noqa: E402
from rush.records.models import ModelRecord  # noqa: E402
from rush.records.targets import CLOSE_CALL, target_word  # noqa: E402
from rush.report import write_picture  # noqa: E402
from rush.report.baseline_picture import BaselinePair, beside_picture  # noqa: E402
from rush.report.kernels import PASS_WORDS, reached_of, reached_words  # noqa: E402
from rush.report.models import lengths, table  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "beside-baselines.svg"
LADDER = ROOT / "results" / "llama-3.2-1b-h200" / "ladder.json"
LADDER_PICTURE = ROOT / "docs" / "pictures" / "llama-3.2-1b-h200.svg"
BEGIN, END = "<!-- performance: begin, by scripts/performance_table.py -->", "<!-- performance: end -->"


COST = "-cost.json"
"""How `scripts/same_bits.py --cost` ends the name of a recipe's record."""
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


NOTE = (
    "A row is the median of all records of its workload, recipe (techniques with their knobs) and kind of machine; its interval "
    "is a bootstrap over the records, and inside each over its own interval. Records of a recipe that had other techniques under the "
    "same name are linked as former. A close call is reached, but its interval reaches "
    "beyond the target. Of the limit: the time that the recipe's matmuls would take at the rates of large ones (`rush probe`), "
    "and its attention at the best measured rate of its head dim (`rush bench kernels flash_attention`), over the time of the complete "
    "step; nothing else counts, so no recipe reaches 100 %. `run.deterministic` is what that key changes in tokens per second, over "
    "eight windows in one process.\n"
)
FORMER = (
    "A baseline that is called rebuilt from our model is a former one. It stood for nanoGPT, but is our own plain GPT-2 with "
    "`amp_bf16`, `flash_attention`, `fused_adamw` and `compile`: it has biases, and FlashAttention-2's kernels where nanoGPT takes "
    "those that torch prefers (cuDNN's on Hopper, from torch 2.11 on). Its ratios say nothing about nanoGPT's own speed, which "
    "`rush bench models gpt2-124m gpt2-124m-biases` measures.\n"
)


def _models(results: Path) -> list[str]:
    parts = []
    kernels = [read_kernels(path) for path in sorted(results.glob("*/kernels.json"))]
    for where, rows in combined(results).items():
        parts.append(
            f"Complete runs on {where}; one command measured both our recipe and its baseline. {NOTE}"
        )
        head = (
            "workload",
            "baseline",
            "ours",
            "ratio (95 %)",
            "target",
            "peak memory",
            "of the limit",
            "`run.deterministic`",
            "parity",
            "verdict",
            "records",
        )
        costs = deterministic_costs(results)
        rates = attention_rates(one for one in kernels if machine_kind(one["machine"]) == where)
        if any(row.former_baseline for row in rows):
            parts.append(FORMER)
        parts.append(
            _markdown(
                head,
                [
                    (
                        *table(row.record)[0][:6],
                        of_limit(row, rates),
                        costs.get(row.ours["rung"]["name"], "–"),
                        *row.judged(),
                        _row_links(row, results),
                    )
                    for row in rows
                ],
            )
        )
    for where, found in _bymachine_kind(_longest(results)).items():
        parts.append(f"The longest sequence that fits, on {where}:\n")
        columns = ("workload", "limit", "reached", "speed there", "peak memory", "published by others")
        parts.append(_markdown(columns, [row for _, record in found for row in lengths(record)]))
    return parts


def of_limit(row: CombinedRecord, rates: Sequence[AttentionRate]) -> str:
    """The share of the limit as a word; a dash for conversations and pairs, whose lengths no record holds."""
    speed, ceilings = row.ours["rung"].get("tokens_per_s"), row.record.get("ceilings")
    if not speed or not ceilings:
        return "–"
    recipe = parse(tomllib.loads(row.ours["rung"]["recipe"]))
    if recipe.objective.kind != "lm":
        return "–"
    target = target_here(Machine.from_dict(row.record["machine"]), ceilings)
    share = share_of_limit(spec_of(recipe, target.kind), target, rates, speed["median"])
    return "–" if share is None else f"{100 * share:.0f} %"


def deterministic_costs(results: Path) -> dict[str, str]:
    """By recipe, the change of its tokens per second with `run.deterministic`, with its interval and its record."""
    found = {}
    for path in sorted(results.glob(f"*/*{COST}")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "plain" in record:
            plain, exact = ([record[key]["samples"]] for key in ("plain", "deterministic"))
            found_ratio = ratio_of_medians(plain, exact, Floor(0.0, 0))
            change, low, high = (
                f"{100 * (ratio - 1):+.1f}"
                for ratio in (found_ratio.ratio, found_ratio.low, found_ratio.high)
            )
            found[path.name.removesuffix(COST)] = f"[{change} % ({low} to {high})]({_link(path, results)})"
    return found


def _longest(results: Path) -> list[tuple[Path, ModelRecord]]:
    """The searches for the longest sequence that came to their end: what came last is not yet the longest."""
    found = [
        (path, record) for path, record in model_records(results) if record["finished"] and lengths(record)
    ]
    return sorted(found, key=lambda item: item[1]["started"])


def _kernels(results: Path) -> list[str]:
    parts = []
    read = [(path, read_kernels(path)) for path in sorted(results.glob("*/kernels.json"))]
    in_order = sorted(read, key=lambda item: item[1]["started"])
    for where, found in _bymachine_kind(in_order).items():
        rows: list[Sequence[str]] = []
        words = []
        for op in sorted({op["op"] for _, record in found for op in record["ops"]}):
            measured = [(path, one) for path, record in found for one in record["ops"] if one["op"] == op]
            same = [(path, one) for path, one in measured if one.get("key") == measured[-1][1].get("key")]
            for target, paths in kernel_targets(same):
                words.append(target_word(target))
                links = _links(paths, results)
                rows.append(
                    (
                        op,
                        target["size"],
                        PASS_WORDS[target["step"]],
                        target["what"],
                        reached_words(target),
                        words[-1],
                        links,
                    )
                )
        if rows:
            parts.append(
                f"Kernels on {where}: {reached_of(words)}.\n\n<details><summary>Every kernel, size and pass</summary>\n"
            )
            parts.append(
                _markdown(("kernel", "size", "pass", "target", "reached", "verdict", "records"), rows)
            )
            parts.append("</details>\n")
    return parts


def pairs(results: Path) -> dict[str, list[BaselinePair]]:
    """By machine, what was asked for and measured, for the picture."""
    found: dict[str, list[BaselinePair]] = {}
    for where, rows in combined(results).items():
        for row in rows:
            rung, target, rival = row.ours["rung"], dict(row.ours["target"]), row.work["rival"]
            if target.get("reached") is None:
                continue
            peaks = [side.get("peak_memory_bytes") for side in (rung, rival)]
            memory = peaks[0] / peaks[1] if peaks[0] and peaks[1] else None
            low, high = target["ci95"]
            verdict = "former baseline" if row.former_baseline else _short(target)
            found.setdefault(where, []).append(
                BaselinePair(
                    title_of(row.work["name"], rung["name"]),
                    rival["title"],
                    target["reached"],
                    low,
                    high,
                    target["at_least"],
                    memory,
                    verdict,
                    verdict == "reached",
                )
            )
    return found


def _short(target: Mapping[str, Any]) -> str:
    """One verdict of speed and memory: the worse of the two."""
    speed = target_word(target)
    memory = target_word(target["memory"]) if "memory" in target else "reached"
    if memory == "missed" and speed != "missed":
        return "memory missed"
    return speed if memory != CLOSE_CALL or speed != "reached" else CLOSE_CALL


def _bymachine_kind(records: Sequence[tuple[Path, Any]]) -> dict[str, list[tuple[Path, Any]]]:
    found: dict[str, list[tuple[Path, Any]]] = {}
    for path, record in records:
        found.setdefault(machine_kind(record["machine"]), []).append((path, record))
    return found


def _row_links(row: CombinedRecord, results: Path) -> str:
    former = f"; former recipes {_links(row.former, results)}" if row.former else ""
    return _links(row.paths, results) + former


def _links(paths: Sequence[Path], results: Path) -> str:
    return ", ".join(f"[{at}]({_link(path, results)})" for at, path in enumerate(paths, start=1))


def _link(path: Path, results: Path) -> str:
    """From the page in docs/."""
    return f"../{results.name}/{path.parent.name}/{path.name}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def put(page: str, text: str) -> str:
    """The page with the text between its marks; a ValueError where it has none."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"{PAGE.name} needs one line {BEGIN} and one line {END}.")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}{END}{after}"


def main() -> None:
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), performance(ROOT / "results")), encoding="utf-8")
    PICTURE.write_text(drawn(ROOT / "results"), encoding="utf-8")
    write_picture(LADDER, LADDER_PICTURE)


def drawn(results: Path) -> str:
    """The picture, of the machine with the most pairs."""
    where, most = max(pairs(results).items(), key=lambda item: len(item[1]))
    return in_terms_of_now(beside_picture(f"Beside the baselines on {where}", most) + "\n")


if __name__ == "__main__":
    main()
