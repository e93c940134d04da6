"""What the topic `flash-attention` measures: one attention in three orders, and Linformer beside it; bytes by arithmetic.

On a CPU the three orders are C with the same matmuls of tiles (`native/orders.c`), one head on one core, then several
heads on all cores. On a GPU they are plain torch, a Triton kernel in FlashAttention 1's order and ours, in 2's.
All are forward passes and causal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rush.errors import MachineError
from rush.explain.clock import stat
from rush.explain.topic import Data, ExplainSettings
from rush.hardware.stopwatch import Effort, TimedCase, take_turns

if TYPE_CHECKING:
    from torch import Tensor

WAYS = ("plain", "first", "second")
HEAD_DIM, TILE = 64, 64
KEPT = 256
"""Linformer's k: so many rows are left of keys and values, however long the sequence is."""
Calls = Mapping[str, Callable[[], object]]


def measure(settings: ExplainSettings) -> Data:
    cuda = settings.device == "cuda"
    data: Data = {
        "kind": settings.device,
        "dtype": "bfloat16" if cuda else "float32",
        "bytes_each": 2 if cuda else 4,
        "head_dim": HEAD_DIM,
        "tile": TILE,
        "kept": KEPT,
        "cores": settings.machine.cpu.num_threads,
        "missing": None,
        "heads": 16 if cuda else 1,
        "rows": [],
        "sharing": [],
    }
    data |= _on_device(settings) if cuda else _on_host(settings)
    data["linformer"] = _linformer(settings)
    return data


def _effort(settings: ExplainSettings) -> Effort:
    return Effort(least=5, most=7, budget_s=0.1) if settings.quick else Effort(least=5, most=15, budget_s=1.5)


def _turns(calls: Calls, settings: ExplainSettings) -> dict[str, Data]:
    """Seconds of each, in turns: what disturbs one disturbs the others."""
    import torch

    cases = {name: TimedCase(lambda: None, partial(_ignoring, call)) for name, call in calls.items()}
    for call in calls.values():
        call()
    found = take_turns(cases, torch.device(settings.device), _effort(settings))
    return {name: stat([1e-3 * each for each in samples]) for name, samples in found.items()}


def _ignoring(call: Callable[[], object], _: object) -> object:
    return call()


def _on_host(settings: ExplainSettings) -> Data:
    from rush.explain.native.orders import Heads, compile_orders

    orders = compile_orders()
    if isinstance(orders, str):
        return {"missing": orders}
    lengths = [128, 256, 512] if settings.quick else [2**k for k in range(8, 14)]
    rows: list[Data] = []
    for done, length in enumerate(lengths):
        settings.progress(f"attention in three orders, {length} tokens", done, 2 * len(lengths) + 2)
        fits = 4 * length * length < settings.machine.ram_bytes // 8
        on = Heads(1, length, plain=fits)
        calls = {way: partial(getattr(orders, way), on, 0) for way in WAYS if fits or way != "plain"}
        rows += [{"way": way, "length": length, "seconds": s} for way, s in _turns(calls, settings).items()]
    cores, length = settings.machine.cpu.num_threads, 512 if settings.quick else 2048
    sharing: list[Data] = []
    with ThreadPoolExecutor(cores) as pool:
        for heads in sorted({1, 2, cores, 2 * cores}):
            settings.progress(f"{heads} heads on {cores} cores", len(lengths), 2 * len(lengths) + 2)
            on = Heads(heads, length, plain=False)
            calls = {
                "first": partial(orders.first_together, pool, on),
                "second": partial(orders.second_together, pool, on, cores),
            }
            sharing += [
                {"way": way, "heads": heads, "seconds": s} for way, s in _turns(calls, settings).items()
            ]
    return {"rows": rows, "sharing": sharing, "sharing_length": length}


def _on_device(settings: ExplainSettings) -> Data:
    import torch

    try:
        from rush.kernels.flash_attention import flash_attention
        from rush.kernels.flash_attention.first_order import first_order_attention
    except ImportError as error:
        raise MachineError(
            f"the two orders are Triton kernels, and Triton is not here ({error}); install it with pip install triton."
        ) from None
    from rush.models.layers import PlainAttention

    plain = PlainAttention()

    def calls(heads: int, length: int, ways: tuple[str, ...]) -> Calls:
        q, k, v = _drawn(heads, length, "cuda")
        works = {
            "plain": partial(plain, q, k, v),
            "first": partial(first_order_attention, q, k, v),
            "second": partial(flash_attention, q, k, v),
        }
        return {way: works[way] for way in ways}

    lengths = [256, 512, 1024] if settings.quick else [2**k for k in range(9, 15)]
    rows: list[Data] = []
    with torch.no_grad():
        for done, length in enumerate(lengths):
            settings.progress(f"attention in three orders, {length} tokens", done, 2 * len(lengths) + 2)
            fits = 6 * 16 * length * length < torch.cuda.mem_get_info()[0] // 2
            ways = WAYS if fits else WAYS[1:]
            found = _turns(calls(16, length, ways), settings)
            rows += [{"way": way, "length": length, "seconds": s} for way, s in found.items()]
        sharing: list[Data] = []
        length = 1024 if settings.quick else 4096
        for heads in (1, 16, 256) if settings.quick else (1, 4, 16, 64, 128, 256, 512):
            settings.progress(f"{heads} heads", len(lengths), 2 * len(lengths) + 2)
            found = _turns(calls(heads, length, WAYS[1:]), settings)
            sharing += [{"way": way, "heads": heads, "seconds": s} for way, s in found.items()]
    workers = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return {"rows": rows, "sharing": sharing, "sharing_length": length, "cores": workers}


def _drawn(heads: int, length: int, device: str, number: int = 3) -> list[Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(length)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        torch.randn(1, heads, length, HEAD_DIM, device=device, generator=generator).to(dtype)
        for _ in range(number)
    ]


def linformer(q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, mix_kt: Tensor, blend_kt: Tensor) -> Tensor:
    """softmax(q (E k)ᵀ / √d) (F v): keys and values mixed along the sequence into a fixed number of rows (Wang et al. 2020)."""
    k_bhkd, v_bhkd = mix_kt @ k_bhtd, blend_kt @ v_bhtd
    scores_bhtk = q_bhtd @ k_bhkd.transpose(-1, -2) * q_bhtd.shape[-1] ** -0.5
    out_bhtd: Tensor = scores_bhtk.softmax(-1) @ v_bhkd
    return out_bhtd


def _linformer(settings: ExplainSettings) -> list[Data]:
    """Linformer beside exact attention by torch's flash operator, causal, on the same queries, keys and values."""
    import torch

    from rush.techniques.attention.flash_attention import FlashCore

    cuda = settings.device == "cuda"
    heads = 16 if cuda else 2
    rows: list[Data] = []
    lengths = [256, 512, 1024] if settings.quick else [2**k for k in (range(9, 16) if cuda else range(8, 14))]
    generator = torch.Generator(settings.device).manual_seed(1)
    with torch.no_grad():
        for done, length in enumerate(lengths):
            settings.progress(f"Linformer, {length} tokens", len(lengths) + 1 + done, 2 * len(lengths) + 2)
            q, k, v = _drawn(heads, length, settings.device)
            mix, blend = (
                torch.randn(KEPT, length, device=settings.device, generator=generator).to(q.dtype)
                / length**0.5
                for _ in range(2)
            )
            calls: Calls = {
                "exact": partial(FlashCore(longest=length), q, k, v),
                "linformer": partial(linformer, q, k, v, mix, blend),
            }
            found = _turns(calls, settings)
            rows.append({"length": length, "heads": heads, **found})
    return rows


def traffic(way: str, length: int, data: Mapping[str, Any]) -> float:
    """Bytes of one head that an order moves to and from memory, causal: every array as often as its loops visit it.

    Half of all pairs of tiles lie on or below the diagonal. Outputs, maxima and sums of the first order are fp32.
    """
    dim, tile, size = float(data["head_dim"]), float(data["tile"]), float(data["bytes_each"])
    once = 4.0 * length * dim * size  # queries, keys, values and outputs, each once
    tiles = length / tile
    pairs = tiles * (tiles + 1) / 2
    if way == "plain":
        # Scores are written and read by the softmax; weights are written and read by the matmul.
        return once + 4.0 * pairs * tile * tile * size
    if way == "first":
        # Keys and values once; for every pair queries in, outputs in and out, two statistics in and out.
        return 2.0 * length * dim * size + pairs * tile * (dim * size + 2 * dim * 4 + 4 * 4)
    # Queries and outputs once; for every pair a tile of keys and one of values.
    return 2.0 * length * dim * size + pairs * 2 * tile * dim * size


def matmul_flops(length: int, data: Mapping[str, Any]) -> float:
    """FLOPs of one head, tiles below and on the diagonal: the same in every order."""
    dim, tile = float(data["head_dim"]), float(data["tile"])
    tiles = length / tile
    return 4.0 * tiles * (tiles + 1) / 2 * tile**2 * dim


def other_flops(way: str, length: int, data: Mapping[str, Any]) -> float:
    """FLOPs outside the matmuls: four a score (maximum, difference, power, sum), and those that keep outputs right.

    For every pair of tiles the first order multiplies outputs and what comes to them by a factor each and adds them;
    the second multiplies the outputs only, and divides once at the end.
    """
    dim, tile = float(data["head_dim"]), float(data["tile"])
    tiles = length / tile
    pairs = tiles * (tiles + 1) / 2
    scores = 4.0 * pairs * tile * tile
    if way == "plain":
        return scores + pairs * tile * tile  # every weight is divided
    return scores + (3.0 * pairs * tile * dim if way == "first" else pairs * tile * dim + length * dim)


def linformer_flops(length: int, data: Mapping[str, Any]) -> float:
    """FLOPs of one head: keys and values projected to k rows, scores, and the matmul with the values: O(n · k)."""
    return 8.0 * length * float(data["kept"]) * float(data["head_dim"])
