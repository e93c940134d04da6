"""The C++/CUDA example: it builds here, is an operator of torch, and computes what its definition says."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rush.errors import KernelRefusal, MachineError
from rush.kernels import building
from rush.kernels.cuda_example import cannot_build, cannot_build_cuda, load, reference, squared_relu

Check = Callable[..., None]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Where this test's tensors live. Unlike a Triton kernel this one is compiled on the CPU as well."""
    reason = cannot_build() if request.param == "cpu" else cannot_build_cuda()
    if reason is not None:
        pytest.skip(f"the extension cannot be built here: {reason}")
    load()
    return str(request.param)


def random(*dims: int, dtype: torch.dtype, where: str, seed: int = 0) -> Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed)).to(dtype).to(where)


def with_gradient(function: Callable[[Tensor], Tensor], x: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    out = function(leaf)
    return out.detach(), torch.autograd.grad(out, leaf, above)[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dims", [(1,), (7,), (5, 13), (64, 1024), (3, 4, 111)], ids=str)
def test_it_is_as_exact_as_plain_torch(
    dims: tuple[int, ...], dtype: torch.dtype, where: str, check_errors: Check
) -> None:
    x, above = random(*dims, dtype=dtype, where=where), random(*dims, dtype=dtype, where=where, seed=1)
    ours = with_gradient(squared_relu, x, above)
    plain = with_gradient(reference.squared_relu, x, above)
    exact = with_gradient(reference.squared_relu, x.double(), above.double())
    for name, mine, theirs, truth, factor in zip(
        ("out", "grad"), ours, plain, exact, (2.0, 3.0), strict=True
    ):
        check_errors(mine, theirs, truth, factor, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(1,), (5, 13), (3, 1400)], ids=str)
def test_the_one_in_triton_that_it_is_timed_beside_is_as_exact(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, check_errors: Check
) -> None:
    from rush.kernels.cuda_example.triton import squared_relu as in_triton

    x = (
        random(*dims, dtype=dtype, where=device).t()
        if len(dims) == 2
        else random(*dims, dtype=dtype, where=device)
    )
    above = random(*x.shape, dtype=dtype, where=device, seed=1)
    mine = with_gradient(in_triton, x, above)
    plain = with_gradient(reference.squared_relu, x, above)
    exact = with_gradient(reference.squared_relu, x.double(), above.double())
    for ours, theirs, truth, factor in zip(mine, plain, exact, (2.0, 3.0), strict=True):
        check_errors(ours, theirs, truth, factor)
    odd = in_triton(torch.tensor([math.nan, math.inf, -math.inf], device=device))
    assert odd[0].isnan()
    assert odd[1:].tolist() == [math.inf, 0.0]


def test_it_reads_any_strides_and_offsets(where: str) -> None:
    wide = random(40, 33, dtype=torch.bfloat16, where=where)
    for x in (wide.t(), wide[:, 1:], wide[::2, ::3], wide.flatten()[3:], wide[:0]):
        above = torch.ones_like(x)
        for mine, theirs in zip(
            with_gradient(squared_relu, x, above),
            with_gradient(reference.squared_relu, x.float(), above.float()),
            strict=True,
        ):
            assert torch.equal(mine, theirs.to(torch.bfloat16))


def test_what_is_not_finite_stays_so(where: str) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, -0.0], device=where)
    out = squared_relu(x)
    assert out[0].isnan()
    assert out[1:].tolist() == [math.inf, 0.0, 0.0]


def test_it_has_the_gradient_of_finite_differences(where: str) -> None:
    x = random(6, 5, dtype=torch.float64, where=where).requires_grad_()
    assert torch.autograd.gradcheck(squared_relu, (x,))


def test_torch_finds_no_fault_with_the_operator(where: str) -> None:
    """Schema, fake tensors, autograd registration and compilation, by torch's own checks."""
    x = random(4, 9, dtype=torch.float32, where=where).requires_grad_()
    torch.library.opcheck(torch.ops.rush.squared_relu, (x,))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_it_is_one_graph_and_the_same_bits(where: str) -> None:
    x, above = (
        random(8, 16, dtype=torch.float32, where=where),
        random(8, 16, dtype=torch.float32, where=where, seed=1),
    )

    def model(x: Tensor) -> Tensor:
        return squared_relu(x + 1) * 2

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if where == "cpu" else "inductor")
    for mine, theirs in zip(with_gradient(compiled, x, above), with_gradient(model, x, above), strict=True):
        assert torch.equal(mine, theirs)


def test_a_hundred_repeats_give_the_same_bits(where: str) -> None:
    x = random(1000, 33, dtype=torch.bfloat16, where=where)
    expected = with_gradient(squared_relu, x, x)
    for _ in range(100):
        assert all(map(torch.equal, with_gradient(squared_relu, x, x), expected))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    if reason := cannot_build_cuda():
        pytest.skip(f"the extension cannot be built here: {reason}")
    x = torch.full((2**31 + 5,), 3.0, dtype=torch.bfloat16, device="cuda")
    x[-1] = -1.0
    out = squared_relu(x)
    assert out[-2:].tolist() == [9.0, 0.0]
    assert bool((out[:-1] == 9.0).all())


def test_what_it_does_not_support_it_refuses(where: str) -> None:
    with pytest.raises(KernelRefusal, match=r"floating-point tensors; found torch\.int64"):
        squared_relu(torch.arange(3, device=where))
    with pytest.raises(KernelRefusal, match="CPU or a CUDA device; found meta"):
        squared_relu(torch.empty(3, device="meta"))


def test_the_library_is_kept_in_the_users_cache(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert load() == load()
    assert load().is_file()
    assert load().parent == building.cache_folder() / "extensions"
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path))
    assert building.cache_folder() == tmp_path
    monkeypatch.delenv("RUSH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert building.cache_folder() == tmp_path / "rush"


def test_another_source_is_another_library(tmp_path: Path) -> None:
    source = tmp_path / "one.cpp"
    source.write_text("int one = 1;")
    before = building._identity([source])
    assert before == building._identity([source])
    source.write_text("int one = 2;")
    assert building._identity([source]) != before


def test_source_that_does_not_compile_is_reported_and_leaves_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "broken.cpp"
    source.write_text("int broken = ;")
    with pytest.raises(
        MachineError, match=r"rush_broken could not be built: .*broken\.cpp:1:14: error: "
    ) as refused:
        building.build("rush_broken", [source])
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "cache" / "extensions").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(MachineError, match=r"rush_small could not be built: .*Not a directory"):
        building.build("rush_small", [small_source(tmp_path)])


def small_source(folder: Path) -> Path:
    source = folder / "small.cpp"
    source.write_text('extern "C" int rush_small() { return 7; }')
    return source


def test_a_compiler_is_enough_for_cpp_and_the_build_is_reported(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in (building._compiler(), "as", "ld"):
        found = shutil.which(name)
        assert found is not None
        (tools / Path(name).name).symlink_to(found)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    assert shutil.which("ninja") is None
    library = building.build("rush_small", [small_source(tmp_path)])
    assert ctypes.CDLL(str(library)).rush_small() == 7
    out, told = capfd.readouterr()
    assert out == ""
    assert told == "rush: building rush_small (once, half a minute or so)\n"
    assert building.build("rush_small", [small_source(tmp_path)]) == library
    assert capfd.readouterr() == ("", "")


def test_several_can_build_it_at_once(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    source = small_source(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        built = list(pool.map(lambda _: building.build("rush_small", [source]), range(4)))
    assert set(built) == set((tmp_path / "cache" / "extensions").iterdir())
    assert ctypes.CDLL(str(built[0])).rush_small() == 7


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cannot_build() == "there is no C++ compiler (no-such-compiler)"
    with pytest.raises(MachineError, match="cannot be built here: there is no C"):
        building.build("rush_nothing", [Path(__file__)])
