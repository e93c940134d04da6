"""A frozen base in parts, and what else stands beside sharding: N ranks do what one rank does with the same techniques."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rush.checkpoint.reader import SavedTensors
from rush.evaluate.overfit import MOST_LEFT
from rush.models.counts import list_parameters
from rush.models.quantized_formats import Form, stored_parts
from rush.models.shape import Shape
from rush.records.checkpoint_pieces import KINDS
from rush.records.checkpoint_store import verify
from tests.parallel.rank_work import Result, learn, on_ranks, recipe
from tests.parallel.shard_work import (
    overfit,
    pass_adapters,
    prefer,
    reductions,
    wait_on_host,
    whole_matrices,
)
from tests.parallel.test_pipeline import together
from tests.parallel.test_sameness import furthest

NF4 = {backend: f"{{name='qlora', backend='{backend}'}}" for backend in ("bitsandbytes", "torchao")}
INT8 = {backend: f"{{name='int8_base', backend='{backend}'}}" for backend in ("bitsandbytes", "torchao")}
DORA = "{name='lora', variant='dora'}"
ZERO2, ZERO1 = "{name='fsdp', stage='gradients'}", "{name='fsdp', stage='optimizer'}"
BLOCKS = "{name='compile', scope='block'}"
FSDP, DDP, BOTH = {"fsdp": 2}, {"ddp": 2}, {"ddp": 2, "fsdp": 2}
SEQUENCE = 32
slow = pytest.mark.slow

CASES = [
    pytest.param("llama", FSDP, (NF4["bitsandbytes"],), marks=slow, id="qlora"),
    pytest.param("gpt2", FSDP, ("lora",), marks=slow, id="lora, GPT-2"),
    pytest.param("llama", FSDP, ("lora", "{name='fsdp', unit='model'}"), marks=slow, id="lora, one unit"),
    pytest.param("llama", FSDP, (DORA,), marks=slow, id="dora"),
    pytest.param("gpt2", FSDP, (NF4["torchao"], ZERO2), marks=slow, id="qlora by torchao, ZeRO-2, GPT-2"),
    pytest.param("llama", FSDP, (NF4["bitsandbytes"], ZERO1), marks=slow, id="qlora, ZeRO-1"),
    pytest.param("llama", FSDP, ("{name='qlora', variant='dora'}",), marks=slow, id="qlora with dora"),
    pytest.param("llama", FSDP, (INT8["bitsandbytes"],), marks=slow, id="int8_base"),
    pytest.param("llama", FSDP, (INT8["torchao"],), marks=slow, id="int8_base by torchao"),
    pytest.param(
        "llama",
        BOTH,
        ("{name='qlora', rank=4}", "checkpoint_full"),
        marks=slow,
        id="qlora, hybrid, checkpointing",
    ),
    pytest.param("llama", FSDP, (NF4["bitsandbytes"], BLOCKS), marks=slow, id="qlora, compiled"),
    pytest.param("llama", DDP, (NF4["bitsandbytes"],), marks=slow, id="qlora on copies"),
    pytest.param("gpt2", FSDP, ("muon",), id="muon, GPT-2"),
    pytest.param("llama", BOTH, ("muon", ZERO1), marks=slow, id="muon, hybrid, ZeRO-1"),
    pytest.param("llama", FSDP, ("muon", "{name='compile', scope='block'}"), marks=slow, id="muon, compiled"),
]


@cache
def one_rank(family: str, techniques: tuple[str, ...], steps: int) -> Result:
    alone = tuple(entry for entry in techniques if "'fsdp'" not in entry)
    found: Result = on_ranks(1, learn, family, {}, alone, steps)[0]
    return found


@pytest.mark.parametrize(("family", "layout", "techniques"), CASES)
def test_a_technique_beside_sharding_does_what_it_does_alone(
    request: pytest.FixtureRequest, family: str, layout: dict[str, int], techniques: tuple[str, ...]
) -> None:
    steps = 20 if request.node.get_closest_marker("slow") else 6
    reference = one_rank(family, techniques, steps)
    # Batches differ, and they are this project's own sources, which change: so the best of the later ones.
    first, *later = reference["losses"]
    assert min(later) < 0.98 * first, "nothing was learned, so nothing is compared"
    found = on_ranks(int(np.prod(list(layout.values()))), learn, family, layout, techniques, steps)
    for ours in found:
        apart = furthest(ours, reference)
        assert max(apart.values()) < 1e-5, apart
    assert all(took_effect for took_effect, _ in found[0]["proofs"].values()), found[0]["proofs"]


@pytest.mark.parametrize(
    ("ranks", "shape", "number"), [(2, (5, 3), 3), pytest.param(3, (4, 2), 2, marks=slow)]
)
def test_rows_of_whole_matrices_come_back_to_their_ranks(
    ranks: int, shape: tuple[int, int], number: int
) -> None:
    """With rows that do not divide; with a rank that holds no row and computes no matrix."""
    assert on_ranks(ranks, whole_matrices, shape, number) == [True] * ranks


def bytes_of_first_rank(shape: Shape, ranks: int, rank: int = 16) -> tuple[int, int, int]:
    """Base, adapters and Adam's moments of the first of `ranks` FSDP ranks, counted by hand: NF4 blocks, the rest in fp32.

    FSDP shards along the first dim, and the first rank has the longest shard.
    """

    def shard(dims: tuple[int, ...], size: int, sharded: bool = True) -> int:
        return -(-dims[0] // (ranks if sharded else 1)) * math.prod(dims[1:]) * size

    base = trained = 0
    for spec in list_parameters(shape):
        if not (spec.matmul and spec.name.startswith("blocks.")):
            base += shard(spec.dims, 4)
            continue
        # Scales of scales and tables are in fp32, and whole on every rank.
        for count, dtype in stored_parts(Form("nf4", "bitsandbytes"), *spec.dims).values():
            base += shard((count,), dtype.itemsize, not dtype.is_floating_point)
        trained += shard((rank, spec.dims[1]), 4) + shard((spec.dims[0], rank), 4)
    return base, trained, 2 * trained


@pytest.mark.slow
def test_a_sharded_quantized_base_overfits_a_batch_with_the_bytes_counted_by_hand() -> None:
    changes = ("optimizer.lr=0.01", "batch.total_tokens=64")
    shape = recipe("llama", FSDP, (NF4["bitsandbytes"],), *changes).shape()
    for count, steps in ((1, 1), (2, 16)):
        layout = {"fsdp": count}
        first, *others = on_ranks(count, overfit, layout, (NF4["bitsandbytes"],), steps, changes)
        assert (first["base"], first["trained"], first["moments"]) == bytes_of_first_rank(shape, count)
        for other in others:
            # The bytes are those of both, and of what every rank has: tables and scales of scales.
            assert 0.99 < other["base"] / first["base"] <= 1
            assert other["trained"] == first["trained"]
        for ours in (first, *others):
            assert (ours["losses"][-1] < MOST_LEFT * ours["losses"][0]) == (steps > 1), ours["losses"]


def bits_of(path: str) -> dict[tuple[str, str], bytes]:
    """Every tensor of a checkpoint, whoever wrote it."""
    found: dict[tuple[str, str], bytes] = {}
    for kind in KINDS:
        with SavedTensors(verify(Path(path)), kind) as saved:
            found |= {(kind, name): saved[name].numpy().tobytes() for name in saved.names}
    return found


@slow
@pytest.mark.parametrize("technique", [NF4["bitsandbytes"], DORA])
def test_adapters_go_through_layouts_to_the_same_bits(tmp_path: Path, technique: str) -> None:
    def passed(layout: dict[str, int], source: str | None, steps: int, name: str) -> Result:
        count = int(np.prod(list(layout.values())))
        found: list[Result] = on_ranks(
            count, pass_adapters, layout, (technique,), source, str(tmp_path / name), steps
        )
        return found[0]

    first = passed(FSDP, None, 2, "sharded")
    alone = passed({}, first["path"], 0, "alone")
    last = passed(FSDP, alone["path"], 0, "last")
    first_bits, *others = (bits_of(found["path"]) for found in (first, alone, last))
    assert all(bits == first_bits for bits in others)
    states = [json.loads((Path(found["path"]) / "state.json").read_text()) for found in (first, alone, last)]
    assert states[0]["base"] == states[1]["base"] == states[2]["base"], "one base, whoever names it"
    assert all(".adapter." in name for kind, name in first_bits if not name.startswith("group."))
    assert np.array_equal(first["logits"], last["logits"])
    assert np.abs(first["logits"]).max() > 0


@slow
def test_packed_moments_go_through_layouts_to_the_same_bits(tmp_path: Path) -> None:
    technique, path, found = "{name='adam8bit', backend='rush'}", None, []
    # Every row of a tensor large enough to be packed comes in whole blocks.
    wide = (
        "model.shape.num_layers=1",
        "model.shape.hidden=256",
        "model.shape.head_dim=2",
        "model.shape.intermediate=8",
    )
    for name, count in (("sharded", 2), ("alone", 1), ("last", 2)):
        words = ((technique,), path, str(tmp_path / name), 0 if path else 1, (*wide, "batch.total_tokens=64"))
        path = on_ranks(count, pass_adapters, {"fsdp": count}, *words)[0]["path"]
        found.append(bits_of(path))
    assert found[0] == found[1] == found[2]
    assert any(name.endswith("exp_avg.scales") for _, name in found[0])


NARROW = (
    "model.shape.num_layers=1",
    "model.shape.hidden=32",
    "model.shape.head_dim=8",
    "model.shape.intermediate=32",
)
SHORT = ("batch.total_tokens=64",)
"""For kernels that the interpreter takes long for: a micro batch for each of two ranks."""
IN_BLOCKS = (
    "model.shape.num_layers=1",
    "model.shape.hidden=256",
    "model.shape.head_dim=4",
    "model.shape.intermediate=16",
)
FP32, HALF, COARSE = (
    {"gradients": 1e-5, "others": 1e-5},
    {"gradients": 1e-3, "others": 1e-4},
    {"gradients": 2e-2, "others": 2e-3},
)
OTHERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, float]]] = {
    "fused_update": (("fused_update",), NARROW, FP32),
    # The blocks are the same; a gradient that differs in its last bit can turn a code over.
    "adam8bit": (("{name='adam8bit', backend='rush'}",), IN_BLOCKS, {"gradients": 1e-5, "others": 1e-3}),
    "offload": (("{name='fsdp', offload=true}", "fused_adamw"), NARROW, FP32),
    "amp_fp16": (("amp_fp16",), NARROW, HALF),
    "amp_bf16, summed in fp32": (("amp_bf16", "{name='fsdp', reduce_dtype='float32'}"), NARROW, HALF),
    "bf16_master": (("bf16_master",), NARROW, COARSE),
    "bf16_master, summed in fp32": (
        ("bf16_master", "fused_adamw", "{name='fsdp', reduce_dtype='float32'}"),
        NARROW,
        COARSE,
    ),
    "pure_bf16 by our kernel": (("pure_bf16", "{name='fused_update', state='bfloat16'}"), NARROW, COARSE),
    "fp8": (("fp8",), NARROW, {"gradients": 1e-5, "others": 1e-4}),
    "our kernels": (("fused_norm", "fused_mlp", "fused_rope", "fused_loss"), (*NARROW, *SHORT), FP32),
    "our attention": (("triton_attention",), ("model.shape.num_layers=1", *SHORT), FP32),
    "lora in bf16": (("lora", "bf16_master"), NARROW, COARSE),
}


@slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_kernels_and_precisions_beside_sharding_do_what_they_do_alone(name: str) -> None:
    techniques, more, allowed = OTHERS[name]
    alone = tuple(entry for entry in techniques if "'fsdp'" not in entry)
    steps = 1 if more[-1:] == SHORT else 3
    reference = on_ranks(1, learn, "llama", {}, alone, steps, "", more)[0]
    for ours in on_ranks(2, learn, "llama", FSDP, techniques, steps, "", more):
        apart = furthest(ours, reference)
        assert apart.pop("gradients") < allowed["gradients"]
        assert max(apart.values()) < allowed["others"], apart
        assert all(took_effect for took_effect, _ in ours["proofs"].values()), ours["proofs"]


@slow
@pytest.mark.parametrize("axis", ["ddp", "fsdp", "pp", "cp"])
def test_gpt2_s_bias_gradients_are_made_on_the_way_on_several_ranks_too(axis: str) -> None:
    more = ("model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.head_dim=8", *SHORT)
    (alone,) = on_ranks(1, learn, "gpt2", {}, ("fused_bias",), 2, "", more)
    ranks = on_ranks(2, learn, "gpt2", {axis: 2}, ("fused_bias",), 2, "", more)
    for ours in together(ranks) if axis == "pp" else ranks:
        assert max(furthest(ours, alone).values()) < 1e-5
    assert ranks[0]["proofs"]["fused_bias"][0], ranks[0]["proofs"]


@slow
@pytest.mark.parametrize("stage", ["parameters", "gradients", "optimizer"])
def test_copies_of_shards_add_up_several_passes_once(stage: str) -> None:
    technique = f"{{name='fsdp', stage='{stage}'}}"
    sizes = {passes: [f"batch.total_tokens={passes * 4 * SEQUENCE}"] for passes in (1, 3)}
    counts = {passes: on_ranks(4, reductions, BOTH, [technique], more)[0] for passes, more in sizes.items()}
    assert counts[1] == counts[3] > 0, "gradients between copies are exchanged with the last pass only"
    ours = on_ranks(4, learn, "gpt2", BOTH, [technique], 6, "", sizes[3])
    alone = learn("gpt2", {}, (), 6, "", sizes[3])
    for found in ours:
        np.testing.assert_allclose(found["losses"], alone["losses"], rtol=1e-5)
        np.testing.assert_allclose(found["norms"], alone["norms"], rtol=1e-4)


@slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_gathering_in_bf16_learns_what_bf16_weights_with_fp32_copies_learn() -> None:
    reference = on_ranks(1, learn, "llama", {}, ("bf16_master",), 3, "", NARROW)[0]
    policy = "{name='fsdp', param_dtype='bfloat16', reduce_dtype='float32'}"
    ours = on_ranks(2, learn, "llama", FSDP, (policy,), 3, "", NARROW)[0]
    apart = furthest(ours, reference)
    assert apart.pop("gradients") < 2e-2
    assert max(apart.values()) < 2e-3, apart
    assert ours["proofs"]["fsdp"][0], ours["proofs"]


@slow
def test_activations_wait_on_the_host_beside_sharding() -> None:
    alone = on_ranks(1, wait_on_host, {})[0]
    for ours in on_ranks(2, wait_on_host, FSDP):
        assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert ours["moved"] > 0


@pytest.mark.parametrize(
    ("layout", "techniques", "more"),
    [
        pytest.param(FSDP, (), (), id="fsdp"),
        pytest.param(DDP, (), ("objective.loss=ipo",), marks=slow, id="ddp, ipo"),
        pytest.param(FSDP, (), ("objective.reference=live",), marks=slow, id="fsdp, live"),
        pytest.param(DDP, ("lora",), ("objective.reference=live",), marks=slow, id="ddp, lora, live"),
        pytest.param(FSDP, ("qlora",), ("objective.reference=live",), marks=slow, id="fsdp, qlora, live"),
        pytest.param(BOTH, ("lora",), (), marks=slow, id="hybrid, lora"),
        pytest.param(
            FSDP, (), ("objective.loss=simpo", "objective.margin=0.5"), marks=slow, id="fsdp, simpo"
        ),
    ],
)
def test_ranks_prefer_what_one_rank_prefers(
    tmp_path: Path, layout: dict[str, int], techniques: tuple[str, ...], more: tuple[str, ...]
) -> None:
    for name in ("alone", "ranks"):
        (tmp_path / name).mkdir()
    alone = on_ranks(1, prefer, {}, techniques, more, str(tmp_path / "alone"))[0]
    found = on_ranks(
        int(np.prod(list(layout.values()))), prefer, layout, techniques, more, str(tmp_path / "ranks")
    )
    assert alone["losses"][0] != alone["losses"][-1]
    assert {"reward_margin", "accuracy"} <= alone["figures"][-1].keys()
    for ours in found:
        assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert ours["held_out"] == pytest.approx(alone["held_out"], rel=1e-5)
        for mine, theirs in zip(ours["figures"], alone["figures"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        if alone["reference"] is not None:
            assert np.allclose(ours["reference"], alone["reference"], rtol=1e-6)
            assert ours["left"] == ["reference.npy"]
