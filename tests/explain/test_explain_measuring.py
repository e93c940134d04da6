"""What is measured is what is said to be measured: the pieces against independent references."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rush.explain import ExplainSettings, attention_orders, fusion, link_speeds, memory, precision
from rush.explain.attention import allocated_peak
from rush.explain.batch import intensity, ridge
from rush.explain.clock import stat, timed
from rush.explain.link_speeds import fit
from rush.explain.native import host
from rush.explain.native.chains import COUNTS, FACTOR, OFFSET, Chains, Way, compile_chains
from rush.explain.native.orders import WAYS, Heads, Orders, compile_orders
from rush.hardware import probe
from tests.explain import made_up


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """On a machine without a GPU the kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    return str(request.param)


def test_the_walk_on_the_device_goes_once_around_and_comes_back(device: str) -> None:
    from rush.explain.native.device import Chase

    walk = Chase(64 * 128, 128, hops=16, device=device)  # 64 lines
    places = []
    for _ in range(4):
        walk()
        places.append(int(walk.place.item()))
    assert places[-1] == 0, "after as many hops as lines the walk is back"
    assert len(set(places)) == 4
    walk(1)
    assert walk.place.item() == walk.table[0].item() != 0


def test_the_stream_on_the_device_reads_the_whole_working_set(device: str) -> None:
    from rush.explain.native.device import BLOCK, DeviceStream

    stream = DeviceStream(4 * BLOCK * 16, num_sms=1, moved_bytes=4 * BLOCK * 16, device=device)
    stream()  # eight programs, two rounds: sixteen blocks, each once
    assert (stream.rounds, stream.moved_bytes) == (2, 4 * BLOCK * 16)
    assert stream.out.sum(dtype=torch.int64).item() == stream.source.sum(dtype=torch.int64).item()


def test_every_task_on_the_device_does_its_arithmetic(device: str) -> None:
    from rush.explain.native.device import Tasks

    tasks = Tasks(3, rounds=5, device=device)
    tasks.out.fill_(-1.0)
    tasks(2)
    wanted = torch.arange(1024, dtype=torch.float64) * 1e-4
    for _ in range(5):
        wanted = wanted * 0.999 + 0.5
    torch.testing.assert_close(tasks.out[:2048].double().cpu(), wanted.repeat(2), rtol=1e-5, atol=1e-6)
    assert bool((tasks.out[2048:] == -1.0).all())


@pytest.fixture(scope="module")
def walks() -> host.Walks:
    found = host.compile_walks()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def test_the_chain_is_one_cycle_through_every_line(walks: host.Walks) -> None:
    block = host.chain(64 * 256, 64)
    start = block.ctypes.data
    seen, place = set(), start
    for _ in range(16):
        place = walks.chase(place, 1)  # sixteen hops
        seen.add(place)
    assert place == start, "after as many hops as lines the walk is back"
    assert len(seen) == 16
    addresses = block.view(np.uint64)[::8]
    assert sorted(addresses.tolist()) == [start + 64 * k for k in range(256)]


def test_reading_reads_every_byte(walks: host.Walks) -> None:
    block = host.block(512 * 7)
    total = int(block.view(np.uint64).sum(dtype=np.uint64))
    found = walks.library.read_all(block.ctypes.data, block.nbytes, 1)
    assert found == total
    assert walks.library.read_all(block.ctypes.data, block.nbytes, 3) == 3 * total % 2**64


@pytest.fixture(scope="module")
def chains() -> Chains:
    found = compile_chains()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_every_chain_takes_every_step(chains: Chains, count: int) -> None:
    """Chain k begins at k and is halfway to its limit where arithmetic says, also in each lane of a vector."""

    def after(start: float, rounds: int) -> float:
        for _ in range(rounds):
            start = start * FACTOR + OFFSET
        return start

    wanted = sum(after(k + 10.0, 3) for k in range(count))
    assert chains.run("scalar", count, 3, 10.0) == pytest.approx(wanted, rel=1e-6)
    assert chains.run("vector", count, 3, 10.0) == pytest.approx(chains.lanes * wanted, rel=1e-6)


@pytest.mark.parametrize("way", ["by_branch", "by_select"])
def test_a_branch_and_a_select_choose_what_the_byte_says(chains: Chains, way: Way) -> None:
    generator = np.random.default_rng(3)
    x, out = generator.random(1001, dtype=np.float32), np.full(1001, np.nan, dtype=np.float32)
    which = (generator.random(1001) < 0.3).astype(np.uint8)
    chains.choose(way, which, x, out)()
    one, other = np.polyval([0.3, 0.7, 0.2, 0.1], x), np.polyval([0.5, -0.4, 0.6, -0.9], x)
    np.testing.assert_allclose(out, np.where(which == 1, one, other), rtol=1e-5, atol=1e-6)


def test_chains_on_the_device_take_every_step(device: str) -> None:
    from rush.explain.native.device import ChainPrograms

    programs = ChainPrograms(2048 + 100, rounds=3, device=device)
    programs()
    wanted = torch.arange(1024, dtype=torch.float64) * 1e-4
    for _ in range(3):
        wanted = wanted * 0.999 + 0.5
    assert programs.threads == 2048
    torch.testing.assert_close(programs.out.double().cpu(), wanted.repeat(2), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("whole_warps", [False, True])
@pytest.mark.parametrize("ways", [1, 2, 32])
def test_every_thread_takes_its_way(ways: int, whole_warps: bool) -> None:
    from rush.explain.native.warps import Ways, expected

    run = Ways(2, rounds=7)
    run(ways, whole_warps=whole_warps)
    wanted = expected(ways, 7, whole_warps=whole_warps)
    torch.testing.assert_close(run.out.double().cpu(), wanted.repeat(2), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def orders() -> Orders:
    found = compile_orders()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def _attention(on: Heads) -> Any:
    """Causal attention in float64 by its definition, all heads."""
    scores = on.q.astype(np.float64) @ on.k.swapaxes(1, 2).astype(np.float64) / 8
    scores[:, *np.triu_indices(on.length, 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return weights / weights.sum(axis=2, keepdims=True) @ on.v


@pytest.mark.parametrize("way", WAYS)
def test_every_order_computes_attention(orders: Orders, way: str) -> None:
    on = Heads(2, 192, seed=4)
    on.k *= np.linspace(0.1, 6.0, 192, dtype=np.float32)[
        :, None
    ]  # later tiles win, so outputs must be rescaled
    on.k_t[:] = on.k.reshape(2, 3, 64, 64).swapaxes(2, 3)
    for head in range(2):
        getattr(orders, way)(on, head)
    np.testing.assert_allclose(on.o, _attention(on), rtol=0, atol=1e-5)


def test_heads_and_tiles_on_several_cores_compute_all_of_them(orders: Orders) -> None:
    on = Heads(3, 320, plain=False)
    wanted = _attention(on)
    with ThreadPoolExecutor(2) as pool:
        for work in (lambda: orders.first_together(pool, on), lambda: orders.second_together(pool, on, 2)):
            on.o[:] = np.nan
            work()
            np.testing.assert_allclose(on.o, wanted, rtol=0, atol=3e-6)


def test_bytes_and_flops_of_the_orders_by_counting_the_loops() -> None:
    """Independent of the formulas: walk over the tiles and add up what each visit moves."""
    data = {"head_dim": 64, "tile": 64, "bytes_each": 2, "kept": 256}
    tiles, tile = 5, 64 * 64
    plain, first, second = 4 * tiles * tile * 2, 0, 0
    other_first, other_second = 0, tiles * tile
    for i in range(tiles):
        first += 2 * tile * 2  # as a tile of keys: keys and values once
        second += 2 * tile * 2  # as a tile of queries: queries and outputs once
        for _ in range(i + 1):
            plain += 4 * 64 * 64 * 2
            first += tile * 2 + 2 * tile * 4 + 4 * 64 * 4
            second += 2 * tile * 2
            other_first += 4 * 64 * 64 + 3 * tile
            other_second += 4 * 64 * 64 + tile
    length = tiles * 64
    assert attention_orders.traffic("plain", length, data) == plain
    assert attention_orders.traffic("first", length, data) == first
    assert attention_orders.traffic("second", length, data) == second
    assert attention_orders.other_flops("first", length, data) == other_first
    assert attention_orders.other_flops("second", length, data) == other_second


def test_linformer_with_an_identity_is_attention() -> None:
    q, k, v = (
        torch.randn(1, 2, 48, 16, generator=torch.Generator().manual_seed(seed)).double() for seed in range(3)
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    one = torch.eye(48, dtype=torch.float64)
    torch.testing.assert_close(attention_orders.linformer(q, k, v, one, one), wanted)
    assert attention_orders.linformer_flops(1024, {"kept": 256, "head_dim": 64}) == 2 * 1024**2 * 64


def test_the_fit_finds_the_line_and_how_far_off_it_is() -> None:
    sizes = [2.0**k for k in range(8, 26, 3)]
    exact = fit([(size, 5e-6 + size / 3e9) for size in sizes])
    assert (exact.latency_s, exact.bytes_per_s) == (pytest.approx(5e-6), pytest.approx(3e9))
    assert exact.worst < 1e-9
    assert exact.half_bytes == pytest.approx(15_000)
    off = [1.1, 0.9, 1.1, 0.9, 1.1, 0.9]
    bent = fit([(size, (5e-6 + size / 3e9) * factor) for size, factor in zip(sizes, off, strict=True)])
    assert bent.worst == pytest.approx(0.1, abs=0.05)
    assert bent.bytes_per_s == pytest.approx(3e9, rel=0.15)


def test_a_fit_is_never_negative() -> None:
    rising = fit([(1e3, 1e-6), (1e6, 2e-3), (1e9, 3.0)])  # larger messages are slower by byte: no latency
    assert rising.latency_s == 0.0
    assert rising.bytes_per_s > 0
    falling = fit([(1e3, 3e-3), (1e6, 2e-3), (1e9, 1e-3)])
    assert falling.latency_s > 0
    assert falling.bytes_per_s > 0


def test_copies_copy_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed calls themselves, held by the stopwatch's place."""
    copied = []

    def call_once(work: Any, device: str, **how: Any) -> dict[str, Any]:
        work()
        target, source = work.args
        copied.append((len(target), np.array_equal(target, source)))
        return stat([1.0])

    monkeypatch.setattr(link_speeds, "timed", call_once)
    rows = link_speeds._copies(ExplainSettings(probe("cpu"), "cpu", quick=True))[0]["rows"]
    assert copied == [(row["bytes"], True) for row in rows]
    assert [row["bytes"] for row in rows] == [2**12, 2**16, 2**20, 2**24]


def test_without_a_compiler_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "no C compiler" in str(host.compile_walks())


def test_steps_joins_neighbouring_climbs_and_keeps_the_largest() -> None:
    curve = [1.0, 1.0, 2.0, 4.0, 4.1, 4.0, 8.0, 8.0, 8.0, 12.0, 12.0, 40.0]
    rows = [{"bytes": 2**k, "seconds": {"median": value}} for k, value in enumerate(curve)]
    assert memory.steps(rows) == [
        (2**1, 2**3, 4.0),
        (2**5, 2**6, 2.0),
        (2**10, 2**11, pytest.approx(40 / 12)),
    ]


def test_the_sizes_grow_and_end_in_time() -> None:
    assert memory._sizes(8, 70, quick=False) == [8, 12, 16, 24, 32, 48, 64]
    assert memory._sizes(8, 600, quick=True) == [8, 32, 128, 512]


def test_all_ways_through_the_chain_compute_the_same() -> None:
    x = torch.randn(2**17, generator=torch.Generator().manual_seed(1))
    for length in (1, 2, 3, 8):
        wanted = fusion.chain(x.double(), length)
        for make in (fusion._separate, fusion._sliced):
            out = torch.full_like(x, torch.nan)
            make(length, x, out)()
            torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)


def test_bytes_moved_by_formula() -> None:
    # Four operations on 1000 fp32 numbers: four times 4000 bytes read and written, or once.
    assert fusion.moved("separate", 4, 1000) == 32_000
    assert fusion.moved("fused", 4, 1000) == 8_000


def test_the_peak_of_allocations_is_the_peak() -> None:
    def work() -> None:
        a = torch.empty(2**20, dtype=torch.uint8)
        b = torch.empty(2**19, dtype=torch.uint8)
        del a
        c = torch.empty(2**18, dtype=torch.uint8)
        del b, c

    work()
    peak = allocated_peak(work)
    assert peak is not None
    assert peak == pytest.approx(2**20 + 2**19, rel=0.001)


def test_plain_attention_needs_the_score_matrix_several_times_and_flash_not_once() -> None:
    from rush.explain.attention import one_pass, peak_of

    heads, length = 4, 512
    scores = heads * length * length * 4
    plain, flash = (peak_of(one_pass(way, length, heads, "cpu"), "cpu") for way in ("plain", "flash"))
    assert plain is not None
    assert flash is not None
    assert plain > 2 * scores
    assert flash < scores


def test_tf32_keeps_ten_bits_and_rounds_to_nearest_even() -> None:
    x = torch.tensor(
        [1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-12, -(1 + 3 * 2**-11), 3.0e38, 0.0]
    )
    wanted = [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, 1.0, -(1 + 2**-9), precision.rounded(torch.tensor([3.0e38]), "tf32").item(), 0.0]  # fmt: skip
    assert precision.rounded(x, "tf32").tolist() == wanted
    drawn = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    # Independent: scale the fraction so that ten bits of it are whole, round half to even with numpy.
    values = drawn.double().numpy()
    scale = 2.0 ** (10 - np.floor(np.log2(np.abs(values))))
    assert np.array_equal(precision.rounded(drawn, "tf32").double().numpy(), np.round(values * scale) / scale)


@pytest.mark.parametrize(("kind", "stuck"), [("bfloat16", 256.0), ("float16", 2048.0), ("tf32", 2048.0), ("float8_e4m3fn", 16.0), ("float8_e5m2", 8.0)])  # fmt: skip
def test_adding_one_gets_stuck_where_arithmetic_predicts(kind: str, stuck: float) -> None:
    assert precision._adding(kind, quick=True) == stuck


def test_updates_are_lost_below_half_of_the_last_digit() -> None:
    weights = torch.ones(10)
    shares = dict(zip(precision.UPDATES, precision._updates(weights, "bfloat16"), strict=True))
    for step, share in shares.items():
        assert share == (1.0 if step > 2**-8 else 0.0), step


def test_the_ridge_is_where_slope_and_roof_meet() -> None:
    data = made_up.batch()
    turn = ridge(data)
    best = max(2 * r["batch"] * 2048 * 8192 / r["seconds"]["median"] for r in data["rows"])
    # A batch need not be whole for the formula.
    assert intensity(data, turn) * data["read_bytes_per_s"] == pytest.approx(best, rel=1e-6)  # type: ignore[arg-type]


def test_a_timing_is_the_time_of_one_call() -> None:
    import time

    found = timed(lambda: time.sleep(0.003), "cpu", budget_s=0.05)
    assert 0.003 <= found["median"] < 0.02
    assert found["low"] <= found["median"] <= found["high"]
    assert found["n"] == len(found["samples"]) >= 5


def test_a_stat_is_the_median_with_an_interval_inside_the_samples() -> None:
    found = stat([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found["median"] == 3.0
    assert 1.0 - 1e-9 <= found["low"] <= 3.0 <= found["high"] <= 100.0 + 1e-9  # logarithms and back
