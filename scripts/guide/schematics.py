"""What a technique does to the hardware, a picture each. They show the idea: widths are not measurements unless a word says so."""

from __future__ import annotations

from collections.abc import Callable

from rush.report.svg import tag
from scripts.guide.book import Book
from scripts.guide.drawing import WIDTH, Sheet
from scripts.guide.plans import LADDERS
from scripts.guide.queries import Queries
from scripts.guide.schematics_memory import MEMORY

RIGHT = WIDTH - 16


def gpu(book: Book) -> Sheet:
    sheet = Sheet(
        book, "A host launches kernels; the GPU's cores compute; its memory feeds them through one bus"
    )
    sheet.word(16, 28, "Three things a step can wait for", "head")
    sheet.box(16, 44, 130, 64, "host", "host")
    sheet.word(16, 128, "launches each kernel", "small soft")
    sheet.arrow(150, 76, 204, 76)
    sheet.box(212, 44, 252, 64, "compute", "tensor cores")
    sheet.word(212, 128, "matmuls: operations a second", "small soft")
    for x in (240, 330, 420):
        sheet.arrow(x, 178, x, 142)
    sheet.box(212, 184, 252, 40, "store", "memory (HBM)")
    sheet.word(212, 244, "all the rest: bytes a second", "small soft")
    sheet.word(16, 190, "Idle host,", "small")
    sheet.word(16, 208, "starved cores,", "small")
    sheet.word(16, 226, "or a full bus?", "small")
    return sheet


def formats(book: Book) -> Sheet:
    sheet = Sheet(book, "Bits of the formats: sign, exponent and mantissa of fp32, TF32, bf16, fp16 and fp8")
    sheet.word(16, 28, "Bits of a number", "head")
    for index, (word, class_) in enumerate(
        (("sign", "s5"), ("exponent: range", "s3"), ("mantissa: precision", "s1"))
    ):
        x = (16, 92, 236)[index]
        sheet.box(x, 40, 12, 12, class_)
        sheet.word(x + 18, 51, word, "small")
    rows = (("fp32", 8, 23), ("TF32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10), ("fp8 (e4m3)", 4, 3))
    for at, (name, exponent, mantissa) in enumerate(rows):
        y = 70 + 34 * at
        sheet.raw(16, y + 16, name)
        for bit in range(1 + exponent + mantissa):
            class_ = "s5" if bit == 0 else "s3" if bit <= exponent else "s1"
            sheet.marks.append(tag("rect", class_=class_, x=108 + 11 * bit, y=y, width=9, height=22, rx=1))
        sheet.bottom = max(sheet.bottom, y + 22)
    sheet.word(16, 258, "TF32 computes with these bits and still moves those of fp32.", "small soft")
    return sheet


def tf32(book: Book) -> Sheet:
    """Bars to scale: a step's matmuls and the rest, before and after."""
    ask = Queries(book)
    sheet = Sheet(book, "A step in fp32 and in TF32: the matmuls shrink, all the rest stays")
    sheet.word(16, 28, "The matmuls shrink, the rest stays (Llama, to scale)", "head")
    rungs = book.value(LADDERS["llama"], "rungs")
    full = sum(_parts(rungs[0]).values())
    for at, (name, rung) in enumerate((("fp32", "base"), ("TF32", "tf32"), ("bf16", "amp_bf16"))):
        y = 48 + 62 * at
        parts = _parts(book.value(LADDERS["llama"], "rungs", rung))
        sheet.raw(16, y + 12, name, "head")
        sheet.raw(
            76, y + 12, f"{ask.part('llama', rung, 'matmul')} + {ask.rest('llama', rung)}", "small soft"
        )
        x = 16.0
        for kind in parts:
            width = (RIGHT - 16) * parts[kind] / full
            sheet.box(x, y + 20, width, 24, "compute" if kind == "matmul" else "idle")
            x += width
    sheet.box(16, 240, 12, 12, "compute")
    sheet.word(34, 251, "matmuls", "small")
    sheet.box(130, 240, 12, 12, "idle")
    sheet.word(148, 251, "everything else that the GPU does", "small")
    return sheet


def _parts(rung: dict[str, dict[str, float]]) -> dict[str, float]:
    """Matmuls first, then all other work, in milliseconds."""
    found = rung["breakdown_ms"]
    rest = sum(value for key, value in found.items() if key not in ("matmul", "data", "idle"))
    return {"matmul": found["matmul"], "rest": rest}


def autocast(book: Book) -> Sheet:
    sheet = Sheet(
        book, "Autocast: fp32 weights are cast to bf16 for the matmul, sums and the update stay in fp32"
    )
    sheet.word(16, 28, "bf16 inside the matmul, fp32 where it adds up", "head")
    sheet.box(16, 48, 130, 44, "store", "weights, fp32")
    sheet.arrow(150, 70, 174, 70)
    sheet.box(182, 48, 116, 44, "s2", "cast to bf16")
    sheet.arrow(302, 70, 326, 70)
    sheet.box(334, 48, 130, 44, "compute", "matmul")
    sheet.word(334, 110, "sums in fp32", "small soft")
    sheet.arrow(399, 118, 399, 142)
    sheet.box(334, 150, 130, 44, "store", "gradient, fp32")
    sheet.arrow(330, 172, 158, 172)
    sheet.box(16, 150, 134, 44, "host", "AdamW, fp32")
    sheet.arrow(81, 146, 81, 100)
    sheet.word(16, 220, "The casts are extra passes over memory: see compile.", "small soft")
    return sheet


def attention(book: Book) -> Sheet:
    sheet = Sheet(
        book, "Plain attention writes score matrices to memory; FlashAttention keeps one tile on the chip"
    )
    sheet.word(16, 28, "Plain: the scores go through memory", "head")
    for index, word in enumerate(("=Q·Kᵀ", "mask", "softmax", "=P·V")):
        x = 16 + 118 * index
        sheet.box(x, 42, 90, 34, "compute", word)
        if index < 3:
            sheet.arrow(x + 58, 80, x + 58, 98)
            sheet.arrow(x + 112, 98, x + 112, 80)
    sheet.box(16, 104, 448, 34, "lost", "memory: sequence × sequence, written and read each time")
    sheet.word(16, 178, "FlashAttention: one tile at a time, on the chip", "head")
    for row in range(6):
        for column in range(6):
            class_ = "gain" if (row, column) == (3, 2) else "hollow" if column <= row else "idle faded"
            sheet.box(16 + 22 * column, 192 + 22 * row, 19, 19, class_)
    sheet.word(170, 208, "A tile's scores live in registers", "small")
    sheet.word(170, 228, "and shared memory. A running maximum", "small")
    sheet.word(170, 248, "and sum make the softmax exact.", "small")
    sheet.word(170, 276, "Tiles above the diagonal are skipped.", "small soft")
    sheet.word(170, 304, "Only Q, K, V and the result touch", "small")
    sheet.word(170, 322, "memory.", "small")
    return sheet


def update(book: Book) -> Sheet:
    sheet = Sheet(
        book, "Plain AdamW: a dozen kernels each read and write; fused: every value is read and written once"
    )
    sheet.word(16, 28, "Plain: a kernel for each operation", "head")
    for index in range(11):
        x = 16 + 41 * index
        sheet.box(x, 42, 32, 30, "compute", ("=×", "=+", "=²", "=√", "=÷")[index % 5])
        sheet.box(x, 78, 14, 12, "lost")
        sheet.box(x + 18, 78, 14, 12, "lost")
    sheet.word(16, 112, "each reads and writes whole tensors", "small soft")
    sheet.word(16, 148, "Fused: one kernel for all tensors", "head")
    sheet.box(16, 162, 448, 30, "gain", "moments, bias correction, decay, step")
    sheet.box(16, 198, 14, 12, "store")
    sheet.box(450, 198, 14, 12, "store")
    sheet.word(40, 209, "read once", "small soft")
    sheet.word(440, 209, "written once", "small soft", "end")
    return sheet


def graph(book: Book) -> Sheet:
    sheet = Sheet(
        book,
        "Time lines: a host that launches kernel by kernel leaves gaps; one launch of a captured graph does not",
    )
    sheet.word(16, 28, "The host cannot keep up", "head")
    starts = [0.0, 56, 112, 168, 224, 280, 336, 392]
    sheet.lane(50, "host", [(x, 52, "host", "launch") for x in starts])
    sheet.lane(112, "GPU", [(x + 22 if x else 22, 24, "compute", "") for x in starts])
    sheet.word(16, 180, "One launch for all of them", "head")
    sheet.lane(202, "host", [(0, 68, "host", "replay"), (74, 374, "idle", "free")])
    sheet.lane(264, "GPU", [(30 + 26 * index, 24, "compute", "") for index in range(8)])
    return sheet


def fusion(book: Book) -> Sheet:
    sheet = Sheet(book, "Eager: five small kernels each pass through memory; compiled: one kernel, one pass")
    sheet.word(16, 28, "Eager: each operation goes through memory", "head")
    for index, word in enumerate(("=+", "norm", "cast", "=SiLU", "=×")):
        x = 16 + 94 * index
        sheet.box(x, 42, 68, 32, "compute", word)
        sheet.arrow(x + 20, 98, x + 20, 80)
        sheet.arrow(x + 48, 78, x + 48, 96)
    sheet.box(16, 104, 444, 26, "lost", "memory")
    sheet.word(16, 166, "Compiled: fused into one kernel", "head")
    sheet.box(16, 180, 444, 32, "gain", "=+ · norm · cast · SiLU · ×")
    sheet.arrow(60, 236, 60, 218)
    sheet.arrow(420, 216, 420, 234)
    sheet.box(16, 242, 444, 26, "store", "memory")
    sheet.word(
        16, 290, "What is between the matmuls is bound by memory: fewer passes, less time.", "small soft"
    )
    return sheet


def batching(book: Book) -> Sheet:
    sheet = Sheet(book, "Weights, update and launches are paid once a step; more rows share them")
    sheet.word(16, 28, "Paid once a step, shared by all rows", "head")
    for at, (name, rows) in enumerate((("batch 1", 1), ("batch 8", 8))):
        y = 50 + 96 * at
        sheet.word(16, y + 10, name, "small soft")
        sheet.box(16, y + 18, 96, 40, "host", "update")
        sheet.box(116, y + 18, 60, 40, "lost", "launches", "on small")
        for row in range(rows):
            sheet.box(180 + 35.5 * row, y + 18, 33, 40, "compute")
    sheet.word(16, 244, "Blue is what trains. A matmul with more rows also fills more tiles.", "small soft")
    return sheet


def tiles(book: Book) -> Sheet:
    sheet = Sheet(
        book, "A vocabulary of 50,257 ends in the middle of a tile and shifts every row; 50,304 fits"
    )
    ask = Queries(book)
    sheet.raw(16, 28, ask.listed("facts", "vocabulary", "whole"), "head")
    sheet.word(84, 28, "columns: odd rows start unaligned", "small soft")
    for row in range(4):
        for column in range(9):
            width = 34 if column < 8 else 17
            sheet.box(
                16 + 46 * column + 5 * row, 42 + 20 * row, width, 15, "lost" if column == 8 else "compute"
            )
    sheet.raw(16, 160, ask.listed("facts", "padded", "whole"), "head")
    sheet.word(84, 160, "columns: a multiple of 64, zeros at the end", "small soft")
    for row in range(4):
        for column in range(9):
            sheet.box(16 + 46 * column, 174 + 20 * row, 34, 15, "gain" if column == 8 else "compute")
    return sheet


def fp8(book: Book) -> Sheet:
    sheet = Sheet(
        book,
        "fp8: a tensor is scaled so that its largest value meets the format's largest, then cast, and unscaled in the result",
    )
    sheet.word(16, 28, "A scale for each tensor, then eight bits", "head")
    for x, class_, heights in ((16, "compute", (4, 9, 15, 7, 3)), (182, "gain", (16, 36, 60, 28, 12))):
        for index, height in enumerate(heights):
            sheet.box(x + 26 * index, 112 - height, 20, height, class_)
    sheet.marks.append(tag("line", class_="arrow dashed", x1=170, x2=330, y1=50, y2=50))
    sheet.word(182, 134, "scaled up to fp8's range", "small soft")
    sheet.word(16, 134, "as they are", "small soft")
    sheet.word(340, 55, "fp8's largest", "small soft")
    sheet.arrow(146, 90, 172, 90)
    sheet.arrow(318, 90, 344, 90)
    sheet.box(352, 70, 112, 40, "compute", "matmul")
    sheet.word(352, 134, "÷ both scales", "small soft")
    sheet.word(16, 166, "Finding the largest value and casting are passes over memory;", "small soft")
    sheet.word(16, 184, "fused into the kernel before, they cost little.", "small soft")
    return sheet


SCHEMATICS: dict[str, Callable[[Book], Sheet]] = {
    "gpu": gpu,
    "formats": formats,
    "tf32": tf32,
    "autocast": autocast,
    "attention": attention,
    "update": update,
    "graph": graph,
    "fusion": fusion,
    "batching": batching,
    "tiles": tiles,
    "fp8": fp8,
    **MEMORY,
}
