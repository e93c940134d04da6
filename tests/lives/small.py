"""Small recipes for lives: two families, three objectives and five layouts, with any set of techniques.

On a CPU a model of some thirty thousand parameters that every technique's widths allow; on a GPU one whose kernels have tiles to
fill. The text is real; questions and pairs of answers are about colours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rush.errors import RushError
from rush.hardware import Machine
from rush.lab.life.life import short
from rush.parallel import AXES
from rush.recipe import Knob, Recipe
from rush.recipe_io import parse
from rush.techniques import check, registry
from tests.real_text import write_to

FAMILIES = ("gpt2", "llama")
OBJECTIVES = ("lm", "sft", "dpo")
COLOURS = ("red", "green", "blue", "white", "black", "brown", "grey", "pink")
ALSO: Mapping[str, Mapping[str, Knob]] = {
    "adam8bit": {"backend": "rush"},
    "compile": {"scope": "block"},
    "bucket": {"shapes": 2},
    "pad": {"shapes": 2},
}
"""Techniques that are wanted with these knobs, too: with a wholly other way to do the same."""
INSTEAD = ("bucket", "pad")
"""Of these, only where the default is not allowed: a compiler wants few shapes."""


@dataclass(frozen=True, order=True)
class Item:
    """A technique with knobs."""

    name: str
    knobs: tuple[tuple[str, Knob], ...] = ()

    def __str__(self) -> str:
        return self.name + (f"({', '.join(f'{k}={v}' for k, v in self.knobs)})" if self.knobs else "")

    def entry(self) -> str | dict[str, Knob]:
        return {"name": self.name, **dict(self.knobs)} if self.knobs else self.name


def items() -> list[Item]:
    """Every technique that a recipe names, by its defaults and as `ALSO` says; a layout's axes are put on by their size."""
    plain = [Item(name) for name in sorted(registry()) if name not in AXES]
    return sorted([*plain, *(Item(name, tuple(knobs.items())) for name, knobs in ALSO.items())])


def apart(one: Item, other: Item) -> bool:
    """Whether no third technique helps: they conflict, or are one technique twice."""
    return one.name == other.name or other.name in _conflicts()[one.name]


@cache
def _conflicts() -> dict[str, set[str]]:
    """By technique, those it cannot stand beside, whichever of the two says so."""
    known = registry()
    return {
        name: {*one.conflicts, *(n for n in known if name in known[n].conflicts)}
        for name, one in known.items()
    }


@dataclass(frozen=True)
class Size:
    """How large the models and batches are."""

    hidden: int
    head_dim: int
    intermediate: int
    vocab: int
    sequence: Mapping[str, int]

    def shape(self, family: str) -> dict[str, int]:
        heads = self.hidden // self.head_dim
        return {
            "num_layers": 2,
            "hidden": self.hidden,
            "num_heads": heads,
            "head_dim": self.head_dim,
            "num_kv_heads": heads if family == "gpt2" else heads // 2,
            "intermediate": self.intermediate,
            "vocab_size": self.vocab,
        }


# A vocabulary that fp8 can multiply with (16) and vocab_pad still has to pad (64); as few tokens as fp8 allows (16).
SMALL = Size(32, 16, 64, 336, {"lm": 16, "sft": 32, "dpo": 16})
LONGER = replace(SMALL, sequence={"lm": 32})
WIDER = replace(SMALL, hidden=64)
LARGER = Size(256, 64, 512, 528, {"lm": 128, "sft": 128, "dpo": 128})


SHORTER = {
    "schedule.steps": 3, "run.save_every": 1, "run.validate_every": 2, "run.sample_every": 2,
    "run.validate_sequences": 2, "run.sample_tokens": 2,
}  # fmt: skip
"""A save, a kill in the second step, a resume, a validation and a sample, and a step after them with the last of everything:
interpreted kernels take their time for every step, and a compiler for every validation in another process."""


@dataclass(frozen=True)
class Setting:
    """Everything of a recipe but its techniques."""

    family: str
    objective: str = "lm"
    axis: str | None = None
    """Of the layout: two ranks divide the work by it."""
    device: str = "cpu"
    interpreted: bool = False
    """On a CPU: whether Triton's kernels are interpreted, slowly. Else those in C++ run, and what has none is refused."""

    def __str__(self) -> str:
        parts = (self.family, self.objective, self.axis, "interpreted" if self.interpreted else None)
        return "-".join(part for part in parts if part)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Within it the check, and what is started, know whether kernels are interpreted."""
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = str(int(self.interpreted))
        try:
            yield
        finally:
            os.environ["TRITON_INTERPRET"] = before or "0"

    @property
    def size(self) -> Size:
        if self.device != "cpu":
            return LARGER
        # A rank's part must be long or wide enough, too.
        return {"cp": LONGER, "tp": WIDER}.get(self.axis or "", SMALL)

    def recipe(
        self, techniques: Iterable[Item] = (), data: Path = Path("data"), *, shallow: bool = False
    ) -> Recipe:
        """The recipe of a short life with these techniques; `shallow`: one layer where a layer takes long, interpreted, traced or
        on two ranks."""
        chosen = sorted(techniques)
        entries = [item.entry() for item in chosen]
        slow = self.interpreted or self.axis or any(item.name == "compile" for item in chosen)
        one_layer = shallow and slow and self.axis != "pp"  # whose stages have a layer each
        fewer = {"model.shape.num_layers": 1} if one_layer else {}
        return short(_plain(self, str(data)), techniques=entries, **SHORTER, **fewer)


@cache
def _plain(setting: Setting, data: str) -> Recipe:
    file = {"lm": "text/*.txt", "sft": "questions.jsonl", "dpo": "preferences.jsonl"}[setting.objective]
    more: dict[str, Any] = {} if setting.objective == "lm" else {"template": "raw", "too_long": "drop"}
    tree: dict[str, Any] = {
        "model": {"name": "tiny" if setting.family == "gpt2" else "llama-tiny", "shape": setting.size.shape(setting.family)},
        "data": {"source": "files", "files": [f"{data}/{file}"], "validation": 0.2, "vocab_size": 300, **more},
        "objective": {"kind": setting.objective},
        "batch": {"micro": 2, "sequence": setting.size.sequence[setting.objective]},
        "optimizer": {"lr": 1e-3},
        "schedule": {"steps": 1},
        "layout": {} if setting.axis is None else {setting.axis: 2},
        "run": {"device": setting.device, "deterministic": setting.device == "cpu"},
    }  # fmt: skip
    return parse(tree)


def write_data(folder: Path) -> Path:
    """The text, the questions and the preferences of all small recipes."""
    write_to(folder / "text")
    questions, preferences = [], []
    for index in range(96):
        colour, other = COLOURS[index % 8], COLOURS[(index * 3 + 1) % 8]
        wrong = other if other != colour else COLOURS[(index + 1) % 8]
        prompt = f"Colour {index}?"
        answer = " ".join([colour, other, wrong][: 1 + index % 3])
        questions.append({"prompt": prompt, "completion": answer})
        preferences.append({"prompt": prompt, "chosen": colour, "rejected": wrong})
    for name, rows in (("questions", questions), ("preferences", preferences)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@dataclass
class Checked:
    """What the project's own check says about sets of techniques in a setting, remembered."""

    setting: Setting
    machine: Machine

    def __post_init__(self) -> None:
        self._plain = self.setting.recipe()
        self._known: dict[frozenset[Item], bool] = {}

    def allowed(self, chosen: frozenset[Item]) -> bool:
        names = {item.name for item in chosen}
        if len(names) < len(chosen) or any(names & _conflicts()[name] for name in names):
            return False  # as the check would say, in a tenth of its time
        if chosen not in self._known:
            entries = [item.entry() for item in sorted(chosen)]
            try:
                with self.setting.surroundings():
                    check(self._plain.model_copy(update={"techniques": entries}), self.machine)
                self._known[chosen] = True
            except RushError:
                self._known[chosen] = False
        return self._known[chosen]
