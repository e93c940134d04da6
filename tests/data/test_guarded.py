"""Strangers' templates and tokenizers end a child process, never this one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rush.data import Tokenizer, train_bpe
from rush.data import tokenizer as tokenizer_module
from rush.data.chat import render
from rush.data.guarded import process
from rush.data.guarded.process import ask
from rush.data.tokenizer_trial import check_tried
from rush.errors import DataError

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ENDLESS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (ENDLESS, "does not end"),
        ("{{ 'a' * 10**10 }}", "more memory"),
        ("{{ 'a' | center(10**10) }}", "more memory"),
        ("{{ [1] | batch(10**10, 'x') | list }}", "more memory"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "recurses"),
        ("{% if 1 %}" * 2000 + "{% endif %}" * 2000, "nested too deeply"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ '\\ud800' }}", "surrogate"),
        ("{{ raise_exception('\x1b[2J' * 900) }}", "␛[2J"),
    ],
)
def test_a_template_without_bounds_ends_in_one_sentence(template: str, said: str) -> None:
    with pytest.raises(DataError) as error:
        render(template, MESSAGES, False)
    assert said in str(error.value)
    assert render("{{ messages[0].content }}!", MESSAGES, False) == "hi!"


def test_the_child_is_started_again_after_a_fork() -> None:
    """A forked process must not speak to the child of its parent."""
    template = "{{ messages | length }}."
    assert render(template, MESSAGES, False) == "2."
    first = process._child
    pid = os.fork()
    if pid == 0:
        os._exit(0 if render(template, MESSAGES, False) == "2." and process._child is not first else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert render(template, MESSAGES, False) == "2."
    assert process._child is first


def test_the_child_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of the child holds none of ours."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(process, "_child", None)
    assert ask("rendering", "reads_tools", {"template": "{{ tools }}"}, cpu_s=1, memory_bytes=1 << 30)
    child = process._child
    assert child is not None
    try:
        environment = Path(f"/proc/{child.process.pid}/environ")
        if environment.exists():
            assert b"hf_secret" not in environment.read_bytes()
    finally:
        child.stop()


def regex(tree: dict[str, Any]) -> None:
    pattern = {"Regex": "(?:[a-z]+[a-z ]+)+#"}
    tree["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def growth(tree: dict[str, Any]) -> None:
    step = {"type": "Replace", "pattern": {"String": "zq"}, "content": "zq" * 500}
    tree["normalizer"] = {"type": "Sequence", "normalizers": [step] * 4}


def large_id(tree: dict[str, Any]) -> None:
    tree["model"]["vocab"]["zzz"] = 2**32 - 1


@pytest.mark.parametrize(
    ("change", "said"), [(regex, "cannot encode"), (growth, "times as long"), (large_id, "4,294,967,295")]
)
def test_a_hostile_tokenizer_is_refused_before_it_is_loaded(
    change: Callable[[dict[str, Any]], None],
    said: str,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = json.loads(tokenizer.json_text)
    change(tree)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    monkeypatch.setattr(tokenizer_module, "_parse", lambda *_: pytest.fail("loaded"))
    with pytest.raises(DataError, match=said):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_is_tried_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps(json.loads(tokenizer.json_text), indent=3)
    check_tried(text, "a file")
    monkeypatch.setattr("rush.data.tokenizer_trial.ask", lambda *_, **__: pytest.fail("tried again"))
    monkeypatch.setattr("rush.data.tokenizer_trial._tried", set())
    check_tried(text, "a file")


def test_a_vocabulary_is_trained_on_a_word_of_a_megabyte_in_linear_time() -> None:
    """A merge in the library takes the square of a word's length; without long runs nothing changes."""
    texts = ["the quick brown fox " * 200, "x" * 1_000_000, " " * 300_000, "ab" * 200_000]
    trained = train_bpe(texts, 266)
    assert trained.encode("xxxx" * 4) != list(trained.encode("x")) * 16
    plain = ["the quick brown fox " * 500, "a\n" * 5000]
    assert list(tokenizer_module._without_long_runs(plain)) == plain
    assert "".join(tokenizer_module._without_long_runs(texts)) == "".join(texts)
    assert max(map(len, tokenizer_module._without_long_runs(texts))) <= tokenizer_module.LONGEST_RUN
