"""What kernels share: refusing, asking for a device, and the errors the other tests are held against."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal, RecipeError
from rush.kernels import support


def test_require_refuses_with_its_sentence() -> None:
    support.require(True, "never said")
    with pytest.raises(KernelRefusal, match="a sentence"):
        support.require(False, "a sentence")
    assert issubclass(KernelRefusal, RecipeError)


def test_a_device_that_cannot_run_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "INTERPRETED", False)
    with pytest.raises(KernelRefusal, match=r"norm runs on a CUDA device, found cpu; .*TRITON_INTERPRET=1"):
        support.require_device("norm", torch.zeros(1))
    monkeypatch.setattr(support, "INTERPRETED", True)
    support.require_device("norm", torch.zeros(1), torch.zeros(2))
    with pytest.raises(KernelRefusal, match="on one device, found cpu and meta"):
        support.require_device("norm", torch.zeros(1), torch.zeros(1, device="meta"))


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_next_power_of_2(n: int, power: int) -> None:
    assert support.next_power_of_2(n) == power


@pytest.mark.parametrize("width", [1, 7, 64, 768, 2048, 4096, 8192, 65536])
def test_a_tile_of_rows_covers_the_row_and_has_warps_that_exist(width: int) -> None:
    tile = support.row_tile(width, elements_per_thread=16)
    assert width <= tile.width
    assert tile.rows * tile.width >= 2048
    assert tile.num_warps in (4, 8, 16, 32)


@pytest.mark.parametrize("width", [1, 7, 64, 768, 2048, 4096, 8192, 65536])
@pytest.mark.parametrize("element_sizes", [(2, 2), (2, 2, 2), (4, 4, 4)])
def test_a_walk_covers_the_row_and_what_is_on_its_way_fits_into_shared_memory(
    width: int, element_sizes: tuple[int, ...]
) -> None:
    walk = support.persistent_rows(width, element_sizes)
    assert width <= walk.width
    assert walk.num_warps in (4, 8, 16, 32)
    on_its_way = (walk.stages - 1) * walk.rows * walk.width * sum(element_sizes)
    assert on_its_way <= 96 * 1024
    # Rows of today's models are read ahead, whatever their dtype.
    assert walk.stages > 1 or width > 8192


@pytest.mark.parametrize(
    ("num_rows", "programs"), [(0, 1), (1, 1), (2, 1), (3, 2), (8, 4), (9, 5), (1000, 8)]
)
def test_a_walk_has_no_program_without_a_row(num_rows: int, programs: int) -> None:
    walk = support.PersistentRows(rows=2, width=64, num_warps=4, stages=3, programs_per_sm=2)
    assert walk.programs(num_rows, torch.device("cpu")) == programs  # interpreted as 4 multiprocessors


def test_rows_are_a_view_where_that_is_possible() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    assert support.as_rows(x).data_ptr() == x.data_ptr()
    assert support.as_rows(x).shape == (6, 4)
    half = torch.arange(24.0).view(6, 4)[:, :2]
    assert support.as_rows(half).stride() == (4, 1)
    turned = x.transpose(1, 2)
    assert torch.equal(support.as_rows(turned), turned.reshape(-1, 3))
    assert support.as_rows(torch.ones(1).expand(2, 3)).stride(-1) == 1


def test_the_measure_of_errors_can_fail(check_errors: Callable[..., None]) -> None:
    """One wrong element in a thousand, or twice the rounding everywhere, is seen in every dtype."""
    exact = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        plain = exact.to(dtype)
        check_errors(plain.clone(), plain, exact, 2)
        one_wrong: Tensor = plain.clone()
        one_wrong[500] += 0.2
        coarse = (exact * (1 + 6 * torch.finfo(dtype).eps * torch.randn_like(exact))).to(dtype)
        not_a_number = plain.clone()
        not_a_number[3] = torch.nan
        for wrong in (one_wrong, coarse, not_a_number):
            with pytest.raises(AssertionError, match="off by"):
                check_errors(wrong, plain, exact, 2)


@pytest.mark.skipif(not support.INTERPRETED, reason="about the interpreter")
def test_interpreted_kernels_round_as_torch_and_the_hardware_do() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def cast(x_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.arange(0, SIZE)
        tl.store(out_ptr + place, tl.load(x_ptr + place).to(out_ptr.dtype.element_ty))

    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 4096)
    x[:4] = torch.tensor([0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8])
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.empty(4096, dtype=dtype)
        cast[(1,)](x, out, SIZE=4096)
        assert torch.equal(out.float(), x.to(dtype).float()), dtype
