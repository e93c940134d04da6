"""The guide's tables: a card for each technique, the two climbs, the published one beside ours, Liger beside compile."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.guide.book import Book
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
            _breakable(technique) if technique else self.say("batch"),
            self.say("speed over the rung before; verdict; memory"),
        )
        return markdown(head, [(f"**{name}**", text) for name, text in rows])

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
            rows.append(
                (
                    self.say(name) if " " in name else _breakable(name),
                    *cells,
                    " / ".join(dict.fromkeys(found)),
                )
            )
        return markdown(head, rows)

    def places(self) -> str:
        """GPT-2's techniques alone on the base, as a rung, and what is lost without them at the top."""
        ask, say = self.ask, self.say
        head = [
            say(word) for word in ("technique", "alone, on plain fp32", "as a rung", "taken out of the top")
        ]
        rows = []
        for rung in (
            "amp_bf16",
            "fused_adamw",
            "compile(scope=block)",
            "cudnn_attention",
            "batch.micro=64",
            "cuda_graph",
            "vocab_pad",
            "gc_control",
            "loader_workers",
        ):
            alone = ask.alone(rung) if ask.measured("alone", rung) else say("cannot run there")
            without = (
                ask.left_out(rung) if ask.measured("left_out", f"without {rung}") else say("cannot run there")
            )
            title = say("batch 64") if "micro" in rung else _breakable(rung.partition("(")[0])
            rows.append((title, alone, ask.gain("gpt2", rung), without))
        return markdown(head, rows)

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
        return markdown(head, rows)

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
        return markdown(head, rows)

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
        return markdown(head, rows)

    def _title(self, ladder: str) -> str:
        return TITLES[ladder]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _breakable(name: str) -> str:
    """A name that a phone's table may break after an underscore."""
    return name.replace("_", "_<wbr>")


TABLES = ("card", "found", "climbs", "places", "published", "lecture", "precisions")
