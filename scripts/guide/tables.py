"""The guide's tables: a card for each technique, the two climbs, the published one beside ours, Liger beside compile."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.guide.book import Book, source
from scripts.guide.plans import RECORD
from scripts.guide.queries import Queries

TITLES = {"llama": "Llama 3.2 1B, H200", "gpt2": "GPT-2 124M, H200", "host": "Llama 3.2 1B, H200"}
CLIMB = (
    ("tf32", "tf32", "tf32"),
    ("amp_bf16", "amp_bf16", "amp_bf16"),
    ("flash_attention", "flash_attention", "flash_attention"),
    ("fused_adamw", "fused_adamw", "fused_adamw"),
    ("compile", "compile(scope=block)", "compile(scope=block)"),
    ("cuda_graph", "cuda_graph", "cuda_graph"),
    ("vocab_pad", None, "vocab_pad"),
    ("batch 8, batch 64", "batch.micro=8", "batch.micro=64"),
    ("cudnn_attention", "cudnn_attention", "cudnn_attention"),
    ("batch 32", "batch.micro=32", None),
    ("fp8", "fp8", None),
    ("pure_bf16", "pure_bf16", "pure_bf16"),
    ("chunked_loss", "chunked_loss(chunk_tokens=4096)", "chunked_loss(chunk_tokens=4096)"),
    ("fused_loss", "fused_loss", None),
    ("checkpoint_selective", "checkpoint_selective", "checkpoint_selective"),
    ("checkpoint_full", "checkpoint_full", "checkpoint_full"),
    ("offload_activations", "offload_activations", "offload_activations"),
)
"""What the two climbs tried: a name, Llama's rung, GPT-2's rung."""
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
NEAREST = "results/sft-3b-nearest-h200/ladder.json"


class Tables:
    """Tables in Markdown, of figures that `Queries` answers."""

    def __init__(self, book: Book, ask: Queries) -> None:
        self.book, self.ask, self.say = book, ask, book.say

    def card(self, technique: str, llama: str = "", gpt2: str = "", host: str = "") -> str:
        """Claimed, found, planned, of one technique."""
        rows = [(self.say("claimed"), self.ask.claimed(technique))] if technique else []
        rungs = {"llama": llama, "gpt2": gpt2, "host": host}
        rows += [(self._title(ladder), self.found(ladder, rung)) for ladder, rung in rungs.items() if rung]
        plans = [
            f"{self._title(ladder).split(',')[0]}: {self.plan(ladder, rung)}"
            for ladder, rung in rungs.items()
            if rung
        ]
        rows.append((self.say("planner, A100"), "; ".join(plans)))
        head = (
            f"`{technique}`" if technique else self.say("batch"),
            self.say("speed over the rung before; verdict; memory"),
        )
        return self._table(head, [(f"**{name}**", text) for name, text in rows])

    def found(self, ladder: str, rung: str) -> str:
        """Gain with its interval, verdict, memory."""
        ask, say = self.ask, self.say
        return (
            f"{ask.gain(ladder, rung)}; *{ask.verdict(ladder, rung)}*; {say('peak memory')} {ask.memory(ladder, rung)} "
            f"({ask.smaller(ladder, rung)})"
        )

    def plan(self, ladder: str, rung: str) -> str:
        planned = self.book.value(RECORD, "machines", "a100", "rungs", ladder, rung)
        memory = self.ask.planned("a100", ladder, rung, "memory")
        if planned["problems"]:
            return f"{self.say('cannot run there')}, {memory}"
        gain = f"{self.ask.planned('a100', ladder, rung)}, {memory}"
        return gain if planned["fits"] else f"{memory}: {self.say('does not fit in 80 GB')}"

    def climbs(self) -> str:
        """Both climbs, what was built upon and what was only tried."""
        head = [self.say(word) for word in ("technique", "Llama 3.2 1B", "GPT-2 124M", "verdicts")]
        rows = []
        for name, llama, gpt2 in CLIMB:
            cells = [
                f"{self.ask.gain(ladder, rung, interval=False)}" if rung else "–"
                for ladder, rung in (("llama", llama), ("gpt2", gpt2))
            ]
            found = [
                self.ask.verdict(ladder, rung) for ladder, rung in (("llama", llama), ("gpt2", gpt2)) if rung
            ]
            rows.append((self.say(name) if " " in name else name, *cells, " / ".join(dict.fromkeys(found))))
        return self._table(head, rows)

    def published(self) -> str:
        """The published climb beside the plan for its machine and our measurement."""
        ask, say = self.ask, self.say
        head = [
            say(word)
            for word in ("step", "published, A100", "planner, A100", "measured, H200", "planner, H200")
        ]
        rows: list[Sequence[str]] = [
            (
                say("mixed precision"),
                ask.claim("amp_bf16"),
                ask.planned("a100", "llama", "amp_bf16", "total"),
                ask.total("llama", "amp_bf16", interval=True),
                ask.planned("h200", "llama", "amp_bf16", "total"),
            )
        ]
        for name, technique, rung in (
            ("FlashAttention", "flash_attention", "flash_attention"),
            ("fused Adam", "fused_adamw", "fused_adamw"),
            ("torch.compile", "compile", "compile(scope=block)"),
        ):
            rows.append((say(name), ask.claim(technique), *self._three(rung)))
        rows.append((say("batch 8"), ask.listed("climb", "batch", "change"), *self._three("batch.micro=8")))
        rows.append(
            (
                say("all of it"),
                ask.listed("climb", "total", "ratio"),
                ask.planned("a100", "llama", "batch.micro=8", "total"),
                ask.total("llama", "batch.micro=8", interval=True),
                ask.planned("h200", "llama", "batch.micro=8", "total"),
            )
        )
        rows.append(
            (say("full checkpointing"), ask.claim("checkpoint_full"), *self._three("checkpoint_full"))
        )
        return self._table(head, rows)

    def _three(self, rung: str) -> tuple[str, str, str]:
        ask = self.ask
        return ask.planned("a100", "llama", rung), ask.gain("llama", rung), ask.planned("h200", "llama", rung)

    def lecture(self) -> str:
        """GPT-2's published climb, in the lecture's order, beside our rungs."""
        ask, say = self.ask, self.say
        head = [say(word) for word in ("step", "lecture, A100", "measured, H200")]
        rows = [
            ("TF32", ask.listed_ratio("lecture", "fp32", "tf32"), ask.gain("gpt2", "tf32")),
            ("bf16", ask.listed_ratio("lecture", "tf32", "bf16", "change"), ask.gain("gpt2", "amp_bf16")),
            (
                "torch.compile",
                ask.listed_ratio("lecture", "bf16", "compile"),
                ask.gain("gpt2", "compile(scope=block)"),
            ),
            (
                "FlashAttention",
                ask.listed_ratio("lecture", "compile", "flash", "change"),
                ask.gain("gpt2", "flash_attention"),
            ),
            (
                say("vocabulary 50,304"),
                ask.listed_ratio("lecture", "flash", "vocabulary", "change"),
                ask.gain("gpt2", "vocab_pad"),
            ),
            (
                say("fused AdamW"),
                ask.listed_ratio("lecture", "vocabulary", "adam", "change"),
                ask.gain("gpt2", "fused_adamw"),
            ),
            (
                say("all of it"),
                ask.listed_ratio("lecture", "fp32", "adam"),
                ask.total("gpt2", "vocab_pad", True),
            ),
        ]
        return self._table(head, rows)

    def precisions(self) -> str:
        """Peaks of the datasheets and rates that the probe measured, by dtype."""
        ask, say = self.ask, self.say
        head = [
            say(word)
            for word in ("dtype", "A100, datasheet", "H200, datasheet", "H200, measured", "over fp32")
        ]
        rows = []
        for name, dtype in (("fp32", "float32"), ("TF32", "tf32"), ("bf16", "bfloat16"), ("fp8", "float8")):
            on_a100 = ask.peak("a100-80-sxm", dtype) if dtype != "float8" else "–"
            rows.append(
                (name, on_a100, ask.peak("h200-sxm", dtype), ask.matmul_rate(dtype), ask.matmul_ratio(dtype))
            )
        return self._table(head, rows)

    def kernels(self) -> str:
        """Milliseconds forward and backward: plain, compiled, Liger, ours."""
        say = self.say
        head = [say("kernel"), say("plain torch"), say("compiled torch"), "Liger", "rush"]
        rows = []
        for op, folder, size in KERNELS:
            cells = [self.kernel_ms(folder, op, size, who) for who in ("plain torch", *CONTENDERS)]
            rows.append((f"`{op}`, {self.book.mark(self._size(size), 'name', '', 'size', ())}", *cells))
        return self._table(head, rows)

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

    def baselines(self) -> str:
        """Whole runs: transformers with Liger, and nanoGPT's setting, beside our recipes."""
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
        return self._table(head, rows)

    def losses(self) -> str:
        """Losses of the first steps: the rung that parts from the others at its second step."""
        say = self.say
        head = [say("step"), *(self.book.mark(str(step), "name", "", "step", ()) for step in range(1, 7))]
        rows = []
        kinds = [(say("plain fp32"), "compile(scope=block)", "reference_losses")]
        kinds += [(f"`{rung.partition('(')[0]}`", rung, "losses") for rung in LOSSES]
        for name, rung, key in kinds:
            rows.append((name, *(self.loss(rung, step, key) for step in range(1, 7))))
        return self._table(head, rows)

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

    def kernel_ratio(self, op: str, over: str, under: str) -> str:
        """How many times one contender is as fast as another, forward and backward."""
        folder, size = next((folder, size) for name, folder, size in KERNELS if name == op)
        file = f"results/{folder}/kernels.json"
        places = [self.kernel_place(file, op, size, who) for who in (under, over)]
        return self.book.figure("ratio", file, "a / b", *places)

    def _title(self, ladder: str) -> str:
        return TITLES[ladder]

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


TABLES = (
    "card", "found", "climbs", "published", "lecture", "precisions", "kernels", "baselines", "losses", "loss", "grad_norm",
    "nearest_gain", "nearest_memory", "kernel_ratio",
)  # fmt: skip
