"""`rush overfit` and `rush evaluate` as a person types them: verdicts, figures, one message for bad input."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rush.cli import main
from tests.fresh_cache import fresh_cache
from tests.training.small_preferences import preference_recipe, write_pairs
from tests.training.small_runs import small_recipe, write_corpus

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # bf16 on older CPUs


class World:
    """A folder with a preference run, a pretraining run of another tokenizer, and a way to call the command line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pairs = write_pairs(path / "pairs.jsonl")
        self.recipe = self.file("dpo.toml", preference_recipe(self.pairs, schedule={"steps": 3, "warmup": 0}))
        corpus = write_corpus(path / "corpus")
        self.lm = self.file("lm.toml", small_recipe(corpus, schedule={"steps": 2, "warmup": 0}))

    def file(self, name: str, content: str) -> Path:
        target = self.path / name
        target.write_text(content)
        return target

    def call(self, *words: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    path = tmp_path_factory.mktemp("world")
    before = os.environ.get("RUSH_CACHE")
    os.environ["RUSH_CACHE"] = str(fresh_cache(path / "cache"))
    made = World(path)
    assert made.call("train", made.recipe, "--out", path / "run", "--json") == 0
    assert made.call("train", made.lm, "--out", path / "lm-run", "--json") == 0
    yield made
    os.environ.pop("RUSH_CACHE")
    if before is not None:
        os.environ["RUSH_CACHE"] = before


def test_overfit_reports_that_a_configuration_can_learn(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.call("overfit", world.recipe, "objective.beta=1.0", "--steps", 60) == 0
    out = capsys.readouterr().out
    assert "this configuration can learn" in out
    assert "loss 0.6931" in out
    assert "each label is the next token" in out
    assert "▁" in out
    flat = " ".join(out.split())
    assert re.search(
        r"near zero is at most 0\.0347 here: no model gets below 0\.0000 .* and 0\.05 nats may be left \(or 5%",
        flat,
    )


def test_overfit_reports_why_a_configuration_cannot(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.call("overfit", world.recipe, "optimizer.lr=1e-7", "--steps", 12, "--json") == 5
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["can_learn"], verdict["cause"]) == (False, "learning rate")
    assert len(verdict["losses"]) == 12
    assert (
        world.call(
            "overfit", world.lm, "techniques=['pure_bf16']", "optimizer.lr=1e-7", "--steps", 12, "--json"
        )
        == 5
    )
    assert json.loads(capsys.readouterr().out)["cause"] == "precision"


def test_evaluate_compares_two_models_on_what_the_run_held_out(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    run = world.path / "run"
    first = [
        "evaluate",
        run,
        "--against",
        run,
        "--checkpoint",
        "2",
        "--answers",
        1,
        "--max-tokens",
        4,
        "--json",
    ]
    assert world.call(*first) == 0
    card = json.loads(capsys.readouterr().out)
    before, after = card["models"]
    assert before["wins"]["by_reward"] is None
    assert after["wins"]["by_reward"]["count"] == before["wins"]["by_sum"]["count"] > 4
    assert after["held_out"]["loss"] != before["held_out"]["loss"]
    assert "What is the colour of thing" in card["answers"][0]["prompt"]
    assert len(card["answers"][0]["texts"]) == 2


def test_evaluate_takes_files_of_pairs_conversations_and_questions(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = world.file(
        "q.jsonl", '{"ctx": "Thing 1 is", "endings": ["green.", "a very long way off"], "label": 0}\n'
    )
    run = world.path / "run"
    assert world.call("evaluate", run, "--data", world.pairs, "--choices", questions, "--answers", 0) == 0
    out = capsys.readouterr().out
    assert "of 48" in out, "all pairs of the file"
    assert "acc_norm" in out
    chat = world.file(
        "chat.jsonl",
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}\n',
    )
    assert world.call("evaluate", run, "--data", chat, "--prompt", "What?", "--max-tokens", 3, "--json") == 0
    card = json.loads(capsys.readouterr().out)
    assert card["models"][0]["wins"] is None
    assert card["models"][0]["held_out"]["labels"] > 0
    assert len(card["answers"]) == 2


def test_evaluate_reads_tables_as_rows(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    table = world.file("pairs.csv", "prompt,chosen,rejected\nWhat?,this,that\nWho?,she,he\n")
    assert world.call("evaluate", world.path / "run", "--data", table, "--answers", 0, "--json") == 0
    wins = json.loads(capsys.readouterr().out)["models"][0]["wins"]
    assert wins["by_sum"]["count"] == 2
    chat = world.file("chat.csv", "prompt,completion\nhi,ho\n")
    assert world.call("evaluate", world.path / "run", "--data", chat, "--answers", 0, "--json") == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["wins"] is None


BAD = [
    (["overfit", "nothing-such"], 2, "nothing-such"),
    (["overfit", "RECIPE", "objective.beta=0"], 2, "objective.beta"),
    (["overfit", "RECIPE", "objective.loss=orpo", "objective.reference=live"], 2, "compares with no reference"),
    (["overfit", "RECIPE", "objective.margin=1.0"], 2, "objective.margin is 1"),
    (["overfit", "RECIPE", "techniques=['flatten']"], 4, "preferences keep two answers together"),
    (["train", "RECIPE", "objective.loss=simpo", "objective.label_smoothing=0.1", "--out", "NEW"], 2, "has no such term"),
    (["evaluate", "EMPTY"], 3, "neither a run folder"),
    (["evaluate", "RUN", "--data", "none.jsonl"], 3, "there is no file"),
    (["evaluate", "RUN", "--data", "EMPTY.jsonl"], 3, "is empty, so there is nothing to evaluate on"),
    (["evaluate", "RUN", "--choices", "BAD.jsonl"], 3, "endings (or choices) is missing"),
    (["evaluate", "RUN", "--choices", "EMPTY.jsonl"], 3, "holds no question"),
    (["evaluate", "RUN", "--against", "LM"], 3, "different tokenizers"),
    (["evaluate", "RUN", "--data", "LM"], 3, "tokenizer"),
    (["evaluate", "RUN", "--checkpoint", "77"], 2, "no checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "message"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_is_one_message_and_its_exit_code(
    world: World, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str
) -> None:
    (world.path / "empty").mkdir(exist_ok=True)
    world.file("empty.jsonl", "")
    world.file("bad.jsonl", '{"ctx": "x", "label": 0}\n')
    names = {
        "RECIPE": world.recipe,
        "RUN": world.path / "run",
        "LM": world.path / "lm-run",
        "NEW": world.path / "new",
        "EMPTY": world.path / "empty",
        "EMPTY.jsonl": world.path / "empty.jsonl",
        "BAD.jsonl": world.path / "bad.jsonl",
    }
    capsys.readouterr()
    assert world.call(*(names.get(word, word) for word in words)) == code
    err = capsys.readouterr().err
    said = str(names.get(message, message))
    assert said in err.replace("\n", " ") or said in err
    assert "Traceback" not in err
    assert err.count("error:") == 1
