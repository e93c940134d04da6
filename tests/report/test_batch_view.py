"""A ladder over batches: drawn only where it is one, crosses for what ran out of memory, verdicts by the lab's rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rush.report.batch_view import PLAIN, BatchView, batch_panels, batch_view, batch_words, stops_paying
from rush.report.ladder import _LADDER, LadderView, read_ladder
from rush.report.page import report_page

RESULTS = Path(__file__).parents[2] / "results"


def rung(micro: int, speed: float | None, saver: str = "", noise: float = 0.01) -> dict[str, Any]:
    techniques = ["amp_bf16", *([saver] if saver else [])]
    measured = (
        {"median": speed, "ci95": [speed * (1 - noise), speed * (1 + noise)], "samples": [speed]}
        if speed
        else None
    )
    return {
        "name": f"{saver or 'plain'} {micro}", "title": "", "status": "ok" if speed else "out_of_memory",
        "verdict": "equal and faster" if speed else "out of memory", "techniques": techniques, "micro": micro,
        "sequence": 2048, "tokens_per_s": measured, "peak_memory_bytes": 2**30 * micro if speed else None,
        "recipe": "", "gain": None, "total_gain": None, "evidence": [], "parity": None, "reason": None,
    }  # fmt: skip


def ladder(*rungs: dict[str, Any], device: str = "cuda", limit: str = "24") -> LadderView:
    record = {
        "format": 1, "name": "made up", "view": "cumulative", "started": "2026-11-18T12:00:00+00:00",
        "machine": {"device": device}, "base": {"recipe": f"[run]\nmemory_limit_gb = {limit}\n"}, "rungs": list(rungs),
    }  # fmt: skip
    return _LADDER.validate_python(record)


PAYS = [
    rung(1, 100),
    rung(2, 150),
    rung(4, None),
    rung(2, 145, "checkpoint_full"),
    rung(4, 190, "checkpoint_full"),
]


def found(*rungs: dict[str, Any], **keys: Any) -> BatchView:
    view = batch_view(ladder(*rungs, **keys))
    assert view is not None
    return view


def test_checkpointing_that_pays_by_its_batch_is_said_with_the_limit() -> None:
    words = " ".join(batch_words(found(*PAYS)))
    assert "Under 24 GB the fastest batch without checkpointing is 2 rows" in words
    assert "checkpoint_full with 4 rows: ×1.27" in words
    assert "it pays by the batch it allows" in words
    assert "no checkpointing: 4 rows ran out of memory" in words


@pytest.mark.parametrize(
    ("speed", "noise", "words"),
    [
        (120.0, 0.01, "it does not pay"),
        (150.0, 0.002, "it gains nothing"),
        (155.0, 0.2, "cannot tell whether"),
    ],
)
def test_whether_it_pays_is_judged_by_the_interval(speed: float, noise: float, words: str) -> None:
    rungs = [*PAYS[:3], rung(4, speed, "checkpoint_full", noise)]
    if noise < 0.01:
        rungs = [rung(1, 100), rung(2, 150, noise=noise), *rungs[2:]]
    assert words in " ".join(batch_words(found(*rungs)))


def test_a_faster_rung_that_learns_something_else_does_not_pay() -> None:
    different = rung(4, 300, "checkpoint_full") | {"verdict": "faster but different"}
    words = " ".join(batch_words(found(*PAYS[:4], different)))
    assert "checkpoint_full with 2 rows" in words


def test_a_doubling_counts_only_beyond_noise() -> None:
    view = found(rung(1, 100), rung(2, 150), rung(4, 151), rung(2, 90, "checkpoint_full"))
    assert stops_paying(view.series[PLAIN]) == 2
    assert "from 2 to 4 rows the gain is no longer beyond noise" in " ".join(batch_words(view))
    assert stops_paying(found(*PAYS).series[PLAIN]) is None


def test_the_limit_is_a_line_where_peaks_are_held_against_it() -> None:
    speed, memory = batch_panels(found(*PAYS))
    assert [level.label for level in memory.levels] == ["limit, 24 GB"]  # type: ignore[union-attr]
    assert [line.style for line in speed.lines] == ["measured", "measured", "crosses"]  # type: ignore[union-attr]
    _, on_cpu = batch_panels(found(*PAYS, device="cpu"))
    assert not on_cpu.levels  # type: ignore[union-attr]


def test_ladders_that_are_no_curve_over_batches_get_no_such_section() -> None:
    assert batch_view(ladder(rung(1, 100), rung(2, 150), rung(4, 170))) is None  # nothing saves memory
    assert batch_view(ladder(rung(8, 100), rung(8, 90, "checkpoint_full"))) is None  # one batch
    for name in ("llama-3.2-1b-h200", "gpt2-124m-ladder-h200"):
        view = read_ladder(RESULTS / name / "ladder.json")
        assert 'id="checkpointing"' not in report_page(view)
    assert 'id="checkpointing"' in report_page(ladder(*PAYS))
