"""A run with a frozen base: its checkpoints hold what is trained, it resumes to the same bits, another base is refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rush.errors import DataError
from rush.hub.export import export_adapter, export_model, merge_adapter
from rush.hub.folders import load_model, read_weights
from rush.hub.tokenizers import load_tokenizer
from rush.models import Decoder, build_model
from rush.models.adapters import Adapter, adapters, dense_weight, is_adapted, set_active
from rush.recipe import Recipe
from rush.recipe_io import changed, load_recipe
from rush.training.loop import Summary, train_recipe
from rush.training.view import View
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import checkpoint_files, rows, small_recipe, write_corpus

TOKENS = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture
def plain(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe without techniques, on a corpus that all tests here share."""
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(workplace / "cache")))
    corpus = (
        write_corpus(workplace / "corpus") if not (workplace / "corpus").is_dir() else workplace / "corpus"
    )
    (workplace / "recipe.toml").write_text(
        small_recipe(
            corpus, family="llama", schedule={"steps": 4, "warmup": 1}, run={"save_every": 2, "keep": 10, "sample_every": 2}
        )
    )  # fmt: skip
    return load_recipe(str(workplace / "recipe.toml"))


def with_techniques(recipe: Recipe, *techniques: str | dict[str, Any], **changes: Any) -> Recipe:
    return changed(recipe, {"techniques": list(techniques), **changes})


def part_of(recipe: Recipe, out: Path, steps: int) -> Summary:
    """The first steps of a run, as an interruption leaves it."""

    class Stopper(View):
        def row(self, row: Mapping[str, Any]) -> None:
            if row["step"] == steps:
                os.kill(os.getpid(), signal.SIGTERM)

    return train_recipe(recipe, out, view=Stopper())


LORA = {"name": "lora", "rank": 4}
METHODS = {
    "lora": (LORA,),
    "dora": (LORA | {"variant": "dora"}, "checkpoint_full"),
    "qlora": ({"name": "qlora", "rank": 4},),
    "qlora by torchao": ({"name": "qlora", "rank": 4, "backend": "torchao"}, "checkpoint_full"),
    "int8": ({"name": "int8_base", "rank": 4, "roles": "mlp"},),
}


def slow(method: str) -> Any:
    """The others go the same way: `make test-all` walks it with them too."""
    return pytest.param(method, marks=pytest.mark.slow)


LIBRARY = {"qlora": "bitsandbytes", "qlora by torchao": "torchao", "int8": "bitsandbytes"}


@pytest.mark.parametrize("method", [m if m in ("lora", "qlora") else slow(m) for m in METHODS])
def test_a_run_with_a_frozen_base_resumes_to_the_same_bits(
    method: str, plain: Recipe, tmp_path: Path
) -> None:
    if method in LIBRARY:
        pytest.importorskip(LIBRARY[method])
    recipe = with_techniques(plain, *METHODS[method])
    train_recipe(recipe, tmp_path / "whole")
    assert part_of(recipe, tmp_path / "parts", 3).interrupted
    train_recipe(None, tmp_path / "parts", resume=True)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    assert rows(tmp_path / "whole", "samples.jsonl") == rows(tmp_path / "parts", "samples.jsonl")
    whole, parts = checkpoint_files(tmp_path / "whole"), checkpoint_files(tmp_path / "parts")
    assert {name: parts[name] for name in whole} == whole


def test_a_checkpoint_holds_adapters_and_their_moments_and_nothing_of_the_base(
    plain: Recipe, tmp_path: Path
) -> None:
    train_recipe(with_techniques(plain, LORA | {"roles": "qv"}), tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-000004"
    names = set(load_file(newest / "model.safetensors"))
    assert names == {
        f"blocks.{layer}.attention.{role}.adapter.{part}"
        for layer in (0, 1)
        for role in "qv"
        for part in "ab"
    }
    moments = set(load_file(newest / "optimizer.safetensors"))
    assert {name.split("/")[0] for name in moments} == names
    assert json.loads((newest / "state.json").read_text())["base"]["adapters"].keys() == {
        name.rsplit(".adapter", 1)[0] for name in names
    }


def test_a_base_from_a_folder_is_found_again_and_another_one_is_refused(
    plain: Recipe, tmp_path: Path
) -> None:
    train_recipe(changed(plain, {"schedule.steps": 2}), tmp_path / "base")
    recipe = with_techniques(plain, LORA, **{"model.init_from": str(tmp_path / "base")})
    train_recipe(recipe, tmp_path / "whole")
    part_of(recipe, tmp_path / "parts", 3)
    train_recipe(None, tmp_path / "parts", resume=True)
    assert rows(tmp_path / "whole") == rows(tmp_path / "parts")
    (tmp_path / "base").rename(tmp_path / "kept")
    train_recipe(changed(plain, {"schedule.steps": 3}), tmp_path / "base")
    with pytest.raises(
        DataError, match=r"holds adapters for another base: .* name the base they were trained on"
    ):
        load_model(tmp_path / "whole")


def test_a_whole_model_is_not_taken_for_adapters(plain: Recipe, tmp_path: Path) -> None:
    train_recipe(plain, tmp_path / "run")
    text = (tmp_path / "run" / "recipe.toml").read_text()
    (tmp_path / "run" / "recipe.toml").write_text(text.replace("techniques = []", 'techniques = ["lora"]'))
    with pytest.raises(DataError, match="holds a whole model, this run has adapters"):
        train_recipe(None, tmp_path / "run", resume=True)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS)
    return found


@torch.no_grad()
def exact_logits(model: Decoder) -> torch.Tensor:
    """In float64, from the formula written out: W + s·B·A, with DoRA each row brought to its magnitude."""
    with torch.device("meta"):
        plain = build_model(model.shape)
    weights = {name: value.double() for name, value in model.state_dict().items() if ".adapter." not in name}
    for entries in model.linears().values():
        for name, layer in entries:
            whole = dense_weight(layer).double()
            adapter = layer._modules.get("adapter")
            if isinstance(adapter, Adapter):
                whole = whole + adapter.spec.scale * adapter.b.double() @ adapter.a.double()
                if adapter.magnitude is not None:
                    whole = whole * (adapter.magnitude.double() / whole.norm(dim=1))[:, None]
            weights[f"{name}.weight"] = whole
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()}, assign=True)
    plain.init_buffers()
    return logits(plain).double()


@pytest.mark.parametrize("method", ["lora", "qlora", slow("dora"), slow("int8")])
def test_a_run_is_opened_merged_and_exported(method: str, plain: Recipe, tmp_path: Path) -> None:
    if method in LIBRARY:
        pytest.importorskip(LIBRARY[method])
    recipe = with_techniques(plain, *METHODS[method], **{"optimizer.lr": 0.05})
    train_recipe(recipe, tmp_path / "run")
    notes: list[str] = []
    model = load_model(tmp_path / "run")
    assert is_adapted(model)
    ours = logits(model)
    set_active(model, active=False)
    assert not torch.allclose(ours, logits(model), atol=1e-3)
    exact = exact_logits(load_model(tmp_path / "run"))
    # Rounding is all that may differ: merged, fp32 is as near to the truth as it is apart, within the usual factor.
    bound = 3 * float((ours - exact).abs().max())
    merge_adapter(tmp_path / "run", tmp_path / "merged", note=notes.append)
    assert ("dequantized base" in notes[-1]) == (method in LIBRARY)
    assert float((logits(load_model(tmp_path / "merged")) - exact).abs().max()) <= bound
    export_model(tmp_path / "run", tmp_path / "exported")
    assert torch.equal(logits(load_model(tmp_path / "exported")), logits(load_model(tmp_path / "merged")))
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_an_exported_adapter_goes_onto_its_base_and_onto_no_other(plain: Recipe, tmp_path: Path) -> None:
    train_recipe(changed(plain, {"schedule.steps": 2}), tmp_path / "base")
    recipe = with_techniques(plain, LORA, **{"model.init_from": str(tmp_path / "base")})
    train_recipe(recipe, tmp_path / "run")
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    ours = logits(load_model(tmp_path / "run"))
    assert torch.equal(logits(load_model(tmp_path / "base", adapter=tmp_path / "adapter")), ours)
    assert torch.equal(logits(load_model(tmp_path / "base", adapter=tmp_path / "run")), ours)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged")  # its settings name the base
    exact = exact_logits(load_model(tmp_path / "run"))
    bound = 3 * float((ours - exact).abs().max())
    assert float((logits(load_model(tmp_path / "merged")) - exact).abs().max()) <= bound
    train_recipe(changed(plain, {"schedule.steps": 3}), tmp_path / "other")
    with pytest.raises(DataError, match="trained on another base"):
        load_model(tmp_path / "other", adapter=tmp_path / "adapter")
    with pytest.raises(DataError, match="holds an adapter, not a model"):
        read_weights(tmp_path / "adapter")


def test_training_goes_on_from_merged_adapters(plain: Recipe, tmp_path: Path) -> None:
    train_recipe(with_techniques(plain, LORA), tmp_path / "first")
    start = changed(plain, {"model.init_from": str(tmp_path / "first"), "schedule.steps": 1})
    train_recipe(start, tmp_path / "second")
    shape, weights = read_weights(tmp_path / "first")
    assert not [name for name, _, _ in adapters(load_model(tmp_path / "second"))]
    assert set(weights) == set(read_weights(tmp_path / "second")[1])
    assert shape == start.shape()


def test_what_learned_to_chat_is_exported_with_its_template(plain: Recipe, tmp_path: Path) -> None:
    """So that merged or exported it is talked to as it was trained, here and in other libraries."""
    train_recipe(with_techniques(plain, LORA, **{"schedule.steps": 1}), tmp_path / "run")
    assert load_tokenizer(tmp_path / "run").chat_template is None
    text = (tmp_path / "run" / "recipe.toml").read_text()
    assert 'kind = "lm"' in text
    text = text.replace('kind = "lm"', 'kind = "sft"').replace('template = "auto"', 'template = "plain"')
    (tmp_path / "run" / "recipe.toml").write_text(text)
    export_model(tmp_path / "run", tmp_path / "exported")
    asked = [{"role": "user", "content": "Why?"}]
    written = load_tokenizer(tmp_path / "exported").render_chat(asked, add_generation_prompt=True)
    assert written == "User:\nWhy?<|endoftext|>\nAssistant:\n"
