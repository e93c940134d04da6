"""Any content of a checkpoint ends in a restored run or in one message, also where someone has sealed it again."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rush.checkpoint import restore
from rush.errors import DataError
from rush.hub.folders import adapted_run, find_checkpoint, load_model, read_adapter
from rush.models import Decoder, build_model
from rush.models.adapters import AdapterSpec, adapt, init_adapters
from rush.recipe_io import load_recipe, write_toml
from rush.records.checkpoint_manifest import CheckpointManifest, describe_files
from rush.records.checkpoint_store import CheckpointStore
from rush.records.metrics import MetricsRow, RowWriter, SaveRow, read_rows, truncate_after
from rush.records.run_folder import RunFolder
from tests.checkpoint.pieces import cut_in_two
from tests.fuzz.harness import cases, fuzz
from tests.fuzz.mutations import mutate, mutate_bytes, mutate_header

SHAPE = [
    "hidden=8",
    "num_layers=1",
    "num_heads=2",
    "num_kv_heads=2",
    "head_dim=4",
    "intermediate=16",
    "vocab_size=16",
]
RECIPE = load_recipe("tiny", [f"model.shape.{change}" for change in SHAPE])
EXTRA = {"step": 1, "tokens": 64, "corpus": {"digest": "x"}, "loader": {"seed": 1, "epoch": 0, "position": 3}}


def run_of(*, adapted: bool = False) -> tuple[Decoder, torch.optim.Optimizer]:
    model = build_model(RECIPE.shape())
    model.init_weights(RECIPE.run.seed)
    if adapted:
        adapt(model, dict.fromkeys(("blocks.0.attention.qkv",), AdapterSpec(2, 4.0, False, False)))
        init_adapters(model, 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.1)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three runs with a checkpoint each: whole, in pieces of two ranks, and of adapters."""
    path = tmp_path_factory.mktemp("runs")
    for name in ("whole", "pieces", "adapters"):
        run = RunFolder(path / name)
        run.path.mkdir()
        run.recipe.write_text(write_toml(RECIPE))
        store = run.checkpoints
        made = restore.save(store, 1, *run_of(adapted=name == "adapters"), EXTRA, {"val_loss": 2.0})
        if name == "pieces":
            cut_in_two(made, store, 2)
            shutil.rmtree(made)
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield path
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def use(run: RunFolder, *, adapted: bool) -> None:
    """What the commands do with a run: find its checkpoint, resume, load for generation."""
    for which in ("best", "last"):
        found = find_checkpoint(run, which, lambda text: None)
    restore.load(found, *run_of(adapted=adapted))
    if adapted:
        adapted_run(run, found)
        read_adapter(run.path, RECIPE.shape())
    else:
        load_model(run.path)
        load_model(run.path, offload="disk")


def seal(folder: Path, step: int) -> None:
    (folder / "manifest.json").unlink(missing_ok=True)
    entries = describe_files(folder, {})
    manifest = CheckpointManifest(step, entries, {"metrics": {"val_loss": 2.0}})
    (folder / "manifest.json").write_text(manifest.render())


TENSORS = (mutate_header, mutate_header, mutate_bytes)
FILES = {
    "whole/manifest.json": (mutate,),
    "whole/state.json": (mutate,),
    "whole/model.safetensors": TENSORS,
    "whole/optimizer.safetensors": TENSORS,
    "whole/random.safetensors": TENSORS,
    "pieces/pieces.json": (mutate,),
    "adapters/state.json": (mutate,),
    "adapters/model.safetensors": TENSORS,
}


@pytest.mark.parametrize("name", FILES)
@cases(0.0075)
def test_any_content_of_a_sealed_checkpoint(name: str, count: int, runs: Path) -> None:
    kind, file_name = name.split("/")
    run = RunFolder(runs / kind)
    (step,) = run.checkpoints.steps()
    file = run.checkpoints.path(step) / file_name
    seeds = {path: path.read_bytes() for path in file.parent.iterdir()}

    def read(content: bytes) -> None:
        file.write_bytes(content)
        if file_name != "manifest.json":
            seal(file.parent, step)
        use(run, adapted=kind == "adapters")

    try:
        fuzz(f"checkpoint/{name.replace('/', '-')}", read, [seeds[file]], count, FILES[name])
    finally:
        for path, content in seeds.items():
            path.write_bytes(content)


@cases(0.02)
def test_any_rows_of_metrics(count: int, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"

    def read(content: bytes) -> None:
        file.write_bytes(content)
        for kind in (MetricsRow, SaveRow):
            for row in read_rows(file, kind):
                assert isinstance(row["step"], int)
        truncate_after(file, 2)
        writer = RowWriter(file, MetricsRow)
        try:
            writer.write({"step": 10**9})
        finally:
            writer.close()

    seed = b"".join(b'{"step": %d, "loss": 2.5, "lr": 1e-3, "tokens": 64}\n' % step for step in range(1, 5))
    fuzz("metrics", read, [seed, seed + b'{"step": 5, "loss": null, "not_finite": {"loss": "nan"}}\n'], count)


def test_a_damaged_checkpoint_is_refused_by_this_test_too(runs: Path) -> None:
    run = RunFolder(runs / "whole")
    file = CheckpointStore(run.checkpoints.folder).path(1) / "model.safetensors"
    before = file.read_bytes()
    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    with pytest.raises(DataError):
        use(run, adapted=False)
    file.write_bytes(before)
