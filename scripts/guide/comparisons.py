"""The guide's tables of Liger, the compiler and our kernels: kernel by kernel, whole runs, and the rung that parted."""

from __future__ import annotations

from rush.bench.combine import REBUILT
from scripts.guide.book import Book, source
from scripts.guide.tables import markdown

KERNELS = (
    ("rmsnorm", "kernels-h200", "16k × 2048"),
    ("layernorm", "kernels-h200", "16k × 2048"),
    ("rope", "kernels-nf4-rope-h200", "16k × 2048 (32 heads of 64)"),
    ("swiglu", "kernels-h200", "16k × 8192"),
    ("cross_entropy", "kernels-h200", "4k × 50,304"),
    ("linear_cross_entropy", "kernels-h200", "16k tokens × 2048 × 128,256"),
)
CONTENDERS = ("compiled torch", "Liger", "rush")
LOSSES = ("compile(scope=block)", "fused_loss", "liger")
BENCH = "results/kernels-h200/kernels.json"
NEAREST = "results/sft-3b-nearest-h200/ladder.json"


class Comparisons:
    """Tables in Markdown and single figures."""

    def __init__(self, book: Book) -> None:
        self.book, self.say = book, book.say

    def kernels(self) -> str:
        """Milliseconds forward and backward: plain, compiled, Liger, ours."""
        say = self.say
        head = [say("kernel"), say("plain torch"), say("compiled torch"), "Liger", "rush"]
        rows = []
        for op, folder, size in KERNELS:
            cells = [self.kernel_ms(folder, op, size, who) for who in ("plain torch", *CONTENDERS)]
            rows.append((f"`{op}`, {self.book.mark(self._size(size), 'name', '', 'size', ())}", *cells))
        return markdown(head, rows)

    def _size(self, size: str) -> str:
        return (
            size
            if self.book.language == "en"
            else size.replace("tokens", "токенов").replace("heads of", "голов по")
        )

    def kernel_ms(self, folder: str, op: str, size: str, contender: str) -> str:
        file = f"results/{folder}/kernels.json"
        return self.book.figure("ms", file, "a", self.kernel_place(file, op, size, contender))

    def kernel_place(self, file: str, op: str, size: str, contender: str) -> tuple[str | int, ...]:
        rows = next(one for one in source(file)["ops"] if one["op"] == op)["rows"]
        index = next(
            at
            for at, row in enumerate(rows)
            if (row["size"], row["contender"], row["step"]) == (size, contender, "both")
        )
        return ("ops", op, "rows", index, "time_ms", "median")

    def liger_checked(self) -> str:
        """How many of Liger's results the bench of kernels compared with float64; all of them were right."""
        rows = [
            row for op in self.book.value(BENCH, "ops") for row in op["rows"] if row["contender"] == "Liger"
        ]
        assert all(row["correctness"]["verdict"] == "equal" for row in rows)
        right = "row['contender'] == 'Liger' and row['correctness']['verdict'] == 'equal'"
        return self.book.figure("whole", BENCH, f"sum({right} for op in a for row in op['rows'])", ("ops",))

    def baselines(self) -> str:
        """Whole runs: transformers with Liger, and nanoGPT's setting as our own model had it, beside our recipes."""
        say = self.say
        head = [say(word) for word in ("run", "baseline", "ours", "ratio", "peak memory", "parity")]
        rows = []
        for folder, work, ours in (
            ("models-h200", "llama-3.2-1b", "llama-3.2-1b-fast"),
            ("models-fp8-head-h200", "llama-3.2-1b-fp8", "llama-3.2-1b-fp8, head too"),
            ("models-h200", "gpt2-124m", "gpt2-124m-fast"),
            ("models-gpt2-fp8-h200", "gpt2-124m", "gpt2-124m-fp8"),
        ):
            file = f"results/{folder}/models.json"
            mine = next(
                at
                for at, one in enumerate(self.book.value(file, "workloads", work, "ours"))
                if one["rung"]["name"] == ours
            )
            place = ("workloads", work, "ours", mine)
            speed = ("tokens_per_s", "median")
            ratio = self.book.figure("ratio", file, "a", (*place, "target", "reached"))
            ends = [self.book.figure("ratio", file, "a", (*place, "target", "ci95", end)) for end in (0, 1)]
            memory = [
                self.book.figure("size", file, "a", where)
                for where in (
                    (*place, "rung", "peak_memory_bytes"),
                    ("workloads", work, "rival", "peak_memory_bytes"),
                )
            ]
            title = self.book.value(file, "workloads", work, "rival").get("title") or "transformers + Liger"
            if self.book.value(file, "workloads", work, "rival_kind") == "recipe":
                title += f", {REBUILT}"  # a record of before `rush.bench.nanogpt`
            rows.append(
                (
                    f"`{ours.partition(',')[0]}`",
                    f"{say(title)}: {self.book.figure('speed', file, 'a', ('workloads', work, 'rival', *speed))}",
                    self.book.figure("speed", file, "a", (*place, "rung", *speed)),
                    f"{ratio} ({ends[0]} {say('to')} {ends[1]})",
                    f"{memory[0]} / {memory[1]}",
                    say(self.book.value(file, *place, "rung", "parity", "verdict")),
                )
            )
        return markdown(head, rows)

    def losses(self) -> str:
        """Losses of the first steps: the rung that parts from the others at its second step."""
        say = self.say
        head = [say("step"), *(self.book.mark(str(step), "name", "", "step", ()) for step in range(1, 7))]
        rows = []
        kinds = [(say("plain fp32"), "compile(scope=block)", "reference_losses")]
        kinds += [(f"`{rung.partition('(')[0]}`", rung, "losses") for rung in LOSSES]
        for name, rung, key in kinds:
            rows.append((name, *(self.loss(rung, step, key) for step in range(1, 7))))
        return markdown(head, rows)

    def loss(self, rung: str, step: int, key: str = "losses") -> str:
        return self.book.figure("loss", NEAREST, "a", ("rungs", rung, "parity", key, step - 1))

    def grad_norm(self, rung: str, step: int) -> str:
        key = "reference_grad_norms" if rung == "plain" else "grad_norms"
        rung = "compile(scope=block)" if rung == "plain" else rung
        return self.book.figure("loss", NEAREST, "a", ("rungs", rung, "parity", key, step - 1))

    def nearest_gain(self, rung: str) -> str:
        file = NEAREST
        found = self.book.figure("change", file, "a", ("rungs", rung, "gain", "ratio"))
        low, high = (
            self.book.figure("change", file, "a", ("rungs", rung, "gain", "ci95", end)) for end in (0, 1)
        )
        return f"{found} ({low} {self.say('to')} {high})"

    def nearest_memory(self, rung: str) -> str:
        return self.book.figure("size", NEAREST, "a", ("rungs", rung, "peak_memory_bytes"))

    def kernel_memory(self, op: str, contender: str) -> str:
        """What it takes beyond its inputs, forward and backward."""
        folder, size = next((folder, size) for name, folder, size in KERNELS if name == op)
        file = f"results/{folder}/kernels.json"
        place = self.kernel_place(file, op, size, contender)[:-2]
        return self.book.figure("size", file, "a", (*place, "peak_extra_bytes"))

    def kernel_ratio(self, op: str, over: str, under: str) -> str:
        """How many times one contender is as fast as another, forward and backward."""
        folder, size = next((folder, size) for name, folder, size in KERNELS if name == op)
        file = f"results/{folder}/kernels.json"
        places = [self.kernel_place(file, op, size, who) for who in (under, over)]
        return self.book.figure("ratio", file, "a / b", *places)


COMPARISONS = (
    "kernels", "kernel_ratio", "kernel_memory", "liger_checked", "baselines", "losses", "loss", "grad_norm", "nearest_gain", "nearest_memory",
)  # fmt: skip
