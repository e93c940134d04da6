"""Every record under results/ is read, comes back from the disk unchanged, and its page is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rush.records.kernels import read_kernels, write_kernels
from rush.records.ladder import read_ladder, write_ladder
from rush.records.models import read_models, write_models
from rush.records.race import read_race, write_race
from rush.records.scaling import read_scale, write_scale
from rush.records.tune import read_tune, write_tune
from rush.report import write_report
from rush.report.kernels import write_kernel_report
from rush.report.models import write_model_report
from rush.report.race import write_race_report
from rush.report.scaling import write_scale_report
from rush.report.tune import write_tune_report

RESULTS = Path(__file__).resolve().parents[2] / "results"
KINDS: dict[str, tuple[Callable[[Path], Any], Callable[[Path, Any], None], Callable[[Path, Path], None]]] = {
    "ladder": (read_ladder, write_ladder, write_report),
    "kernels": (read_kernels, write_kernels, write_kernel_report),
    "models": (read_models, write_models, write_model_report),
    "scale": (read_scale, write_scale, write_scale_report),
    "race": (read_race, write_race, write_race_report),
    "tune": (read_tune, write_tune, write_tune_report),
}
RECORDS = [path for path in sorted(RESULTS.rglob("*.json")) if path.stem.partition("-")[0] in KINDS]


def test_every_kind_of_record_is_among_the_results() -> None:
    assert {path.stem.partition("-")[0] for path in RECORDS} == set(KINDS)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: str(path.relative_to(RESULTS)))
def test_a_record_is_read_written_and_drawn(path: Path, tmp_path: Path) -> None:
    kind = path.stem.partition("-")[0]
    read, write, draw = KINDS[kind]
    record = read(path)
    write(tmp_path / f"{kind}.json", record)
    assert read(tmp_path / f"{kind}.json") == record
    draw(path, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
