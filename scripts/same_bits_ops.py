"""Which operators give the same bits every time on this machine: each is called again and again on the same input.

Part of `scripts/same_bits.py --diagnose`. An operator is every kernel of ours (as its study calls it), every attention core
as a model calls it, and what else of torch a step uses. Three ways: as it is; with torch's deterministic algorithms, as
`run.deterministic` sets them; and so with all new memory filled with NaN, which shows an operator that reads what nobody
wrote. Attention's backward pass is timed as well, because that is what determinism costs.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.bench import kernel_check as check
from rush.bench.kernel_measure import one_line
from rush.kernels import study
from rush.kernels.study import Call, Inputs
from rush.techniques.attention.cudnn_attention import CudnnCore
from rush.techniques.attention.flash_attention import FlashCore
from rush.techniques.attention.triton_attention import TritonCore

TIMES = 20
WAYS = ("as it is", "deterministic", "deterministic, memory filled")
Case = tuple[Call, Callable[[], Inputs]]

# Shapes: b batch, h query heads, k key/value heads, t positions, d head dim, n tokens.


@contextmanager
def way(name: str) -> Iterator[None]:
    memory: Any = torch.utils.deterministic
    torch.use_deterministic_algorithms(name != WAYS[0])
    memory.fill_uninitialized_memory = name == WAYS[2]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = True


def same(left: Tensor, right: Tensor) -> bool:
    """Bit by bit: NaN equals itself."""
    left, right = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(left, right)


def repeat(call: Call, inputs: Inputs, name: str, times: int) -> tuple[dict[str, int], check.Results]:
    """How often each result differed from the first call's, and that one."""
    first: check.Results = {}
    differed: dict[str, int] = {}
    with way(name):
        for _ in range(times):
            found = check.results_of(call, check.fresh(inputs))
            first = first or found
            for key, value in found.items():
                differed[key] = differed.get(key, 0) + (not same(value, first[key]))
    return differed, first


def try_case(case: Case, times: int = TIMES) -> dict[str, Any]:
    """A word for each way: equal, which results differed how often, or why it cannot run so."""
    call, make = case
    said: dict[str, Any] = {}
    plain: check.Results = {}
    try:
        inputs = make()
    except Exception as problem:
        return dict.fromkeys(WAYS, one_line(problem))
    for name in WAYS:
        try:
            differed, first = repeat(call, inputs, name, times if name != WAYS[2] else 2)
        except Exception as problem:
            said[name] = one_line(problem)[:160]
            continue
        many = {key: count for key, count in differed.items() if count}
        if name == WAYS[1]:
            plain = first
        if name == WAYS[2] and plain:
            many |= {
                f"{key} (reads unwritten memory)": 1 for key in first if not same(first[key], plain[key])
            }
        said[name] = "equal" if not many else {key: f"{count} of {times}" for key, count in many.items()}
    return said


def kernel_cases(device: torch.device) -> Iterator[tuple[str, Case]]:
    """Our kernels, each at the first size of its study that is judged, and at an odd one where it is small."""
    for name in study.names():
        one = study.load(name)
        sizes = one.sizes if device.type == "cuda" else one.small
        call = next(contender.call for contender in one.contenders if contender.kind == "ours")
        dtype = one.dtype if device.type == "cuda" else torch.float32
        for size in sizes[:1]:
            yield (
                f"rush {name}, {size.label}",
                (call, partial(one.make, size, device, dtype)),
            )


def attention_shapes(device: torch.device) -> dict[str, tuple[int, int, int, int, int]]:
    """Batch, query heads, key/value heads, positions, head dim: of the ready recipes."""
    if device.type != "cuda":
        return {"small": (1, 2, 1, 32, 16)}
    return {
        "gpt2-124m": (64, 12, 12, 1024, 64),
        "llama-3.2-1b": (16, 32, 8, 2048, 64),
        "llama-3.1-8b": (2, 32, 8, 4096, 128),
    }


def heads(device: torch.device, shape: tuple[int, int, int, int, int]) -> dict[str, Tensor]:
    """Queries, keys and values as the linear layers leave them: heads side by side."""
    batch, num_heads, kv_heads, length, head_dim = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made = {
        name: study.normal(device, seed, batch, length, count, head_dim).to(dtype).transpose(1, 2)
        for seed, (name, count) in enumerate(
            (("q_bhtd", num_heads), ("k_bktd", kv_heads), ("v_bktd", kv_heads))
        )
    }
    return {name: tensor.detach().requires_grad_() for name, tensor in made.items()}


def attention_cases(device: torch.device) -> Iterator[tuple[str, Case]]:
    cores: dict[str, Callable[[int], torch.nn.Module]] = {
        "flash_attention": FlashCore,
        "triton_attention": lambda length: TritonCore(),
        "cudnn_attention": lambda length: CudnnCore(grouped=True),
        "cudnn_attention, our backward": lambda length: CudnnCore(grouped=True, deterministic=True),
    }
    if device.type != "cuda":
        cores = {"triton_attention": cores["triton_attention"]}
    for shape_name, shape in attention_shapes(device).items():
        for name, core in cores.items():
            yield (
                f"{name}, {shape_name}",
                (core(shape[3]), partial(heads, device, shape)),
            )
    if device.type == "cuda":
        _, num_heads, kv_heads, length, head_dim = attention_shapes(device)["llama-3.1-8b"]
        starts = torch.tensor([0, 700, 701, 2048, 3333, length], dtype=torch.int32, device=device)
        line = FlashCore(length)
        yield (
            "flash_attention, documents in a row",
            (
                lambda **inputs: line(**inputs, documents=starts),
                lambda: heads(device, (1, num_heads, kv_heads, length, head_dim)),
            ),
        )


def torch_cases(device: torch.device) -> Iterator[tuple[str, Case]]:
    """What else of torch is in a step."""
    large = device.type == "cuda"
    tokens, width, words = (65536, 768, 50304) if large else (64, 32, 100)
    dtype = torch.bfloat16 if large else torch.float32

    def normal(seed: int, *dims: int, wants: bool = True) -> Tensor:
        return study.normal(device, seed, *dims).to(dtype).requires_grad_(wants)

    def often(seed: int) -> Tensor:
        """Token ids, some of them very often, as in text."""
        drawn = torch.rand(tokens, device=device, generator=torch.Generator(device).manual_seed(seed))
        return (drawn.pow(6) * words).long()

    yield (
        "torch embedding",
        (
            lambda ids, weight: F.embedding(ids, weight),  # noqa: PLW0108 (called by these names)
            lambda: {"ids": often(1), "weight": normal(2, words, width)},
        ),
    )
    yield (
        "torch index_put, accumulating",
        (
            lambda ids, rows: torch.zeros(words, width, device=device, dtype=dtype).index_put(
                (ids,), rows, True
            ),
            lambda: {"ids": often(1), "rows": normal(3, tokens, width, wants=False)},
        ),
    )
    yield (
        "torch linear with bias",
        (
            lambda x, weight, bias: F.linear(x, weight, bias),  # noqa: PLW0108 (called by these names)
            lambda: {
                "x": normal(4, tokens, width),
                "weight": normal(5, 4 * width, width),
                "bias": normal(6, 4 * width),
            },
        ),
    )
    yield (
        "torch linear, narrow and wide (LoRA)",
        (
            lambda x, down, up: F.linear(F.linear(x, down), up),
            lambda: {
                "x": normal(4, tokens // 16, 4096 if large else 32),
                "down": normal(5, 16, 4096 if large else 32),
                "up": normal(6, 4096 if large else 32, 16),
            },
        ),
    )
    yield (
        "torch sums and norms",
        (
            lambda x: (
                torch.linalg.vector_norm(x.float()),
                x.float().sum(),
                x.float().sum(0),
                torch._foreach_norm([x])[0],
            ),
            lambda: {"x": normal(7, tokens, width, wants=False)},
        ),
    )
    yield (
        "torch cross-entropy",
        (
            lambda logits, labels: F.cross_entropy(logits.float(), labels, reduction="sum"),
            lambda: {"logits": normal(8, tokens // 16, words), "labels": often(9)[: tokens // 16]},
        ),
    )
    if large:
        one = torch.ones((), device=device)
        yield (
            "torch _scaled_mm, a weight's gradient",
            (
                lambda a, b: torch._scaled_mm(
                    a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
                ),
                lambda: {
                    "a": normal(10, 2048, 32768, wants=False).to(torch.float8_e5m2),
                    "b": normal(11, 8192, 32768, wants=False).to(torch.float8_e4m3fn),
                },
            ),
        )


def backward_ms(core: Any, inputs: Mapping[str, Tensor], name: str) -> float:
    """The median time of attention's backward pass alone."""
    with way(name):
        out = core(**inputs)
        above = torch.randn_like(out)
        samples = []
        for _ in range(8):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            marks[0].record()
            torch.autograd.grad(out, list(inputs.values()), above, retain_graph=True)
            marks[1].record()
            marks[1].synchronize()
            samples.append(marks[0].elapsed_time(marks[1]))
    return statistics.median(samples[2:])


def attention_errors(core: Any, inputs: dict[str, Tensor]) -> dict[str, float]:
    """How far output and gradients are from those in float64 (relative, root mean square), on the first row."""
    one = {name: tensor[:1].detach().requires_grad_() for name, tensor in inputs.items()}
    exact = check.results_of(TORCH_EXACT, check.widened(one, torch.float64))
    found = check.results_of(core, one)
    return {key: float((found[key].double() - value).norm() / value.norm()) for key, value in exact.items()}


def TORCH_EXACT(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q_bhtd, k_bktd, v_bktd, is_causal=True, enable_gqa=True)


def try_all(device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """All of them, as plain JSON values; what is not equal is said at once."""
    found: dict[str, Any] = {"operators": {}, "attention": {}}
    for cases in (attention_cases, kernel_cases, torch_cases):
        for name, case in cases(device):
            said = try_case(case, TIMES if device.type == "cuda" else 2)
            found["operators"][name] = said
            words = [f"{key}: {word}" for key, word in said.items()]
            say(f"{name}: {'equal' if all(word == 'equal' for word in said.values()) else '; '.join(words)}")
            _free(device)
    if device.type == "cuda":
        for shape_name, shape in attention_shapes(device).items():
            inputs = heads(device, shape)
            for name, (core, _) in attention_cases(device):
                if not name.endswith(shape_name):
                    continue
                try:
                    times = {key: round(backward_ms(core, inputs, key), 3) for key in WAYS[:2]}
                    errors = attention_errors(core, inputs)
                except Exception as problem:
                    times, errors = {"failed": one_line(problem)[:200]}, {}
                found["attention"][name] = {"backward_ms": times, "errors": errors}
                say(
                    f"{name}: backward {times}, errors { ({key: f'{value:.2e}' for key, value in errors.items()}) }"
                )
            del inputs
            _free(device)
    return found


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
