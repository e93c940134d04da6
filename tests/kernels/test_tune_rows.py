"""The sweep of launch shapes: every variant of every kernel computes the same, and one that does not is told apart."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rush.bench import kernel_check as check
from rush.kernels import study, support

SCRIPT = Path(__file__).parents[2] / "scripts" / "tune_rows.py"
pytestmark = [
    pytest.mark.skipif(not support.INTERPRETED, reason="on a GPU the sweep itself checks every variant"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tune_rows", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tune_rows"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def results(sweep: ModuleType, group: Any, step: str, variant: Any) -> dict[str, Any]:
    of = study.load(group.op)
    inputs = of.make(sweep.size_of(group, 24), torch.device("cpu"), torch.float32)
    plain = sweep.contender(of, "plain").call
    expected, grad_outputs = check.exact_results(of.reference, plain, inputs, torch.float64, torch.float32)
    ours = sweep.contender(of, "ours")
    found = sweep.results_of(variant, step, ours.call, inputs, grad_outputs)
    return check.judge(ours, found, expected)


@pytest.mark.parametrize("op", ["rope", "swiglu", "bias_grad", "layernorm"])
def test_every_kernel_has_variants_and_their_names_differ(sweep: ModuleType, op: str) -> None:
    tried = sweep.variants(sweep.Group(op, 2048))
    assert tried
    for step, variants in tried.items():
        assert len(variants) > 3
        assert len({variant.name for variant in variants}) == len(variants)
        # What a variant replaces exists (it would be an error otherwise) and is put back.
        for variant in variants:
            before = [getattr(module, name) for module, name, _ in variant.changes]
            with variant.applied():
                pass
            assert [getattr(module, name) for module, name, _ in variant.changes] == before, step


def test_a_variant_changes_the_pass_that_it_is_about_and_a_wrong_one_is_seen(sweep: ModuleType) -> None:
    group = sweep.Group("swiglu", 64)
    half = sweep.Variant("half the program", ((sweep.swiglu, "BLOCK", 512),))
    assert results(sweep, group, "forward", half)["verdict"] == "equal"

    def zeros(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(tensors[0]), torch.zeros_like(tensors[0])

    wrong = sweep.Variant("wrong", ((sweep.swiglu, "backward", zeros),))
    assert results(sweep, group, "backward", wrong)["verdict"] == "different"
    assert results(sweep, group, "forward", wrong)["verdict"] == "equal"
