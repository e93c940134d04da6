"""LoRA, QLoRA and the 8-bit base as techniques: beside others, under a compiler, in memory, in bits."""

from __future__ import annotations

import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.kernels.nf4.reference import VALUES
from rush.models import matmul_parameters
from rush.models.adapters import adapters, adapters_off
from rush.models.fingerprints import fingerprint
from rush.models.quantized import QuantizedLinear, quantize_linears
from rush.models.quantized_formats import BLOCK as NF4_BLOCK
from rush.models.quantized_formats import Form
from rush.techniques import check
from rush.techniques.api.evidence import prove
from rush.training.build import Run, build
from rush.training.sample import plain_model
from rush.training.step import train_step
from tests.techniques.tiny_runs import SHORT, Trace, make_run, one_batch, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning",  # a CPU without units for bf16
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*is an Enum subclass:UserWarning",
)
FORMS = [Form(kind, backend) for kind in ("nf4", "int8") for backend in ("bitsandbytes", "torchao")]
LORA = "{name='lora', rank=4}"
BLOCK = "{name='compile', scope='block'}"


def needs(*techniques: str) -> None:
    for entry in techniques:
        if "qlora" in entry or "int8" in entry:
            pytest.importorskip("torchao" if "torchao" in entry else "bitsandbytes")


def proven(run: Run, seen: Trace) -> None:
    assert seen.seen is not None
    for name, proof in prove(run.uses, seen.seen).items():
        assert proof.took_effect, (name, proof.what)


# --- beside other techniques -------------------------------------------------------------------------------


@cache
def alone() -> Trace:
    return trace(make_run(LORA), 3)


SAME_AS_ALONE = [
    # Each of these also meets it in a life (tests/lives); alone with it, in `make test-all`.
    pytest.param(("checkpoint_full",), marks=pytest.mark.slow),
    ("checkpoint_selective",),
    pytest.param(("{name='checkpoint_selective', keep='half'}",), marks=pytest.mark.slow),
    ("{name='chunked_loss', chunk_tokens=64}",),
    pytest.param(("fused_loss",), marks=pytest.mark.slow),
    pytest.param(("fused_mlp", "fused_norm"), marks=pytest.mark.slow),
    pytest.param(("fused_adamw",), marks=pytest.mark.slow),
    pytest.param(("flash_attention",), marks=pytest.mark.slow),
    pytest.param((BLOCK,), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("others", SAME_AS_ALONE, ids=lambda others: "+".join(others)[:40])
def test_with_others_it_learns_what_it_learns_alone(others: tuple[str, ...]) -> None:
    """Rounding apart: the others promise to change nothing, beside adapters as without."""
    run = make_run(LORA, *others)
    together = trace(run, 3, watch=True)
    assert together.losses == pytest.approx(alone().losses, rel=2e-6)
    assert together.grad_norms == pytest.approx(alone().grad_norms, rel=2e-5)
    assert together.gradients.keys() == alone().gradients.keys()
    proven(run, together)


@pytest.mark.parametrize("keep", ["all", "half"])
def test_selective_checkpointing_saves_matmuls_of_a_quantized_base(keep: str) -> None:
    needs("qlora")
    run = make_run("{name='qlora', rank=4}", f"{{name='checkpoint_selective', keep='{keep}'}}")
    proven(run, trace(run, 2, watch=True))


@pytest.mark.parametrize(
    "others",
    [
        ("bf16_master",),
        pytest.param(("pure_bf16",), marks=pytest.mark.slow),
        pytest.param(("amp_bf16",), marks=pytest.mark.slow),
    ],
    ids=lambda o: o[0],
)
@pytest.mark.parametrize("method", [LORA, "{name='qlora', rank=4}"])
def test_in_bf16_adapters_have_the_dtype_that_weights_have(method: str, others: tuple[str, ...]) -> None:
    needs(method)
    run = make_run(method, *others, overrides=SHORT)
    proven(run, trace(run, 2, watch=True))
    wanted = torch.float32 if others == ("amp_bf16",) else torch.bfloat16
    assert {adapter.a.dtype for _, _, adapter in adapters(run.model)} == {wanted}


def test_master_copies_are_kept_of_adapters_alone_and_start_from_their_exact_values() -> None:
    run = make_run(LORA, "bf16_master", overrides=SHORT)
    kept = {n: p.master for n, p in run.model.named_parameters() if hasattr(p, "master")}
    plain = dict(make_run(LORA, overrides=SHORT).model.named_parameters())
    assert kept.keys() == {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert all(torch.equal(master, plain[n]) for n, master in kept.items())
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}


def test_in_fp8_the_base_is_multiplied_in_8_bits_and_the_adapters_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = make_run(LORA, "fp8")
    proven(run, trace(run, 2, watch=True))


@pytest.mark.slow
def test_compiled_by_blocks_there_is_no_break_and_one_graph_for_all_but_the_first() -> None:
    """Only the first block's input asks for no gradient; validation is one more graph."""
    run = make_run(LORA, BLOCK, overrides=["model.shape.num_layers=4"])
    seen = trace(run, 2, watch=True).seen
    assert seen is not None
    assert seen.compiled.graph_breaks == 0
    assert seen.compiled.recompiles <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["{name='qlora', rank=4}", "{name='int8_base', rank=4, backend='torchao'}"]
)
def test_a_quantized_base_compiles_and_recomputes_to_the_same(method: str) -> None:
    needs(method)
    plain = trace(make_run(method), 3)
    run = make_run(method, BLOCK, "checkpoint_full")
    together = trace(run, 3, watch=True)
    assert together.losses == pytest.approx(plain.losses, rel=2e-6)
    assert together.seen is not None
    assert together.seen.compiled.graph_breaks == 0
    proven(run, together)


def test_our_kernel_dequantizes_to_the_same_bits_and_is_named() -> None:
    needs("qlora")
    losses = {}
    for unpack, by in [("rush", "rush"), ("library", "bitsandbytes"), ("auto", "bitsandbytes")]:
        run = make_run(f"{{name='qlora', rank=4, unpack='{unpack}'}}", overrides=SHORT)
        seen = trace(run, 2, watch=True)
        assert seen.seen is not None
        proof = prove(run.uses, seen.seen)["qlora"]
        assert proof.took_effect, proof.what
        assert proof.what.startswith(f"dequantized by {by};")
        losses[unpack] = seen.losses
    assert losses["rush"] == losses["library"] == losses["auto"]


@pytest.mark.parametrize("unpack", ["rush", "library"])
def test_a_planted_other_kernel_is_found_by_the_evidence(unpack: str) -> None:
    needs("qlora")
    run = make_run(f"{{name='qlora', rank=4, unpack='{unpack}'}}", overrides=SHORT)
    other = make_run("{name='qlora', rank=4, unpack='rush'}", overrides=SHORT)
    for mine, theirs in zip(run.model.modules(), other.model.modules(), strict=True):
        if isinstance(mine, QuantizedLinear):
            assert isinstance(theirs, QuantizedLinear)
            mine.dequantizer = str(mine.form) if unpack == "rush" else theirs.dequantizer
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    assert not prove(run.uses, seen)["qlora"].took_effect


def test_what_cannot_stand_together_is_said() -> None:
    with pytest.raises(MachineError, match="for weights that bitsandbytes quantized"):
        check(recipe_of("{name='qlora', backend='torchao', unpack='rush'}"), probe("cpu"))
    with pytest.raises(RecipeError, match="cannot be combined"):
        check(recipe_of("lora", "qlora"), probe("cpu"))
    with pytest.raises(RecipeError, match="cannot be combined"):
        check(recipe_of("qlora", "fp8"), probe("cpu"))
    with pytest.raises(MachineError, match="dora compares magnitudes, for which bf16 is too coarse"):
        check(recipe_of("{name='lora', variant='dora'}", "pure_bf16"), probe("cpu"))


# --- what is trained, and what it costs ----------------------------------------------------------------------


@pytest.mark.parametrize("method", [LORA, "{name='lora', rank=4, variant='dora'}", "{name='qlora', rank=4}"])
@pytest.mark.parametrize("name", ["llama-tiny", "tiny"])
def test_the_base_stays_as_it_is_to_the_bit_and_the_adapters_move(name: str, method: str) -> None:
    needs(method)
    run = make_run(method, name=name)
    kept = {n: fingerprint(t) for n, t in [*run.model.named_parameters(), *run.model.named_buffers()]}
    trace(run, 2)
    now = {n: fingerprint(t) for n, t in [*run.model.named_parameters(), *run.model.named_buffers()]}
    moved = {n for n in kept if kept[n] != now[n]}
    assert moved == {n for n, p in run.model.named_parameters() if p.requires_grad}
    assert all(".adapter." in n for n in moved)


def test_optimizer_state_is_that_of_the_adapters_alone() -> None:
    run = make_run(LORA)
    trace(run, 1)
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    state = sum(
        value.numel() * value.element_size()
        for values in run.optimizer.state.values()
        for key, value in values.items()
        if key != "step"
    )
    assert state == 8 * trained
    assert trained < 0.1 * sum(p.numel() for p in run.model.parameters())


def test_a_planted_trained_base_is_found_by_the_evidence() -> None:
    run = make_run(LORA)
    run.model.get_parameter("blocks.0.mlp.down.weight").requires_grad_(True)
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    proof = prove(run.uses, seen)["lora"]
    assert not proof.took_effect, proof.what
    assert "and 1 for the gradient of a frozen weight" in proof.what


def test_samples_are_drawn_with_the_adapters_on() -> None:
    run = make_run(LORA)
    trace(run, 3)
    batch = one_batch(run)[0]
    twin = plain_model(run.model)
    with torch.no_grad():
        assert torch.allclose(twin(batch.tokens_bt), run.model(batch.tokens_bt), atol=1e-6)
        base = make_run().model(batch.tokens_bt)
        assert not torch.allclose(twin(batch.tokens_bt), base, atol=1e-3)
        with adapters_off(run.model):
            assert torch.allclose(twin(batch.tokens_bt), base, atol=1e-6)
    # The optimizer still holds the very parameters of the model.
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in run.model.parameters() if p.requires_grad}


# --- quantized weights -----------------------------------------------------------------------------------------


def layer_of(form: Form, weight: Tensor) -> QuantizedLinear:
    pytest.importorskip(form.backend)
    with torch.device("meta"):
        layer = QuantizedLinear(nn.Linear(weight.shape[1], weight.shape[0], bias=False), form)
    layer.to(torch.bfloat16).to_empty(device="cpu")  # as a model in bf16 is made
    layer.set_weight(weight)
    return layer


def weight_of(rows: int = 96, columns: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dims", [(96, 128), (64, 1024), (8, 8)])
def test_nf4_is_bitsandbytes_own_dequantization_exactly(dims: tuple[int, int], dtype: torch.dtype) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(*dims)
    codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    state.dtype = dtype
    theirs = functional.dequantize_4bit(codes, state)
    assert torch.equal(layer_of(Form("nf4", "bitsandbytes"), weight).dense_weight(dtype), theirs)


def test_nf4_is_torchaos_own_dequantization_exactly() -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    weight = weight_of(256, 256)
    theirs = quantization.to_nf4(weight, 64, 256).get_original_weight()
    assert torch.equal(layer_of(Form("nf4", "torchao"), weight).dense_weight(), theirs)


def nf4_reference(weight: Tensor) -> Tensor:
    """Round to NF4 and back with nothing but torch, in float64 and without double quantization."""
    table = torch.tensor(VALUES, dtype=torch.float64)
    blocks = weight.double().reshape(-1, NF4_BLOCK)
    largest = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)
    nearest = (blocks / largest)[..., None].sub(table).abs().argmin(-1)
    return (table[nearest] * largest).view(weight.shape)


@pytest.mark.parametrize("backend", ["bitsandbytes", "torchao"])
def test_nf4_is_the_plain_reference_but_for_the_rounding_of_its_scales(backend: str) -> None:
    """Double quantization moves a block's scale by at most half a step of 8 bits of the scales' spread."""
    weight = weight_of(256, 256)
    ours, plain = layer_of(Form("nf4", backend), weight).dense_weight().double(), nf4_reference(weight)
    blocks, exact = ours.view(-1, 64), plain.view(-1, 64)
    ratio = blocks.abs().amax(1) / exact.abs().amax(1)
    assert float((ratio - 1).abs().max()) < 0.03
    # With the scale taken out every value is the same entry of the table.
    table = torch.tensor(VALUES, dtype=torch.float64)
    entries = [
        (b / b.abs().amax(1, keepdim=True))[..., None].sub(table).abs().argmin(-1) for b in (blocks, exact)
    ]
    assert float((entries[0] != entries[1]).double().mean()) < 1e-3
    assert float((ours - weight).norm() / weight.norm()) < 0.1


@pytest.mark.parametrize("backend", ["bitsandbytes", "torchao"])
def test_int8_is_within_half_a_step_of_each_row(backend: str) -> None:
    weight = weight_of()
    error = (layer_of(Form("int8", backend), weight).dense_weight() - weight).abs()
    step = weight.abs().amax(1, keepdim=True) / 127
    # bitsandbytes reads the weight in fp16 first.
    assert bool((error <= 0.51 * step + weight.abs() * 2**-11).all())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_matmuls_and_gradients_are_those_of_the_dequantized_weight(form: Form) -> None:
    layer = layer_of(form, weight_of())
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(1), requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    torch.nn.functional.linear(twin, layer.dense_weight()).square().sum().backward()
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_no_dequantized_weight_is_saved_for_the_backward_pass(form: Form, compiled: bool) -> None:
    layer = layer_of(form, weight_of())
    run = torch.compile(layer.forward, fullgraph=True) if compiled else layer.forward
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            kept.append(tensor.numel())
        return tensor

    x = torch.randn(5, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    assert max(kept, default=0) < 96 * 128 // 16  # scales and tables, no weight


def floats_alive(besides: set[int]) -> int:
    """Bytes of all floating-point tensors there are, on a device, each memory once, besides those given."""
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.is_floating_point() and not thing.is_meta:
            seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(size for address, size in seen.items() if address not in besides)


@pytest.mark.parametrize("given", [False, True], ids=["from the seed", "from a folder"])
def test_the_model_never_exists_in_full_precision(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted whenever a weight arrives: embedding, norms, adapters, scales, and that one weight."""
    pytest.importorskip("bitsandbytes")
    wide = ["model.shape.num_layers=8", "model.shape.intermediate=256"]
    plain = make_run(overrides=wide).model
    full = sum(p.numel() * 4 for p in plain.parameters())
    weights = {n: t.detach().clone() for n, t in plain.state_dict().items()} if given else None
    del plain
    gc.collect()
    before = {
        thing.untyped_storage().data_ptr()
        for thing in gc.get_objects()
        if type(thing) in (Tensor, nn.Parameter) and not thing.is_meta
    }
    at_arrival: list[int] = []
    original = QuantizedLinear.set_weight

    def counting(self: QuantizedLinear, weight_oi: Tensor) -> None:
        if (
            self.in_features == 256
        ):  # the widest, once in a block: looking at every object there is takes long
            at_arrival.append(floats_alive(before))
        original(self, weight_oi)

    monkeypatch.setattr(QuantizedLinear, "set_weight", counting)
    model = build(recipe_of("{name='qlora', rank=1}", overrides=wide), probe("cpu"), weights).model
    resident = sum(p.numel() * 4 for p in model.parameters())
    resident += sum(b.numel() * 4 for b in model.buffers() if b.is_floating_point())
    assert len(at_arrival) == 8
    assert max(at_arrival) <= resident + 3 * 64 * 256 * 4
    assert resident + 3 * 64 * 256 * 4 < 0.3 * full


def test_a_quantized_model_takes_weights_and_reports_which_are_missing() -> None:
    pytest.importorskip("bitsandbytes")
    run = make_run("{name='qlora', rank=2}")
    layer = run.model.get_submodule("blocks.0.mlp.up")
    assert isinstance(layer, QuantizedLinear)
    assert layer.source
    state = make_run().model.state_dict()
    state.pop("blocks.0.mlp.up.weight")
    with pytest.raises(RuntimeError, match=r"blocks\.0\.mlp\.up\.weight"):
        run.model.load_state_dict(state)


def test_fingerprints_distinguish_values_places_and_dtypes() -> None:
    weight = weight_of()
    other = weight.clone()
    other[3, 5] += 1e-7
    swapped = weight.clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    names = [fingerprint(t) for t in (weight, other, swapped, weight.t(), weight.bfloat16(), weight.view(-1))]
    assert len(set(names)) == len(names)
    assert fingerprint(weight.t().contiguous().t()) == names[0]
    assert fingerprint(torch.zeros(3)) != fingerprint(torch.zeros(4))


def test_steps_of_a_quantized_run_are_the_same_every_time() -> None:
    pytest.importorskip("bitsandbytes")
    results = []
    for _ in range(2):
        run = make_run("{name='qlora', rank=4}", overrides=["run.deterministic=true"])
        results.append([train_step(run, 1, 1e-3, one_batch(run)).loss for _ in range(2)])
    assert results[0] == results[1]


def test_quantizing_replaces_every_layer_of_the_blocks_and_no_other() -> None:
    from rush.models import SIZES, build_model

    with torch.device("meta"):
        model = build_model(SIZES["llama-tiny"])
    quantize_linears(model, Form("int8", "torchao"))
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, kind in kinds.items() if kind is nn.Linear} == {"head"}


def test_a_frozen_base_is_not_credited_with_gradients_it_never_makes() -> None:
    """Forward and the gradient of the input: four FLOPs for each weight and token, not six."""
    plain, adapted = make_run(), make_run("lora")
    head_and_blocks = matmul_parameters(plain.model.shape)
    assert plain.flops_per_token() - adapted.flops_per_token() == 2 * head_and_blocks
