"""What a sample during training is prompted with, and where it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from rush.data import Tokenizer
from rush.hub.answers import answer_stop_ids
from rush.recipe_io import changed, load_recipe
from rush.training.corpus import open_corpus
from rush.training.sample import sample_prompt
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import small_recipe, write_corpus

QUESTION = "What is 7?"
CHATML = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"


def make_tokenizer(folder: Path, *marks: str, template: str | None = None) -> Tokenizer:
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", *marks],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([Path(__file__).read_text()], trainer=trainer)
    made = Tokenizer(core.to_str(), eos_token="<|endoftext|>", chat_template=template)
    made.save(folder)
    return made


def prompted(path: Path, rows: list[dict[str, Any]], prompt: str, **changes: Any) -> tuple[str, list[str]]:
    """The text that a sample of such a run begins with, and the tokens that end it."""
    make_tokenizer(path / "tokenizer", "<|im_start|>", "<|im_end|>")
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"files": [str(path / "rows.jsonl")], "tokenizer": str(path / "tokenizer")}
    (path / "small.toml").write_text(
        small_recipe(path, data=data, batch={"sequence": 64, "total_tokens": 128})
    )
    settings = {"objective.kind": "sft", "run.sample_prompt": prompt, **changes}
    recipe = changed(load_recipe(str(path / "small.toml")), settings)
    corpus = open_corpus(recipe, None, lambda text: None)
    tokens, ends = sample_prompt(recipe, corpus)
    return corpus.tokenizer.decode(tokens), [corpus.tokenizer.decode([end]) for end in ends]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))


TALK = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(40)]
TEXTS = [{"text": f"It is {n} and no other number."} for n in range(40)]


def test_a_question_is_a_users_turn_in_the_runs_template(tmp_path: Path) -> None:
    told = prompted(tmp_path, TALK, QUESTION, **{"data.template": "chatml"})
    assert told == (CHATML, ["<|endoftext|>", "<|im_end|>"])
    text, ends = prompted(tmp_path, TALK, QUESTION, **{"data.template": "plain"})
    assert text == f"User:\n{QUESTION}<|endoftext|>\nAssistant:\n"
    assert "<|endoftext|>" in ends
    assert prompted(tmp_path, TALK, QUESTION, **{"data.template": "raw"})[0] == QUESTION


def test_a_prompt_written_out_stays_as_it_is(tmp_path: Path) -> None:
    """As recipes had to write it before."""
    for written in (CHATML, f"User:\n{QUESTION}<|endoftext|>\nAssistant:\n"):
        text, ends = prompted(tmp_path, TALK, written, **{"data.template": "chatml"})
        assert text == written
        assert "<|im_end|>" in ends


def test_plain_texts_and_pretraining_go_on_from_the_prompt(tmp_path: Path) -> None:
    assert prompted(tmp_path, TEXTS, "It is ") == ("It is ", ["<|endoftext|>"])
    corpus = write_corpus(tmp_path / "corpus")
    (tmp_path / "lm.toml").write_text(small_recipe(corpus, run={"sample_prompt": "def "}))
    recipe = load_recipe(str(tmp_path / "lm.toml"))
    opened = open_corpus(recipe, None, lambda text: None)
    assert sample_prompt(recipe, opened) == (opened.tokenizer.encode("def "), (opened.tokenizer.eos_id,))


def test_the_end_of_an_answer_is_what_the_template_writes_there(tmp_path: Path) -> None:
    """Also where it is a mark that nobody else uses, and where the template leaves it outside of what it calls generated."""
    prompt = "{% if add_generation_prompt %}assistant:{% endif %}"
    plain = "{% for m in messages %}{{ m.role }}:{{ m.content }}<|over|>\n{% endfor %}" + prompt
    marked = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}<|over|>\n{% endfor %}" + prompt
    )
    for template in (plain, marked):
        own = make_tokenizer(tmp_path / "own", "<|over|>", "<|other|>", template=template)
        assert answer_stop_ids(own) == (0, own.special_ids["<|over|>"])
    without = make_tokenizer(tmp_path / "without", "<|over|>", template="{% for m in messages %}{{ m.content }}\n{% endfor %}")  # fmt: skip
    assert answer_stop_ids(without) == (0,)
    known = make_tokenizer(tmp_path / "known", "<|eot_id|>")
    assert answer_stop_ids(known) == (0, 1)
