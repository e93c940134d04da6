"""Any record is read and drawn, or refused in one message; a page never carries a stranger's script."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rush.files import parse_json
from rush.hardware import Machine
from rush.plan.measured_cases import read_findings, read_overflows
from rush.report import write_comparison, write_picture, write_report
from rush.report.kernels import write_kernel_report
from rush.report.models import write_model_report
from rush.report.race import write_race_report
from rush.report.redraw import redraw
from rush.report.scaling import write_scale_report
from rush.report.tune import write_tune_report
from rush.tune.earlier import remembered
from rush.watch.server import Watch
from tests.explain import made_up
from tests.fuzz.harness import cases, fuzz, run_command
from tests.report import made_up_race

RESULTS = Path(__file__).resolve().parents[2] / "results"
SCRIPT = "<script>alert"
Use = Callable[[Path, Path], object]


def thinned(tree: Any) -> Any:
    """A record with fewer rungs and samples: it is drawn in a moment, and more of it is mutated."""
    if isinstance(tree, dict):
        return {key: thinned(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [thinned(value) for value in tree[:3]]
    return tree


def seeds(pattern: str, most: int = 2) -> list[bytes]:
    found = sorted(RESULTS.glob(pattern), key=lambda path: path.stat().st_size)[:most]
    assert found, pattern
    return [json.dumps(whole(json.loads(path.read_text()))).encode() for path in found]


def whole(record: Any) -> Any:
    """Thinned; medians of thinned samples are still inside their intervals, which are kept as recorded."""
    return thinned(record)


def ladder_uses(record: Path, page: Path) -> None:
    write_report(record, page)
    write_picture(record, page.with_suffix(".svg"))


def race_uses(record: Path, page: Path) -> None:
    write_race_report(record, page)
    run_command(["report", str(record.parent), "--out", str(page)])


def charts() -> list[bytes]:
    """The smallest ones, whole: a picture of a chart needs all of its points."""
    found = sorted(RESULTS.glob("plan-charts/*/plan-chart.json"), key=lambda path: path.stat().st_size)
    return [path.read_bytes() for path in found[:4]]


def charted(record: Path, page: Path) -> None:
    """A chart of plans, drawn again."""
    redraw(record.parent, page)


def compared(record: Path, page: Path) -> None:
    write_comparison([record, record], page)
    run_command(["compare", str(record.parent), str(record), "--out", str(page)])
    run_command(["compare", str(record.parent), str(record.parent), "--json"])


def planned(record: Path, page: Path) -> None:
    """What the planner and the tuner learn from others' records."""
    read_findings(record.parent.parent)
    read_overflows(record.parent.parent)
    remembered("0" * 16, "tiny", record.parent.parent)


def explained(record: Path, page: Path) -> None:
    run_command(["explain", "--from", str(record), "--out", str(page.parent / "explained")])
    shutil.copy(page.parent / "explained" / "report.html", page)


def watched(record: Path, page: Path) -> None:
    """A run's page, and what the live page gets of it."""
    watch = Watch([record.parent.parent])
    found = watch.answer({"run": [f"0/{record.parent.name}"]})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    redraw(record.parent, page)


def first_lines(pattern: str, most: int = 40) -> list[bytes]:
    found = sorted(RESULTS.glob(pattern))
    return [b"".join(path.read_bytes().splitlines(keepends=True)[:most]) for path in found]


KINDS: dict[str, tuple[str, Callable[[], list[bytes]], Use]] = {
    "ladder": ("ladder.json", lambda: seeds("**/ladder.json", 3), ladder_uses),
    "compare": ("ladder.json", lambda: seeds("**/ladder.json", 2), compared),
    "planned": ("ladder.json", lambda: seeds("**/ladder.json", 2), planned),
    "planned-models": ("models.json", lambda: seeds("*/models.json", 4), planned),
    "planned-tune": ("tune.json", lambda: seeds("*/tune.json", 2), planned),
    "models": ("models.json", lambda: seeds("*/models.json", 4), write_model_report),
    "kernels": ("kernels.json", lambda: seeds("*/kernels.json", 1), write_kernel_report),
    "scale": ("scale.json", lambda: seeds("*/scale.json", 1), write_scale_report),
    "race": ("race.json", lambda: [json.dumps(made_up_race.race()).encode()], race_uses),
    "tune": ("tune.json", lambda: seeds("*/tune.json", 3), write_tune_report),
    "plan-chart": ("plan-chart.json", charts, charted),
    "run": ("metrics.jsonl", lambda: first_lines("**/metrics.jsonl"), watched),
    "explain": ("explain.json", lambda: [explanation(name) for name in ("attention", "batch", "memory")], explained),
}  # fmt: skip


def explanation(topic: str) -> bytes:
    return json.dumps(made_up.record(topic, getattr(made_up, topic)())).encode()


@pytest.mark.parametrize("kind", KINDS)
@cases(0.012)
def test_any_record_is_drawn_or_refused(kind: str, count: int, tmp_path: Path) -> None:
    name, made, use = KINDS[kind]
    record, page = tmp_path / "study" / name, tmp_path / "report.html"
    record.parent.mkdir()

    def read(content: bytes) -> None:
        record.write_bytes(content)
        page.unlink(missing_ok=True)
        use(record, page)
        if page.exists():
            assert SCRIPT not in page.read_text(encoding="utf-8"), "a stranger's script is on the page"

    fuzz(f"record/{kind}", read, made(), count)


@cases(0.02)
def test_any_machine_record(count: int) -> None:
    def read(content: bytes) -> None:
        try:
            tree = parse_json(content)
        except ValueError:
            return
        machine = Machine.from_dict(tree)
        assert machine.summary()
        assert len(machine.fingerprint()) == 16
        assert Machine.from_dict(machine.to_dict()) == machine

    fuzz(
        "record/machine", read, [path.read_bytes() for path in sorted(RESULTS.glob("*/machine.json"))], count
    )
