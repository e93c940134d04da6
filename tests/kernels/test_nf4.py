"""NF4 unpacked in one kernel: the bits that bitsandbytes gives, and those of the definition in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels.nf4 import _dequantize, dequantize_nf4, reference
from rush.kernels.nf4.study import bitsandbytes
from rush.models.quantized_formats import Form, dequantize, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A block, less than a tile, several tiles with a rest, and more than one scale of scales (256 blocks of 64).
DIMS = [(8, 8), (96, 128), (129, 64), (200, 192)]
LARGE = [(4096, 4096), (1000, 14336)]


def parts_of(dims: tuple[int, int], device: str) -> list[Tensor]:
    pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(dims[0])
    # Rows of very different size, so that scales take many of their 256 codes.
    weight = torch.randn(dims, generator=generator) * torch.logspace(-3, 0, dims[0])[:, None]
    return list(quantize(Form("nf4", "bitsandbytes"), weight.to(device)).values())


def all_codes(device: str, blocks: int = 512) -> list[Tensor]:
    """Every byte of codes, every code of a scale, and scales whose sum with the offset needs its rounding."""
    generator = torch.Generator().manual_seed(3)
    return [
        part.to(device)
        for part in (
            torch.arange(32 * blocks).to(torch.uint8),
            torch.randperm(blocks, generator=generator).to(torch.uint8),
            torch.rand(blocks // 256, generator=generator) + 0.1,
            torch.randn(256, generator=generator),
            torch.randn(1, generator=generator),
        )
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_bit_identical_to_bitsandbytes(device: str, dtype: torch.dtype) -> None:
    for dims in [*DIMS, *LARGE] if device == "cuda" else DIMS:
        parts = parts_of(dims, device)
        theirs = bitsandbytes(*parts, like=torch.empty(dims[0], 0, dtype=dtype, device=device))
        ours = dequantize_nf4(*parts, dims, dtype)
        assert ours.shape == dims
        assert ours.dtype == dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dims", [(64, 96), (192, 48), (8, 8), (96, 128)])
def test_the_plain_model_takes_what_bitsandbytes_stored_for_what_it_is(
    dims: tuple[int, int], device: str
) -> None:
    """Rows that end inside a block too: the library's own kernel for x86 reads those with another block's scale."""
    parts = parts_of(dims, device)
    weight = dequantize(str(Form("nf4", "bitsandbytes")), parts, dims, torch.float32)
    assert torch.equal(weight, reference.dequantize_nf4(*parts, dims, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_dequantized_as_by_the_reference(device: str, dtype: torch.dtype) -> None:
    parts = all_codes(device)
    ours, plain = (
        function(*parts, (512, 64), dtype) for function in (dequantize_nf4, reference.dequantize_nf4)
    )
    assert torch.equal(ours, plain)
    wide = [part.double() if part.is_floating_point() else part for part in parts]
    exact = reference.dequantize_nf4(*wide, (512, 64), torch.float64)
    off = (ours.double() - exact).abs().max() / exact.abs().max()
    assert float(off) < torch.finfo(dtype).eps


def test_quantized_weights_may_begin_anywhere_in_memory(device: str) -> None:
    codes, *rest = all_codes(device)
    held = torch.zeros(codes.numel() + 1, dtype=torch.uint8, device=device)
    held[1:] = codes
    ours = dequantize_nf4(held[1:], *rest, (512, 64), torch.bfloat16)
    assert torch.equal(ours, dequantize_nf4(codes, *rest, (512, 64), torch.bfloat16))


def test_it_compiles_without_a_graph_break(device: str, backend: str) -> None:
    parts = all_codes(device)
    compiled = torch.compile(
        lambda *parts: dequantize_nf4(*parts, (512, 64), torch.bfloat16) * 2, fullgraph=True, backend=backend
    )
    assert torch.equal(compiled(*parts), reference.dequantize_nf4(*parts, (512, 64), torch.bfloat16) * 2)


def test_torch_finds_the_operator_well_formed(device: str) -> None:
    torch.library.opcheck(
        _dequantize,
        (*all_codes(device), 512, 64, torch.bfloat16),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_what_it_does_not_support_is_refused(device: str) -> None:
    codes, scales, *rest = all_codes(device)
    dims = (512, 64)

    def refused(sentence: str, *given: Any) -> None:
        with pytest.raises(KernelRefusal, match=sentence):
            dequantize_nf4(*given)

    refused("writes fp32, bf16 and fp16", codes, scales, *rest, dims, torch.float64)
    refused("whole blocks of 64; found 3 × 5", codes, scales, *rest, (3, 5), torch.float32)
    refused("half a byte for each weight", codes[:64], scales, *rest, dims, torch.float32)
    refused("a byte for each block", codes, scales.float(), *rest, dims, torch.float32)
    refused("contiguous", codes.view(-1, 2).t(), scales, *rest, dims, torch.float32)


@pytest.mark.gpu
def test_more_weights_than_32_bits_can_count() -> None:
    rows = 2**31 // 64 + 256
    codes, scales, _, *tables = all_codes("cuda")
    many = codes.repeat(rows // 512 + 1)[: 32 * rows]
    all_scales = scales.repeat(rows // 512 + 1)[:rows]
    of_scales = torch.ones(-(-rows // 256), device="cuda")
    last = dequantize_nf4(many, all_scales, of_scales, *tables, (rows, 64), torch.bfloat16)[-256:]
    wanted = reference.dequantize_nf4(
        many[-256 * 32 :], all_scales[-256:], of_scales[:1], *tables, (256, 64), torch.bfloat16
    )
    assert torch.equal(last, wanted)
