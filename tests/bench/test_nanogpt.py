"""nanoGPT's baseline computes what our plain GPT-2 does, from the same initial weights, with and without biases."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.bench import workloads
from rush.bench.nanogpt import NanoGPT, NanoGPTOptions, build_nanogpt, measure_nanogpt
from rush.data import Batch
from rush.errors import RecipeError
from rush.hardware import probe
from rush.lab.trial.result import TrialResult
from rush.models import Decoder, Shape, build_model
from rush.models.counts import count_parameters
from rush.recipe_io import load_recipe, write_toml
from rush.training.step import train_step

SMALL = ["model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.num_heads=4", "model.shape.head_dim=8",
         "model.shape.intermediate=128", "model.shape.vocab_size=101", "model.shape.context=32", "batch.micro=2",
         "batch.sequence=20", "batch.total_tokens=none", "techniques=[]"]  # fmt: skip


def shape() -> Shape:
    return load_recipe("tiny", SMALL).shape()


def batch(masked: bool = True) -> Batch:
    tokens = torch.randint(0, 101, (2, 21), generator=torch.Generator().manual_seed(2))
    labels = tokens[:, 1:].clone()
    if masked:
        labels[1, 3:9] = -100
    return Batch(tokens[:, :-1], labels, ("a", "b"))


def ours_and_theirs(biases: bool, gelu: Any = "tanh") -> tuple[Decoder, NanoGPT]:
    """In float64, with weights large enough for attention to choose; without biases ours are zero."""
    ours, theirs = build_model(shape()), NanoGPT(shape(), biases=biases, gelu=gelu)
    ours.init_weights(1)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in ours.named_parameters():
        if biases or not name.endswith("bias"):
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    names = dict(theirs.named_parameters())
    theirs.load_state_dict(
        {name: value for name, value in ours.named_parameters() if name in names}, strict=False
    )
    return ours.double(), theirs.double()


@pytest.mark.parametrize("biases", [False, True])
def test_logits_loss_and_gradients_are_those_of_our_plain_gpt2(biases: bool) -> None:
    ours, theirs = ours_and_theirs(biases)
    given = batch()
    logits, loss = theirs(given.tokens_bt, given.labels_bt)
    # Our plain softmax, logits and loss are fp32 whatever the weights are.
    torch.testing.assert_close(logits.float(), ours(given.tokens_bt).float(), rtol=1e-5, atol=1e-6)
    expected = ours(given.tokens_bt, given.labels_bt)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    expected.backward()
    loss.backward()
    there = dict(theirs.named_parameters())
    compared = 0
    for name, parameter in ours.named_parameters():
        if name in there:
            compared += 1
            assert float((parameter.grad - there[name].grad).norm() / parameter.grad.norm()) < 1e-5, name
        else:
            assert not biases and name.endswith(".bias"), name  # noqa: PT018
    assert compared == len(there)


def test_the_exact_gelu_of_nanogpt_is_close_to_the_published_one_and_not_the_same() -> None:
    given, losses = batch(), []
    for gelu in ("none", "tanh"):
        _, theirs = ours_and_theirs(True, gelu)
        with torch.no_grad():
            losses.append(float(theirs(given.tokens_bt, given.labels_bt)[1]))
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("biases", [False, True])
def test_its_initial_weights_are_ours_of_the_same_seed(biases: bool) -> None:
    ours, theirs = build_model(shape()), NanoGPT(shape(), biases=biases)
    ours.init_weights(7)
    theirs.init_weights(7)
    there = dict(theirs.named_parameters())
    assert theirs.head.weight is theirs.embedding.weight
    for name, parameter in ours.named_parameters():
        if name in there:
            assert torch.equal(parameter, there.pop(name)), name
        else:
            assert not parameter.any(), f"{name} is left out and is not zero"
    assert not there


def test_a_step_in_our_loop_is_the_step_of_our_plain_gpt2() -> None:
    """In fp32, with biases and the published GELU: the same losses, norms and weights through clipping, decay and update."""
    from rush.training.build import build

    recipe = load_recipe("tiny", SMALL)
    options = NanoGPTOptions(biases=True, gelu="tanh", autocast=False, compiled=False)
    ours, theirs = build(recipe, probe("cpu")), build_nanogpt(recipe, probe("cpu"), options)
    for step in range(1, 5):
        mine, other = (train_step(run, step, 1e-2, [batch(masked=step > 2)]) for run in (ours, theirs))
        assert other.loss == pytest.approx(mine.loss, rel=2e-5)
        assert other.grad_norm == pytest.approx(mine.grad_norm, rel=2e-4)
    assert mine.loss < 4.3
    decays = [group["weight_decay"] for group in theirs.optimizer.param_groups]
    assert decays == [recipe.optimizer.weight_decay, 0.0]


def test_the_pass_is_under_bf16_autocast_with_tf32_and_fp32_weights() -> None:
    run = build_nanogpt(load_recipe("tiny", SMALL), probe("cpu"), NanoGPTOptions(compiled=False))
    seen: list[tuple[torch.dtype, str]] = []
    qkv: Any = run.model.get_submodule("blocks.0.attention.qkv")
    qkv.register_forward_hook(
        lambda *args: seen.append((args[2].dtype, torch.get_float32_matmul_precision()))
    )
    train_step(run, 1, 1e-3, [batch()])
    assert seen == [(torch.bfloat16, "high")]
    assert torch.get_float32_matmul_precision() == "highest"
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}


def test_a_trial_of_it_has_speed_weights_and_the_loss(small_recipe: Path, tmp_path: Path) -> None:
    recipe = load_recipe(str(small_recipe), ["techniques=[]"])
    timing = {"windows": 2, "window_ms": 1.0, "warmup_max_steps": 3}
    options = {"biases": True, "gelu": "tanh", "autocast": False, "compiled": False}
    spec = {"machine": probe("cpu").to_dict(), "recipe": write_toml(recipe), "options": options}
    result = TrialResult(tmp_path / "result.json")
    measure_nanogpt({**spec, "timing": timing, "profile": True}, result)
    found = result.found
    assert len(found["timing"]["samples_s"]) == 2
    assert found["evidence"] == [], "a CPU has no kernels to see"
    assert found["weights"] is not None
    assert found["weights"].startswith(f"trained: {count_parameters(recipe.shape()):,} float32")
    assert found["loss"] < 7


def test_another_family_or_objective_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"kind nanogpt is a GPT-2 .* family llama, its objective lm"):
        build_nanogpt(load_recipe("llama-tiny"), probe("cpu"), NanoGPTOptions())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gelu = 'exact'", r"gelu of a baseline of kind nanogpt is 'exact'; allowed: 'none' or 'tanh'"),
        ("biases = 2", r"biases .* is 2; allowed: True or False"),
        ("techniques = ['compile']", r"baseline.techniques is not a key"),
        ("with_liger = true", r"baseline.with_liger is not a key"),
    ],
)
def test_what_such_a_baseline_does_not_have_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "w.toml"
    file.write_text(
        f"""[workloads.small]
        about = "small"
        batch = {{ "batch.micro" = 2 }}
        ours = [{{ recipe = "tiny", at_least = 1.0 }}]
        [workloads.small.baseline]
        title = "them"
        kind = "nanogpt"
        recipe = "tiny"
        {text}
        """
    )
    with pytest.raises(RecipeError, match=message):
        workloads.load_workloads([], [], file)


def test_the_workloads_that_ship_take_nanogpts_default_and_the_same_with_biases() -> None:
    plain, biased = (each.baseline for each in workloads.load_workloads(["gpt2-124m", "gpt2-124m-biases"]))
    assert plain is not None
    assert biased is not None
    assert (plain.kind, dict(plain.options)) == ("nanogpt", {})
    assert (biased.kind, dict(biased.options)) == ("nanogpt", {"biases": True})
    assert dataclasses.asdict(NanoGPTOptions()) == {
        "biases": False, "gelu": "none", "autocast": True, "compiled": True,
    }  # fmt: skip
    assert plain.recipe == biased.recipe
    assert plain.recipe.shape().vocab_size == 50304
