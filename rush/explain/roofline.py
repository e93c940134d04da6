"""The roofline: this model's operations under this machine's roofs, measured at the recipe's shapes.

The roofs are measured here: the rate of a large matmul and the rate of a large copy. An operation's
place on the x axis is arithmetic per byte by formula, with every input and output moved once, the least it can
do. Its height is measured. Forward passes, and the optimizer's update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rush.errors import MachineError, RecipeError
from rush.explain import units
from rush.explain.clock import timed
from rush.explain.topic import INTERVALS, Data, ExplainSettings, Topic, TopicTable
from rush.report.panels import Curve, Curves, Dot, Panel, dot

if TYPE_CHECKING:
    import torch

    from rush.hardware import Machine
    from rush.models import Shape

HALF = {"amp_bf16": "bfloat16", "bf16_master": "bfloat16", "pure_bf16": "bfloat16", "amp_fp16": "float16"}
KINDS = {"matmul": 1, "attention": 2, "elementwise": 3, "optimizer": 4}
NORM_FLOPS, GELU_FLOPS, SWIGLU_FLOPS, LOSS_FLOPS, ADAM_FLOPS = 8, 10, 6, 5, 15
"""Operations per number, roughly: few enough that it makes no difference which side of the ridge they fall on."""

TOO_LONG_S = 90.0

Case = tuple[str, str, int, float, float, Callable[[], object]]
"""Name, kind, copies in the model, FLOPs, least bytes, and the work itself."""


def measure(settings: ExplainSettings) -> Data:
    import torch

    from rush.hardware import measure as rates
    from rush.models import count_parameters
    from rush.recipe_io import load_recipe

    recipe = load_recipe(
        str(settings.options.get("model", "gpt2-124m" if settings.device == "cuda" else "tiny"))
    )
    shape = recipe.shape()
    rows = int(settings.options.get("batch", recipe.micro))
    sequence = int(settings.options.get("sequence", recipe.batch.sequence))
    if settings.quick and not settings.options:
        rows, sequence = min(rows, 2), min(sequence, 128)
    if sequence > shape.context:
        raise RecipeError(
            f"--sequence {sequence} is more than the {shape.context} tokens that {recipe.model.name} reads."
        )
    used = [HALF[name] for name, _ in recipe.technique_uses() if name in HALF]
    # A CPU without instructions for half precision would take minutes for what it does in fp32 in a second.
    dtype = used[0] if used and settings.device == "cuda" else "float32"
    settings.progress("the roofs", 0, 10)
    budget = 0.1 if settings.quick else 1.5
    matmul = rates.matmul(settings.device, dtype, budget_s=budget)
    assert not isinstance(matmul, str), matmul
    peak = max(sample.rate for sample in matmul)
    _check_size(shape, rows, sequence, peak, settings.machine)
    copy = rates.bandwidth(settings.device, budget_s=budget)["copy"]
    cases = _cases(shape, rows, sequence, getattr(torch, dtype), settings.device)
    ops = []
    for done, (name, make) in enumerate(cases):
        settings.progress(f"{recipe.model.name}: {name}", done + 1, len(cases) + 1)
        try:
            case = make()
            found = timed(
                case[5], settings.device, budget_s=0.05 if settings.quick else 0.6, most=15, cold=True
            )
        except torch.OutOfMemoryError:
            raise MachineError(
                f"{name} of {recipe.model.name} with {rows} × {sequence} tokens does not fit on this device; "
                "use a smaller --batch or --sequence."
            ) from None
        names = ("name", "kind", "copies", "flops", "bytes")
        ops.append({**dict(zip(names, case[:5], strict=True)), "seconds": found})
        del case
    return {
        "kind": settings.device,
        "model": recipe.model.name,
        "parameters": count_parameters(shape),
        "batch": rows,
        "sequence": sequence,
        "dtype": dtype,
        "matmul_flops": peak,
        "copy_bytes_per_s": copy.rate,
        "ops": ops,
    }


def _check_size(shape: Shape, rows: int, sequence: int, peak: float, machine: Machine) -> None:
    """Refuse beforehand what would take minutes, or more memory than there is."""
    from rush.models import count_parameters
    from rush.models.counts import parameter_table

    tokens = rows * sequence
    matrices = [math.prod(entry.dims) for entry in parameter_table(shape) if entry.matmul_parameters]
    # Each matmul runs seven times or more: warm-up and samples.
    seconds = 7 * 2 * tokens * sum(matrices) / peak
    scores = 4 * rows * shape.num_heads * sequence * sequence
    # The loss keeps logits and their softmax, plain attention some copies of its scores, AdamW four numbers a weight.
    needed = max(8 * tokens * shape.vocab_size, 4 * scores, 16 * count_parameters(shape))
    if seconds > TOO_LONG_S or needed > 0.7 * machine.memory_bytes:
        reason = (
            f"take about {units.duration(seconds)}"
            if seconds > TOO_LONG_S
            else f"need about {units.size(needed)}"
        )
        raise RecipeError(
            f"the operations of this model with {rows} × {sequence} tokens would {reason} on this device; "
            "use a smaller --batch or --sequence, or a smaller --model."
        )


def _cases(
    shape: Shape, rows: int, sequence: int, dtype: torch.dtype, device: str
) -> list[tuple[str, Callable[[], Case]]]:
    """The operations, each made only when its turn comes, so that they need not fit together."""
    import torch

    from rush.models.counts import parameter_table

    tokens, size = rows * sequence, dtype.itemsize
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*dims: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*dims, device=device, generator=generator).to(of)

    def linear(role: str, outer: int, inner: int, copies: int) -> Case:
        x, weight = drawn(tokens, inner), drawn(outer, inner)
        moved = size * (tokens * inner + inner * outer + tokens * outer)
        work = partial(torch.nn.functional.linear, x, weight)
        return role, "matmul", copies, 2.0 * tokens * inner * outer, float(moved), work

    cases: list[tuple[str, Callable[[], Case]]] = []
    for entry in parameter_table(shape):
        if entry.matmul_parameters:
            outer, inner = entry.dims
            copies = max(1, entry.copies)
            cases.append((entry.role, partial(linear, entry.role, outer, inner, copies)))
    cases += [
        (f"{way} attention", partial(_attention, way, shape, rows, sequence, drawn, size))
        for way in ("plain", "flash")
    ]
    cases += [
        ("norm", lambda: _norm(shape, tokens, drawn, size, device)),
        ("activation", lambda: _activation(shape, tokens, drawn, size)),
        ("loss", lambda: _loss(shape, tokens, drawn, device)),
        ("optimizer", lambda: _optimizer(shape, device)),
    ]
    return cases


Draw = Callable[..., Any]


def _attention(way: str, shape: Shape, rows: int, sequence: int, drawn: Draw, size: int) -> Case:
    from rush.models.layers import PlainAttention
    from rush.techniques.attention.flash_attention import FlashCore

    q = drawn(rows, shape.num_heads, sequence, shape.head_dim)
    k, v = (drawn(rows, shape.num_kv_heads, sequence, shape.head_dim) for _ in range(2))
    core = PlainAttention() if way == "plain" else FlashCore(longest=sequence)
    pairs = rows * shape.num_heads * sequence * sequence
    # Plain computes the masked half as well; flash leaves it out.
    flops = 4.0 * pairs * shape.head_dim * (1.0 if way == "plain" else 0.5)
    moved = size * (2 * q.numel() + k.numel() + v.numel())
    return f"{way} attention", "attention", shape.num_layers, flops, float(moved), lambda: core(q, k, v)


def _norm(shape: Shape, tokens: int, drawn: Draw, size: int, device: str) -> Case:
    from rush.models.layers import LayerNorm, RMSNorm

    kind = LayerNorm if shape.norm == "layer" else RMSNorm
    x = drawn(tokens, shape.hidden)
    norm = kind(shape.hidden, shape.norm_eps).to(device=device, dtype=x.dtype)
    return _elementwise("norm", 2 * shape.num_layers + 1, x.numel(), NORM_FLOPS, 2 * size, lambda: norm(x))


def _elementwise(
    name: str, copies: int, numbers: int, flops_each: int, bytes_each: int, work: Callable[[], object]
) -> Case:
    return name, "elementwise", copies, float(flops_each * numbers), float(bytes_each * numbers), work


def _activation(shape: Shape, tokens: int, drawn: Draw, size: int) -> Case:
    from rush.models.layers import GeGLU, GeluTanh, SwiGLU

    up, layers = drawn(tokens, shape.intermediate), shape.num_layers
    if not shape.gated_mlp:
        gelu = GeluTanh()
        return _elementwise("activation", layers, up.numel(), GELU_FLOPS, 2 * size, lambda: gelu(up))
    gate, gated = drawn(tokens, shape.intermediate), SwiGLU() if shape.activation == "silu" else GeGLU()
    flops = SWIGLU_FLOPS if shape.activation == "silu" else GELU_FLOPS + 1
    return _elementwise("activation", layers, up.numel(), flops, 3 * size, lambda: gated(gate, up))


def _loss(shape: Shape, tokens: int, drawn: Draw, device: str) -> Case:
    import torch

    logits = drawn(tokens, shape.vocab_size, of=torch.float32)
    labels = torch.randint(0, shape.vocab_size, (tokens,), device=device)
    loss = partial(torch.nn.functional.cross_entropy, logits, labels, reduction="sum")
    return _elementwise("loss", 1, logits.numel(), LOSS_FLOPS, 4, loss)


def _optimizer(shape: Shape, device: str) -> Case:
    """AdamW as torch does it unasked: read weight, gradient and two moments, write back all but the gradient."""
    import torch

    from rush.models.counts import list_parameters

    parameters = [
        torch.nn.Parameter(torch.randn(spec.dims, device=device) * 0.02) for spec in list_parameters(shape)
    ]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    total = sum(parameter.numel() for parameter in parameters)
    return "optimizer", "optimizer", 1, float(ADAM_FLOPS * total), 28.0 * total, optimizer.step


def intensity(op: Data) -> float:
    return float(op["flops"] / op["bytes"])


def rate(op: Data) -> float:
    return float(op["flops"] / op["seconds"]["median"])


def roof(data: Data, op: Data) -> float:
    """The most this operation could reach: the slope or the flat roof, whichever is lower over its place."""
    return float(min(data["matmul_flops"], intensity(op) * data["copy_bytes_per_s"]))


def words(data: Data) -> list[str]:
    ops = data["ops"]
    turn = data["matmul_flops"] / data["copy_bytes_per_s"]
    under_memory = [op for op in ops if intensity(op) < turn]
    sentences = [
        f"This machine multiplies at {units.flops(data['matmul_flops'])} ({data['dtype']}) and copies at "
        f"{units.bandwidth(data['copy_bytes_per_s'])}, so whatever does less than {units.si(turn)} FLOP per byte is bound by memory: "
        f"of {data['model']}'s operations with {data['batch']} × {data['sequence']} tokens, "
        f"{units.listed([op['name'] for op in under_memory]) if under_memory else 'none'}."
    ]
    sentences.append(_share_words(ops))
    sentences.append(_ends_words(data))
    above = [op for op in ops if rate(op) > 1.1 * roof(data, op)]
    if above:
        sentences.append(
            f"{_capital(units.listed([op['name'] for op in above]))} {'stands' if len(above) == 1 else 'stand'} above the slope: "
            "that is no miracle but a cache; so few bytes did not have to come from memory, while the slope was measured with "
            "a copy too large for any cache."
        )
    attention = _attention_words(ops)
    return [*sentences, attention] if attention else sentences


def _share_words(ops: list[Data]) -> str:
    """Shares of one forward pass and update, each operation times its copies; of the two attentions the plain one."""
    parts = {
        op["name"]: op["copies"] * op["seconds"]["median"] for op in ops if op["name"] != "flash attention"
    }
    total = sum(parts.values())
    matmul = sum(parts[op["name"]] for op in ops if op["kind"] == "matmul")
    longest = max(parts, key=lambda name: parts[name])
    return (
        f"Added up over all layers, the matmuls take {units.share(matmul / total)} of the time of these operations; "
        f"the largest single part is {longest} with {units.share(parts[longest] / total)}."
    )


def _ends_words(data: Data) -> str:
    parts = {op["name"]: rate(op) / roof(data, op) for op in data["ops"]}
    best, worst = max(parts, key=lambda n: parts[n]), min(parts, key=lambda n: parts[n])
    top, low = parts[best], parts[worst]
    tail = (
        "so its time goes into something else than its least traffic and its arithmetic: extra passes over memory, launches, or slow functions"
        if low < 0.5
        else "so even that one is near its roof"
    )
    return f"Nearest to its roof is {best} with {units.share(top)} of it; farthest is {worst} with {units.share(low)}, {tail}."


def _attention_words(ops: list[Data]) -> str | None:
    found = {op["name"]: op for op in ops if op["kind"] == "attention"}
    if len(found) < 2:
        return None
    ratio = units.speedup(found["plain attention"]["seconds"], found["flash attention"]["seconds"])
    what = (
        f"{units.times(ratio.ratio)} faster than"
        if ratio.faster
        else f"slower than ({units.times(ratio.ratio)})"
        if ratio.slower
        else "as fast as"
    )
    return f"At this length flash attention is {what} the plain one; `rush explain attention` shows how that changes with the length."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def picture(data: Data) -> list[Panel]:
    lines = []
    numbered = list(enumerate(data["ops"], start=1))
    for kind, color in KINDS.items():
        dots = [
            replace(dot(intensity(op), op["seconds"], op["flops"], note=op["name"]), label=str(index))
            for index, op in numbered
            if op["kind"] == kind
        ]
        if dots:
            lines.append(Curve(kind, dots, color, "dots"))
    places = [intensity(op) for op in data["ops"]]
    turn = data["matmul_flops"] / data["copy_bytes_per_s"]
    start, end = min([*places, turn]) / 2, max([*places, turn]) * 2
    corners = [
        Dot(start, start * data["copy_bytes_per_s"]),
        Dot(turn, data["matmul_flops"]),
        Dot(end, data["matmul_flops"]),
    ]
    lines.append(
        Curve(
            f"roof: {units.bandwidth(data['copy_bytes_per_s'])}, then {units.flops(data['matmul_flops'])}",
            corners,
            6,
            "formula",
        )
    )
    key = ", ".join(f"{index} {op['name']}" for index, op in numbered)
    title = f"{data['model']}, {data['batch']} × {data['sequence']} tokens, {data['dtype']}"
    return [
        Curves(
            title, "FLOP per byte, at the least traffic", "FLOP per second", "", "FLOP/s", lines, caption=key
        )
    ]


def table(data: Data) -> TopicTable:
    rows = [
        [
            f"{index} {op['name']}",
            f"{op['copies']} ×",
            units.span(op["seconds"]),
            units.si(intensity(op)),
            units.flops(rate(op)),
            units.share(rate(op) / roof(data, op)),
        ]
        for index, op in enumerate(data["ops"], start=1)
    ]
    return TopicTable(
        ("operation", "in the model", "time of one (95 % interval)", "FLOP per byte", "rate", "of its roof"),
        rows,
    )


topic = Topic(
    name="roofline",
    title="This model under this machine's roof",
    about="each operation of a model at its recipe's shapes: bound by arithmetic or by memory, and how far from the roof",
    idea=(
        "A machine has two limits: how fast it multiplies and how fast it moves bytes. An operation that does much arithmetic "
        "with each byte meets the first, one that does little meets the second. Drawn over the arithmetic per byte, the two "
        "limits look like a roof: a slope, where memory decides, and a flat part, where the arithmetic units do.",
        "Large matmuls belong under the flat part: use a faster number format to lift it. Norms, activations, losses and "
        "optimizer updates belong under the slope: the only way to make them faster is to move fewer bytes, by fusing them "
        "with their neighbors or by smaller numbers.",
        "An operation far below its roof wastes something: it moves its data more than once, as plain attention and unfused norms "
        "do, or it is too small to fill the machine. An operation above the slope found its data in a cache.",
    ),
    method=(
        ("flat roof", "the best of some large matmuls in this number format, measured now"),
        ("slope", "a copy of a block larger than any cache, bytes read plus bytes written, measured now"),
        (
            "FLOP per byte",
            "FLOPs by formula over the least traffic: every input and output once (AdamW: 28 bytes per parameter)",
        ),
        (
            "time",
            "median of repeated runs of the forward operation; on CUDA by events, the cache emptied before each",
        ),
        INTERVALS,
    ),
    measure=measure,
    words=words,
    picture=picture,
    table=table,
    options=("model", "batch", "sequence"),
)
