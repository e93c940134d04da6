"""Numbers as a person reads them, against a table worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rush.report import formatting


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (5123.4, "5.12k"),
        (999.4, "999"),
        (999.95, "1.00k"),
        (999_400.0, "999k"),
        (999_600.0, "1.00M"),
        (71_400.0, "71.4k"),
        (9.894e14, "989T"),
        (9.9951e14, "1.00P"),
        (0.25, "0.25"),
        (0.0001234, "1.23e-4"),
        (1e250, "1e250"),
        (-71_400.0, "-71.4k"),
        (None, "–"),
    ],
)
def test_a_number_keeps_three_digits_and_gets_the_prefix_that_fits(
    value: float | None, expected: str
) -> None:
    assert formatting.si(value) == expected


@given(st.floats(1e-290, 1e290))
def test_what_is_printed_is_within_half_a_percent_of_what_was_measured(value: float) -> None:
    sizes = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    text = formatting.si(value)
    read = float(text.rstrip("kMGTP")) * sizes.get(text[-1], 1.0)
    assert math.isclose(read, value, rel_tol=0.0051)


def test_bytes_are_counted_in_binary_units() -> None:
    assert plain(formatting.size(61.7 * 2**30)) == "61.7 GiB"
    assert plain(formatting.size(2**20)) == "1.00 MiB"
    assert plain(formatting.size(12)) == "12.0 B"
    assert formatting.size(None) == "–"


def test_small_changes_are_per_cent_and_large_ones_ratios() -> None:
    said = [plain(formatting.change(value)) for value in (3.5, 1.75, 1.0004, 0.9996, 1.002, 0.6, None)]
    assert said == ["×3.50", "+75 %", "±0 %", "±0 %", "+0.2 %", "−40 %", "–"]


def test_an_axis_label_loses_only_the_zeros_behind_the_point() -> None:
    said = [formatting.tick(value) for value in (50_000.0, 100.0, 25_500.0, 1e12, 0.5, 20.5, 0.0)]
    assert said == ["50k", "100", "25.5k", "1T", "0.5", "20.5", "0"]


def test_times_are_shown_in_utc_and_other_text_unchanged() -> None:
    assert formatting.moment("2026-01-02T10:30:00+02:00") == "2 January 2026, 08:30 UTC"
    assert formatting.moment("yesterday") == "yesterday"
    assert formatting.moment(None) == "–"
    assert formatting.elapsed("2026-01-02T09:00:00+00:00", "2026-01-02T09:47:12+00:00") == "47 min 12 s"
    assert formatting.elapsed("2026-01-02T09:00:00+00:00", None) is None
    assert formatting.elapsed("2026-01-02T09:00:00+00:00", "2026-01-01T09:00:00+00:00") is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("the same bits over 10 steps", "The same bits over 10 steps."),
        ("Equal.", "Equal."),
        ("blocks.0.attention.q.weight is off", "blocks.0.attention.q.weight is off."),
    ],
)
def test_words_become_a_sentence_and_names_keep_their_letters(words: str, expected: str) -> None:
    assert formatting.sentence(words) == expected


def test_a_long_name_may_be_broken_at_its_bracket_and_stays_text() -> None:
    assert formatting.breakable("adam8bit(backend=<b>,x=1)") == "adam8bit(<wbr>backend=&lt;b&gt;,<wbr>x=1)"
