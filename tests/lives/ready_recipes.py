"""The ready recipes with their published data, made to run where no hub can be reached: the same techniques, other text and other
sizes.

What a life changes is said by `Lived`, and stands in the name of its test: which techniques this machine cannot run,
how many layers are left. The data of a recipe from the hub are replaced by local files in the same schema,
its tokenizer by a small one with the same special tokens, its published weights by random ones.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import torch

from rush.data import Tokenizer
from rush.data.conversations.docstrings import docstring_questions
from rush.data.sources import open_source
from rush.data.tokenizer import train_bpe
from rush.hardware import Machine
from rush.hub.weights import save_hf_folder
from rush.models.initial import initial_values
from rush.recipe import Recipe
from rush.recipe_io import changed, load_recipe, read_tree
from rush.techniques import registry
from rush.techniques.api.contract import used
from tests import real_text

HUB_TEXT, HUB_CHATS = ("fineweb-edu", "redpajama"), ("ultrachat", "ultrafeedback")
LLAMA_3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MERGES = 240
SMALL = {"num_layers": 2, "hidden": 32, "num_heads": 2, "head_dim": 16, "intermediate": 64, "vocab_size": 512}
"""A shape of either family that every technique takes: widths in multiples of 16 (fp8), weights in blocks of 64 (NF4)."""
INTERPRETED = ("fp8", "fused_loss", "fused_update")
"""Techniques whose kernels Triton interprets on a CPU: they take their time for every tensor and every token."""
FEW = {"schedule.steps": 4, "run.save_every": 2, "run.validate_every": 2, "run.sample_every": 2}
"""The shortest schedule that can be killed between two saves."""


@dataclass(frozen=True)
class Lived:
    """A ready recipe as it is lived on a machine, and what of it is left out there."""

    name: str
    recipe: Recipe
    left_out: tuple[str, ...]
    reduced: tuple[str, ...] = ()
    """What is smaller than in the recipe, in words."""

    @property
    def id(self) -> str:
        said = [f"without {', '.join(self.left_out)}"] if self.left_out else []
        return "; ".join([self.name, *said, *self.reduced])


def as_published(name: str) -> Recipe:
    """The recipe with its published data and tokenizer, where it has them."""
    published = "published" in read_tree(name)
    return load_recipe(name, ["data=published"] if published else [])


def as_far_as_it_runs(name: str, recipe: Recipe, machine: Machine) -> Lived:
    """The recipe without techniques whose requirements this machine does not meet, by the project's own check."""
    left_out: list[str] = []
    while unmet := [
        use
        for use, _ in recipe.technique_uses()
        if not all(need.met(machine, recipe) for need in registry()[use].requires)
    ]:
        left_out.append(unmet[0])
        kept = [entry for entry in recipe.techniques if _name(entry) != unmet[0]]
        recipe = changed(recipe, {"techniques": kept})
    return Lived(name, recipe, tuple(left_out))


def _name(entry: str | Mapping[str, Any]) -> Any:
    return entry if isinstance(entry, str) else entry["name"]


def _turn(role: str, words: list[str]) -> dict[str, str]:
    return {"role": role, "content": " ".join(words)}


def small(recipe: Recipe) -> Recipe:
    """The recipe at a size that a CPU trains in moments; family, tied head and rotary positions stay as they are."""
    shape = {**SMALL, "num_kv_heads": 2 if recipe.shape().family == "gpt2" else 1}
    batch = {"micro": 2, "sequence": 16}
    if used(recipe, *INTERPRETED):
        shape["num_layers"] = batch["micro"] = 1
    if recipe.objective.kind != "lm":
        batch = {"micro": 1, "sequence": 48 if recipe.data.source in HUB_CHATS else 256}
    return changed(
        recipe,
        {
            "model.shape": shape,
            "batch": batch,
            # Large enough that a few steps move the weights: what a life compares must be able to differ.
            "optimizer.lr": 3e-3,
            "data.validation": 0.2,
        },
    )


def shallow(lived: Lived, layers: int, vocabulary: int, tokens: int) -> Lived:
    """In its true width with at most so many layers and such a vocabulary; where all logits of a micro batch exist at once, of
    at most so many tokens."""
    recipe, changes, said = lived.recipe, {}, []
    if (depth := recipe.shape().num_layers) > layers:
        changes["model.shape.num_layers"] = layers
        said.append(f"{layers} of {depth} layers")
    if (whole := recipe.shape().vocab_size) > vocabulary:
        changes["model.shape.vocab_size"] = vocabulary
        said.append(f"a vocabulary of {vocabulary} of {whole}")
    micro = recipe.micro
    if not used(recipe, "fused_loss", "chunked_loss"):
        micro = min(micro, max(1, tokens // recipe.batch.sequence))
    if micro != recipe.micro:
        changes |= {"batch": {"micro": micro, "sequence": recipe.batch.sequence}}
        said.append(f"micro batches of {micro} of {recipe.micro} sequences")
    return replace(lived, recipe=changed(recipe, changes), reduced=tuple(said))


@dataclass(frozen=True)
class LocalData:
    """Text, conversations, tokenizers and bases in a folder, each made when the first recipe asks for it."""

    folder: Path
    text_bytes: int | None = None
    """How much of the standard library stands for the hub's text; None: a dozen files."""
    words: int | None = 3
    """Of a turn, at most: interpreted kernels take their time for every token."""
    bases: dict[str, Path] = field(default_factory=dict)

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with local data in place of the hub's."""
        source = recipe.data.source
        if source in HUB_TEXT:
            tokenizer = self.gpt2 if recipe.data.tokenizer == "gpt2" else self.llama
            return changed(recipe, {"data.files": [str(self.text)], "data.tokenizer": str(tokenizer)})
        # The reference model of dpo goes through all documents before the first step.
        limits = {"lm": 40, "sft": 400, "dpo": 400 if self.words is None else 40}
        few: dict[str, Any] = {"data.limit": limits[recipe.objective.kind]}
        if source in HUB_CHATS:
            few |= {"data.files": [str(self.chats(source))], "model.init_from": str(self.base(recipe))}
            few |= {"data.tokenizer": "model"}
        return changed(recipe, few)

    @cached_property
    def text(self) -> Path:
        """The fields of both hub sources, so that either reads it."""
        columns = {"url": "", "score": 3.0, "meta": "{}", "red_pajama_subset": "stdlib"}
        rows = ({"text": text, "id": str(n), **columns} for n, text in enumerate(self._texts()))
        return self._write("text.jsonl", rows)

    def _texts(self) -> Iterator[str]:
        if self.text_bytes is None:
            yield from (path.read_text(encoding="utf-8") for path in real_text.files())
            return
        left = self.text_bytes
        for document in open_source("python-stdlib"):
            yield document.text
            left -= len(document.text)
            if left < 0:
                return

    def chats(self, source: str) -> Path:
        """Questions and answers; where answers are preferred, to the same words the other way round."""
        rows = []
        for path in self._sources():
            for name, values, _ in docstring_questions(str(path)):
                ask, reply = (turn["content"].split()[: self.words] for turn in values["messages"][:2])
                if reply == reply[::-1]:
                    continue
                good, bad = ([_turn("user", ask), _turn("assistant", said)] for said in (reply, reply[::-1]))
                kept = {"messages": good} if source == "ultrachat" else {"chosen": good, "rejected": bad}
                rows.append({"prompt": " ".join(ask), "prompt_id": name, **kept})
        return self._write(f"{source}.jsonl", iter(rows))

    def _sources(self) -> list[Path]:
        if self.text_bytes is None:
            return real_text.files()
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))

    @cached_property
    def gpt2(self) -> Path:
        return self._save("gpt2", self._trained)

    @cached_property
    def llama(self) -> Path:
        """With the special tokens that a Llama writes conversations with."""
        core = tokenizers.Tokenizer.from_str(self._trained.json_text)
        core.add_special_tokens(list(LLAMA_3))
        begin, end = LLAMA_3[:2]
        return self._save("llama", Tokenizer(core.to_str(), eos_token=end, bos_token=begin))

    def base(self, recipe: Recipe) -> Path:
        """Random weights in place of the published ones that fine-tuning begins with."""
        name = f"{recipe.model.name}-{recipe.shape().num_layers}"
        if name not in self.bases:
            shape, folder = recipe.shape(), self.folder / "bases" / name
            tokenizer = Tokenizer.load(self.llama)
            save_hf_folder(
                folder,
                dict(initial_values(shape, seed=0)),
                shape,
                dtype=torch.bfloat16,
                bos_id=tokenizer.bos_id,
                eos_id=tokenizer.eos_id,
            )
            tokenizer.save(folder)
            self.bases[name] = folder
        return self.bases[name]

    @cached_property
    def _trained(self) -> Tokenizer:
        texts = (path.read_text(encoding="utf-8") for path in real_text.files())
        return train_bpe(texts, 257 + MERGES)

    def _save(self, name: str, tokenizer: Tokenizer) -> Path:
        tokenizer.save(self.folder / name)
        return self.folder / name

    def _write(self, name: str, rows: Iterator[dict[str, Any]]) -> Path:
        path = self.folder / name
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
