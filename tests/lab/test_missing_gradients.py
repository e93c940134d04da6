"""A tensor without a gradient is not one whose gradient is right."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from rush.lab.parity.judge import stored_errors
from rush.techniques.api.contract import Parity
from rush.techniques.api.tolerances import judge


def test_a_gradient_that_is_missing_or_of_another_shape_is_infinitely_wrong(tmp_path: Path) -> None:
    plain = {name: torch.ones(4, 4) for name in ("whole", "missing", "cut")}
    ours = {"whole": torch.ones(4, 4), "cut": torch.ones(2, 4), "new": torch.ones(1)}
    save_file(plain, tmp_path / "plain.safetensors")
    save_file(ours, tmp_path / "ours.safetensors")
    errors = stored_errors(tmp_path / "ours.safetensors", tmp_path / "plain.safetensors")
    assert errors == {"whole": 0.0, "missing": math.inf, "cut": math.inf}
    curve = [5.0, 4.0]
    verdict = judge(Parity.CLOSE, "bfloat16", curve, curve, curve, curve, {"missing": errors["missing"]})
    assert verdict.verdict == "different"
    assert "the gradient of missing" in verdict.why
