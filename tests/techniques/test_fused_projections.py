"""fused_projections beyond the walk over all techniques: its gradients, its memory, its stacks, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rush.checkpoint import restore
from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.models.layers import FanOut
from rush.records.checkpoint_store import CheckpointStore
from rush.techniques import check
from rush.techniques.api.contract import Proof
from rush.techniques.api.evidence import prove
from rush.techniques.kernels.fused_projections import JoinedFanOut, matmuls_by_weight
from rush.training.build import Run
from rush.training.step import train_step, validate
from tests.techniques.tiny_runs import SHORT, Trace, compare, make_run, one_batch, recipe_of, trace

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:mkldnn_matmul failed:UserWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]
FUSED = "fused_projections"
SMALL = ["model.shape.num_layers=1", "batch.micro=2", "batch.total_tokens=64"]
BLOCKS = "{name='compile', scope='block'}"
PARTS = {"attention": ("q", "k", "v"), "mlp": ("gate", "up")}


def groups(model: nn.Module) -> list[tuple[Any, list[Any]]]:
    """Every fan-out of a model with the layers it serves."""
    found = []
    for block in model.get_submodule("blocks").children():
        for part, names in PARTS.items():
            owner = block.get_submodule(part)
            found.append((owner.get_submodule("fan_out"), [owner.get_submodule(name) for name in names]))
    return found


def proofs_of(run: Run, ours: Trace) -> dict[str, Proof]:
    assert ours.seen is not None
    return prove(run.uses, ours.seen)


def assert_equal_and_proved(
    *techniques: str, dtype: str = "float32", overrides: list[str] = SMALL
) -> tuple[Run, Trace]:
    run = make_run(FUSED, *techniques, overrides=overrides)
    ours = trace(run, 3, watch=True)
    for technique, proof in proofs_of(run, ours).items():
        assert proof.took_effect, f"{technique}: {proof.what}"
    verdict = compare(run, dtype, ours, trace(make_run(overrides=overrides), 3))
    assert verdict.verdict == "equal", verdict.why
    return run, ours


def layers_of(widths: tuple[int, ...], inputs: int) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, width, bias=False, dtype=torch.float64) for width in widths]


@pytest.mark.parametrize("widths", [(8, 3, 5), (1, 1), (7, 7), (2, 6, 6, 1)])
def test_outputs_and_gradients_are_those_of_the_layers_alone(widths: tuple[int, ...]) -> None:
    layers = layers_of(widths, 6)
    alone = [layer.weight.detach().clone().requires_grad_() for layer in layers]
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    ours_x, plain_x = (x.clone().requires_grad_() for _ in range(2))
    ours = JoinedFanOut(layers)(ours_x, *layers)
    plain = [F.linear(plain_x, weight) for weight in alone]
    douts = [torch.randn_like(out) for out in plain]
    torch.autograd.backward(ours, douts)
    torch.autograd.backward(plain, douts)
    torch.testing.assert_close(list(ours), plain)
    torch.testing.assert_close(ours_x.grad, plain_x.grad)
    torch.testing.assert_close([layer.weight.grad for layer in layers], [weight.grad for weight in alone])


def test_an_output_that_nobody_uses_has_a_gradient_of_zero() -> None:
    layers = layers_of((4, 3), 6)
    first, _ = JoinedFanOut(layers)(torch.randn(2, 6, dtype=torch.float64), *layers)
    first.sum().backward()
    assert layers[0].weight.grad is not None
    assert layers[0].weight.grad.abs().min() > 0
    assert layers[1].weight.grad is not None
    assert layers[1].weight.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("techniques", "dtype"),
    [
        pytest.param(["checkpoint_full", "accumulate"], "float32", marks=pytest.mark.slow),
        (["checkpoint_selective", "flash_attention"], "float32"),
        pytest.param(["{name='checkpoint_selective', keep='half'}"], "float32", marks=pytest.mark.slow),
        (["fused_norm", "fused_rope", "fused_mlp"], "float32"),
        pytest.param(["fused_adamw", "vocab_pad"], "float32", marks=pytest.mark.slow),
        pytest.param(["{name='adam8bit', backend='rush'}"], "float32", marks=pytest.mark.slow),
        (["amp_bf16", "fused_update"], "bfloat16"),
        pytest.param(
            ["pure_bf16", "{name='fused_update', stochastic_rounding=true, state='bfloat16'}"],
            "bfloat16",
            marks=pytest.mark.slow,
        ),
        pytest.param(["bf16_master", "fused_adamw"], "bfloat16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_stacks_take_effect_and_learn_what_plain_fp32_learns(techniques: list[str], dtype: str) -> None:
    if {"checkpoint_full", "accumulate"} <= set(techniques):
        overrides = [*SMALL, "batch.total_tokens=128"]  # two passes in a step
    else:
        overrides = SMALL if dtype == "float32" else SHORT
    run, ours = assert_equal_and_proved(*techniques, dtype=dtype, overrides=overrides)
    assert all(isinstance(joined, JoinedFanOut) for joined, _ in groups(run.model))
    assert ours.seen is not None


def test_a_traced_graph_has_the_gradients_and_the_memory_of_the_eager_one() -> None:
    """Traced whole, forward and backward, by what every compiler here stands on; generating code is for the slow ones."""
    eager, traced = (make_run(FUSED, "flash_attention", overrides=SMALL) for _ in range(2))
    for block in traced.model.blocks:
        forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True, dynamic=False)
        block.__dict__["forward"] = forward
    (batch,) = one_batch(eager)
    for _ in range(2):
        losses = [run.forward_backward(batch, torch.ones(())) for run in (eager, traced)]
        torch.testing.assert_close(losses[0], losses[1])
        for (name, ours), theirs in zip(
            traced.model.named_parameters(), eager.model.parameters(), strict=True
        ):
            assert theirs.grad is not None
            assert_near(ours.grad, theirs.grad, name)
        assert_uncopied(traced)
        for run in (eager, traced):
            run.optimizer.step()  # the graph must see the new weights at the next step
            run.optimizer.zero_grad()


def test_a_traced_validation_after_a_step_has_the_loss_of_the_eager_one() -> None:
    """Without gradients torch's tracer drops the first argument of an autograd function that is given two layers."""
    eager, traced = (make_run(FUSED, overrides=SMALL) for _ in range(2))
    for block in traced.model.blocks:
        block.__dict__["forward"] = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    (batch,) = one_batch(eager)
    for run in (eager, traced):
        train_step(run, 1, 1e-2, [batch])
    assert validate(traced, [batch]) == pytest.approx(validate(eager, [batch]), rel=1e-6)


def assert_near(ours: Tensor | None, theirs: Tensor, name: str) -> None:
    assert ours is not None, name
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "techniques",
    [
        [BLOCKS],
        ["compile"],
        ["compile", "checkpoint_full"],
        ["compile", "checkpoint_selective"],
        [BLOCKS, "fp8"],
        [BLOCKS, "amp_bf16"],
        [BLOCKS, "fused_norm", "fused_rope", "fused_mlp"],
    ],
    ids=str,
)
def test_it_compiles_with_others(techniques: list[str]) -> None:
    sixteen = "amp_bf16" in techniques
    dtype = "bfloat16" if sixteen else "float8" if "fp8" in techniques else "float32"
    run, ours = assert_equal_and_proved(*techniques, dtype=dtype, overrides=SHORT if sixteen else SMALL)
    assert ours.seen is not None
    assert ours.seen.compiled.graph_breaks == 0
    (batch,) = one_batch(run)
    run.forward_backward(batch, torch.ones(()))
    assert_uncopied(run)


def assert_uncopied(run: Run) -> None:
    for joined, layers in groups(run.model):
        for attribute in ("data", "grad"):
            tensors: list[Tensor] = [getattr(layer.weight, attribute) for layer in layers]
            assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1, attribute
            ends = [tensor.data_ptr() + tensor.nbytes for tensor in tensors]
            assert [tensor.data_ptr() for tensor in tensors[1:]] == ends[:-1], attribute
        assert joined.joined.data_ptr() == layers[0].weight.data_ptr()


@pytest.mark.parametrize("techniques", [[], ["amp_bf16"], ["bf16_master"]], ids=str)
def test_neither_weights_nor_gradients_are_copied(techniques: list[str]) -> None:
    run = make_run(FUSED, *techniques, overrides=SHORT)
    (batch,) = one_batch(run)
    run.forward_backward(batch, torch.ones(()))
    assert_uncopied(run)
    train_step(run, 1, 1e-3, [batch])
    assert all(
        joined.joined.data_ptr() == layers[0].weight.data_ptr() for joined, layers in groups(run.model)
    )


def test_what_the_attention_keeps_is_what_the_memory_effect_says() -> None:
    """The values are a view beside queries and keys, which stay for the backward pass where the core copies nothing."""
    shape = [*SMALL, "model.shape.num_kv_heads=4"]
    plain, ours = (
        trace(make_run("flash_attention", *more, overrides=shape), 1, watch=True).seen
        for more in ([], [FUSED])
    )
    assert plain is not None
    assert ours is not None
    queries_and_keys = 64 * (64 + 64) * 4
    assert ours.held_bytes - plain.held_bytes == queries_and_keys


@pytest.mark.parametrize("part", ["attention", "mlp"])
def test_one_group_alone_can_be_joined(part: str) -> None:
    run = make_run(f"{{name='{FUSED}', groups='{part}'}}", overrides=SMALL)
    ours = trace(run, 2, watch=True)
    assert proofs_of(run, ours)[FUSED].took_effect
    for block in run.model.blocks:
        for name in PARTS:
            assert isinstance(block.get_submodule(f"{name}.fan_out"), JoinedFanOut) == (name == part)
    assert ours.seen is not None
    ran, at_most = matmuls_by_weight(ours.seen, {(64, 128), (32, 64), (64, 192), (64, 96)})
    assert ran == at_most, "all batches have one length"
    # Three products of each: of the wide weight, or of keys and values; of gate, up and down, or of the wide and down.
    expected = {"attention": (3, 0, 0, 9), "mlp": (0, 6, 3, 3)}[part]
    assert (ran[64, 128], ran[32, 64], ran[64, 192], ran[64, 96]) == expected


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("packing", ["bucket", "flatten", "pad"])
def test_the_evidence_holds_where_batches_differ_in_length(packing: str, joined: bool) -> None:
    run = make_run(FUSED, packing, overrides=["objective.kind=sft", "model.shape.num_layers=1"])
    if not joined:
        for fan_out in [module for module in run.model.modules() if "fan_out" in module._modules]:
            fan_out.fan_out = FanOut()
        run.step_contexts.clear()
    proof = proofs_of(run, trace(run, 1, watch=True))[FUSED]
    assert proof.took_effect == joined, proof.what


@pytest.mark.parametrize("part", list(PARTS))
def test_the_evidence_fails_where_layers_run_one_by_one_after_all(part: str) -> None:
    run = make_run(FUSED, overrides=SMALL)
    ours = trace(run, 1, watch=True)
    assert proofs_of(run, ours)[FUSED].took_effect
    for block in run.model.blocks:
        block.get_submodule(part).fan_out = FanOut()
    run.step_contexts.clear()
    proof = proofs_of(run, trace(run, 1, watch=True))[FUSED]
    assert not proof.took_effect, proof.what


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_in_fp8_a_group_is_one_scaled_matmul(recipe: str) -> None:
    _, ours = assert_equal_and_proved(f"{{name='fp8', recipe='{recipe}'}}", dtype="float8")
    assert ours.seen is not None
    # qkv, out, gate and up, down: forward and both gradients.
    assert ours.seen.ops["rush::fp8_emulated_matmul"] == 3 * 4


def test_names_values_and_groups_of_the_optimizer_are_the_plain_ones(tmp_path: Path) -> None:
    plain, fused = make_run(overrides=SMALL), make_run(FUSED, overrides=SMALL)
    theirs, ours = plain.model.state_dict(), fused.model.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    sizes = [
        [[tuple(p.shape) for p in group["params"]] for group in run.optimizer.param_groups]
        for run in (plain, fused)
    ]
    assert sizes[0] == sizes[1]
    paths = [
        restore.save(CheckpointStore(tmp_path / name), 1, run.model, run.optimizer, {})
        for name, run in (("plain", plain), ("fused", fused))
    ]
    files = [(path / "model.safetensors").read_bytes() for path in paths]
    assert files[0] == files[1]


@pytest.mark.parametrize("precision", [[], ["bf16_master"]], ids=str)
def test_a_resumed_run_ends_at_the_same_bits(precision: list[str], tmp_path: Path) -> None:
    whole, resumed = (make_run(FUSED, *precision, overrides=SHORT) for _ in range(2))
    (batch,) = one_batch(whole)
    train_step(whole, 1, 1e-2, [batch])
    path = restore.save(CheckpointStore(tmp_path), 1, whole.model, whole.optimizer, {})
    expected = [train_step(whole, step, 1e-2, [batch]).loss for step in (2, 3)]
    restore.load(path, resumed.model, resumed.optimizer)
    assert [train_step(resumed, step, 1e-2, [batch]).loss for step in (2, 3)] == expected


def moved(run: Run) -> None:
    run.model.to(torch.float64)


def assigned(run: Run) -> None:
    state = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)


def one_replaced(run: Run) -> None:
    up = run.model.get_submodule("blocks.0.mlp.up")
    assert isinstance(up, nn.Linear)
    up.weight = nn.Parameter(up.weight.detach().clone())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("replace", [moved, assigned, one_replaced])
def test_weights_that_were_replaced_are_refused(replace: Callable[[Run], None], compiled: bool) -> None:
    # Where compiled, nothing is compiled before the refusal.
    run = make_run(FUSED, *([BLOCKS] if compiled else []), overrides=SMALL)
    batches = one_batch(run)
    replace(run)
    with pytest.raises(RecipeError, match="share one buffer"):
        train_step(run, 1, 1e-3, batches)
    with pytest.raises(RecipeError, match="share one buffer"):
        validate(run, batches)
    if not compiled:
        with pytest.raises(RecipeError, match="share one buffer"):
            run.model(batches[0].tokens_bt)


def test_a_deep_copy_is_refused_rather_than_computed_with_old_weights() -> None:
    run = make_run(FUSED, overrides=SMALL)
    tokens = one_batch(run)[0].tokens_bt
    run.model(tokens)
    with pytest.raises(RecipeError, match="a deep copy"):
        copy.deepcopy(run.model)(tokens)


def test_values_copied_into_the_weights_are_the_ones_multiplied_with() -> None:
    fused, other = make_run(FUSED, overrides=SMALL), make_run(overrides=[*SMALL, "run.seed=7"])
    batches = one_batch(fused)
    before = validate(fused, batches)
    fused.model.load_state_dict(other.model.state_dict())
    assert validate(fused, batches) == pytest.approx(validate(other, batches), rel=1e-6)
    assert validate(fused, batches) != before


def test_a_weight_changed_between_forward_and_backward_is_noticed() -> None:
    layers = layers_of((4, 3), 6)
    first, second = JoinedFanOut(layers)(torch.randn(2, 6, dtype=torch.float64, requires_grad=True), *layers)
    with torch.no_grad():
        layers[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first.sum() + second.sum()).backward()


def test_gpt2_has_nothing_to_join() -> None:
    with pytest.raises(MachineError, match=f"{FUSED} cannot run here: it needs a model with several linear"):
        check(recipe_of(FUSED, name="tiny"), probe("cpu"))
