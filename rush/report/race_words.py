"""The findings of a race in words: which recipe reached the same loss sooner, by how much, and the limits of one seed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rush.records.gains import judge
from rush.records.race import LossGap, Quotient, RaceFinding, RaceRecord
from rush.records.race_curves import interval, leg_time, leg_tokens
from rush.report import formatting

CROWDED = 1.5
"""Load average per core above which other processes disturbed the legs; a run on a CPU makes about one itself."""
VERDICTS = {"faster": "sooner", "slower": "later", "no gain": "no difference", "cannot tell": "cannot tell"}
MEANINGS = {
    "sooner": "The whole interval of the net ratio is above 1: the same loss is reached sooner.",
    "later": "The whole interval of the net ratio is below 1: the same loss is reached later.",
    "no difference": "The whole interval of the net ratio is within 3 % of 1.",
    "cannot tell": "The interval of the net ratio holds 1 and is too wide to say more; add seeds.",
    "one seed": "Measured once: nobody knows how much of it is the seed. Add seeds.",
    "no common loss": "It did not come down to a loss that the other reached, or to the one asked for.",
}


def verdict_of(finding: Mapping[str, Any]) -> str:
    """The word for a contender against the first, from the interval of its net ratio."""
    net = finding.get("net")
    if net is None:
        return "no common loss"
    ends = interval(net)
    return "one seed" if ends is None else VERDICTS[judge(*ends)]


def headline(record: RaceRecord) -> str:
    """A sentence or two for every contender against the first."""
    out = _left_out(record)
    if not record["findings"]:
        return " ".join(["No two contenders have been validated at the same tokens yet.", *out])
    return " ".join([*(finding_words(record, one) for one in record["findings"]), *out])


def finding_words(record: RaceRecord, finding: RaceFinding) -> str:
    """A contender against another: net, gross, tokens to the same loss."""
    ours, theirs = finding["contender"], finding["against"]
    net, gross = finding["net"], finding["gross"]
    if net is None:
        return f"{ours} and {theirs} have not reached the same loss."
    loss = next(depth["loss"] for depth in reversed(record["depths"]) if depth["net"].get(ours))
    verdict = verdict_of(finding)
    times = quotient_words(net)
    match verdict:
        case "sooner":
            said = f"{ours} reaches a validation loss of {loss:.4f} {times} sooner than {theirs}"
        case "later":
            said = f"{ours} reaches a validation loss of {loss:.4f} later than {theirs}: net {times}"
        case "no difference":
            said = f"{ours} and {theirs} reach a validation loss of {loss:.4f} in the same time: net {times}"
        case "one seed":
            said = f"With one seed, which has no interval, {ours} reaches a validation loss of {loss:.4f} at net {times} of {theirs}"
        case _:
            said = f"Whether {ours} or {theirs} reaches a validation loss of {loss:.4f} sooner cannot be told: net {times}"
    parts = [f"gross {quotient_words(gross)} in tokens per second"] if gross else []
    if finding["more_tokens"]:
        parts.append(f"{more_words(finding['more_tokens'])} to the same loss")
    return f"{said}; {', '.join(parts)}."


def net_words(row: Any) -> str:
    """The net of a rung or winner in a sentence: `net ×1.30 (1.21 to 1.40) over 123k tokens, 3 seeds: sooner; …`; empty without one."""
    if not isinstance(row, Mapping) or not row.get("net"):
        return ""
    seeds = formatting.plural(int(row.get("seeds") or 1), "seed")
    return (
        f"Net {quotient_words(row['net'])} to the same loss ({row.get('verdict')}; a race with {row.get('against')} over "
        f"{formatting.si(row.get('tokens'))} tokens, {seeds}), gross {quotient_words(row.get('gross'))}, {more_words(row.get('more_tokens'))}."
    )


def quotient_words(value: Mapping[str, Any] | None) -> str:
    """`×1.42 (1.30 to 1.55)`; without an interval the ratio alone."""
    return formatting.MISSING if value is None else formatting.ratio_between(value["ratio"], interval(value))


def more_words(value: Quotient | None) -> str:
    """`4.1 % more tokens (2.0 to 6.3)`, `3.0 % fewer tokens`."""
    if value is None:
        return formatting.MISSING
    more = 100 * (value["ratio"] - 1)
    tail = ""
    if (ends := interval(value)) is not None:
        low, high = sorted((100 * (ends[0] - 1), 100 * (ends[1] - 1)))
        signed = (low, high) if more >= 0 else (-high, -low)
        tail = f" ({_points(signed[0])} to {_points(signed[1])})"
    if abs(more) < 0.05:
        return f"the same tokens{'' if tail == ' (0.0 to 0.0)' else tail}"
    return f"{_points(abs(more))}{formatting.JOIN}% {'more' if more >= 0 else 'fewer'} tokens{tail}"


def _points(value: float) -> str:
    """Per cent with one decimal: more digits than a race measures would be noise."""
    return f"{round(value, 1) + 0.0:.1f}".replace("-", "−")


def gap_words(gap: LossGap, *, short: bool = False) -> str:
    """`+0.0120 (0.0090 to 0.0150), +0.40 %`; `short`: without the interval."""
    ends = None if short else interval(gap)
    tail = f" ({_signed(ends[0])} to {_signed(ends[1])})" if ends else ""
    return f"{_signed(gap['gap'])}{tail}, {_signed(100 * gap['relative'], 2)}{formatting.JOIN}%"


def _signed(value: float, decimals: int = 4) -> str:
    """Format with a sign; a value that rounds to zero never becomes a negative zero."""
    return f"{round(value, decimals) + 0.0:+.{decimals}f}".replace("-", "−")


def rate_of(record: RaceRecord, letter: str) -> float | None:
    """Tokens per second of training over all legs of a contender."""
    legs = [(run, leg) for run in record["runs"] if run["contender"] == letter for leg in run["legs"]]
    seconds = sum(leg_time(run, leg).training_s for run, leg in legs)
    return sum(leg_tokens(record, run, leg) for run, leg in legs) / seconds if seconds else None


def winner_of(record: RaceRecord) -> str | None:
    """The contender that is there soonest beyond noise; the first one where others are later or no sooner; None where it cannot be told."""
    verdicts = {one["contender"]: verdict_of(one) for one in record["findings"]}
    if not verdicts or set(verdicts.values()) & {"one seed", "no common loss"}:
        return None
    sooner = [one for one in record["findings"] if verdicts[one["contender"]] == "sooner" and one["net"]]
    if sooner:
        return max(sooner, key=lambda one: one["net"]["ratio"] if one["net"] else 0.0)["contender"]
    return None if "cannot tell" in verdicts.values() else record["findings"][0]["against"]


def warnings(record: RaceRecord) -> list[str]:
    """Caveats of the figures."""
    found = []
    if record.get("finished") is None:
        found.append(
            "This race is not finished: the page shows the legs made so far. Run the same command again to resume."
        )
    elif why := record.get("why_ended"):
        found.append(f"The race ended before its last leg: {why}.")
    if len(record["seeds"]) == 1:
        found.append(
            "One seed has no interval: how much of a difference is the seed, nobody knows. Add some with --seeds."
        )
    loads = [load for run in record["runs"] for leg in run["legs"] if (load := leg.get("load")) is not None]
    if loads and max(loads) > CROWDED:
        found.append(
            f"Other processes ran on this machine during the race (load up to {max(loads):.1f} per core). They took time from all contenders in "
            "turn; the ratios say more than the times."
        )
    return found


def _left_out(record: RaceRecord) -> list[str]:
    """Contenders that diverged or failed, with the reason."""
    return [
        f"{run['contender']} {run['status']} with seed {run['seed']}: {str(run.get('reason') or 'no reason is known').rstrip('.')}."
        for run in record["runs"]
        if run["status"] in ("diverged", "failed")
    ]
