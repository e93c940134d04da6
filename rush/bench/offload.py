"""`rush bench offload`: inference of a model that is larger than the device, against accelerate.

Each token needs every layer's weights on the device, so a token takes as long as reading the model over the slowest link: host
memory or disk. The benchmark times this on random weights, written once as a Hugging Face folder that both contenders read.
Contenders run in fresh processes, in turns; speed is the median over the tokens after the first, with its interval over
processes. Both decode greedily, so their tokens can be compared. A shape that does not fit host or disk is timed with fewer
layers; the time per token is linear in the number of layers, so the full shape's rate is extrapolated, and marked as such.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rush.errors import MachineError, RecipeError, nearest
from rush.files import write_json_atomic
from rush.hardware import probe
from rush.hub.weights import save_hf_folder
from rush.lab.statistics import median_interval
from rush.models import SIZES, Shape
from rush.models.counts import list_parameters
from rush.records.offload import CONTENDERS, FORMAT, OFFLOAD, WHERE, OffloadProcess, OffloadRecord, OffloadRow

LIMIT_S = 3600.0
Watch = Callable[[str, str, int, int], None]


def bench_offload(
    shapes: Sequence[str],
    folder: Path,
    *,
    where: Sequence[str] = WHERE,
    layers: Sequence[int] = (),
    prompt_tokens: int = 32,
    new_tokens: int = 8,
    processes: int = 2,
    dtype: str = "bfloat16",
    device: str = "auto",
    watch: Watch = lambda *_: None,
) -> OffloadRecord:
    """Time every shape in every place with every contender; write the record after each row."""
    for name in shapes:
        if name not in SIZES:
            raise RecipeError(f"there is no shape {name!r}; {nearest(name, SIZES)}")
    if dtype not in ("bfloat16", "float16", "float32"):
        raise RecipeError(f"--dtype is {dtype!r}; allowed: bfloat16, float16 or float32.")
    machine = probe(device)
    kind = "cuda" if torch.cuda.is_available() and device != "cpu" else "cpu"
    record: OffloadRecord = {
        "format": FORMAT,
        "machine": machine.to_dict(),
        "dtype": dtype,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "rows": [],
    }
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [(name, count) for name in shapes for count in _layer_counts(SIZES[name], layers)]
    total = len(wanted) * len(where) * len(CONTENDERS)
    for name, count in wanted:
        watch(name, "writing random weights", len(record["rows"]), total)
        shape = dataclasses.replace(SIZES[name], num_layers=count)
        model = write_random(shape, folder / "models" / f"{name}-{count}-{dtype}", dtype)
        chance = random.Random(0)
        prompt = [chance.randrange(shape.vocab_size) for _ in range(prompt_tokens)]
        for place in where:
            case = {"folder": str(model), "where": place, "device": kind, "dtype": dtype, "prompt": prompt, "new_tokens": new_tokens}  # fmt: skip
            row: dict[str, OffloadRow] = {
                contender: {
                    "shape": name, "layers": count, "of_layers": SIZES[name].num_layers,
                    "weight_bytes": weight_bytes(shape, dtype), "where": place, "contender": contender,
                    "status": "ok", "reason": "", "processes": [],
                }
                for contender in CONTENDERS
            }  # fmt: skip
            for turn in range(processes):
                for contender in CONTENDERS:
                    watch(
                        name,
                        f"{contender}, layers on {place}, process {turn + 1}",
                        len(record["rows"]),
                        total,
                    )
                    _add(row[contender], {**case, "contender": contender})
            _judge(list(row.values()))
            record["rows"] += row.values()
            OFFLOAD.write(folder, record)
    return record


def _layer_counts(shape: Shape, layers: Sequence[int]) -> list[int]:
    return sorted({min(count, shape.num_layers) for count in layers}) or [shape.num_layers]


def _add(row: OffloadRow, case: Mapping[str, Any]) -> None:
    """One more process of a contender, or why there is none."""
    if row["status"] != "ok":
        return
    missing = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is None]
    if row["contender"] == "accelerate" and missing:
        row["status"], row["reason"] = "absent", f"{' and '.join(missing)} not installed"
        return
    words = [sys.executable, "-m", "rush.bench.offload_process", json.dumps(case)]
    try:
        done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        row["status"], row["reason"] = "failed", f"not done after {LIMIT_S:.0f} s"
        return
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        row["status"], row["reason"] = "failed", last[0][:300]
        return
    found: OffloadProcess = json.loads(done.stdout.splitlines()[-1])
    row["processes"].append(found)


def _judge(rows: list[OffloadRow]) -> None:
    done = [row for row in rows if row["status"] == "ok" and row["processes"]]
    ids = [process["ids"] for row in done for process in row["processes"]]
    for row in done:
        found = median_interval([process["token_s"] for process in row["processes"]])
        row["tokens_per_s"] = {"median": 1 / found.median, "low": 1 / found.high, "high": 1 / found.low}
        row["same_ids"] = all(each == ids[0] for each in ids) if len(done) > 1 else None


def weight_bytes(shape: Shape, dtype: str) -> int:
    size = torch.empty((), dtype=getattr(torch, dtype)).element_size()
    return sum(spec.count for spec in list_parameters(shape)) * size


def write_random(shape: Shape, target: Path, dtype: str) -> Path:
    """A Hugging Face folder with random weights of the shape; an existing complete folder is reused."""
    mark = target / "whole.json"
    if mark.is_file():
        return target
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    tensors = {}
    try:
        for spec in list_parameters(shape):
            value = torch.empty(spec.dims, dtype=kind)
            plain = len(spec.dims) < 2
            tensors[spec.name] = value.fill_(1.0) if plain else value.normal_(0, 0.02, generator=generator)
        target.mkdir(parents=True, exist_ok=True)
        save_hf_folder(target, tensors, shape)
    except (OSError, RuntimeError) as error:
        raise MachineError(
            f"random weights of {weight_bytes(shape, dtype) / 2**30:.1f} GiB cannot be written to {target} ({error!s:.200}); "
            "take fewer --layers, or an --out with more room."
        ) from None
    write_json_atomic(mark, {"layers": shape.num_layers})
    return target
