"""What is measured, whatever was promised; and the names of what differs, from records made up by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from rush.data import Batch
from rush.lab.parity import differences as kinds
from rush.lab.parity.differences import (
    after_timing,
    in_first_steps,
    in_further_process,
    in_timed_steps,
    in_words,
)
from rush.lab.parity.judge import parity_of, stored_errors
from rush.lab.trial.found import AuditFound, TimingFound
from rush.lab.trial.runner import Bench
from rush.lab.trial.step_log import digest
from rush.lab.trial.trial import Outcome
from rush.recipe_io import load_recipe
from rush.techniques import Parity
from rush.techniques.api.tolerances import gradient_tolerance, judge

LOSSES, NORMS = [4.0, 3.5, 3.0, 2.5], [1.0, 1.0, 1.0, 1.0]
CLASSES = (Parity.EXACT, Parity.CLOSE, Parity.STATISTICAL)


def _scaled(values: list[float], factor: float) -> list[float]:
    return [value * factor for value in values]


@pytest.mark.parametrize("promise", CLASSES)
@pytest.mark.parametrize(
    ("loss", "gradient", "dtype", "measured"),
    [
        (1.0, 0.0, "float32", "same bits"),
        (1.00001, 1e-6, "float32", "rounding"),
        (1.002, 1e-6, "float32", "statistical"),
        (1.002, 0.05, "bfloat16", "rounding"),
        (1.0, 0.01, "float32", None),
        (1.0, math.inf, "float32", None),
        (1.0, math.inf, "bfloat16", None),
        (1.2, 0.0, "float32", None),
    ],
)
def test_the_finest_test_that_is_passed_is_reported_whatever_was_promised(
    promise: Parity, loss: float, gradient: float, dtype: str, measured: str | None
) -> None:
    found = judge(promise, dtype, _scaled(LOSSES, loss), LOSSES, NORMS, NORMS, {"weight": gradient})
    assert found.measured == measured
    held = ("same bits", "rounding", "statistical").index(measured) if measured else 3
    # No promise makes equal what is none; a promise that is not kept is different.
    assert found.verdict == ("equal" if held <= CLASSES.index(promise) else "different")


def test_what_a_technique_declares_to_round_counts_only_where_matmuls_are_rounded() -> None:
    assert gradient_tolerance("float32", 2**-4) == gradient_tolerance("float32") == 1e-3
    assert gradient_tolerance("bfloat16", 2**-8) == gradient_tolerance("bfloat16") == pytest.approx(0.1)
    # The largest of correct fp8 recipes was 0.54; a gradient of zeros is off by 1.
    assert 0.54 < gradient_tolerance("bfloat16", 2**-4) < 1.0


@pytest.mark.parametrize("promise", [parity.name for parity in CLASSES])
def test_a_tensor_without_gradient_is_different_by_name(tmp_path: Path, promise: str) -> None:
    plain, other = (load_recipe("tiny", [f"run.seed={seed}"]) for seed in (0, 1))
    files = {plain.digest: tmp_path / "plain.safetensors", other.digest: tmp_path / "other.safetensors"}
    save_file({"weight": torch.ones(4), "norm": torch.ones(2)}, files[plain.digest])
    save_file({"weight": torch.ones(4)}, files[other.digest])
    assert stored_errors(files[other.digest], files[plain.digest]) == {"weight": 0.0, "norm": math.inf}
    bench = SimpleNamespace(
        parity_recipe=lambda recipe: recipe,
        trace=lambda recipe, rounded=False: {"losses": LOSSES, "grad_norms": NORMS, "skipped": 0},
        gradients=lambda recipe: files[recipe.digest],
    )
    techniques = {"thing": {"parity": promise}}
    outcome = Outcome("ok", None, {"techniques": techniques, "timing": {"dtype": "float32"}})
    found = parity_of(cast(Bench, bench), other, plain, outcome)
    assert (found["verdict"], found["kind"], found["class"]) == ("different", kinds.NO_GRADIENT, promise)
    assert "norm" in found["why"]


def _steps(**changed: Any) -> dict[str, Any]:
    steps = {
        "losses": LOSSES,
        "grad_norms": NORMS,
        "rows": [2] * 4,
        "labels": [64] * 4,
        "tokens": [64] * 4,
        "digests": ["a", "b", "c", "d"],
        "reached_rows": [2] * 4,
        "reached_tokens": [64] * 4,
    }
    return steps | changed


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, None),
        ({"reached_rows": [2, 2, 1, 1]}, kinds.FEWER_ROWS),
        ({"reached_tokens": [64, 64, 32, 64]}, kinds.FEWER_ROWS),
        ({"reached_rows": [8, 0, 8, 0], "reached_tokens": [256, 0, 256, 0], "captured": True}, None),
        ({"reached_rows": [2, 0, 2, 0], "reached_tokens": [64, 0, 64, 0]}, kinds.CACHED),
        ({"digests": ["a", "b", "a", "d"]}, kinds.REPEATED),
        ({"digests": ["a", "c", "b", "d"]}, kinds.OTHER_ORDER),
        ({"labels": [64, 64, 60, 64]}, kinds.FEWER_LABELS),
        ({"losses": [4.0, 4.0, 3.0, 3.0]}, kinds.CACHED),
        ({"losses": _scaled(LOSSES, 1.1)}, kinds.OTHER_CURVE),
    ],
)
def test_what_timed_steps_did_otherwise_has_a_name(changed: dict[str, Any], kind: str | None) -> None:
    timing = cast(TimingFound, {"steps": _steps(**changed)})
    curve: Any = {"losses": LOSSES, "steps": _steps()}
    found, told = in_timed_steps(timing, curve, None, same_rows=True)
    assert kinds.main_kind(found) == kind
    assert told["compared"] == 4
    if kind not in (kinds.OTHER_CURVE, None) and "losses" not in changed:
        again = in_further_process(timing, cast(TimingFound, {"steps": _steps()}))
        assert kinds.main_kind(again) == kind


def _audit(**changed: Any) -> AuditFound:
    flow = {
        "labels": [64, 64],
        "reached_labels": [64, 64],
        "digests": [["a"], ["b"]],
        "reached_digests": [["a"], ["b"]],
    }
    worst = {"name": "weight", "error": 1e-5, "rounding": 1e-5, "ratio": 1.0}
    audit = {
        "steps": 2,
        "losses": [3.0, 2.9],
        "plain_losses": [3.0, 2.9],
        "errors": {"weight": 1e-6, "norm": 1e-7},
        "repeats": False,
        "flow": flow | changed.pop("flow", {}),
        "unmoved": [],
        "updates": {"tensors": 2, "ratio": 1.0, "worst": worst | changed.pop("worst", {})},
    }
    if "ratio" in changed:
        cast(dict[str, Any], audit["updates"])["ratio"] = changed.pop("ratio")
    return cast(AuditFound, audit | changed)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, None),
        ({"flow": {"reached_labels": [64, 32]}}, kinds.FEWER_LABELS),
        ({"flow": {"reached_digests": [["a"], ["a"]]}}, kinds.REPEATED),
        ({"flow": {"reached_digests": [["x"], ["a"]]}}, kinds.OTHER_ORDER),
        ({"flow": {"reached_digests": [[], []], "reached_labels": [0, 0]}}, None),  # a captured graph
        ({"flow": {"reached_digests": [["a1", "a2"], ["b1", "b2"]]}}, None),  # gradient accumulation
        ({"repeats": True}, kinds.CACHED),
        ({"errors": {"weight": 0.01, "norm": 0.0}}, kinds.OTHER_GRADIENT),
        ({"errors": {"weight": 0.0, "norm": None}}, kinds.NO_GRADIENT),
        ({"losses": [3.0, 2.95]}, kinds.OTHER_LOSS),
        ({"unmoved": ["norm"]}, kinds.UNMOVED),
        ({"ratio": 1.05}, kinds.OTHER_RATE),
        ({"worst": {"error": 0.01}}, kinds.OTHER_UPDATE),
    ],
)
def test_what_differs_after_the_timing_has_a_name(changed: dict[str, Any], kind: str | None) -> None:
    found = after_timing(_audit(**changed), "float32", 0.0, "float32")
    assert kinds.main_kind(found) == kind
    assert in_words(found).startswith(kind or "")


def test_weights_that_started_or_moved_otherwise_are_named() -> None:
    weights = {"a": torch.linspace(-1, 1, 64), "b": torch.ones(8)}
    moved = {name: 0.01 * weight for name, weight in weights.items()}
    plain: Any = {"losses": LOSSES, "unmoved": [], "moved_steps": 3, "weights": "float32", "skipped": 0}

    def found(initial: float = 1.0, along: float = 1.0, unmoved: tuple[str, ...] = ()) -> str | None:
        ours = kinds.Sketches(
            {n: initial * w for n, w in weights.items()}, {n: along * m for n, m in moved.items()}
        )
        tried: Any = {**plain, "unmoved": list(unmoved)}
        reference = kinds.Sketches(weights, moved)
        return kinds.main_kind(in_first_steps(tried, plain, ours, reference, "float32", 0.0, same_rows=True))

    assert found() is None
    assert found(initial=1.001) == kinds.OTHER_START
    assert found(along=1.05) == kinds.OTHER_RATE
    assert found(unmoved=("b",)) == kinds.UNMOVED


def test_a_digest_knows_batches_however_they_are_split() -> None:
    tokens = torch.arange(256).view(4, 64)
    whole, other = Batch(tokens, tokens + 1), Batch(tokens.flip(0), tokens.flip(0) + 1)
    assert digest([whole]) == digest(whole.split(2)) == digest(whole.split(4))
    assert digest([whole]) != digest([other])
    masked = Batch(tokens, torch.where(tokens % 64 == 3, -100, tokens + 1))
    assert digest([whole], None) != digest([masked], None)
