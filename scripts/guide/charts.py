"""Pictures of what was measured: the climb, where a step's time goes, published beside found, kernels, batches, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rush.report.bars import CLASSES
from rush.report.svg import Scale, path, tag, text_at, whisker
from scripts.guide.book import Book
from scripts.guide.comparisons import CONTENDERS, KERNELS, LOSSES, NEAREST, Comparisons
from scripts.guide.drawing import WIDTH, Sheet
from scripts.guide.plans import LADDERS
from scripts.guide.queries import BUSY, Queries

LEFT, RIGHT = 16.0, WIDTH - 16
STACK = {
    "matmul": "s1", "attention": "s2", "norm_elementwise": "s3", "loss": "s4", "optimizer": "s0", "other": "s5",
}  # fmt: skip
NAMES = {
    "base": "plain fp32",
    "compile(scope=block)": "compile",
    "batch.micro=8": "batch 8",
    "batch.micro=32": "batch 32",
    "batch.micro=64": "batch 64",
}


def title(book: Book, rung: str) -> str:
    name = NAMES.get(rung, rung)
    return book.say(name) if " " in name else name


def kept(book: Book, ladder: str) -> list[str]:
    """The rungs that the climb was built on, by name."""
    rows = book.value(LADDERS[ladder], "rungs")
    return [row["name"] for row in rows if row["status"] == "ok" and row.get("kept") is not False]


def climb(book: Book, ladder: str, heading: str) -> Sheet:
    ask = Queries(book)
    sheet = Sheet(book, heading)
    sheet.word(LEFT, 28, heading, "head")
    sheet.word(LEFT, 48, "tokens per second; × over plain fp32", "small soft")
    names = kept(book, ladder)
    speeds = {name: book.value(LADDERS[ladder], "rungs", name, "tokens_per_s") for name in names}
    scale = Scale(0, max(row["ci95"][1] for row in speeds.values()), LEFT, 318)
    for at, name in enumerate(names):
        y = 62 + 44 * at
        row = speeds[name]
        sheet.raw(LEFT, y + 13, ("+ " if at else "") + title(book, name), "small")
        sheet.box(LEFT, y + 18, scale(row["median"]) - LEFT, 16, "compute")
        low, high = (scale(end) for end in row["ci95"])
        sheet.marks += whisker(low, high, y + 26, 4)
        total = "" if name == "base" else f"  {ask.total(ladder, name)}"
        sheet.raw(max(high, scale(row["median"])) + 8, y + 31, f"{ask.speed(ladder, name)}{total}", "small")
    return sheet


def steps(book: Book) -> Sheet:
    """Milliseconds for a thousand tokens, stacked by what the GPU did, on a scale that the fp32 bar leaves."""
    sheet = Sheet(book, "Where the GPU's time goes, rung by rung: milliseconds for a thousand tokens")
    sheet.word(LEFT, 28, "Where the GPU's time goes (Llama 3.2 1B)", "head")
    sheet.word(LEFT, 48, "milliseconds of work for a thousand tokens, from profiles", "small soft")
    for index, kind in enumerate(BUSY):
        x, y = LEFT + 220 * (index % 2), 62 + 20 * (index // 2)
        sheet.box(x, y, 12, 12, STACK[kind])
        sheet.word(x + 18, y + 11, CLASSES[kind], "small")
    names = kept(book, "llama")[1:]
    first = _work(book, names[0])
    scale = Scale(0, sum(first.values()), 0, RIGHT - LEFT - 60)
    for at, name in enumerate(names):
        y = 130 + 44 * at
        parts = _work(book, name)
        sheet.raw(LEFT, y + 12, title(book, name), "small")
        x = LEFT
        for kind, ms in parts.items():
            sheet.box(x, y + 17, scale(ms), 18, STACK[kind])
            x += scale(ms)
        sheet.raw(x + 8, y + 31, _per_thousand(book, name), "small soft")
    return sheet


def _work(book: Book, rung: str) -> dict[str, float]:
    row = book.value(LADDERS["llama"], "rungs", rung)
    return {kind: row["breakdown_ms"][kind] / row["step_tokens"] * 1000 for kind in BUSY}


def _per_thousand(book: Book, rung: str) -> str:
    places = [("rungs", rung, "step_tokens"), *(("rungs", rung, "breakdown_ms", kind) for kind in BUSY)]
    total = " + ".join(chr(ord("b") + index) for index in range(len(BUSY)))
    return book.figure("ms", LADDERS["llama"], f"1000 * ({total}) / a", *places)


def published(book: Book) -> Sheet:
    """Each published gain beside the plan for its machine and our finding, on one axis of ratios."""
    sheet = Sheet(
        book,
        "The published climb on an A100, the planner for it, and our measurement on an H200, gain by gain",
    )
    sheet.word(LEFT, 28, "Published, planned, measured", "head")
    for x, class_, word in (
        (LEFT, "s4", "published, A100"),
        (166, "s3", "planner, A100"),
        (306, "s1", "measured, H200"),
    ):
        sheet.box(x, 42, 12, 12, class_)
        sheet.word(x + 18, 53, word, "small")
    rows = _published_rows(book)
    ratios = [value for _, values, _ in rows for value in values]
    scale = Scale(min(ratios) / 1.1, max(ratios) * 1.1, 150, RIGHT, log=True)
    bottom = 78 + 44 * len(rows)
    for ratio in (0.5, 1, 2, 4, 8, 16):
        if scale.low < ratio < scale.high:
            sheet.marks.append(tag("line", class_="rule", x1=scale(ratio), x2=scale(ratio), y1=84, y2=bottom))
            label = book.mark(book.localized(f"×{ratio:g}"), "name", "", "axis", ())
            sheet.raw(scale(ratio), 78, label, "small soft", "middle")
    for at, (name, values, ends) in enumerate(rows):
        y = 108 + 44 * at
        sheet.word(LEFT, y + 5, name, "small")
        sheet.rule(y + 22)
        sheet.marks += whisker(scale(ends[0]), scale(ends[1]), y, 5)
        for value, class_, shape in zip(
            values, ("s4", "s3", "s1"), ("diamond", "square", "circle"), strict=True
        ):
            x = scale(value)
            if shape == "circle":
                sheet.marks.append(tag("circle", class_=class_, cx=x, cy=y, r=6))
            elif shape == "square":
                sheet.marks.append(tag("rect", class_=class_, x=x - 5, y=y - 15, width=10, height=10))
            else:
                sheet.marks.append(tag("path", class_=class_, d=f"M{x:.1f} {y + 4}l7 7l-7 7l-7 -7Z"))
    sheet.bottom = bottom
    return sheet


def _published_rows(book: Book) -> list[tuple[str, tuple[float, float, float], Sequence[float]]]:
    claims, plan = "scripts/guide/claims.toml", "docs/guide/records/plan.json"
    rows: list[tuple[str, tuple[float, float, float], Sequence[float]]] = []

    def add(name: str, published: float, rung: str, over: str, key: str) -> None:
        gain = book.value(LADDERS["llama"], "rungs", rung, key)
        speeds = [
            book.value(plan, "machines", "a100", "rungs", "llama", one, "tokens_per_s")
            for one in (rung, over)
        ]
        rows.append((name, (published, speeds[0] / speeds[1], gain["ratio"]), gain["ci95"]))

    def claim(technique: str) -> float:
        return 1 + float(book.value(f"technique {technique}", "gain"))

    def over(rung: str) -> str:
        return str(book.value(LADDERS["llama"], "rungs", rung, "gain", "over"))

    add("mixed precision", claim("amp_bf16"), "amp_bf16", "base", "total_gain")
    for name, technique, rung in (
        ("FlashAttention", "flash_attention", "flash_attention"),
        ("fused Adam", "fused_adamw", "fused_adamw"),
        ("torch.compile", "compile", "compile(scope=block)"),
    ):
        add(name, claim(technique), rung, over(rung), "gain")
    add("batch 8", book.value(claims, "climb", "batch"), "batch.micro=8", over("batch.micro=8"), "gain")
    add("all of it", book.value(claims, "climb", "total"), "batch.micro=8", "base", "total_gain")
    add("full checkpointing", claim("checkpoint_full"), "checkpoint_full", over("checkpoint_full"), "gain")
    return rows


def kernels(book: Book) -> Sheet:
    """How many times as fast as plain torch: compiled, Liger, ours."""
    tables = Comparisons(book)
    sheet = Sheet(
        book,
        "Kernels forward and backward: how many times as fast as plain torch the compiler, Liger and ours are",
    )
    sheet.word(LEFT, 28, "Times as fast as plain torch, both passes", "head")
    for index, who in enumerate(CONTENDERS):
        sheet.box(LEFT + 160 * index, 42, 12, 12, ("s3", "s4", "s1")[index])
        sheet.raw(LEFT + 18 + 160 * index, 53, book.say(who) if " " in who else who, "small")
    found = []
    for op, folder, size in KERNELS:
        file = f"results/{folder}/kernels.json"
        places = {who: tables.kernel_place(file, op, size, who) for who in ("plain torch", *CONTENDERS)}
        found.append((op, file, places))
    ratio = {
        (op, who): book.value(file, *places["plain torch"]) / book.value(file, *places[who])
        for op, file, places in found
        for who in CONTENDERS
    }
    scale = Scale(0, max(ratio.values()), LEFT, RIGHT - 60)
    for at, (op, file, places) in enumerate(found):
        y = 74 + 82 * at
        sheet.raw(LEFT, y + 12, op, "small")
        for index, who in enumerate(CONTENDERS):
            end = scale(ratio[op, who])
            sheet.box(LEFT, y + 18 + 19 * index, end - LEFT, 15, ("s3", "s4", "s1")[index])
            label = book.figure("ratio", file, "a / b", places["plain torch"], places[who])
            sheet.raw(end + 6, y + 30 + 19 * index, label, "small")
    return sheet


def batches(book: Book) -> Sheet:
    """Speed over batch size at the top of Llama's climb, each with its memory."""
    ask = Queries(book)
    sheet = Sheet(book, "Speed and peak memory over the batch at the top of the climb, Llama 3.2 1B")
    sheet.word(LEFT, 28, "More rows a step (Llama, top of the climb)", "head")
    sheet.word(LEFT, 48, "tokens per second, and peak memory", "small soft")
    curve = book.value(LADDERS["llama"], "batch_curve")
    scale = Scale(0, max(row["tokens_per_s"]["median"] for row in curve), 60, 300)
    for at, row in enumerate(curve):
        y = 62 + 32 * at
        sheet.raw(48, y + 17, book.mark(str(row["micro"]), "name", "", "micro", ()), "", "end")
        sheet.box(60, y + 3, scale(row["tokens_per_s"]["median"]) - 60, 19, "compute")
        sheet.raw(scale(row["tokens_per_s"]["median"]) + 7, y + 17, ask.batch("llama", row["micro"]), "small")
        sheet.raw(RIGHT, y + 17, ask.batch("llama", row["micro"], "memory"), "small soft", "end")
    return sheet


PRICES = {
    "cudnn_attention": "compile, batch 8",
    "fused_loss": "fused_loss",
    "pure_bf16": "pure_bf16",
    "checkpoint_selective": "checkpoint_selective",
    "checkpoint_full": "checkpoint_full",
    "offload_activations": "offload_activations",
}


def prices(book: Book) -> Sheet:
    """What saves memory at batch 8, by what it saves and what it costs."""
    ask = Queries(book)
    sheet = Sheet(book, "What saves memory at batch 8 and what it costs in speed, Llama 3.2 1B")
    sheet.word(LEFT, 28, "What memory costs (Llama, batch 8)", "head")
    for x, class_, word in ((LEFT, "s1", "speed"), (140, "s3", "peak memory")):
        sheet.box(x, 42, 12, 12, class_)
        sheet.word(x + 18, 53, word, "small")
    rungs = {name: book.value(LADDERS["llama"], "rungs", name) for name in PRICES}
    speed = Scale(0, max(row["tokens_per_s"]["median"] for row in rungs.values()), LEFT, 340)
    memory = Scale(0, max(row["peak_memory_bytes"] for row in rungs.values()), LEFT, 340)
    for at, (name, row) in enumerate(rungs.items()):
        y = 68 + 62 * at
        shown = PRICES[name]
        sheet.raw(LEFT, y + 13, book.say(shown) if " " in shown else shown, "small")
        for index, (scale, value, class_, said) in enumerate(
            (
                (speed, row["tokens_per_s"]["median"], "s1", ask.speed("llama", name)),
                (memory, row["peak_memory_bytes"], "s3", ask.memory("llama", name)),
            )
        ):
            sheet.box(LEFT, y + 18 + 18 * index, scale(value) - LEFT, 14, class_)
            sheet.raw(scale(value) + 7, y + 30 + 18 * index, said, "small")
    return sheet


def parted(book: Book) -> Sheet:
    """The losses of six steps: plain fp32, and rungs with bf16 weights rounded to nearest, Liger's apart."""
    sheet = Sheet(
        book,
        "Losses of six steps: plain fp32 falls, bf16 weights rounded to nearest do not, and Liger's rung goes its own way",
    )
    sheet.word(LEFT, 28, "Six steps of fine-tuning, bf16 weights", "head")
    sheet.word(LEFT, 48, "loss", "small soft")
    lines = {"plain fp32": ("reference_losses", LOSSES[0], "line2")}
    lines |= {name.partition("(")[0]: ("losses", name, "line1") for name in LOSSES[:2]}
    lines["liger"] = ("losses", "liger", "line3")
    series = {
        name: book.value(NEAREST, "rungs", rung, "parity", key) for name, (key, rung, _) in lines.items()
    }
    values = [value for row in series.values() for value in row]
    y = Scale(min(values) - 0.03, max(values) + 0.03, 272, 62)
    x = Scale(1, 6, 60, 352)
    for loss in (11.9, 12.1, 12.3):
        label = book.mark(book.localized(f"{loss:.1f}"), "name", "", "axis", ())
        sheet.raw(50, y(loss) + 5, label, "small soft", "end")
        sheet.marks.append(tag("line", class_="rule", x1=60, x2=352, y1=y(loss), y2=y(loss)))
    for step in range(1, 7):
        sheet.raw(x(step), 294, book.mark(str(step), "name", "", "step", ()), "small soft", "middle")
    for name, row in series.items():
        points = [(x(step), y(value)) for step, value in enumerate(row, start=1)]
        sheet.marks.append(tag("path", class_=f"line {lines[name][2]}", d=path(points)))
    for name, shift in (("plain fp32", 4), ("compile", -2), ("fused_loss", 15), ("liger", 6)):
        said = book.say(name) if " " in name else name
        sheet.marks.append(text_at(360, y(series[name][-1]) + shift, said, class_="small"))
    sheet.word(352, 312, "step", "small soft", "end")
    return sheet


CHARTS: dict[str, Callable[[Book], Sheet]] = {
    "climb-llama": lambda book: climb(book, "llama", "Llama 3.2 1B on one H200"),
    "climb-gpt2": lambda book: climb(book, "gpt2", "GPT-2 124M on one H200"),
    "steps": steps,
    "published": published,
    "kernels": kernels,
    "batches": batches,
    "prices": prices,
    "parted": parted,
}
