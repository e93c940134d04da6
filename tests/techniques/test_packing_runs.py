"""Packings in runs: few graphs, the right mean over unequal labels, evidence in figures, refusals in sentences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.data.document_loader import DocumentLoader
from rush.errors import MachineError, RecipeError
from rush.hardware import Device, Machine, probe
from rush.techniques import check
from rush.techniques.api.evidence import compile_counts, prove
from rush.techniques.api.tolerances import gradients_of
from rush.techniques.packing.packings import PackingStats
from rush.training.build import Run
from rush.training.step import train_step, validate
from tests.techniques.tiny_runs import TextDocuments, make_loader, make_run, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:mkldnn_matmul failed:UserWarning",
)
SFT = ("objective.kind=sft", "model.shape.num_layers=1")
BLOCKS = "{name='compile', scope='block'}"


def training(run: Run) -> DocumentLoader:
    """As training packs: as many documents as fit."""
    batch = run.recipe.batch
    return DocumentLoader(
        TextDocuments(longest=batch.sequence + 1),
        micro=batch.micro,
        sequence=batch.sequence,
        batches_per_step=run.recipe.accumulation,
        seed=3,
        **run.loader_options,
    )


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced, guarded and counted as ever, but run as they are: code for each takes a minute."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def graphs_over(run: Run, steps: int) -> tuple[int, int, set[Any]]:
    """Recompiles in the first step and after it, and the shapes that came."""
    loader, shapes = training(run), set()
    counts = [compile_counts().recompiles]
    for step in range(1, steps + 1):
        batches = list(loader.next_step())
        shapes |= {batch.tokens_bt.shape for batch in batches}
        train_step(run, step, 1e-3, batches)
        counts.append(compile_counts().recompiles)
    return counts[1] - counts[0], counts[-1] - counts[1], shapes


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("name", ["flatten", "pack_best_fit", "pack_concat"])
def test_packed_batches_are_of_one_shape_and_compiled_once(name: str) -> None:
    run = make_run(name, BLOCKS, overrides=SFT)
    first, later, shapes = graphs_over(run, 8)
    assert (first, later, len(shapes)) == (0, 0, 1)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(("name", "shapes"), [("pad", 8), pytest.param("bucket", 4, marks=pytest.mark.slow)])
def test_padded_batches_are_compiled_once_for_each_of_few_lengths(name: str, shapes: int) -> None:
    """Also where those are more than the compiler takes by itself: it would end the run, here after two."""
    before = compile_counts().recompiles
    with torch._dynamo.config.patch(recompile_limit=2):
        run = make_run(f"{{name='{name}', shapes={shapes}}}", BLOCKS, overrides=SFT)
        _, _, lengths = graphs_over(run, 12)
        recompiles = compile_counts().recompiles - before
        validate(run, training(run).next_step())
        assert torch._dynamo.config.recompile_limit == 2, "the setting leaked out of the steps"
    assert 3 <= len(lengths) <= shapes
    # The block, the final norm and the loss head are a graph each.
    assert recompiles == 3 * (len(lengths) - 1)


def gradient_of_step(run: Run, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    kept: dict[str, torch.Tensor] = {}
    handle = run.optimizer.register_step_pre_hook(lambda *_: kept.update(gradients_of(run.model)))
    result = train_step(run, 1, 1e-3, batches)
    handle.remove()
    return result.loss, kept


@pytest.mark.parametrize("name", ["bucket", "pack_concat", "pack_best_fit", "flatten"])
def test_a_step_is_the_mean_over_all_labels_of_unequal_micro_batches(name: str) -> None:
    """Against the mean computed here, micro batch by micro batch, from the plain model's summed losses."""
    options = (*SFT, "batch.total_tokens=512", "optimizer.clip=0")
    run = make_run(name, overrides=options)
    batches = list(training(run).next_step())
    # One of the micro batches loses most of its labels: the mean of means would give the rest too much weight.
    labels_bt = batches[0].labels_bt.clone()
    keep = (labels_bt != IGNORED).flatten().nonzero()[:3]
    few = torch.full_like(labels_bt, IGNORED)
    few.view(-1)[keep] = labels_bt.view(-1)[keep]
    batches[0] = replace(batches[0], labels_bt=few)
    counts = [batch.num_labels for batch in batches]
    assert counts[0] == 3
    assert min(counts[1:]) > 10
    model = make_run(overrides=options).model
    losses = [
        model(
            batch.tokens_bt,
            batch.labels_bt,
            positions_bt=batch.positions_bt,
            documents_bt=batch.documents_bt,
            starts_n=batch.starts_n,
        )
        for batch in batches
    ]
    expected = torch.stack(losses).sum() / sum(counts)
    expected.backward()
    loss, gradients = gradient_of_step(run, batches)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for key, wanted in gradients_of(model).items():
        torch.testing.assert_close(gradients[key], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("core", [(), ("flash_attention",)], ids=["plain", "flash"])
def test_a_packed_micro_batch_may_be_cut_into_passes(core: tuple[str, ...]) -> None:
    options = (*SFT, "optimizer.clip=0")
    whole, cut = (
        make_run(*core, "pack_best_fit", *more, overrides=options) for more in ((), ("accumulate",))
    )
    batches = list(training(whole).next_step())
    (loss, gradients), (cut_loss, cut_gradients) = (gradient_of_step(run, batches) for run in (whole, cut))
    assert cut_loss == pytest.approx(loss, rel=1e-6)
    for key, wanted in gradients.items():
        torch.testing.assert_close(cut_gradients[key], wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["pack_best_fit", "flatten"])
def test_packed_rows_work_with_checkpointing(name: str) -> None:
    plain, again = (make_run(name, *more, overrides=SFT) for more in ((), ("checkpoint_full",)))
    batches = list(training(plain).next_step())
    (loss, gradients), (second, second_gradients) = (gradient_of_step(run, batches) for run in (plain, again))
    assert second == loss
    assert all(torch.equal(second_gradients[key], gradients[key]) for key in gradients)


def test_the_evidence_reports_the_share_of_padding() -> None:
    run = make_run("flatten", overrides=(*SFT, "batch.total_tokens=512"))
    seen = trace(run, 2, watch=True).seen
    assert seen is not None
    proof = prove(run.uses, seen)["flatten"]
    assert proof.took_effect
    noted = run.facts.noted(PackingStats)
    assert noted is not None
    assert noted.tokens == 128 * noted.micro_batches
    assert f"{noted.documents} documents in {noted.micro_batches} micro batches of 1×128" in proof.what
    assert f"{noted.padding / noted.tokens:.1%} of the tokens are padding" in proof.what
    assert "0 recompiles" in proof.what


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("pad", "bucket")), "flatten"]
)
def test_a_packing_whose_batches_never_came_is_no_evidence(name: str) -> None:
    """The loader was given other options than the technique set: what was asked for did not happen."""
    run = make_run(name, overrides=(*SFT, "batch.total_tokens=512"))
    run.loader_options.pop("packing")
    seen = trace(run, 2, watch=True).seen
    assert seen is not None
    assert not prove(run.uses, seen)[name].took_effect, prove(run.uses, seen)[name].what


@pytest.mark.parametrize("name", ["bucket", "pack_concat", "pack_best_fit", "flatten", "pad"])
def test_pretraining_is_refused(name: str) -> None:
    with pytest.raises(MachineError, match=rf"technique {name} cannot run here: it pa(cks|ds) conversations"):
        check(recipe_of(name), probe("cpu"))


@pytest.mark.parametrize("name", ["bucket", "pack_concat", "pack_best_fit", "flatten"])
def test_preferences_are_padded_only(name: str) -> None:
    with pytest.raises(MachineError, match="preferences keep two answers together"):
        check(recipe_of(name, overrides=["objective.kind=dpo"]), probe("cpu"))
    check(recipe_of("pad", overrides=["objective.kind=dpo"]), probe("cpu"))


def gpu() -> Machine:
    device = Device("a new GPU", 80 * 2**30, capability=(9, 0))
    return replace(probe("cpu"), device="cuda", devices=(device,), triton="3.6")


def test_what_cannot_be_combined_is_refused_with_the_reason() -> None:
    sft = ["objective.kind=sft"]
    with pytest.raises(
        MachineError, match=r"does not support packed documents with cuDNN.*use flash_attention"
    ):
        check(recipe_of("cudnn_attention", "amp_bf16", "flatten", overrides=sft), gpu())
    check(recipe_of("cudnn_attention", "amp_bf16", "bucket", overrides=sft), gpu())
    with pytest.raises(MachineError, match="one sequence length: set shapes=1"):
        check(recipe_of("flex_attention", "pad", overrides=sft), gpu())
    check(recipe_of("flex_attention", "{name='pad', shapes=1}", overrides=sft), gpu())
    check(recipe_of("flex_attention", "flatten", overrides=sft), gpu())
    with pytest.raises(MachineError, match="one row, which accumulate cannot split"):
        check(recipe_of("flatten", "accumulate", overrides=sft), gpu())
    with pytest.raises(MachineError, match="every new length would recompile"):
        check(recipe_of("bucket", "compile", overrides=sft), gpu())
    with pytest.raises(RecipeError, match="cannot be combined"):
        check(recipe_of("flatten", "bucket", overrides=sft), gpu())


def test_steps_of_the_same_documents_differ_only_by_rounding_between_packings() -> None:
    """What the registry's parity test rests on: the loader gives each packing the plain run's documents."""
    options = (*SFT, "batch.total_tokens=512")
    names = [
        sorted(
            name
            for batch in make_loader(make_run(*uses, overrides=options)).next_step()
            for name in batch.samples
        )
        for uses in ((), ("bucket",), ("pack_best_fit",), ("flatten",))
    ]
    assert names[0]
    assert all(other == names[0] for other in names)
