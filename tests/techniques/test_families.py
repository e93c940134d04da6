"""Techniques with what families add: windows, scales, caps, norms of queries and keys, biases, partial RoPE."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from rush.errors import MachineError
from rush.hardware import probe
from rush.models import SIZES, AttentionForm, Decoder
from rush.models.layers import PlainAttention
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.techniques import check
from rush.techniques.attention.flash_attention import DocumentOffsets, FlashCore
from rush.training.build import build

LENGTH = 45
FORMS = [
    AttentionForm(window=9),
    AttentionForm(window=2),
    AttentionForm(scale=0.3, window=44),
    AttentionForm(scale=0.3),
]


def recipe_of(size: str, *techniques: str) -> Recipe:
    named = "[" + ", ".join(t if t.startswith("{") else f'"{t}"' for t in techniques) + "]"
    small = ["batch.micro=2", "batch.sequence=48", "batch.total_tokens=96", "model.shape.num_layers=2"]
    windows = ["model.shape.window=7"] if SIZES[size].has_windows else []
    return load_recipe("llama-tiny", [f"model.name={size}", f"techniques={named}", *small, *windows])


def gradients(core: nn.Module, documents: object) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, LENGTH, 16, generator=made).requires_grad_() for heads in (4, 2, 2)]
    out: Tensor = core(*given, documents=documents)
    out.backward(torch.randn(out.shape, generator=made))
    return [out.detach(), *(x.grad for x in given if x.grad is not None)]


def far(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_windows_and_scales_of_flash_attention_are_those_of_plain_attention(
    form: AttentionForm, packed: bool
) -> None:
    ids = torch.arange(LENGTH).expand(2, -1) // 20 if packed else None
    wanted = gradients(PlainAttention(form), ids)
    found = gradients(FlashCore(LENGTH, form), None if ids is None else DocumentOffsets()(ids, None))
    assert far(found, wanted) < 1e-5
    if form.window is not None and form.window < 20:
        planted = replace(form, window=form.window + 1)
        assert far(gradients(FlashCore(LENGTH, planted), None), gradients(PlainAttention(form), None)) > 1e-2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_windows_and_scales_of_our_kernel(form: AttentionForm, packed: bool) -> None:
    from rush.kernels import cpu

    if reason := cpu.cannot_run():
        pytest.skip(reason)
    from rush.techniques.attention.triton_attention import DocumentBounds, TritonCore

    ids = torch.arange(LENGTH).expand(2, -1) // 20 if packed else None
    found = gradients(TritonCore(form), None if ids is None else DocumentBounds()(ids, None))
    assert far(found, gradients(PlainAttention(form), ids)) < 1e-5


def step(recipe: Recipe) -> tuple[float, dict[str, Tensor]]:
    run = build(recipe, probe("cpu"))
    _stir(run.model)
    tokens = torch.randint(0, run.model.shape.vocab_size, (2, 49), generator=torch.Generator().manual_seed(0))
    with run.in_step(), run.autocast():
        loss = run.model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients = {name: p.grad for name, p in run.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


@torch.no_grad()
def _stir(model: Decoder) -> None:
    """Weights in which everything matters: no zero biases, no equal norms."""
    for number, parameter in enumerate(model.parameters()):
        made = torch.Generator().manual_seed(number)
        parameter.add_(torch.randn(parameter.shape, generator=made), alpha=0.1)


@pytest.mark.parametrize(
    ("size", "techniques"),
    [
        ("qwen2-tiny", ("fused_projections",)),
        ("qwen3-tiny", ("flash_attention", "checkpoint_selective")),
        ("gemma2-tiny", ('{name = "chunked_loss", chunk_tokens = 64}',)),
        ("gemma3-tiny", ("flash_attention", "checkpoint_full", "fused_projections")),
        ("gemma3-tiny", ("fused_mlp",)),
        ("granite-tiny", ('{name = "chunked_loss", chunk_tokens = 64}', "flash_attention")),
        ("olmo2-tiny", ("flash_attention", "fused_projections")),
        ("smollm3-tiny", ("flash_attention", "checkpoint_full")),
    ],
)
def test_a_family_computes_the_same_with_techniques(size: str, techniques: tuple[str, ...]) -> None:
    plain, plain_gradients = step(recipe_of(size))
    loss, found = step(recipe_of(size, *techniques))
    assert loss == pytest.approx(plain, rel=1e-5)
    assert found.keys() == plain_gradients.keys()
    for name, gradient in found.items():
        assert far([gradient], [plain_gradients[name]]) < 1e-4, name


@pytest.mark.parametrize(
    ("size", "technique", "instead"),
    [
        ("gemma2-tiny", "flash_attention", "flex_attention"),
        ("gemma2-tiny", "cpu_attention", "plain attention"),
        ("gemma2-tiny", "fused_loss", "chunked_loss"),
    ],
)
def test_what_does_not_fit_a_family_is_refused_with_what_to_use(
    size: str, technique: str, instead: str
) -> None:
    with pytest.raises(MachineError, match=f"technique {technique} cannot run here: .*{instead}"):
        check(recipe_of(size, technique), probe("cpu"))
