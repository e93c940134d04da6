"""Data of six shapes and models to start from, small enough to be trained on in seconds."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import torch

from rush.data import train_bpe
from rush.hub.config import config_from_shape
from rush.hub.weights import save_hf_folder
from rush.models import SIZES, Shape, build_model

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "lazy",
    "dogs",
    "while",
    "bigger",
    "ones",
    "sleep",
    "and",
    "dream",
    "of",
    "rings",
    "and",
    "code",
    "größer",
    "日本",
]
SMALL = dataclasses.replace(
    SIZES["llama-tiny"], hidden=64, num_layers=2, head_dim=16, intermediate=128, vocab_size=512, context=128
)
Rows = list[dict[str, Any]]


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def chat(count: int, seed: int = 0) -> Rows:
    draw = random.Random(seed)
    return [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"{number} {text(draw, 5)}"},
                {"role": "assistant", "content": text(draw, 8)},
            ]
        }
        for number in range(count)
    ]


def instructions(count: int) -> Rows:
    draw = random.Random(1)
    return [
        {"instruction": f"{n} {text(draw, 4)}", "input": "", "output": text(draw, 6)} for n in range(count)
    ]


def preferences(count: int) -> Rows:
    draw = random.Random(2)
    return [
        {"prompt": f"{n} {text(draw, 4)}", "chosen": text(draw, 6), "rejected": text(draw, 5)}
        for n in range(count)
    ]


def texts(count: int) -> Rows:
    draw = random.Random(3)
    return [{"text": f"{n} {text(draw, 60)}"} for n in range(count)]


SHAPES: dict[str, Rows] = {
    "chat": chat(300),
    "instructions": instructions(300),
    "preferences": preferences(200),
    "text": texts(200),
    "mixed": chat(200) + texts(100),
    "broken": [*chat(300), {"messages": []}, {"messages": [{"role": "user", "content": "And?"}]}],
}
OBJECTIVES = {
    "chat": "sft",
    "instructions": "sft",
    "preferences": "dpo",
    "text": "lm",
    "mixed": "sft",
    "broken": "sft",
}


def write_rows(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(folder: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for rows in (chat(200), texts(50)) for row in rows]
    train_bpe(lines, 320).save(folder)


def config_only(folder: Path, size: str) -> Path:
    """A Hugging Face folder of a published size without its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_from_shape(SIZES[size])))
    write_tokenizer(folder)
    return folder


def small_model(folder: Path, shape: Shape = SMALL) -> Path:
    """A Hugging Face folder with random weights."""
    torch.manual_seed(0)
    save_hf_folder(folder, build_model(shape), shape)
    write_tokenizer(folder)
    return folder
