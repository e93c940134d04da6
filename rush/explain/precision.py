"""Number formats: range, rounding, what rounding does to a sum and to a small update, and the rate they buy.

Rounding is measured by converting real numbers and back. TF32 is a mode of the matrix units and no type of
its own, so its rounding is done here by hand (ten bits of fraction kept, to nearest even). Rates are those of
matmuls, where the device has them in that format; where it has not, the reason stands there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.explain import units
from rush.explain.topic import Data, ExplainSettings, Topic, TopicTable
from rush.report.panels import Bar, Bars, Curve, Curves, Dot, Panel

if TYPE_CHECKING:
    from torch import Tensor

FORMATS: dict[str, tuple[str, int, int]] = {
    "fp32": ("float32", 8, 23),
    "tf32": ("tf32", 8, 10),
    "bf16": ("bfloat16", 8, 7),
    "fp16": ("float16", 5, 10),
    "fp8 e4m3": ("float8_e4m3fn", 4, 3),
    "fp8 e5m2": ("float8_e5m2", 5, 2),
}
"""Our name, torch's, and the bits of exponent and fraction."""
RATES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8 e4m3": "float8"}
UPDATES = [10.0 ** (-k / 2) for k in range(2, 15)]
"""Sizes of an update relative to the weight: from a tenth to a ten-millionth."""


def measure(settings: ExplainSettings) -> Data:
    import torch

    from rush.hardware import measure as rates

    count = 2**14 if settings.quick else 2**18
    generator = torch.Generator().manual_seed(0)
    # Weights as a model has them: normal, of width 0.02; none so small that fp8 has no number for it at all.
    weights = torch.randn(count, generator=generator) * 0.02
    weights = torch.where(weights.abs() < 0.016, torch.sign(weights) * 0.016 + weights, weights)
    rows: list[Data] = []
    parts = len(FORMATS) + len(RATES)
    for name, (kind, exponent, fraction) in FORMATS.items():
        settings.progress(f"rounding in {name}", len(rows), parts)
        rows.append(
            {
                "name": name,
                "exponent_bits": exponent,
                "fraction_bits": fraction,
                **_range(kind),
                **_rounding(weights, kind),
                "adds_up_to": _adding(kind, settings.quick),
                "moved": _updates(weights, kind),
                "rate": None,
                "why": None,
            }
        )
    for done, row in enumerate(rows):
        if row["name"] not in RATES:
            row["why"] = "matmuls take e4m3; e5m2 is for gradients"
            continue
        settings.progress(f"matmuls in {row['name']}", len(FORMATS) + done, parts)
        found = rates.matmul(settings.device, RATES[row["name"]], budget_s=0.15 if settings.quick else 1.5)
        if isinstance(found, str):
            row["why"] = found
        else:
            best = max(found, key=lambda sample: sample.rate)
            row["rate"] = {"case": best.case, "flops": best.amount, "seconds": list(best.seconds)}
    return {
        "kind": settings.device,
        "numbers": count,
        "added": _terms(settings.quick),
        "updates": UPDATES,
        "rows": rows,
    }


def rounded(x: Tensor, kind: str) -> Tensor:
    """`x` (fp32) rounded to a format; still fp32, so that it can be compared."""
    import torch

    if kind != "tf32":
        return x.to(getattr(torch, kind)).float()
    # To nearest, ties to even, keeping ten of the twenty-three bits of fraction.
    bits = x.contiguous().view(torch.int32)
    bits = bits + 0x0FFF + ((bits >> 13) & 1)
    return (bits & ~0x1FFF).view(torch.float32)


def _range(kind: str) -> Data:
    import torch

    info = torch.finfo(torch.float32 if kind == "tf32" else getattr(torch, kind))
    eps = 2.0**-10 if kind == "tf32" else info.eps
    return {"largest": info.max, "smallest_normal": info.smallest_normal, "eps": eps}


def _rounding(weights: Tensor, kind: str) -> Data:
    exact = weights.double()
    wrong = (rounded(weights, kind).double() - exact).abs() / exact.abs()
    return {"error_rms": float(wrong.square().mean().sqrt()), "error_max": float(wrong.max())}


def _terms(quick: bool) -> int:
    return 2500 if quick else 10_000


def _adding(kind: str, quick: bool) -> float:
    """1 added repeatedly, the sum stored in the format after every addition."""
    import torch

    total, one = torch.zeros(1), torch.ones(1)
    for _ in range(_terms(quick)):
        after = rounded(total + one, kind)
        if bool(after == total):
            break
        total = after
    return float(total)


def _updates(weights: Tensor, kind: str) -> list[float]:
    """For each relative size of an update: the share of weights that are different afterwards."""
    stored = rounded(weights, kind)
    return [float((rounded(stored * (1 + step), kind) != stored).float().mean()) for step in UPDATES]


def _rate(row: Data) -> float | None:
    if row["rate"] is None:
        return None
    times = sorted(row["rate"]["seconds"])
    return float(row["rate"]["flops"] / times[len(times) // 2])


def words(data: Data) -> list[str]:
    rows = {row["name"]: row for row in data["rows"]}
    return [
        _rate_words(data["rows"]),
        _rounding_words(rows),
        _sum_words(data),
        _update_words(data),
        _range_words(rows),
    ]


def _rate_words(rows: list[Data]) -> str:
    known = {row["name"]: rate for row in rows if (rate := _rate(row)) is not None}
    base = known.get("fp32")
    if base is None or len(known) < 2:
        return "Matmuls could be timed in one number format only, so no rates can be compared here."
    others = {name: rate / base for name, rate in known.items() if name != "fp32"}
    sentences = [
        f"{name} {units.flops(known[name])} ({units.times(ratio)})" for name, ratio in others.items()
    ]
    fastest = max(others, key=lambda name: others[name])
    verdict = (
        f"{fastest} buys the most speed"
        if others[fastest] > 1.05
        else "no shorter format is faster on this device, so here it saves memory and traffic, not arithmetic"
    )
    slow = [name for name, ratio in others.items() if ratio < 0.5]
    tail = f" (for {units.listed(slow)} this device, or torch on it, has no fast way)" if slow else ""
    absent = [row["name"] for row in rows if row["rate"] is None]
    lacks = f" There is no matmul in {units.listed(absent)} here." if absent else ""
    return f"Matmuls run at {units.flops(base)} in fp32; {units.listed(sentences)}: {verdict}{tail}.{lacks}"


def _rounding_words(rows: dict[str, Data]) -> str:
    parts = [f"{units.si(row['error_max'] * 100)} % ({name})" for name, row in rows.items() if name != "fp32"]
    return f"Storing an fp32 weight in a shorter format changes it by up to {units.listed(parts)}."


def _sum_words(data: Data) -> str:
    stuck = [row for row in data["rows"] if row["adds_up_to"] < data["added"]]
    right = [row["name"] for row in data["rows"] if row["adds_up_to"] >= data["added"]]
    number = units.plain_number(data["added"])
    if not stuck:
        return f"Adding up {number} ones, one after the other, comes out right in every format."
    ends = [f"{row['adds_up_to']:g} in {row['name']}" for row in stuck]
    fine = ""
    if right:
        fine = f"; only {right[0]} gets there" if len(right) == 1 else f"; {units.listed(right)} get there"
    return (
        f"Adding up {number} ones, one after the other, gets stuck at {units.listed(ends)}{fine}: the sum has grown so "
        "large that 1 is no more than half of its last digit. That is why products are summed in fp32."
    )


def lost_below(data: Data, row: Data) -> float | None:
    """The largest update (relative to the weight) that leaves at least half of the weights unchanged."""
    lost = [step for step, share in zip(data["updates"], row["moved"], strict=True) if share < 0.5]
    return max(lost, default=None)


def _update_words(data: Data) -> str:
    known = [(row["name"], step) for row in data["rows"] if (step := lost_below(data, row)) is not None]
    if not known:
        return "Updates of all sizes tried here change most weights in every format."
    parts = [f"{units.si(step * 100)} % ({name})" for name, step in known]
    return (
        f"An update is lost in most weights once it is as small, in percent of the weight, as {units.listed(parts)}: the weight "
        "rounds back to where it was. That is why a master copy of the weights is kept in fp32, or stochastic rounding is used."
    )


def _range_words(rows: dict[str, Data]) -> str:
    half, brain = rows["fp16"], rows["bf16"]
    return (
        f"The range of fp16 ends at {units.si(half['largest'])}, that of bf16 at {units.si(brain['largest'])}, which is why fp16 training "
        f"scales its loss; in return, bf16 is {units.times(brain['eps'] / half['eps'])} coarser."
    )


def picture(data: Data) -> list[Panel]:
    rates = []
    for row in data["rows"]:
        rate = _rate(row)
        ends = (None, None)
        if rate is not None:
            times, amount = row["rate"]["seconds"], row["rate"]["flops"]
            ends = (amount / max(times), amount / min(times))
        rates.append(
            Bar(row["name"], rate, ends[0], ends[1], 1, note="" if rate is not None else str(row["why"]))
        )
    lines = [
        Curve(
            row["name"],
            [Dot(step, share) for step, share in zip(data["updates"], row["moved"], strict=True)],
            color,
        )
        for color, row in enumerate(data["rows"], start=1)
    ]
    spans = [Bar(row["name"], row["largest"], start=row["smallest_normal"], color=3) for row in data["rows"]]
    return [
        Bars("Rate of matmuls (whiskers: slowest and fastest sample)", "FLOP/s", rates),
        Curves(
            "Weights that an update changes at all",
            "size of the update, relative to the weight",
            "share of weights",
            "",
            "%",
            lines,
            y_log=False,
        ),
        Bars("Range: from the smallest normal number to the largest", "", spans, log=True),
    ]


def table(data: Data) -> TopicTable:
    rows = []
    for row in data["rows"]:
        rate: Any = _rate(row)
        rows.append(
            [
                row["name"],
                f"{row['exponent_bits']} + {row['fraction_bits']}",
                units.si(row["largest"]),
                units.si(row["smallest_normal"]),
                f"{units.si(row['error_max'] * 100)} %",
                f"{row['adds_up_to']:g}",
                units.flops(rate) if rate is not None else "–",
            ]
        )
    head = (
        "format",
        "bits: exponent + fraction",
        "largest",
        "smallest normal",
        "rounding, at most",
        f"1 added {data['added']} times",
        "matmuls",
    )
    return TopicTable(head, rows)


topic = Topic(
    name="precision",
    title="Fewer bits: what they buy and what they cost",
    about="fp32, TF32, bf16, fp16 and fp8: range, rounding, what rounding does to a sum and to an update, and the rate",
    idea=(
        "A floating-point number spends its bits on two things: the exponent sets its range, the fraction how close its "
        "neighbors are. bf16 keeps fp32's exponent and gives up fraction; fp16 does the reverse; fp8 has little of "
        "both and needs a scale beside it. TF32 is fp32 in memory, with only ten bits of fraction inside the matrix units.",
        "Half the bits are half the traffic and half the memory, and matrix units multiply short numbers faster, where the device has "
        "such units. Without them a short format has to be converted for every operation and can be slower than the long one.",
        "Rounding one number does little harm. Adding up many does: once a sum is large enough, a small addend disappears entirely, and "
        "so does a small update added to a weight. Therefore sums are kept in fp32 even when the operands are short, and weights "
        "have a master copy in fp32 or use stochastic rounding, which keeps small updates on average.",
    ),
    method=(
        ("rounding", "weights drawn at random, stored in the format and read back, against the original"),
        (
            "TF32",
            "rounded by hand to ten bits of fraction; its rate is that of fp32 matmuls with the mode switched on",
        ),
        ("adding up", "1 added again and again, the sum stored in the format each time"),
        (
            "updates",
            "each weight multiplied by 1 + the size of the update and stored again; the share that differs",
        ),
        ("rate", "the best of several matmuls, median of its samples"),
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
)
