"""Write what docs/several-devices.md shows from the records in results/: `python scripts/several_devices_page.py`.

Between two marks stand a chart's picture and sentences, from `results/plan-charts/NAME/plan-chart.json`, or what a study
found, from its `scale.json`, `ladder.json` or `race.json`. Where a record is not there, the page says so: a study that
nobody has run yet is a sentence made from its absence. Nothing is typed by hand.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.records.ladder import LADDER  # noqa: E402
from rush.records.plan_chart import CHARTS, PLAN_CHART  # noqa: E402
from rush.records.race import RACE  # noqa: E402
from rush.records.scaling import SCALE, PointRecord, ScaleRecord  # noqa: E402
from rush.report import formatting, headlines  # noqa: E402
from rush.report.batch_view import batch_panels, batch_view, batch_words  # noqa: E402
from rush.report.ladder import read_ladder  # noqa: E402
from rush.report.panel_file import standalone  # noqa: E402
from rush.report.plan_chart import chart_picture  # noqa: E402
from rush.report.plan_words import sentences  # noqa: E402
from rush.report.race_words import headline as race_headline  # noqa: E402
from rush.report.scaling_words import headline, warnings  # noqa: E402

PAGE = ROOT / "docs" / "several-devices.md"
PICTURES = "pictures"
BATCH_LADDERS = {"80 GB": "llama-3.2-1b-80gb", "24 GB": "llama-3.2-1b-24gb"}
CPU = "scale-cpu"
"""Folders of studies on CPU ranks begin so."""
GPU = "studies-8-gpus"


def pieces(results: Path) -> dict[str, str]:
    """What stands between each pair of marks."""
    found = {f"chart {name}": _chart(results, name) for name in CHARTS}
    found["chart batch"] += "\n" + _batch_ladders(results)
    found["studies cpu"] = _studies(sorted(results.glob(f"{CPU}*/scale.json")), CPU)
    found["studies gpu"] = _studies(sorted(results.glob(f"{GPU}/*/scale.json")), GPU) + _races(results)
    return found


def pictures(results: Path) -> dict[str, str]:
    """The pictures of the page, by their name beside it."""
    records = {name: results / "plan-charts" / name for name in CHARTS}
    drawn = {
        f"{PICTURES}/several-devices-{name}.svg": chart_picture(PLAN_CHART.read(folder))
        for name, folder in records.items()
    }
    for name in BATCH_LADDERS.values():
        for record in _ladders(results, name):
            view = read_ladder(record)
            if found := batch_view(view):
                where = f"measured: {headlines.machine_name(view.machine)}"
                drawn[f"{PICTURES}/several-devices-{name}.svg"] = (
                    standalone(view.name, where, batch_panels(found)) + "\n"
                )
    return drawn


def _chart(results: Path, name: str) -> str:
    record = PLAN_CHART.read(results / "plan-charts" / name)
    lines = [f"![{record['title']}, planned]({PICTURES}/several-devices-{name}.svg)", ""]
    lines += [_item(sentence) for sentence in sentences(record)]
    link = f"[All numbers](../results/plan-charts/{name}/plan-chart.json)"
    return "\n".join([*lines, "", f"{link}, by `{record['command']}`.", ""])


def _item(sentence: str) -> str:
    return textwrap.fill(sentence, 118, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _batch_ladders(results: Path) -> str:
    """What the ladders under these limits found, or that nobody has climbed them yet."""
    lines = []
    for limit, name in BATCH_LADDERS.items():
        records = _ladders(results, name)
        if not records:
            lines.append(
                _item(f"Measured under {limit}: nothing yet. No record of the ladder {name} is in results/.")
            )
        for record in records:
            LADDER.read(record)
            view = read_ladder(record)
            found = batch_view(view)
            words = batch_words(found) if found else [headlines.headline(view)]
            lines += [_item(f"Measured under {limit} ({_place(record)}): {sentence}") for sentence in words]
            lines += (
                ["", f"![Measured under {limit}]({PICTURES}/several-devices-{name}.svg)", ""] if found else []
            )
    return "\n".join([*lines, ""])


def _ladders(results: Path, name: str) -> list[Path]:
    """The newest place where this ladder was measured, a folder of its own or one of the studies on 8 GPUs."""
    return sorted([*results.glob(f"{name}*/ladder.json"), *results.glob(f"{GPU}/{name}*/ladder.json")])[-1:]


def _studies(records: list[Path], kind: str) -> str:
    if not records:
        return f"Nothing yet: no record of a study is in `results/{kind}`.\n"
    lines: list[str] = []
    for path in records:
        record = SCALE.read(path)
        lines += [f"**{path.parent.name}**: {record['name']} on {', '.join(map(str, record['devices']))} devices ({headlines.machine_name(record['machine'])}).", ""]  # fmt: skip
        lines += [_item(sentence) for sentence in [headline(record), *warnings(record)]]
        lines += ["", *_table(record), "", f"[Record]({_place(path)})", ""]
    return "\n".join(lines)


def _races(results: Path) -> str:
    lines: list[str] = []
    for path in sorted(results.glob(f"{GPU}/*/race.json")):
        record = RACE.read(path)
        lines += [
            "",
            f"**{path.parent.name}**",
            "",
            _item(race_headline(record)),
            "",
            f"[Record]({_place(path)})",
            "",
        ]
    return "\n".join(lines)


def _table(record: ScaleRecord) -> list[str]:
    head = "| layout | devices | scaling | verdict | tokens/s | efficiency | memory of a rank | loss differs by |"
    rows = ["| --- " * 8 + "|"]
    for point in record["points"]:
        speed, memory = point["tokens_per_s"], point["memory_bytes"]
        shares = ", ".join(
            f"{kind} {formatting.share(found['ratio'])} ({formatting.share(found['ci95'][0])} to {formatting.share(found['ci95'][1])})"
            for kind, found in point["efficiency"].items()
        )
        cells = (
            point["layout"],
            str(point["devices"]),
            " and ".join(point["scalings"]),
            point["verdict"],
            formatting.si(speed["median"]) if speed else formatting.MISSING,
            shares or formatting.MISSING,
            formatting.size(float(max(memory))) if memory else formatting.MISSING,
            _gap(point),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return [head, *rows]


def _gap(point: PointRecord) -> str:
    """The largest relative difference of the loss from one rank's."""
    parity = point["parity"] or {}
    pairs = list(zip(parity.get("losses") or [], parity.get("reference_losses") or [], strict=False))
    gaps = [abs(a - b) / abs(b) for a, b in pairs if a is not None and b]
    return f"{max(gaps):.1e}" if gaps and point["devices"] > 1 else formatting.MISSING


def _place(path: Path) -> str:
    return f"../{path.relative_to(ROOT).as_posix()}" if path.is_relative_to(ROOT) else path.name


def written(page: str, found: dict[str, str]) -> str:
    """The page with every piece between its marks."""
    for name, text in found.items():
        mark = name.replace(" ", "_")
        marks = re.compile(f"(<!-- {mark}: begin -->\n).*?(<!-- {mark}: end -->)", re.DOTALL)
        assert marks.search(page), f"the page has no place for {name}"

        def between(match: re.Match[str], text: str = text) -> str:
            return f"{match[1]}\n{text}\n{match[2]}"

        page = marks.sub(between, page)
    return page


def main(
    write: Callable[[Path, str], object] = lambda path, text: path.write_text(text, encoding="utf-8"),
) -> None:
    results = ROOT / "results"
    for name, text in pictures(results).items():
        write(PAGE.parent / name, text)
    write(PAGE, written(PAGE.read_text(encoding="utf-8"), pieces(results)))


if __name__ == "__main__":
    main()
