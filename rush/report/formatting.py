"""Human-readable numbers and times.

Three significant digits, because no measurement here is better than that; a unit that keeps the number between 1 and 1000; and
a dash for unknown values. The same number has the same form everywhere. A non-breaking space joins a number and its unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

from markupsafe import Markup, escape

MISSING = "–"
JOIN = "\N{NO-BREAK SPACE}"
THIN = "\N{NARROW NO-BREAK SPACE}"
"""Between thousands."""

_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_BYTES = ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))


def sentence(words: str) -> str:
    """Add a capital letter and a full stop, so that another sentence can follow; a tensor's name keeps its letters."""
    first = words.split(" ", 1)[0]
    opened = words[:1].upper() + words[1:] if first.isalpha() else words
    return opened if opened.endswith((".", "!", "?")) else f"{opened}."


def breakable(name: str) -> Markup:
    """Allow line breaks after an opening bracket or a comma, so that none falls within a word."""
    return Markup(re.sub(r"([(,])", r"\1<wbr>", str(escape(name))))


def digits(value: float) -> str:
    """Three significant digits, in powers of ten only where the number is very large or very small."""
    if value == 0:
        return "0"
    value = float(f"{value:.2e}")  # first, so that 0.9999 counts its decimals as 1.00 does
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    after = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{after}f}".replace(",", THIN)
    return text.rstrip("0").rstrip(".") if "." in text and abs(value) < 1 else text


def si(value: float | None, unit: str = "") -> str:
    """`12.3k`, `1.05M tok/s`, `989 TFLOP/s` (a unit gets the prefix when it stands alone)."""
    if value is None:
        return MISSING
    for size, prefix in _LARGE:
        # 999 950 must become 1.00M, not 1000k: compare what will be printed.
        if size * 0.9995 <= abs(value) < size * 1e6:
            return f"{digits(value / size)}{JOIN if unit else ''}{prefix}{unit}"
    return f"{digits(value)}{JOIN}{unit}" if unit else digits(value)


def tick(value: float) -> str:
    """A label on an axis: as `si`, without the zeros that show the precision of a measurement."""
    return re.sub(r"\.0+(?!\d)|(?<=\.)(\d*?[1-9])0+(?!\d)", r"\1", si(value))


def tick_share(value: float) -> str:
    return f"{100 * value:.0f} %"


def tick_ratio(value: float) -> str:
    return f"×{value:g}"


def speed(value: float | None) -> str:
    """Tokens per second."""
    return MISSING if value is None else f"{si(value)}{JOIN}tok/s"


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return MISSING
    for unit, name in _BYTES:
        if abs(value) >= unit * 0.9995:
            return f"{digits(value / unit)}{JOIN}{name}"
    return f"{digits(value)}{JOIN}B"


def ratio(value: float | None) -> str:
    return MISSING if value is None else f"×{digits(value)}"


def ratio_between(value: float | None, interval: Sequence[float] | None = None) -> str:
    """`×3.10 (3.02 to 3.20)`."""
    tail = f" ({digits(interval[0])} to {digits(interval[1])})" if value is not None and interval else ""
    return ratio(value) + tail


def share(value: float | None) -> str:
    """A fraction as percent."""
    return MISSING if value is None else f"{digits(value * 100)}{JOIN}%"


def change(value: float | None) -> str:
    """A ratio in the usual form: +75 %, −40 %, ×3.50."""
    if value is None:
        return MISSING
    if value >= 2:
        return ratio(value)
    points = abs(value - 1) * 100
    amount = f"{points:.0f}" if points >= 9.95 else f"{points:.1f}"
    sign = "±" if amount == "0.0" else "−" if value < 1 else "+"
    return f"{sign}{amount.removesuffix('.0') if sign == '±' else amount}{JOIN}%"


def milliseconds(value: float | None) -> str:
    return MISSING if value is None else f"{digits(value)}{JOIN}ms"


def seconds(value: float | None) -> str:
    if value is None:
        return MISSING
    if value < 120 or value >= 1e9:
        return f"{digits(value)}{JOIN}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def count(value: int | None) -> str:
    """A whole number with thin spaces between the thousands."""
    if value is None:
        return MISSING
    return f"{value:,}".replace(",", THIN) if abs(value) < 10**15 else digits(float(value))


def interval(low: float | None, high: float | None) -> str:
    return MISSING if low is None or high is None else f"{si(low)} to {si(high)}"


def plural(amount: int, word: str, many: str | None = None) -> str:
    return f"{amount} {word}" if amount == 1 else f"{amount} {many or word + 's'}"


def moment(text: str | None) -> str:
    """An ISO time as `15 November 2026, 02:44 UTC`; what is not one is shown as it came."""
    when = _parsed(text)
    if when is None:
        return text or MISSING
    return f"{when.day} {_MONTHS[when.month - 1]} {when.year}, {when:%H:%M} UTC"


def elapsed(start: str | None, end: str | None) -> str | None:
    """How long it took, None when one of the times is missing."""
    found = elapsed_s(start, end)
    return None if found is None else seconds(found)


def elapsed_s(start: str | None, end: str | None) -> float | None:
    first, last = _parsed(start), _parsed(end)
    if first is None or last is None or last < first:
        return None
    return (last - first).total_seconds()


def _parsed(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    # A time without a zone was written without a time zone; taken as UTC, like all of ours.
    return when.replace(tzinfo=UTC) if when.tzinfo is None else when.astimezone(UTC)
