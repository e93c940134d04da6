"""The pictures say what the numbers say: lengths, places and scales, measured in the drawn elements."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rush.report import bars, curves, roofline, svg
from rush.report.ladder import BatchPointView, LadderView, MeasureView, ParityView, RungView, read_ladder
from tests.report import made_up


def drawn(markup: object) -> ET.Element:
    assert markup is not None
    return ET.fromstring(str(markup))


def pick(root: ET.Element, name: str, cls: str) -> list[ET.Element]:
    return [e for e in root.iter(name) if set(cls.split()) <= set(e.get("class", "").split())]


def per_cent(element: ET.Element, attribute: str) -> float:
    value = element.get(attribute, "")
    assert value.endswith("%"), f"{attribute}={value}"
    return float(value[:-1])


@pytest.fixture(scope="module")
def ladder(tmp_path_factory: pytest.TempPathFactory) -> LadderView:
    return read_ladder(made_up.write(tmp_path_factory.mktemp("ladder"), made_up.made_up_ladder()))


def test_bars_are_as_long_as_their_values_and_begin_at_zero(ladder: LadderView) -> None:
    top = bars.top_speed([rung.speed for rung in ladder.rungs])
    assert top is not None
    measured = [rung.speed for rung in ladder.rungs if rung.speed]
    for speed in measured:
        bar = pick(drawn(bars.speed_bar(speed, top, "x")), "rect", "bar")[0]
        assert bar.get("x") == "0"
        assert per_cent(bar, "width") == pytest.approx(speed.median / top * bars.SPEED_FULL, abs=0.006)


def test_whiskers_end_at_the_interval(ladder: LadderView) -> None:
    measure = MeasureView(100.0, 80.0, 130.0, 5)
    lines = pick(drawn(bars.speed_bar(measure, 130.0, "x")), "line", "whisker")
    unit = bars.SPEED_FULL / 130
    across, low_cap, high_cap = lines
    assert per_cent(across, "x1") == pytest.approx(80 * unit, abs=0.006)
    assert per_cent(across, "x2") == pytest.approx(130 * unit, abs=0.006)
    assert per_cent(low_cap, "x1") == per_cent(across, "x1")
    assert per_cent(high_cap, "x1") == per_cent(across, "x2")


def test_the_longest_whisker_decides_the_scale_so_that_nothing_is_cut() -> None:
    assert bars.top_speed([MeasureView(10.0), None, MeasureView(9.0, 8.0, 14.0)]) == 14.0
    assert bars.top_speed([None]) is None
    assert bars.speed_bar(None, None, "x") is None


def test_memory_bars_are_as_long_as_their_bytes() -> None:
    half = drawn(bars.memory_bar(20e9, 40e9, "x"))
    assert per_cent(pick(half, "rect", "memory")[0], "width") == pytest.approx(bars.MEMORY_FULL / 2)


def test_the_stacked_bar_fills_its_length_with_shares_in_order(ladder: LadderView) -> None:
    rung = ladder.rungs[0]
    total = sum(rung.breakdown.values())
    for full in (100.0, 37.0):
        parts = pick(drawn(bars.breakdown_bar(rung, full)), "rect", "part")
        kinds = [part.get("class", "").split()[1] for part in parts]
        assert kinds == [kind for kind in bars.CLASSES if kind in rung.breakdown]
        x = 0.0
        for part, kind in zip(parts, kinds, strict=True):
            assert per_cent(part, "x") == pytest.approx(x, abs=0.011)
            assert per_cent(part, "width") == pytest.approx(rung.breakdown[kind] / total * full, abs=0.006)
            x += rung.breakdown[kind] / total * full


def test_time_of_an_unknown_class_counts_as_other(ladder: LadderView) -> None:
    parts = bars.segments({"matmul": 3.0, "telepathy": 1.0})
    assert [(part.kind, part.share) for part in parts] == [("matmul", 0.75), ("other", 0.25)]
    assert bars.segments({}) == []


def test_time_per_token_compares_steps_of_different_size(ladder: LadderView) -> None:
    rung = replace(ladder.rungs[0], breakdown={"matmul": 50.0, "idle": 50.0}, step_tokens=2000)
    assert bars.ms_per_thousand(rung) == pytest.approx(50.0)
    assert bars.ms_per_thousand(replace(rung, step_tokens=None)) is None


def test_claim_and_finding_are_drawn_at_their_ratios_on_a_logarithmic_axis() -> None:
    scale = bars.claim_scale([0.5, 4.0])
    row = drawn(bars.claim_row(4.0, 2.0, 1.9, 2.1, scale, "x"))
    one, two, four = (scale(v) for v in (1.0, 2.0, 4.0))
    assert two - one == pytest.approx(four - two)
    assert per_cent(pick(row, "circle", "found")[0], "cx") == pytest.approx(two, abs=0.006)
    assert per_cent(pick(row, "svg", "over")[0], "x") == pytest.approx(four, abs=0.006)
    assert per_cent(pick(row, "line", "zero")[0], "x1") == pytest.approx(one, abs=0.006)


def test_the_batch_curve_goes_through_its_medians_and_marks_what_did_not_run() -> None:
    points = [
        BatchPointView(1, "ok", MeasureView(100.0, 90.0, 110.0), 2.0**30),
        BatchPointView(4, "ok", MeasureView(200.0, 190.0, 210.0), 2.0**31),
        BatchPointView(16, "out_of_memory", None, None),
    ]
    pictures = curves.batch_curves(points, 4)
    assert pictures is not None
    for picture in map(drawn, pictures):
        first, second = pick(picture, "circle", "dot speed")
        assert len(pick(picture, "path", "cross")) == 1
        assert len(pick(picture, "line", "stop")) == 1
        zero = float(pick(picture, "line", "grid")[0].get("y1", "nan"))
        heights = [zero - float(dot.get("cy", "nan")) for dot in (first, second)]
        assert heights[1] == pytest.approx(2 * heights[0], rel=0.001)
        x = [float(dot.get("cx", "nan")) for dot in (first, second)]
        end = float(pick(picture, "line", "axis")[-1].get("x1", "nan"))
        assert end - x[1] == pytest.approx(x[1] - x[0], abs=0.02)
        bars_drawn = [float(bar.get("height", "nan")) for bar in pick(picture, "rect", "memory")]
        assert bars_drawn[1] == pytest.approx(2 * bars_drawn[0], rel=0.01)
    assert curves.batch_curves([points[2]], None) is None
    assert curves.batch_curves([], None) is None


def _parity(losses: tuple[float | None, ...], reference: tuple[float | None, ...]) -> ParityView:
    return ParityView("equal", losses=losses, reference_losses=reference)


def _points(d: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", d)]


def test_equal_losses_lie_on_top_of_each_other_and_their_difference_is_flat() -> None:
    values = (5.0, 4.0, 3.5, 3.0)
    picture = drawn(curves.loss_overlay(_parity(values, values), "x"))
    assert pick(picture, "path", "curve rung")[0].get("d") == pick(picture, "path", "curve reference")[0].get(
        "d"
    )
    flat = {y for _, y in _points(pick(picture, "path", "difference")[0].get("d", ""))}
    assert len(flat) == 1


def test_a_small_difference_of_losses_is_drawn_on_its_own_scale() -> None:
    reference = (5.0, 4.0, 3.5, 3.0)
    losses = (5.0, 4.0, 3.5 + 1e-5, 3.0 - 1e-5)
    picture = drawn(curves.loss_overlay(_parity(losses, reference), "x"))
    ys = [y for _, y in _points(pick(picture, "path", "difference")[0].get("d", ""))]
    assert max(ys) - min(ys) > 30


def test_a_loss_that_is_no_number_breaks_the_line_instead_of_bending_it() -> None:
    losses = (5.0, 4.0, None, 3.0, 2.9)
    picture = drawn(curves.loss_overlay(_parity(losses, (5.0, 4.0, 3.5, 3.0, 2.9)), "x"))
    d = pick(picture, "path", "curve rung")[0].get("d", "")
    assert d.count("M") == 2
    assert len(_points(d)) == 4
    assert curves.loss_overlay(_parity((1.0,), (1.0,)), "x") is None
    assert curves.loss_overlay(_parity((), ()), "x") is None


def test_a_rung_on_the_roofline_is_drawn_at_its_numbers(ladder: LadderView) -> None:
    rung = replace(
        ladder.rungs[0], speed=MeasureView(1000.0), flops_per_token=1e9, step_tokens=4096, micro=1, sequence=2048,
        peak_memory_bytes=1e9,
    )  # fmt: skip
    (place,) = roofline.positions(replace(ladder, rungs=(rung,)))
    assert place.flops == 1e12
    # Two micro batches, each writing and reading one GB.
    assert place.intensity == pytest.approx(1e9 * 4096 / 4e9)
    assert place.estimated
    (known,) = roofline.positions(replace(ladder, rungs=(replace(rung, bytes_per_step=8e9),)))
    assert known.intensity == pytest.approx(1e9 * 4096 / 8e9)
    assert not known.estimated


def test_the_roofs_are_at_the_measured_rates_and_the_slope_at_the_bandwidth(ladder: LadderView) -> None:
    simple = replace(ladder, matmul={"float32": 1e12, "bfloat16": 1e13}, copy_bytes_per_s=1e11)
    pictures = roofline.rooflines(simple)
    assert pictures is not None
    slope, *roofs = [_points(e.get("d", "")) for e in pick(drawn(pictures[0]), "path", "roof")]
    high, low = roofs
    assert high[0][1] == high[1][1]
    # The slope ends where the highest roof begins: at rate / bandwidth.
    assert slope[1] == pytest.approx(high[0], abs=0.02)
    # On logarithmic axes a slope of one decade per decade passes the corner of the lower roof too.
    part = (low[0][0] - slope[0][0]) / (slope[1][0] - slope[0][0])
    assert slope[0][1] + part * (slope[1][1] - slope[0][1]) == pytest.approx(low[0][1], abs=0.1)


def test_there_is_no_roofline_without_a_roof_or_without_a_rung(ladder: LadderView) -> None:
    assert roofline.rooflines(replace(ladder, matmul={}, copy_bytes_per_s=None)) is None
    assert roofline.rooflines(replace(ladder, rungs=())) is None


def test_every_sample_is_a_dot_in_the_line_of_its_process(ladder: LadderView) -> None:
    measure = MeasureView(2.0, 1.5, 2.5, 4, (1.0, 2.0, 2.0, 3.0), ((1.0, 2.0), (2.0, 3.0)))
    dots = pick(drawn(curves.sample_strip(measure, "x")), "circle", "sample")
    places = [(float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))) for dot in dots]
    assert len(places) == 4
    assert places[1][0] == places[2][0]
    assert places[0][1] == places[1][1] != places[2][1]
    assert places[3][0] - places[2][0] == pytest.approx(places[1][0] - places[0][0], abs=0.02)
    assert curves.sample_strip(MeasureView(2.0), "x") is None


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(1, 10))
def test_ticks_are_round_inside_and_not_too_many(low: float, length: float, about: int) -> None:
    high = low + length
    if not low < high or length < abs(low) * 1e-6:
        return
    found = svg.ticks(low, high, about)
    assert len(found) <= 2 * about + 2
    slack = length * 1e-6
    assert all(low - slack <= value <= high + slack for value in found)
    steps = {f"{b - a:.3g}" for a, b in pairwise(found)}
    assert len(steps) <= 1


@given(st.floats(1e-200, 1e200), st.floats(1.01, 1e50))
def test_decades_are_powers_of_ten_inside_the_range(low: float, factor: float) -> None:
    found = svg.decades(low, low * factor)
    assert len(found) <= 8
    assert all(low * 0.999 <= value <= low * factor * 1.001 for value in found)
    assert all(math.log10(value) == pytest.approx(round(math.log10(value)), abs=1e-9) for value in found)


def test_text_in_a_picture_is_text() -> None:
    element = svg.tag("text", "<script>&\"'", class_="a", aria_label='"><script>')
    assert "<script>" not in str(element)
    parsed = ET.fromstring(str(element))
    assert parsed.text == "<script>&\"'"
    assert parsed.get("aria-label") == '"><script>'


@pytest.mark.parametrize("scale", [1e-250, 1e-3, 1.0, 1e12, 1e280])
def test_pictures_of_huge_and_tiny_numbers_have_finite_coordinates(ladder: LadderView, scale: float) -> None:
    rungs: tuple[RungView, ...] = tuple(
        replace(
            rung,
            speed=MeasureView(rung.speed.median * scale, rung.speed.median * scale * 0.9, None, 1, (scale,)),
            peak_memory_bytes=scale,
        )
        for rung in ladder.rungs
        if rung.speed
    )
    top = bars.top_speed([rung.speed for rung in rungs])
    for rung in rungs:
        assert rung.speed is not None
        drawn(bars.speed_bar(rung.speed, top, rung.title))
        drawn(bars.memory_bar(rung.peak_memory_bytes, scale, rung.title))
        drawn(curves.sample_strip(rung.speed, rung.title))
    for picture in roofline.rooflines(replace(ladder, rungs=rungs)) or ():
        drawn(picture)
    points = [BatchPointView(at, "ok", MeasureView(scale * at), scale) for at in (1, 2, 4)]
    for picture in curves.batch_curves(points, None) or ():
        drawn(picture)
