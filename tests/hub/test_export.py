"""A checkpoint in pieces becomes a Hugging Face folder, one tensor at a time, and gives the same logits everywhere."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch

from rush.checkpoint import restore
from rush.errors import DataError
from rush.hardware import probe
from rush.hub import export
from rush.hub.export import export_model
from rush.hub.folders import load_model
from rush.models import build_model
from rush.recipe_io import load_recipe, write_toml
from rush.records.checkpoint_store import CheckpointStore
from rush.records.run_folder import RunFolder
from rush.training.build import build
from tests.checkpoint.pieces import Table, cut_in_two
from tests.training.small_runs import small_recipe


def run_in_pieces(folder: Path, family: str, **shape: int) -> RunFolder:
    """A run folder whose one checkpoint is in two pieces."""
    folder.mkdir(parents=True)
    path = folder / "small.toml"
    path.write_text(small_recipe(folder / "corpus", family))
    recipe = load_recipe(str(path), [f"model.shape.{key}={value}" for key, value in shape.items()])
    run, made = RunFolder(folder / "run"), build(recipe, probe("cpu"))
    run.path.mkdir()
    run.recipe.write_text(write_toml(recipe))
    whole = restore.save(CheckpointStore(folder / "whole"), 1, made.model, made.optimizer, {})
    cut_in_two(whole, run.checkpoints, 1)
    shutil.copytree(whole, folder / "whole run" / "checkpoints" / "step-000001")
    shutil.copy(run.recipe, folder / "whole run" / "recipe.toml")
    return run


@pytest.fixture
def no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokens:
        bos_id = chat_template = None
        eos_id = 0
        special_ids: dict[str, int] = {}  # noqa: RUF012

        def save(self, folder: Path) -> None: ...

    monkeypatch.setattr(export, "load_tokenizer", lambda path: Tokens())


@pytest.mark.usefixtures("no_tokenizer")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_pieces_and_the_whole_export_the_same_and_transformers_agrees(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    run = run_in_pieces(tmp_path / "made", family)
    export_model(run.path, tmp_path / "a", max_shard_bytes=30_000)
    export_model(tmp_path / "made" / "whole run", tmp_path / "b", max_shard_bytes=30_000)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    index = json.loads(files["model.safetensors.index.json"])
    assert len(set(index["weight_map"].values())) > 2
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = load_model(run.path)(tokens)
        for offload in ("cpu", "disk"):
            assert torch.equal(load_model(run.path, offload=offload)(tokens), expected)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")(tokens).logits
    assert torch.allclose(theirs, expected, atol=1e-5)


@pytest.mark.usefixtures("no_tokenizer")
def test_an_export_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch holds is not Python's to count, so the tensors that are alive at once are: by their bytes, when made."""
    run = run_in_pieces(tmp_path / "made", "llama", num_layers=12, hidden=128, intermediate=256, head_dim=32)
    sizes = [p.nbytes for p in build_model(load_recipe(str(run.recipe)).shape()).parameters()]
    alive, most = 0, 0
    plain = torch.empty

    def counted(*arguments: object, **options: object) -> torch.Tensor:
        nonlocal alive, most
        made = plain(*arguments, **options)  # type: ignore[call-overload]
        if made.device.type == "cpu":
            import weakref

            alive += made.nbytes
            most = max(most, alive)
            weakref.finalize(made, gone, made.nbytes)
        return made  # type: ignore[no-any-return]

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    monkeypatch.setattr(torch, "empty", counted)
    tracemalloc.start()
    export_model(run.path, tmp_path / "out")
    python_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(sizes) > 20 * max(sizes)
    assert max(sizes) <= most <= 2 * max(sizes), (most, max(sizes))
    assert python_bytes < 0.5 * sum(sizes)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > sum(sizes)


@pytest.mark.usefixtures("no_tokenizer")
def test_pieces_of_another_shape_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = run_in_pieces(tmp_path / "made", "llama")

    def smaller(body: Table) -> None:
        tensor = body["model"]["tensors"]["embedding.weight"]
        tensor["pieces"].pop()
        tensor["shape"][0] = tensor["pieces"][0]["shape"][0]

    shutil.rmtree(run.checkpoints.folder)
    cut_in_two(tmp_path / "made" / "whole" / "step-000001", run.checkpoints, 1, smaller)
    with pytest.raises(DataError, match=r"embedding\.weight should be \(320, 32\)"):
        export_model(run.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
