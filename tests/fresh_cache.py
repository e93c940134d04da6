"""A cache with nothing in it but how fast this machine multiplies.

A run that finds no such rates measures them for two seconds, which is longer than most runs of a test take.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from rush.hardware import ceilings, probe
from rush.hardware.launch_rate import launching
from rush.hardware.measure import bandwidth, matmul


def fresh_cache(folder: Path) -> Path:
    """`folder`, made if need be, for `RUSH_CACHE`."""
    name, content = _rates()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / name).exists():
        (folder / name).write_text(content)
    return folder


@cache
def _rates() -> tuple[str, str]:
    """The name and the content of the file of rates, measured in a moment: no test looks at how fast this machine is."""
    with TemporaryDirectory() as folder:
        empty = ceilings(probe("cpu"), (), bandwidth=False, folder=Path(folder))
        (file,) = Path(folder).iterdir()
    measured = {dtype: matmul("cpu", dtype, budget_s=0.05) for dtype in ("float32", "bfloat16", "float16")}
    rates = {dtype: samples for dtype, samples in measured.items() if not isinstance(samples, str)}
    others = {
        "bandwidth": bandwidth("cpu", budget_s=0.05, size=2**20),
        "launching": launching("cpu", budget_s=0.05),
    }
    return file.name, json.dumps(replace(empty, matmul=rates, **others).to_dict())
