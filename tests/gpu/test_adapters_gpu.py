"""On a CUDA device: adapters and quantized bases take effect, learn what they learn on a CPU, and stay small."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rush.hardware import probe
from rush.hub.folders import load_model
from rush.hub.weights import save_hf_folder
from rush.models import SIZES, build_model
from rush.models.adapters import adapters, adapters_off
from rush.models.fingerprints import base_fingerprint, fingerprint
from rush.models.quantized import QuantizedLinear
from rush.models.quantized_formats import Form
from rush.techniques.api.evidence import prove
from rush.training.build import Run
from tests.techniques.tiny_runs import make_run, one_batch, trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
SIZE = ("model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=512", "model.shape.context=256",
        "batch.sequence=256", "batch.micro=4", "batch.total_tokens=1024", "optimizer.lr=0.003")  # fmt: skip
FORMS = [Form(kind, backend) for kind in ("nf4", "int8") for backend in ("bitsandbytes", "torchao")]
BLOCK = "{name='compile', scope='block'}"
LORA = "{name='lora', rank=8}"
QLORA = "{name='qlora', rank=8}"


def on_gpu(*techniques: str) -> Run:
    return make_run(*techniques, overrides=SIZE, machine=probe("cuda"))


def needs(*techniques: str) -> None:
    for entry in techniques:
        if "qlora" in entry or "int8" in entry:
            pytest.importorskip("torchao" if "torchao" in entry else "bitsandbytes")


@pytest.mark.parametrize(
    "techniques",
    [
        (LORA, "bf16_master", "fused_adamw", "flash_attention"),
        (LORA, "bf16_master", BLOCK, "fused_loss"),
        (LORA, "pure_bf16", "fused_norm", "fused_mlp", "fused_rope", "{name='fused_update', stochastic_rounding=true}"),
        (LORA, "pure_bf16", "{name='adam8bit', backend='rush', stochastic_rounding=true}"),
        (LORA, "amp_bf16", "checkpoint_full", BLOCK),
        (LORA, "pure_bf16", "checkpoint_selective", BLOCK, "fused_loss"),
        (LORA, "bf16_master", "fp8", BLOCK),
        (LORA, "bf16_master", "cuda_graph"),
        (QLORA, "bf16_master", "checkpoint_full", BLOCK, "fused_loss"),
        (QLORA, "pure_bf16", "checkpoint_full", "fused_mlp", BLOCK, "fused_loss"),
        (QLORA, "bf16_master", "checkpoint_full", "cuda_graph"),
        (QLORA, "bf16_master", "{name='checkpoint_full', inputs='host'}", BLOCK, "fused_loss"),
        ("{name='qlora', rank=8, unpack='library'}", "bf16_master", BLOCK),
        ("{name='qlora', rank=8, unpack='library'}", "bf16_master", "cuda_graph"),
        ("{name='qlora', rank=8, backend='torchao'}", "bf16_master", "checkpoint_full", BLOCK),
        ("{name='int8_base', rank=8}", "bf16_master", BLOCK),
        ("{name='int8_base', rank=8, backend='torchao'}", "amp_bf16"),
    ],
    ids=lambda entries: "+".join(entry.split("'")[1] if entry.startswith("{") else entry for entry in entries),
)  # fmt: skip
def test_it_takes_effect_with_the_techniques_for_speed(techniques: tuple[str, ...]) -> None:
    needs(*techniques)
    run = on_gpu(*techniques)
    seen = trace(run, 8, watch=True)
    assert seen.seen is not None
    for name, proof in prove(run.uses, seen.seen).items():
        assert proof.took_effect, (name, proof.what)
    assert seen.seen.compiled.graph_breaks == 0
    assert seen.losses[-1] < seen.losses[0], seen.losses


@pytest.mark.parametrize("method", [LORA, "{name='lora', rank=8, variant='dora'}", QLORA])
def test_in_fp32_it_learns_what_it_learns_on_a_cpu(method: str) -> None:
    needs(method)
    here = trace(on_gpu(method), 5)
    there = trace(make_run(method, overrides=SIZE), 5)
    assert here.losses == pytest.approx(there.losses, rel=1e-4)
    assert here.grad_norms == pytest.approx(there.grad_norms, rel=1e-3)


def test_our_kernel_is_the_default_and_learns_the_same_bits_as_the_library_s() -> None:
    needs(QLORA)
    losses = []
    for method, by in [(QLORA, "rush"), ("{name='qlora', rank=8, unpack='library'}", "bitsandbytes")]:
        run = on_gpu(method, "bf16_master")
        seen = trace(run, 5, watch=True)
        assert seen.seen is not None
        assert prove(run.uses, seen.seen)["qlora"].what.startswith(f"dequantized by {by};")
        losses.append(seen.losses)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("techniques", [("bf16_master",), ("bf16_master", BLOCK)], ids=["eager", "compiled"])
def test_in_bf16_it_starts_as_its_base_to_the_bit(techniques: tuple[str, ...]) -> None:
    run = on_gpu(LORA, *techniques)
    batch = one_batch(run)[0].to(run.device)
    with torch.no_grad():
        adapted = run.model(batch.tokens_bt, batch.labels_bt)
        with adapters_off(run.model):
            assert torch.equal(adapted, run.model(batch.tokens_bt, batch.labels_bt))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_weights_are_the_same_as_on_a_cpu_and_dequantize_to_the_same(
    form: Form, dtype: torch.dtype
) -> None:
    pytest.importorskip(form.backend)
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    made: list[Tensor] = []
    for device in ("cpu", "cuda"):
        with torch.device("meta"):
            layer = QuantizedLinear(nn.Linear(1024, 512, bias=False), form)
        layer.to_empty(device=device)
        layer.set_weight(weight)
        made.append(layer.dense_weight(dtype).float().cpu())
    # A value on the border of two codes may fall to either side; scales may differ in their last bit, and in bf16 that
    # can move a value by one step.
    apart = (made[0] - made[1]).abs() > 1e-5 * made[0].abs().max()
    assert float(apart.float().mean()) < (1e-3 if dtype is torch.float32 else 0.02)
    assert float((made[0] - made[1]).norm() / made[0].norm()) < 5e-3


def _nf4_layer(weight: torch.Tensor) -> QuantizedLinear:
    with torch.device("meta"):
        layer = QuantizedLinear(nn.Linear(*weight.shape[::-1], bias=False), Form("nf4", "bitsandbytes"))
    layer.to_empty(device=weight.device)
    layer.set_weight(weight)
    return layer


def test_nf4_is_bitsandbytes_own_dequantization_exactly() -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(768, 512, device="cuda") * 0.02
    layer = _nf4_layer(weight)
    codes, scales, scale_scales, scale_table, offset = layer.parts
    second = functional.QuantState(scale_scales, code=scale_table, blocksize=256, dtype=torch.float32)
    table = functional.get_4bit_type("nf4", device="cuda")
    for dtype in (torch.float32, torch.bfloat16):
        state = functional.QuantState(
            scales, weight.shape, table, 64, "nf4", dtype, offset=offset[0], state2=second
        )
        assert torch.equal(layer.dense_weight(dtype), functional.dequantize_4bit(codes[:, None], state))


def test_a_quantized_base_is_the_same_on_the_host() -> None:
    """bitsandbytes' kernels for CUDA and for CPUs round some scales differently; ours come from one of them."""
    pytest.importorskip("bitsandbytes")
    weight = torch.randn(4096, 1024, device="cuda") * 0.02
    here, there = _nf4_layer(weight), _nf4_layer(weight.cpu())
    for name, one, other in zip(here.part_names, here.parts, there.parts, strict=True):
        different = int((one.cpu() != other).sum())
        assert different <= (4 if name == "codes" else 0), (name, different)


def test_fingerprints_are_those_of_a_cpu() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = (torch.randn(333, 77) * 50).to(dtype)
        assert fingerprint(tensor) == fingerprint(tensor.cuda())
        assert base_fingerprint(tensor) == base_fingerprint(tensor.cuda())


def peak_of(*techniques: str) -> tuple[int, int]:
    """Bytes that the device held at most while a run was built, and while it stepped."""
    wide = ["model.shape.hidden=1024", "model.shape.num_heads=8", "model.shape.num_kv_heads=4", "model.shape.head_dim=128",
            "model.shape.intermediate=4096", "model.shape.num_layers=12", "batch.sequence=32"]  # fmt: skip
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run = make_run(*techniques, overrides=wide, machine=probe("cuda"))
    built = torch.cuda.max_memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    trace(run, 2)
    stepped = torch.cuda.max_memory_allocated() - before
    del run
    return built, stepped


def test_a_quantized_model_is_built_and_stepped_in_a_fraction_of_the_memory() -> None:
    """16.0, 8.5 and 4.13 bits a weight: 12 layers of 15.7 million weights."""
    pytest.importorskip("bitsandbytes")
    weights = 12 * 15.7e6
    whole = peak_of(LORA, "bf16_master")
    eight = peak_of("{name='int8_base', rank=8}", "bf16_master")
    four = peak_of(QLORA, "bf16_master")
    assert whole[0] > 2.0 * weights
    assert eight[0] < 1.7 * weights  # a byte each, and one layer in fp32 with its working copies
    assert four[0] < 1.1 * weights
    assert four[1] < eight[1] < whole[1]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_blocks_leave_the_device_and_the_logits_are_the_same(where: str, tmp_path: Path) -> None:
    import dataclasses

    shape = dataclasses.replace(
        SIZES["llama-tiny"], hidden=1024, num_heads=8, num_kv_heads=4, head_dim=128, intermediate=4096, num_layers=10,
        vocab_size=512,
    )  # fmt: skip
    save_hf_folder(tmp_path / "model", build_model(shape, seed=1), shape)
    tokens = torch.arange(16, device="cuda")[None]
    with torch.no_grad():
        whole = load_model(tmp_path / "model", device="cuda")(tokens).cpu()
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        streamed = load_model(tmp_path / "model", device="cuda", offload=where)
        assert torch.equal(streamed(tokens).cpu(), whole)
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    assert torch.cuda.max_memory_allocated() - before < 0.35 * size
    assert all(p.is_meta for p in streamed.blocks.parameters())


@pytest.mark.parametrize("method", [LORA, QLORA])
def test_no_output_of_a_layer_is_copied_to_add_an_adapter(method: str) -> None:
    """Out of place, `addmm` copies what it adds to."""
    needs(method)
    run = on_gpu(method, "bf16_master")
    seen = trace(run, 4, watch=True).seen
    assert seen is not None
    assert seen.ops.get("aten::addmm_", 0) > 0
    assert seen.ops.get("aten::addmm", 0) == 0


def test_only_adapters_get_gradients() -> None:
    run = on_gpu(LORA, "bf16_master", BLOCK)
    batch = one_batch(run)[0].to(run.device)
    run.model(batch.tokens_bt, batch.labels_bt).backward()
    trained = {id(p) for _, _, adapter in adapters(run.model) for p in adapter.parameters()}
    assert {id(p) for p in run.model.parameters() if p.grad is not None} == trained
