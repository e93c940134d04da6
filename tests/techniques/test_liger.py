"""The Liger rung: every slot is filled with the right arguments, and the library really computes it.

On a CPU the library's functions are stood in for by plain torch, which shows that weights, labels and reduction
reach them as they should; on a GPU the library itself runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rush.errors import MachineError
from rush.hardware import probe
from rush.kernels.support import INTERPRETED
from rush.models import build_model
from rush.models.layers import IGNORED_LABEL, PlainLossHead, losses_by_row
from rush.techniques import check
from rush.techniques.api.contract import Build, Observation
from rush.techniques.api.evidence import prove
from rush.techniques.api.facts import Facts
from rush.techniques.host import compile as compile_technique
from rush.techniques.kernels import liger
from tests.techniques.tiny_runs import Trace, compare, make_run, recipe_of, trace

FAMILIES = ("llama-tiny", "tiny")


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def stand_in(calls: list[str]) -> ModuleType:
    """The library's interface in plain torch, noting what was called."""
    module: Any = ModuleType("stand_in")

    def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        calls.append("rms")
        return F.rms_norm(x, weight.shape, weight, eps)

    def layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        calls.append("layer")
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        calls.append("rope")
        return turn(q, cos, sin), turn(k, cos, sin)

    def swiglu(a: Tensor, b: Tensor) -> Tensor:
        calls.append("mlp")
        return F.silu(a) * b

    def loss(x: Tensor, weight: Tensor, target: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
        calls.append("loss")
        return F.cross_entropy(x @ weight.T, target, ignore_index=ignore_index, reduction=reduction)

    module.liger_rms_norm, module.liger_layer_norm, module.liger_rope = rms, layer, rope
    module.liger_swiglu, module.liger_fused_linear_cross_entropy = swiglu, loss
    return module


def changed(family: str, parts: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, list[str], Build]:
    """A plain model, the same with Liger's parts, and the list of what will be called."""
    calls: list[str] = []
    monkeypatch.setattr(liger, "functions", lambda: stand_in(calls))
    recipe = recipe_of(name=family)
    models = [build_model(recipe.shape()) for _ in range(2)]
    for model in models:
        model.init_weights(3)
    build = Build(recipe, probe("cpu"), torch.device("cpu"), models[1])
    liger.apply(build, {"parts": parts})
    return models[0], models[1], calls, build


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_gets_its_arguments_and_the_gradients_are_those_of_the_plain_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ours, calls, _ = changed(family, "all", monkeypatch)
    tokens = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[0, 5:9] = -100
    losses = [model(tokens, labels) for model in (plain, ours)]
    assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), rel=1e-6)
    for loss in losses:
        loss.backward()
    for (name, expected), (same, found) in zip(
        plain.named_parameters(), ours.named_parameters(), strict=True
    ):
        assert name == same
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-6)
    layers = len(ours.blocks)
    gated = {"rope": layers, "mlp": layers} if family == "llama-tiny" else {}
    norm = "rms" if family == "llama-tiny" else "layer"
    assert {name: calls.count(name) for name in calls} == {norm: 2 * layers + 1, "loss": 1, **gated}


@pytest.mark.parametrize("parts", liger.PARTS)
def test_only_the_chosen_parts_are_replaced(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model, calls, build = changed("llama-tiny", parts, monkeypatch)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(tokens, tokens)
    wanted = {"all": {"norm", "rope", "mlp", "loss"}, "all but loss": {"norm", "rope", "mlp"}}.get(
        parts, {parts}
    )
    assert {"norm" if name == "rms" else name for name in calls} == wanted
    noted = build.facts.noted(liger.LigerKernels)
    assert noted is not None
    assert len(noted.names) == len(wanted)


def weighed_rows(head: torch.nn.Module, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Losses of rows, then the gradients of hidden vectors and head when each row weighs otherwise, as preferences do."""
    generator = torch.Generator().manual_seed(7)
    hidden_btd = torch.randn(4, 9, 16, generator=generator).to(device).requires_grad_()
    head_vd = (torch.randn(40, 16, generator=generator) * 0.3).to(device).requires_grad_()
    labels_bt = torch.randint(0, 40, (4, 9), generator=generator).to(device)
    labels_bt[:, :3] = IGNORED_LABEL
    labels_bt[3] = IGNORED_LABEL  # a row that only fills up a batch
    losses_b = losses_by_row(head, hidden_btd, head_vd, labels_bt)
    (losses_b * torch.tensor([0.3, -1.2, 2.0, 0.7], device=device)).sum().backward()
    assert hidden_btd.grad is not None
    assert head_vd.grad is not None
    return losses_b.detach(), hidden_btd.grad, head_vd.grad


def test_the_loss_head_serves_preferences_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(liger, "functions", lambda: stand_in(calls))
    for found, expected in zip(
        weighed_rows(liger.LigerLossHead()), weighed_rows(PlainLossHead()), strict=True
    ):
        torch.testing.assert_close(found, expected)
    assert calls == ["loss"] * 8, "each row once forward, and again for its gradient"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.filterwarnings("ignore")
def test_the_library_itself_serves_preferences_row_by_row(device: str) -> None:
    """Its gradients are made in the forward pass, before it is known how much a row weighs: they are scaled afterwards."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    if device == "cpu" and not INTERPRETED:
        pytest.skip(
            "the library's kernels are compiled on this machine, and the CPU has only the interpreter"
        )
    found = weighed_rows(liger.LigerLossHead(), device)
    for ours, expected in zip(found, weighed_rows(PlainLossHead(), device), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def seen(kernels: list[str], expected: list[str]) -> Observation:
    nothing: dict[str, Any] = dict.fromkeys(Observation.__dataclass_fields__)
    facts = Facts()
    facts.note(liger.LigerKernels(expected))
    return Observation(**{**nothing, "kernels": dict.fromkeys(kernels, 1.0), "facts": facts})


def test_evidence_needs_every_part_in_the_profile() -> None:
    expected = [liger.KERNELS["rms"], liger.KERNELS["loss"]]
    both = ["_rms_norm_forward_kernel", "liger_cross_entropy_kernel", "ampere_sgemm"]
    assert liger.evidence(seen(both, expected), {}).took_effect
    assert not liger.evidence(seen(both[:1], expected), {}).took_effect
    assert not liger.evidence(seen(both, []), {}).took_effect
    # Our own kernels are called differently.
    assert not liger.evidence(seen(["rmsnorm_forward_kernel"], [liger.KERNELS["rms"]]), {}).took_effect


def test_without_the_library_it_is_refused_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rush.techniques.kernels.liger.find_spec", lambda library: None)
    with pytest.raises(MachineError, match=r"optimization-rush\[liger\]"):
        check(recipe_of("liger"), probe("cpu"))


def test_its_loss_is_left_out_of_compiled_blocks_and_refused_in_a_full_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model, _, build = changed("llama-tiny", "all", monkeypatch)
    compile_technique.apply(build, {"scope": "block", "mode": "default"})
    assert "forward" not in model.loss_head.__dict__
    assert all("forward" in part.__dict__ for part in [*model.blocks, model.final_norm])
    monkeypatch.setattr("rush.techniques.kernels.liger.find_spec", lambda library: object())
    sentences = [
        requirement.message
        for requirement in liger.technique.requires
        if not requirement.met(probe("cpu"), recipe_of("liger", "compile"))
    ]
    assert any("cannot be traced" in sentence for sentence in sentences), sentences


# On a GPU, with the library.

SIZE = ("model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=512", "model.shape.context=256",
        "batch.sequence=256", "batch.micro=4", "batch.total_tokens=1024", "optimizer.lr=0.001")  # fmt: skip


def on_gpu(*techniques: str, name: str) -> tuple[Any, Trace]:
    run = make_run(*techniques, name=name, overrides=SIZE, machine=probe("cuda"))
    return run, trace(run, 5, watch=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("beside", [(), ("{name='compile', scope='block'}",)], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_takes_effect_and_learns_the_same(family: str, beside: tuple[str, ...]) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    torch._dynamo.reset()
    run, ours = on_gpu("liger", *beside, name=family)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    _, reference = on_gpu(name=family)
    verdict = compare(run, "float32", ours, reference)
    assert verdict.verdict == "equal", verdict.why
