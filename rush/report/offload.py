"""The picture and the rows of `rush bench offload`, from its record."""

from __future__ import annotations

import numpy as np

from rush.records.offload import OffloadRecord, OffloadRow
from rush.report.panel_file import standalone
from rush.report.panels import Bar, Bars

COLUMNS = ["layers", "on", "contender", "tokens/s", "all layers", "device", "host", "tokens"]


def whole_tokens_per_s(rows: list[OffloadRow], row: OffloadRow) -> float | None:
    """The rate of all layers: measured, or extrapolated linearly from rows with fewer. None for a single row."""
    if row["layers"] == row["of_layers"]:
        return row["tokens_per_s"]["median"]
    key = (row["shape"], row["where"], row["contender"])
    same = [
        one
        for one in rows
        if one.get("tokens_per_s") and (one["shape"], one["where"], one["contender"]) == key
    ]
    if len({one["layers"] for one in same}) < 2:
        return None
    slope, start = np.polyfit(
        [one["layers"] for one in same], [1 / one["tokens_per_s"]["median"] for one in same], 1
    )
    seconds = float(start + slope * row["of_layers"])
    return 1 / seconds if seconds > 0 else None


def table_rows(record: OffloadRecord, shape: str) -> list[list[str]]:
    """One line per contender and shape; extrapolated values are marked with ~."""
    lines = []
    for row in (row for row in record["rows"] if row["shape"] == shape):
        head = [f"{row['layers']} of {row['of_layers']}", row["where"], row["contender"]]
        if row["status"] != "ok":
            lines.append([*head, row["status"], "", "", "", row["reason"]])
            continue
        speed, whole = row["tokens_per_s"], whole_tokens_per_s(record["rows"], row)
        cut = row["layers"] < row["of_layers"]
        same = row.get("same_ids")
        lines.append([
            *head,
            f"{speed['median']:.3g} ({speed['low']:.3g}-{speed['high']:.3g})",
            "" if whole is None else f"{'~' if cut else ''}{whole:.3g}",
            _gib(max(process["device_bytes"] for process in row["processes"])),
            _gib(max(process["host_bytes"] for process in row["processes"])),
            "" if same is None else "the same" if same else "differ",
        ])  # fmt: skip
    return lines


def picture(record: OffloadRecord) -> str:
    bars = [
        Bar(
            f"{row['shape']}, {row['layers']} layers, {row['where']}: {row['contender']}",
            row["tokens_per_s"]["median"],
            row["tokens_per_s"]["low"],
            row["tokens_per_s"]["high"],
            color=1 if row["contender"] == "rush" else 2,
        )
        for row in record["rows"]
        if row["status"] == "ok"
    ]
    caption = (
        f"Tokens a second after the first, {record['dtype']}, a prompt of {record['prompt_tokens']} tokens, {record['new_tokens']} new ones; "
        "median over processes with its 95 % interval. Layers are loaded one at a time."
    )
    return standalone(
        "Inference with offloaded layers", "", [Bars("Tokens a second", "", bars, caption=caption)]
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
