"""Packed documents on a GPU: each core tells documents apart to the bit, and computes what plain attention computes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from rush.data import Batch
from rush.data.document_loader import BatchLayout
from rush.data.packing import BestFit, Flatten, Packing, in_order
from rush.hardware import probe
from rush.models import Decoder
from rush.techniques.api.evidence import compile_counts, prove
from rush.training.build import Run
from rush.training.step import train_step
from tests.techniques.test_packing_isolation import (
    BLOCKS,
    NAMES,
    other_borders,
    other_content,
    tried,
    watched,
)
from tests.techniques.test_packing_runs import training
from tests.techniques.tiny_runs import TextDocuments, make_run, trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
SEQUENCE = 512
OPTIONS = (
    "objective.kind=sft", "model.shape.num_layers=2", "model.shape.hidden=256", "model.shape.num_heads=4",
    "model.shape.num_kv_heads=2", "model.shape.head_dim=64", "model.shape.intermediate=512",
    f"model.shape.context={SEQUENCE}", f"batch.sequence={SEQUENCE}", "batch.micro=4", "batch.total_tokens=2048",
)  # fmt: skip
CORES = ["flash_attention", "flex_attention", "triton_attention"]


@pytest.fixture(autouse=True)
def same_bits() -> Iterator[None]:
    """The flash operator adds up the gradient of queries in whatever order its blocks finish, unless told not to."""
    torch._dynamo.reset()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run_of(*techniques: str) -> Run:
    return make_run(*techniques, overrides=OPTIONS, machine=probe("cuda"))


def packed(packing: Packing) -> Batch:
    layout = BatchLayout(TextDocuments(longest=200), packing, 4, SEQUENCE)
    plan = layout.plan(in_order(100), in_order)
    return layout.batch(next(plan.batch(i) for i in range(len(plan)) if len(plan.batch(i)[0]) >= 3))


def isolated(model: Decoder, batch: Batch) -> None:
    alone, place = watched(batch)
    with torch.autocast("cuda", torch.bfloat16):
        before = tried(model, alone.to("cuda"), place)
    for change in (other_content, partial(other_borders, longest=SEQUENCE)):
        changed = change(alone, place)
        with torch.autocast("cuda", torch.bfloat16):
            after = tried(model, changed.to("cuda"), place)
        wrong = [name for name, value in before.items() if not torch.equal(value, after[name])]
        assert not wrong, f"{change} changed {wrong}"


@pytest.mark.parametrize("packing", [BestFit(), Flatten()], ids=lambda packing: packing.name)
@pytest.mark.parametrize("core", CORES)
def test_isolated_eager(core: str, packing: Packing) -> None:
    isolated(run_of(core, "amp_bf16", NAMES[type(packing)]).model, packed(packing))


@pytest.mark.parametrize("packing", [BestFit(), Flatten()], ids=lambda packing: packing.name)
@pytest.mark.parametrize("core", CORES)
def test_isolated_compiled(core: str, packing: Packing) -> None:
    isolated(run_of(core, "amp_bf16", NAMES[type(packing)], BLOCKS).model, packed(packing))


@pytest.mark.parametrize("packing", [BestFit(), Flatten()], ids=lambda packing: packing.name)
@pytest.mark.parametrize("core", CORES)
def test_a_core_computes_what_plain_attention_computes(core: str, packing: Packing) -> None:
    """In bf16, so up to its rounding; the first documents see the same, with borders elsewhere in the row."""
    alone, place = watched(packed(packing))
    with torch.autocast("cuda", torch.bfloat16):
        plain = tried(run_of("amp_bf16", NAMES[type(packing)]).model, alone.to("cuda"), place)
        ours = tried(run_of(core, "amp_bf16", NAMES[type(packing)]).model, alone.to("cuda"), place)
    for name, value in plain.items():
        off = float((ours[name].float() - value.float()).norm() / value.float().norm())
        assert off < 0.03, f"{name} is off by {off:.3f}"


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", ["flatten", "pack_best_fit"])
def test_it_runs_compiled_in_one_graph_and_its_evidence_shows_it(core: str, name: str) -> None:
    run = run_of(core, "amp_bf16", name, BLOCKS)
    loader = training(run)
    before = compile_counts().recompiles
    losses = [train_step(run, step, 1e-3, loader.next_step()).loss for step in range(1, 9)]
    assert compile_counts().recompiles == before, "a batch was taken for something new"
    assert losses[-1] < losses[0]
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    proofs = prove(run.uses, seen)
    assert all(proof.took_effect for proof in proofs.values()), proofs


def test_padding_that_fills_a_whole_row_gives_finite_numbers() -> None:
    """A batch whose rows are mostly empty: padding is documents no longer than the kernel was told."""
    for packing in (BestFit(), Flatten()):
        run = run_of("flash_attention", "amp_bf16", NAMES[type(packing)])
        layout = BatchLayout(TextDocuments(longest=200), packing, 4, SEQUENCE)
        batch = layout.batch(layout.plan(in_order(2), in_order).batch(0))
        assert batch.padding > 2 * SEQUENCE
        result = train_step(run, 1, 1e-3, [batch])
        assert torch.isfinite(torch.tensor([result.loss, result.grad_norm])).all()
        for parameter in run.model.parameters():
            assert torch.isfinite(parameter).all()
