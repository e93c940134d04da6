"""What single techniques promise beyond the walk over all of them: scaling, master weights, padding, offloading, stacks."""

from __future__ import annotations

import gc
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from rush.checkpoint import restore
from rush.errors import Diverged, RushError
from rush.hub.export import export_model
from rush.hub.folders import load_model
from rush.models import build_model
from rush.recipe_io import load_recipe
from rush.records.checkpoint_store import CheckpointStore
from rush.techniques import Parity
from rush.techniques.api.evidence import prove
from rush.techniques.memory import on_host
from rush.techniques.memory.offload_activations import is_offloaded
from rush.techniques.memory.on_host import OffloadToHost
from rush.training.build import Run
from rush.training.loop import train_recipe
from rush.training.step import train_step, validate
from tests.fresh_cache import fresh_cache
from tests.techniques.tiny_runs import SHORT, compare, make_loader, make_run, one_batch, trace
from tests.training.small_runs import small_recipe, write_corpus

pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning",
    "ignore:.*_stable_hash_for_caching:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def test_an_overflow_of_scaled_gradients_skips_the_step_and_halves_the_scale() -> None:
    run = make_run("amp_fp16", overrides=SHORT)
    batches, before = one_batch(run), weights(run)
    run.optimizer.param_groups[0]["loss_scale"] = 2.0**40
    result = train_step(run, 1, 1e-3, batches)
    assert result.skipped
    assert result.grad_norm == 0
    assert math.isfinite(result.loss)
    assert run.scaler.get_scale() == 2.0**39
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    assert all(p.grad is None for p in run.model.parameters())
    run.optimizer.param_groups[0]["loss_scale"] = 1024.0
    result = train_step(run, 2, 1e-3, batches)
    assert not result.skipped
    assert result.grad_norm > 0
    assert any(not torch.equal(p, before[name]) for name, p in run.model.named_parameters())


def test_the_scale_does_not_change_the_gradient() -> None:
    norms = []
    for scale in (256, 65536):
        run = make_run(f"{{name='amp_fp16', initial_scale={scale}}}", overrides=SHORT)
        norms.append(train_step(run, 1, 1e-3, one_batch(run)).grad_norm)
        assert run.scaler.get_scale() == scale
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)


def test_gradients_that_are_not_finite_without_any_scaling_are_still_a_divergence() -> None:
    run = make_run("amp_fp16", overrides=SHORT)
    run.optimizer.param_groups[0]["loss_scale"] = 1.0
    run.model.get_parameter("final_norm.weight").register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(Diverged, match="step 3: the gradient norm is"):
        train_step(run, 3, 1e-3, one_batch(run))


def test_without_loss_scaling_an_infinite_gradient_is_a_divergence_at_once() -> None:
    run = make_run()
    run.model.get_parameter("final_norm.weight").register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(Diverged, match="the gradient norm is"):
        train_step(run, 1, 1e-3, one_batch(run))


@pytest.mark.parametrize(
    "technique",
    ["bf16_master", "amp_fp16", "pure_bf16", pytest.param("adam8bit", marks=pytest.mark.slow)],
)
def test_a_resumed_run_ends_at_the_same_bits(technique: str, tmp_path: Path) -> None:
    if technique == "adam8bit":
        pytest.importorskip("torchao", reason="torchao is not installed")
    changes = [] if technique == "adam8bit" else SHORT

    def run_on(run: Run, first: int, last: int) -> list[float]:
        with make_loader(run) as loader:
            batches = [list(loader.next_step()) for _ in range(last)]
        return [train_step(run, step, 1e-2, batches[step - 1]).loss for step in range(first, last + 1)]

    whole = make_run(technique, overrides=changes)
    run_on(whole, 1, 2)
    if technique == "amp_fp16":
        whole.optimizer.param_groups[0]["loss_scale"] = 512.0
        run_on(whole, 2, 2)
    path = restore.save(CheckpointStore(tmp_path), 2, whole.model, whole.optimizer, {})
    expected = run_on(whole, 3, 4)
    resumed = make_run(technique, overrides=[*changes, "run.seed=5"])
    resumed.recipe = whole.recipe
    restore.load(path, resumed.model, resumed.optimizer)
    assert run_on(resumed, 3, 4) == expected
    assert resumed.scaler.get_scale() == whole.scaler.get_scale()
    theirs = weights(whole)
    assert all(torch.equal(p, theirs[name]) for name, p in resumed.model.named_parameters())


def test_master_weights_keep_updates_that_bf16_rounds_away() -> None:
    moved = {}
    for technique in ("bf16_master", "pure_bf16"):
        run = make_run(technique, overrides=[*SHORT, "optimizer.weight_decay=0"])
        name = "blocks.0.attention_norm.weight"  # ones: bf16 has no number between 1 and 1.0078
        batches = one_batch(run)
        for step in range(1, 41):
            train_step(run, step, 2e-4, batches)
        moved[technique] = int((run.model.get_parameter(name) != 1).sum())
    assert moved["pure_bf16"] == 0
    assert moved["bf16_master"] > 10


def test_the_padded_vocabulary_never_reaches_the_weights_or_the_loss() -> None:
    padded, plain = make_run("vocab_pad"), make_run()
    ours, theirs = padded.model.state_dict(), plain.model.state_dict()
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}
    # Logits that the padding would add if it were not cut off: zeros, which would change every loss.
    hidden = torch.randn(2, 3, 64)
    weight = torch.randn(257, 64) - 5
    labels = torch.tensor([[0, 256, -100], [3, -100, 7]])
    expected = plain.model.loss_head(hidden, weight, labels)
    torch.testing.assert_close(padded.model.loss_head(hidden, weight, labels), expected)
    fresh = build_model(plain.model.shape)
    fresh.load_state_dict(ours)


def test_the_chunked_loss_equals_the_plain_one_with_masked_labels_and_a_remainder() -> None:
    run, plain = make_run("{name='chunked_loss', chunk_tokens=64}", "vocab_pad"), make_run()
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 30, 64, generator=generator).requires_grad_()
    weight = torch.randn(257, 64, generator=generator).requires_grad_()
    labels = torch.randint(0, 257, (5, 30), generator=generator)
    labels[0] = labels[3, 7:] = -100
    whole = torch.autograd.grad(plain.model.loss_head(hidden, weight, labels), (hidden, weight))
    chunked = torch.autograd.grad(run.model.loss_head(hidden, weight, labels), (hidden, weight))
    for ours, theirs in zip(chunked, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_offloaded_activations_give_the_same_bits_and_weights_stay() -> None:
    run = make_run(overrides=["batch.sequence=32"])
    block = run.model.blocks[0]
    x = torch.randn(16, 32, 64)
    assert run.model.rotary is not None
    rotary = run.model.rotary(torch.arange(32)[None])

    def gradients(moved: Counter[str] | None) -> list[torch.Tensor]:
        start = x.clone().requires_grad_()
        if moved is None:
            out = block(start, rotary=rotary)
        else:
            stay = frozenset(p.untyped_storage().data_ptr() for p in block.parameters())
            with OffloadToHost(lambda tensor: is_offloaded(tensor, stay), moved, pin=False):
                out = block(start, rotary=rotary)
        return list(torch.autograd.grad(out.square().sum(), [start, *block.parameters()]))

    moved: Counter[str] = Counter()
    assert all(torch.equal(a, b) for a, b in zip(gradients(moved), gradients(None), strict=True))
    activation_bytes = x.numel() * 4
    assert moved["bytes"] > 5 * activation_bytes
    assert moved["bytes"] % 4 == 0


@pytest.mark.parametrize(
    "compiled",
    [(), pytest.param(("{name='compile', scope='block'}",), marks=pytest.mark.slow)],
    ids=["eager", "compiled"],
)
def test_inputs_of_blocks_that_wait_on_the_host_come_back_as_they_were(
    compiled: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that an input is many pieces, the last one shorter.
    monkeypatch.setattr(on_host, "PIECE", 300)
    moved: Counter[str] = Counter()

    def is_input(tensor: torch.Tensor) -> bool:
        return tensor.dim() == 3 and tensor.shape[-1] == run.model.shape.hidden and tensor.is_floating_point()

    results = []
    for waits in (False, True):
        run = make_run("checkpoint_full", *compiled, overrides=SHORT)
        if waits:  # by hand: on a CPU the technique refuses, since the host's memory is its own
            run.step_contexts.append(lambda: OffloadToHost(is_input, moved, pin=False))
        batches = one_batch(run)
        results.append([train_step(run, step, 1e-2, batches) for step in (1, 2, 3)])
    assert results[0] == results[1]
    inputs = run.model.shape.num_layers * batches[0].tokens_bt.numel() * run.model.shape.hidden * 4
    assert moved["bytes"] >= 3 * inputs


def test_inputs_wait_on_the_host_only_where_it_is_elsewhere() -> None:
    with pytest.raises(RushError, match=r'inputs = "host" needs a GPU'):
        make_run("{name='checkpoint_full', inputs='host'}", overrides=SHORT)


def test_garbage_is_collected_only_every_so_many_steps_and_the_collector_is_on_again_afterwards() -> None:
    run = make_run("{name='gc_control', every=20}", overrides=SHORT)
    batches = one_batch(run)
    collections = Counter[str]()

    def count(phase: str, info: dict[str, int]) -> None:
        collections["inside" if not gc.isenabled() else "outside"] += phase == "start"

    gc.callbacks.append(count)
    try:
        for step in range(1, 21):
            train_step(run, step, 1e-3, batches)
            assert gc.isenabled()
    finally:
        gc.callbacks.remove(count)
    assert collections["inside"] == 1


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_techniques_that_may_be_combined_run_together_and_all_take_effect(name: str) -> None:
    stack = ["flash_attention", "{name='chunked_loss', chunk_tokens=64}", "vocab_pad", "checkpoint_full",
             "accumulate", "fused_adamw", "gc_control", "loader_workers"]  # fmt: skip
    run = make_run(*stack, name=name)
    ours = trace(run, 4, watch=True)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    assert len(proofs) == len(stack)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    verdict = compare(run, "float32", ours, trace(make_run(name=name), 4))
    assert verdict.verdict == "equal", verdict.why


def test_validation_and_checkpoints_do_not_see_the_techniques(tmp_path: Path) -> None:
    stack = ["flash_attention", "{name='chunked_loss', chunk_tokens=64}", "vocab_pad", "checkpoint_selective"]
    run, plain = make_run(*stack), make_run()
    batches = one_batch(run)
    assert validate(run, batches) == pytest.approx(validate(plain, batches), rel=1e-6)
    restore.save(CheckpointStore(tmp_path), 1, run.model, run.optimizer, {})
    restore.load(CheckpointStore(tmp_path).path(1), plain.model)


def test_saving_half_of_the_matmuls_is_distinguished_from_saving_all() -> None:
    run = make_run("{name='checkpoint_selective', keep='half'}")
    ours = trace(run, 2, watch=True)
    assert ours.seen is not None
    technique = run.uses[0].technique
    assert technique.evidence(ours.seen, {"keep": "half"}).took_effect
    assert not technique.evidence(ours.seen, {"keep": "all"}).took_effect
    assert compare(run, "float32", ours, trace(make_run(), 2)).verdict == "equal"


def test_a_run_with_techniques_saves_loads_and_exports_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    shape = {
        "num_layers": 1,
        "hidden": 32,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate": 64,
        "vocab_size": 321,
    }
    sections = small_recipe(
        write_corpus(tmp_path / "corpus"),
        family="llama",
        model={"shape": shape},
        schedule={"steps": 3, "warmup": 1},
        run={"save_every": 3, "validate_every": 0, "sample_every": 0, "sample_tokens": 4},
    )
    used = ["vocab_pad", "flash_attention", "checkpoint_full", "accumulate", "loader_workers", "gc_control"]
    (tmp_path / "recipe.toml").write_text(f"techniques = {used}\n{sections}")
    run = tmp_path / "run"
    train_recipe(load_recipe(str(tmp_path / "recipe.toml")), run)
    model = load_model(run)
    assert model.embedding.weight.shape == (321, 32)
    assert export_model(run, tmp_path / "exported").vocab_size == 321
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(load_model(tmp_path / "exported")(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_whole_models_and_blocks_can_be_compiled_one_after_another(name: str) -> None:
    """Also with recomputation inside; a block's graph serves all blocks."""
    plain = trace(make_run(name=name), 3)
    for scope, beside in (
        ("model", []),
        ("block", []),
        ("block", ["checkpoint_selective"]),
        ("model", ["checkpoint_full"]),
    ):
        run = make_run(f"{{name='compile', scope='{scope}'}}", *beside, "flash_attention", name=name)
        ours = trace(run, 3, watch=True)
        assert ours.seen is not None
        proofs = prove(run.uses, ours.seen)
        assert all(proof.took_effect for proof in proofs.values()), proofs
        assert ours.seen.compiled.graph_breaks == 0
        # The model; or all blocks, the final norm and the loss, of which a run before may have compiled some.
        assert 1 <= ours.seen.compiled.graphs <= (1 if scope == "model" else 3)
        # Angles are turned into sines once a pass and not in every layer; a whole graph has that inside.
        made = ours.seen.ops.get("rush::cos_and_sin", 0)
        assert (made > 0) == (name == "llama-tiny" and scope == "model")
        assert made <= ours.seen.ops.get("CompiledFunction", 0)
        assert {use.technique.parity for use in run.uses} <= {Parity.CLOSE, Parity.EXACT}
        assert compare(run, "float32", ours, plain).verdict == "equal"


def test_a_master_copy_shows_updates_smaller_than_a_step_of_bf16() -> None:
    """The copy starts from the exact weights: of many weights, the right share crosses to the next bf16 number."""
    run = make_run("bf16_master")
    weight = run.model.get_parameter("blocks.0.mlp.up.weight")
    before, lr = weight.detach().float().clone(), 1e-6
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for group in run.optimizer.param_groups:
        group["lr"], group["weight_decay"] = lr, 0.0
    run.optimizer.step()
    # Adam's first step moves every weight by the learning rate, a hundredth of the distance of two numbers near 0.02.
    moved = float((before - weight.detach().float()).mean())
    assert moved == pytest.approx(lr, rel=0.25), moved
