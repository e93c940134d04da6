"""Decisions: what was given is kept, what cannot be is refused in one sentence, and the rest follows the data."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rush import start_recipe
from rush.errors import DataError, RecipeError
from rush.models import SIZES
from rush.start import decisions
from rush.start.data_files import find_files
from rush.start.inspect import read_data
from rush.start.model import find_model, named_shape
from tests.start.small_data import SHAPES, SMALL, chat, preferences, small_model, texts, write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "small")


def decided(made: Any) -> dict[str, tuple[Any, str, bool]]:
    return {row["key"]: (row["value"], row["why"], row["given"]) for row in made.record["decisions"]}


def test_what_is_given_is_kept_and_said(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chat.jsonl", chat(60))
    made = start_recipe(
        model, data, "optimizer.lr=1e-4", "batch.sequence=96", "data.template=chatml", "schedule.steps=7",
        'techniques=[{name = "lora", rank = 4, alpha = 8}, "pack_best_fit"]', "run.seed=3", device="cpu",
    )  # fmt: skip
    recipe, known = made.recipe, decided(made)
    assert (recipe.optimizer.lr, recipe.batch.sequence, recipe.data.template) == (1e-4, 96, "chatml")
    assert (recipe.schedule.steps, recipe.schedule.epochs, recipe.run.seed) == (7, None, 3)
    assert [name for name, _ in recipe.technique_uses()] == ["lora", "pack_best_fit"]
    assert made.record["method"] == "lora"
    assert all(
        known[key][1:] == ("given", True)
        for key in ("optimizer.lr", "batch.sequence", "techniques", "run.seed")
    )
    assert not known["data.validation"][2]
    assert made.record["plan"]["steps"] == 7


def test_techniques_are_added_to_those_that_were_decided(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chat.jsonl", chat(60))
    made = start_recipe(model, data, "techniques+=fused_adamw", device="cpu")
    assert [name for name, _ in made.recipe.technique_uses()] == ["pack_best_fit", "fused_adamw"]


def test_a_micro_batch_may_stay_with_the_planner_or_be_given(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chat.jsonl", chat(60))
    assert start_recipe(model, data, "batch.micro=auto", device="cpu").recipe.micro >= 1
    given = start_recipe(model, data, "batch.micro=3", "batch.total_tokens=1152", device="cpu").recipe
    assert (given.micro, given.accumulation) == (3, 3)
    alone = start_recipe(model, data, "batch.micro=12", "batch.sequence=128", device="cpu").recipe
    assert alone.step_tokens % (12 * 128) == 0, "what was decided follows what was given"


def test_few_hours_mean_fewer_epochs_and_the_cost_follows_the_price(model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "chat.jsonl", chat(200))
    free = start_recipe(model, data, device="cpu", price=2.0).record["plan"]
    assert free["epochs"] == 3.0
    assert free["cost"] == pytest.approx(2 * free["hours"])
    hours = free["hours"] / 3
    made = start_recipe(model, data, device="cpu", hours=hours)
    short = made.record["plan"]
    assert (
        short["epochs"] < 3 / 2 * 1.05
    )  # a third of the time, of which half may be the planner's error on a CPU
    assert short["hours"] <= hours
    assert "what fits" in decided(made)["schedule.epochs"][1]
    assert start_recipe(model, data, device="cpu", hours=1e6).recipe.schedule.epochs == 3.0


def test_epochs_within_hours_are_rounded_down_and_leave_time_for_the_reference() -> None:
    assert decisions.within_hours(3, 3600, 0, 10, 0.1) is None
    choice = decisions.within_hours(3, 3600, 1200, 2, 0.2)
    assert choice is not None
    assert choice.value == 1.3  # (2 h / 1.2 - 20 min) / 1 h = 1.333
    tiny = decisions.within_hours(3, 1e6, 0, 0.01, 0.2)
    assert tiny is not None
    assert tiny.value == 3e-5
    with pytest.raises(RecipeError, match="before the first step"):
        decisions.within_hours(3, 3600, 1200, 0.1, 0.2)


def test_broken_rows_are_counted_dropped_when_few_and_refused_when_many(model: Path, tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", SHAPES["broken"])
    made = start_recipe(model, few, device="cpu")
    data = made.record["data"]
    assert (data["rows"], data["broken"], data["documents"]) == (302, 2, 300)
    assert data["broken_reasons"] == {"no messages": 1, "no answer": 1}
    assert data["first_broken"].startswith(f"{few}:301: ")
    assert made.recipe.data.bad_rows == "drop"
    many = write_rows(tmp_path / "many.jsonl", [*chat(10), {"messages": []}])
    with pytest.raises(
        DataError, match=r"9\.1% of the rows .*1 no messages.*many\.jsonl:11: .*data\.bad_rows=drop"
    ):
        start_recipe(model, many, device="cpu")
    assert start_recipe(model, many, "data.bad_rows=drop", device="cpu").recipe.data.bad_rows == "drop"
    lines = write_rows(tmp_path / "lines.jsonl", chat(300))
    lines.write_text(lines.read_text() + '{"messages": [\n')
    with pytest.raises(
        DataError, match=r"1 of 301 lines are no JSON objects.*lines\.jsonl:301: not valid JSON"
    ):
        start_recipe(model, lines, device="cpu")


def test_preferences_beside_anything_else_are_refused_with_both_places(model: Path, tmp_path: Path) -> None:
    talks, pairs = write_rows(tmp_path / "a.jsonl", chat(5)), write_rows(tmp_path / "b.jsonl", preferences(4))
    with pytest.raises(
        DataError, match=r"4 preferences .*b\.jsonl:1.* with 5 rows .*a\.jsonl:1, chat.*one objective"
    ):
        start_recipe(model, [talks, pairs], device="cpu")
    with pytest.raises(
        DataError, match=r"objective\.kind=lm was given, but the data hold 5 rows of the format chat"
    ):
        start_recipe(model, talks, "objective.kind=lm", device="cpu")


def test_conversations_beside_texts_are_both_learned_from(model: Path, tmp_path: Path) -> None:
    made = start_recipe(model, write_rows(tmp_path / "mixed.jsonl", SHAPES["mixed"]), device="cpu")
    assert made.record["data"]["formats"] == {"chat": 200, "text": 100}
    assert "200 conversations and 100 plain texts" in decided(made)["objective.kind"][1]


def test_duplicates_roles_and_lengths_are_those_of_the_rows(model: Path, tmp_path: Path) -> None:
    rows = chat(50)
    made = start_recipe(model, write_rows(tmp_path / "chat.jsonl", rows + rows[:10]), device="cpu")
    data = made.record["data"]
    assert data["duplicates"] == 10
    assert data["roles"] == {"system": 60, "user": 60, "assistant": 60}
    from rush.data.conversations import Conversation, encode, find_template
    from rush.hub.tokenizers import load_tokenizer

    tokenizer = load_tokenizer(model)
    encoded = [
        encode(Conversation.of(row["messages"]), tokenizer, find_template("plain", tokenizer))
        for row in rows + rows[:10]
    ]
    assert data["longest_tokens"] == max(map(len, encoded))
    assert data["tokens"] == sum(map(len, encoded))
    assert data["target_share"] == pytest.approx(
        sum(one.num_trained for one in encoded) / sum(map(len, encoded))
    )
    assert sum(count for _, _, count in data["histogram"]) == 60
    assert any("10 of 60 rows are duplicates" in note for note in made.record["notes"])


def test_the_models_own_template_is_used_unless_it_cannot_be_trained_with(
    model: Path, tmp_path: Path
) -> None:
    import shutil

    own = tmp_path / "own"
    shutil.copytree(model, own)
    data = write_rows(tmp_path / "chat.jsonl", chat(20))
    (own / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + ' ' + m.content + eos_token }}{% endfor %}"
    )
    assert decided(start_recipe(own, data, device="cpu"))["data.template"][:2] == (
        "auto",
        "the model's own chat template",
    )
    (own / "chat_template.jinja").write_text("{{ raise_exception('no system turns') }}")
    value, why, _ = decided(start_recipe(own, data, device="cpu"))["data.template"]
    assert value == "plain"
    assert "no system turns" in why


def test_rows_that_no_template_writes_are_refused_with_both_reasons(model: Path, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "weather", "arguments": {}}]}
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, call]} for n in range(5)]
    data = write_rows(tmp_path / "calls.jsonl", rows)
    with pytest.raises(
        DataError, match=r"no row to train on.*calls weather, which the template \(plain\) does not write"
    ):
        start_recipe(model, data, device="cpu")
    mixed = write_rows(tmp_path / "mixed.jsonl", [*rows, *chat(20)])
    with pytest.raises(DataError, match=r"20\.0% of the rows .*mixed\.jsonl:1: turn 2 calls weather"):
        start_recipe(model, mixed, device="cpu")


def test_a_size_by_name_starts_from_random_weights_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    made = start_recipe("llama-tiny", write_rows(tmp_path / "text.jsonl", texts(50)), device="cpu")
    assert made.recipe.model.init_from is None
    assert made.recipe.data.tokenizer == "train"
    assert 257 <= (made.recipe.data.vocab_size or 0) < SIZES["llama-tiny"].vocab_size
    assert made.record["method"] == "full"
    assert any("random" in note for note in made.record["notes"])


def test_files_of_every_format_and_folders_are_read(tmp_path: Path) -> None:
    rows = [{"instruction": f"ask {n}", "output": f"answer {n}"} for n in range(7)]
    folder = tmp_path / "a [b]"
    folder.mkdir()
    (folder / "README.md").write_text("about")
    write_rows(folder / "a.jsonl", rows)
    (folder / "b.json").write_text(json.dumps(rows))
    with (folder / "c.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["instruction", "output"])
        writer.writeheader()
        writer.writerows(rows)
    files = find_files([str(folder)])
    assert [Path(path).name for path in files.paths] == ["a.jsonl", "b.json", "c.csv"]
    assert [Path(path).name for path in files.ignored] == ["README.md"]
    facts = read_data(files.paths)
    assert (facts.rows, facts.formats, facts.duplicates) == (21, {"instruction": 21}, 14)
    (tmp_path / "notes").mkdir()
    for number in range(3):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"note {number}")
    assert read_data(find_files([str(tmp_path / "notes")]).paths).formats == {"text": 3}
    with pytest.raises(DataError, match="nothing matches"):
        find_files([str(tmp_path / "none.jsonl")])


def test_a_text_in_another_field_is_found(model: Path, tmp_path: Path) -> None:
    rows = [{"content": row["text"], "id": 1} for row in texts(30)]
    made = start_recipe(model, write_rows(tmp_path / "code.jsonl", rows), device="cpu")
    assert (made.recipe.data.text_field, made.recipe.objective.kind) == ("content", "lm")


def test_one_document_and_unknown_models_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("a single note")
    with pytest.raises(DataError, match="one document"):
        start_recipe(model, tmp_path / "one.txt", device="cpu")
    with pytest.raises(RecipeError, match=r"no model 'lama-3\.2-1b'.*llama-3\.2-1b"):
        find_model("lama-3.2-1b")
    with pytest.raises(DataError, match="neither a Hugging Face folder"):
        find_model(str(tmp_path))


def test_a_model_without_all_of_its_shards_is_planned_and_said_to_lack_them(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "shards"
    shutil.copytree(model, folder)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert not find_model(str(folder)).weights
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-1.safetensors").touch()
    assert not find_model(str(folder)).weights
    (folder / "model-2.safetensors").touch()
    assert find_model(str(folder)).weights


@pytest.mark.parametrize("size", SIZES)
def test_any_shape_is_a_published_size_with_the_fields_that_differ(size: str) -> None:
    from dataclasses import replace

    from rush.recipe_io import parse

    assert named_shape(SIZES[size]) == (size, {})
    shape = replace(SIZES[size], num_layers=3, vocab_size=997)
    if shape.rope_theta is not None:
        shape = replace(shape, window=None if shape.window is None else 96, rope_scaling=None)
    name, overrides = named_shape(shape)
    tree = {"model": {"name": name, "shape": overrides}, "batch": {"micro": 1, "sequence": 64}, "optimizer": {"lr": 1e-3},
            "schedule": {"steps": 1}}  # fmt: skip
    assert parse(tree).shape() == shape


@pytest.mark.parametrize(
    ("objective", "method", "parameters", "pretrained", "lr"),
    [
        ("sft", "full", 8e9, True, 2e-5), ("sft", "full", 13e9, True, 1e-5), ("sft", "lora", 8e9, True, 2e-4),
        ("sft", "qlora", 70e9, True, 1e-4), ("dpo", "full", 7e9, True, 5e-7), ("dpo", "lora", 7e9, True, 5e-6),
        ("lm", "full", 124e6, False, 6e-4), ("lm", "full", 7e9, False, 1.2e-4),
    ],
)  # fmt: skip
def test_learning_rates_are_the_published_ones(
    objective: str, method: str, parameters: float, pretrained: bool, lr: float
) -> None:
    choice = decisions.choose_learning_rate(objective, method, int(parameters), pretrained)
    assert choice.value == lr
    assert "20" in choice.why or "Handbook" in choice.why  # the source's year


def test_an_outlier_does_not_set_the_length_of_rows() -> None:
    from dataclasses import replace

    from rush.start.inspect import LengthFacts

    usual = LengthFacts(1000, 300, 280, 600, 700, 900, 0.5, 1000, ())
    assert decisions.choose_sequence(usual, "dpo", 8192, True).value == 960 - 960 % 64
    odd = replace(usual, longest=50_000)
    assert decisions.choose_sequence(odd, "dpo", 8192, True).value == 704
    assert decisions.choose_too_long(odd, 704, "dpo").value == "drop"
    assert decisions.choose_too_long(odd, 704, "sft").value == "cut"
    assert decisions.choose_sequence(usual, "dpo", 512, True).value == 512


def test_a_model_of_the_hub_is_planned_with_its_settings_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")
    from tests.hub.hub_server import running_hub

    data = write_rows(tmp_path / "chat.jsonl", chat(20))
    monkeypatch.chdir(tmp_path)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "rush"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        hub.add("some/model", {file.name: file.read_bytes() for file in model.iterdir()})
        made = start_recipe("some/model", data, device="cpu")
        assert not hub.asked("model.safetensors")
    assert made.recipe.model.init_from == "some/model"
    assert made.recipe.shape() == SMALL
    assert made.record["model"]["weights"]


def test_a_corpus_for_a_trained_run_is_read_with_the_runs_tokenizer(model: Path, tmp_path: Path) -> None:
    import rush

    data = write_rows(tmp_path / "text.jsonl", texts(24))
    first = start_recipe(model, data, "schedule.steps=1", "run.sample_tokens=0", device="cpu").recipe
    ended = rush.train(first, out=tmp_path / "run")
    again = start_recipe(ended.folder, data, "schedule.steps=1", "run.sample_tokens=0", device="cpu").recipe
    assert again.data.tokenizer == str(ended.folder / "tokenizer")
    assert rush.train(again, out=tmp_path / "again").summary.step == 1
