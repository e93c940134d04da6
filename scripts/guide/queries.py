"""What the guide's text asks: gains, speeds, memory, parts of a step, claims, plans. Each answer is a traced figure."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from rush.report.claims import compare_claim
from rush.report.ladder import LadderView, read_ladder
from scripts.guide.book import ROOT, WORDS, Book, Key, source
from scripts.guide.plans import LADDERS, RECORD

CLAIMS = "scripts/guide/claims.toml"
BUSY = ("attention", "matmul", "norm_elementwise", "loss", "optimizer", "other")
"""Kinds of a profiled step in which the GPU works."""
METRICS = {"tokens_per_s": "tokens per second"}
RULES = {"speed": ("tokens_per_s", "median"), "memory": ("peak_memory_bytes",), "step": ("step_ms", "median")}


def _sum(count: int) -> str:
    """A formula that adds so many values."""
    return " + ".join(chr(ord("a") + index) for index in range(count))


@cache
def view(ladder: str) -> LadderView:
    return read_ladder(ROOT / LADDERS[ladder])


class Queries:
    """The questions, bound to a book."""

    def __init__(self, book: Book) -> None:
        self.book = book

    def names(self) -> dict[str, Callable[..., str]]:
        """What a template may call."""
        return {
            name: getattr(self, name)
            for name in dir(self)
            if not name.startswith("_") and name not in ("book", "names", "measured")
        }

    # A ladder's rung

    def gain(self, ladder: str, rung: str, interval: bool = True) -> str:
        """Over the rung before, with its interval: `+60 % (+55 % to +69 %)`."""
        return self._ratio(LADDERS[ladder], ("rungs", rung, "gain"), interval)

    def gain_end(self, ladder: str, rung: str, end: int) -> str:
        """One end of a gain's interval: 0 the lower, 1 the upper."""
        return self.book.figure("change", LADDERS[ladder], "a", ("rungs", rung, "gain", "ci95", end))

    def total(self, ladder: str, rung: str, interval: bool = False) -> str:
        """Over the first rung: `×13.3`."""
        return self._ratio(LADDERS[ladder], ("rungs", rung, "total_gain"), interval, "ratio")

    def between(self, ladder: str, rung: str, base: str, kind: str = "ratio") -> str:
        """Speed over another rung's."""
        places = (("rungs", rung, *RULES["speed"]), ("rungs", base, *RULES["speed"]))
        return self.book.figure(kind, LADDERS[ladder], "a / b", *places)

    def speed(self, ladder: str, rung: str) -> str:
        return self.book.figure("speed", LADDERS[ladder], "a", ("rungs", rung, *RULES["speed"]))

    def memory(self, ladder: str, rung: str) -> str:
        return self.book.figure("size", LADDERS[ladder], "a", ("rungs", rung, *RULES["memory"]))

    def step(self, ladder: str, rung: str) -> str:
        return self.book.figure("ms", LADDERS[ladder], "a", ("rungs", rung, *RULES["step"]))

    def compiling(self, ladder: str, rung: str) -> str:
        return self.book.figure("s", LADDERS[ladder], "a", ("rungs", rung, "compile_s"))

    def mfu(self, ladder: str, rung: str) -> str:
        return self.book.figure("share", LADDERS[ladder], "a", ("rungs", rung, "mfu"))

    def smaller(self, ladder: str, rung: str) -> str:
        """The change of peak memory over the rung before."""
        over = self._over(ladder, rung)
        places = (("rungs", rung, *RULES["memory"]), ("rungs", over, *RULES["memory"]))
        return self.book.figure("change", LADDERS[ladder], "a / b", *places)

    def part(self, ladder: str, rung: str, kind: str) -> str:
        """Milliseconds of a profiled step that went into one kind of work."""
        return self.book.figure("ms", LADDERS[ladder], "a", ("rungs", rung, "breakdown_ms", kind))

    def rest(self, ladder: str, rung: str) -> str:
        """Milliseconds of a profiled step in which the GPU did anything but matmuls."""
        places = [("rungs", rung, "breakdown_ms", kind) for kind in BUSY if kind != "matmul"]
        return self.book.figure("ms", LADDERS[ladder], _sum(len(places)), *places)

    def part_ratio(self, ladder: str, rung: str, base: str, kind: str) -> str:
        """How many times shorter this part is than at another rung."""
        places = (("rungs", base, "breakdown_ms", kind), ("rungs", rung, "breakdown_ms", kind))
        return self.book.figure("ratio", LADDERS[ladder], "a / b", *places)

    def part_share(self, ladder: str, rung: str, kind: str) -> str:
        """The share of one kind of work in a profiled step."""
        kinds = [kind, *(one for one in BUSY if one != kind)]
        places = [("rungs", rung, "breakdown_ms", one) for one in kinds]
        return self.book.figure("share", LADDERS[ladder], f"a / ({_sum(len(kinds))})", *places)

    def unoccupied(self, ladder: str, rung: str) -> str:
        """Milliseconds of a timed step in which no profiled kernel ran."""
        places = [("rungs", rung, *RULES["step"]), *(("rungs", rung, "breakdown_ms", kind) for kind in BUSY)]
        rest = " - ".join(chr(ord("b") + index) for index in range(len(BUSY)))
        return self.book.figure("ms", LADDERS[ladder], f"a - {rest}", *places)

    def matmul_rate(self, dtype: str, ladder: str = "llama") -> str:
        """What the probe measured of large matmuls."""
        return self.book.figure("rate", LADDERS[ladder], "a", ("ceilings", "matmul", dtype))

    def matmul_ratio(self, dtype: str, base: str = "float32", ladder: str = "llama") -> str:
        places = (("ceilings", "matmul", dtype), ("ceilings", "matmul", base))
        return self.book.figure("ratio", LADDERS[ladder], "a / b", *places)

    def balance(self, ladder: str = "llama") -> str:
        """bf16 operations of large matmuls for a byte of a copy."""
        places = (("ceilings", "matmul", "bfloat16"), ("ceilings", "copy_bytes_per_s"))
        return self.book.figure("number", LADDERS[ladder], "a / b", *places)

    def copy_rate(self, ladder: str = "llama") -> str:
        return self.book.figure("bytes/s", LADDERS[ladder], "a", ("ceilings", "copy_bytes_per_s"))

    def link_rate(self, kind: str, ladder: str = "llama") -> str:
        return self.book.figure("bytes/s", LADDERS[ladder], "a", ("ceilings", "transfers_bytes_per_s", kind))

    def measured(self, view: str, rung: str) -> bool:
        """Whether a rung of one of GPT-2's other views ran."""
        status = self.book.value(f"results/gpt2-124m-ladder-h200/{view}/ladder.json", "rungs", rung, "status")
        return bool(status == "ok")

    def alone(self, rung: str, interval: bool = True) -> str:
        """Alone on GPT-2's base."""
        return self._ratio(
            "results/gpt2-124m-ladder-h200/alone/ladder.json", ("rungs", rung, "gain"), interval
        )

    def left_out(self, rung: str, interval: bool = True) -> str:
        """What GPT-2's top loses without it."""
        file = "results/gpt2-124m-ladder-h200/left_out/ladder.json"
        return self._ratio(file, ("rungs", f"without {rung}", "gain"), interval)

    def drift(self, ladder: str) -> str:
        """How far the first rung was off when it was measured again at the end."""
        return self.book.figure("change", LADDERS[ladder], "a", ("drift", "ratio"))

    def drift_left_out(self) -> str:
        file = "results/gpt2-124m-ladder-h200/left_out/ladder.json"
        return self.book.figure("change", file, "a", ("drift", "ratio"))

    def batch(self, ladder: str, micro: int, what: str = "speed") -> str:
        """A point of the curve over batch sizes."""
        index = next(
            i for i, row in enumerate(source(LADDERS[ladder])["batch_curve"]) if row["micro"] == micro
        )
        kind = "size" if what == "memory" else "speed"
        return self.book.figure(kind, LADDERS[ladder], "a", ("batch_curve", index, *RULES[what]))

    def verdict(self, ladder: str, rung: str) -> str:
        found = view(ladder).rung(rung)
        return self.book.say(found.verdict if found else "not measured")

    def outcome(self, rung: str) -> str:
        """The claim against the finding on Llama's ladder, by the rule of every report."""
        found = view("llama").rung(rung)
        checked = compare_claim(view("llama"), found) if found else None
        return self.book.say(checked.outcome if checked else "not measured")

    # Others

    def claim(self, technique: str, kind: str = "change") -> str:
        """What the technique's authors claim."""
        return self.book.figure(kind, f"technique {technique}", "1 + a", ("gain",))

    def claimed(self, technique: str) -> str:
        """The claim as a sentence: figure, what of, where, by whom."""
        file = f"technique {technique}"
        claim = source(file)
        metric = self.book.say(METRICS.get(claim["metric"], claim["metric"]))
        return f"{self.claim(technique)} {metric}: {self._quote(file, 'regime')}. *{self._quote(file, 'source')}*"

    def listed(self, table: str, key: str, kind: str = "number", formula: str = "a") -> str:
        """A claim or a fact of scripts/guide/claims.toml."""
        return self.book.figure(kind, CLAIMS, formula, (table, key))

    def listed_ratio(self, table: str, over: str, under: str, kind: str = "ratio") -> str:
        return self.book.figure(kind, CLAIMS, "a / b", (table, over), (table, under))

    def by(self, table: str) -> str:
        """Who says it."""
        return self.book.quote(
            source(CLAIMS)[table]["ru" if self.book.language == "ru" else "source"], CLAIMS, table
        )

    def peak(self, machine: str, dtype: str) -> str:
        """A datasheet's dense peak."""
        return self.book.figure("rate", f"datasheet {machine}", "a", ("peak_flops", dtype))

    def peak_ratio(self, machine: str, dtype: str, base: str = "float32") -> str:
        return self.book.figure(
            "ratio", f"datasheet {machine}", "a / b", ("peak_flops", dtype), ("peak_flops", base)
        )

    def bandwidth(self, machine: str) -> str:
        return self.book.figure("bytes/s", f"datasheet {machine}", "a", ("bytes_per_s",))

    def planned(self, machine: str, ladder: str, rung: str, what: str = "gain") -> str:
        """What the planner says: gain over the rung before, total, speed, memory, time_error."""
        place: tuple[Key, ...] = ("machines", machine, "rungs", ladder)
        mine = (*place, rung)
        if what == "memory":
            return self.book.figure("size", RECORD, "a", (*mine, "memory_bytes"))
        if what == "speed":
            return self.book.figure("speed", RECORD, "a", (*mine, "tokens_per_s"))
        if what == "time_error":
            return self.book.figure("percent", RECORD, "a", (*mine, "time_error"))
        over = "base" if what == "total" else self._over(ladder, rung)
        kind = "ratio" if what == "total" else "change"
        return self.book.figure(
            kind, RECORD, "a / b", (*mine, "tokens_per_s"), (*place, over, "tokens_per_s")
        )

    def planned_part(self, machine: str, ladder: str, rung: str, part: str) -> str:
        place = ("machines", machine, "rungs", ladder, rung, "time_ms", part)
        return self.book.figure("ms", RECORD, "a", place)

    def planned_share(self, machine: str, ladder: str, rung: str, part: str) -> str:
        """The share of one part in the planned step."""
        parts: dict[str, Any] = self.book.value(RECORD, "machines", machine, "rungs", ladder, rung, "time_ms")
        names = [part, *(name for name in parts if name != part)]
        places = [("machines", machine, "rungs", ladder, rung, "time_ms", name) for name in names]
        return self.book.figure("share", RECORD, f"a / ({_sum(len(names))})", *places)

    # Inside

    def _over(self, ladder: str, rung: str) -> str:
        return str(self.book.value(LADDERS[ladder], "rungs", rung, "gain", "over"))

    def _quote(self, file: str, key: str) -> str:
        text: str = source(file)[key]
        return self.book.quote(text if self.book.language == "en" else WORDS[text], file, key)

    def _ratio(self, file: str, place: tuple[Key, ...], interval: bool, kind: str | None = None) -> str:
        """A recorded ratio with its interval; all three figures written alike."""
        ratio = self.book.value(file, *place, "ratio")
        kind = kind or ("ratio" if max(ratio, self.book.value(file, *place, "ci95", 1)) >= 2 else "change")
        found = self.book.figure(kind, file, "a", (*place, "ratio"))
        if not interval:
            return found
        low, high = (self.book.figure(kind, file, "a", (*place, "ci95", end)) for end in (0, 1))
        return f"{found} ({low} {self.book.say('to')} {high})"
