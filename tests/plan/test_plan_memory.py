"""The planner's bytes against what a real forward pass keeps, and what must hold whatever the numbers are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rush.hardware import probe
from rush.models import SIZES
from rush.plan.adapter_time import concatenated_a_bytes
from rush.plan.effects import TERMS
from rush.plan.memory import (
    ROUND_HEIGHT,
    ROUNDED_CHUNKS,
    block_tensors,
    final_bytes,
    memory_of,
    offloaded_bytes,
    working_bytes,
)
from rush.plan.spec import Spec, spec_of
from rush.ready import RECIPES
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.techniques import registry
from rush.training.build import build
from tests.in_turn import in_turn

SMALL = ["batch.micro=2", "batch.sequence=64", "model.shape.num_layers=2", "batch.total_tokens=128"]


def recipe_of(model: str, *techniques: str, **more: object) -> Recipe:
    named = "[" + ", ".join(t if t.startswith("{") else f'"{t}"' for t in techniques) + "]"
    base, size = (model, []) if model in RECIPES.names() else ("llama-tiny", [f"model.name={model}"])
    return load_recipe(base, [*SMALL, *size, f"techniques={named}", *(f"{k}={v}" for k, v in more.items())])


def kept_by_forward(recipe: Recipe) -> int:
    """Bytes that autograd holds after a forward pass, weights left out, each storage once."""
    run = build(recipe, probe("cpu"))
    own = {t.untyped_storage().data_ptr() for t in [*run.model.parameters(), *run.model.buffers()]}
    tokens = torch.randint(0, run.model.shape.vocab_size, (recipe.batch.micro, recipe.batch.sequence))
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        run.in_step(),
        run.autocast(),
    ):
        loss = run.model(tokens, tokens)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in held.values())


def planned(spec: Spec) -> float:
    """The same from the plan: blocks, the end of the model, log-softmax, casts, and what is known to be there besides."""
    tokens, shape, effects = spec.tokens, spec.shape, spec.effects
    total = shape.num_layers * tokens * sum(block_tensors(spec).values()) + final_bytes(spec) * tokens
    total += 4 * shape.vocab_size * tokens if not effects.factor("logits.tokens") else 0
    total += 4 * shape.vocab_size * tokens if shape.logit_softcap is not None else 0  # the tanh
    total += 8 * tokens  # labels
    if effects.size("casts", 0):
        linear = sum(
            p.numel() for name, p in build_linear(spec) if "norm" not in name and "embedding" not in name
        )
        total += 2 * linear + 2 * shape.vocab_size * shape.hidden
    if shape.has_rope:
        kinds = 1 if shape.local_rope_theta is None else 2
        total += kinds * 2 * 4 * spec.sequence * (shape.rotary_dim or shape.head_dim)  # cosines and sines
    if effects.factor("frozen"):
        total += shape.num_layers * concatenated_a_bytes(spec)
        # Nothing that the first block's first norm computes has a gradient.
        total -= tokens * (effects.size("stream", 4) * shape.hidden + 4)
    return total


def build_linear(spec: Spec) -> list[tuple[str, torch.Tensor]]:
    from rush.models import build_model

    with torch.device("meta"):
        model = build_model(spec.shape)
    return [(name, p) for name, p in model.blocks.named_parameters() if p.dim() > 1]


QUICK = {(), ("amp_bf16", "flash_attention"), ("pure_bf16",)}
QUICK_FAMILIES: set[tuple[str, tuple[str, ...]]] = {
    ("gemma2-tiny", ()), ("olmo2-tiny", ()), ("qwen3-tiny", ("flash_attention",))
}  # fmt: skip
CASES = [
    pytest.param(model, techniques, marks=() if techniques in QUICK else pytest.mark.slow)
    for model in ("tiny", "llama-tiny")
    for techniques in (
        (),
        ("amp_bf16",),
        ("pure_bf16",),
        ("flash_attention",),
        ("amp_bf16", "flash_attention"),
        ("pure_bf16", "flash_attention"),
        ("checkpoint_full",),
        ("checkpoint_full", "pure_bf16"),
        ('{name = "chunked_loss", chunk_tokens = 64}',),
        ("lora",),
    )
]


CASES += [
    pytest.param(model, techniques, marks=() if (model, techniques) in QUICK_FAMILIES else pytest.mark.slow)
    for model in sorted(name for name in SIZES if name.endswith("-tiny") and name != "llama-tiny")
    for techniques in ((), ("amp_bf16",), ("flash_attention",), ("lora",))
    if (model, techniques) != ("gemma2-tiny", ("flash_attention",))  # it has no soft cap
]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("model", "techniques"), CASES)
def test_saved_activations_are_predicted_within_2_per_cent(model: str, techniques: tuple[str, ...]) -> None:
    recipe = recipe_of(model, *techniques)
    measured = kept_by_forward(recipe)
    assert planned(spec_of(recipe, "cpu")) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("model", "groups"),
    [
        ("llama-tiny", "all"),
        ("llama-tiny", "mlp"),
        ("qwen3-tiny", "all"),  # norms read queries and keys from the joined output, which the values save
    ],
)
def test_saved_activations_of_layers_that_share_a_matmul(model: str, groups: str) -> None:
    recipe = recipe_of(model, "flash_attention", f'{{name = "fused_projections", groups = "{groups}"}}')
    assert planned(spec_of(recipe, "cpu")) == pytest.approx(kept_by_forward(recipe), rel=0.001)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-tiny", "gemma3-tiny", "olmo2-tiny"])
def test_saved_activations_of_compiled_blocks(model: str) -> None:
    torch.compiler.reset()  # torch compiles a function for a few models only
    recipe = recipe_of(model, "flash_attention", '{name = "compile", scope = "block"}')
    assert planned(spec_of(recipe, "cpu")) == pytest.approx(kept_by_forward(recipe), rel=0.02)


def test_values_that_are_a_view_of_qkv_hold_queries_and_keys_too() -> None:
    """Six times their own size for Llama-3.2-1B, as its tuning on an H200 showed (`results/tune-llama-3.2-1b-nearest-h200`)."""
    grouped = ["techniques=['pure_bf16', {name = 'cudnn_attention', heads = 'grouped'}]"]
    plain = spec_of(load_recipe("llama-3.2-1b", grouped))
    fused = spec_of(load_recipe("llama-3.2-1b", [*grouped, "techniques+=fused_projections"]))
    assert block_tensors(fused)["values"] == 6 * block_tensors(plain)["values"]


def test_the_plan_knows_the_numbers_of_the_fused_loss() -> None:
    from rush.kernels.linear_cross_entropy.chunks import ALIGNED, MOST_ROUNDED

    assert (ROUNDED_CHUNKS, ROUND_HEIGHT) == (MOST_ROUNDED, ALIGNED)


KERNEL = '{name = "fp8", casts = "kernel"}'
WHOLE = '{name = "fp8", mlp = "kernel"}'


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("model", "techniques"),
    [
        ("tiny", ("fp8",)),
        pytest.param("llama-tiny", ("fp8",), marks=pytest.mark.slow),
        ("llama-tiny", ("fp8", "fused_projections")),
        ("llama-tiny", ('{name = "fp8", recipe = "rowwise"}',)),
        ("tiny", ("int8_matmul",)),
        ("llama-tiny", ("int8_matmul",)),
        ("llama-tiny", ("fp8", "lora")),
        ("llama-tiny", ("int8_matmul", "lora")),
        *(
            pytest.param(model, (*techniques, "compile"), marks=pytest.mark.slow)
            for model, techniques in (
                ("tiny", ("fp8", "fused_bias")),
                ("tiny", (KERNEL,)),
                ("llama-tiny", ("fp8",)),
                ("llama-tiny", ("fp8", "fused_norm")),
                ("llama-tiny", ("fp8", "fused_mlp")),
                ("llama-tiny", (KERNEL,)),
                ("llama-tiny", (WHOLE, "fused_projections")),
                ("llama-tiny", ("int8_matmul",)),
                ("tiny", ("int8_matmul", "fused_bias")),
                ("llama-tiny", ("fp8", "lora")),
                ("qwen3-tiny", ("fp8", "fused_projections")),
            )
        ),
    ],
)
def test_saved_operands_of_8_bit_matmuls(
    model: str, techniques: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same recipe without them: to a scale in fp32 for each token of the four inputs of a block."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.compiler.reset()  # torch compiles a function for a few models only
    base = ("pure_bf16", "flash_attention")
    plain = (*base, *(name for name in techniques if "fp8" not in name and name != "int8_matmul"))
    one, other = recipe_of(model, *base, *techniques), recipe_of(model, *plain)
    seed = 4 if "int8_matmul" in techniques else 0  # of the step, for the whole model
    found = kept_by_forward(one) - kept_by_forward(other) - seed
    if "lora" in techniques:
        # The first block's input has no gradient, for which A of queries, keys and values (3 · rank 16) would be saved.
        found += 3 * 16 * one.shape().hidden * 2
    spec, without = spec_of(one, "cpu"), spec_of(other, "cpu")
    expected = sum(block_tensors(spec).values()) - sum(block_tensors(without).values())
    assert found / (spec.shape.num_layers * spec.tokens) == pytest.approx(expected, abs=16)


def big(*overrides: str) -> Spec:
    return spec_of(
        load_recipe(
            "llama-3.1-8b",
            [
                'techniques=["amp_bf16", "flash_attention", "fused_adamw", {name = "compile", scope = "block"}]',
                *overrides,
            ],
        )
    )


def test_memory_falls_as_shards_grow_and_no_part_is_negative() -> None:
    spec = big("batch.micro=1", "batch.total_tokens=524288")
    for axis in ("fsdp", "tp", "pp", "cp"):
        found = [
            memory_of(replace(spec, layout={**spec.layout, axis: size}, passes=8)) for size in (1, 2, 4, 8)
        ]
        totals = [memory.total for memory in found]
        # From one device to several there is more to keep; from then on every part gets smaller.
        assert all(one > other for one, other in pairwise(totals[1:])), (axis, totals)
        assert all(value >= 0 for memory in found for value in memory.parts.values())


def test_memory_grows_with_tokens_and_falls_with_checkpointing() -> None:
    one, two = big("batch.micro=1"), big("batch.micro=2")
    assert memory_of(two).tensors > memory_of(one).tensors
    full = big("batch.micro=2", "techniques+=checkpoint_full")
    selective = big("batch.micro=2", "techniques+=checkpoint_selective")
    assert memory_of(full).tensors < memory_of(selective).tensors < memory_of(two).tensors


def test_every_technique_declares_terms_of_the_planner() -> None:
    for name, technique in registry().items():
        assert {effect.term for effect in technique.memory} <= set(TERMS), name
        kept = {term for effect in technique.memory for term in effect.keeps or ()}
        assert kept <= set(TERMS), name


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("model", "techniques"),
    in_turn(
        ("tiny", "llama-tiny"),
        [((),), (("amp_bf16", "flash_attention"),), (("pure_bf16", "flash_attention"),)],
    ),
)
def test_offloaded_bytes_are_all_saved_tensors_as_often_as_they_are_saved(
    model: str, techniques: tuple[str, ...]
) -> None:
    """Counted in the hooks of a real block: a tensor that two operations keep is handed to them twice."""
    recipe = recipe_of(model, *techniques)
    run = build(recipe, probe("cpu"))
    block, spec = run.model.blocks[1], spec_of(recipe, "cpu")
    own = {t.untyped_storage().data_ptr() for t in [*run.model.parameters(), *run.model.buffers()]}
    moved, forward = [0], block.forward

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            moved[0] += tensor.numel() * tensor.element_size()
        return tensor

    def hooked(*args: object, **more: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args, **more)

    block.forward = hooked
    tokens = torch.randint(0, run.model.shape.vocab_size, (recipe.batch.micro, recipe.batch.sequence))
    with run.in_step(), run.autocast():
        run.model(tokens, tokens)
    assert offloaded_bytes(spec, 1) == pytest.approx(moved[0], rel=0.01)


def test_a_recomputed_compiled_block_holds_gradients_and_activations() -> None:
    """As the code that torch's compiler makes for such a block shows: gate, up and product, and the gradients of all three."""
    fast = ("pure_bf16", "flash_attention", '{name = "compile", scope = "block"}')
    kept, again = (spec_of(recipe_of("llama-tiny", *names)) for names in (fast, (*fast, "checkpoint_full")))
    assert working_bytes(again) - working_bytes(kept) == 2 * 2 * kept.shape.intermediate
