"""`run.deterministic`: what it sets, what it refuses, and the backward pass that takes cuDNN's place."""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import rush.kernels.flash_attention  # noqa: F401  (the backward pass is an operator of it)
from rush.errors import RecipeError
from rush.hardware import probe
from rush.kernels.support import INTERPRETED
from rush.recipe_io import load_recipe
from rush.techniques import check_recipe
from rush.techniques.attention import cudnn_attention
from rush.techniques.attention.cudnn_attention import CudnnCore
from rush.techniques.kernels import liger
from rush.training.build import build
from tests.techniques.tiny_runs import make_run, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)
EXACTLY = "run.deterministic=true"


def test_a_deterministic_step_takes_only_such_algorithms_and_does_not_fill_memory_for_nothing() -> None:
    run = build(load_recipe("tiny", [EXACTLY]), probe("cpu"))
    with run.in_step():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_the_workspace_of_matmuls_is_settled_when_a_run_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first product, which is when the library reads it; and only where it was asked for."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    build(load_recipe("tiny"), probe("cpu"))
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    build(load_recipe("tiny", [EXACTLY]), probe("cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    build(load_recipe("tiny", [EXACTLY]), probe("cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_compiler_of_a_deterministic_run_chooses_nothing_by_timing() -> None:
    from torch._inductor import config

    compiled = build(load_recipe("tiny", [EXACTLY, "techniques=['compile']"]), probe("cpu"))
    loose = build(load_recipe("tiny", ["techniques=['compile']"]), probe("cpu"))
    with compiled.in_step():
        assert config.deterministic
    with loose.in_step():
        assert not config.deterministic


@pytest.mark.slow
def test_a_compiled_deterministic_run_learns_what_the_eager_one_does() -> None:
    eager = trace(make_run(overrides=[EXACTLY]), 2)
    ours = trace(make_run("{name='compile', scope='block'}", overrides=[EXACTLY]), 2)
    assert ours.losses == pytest.approx(eager.losses, rel=1e-5)


def test_what_compiled_code_draws_in_a_step_is_given_back() -> None:
    """It draws once in each process, so a resumed run's generator would be further than that of a run left alone."""
    run = build(load_recipe("tiny", ["techniques=['compile']"]), probe("cpu"))
    before = torch.get_rng_state()
    with run.in_step():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("deterministic", [True, False])
def test_cudnn_attention_is_refused_where_nothing_takes_the_place_of_its_backward_pass(
    deterministic: bool,
) -> None:
    heads = ["model.shape.hidden=96", "model.shape.num_heads=2", "model.shape.num_kv_heads=2", "model.shape.head_dim=48"]  # fmt: skip
    wanted = [*heads, f"run.deterministic={str(deterministic).lower()}"]
    recipe = recipe_of("cudnn_attention", "pure_bf16", overrides=wanted)
    if not deterministic:
        assert check_recipe(recipe)
        return
    with pytest.raises(
        RecipeError, match=r"head dims 16, 32, 64, 128, 256; use flash_attention.*deterministic=false"
    ):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("installed", "name", "parts", "refused"),
    [
        ("0.6.4", "tiny", "all", True),
        ("0.6.4", "tiny", "loss", False),
        ("0.6.4", "llama-tiny", "all", False),
        ("0.7.0", "tiny", "all", False),
        ("0.10.1", "tiny", "all", False),
    ],
)
def test_a_layer_norm_of_liger_that_adds_with_atomics_is_refused(
    installed: str, name: str, parts: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "version", lambda package: installed)
    monkeypatch.setattr(liger, "find_spec", lambda package: True)
    recipe = recipe_of(f"{{name='liger', parts='{parts}'}}", name=name, overrides=[EXACTLY])
    if refused:
        with pytest.raises(RecipeError, match=r"liger-kernel 0\.6\.4 .*install 0\.7 or newer"):
            check_recipe(recipe)
    else:
        assert check_recipe(recipe)


def played(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """What cuDNN's operator gives: the output, and the natural log of every query's sum, [b, h, t, 1]."""
    groups = q_bhtd.shape[1] // k_bktd.shape[1]
    k, v = (tensor.repeat_interleave(groups, 1).double() for tensor in (k_bktd, v_bktd))
    scale = q_bhtd.shape[-1] ** -0.5 if scale is None else scale
    scores = q_bhtd.double() @ k.transpose(-1, -2) * scale
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~seen, -math.inf)
    out = (scores.softmax(-1) @ v).to(q_bhtd.dtype)
    return out, scores.logsumexp(-1, keepdim=True).float()


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled on this machine")
@pytest.mark.parametrize(("kv_heads", "grouped"), [(2, True), (1, True), (1, False)])
def test_our_backward_pass_takes_the_output_of_cudnn(
    kv_heads: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_attention, "_cudnn", played)
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(1, 40, heads, 16, generator=generator).transpose(1, 2)
        for heads in (2, kv_heads, kv_heads, 2)
    ]
    leaves, above = [tensor.requires_grad_() for tensor in drawn[:3]], drawn[3]
    core = CudnnCore(grouped, deterministic=True)
    ours = [torch.autograd.grad(core(*leaves), leaves, above) for _ in range(2)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    for mine, again, right in zip(*ours, torch.autograd.grad(out, exact, above.double()), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)
        assert torch.equal(mine, again)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled on this machine")
def test_it_can_be_compiled_and_asked_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is validated calls the compiled block under no_grad."""
    monkeypatch.setattr(cudnn_attention, "_cudnn", played)
    core = CudnnCore(grouped=True, deterministic=True)
    compiled = torch.compile(core, fullgraph=True, dynamic=False, backend="aot_eager")
    leaves = [torch.randn(1, 32, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    above = torch.randn(1, 2, 32, 16)
    for mine, eager in zip(
        *(torch.autograd.grad(call(*leaves), leaves, above) for call in (compiled, core)), strict=True
    ):
        assert torch.equal(mine, eager)
    with torch.no_grad():
        assert torch.equal(compiled(*leaves), core(*leaves))
