"""Draw every page of results/ again from the record beside it: `python scripts/redraw_results.py`.

Records stay as they were written. Pages follow the current rules: what they call a gain, a close call, or nothing that can
be told is read from the recorded intervals. Run it when a rule or a sentence changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.report import write_report  # noqa: E402
from rush.report.kernels import write_kernel_report  # noqa: E402
from rush.report.models import write_model_report  # noqa: E402
from rush.report.scaling import write_scale_report  # noqa: E402
from rush.report.tune import write_tune_report  # noqa: E402

DRAW: dict[str, Callable[[Path, Path], None]] = {
    "ladder.json": write_report,
    "scale.json": write_scale_report,
    "tune.json": write_tune_report,
    "models.json": write_model_report,
    "kernels.json": write_kernel_report,
}


def redraw(results: Path) -> list[Path]:
    """Every `report.html` that stands beside a record, drawn again; which ones."""
    found = []
    for page in sorted(results.rglob("report.html")):
        for name, draw in DRAW.items():
            if (page.parent / name).exists():
                draw(page.parent / name, page)
                found.append(page)
    return found


if __name__ == "__main__":
    redraw(ROOT / "results")
