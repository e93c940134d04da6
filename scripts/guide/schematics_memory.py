"""Pictures of the techniques that are about memory: where activations, logits and weights lie, and what is paid for it."""

from __future__ import annotations

from collections.abc import Callable

from rush.report.svg import tag
from scripts.guide.book import Book
from scripts.guide.drawing import WIDTH, Sheet
from scripts.guide.plans import LADDERS
from scripts.guide.queries import Queries

RIGHT = WIDTH - 16


def checkpointing(book: Book) -> Sheet:
    sheet = Sheet(book, "Saved activations: all of them, only a block's input, or the expensive ones")
    layers = 8
    rows = (
        ("everything is saved", 5, ""),
        ("full: only each block's input; the forward pass runs twice", 1, "lost"),
        ("selective: matmuls and attention are saved, the cheap rest runs twice", 3, "lost"),
    )
    for at, (name, saved, again) in enumerate(rows):
        y = 30 + 104 * at
        sheet.word(16, y, name, "small")
        for layer in range(layers):
            for part in range(5):
                class_ = "store" if part < saved else "hollow dashed"
                sheet.box(16 + 56 * layer, y + 10 + 11 * part, 48, 8, class_)
            if again:
                height = 8.0 if at == 1 else 3.0
                sheet.box(16 + 56 * layer, y + 68, 48, height, again)
    sheet.box(16, 332, 12, 12, "store")
    sheet.word(34, 343, "in memory until the backward pass", "small")
    sheet.box(276, 332, 12, 12, "lost")
    sheet.word(294, 343, "recomputed", "small")
    return sheet


def offload(book: Book) -> Sheet:
    """The two links to scale, with what the probe measured."""
    ask = Queries(book)
    sheet = Sheet(book, "The GPU's own memory beside its link to the host, widths to scale")
    ceilings = book.value(LADDERS["llama"], "ceilings")
    sheet.word(16, 28, "Widths to scale", "head")
    wide = 150.0
    thin = wide * ceilings["transfers_bytes_per_s"]["device_to_host_pinned"] / ceilings["copy_bytes_per_s"]
    sheet.box(186, 44, 108, wide, "compute", "=GPU")
    sheet.box(298, 44, 62, wide, "gain")
    sheet.box(364, 44, 100, wide, "store", "=HBM")
    sheet.box(120, 119 - thin / 2, 62, thin, "lost")
    sheet.box(16, 74, 100, 90, "host", "host memory")
    sheet.raw(RIGHT, 216, ask.copy_rate(), "small", "end")
    sheet.raw(100, 216, ask.link_rate("device_to_host_pinned"), "small")
    sheet.word(100, 234, "over PCIe, pinned", "small soft")
    sheet.word(RIGHT, 234, "to its own memory", "small soft", "end")
    return sheet


def logits(book: Book) -> Sheet:
    sheet = Sheet(
        book, "Full logits: tokens by vocabulary, in several copies; in chunks only a slice exists at a time"
    )
    sheet.word(16, 28, "Full logits: tokens × vocabulary", "head")
    for shift in (16, 8, 0):
        sheet.box(16 + shift, 42 + shift, 424, 92, "lost" if shift == 0 else "lost faded")
    sheet.raw(
        228,
        92,
        "logits, softmax, gradient" if book.language == "en" else book.say("logits, softmax, gradient"),
        "on",
        "middle",
    )
    sheet.word(16, 186, "In chunks of tokens: a slice at a time", "head")
    for row in range(6):
        sheet.box(16, 200 + 17 * row, 424, 14, "gain" if row == 2 else "hollow dashed")
    sheet.word(
        16, 322, "A fused loss computes the gradients on the way, so no chunk is made twice.", "small soft"
    )
    return sheet


def rounding(book: Book) -> Sheet:
    sheet = Sheet(
        book,
        "A weight in bf16 between two representable numbers: round-to-nearest loses a small update, stochastic rounding keeps it on average",
    )
    sheet.word(16, 28, "An update smaller than half a step of bf16", "head")
    for y, class_ in ((76, "line3"), (176, "line2")):
        sheet.marks.append(tag("line", class_="arrow", x1=40, x2=440, y1=y, y2=y))
        for x in (60, 240, 420):
            sheet.marks.append(tag("line", class_="arrow", x1=x, x2=x, y1=y - 8, y2=y + 8))
        sheet.marks.append(tag("path", class_=f"line {class_}", d=f"M240 {y - 12}L282 {y - 12}"))
        sheet.marks.append(tag("circle", class_="lost" if y == 76 else "gain", cx=282, cy=y - 12, r=5))
    sheet.word(16, 112, "to nearest: back to where it was, every time", "small")
    sheet.word(16, 212, "stochastic: up with the probability of the distance,", "small")
    sheet.word(16, 230, "so that many small updates add up", "small")
    return sheet


def accumulate(book: Book) -> Sheet:
    sheet = Sheet(book, "Gradient accumulation: several small passes add their gradients, one update follows")
    sheet.word(16, 28, "One batch, or halves of it one after the other", "head")
    sheet.lane(
        50,
        "batch 8",
        [(0, 150, "compute", "forward"), (154, 190, "s2", "backward"), (348, 100, "host", "update")],
        44,
    )
    parts = [
        (0.0, 74.0, "compute", ""),
        (78, 94, "s2", ""),
        (176, 74, "compute", ""),
        (254, 94, "s2", ""),
        (352, 96, "host", "update"),
    ]
    sheet.lane(132, "2 × 4: half the activations", parts, 22)
    sheet.word(16, 196, "The gradients of all passes are summed before the update.", "small soft")
    return sheet


def loading(book: Book) -> Sheet:
    sheet = Sheet(book, "Time lines: batches prepared in turn with steps, and ahead of them in a worker")
    sheet.word(16, 28, "Batches in turn with steps", "head")
    turns = [
        (x + at, width, class_, "")
        for x in (0, 150, 300)
        for at, width, class_ in ((0, 30, "host"), (34, 110, "compute"))
    ]
    sheet.lane(50, "GPU", turns)
    sheet.word(16, 118, "Batches made ahead, in a worker", "head")
    sheet.lane(140, "worker", [(x, 30, "host", "") for x in (0, 114, 228, 342)])
    sheet.lane(202, "GPU", [(34.0 + 114 * index, 110, "compute", "") for index in range(3)])
    sheet.word(16, 268, "It pays where the batch takes long, and not where the GPU does.", "small soft")
    return sheet


MEMORY: dict[str, Callable[[Book], Sheet]] = {
    "checkpointing": checkpointing,
    "offload": offload,
    "logits": logits,
    "rounding": rounding,
    "accumulate": accumulate,
    "loading": loading,
}
