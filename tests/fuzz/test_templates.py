"""Tokenizers and chat templates of strangers: used, or refused in one sentence; this process survives all of them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import strategies as st

from rush.data.conversations import Conversation, encode, find_template
from rush.data.conversations.turns import BadRow
from rush.data.tokenizer import Tokenizer, train_bpe
from rush.errors import DataError
from tests.fuzz.harness import cases, explore, fuzz
from tests.fuzz.mutations import mutate_bytes, mutate_tokens

PLAIN = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' and loop.index0 > 0 %}
{{ raise_exception('system first') }}{% endif %}{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
TOOLS = """{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% set ns = namespace(last=0) %}{% for m in messages %}
{%- set ns.last = loop.index %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{%- else %}{{ m.content }}{{ strftime_now('%d %B') }}{% endif %}{% endfor %}"""
FRAGMENTS = (
    "{% for i in range(10**9) %}x{% endfor %}", "{% for i in range(99999) %}", "{% for m in messages %}", "{% endfor %}", "{{ 'a' * 10**10 }}",
    "{{ 10 ** 10 ** 8 }}", "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{% macro g(n) %}{% if n %}{{ g(n - 1) ~ g(n - 1) }}{% endif %}{% endmacro %}",
    "{{ g(40) }}", "{{ 'a' | center(10 ** 11) }}", "{{ messages | tojson(indent=10 ** 9) }}", "{{ [1] | batch(10 ** 10, 'x') | list }}",
    "{{ [1] | slice(10 ** 10) | list }}", "{{ lipsum(10 ** 6) }}", "{{ '%999999999999d' % 1 }}", "{{ '{:>9999999999}'.format(1) }}",
    "{{ messages.__class__.__mro__ }}", "{{ m['content'] }}", "{{ eos_token }}", "{% if add_generation_prompt %}", "{% endif %}", "{% generation %}",
    "{% endgeneration %}", "{{ raise_exception('\x1b[2J') }}", "{{ cycler.__init__.__globals__ }}", "{% include 'x' %}", "{% extends 'y' %}",
    "{% import 'os' as os %}", "{{ ''|attr('__class__') }}", "{% set x = messages %}", "{{ x | sort(attribute='content') | map('upper') | list }}",
    "{{ ('9' * 5000) | int }}", "{{ 1 / 0 }}", "{{ [][9] }}", "{{ none.x }}", "{{ '\\ud800' }}", "(" * 300, "{{" + "(" * 300, "{% raw %}", "{#", "#}", "{{ tools }}",
)  # fmt: skip
TALK = Conversation.of(
    [{"role": "user", "content": "Why? <|im_end|>"}, {"role": "assistant", "content": "So."}]
)
TURN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return train_bpe(["the quick brown fox jumps over the lazy dog " * 40], 280)


def use(tokenizer: Tokenizer) -> None:
    """A conversation as training and `rush chat` encode it."""
    try:
        encode(TALK, tokenizer, find_template("auto", tokenizer))
    except BadRow:
        return
    tokenizer.render_chat(TURN, add_generation_prompt=True)


@cases(0.03)
def test_any_damaged_template_is_rendered_or_refused(count: int, own: Tokenizer) -> None:
    def read(content: bytes) -> None:
        use(Tokenizer(own.json_text, own.eos_token, chat_template=content.decode("utf-8", "replace")))

    fuzz("data/template", read, [PLAIN.encode(), TOOLS.encode()], count, [mutate_bytes, mutate_tokens])


@cases(0.02)
def test_any_program_in_a_template_ends(count: int, own: Tokenizer) -> None:
    def read(content: bytes) -> None:
        use(Tokenizer(own.json_text, own.eos_token, chat_template=content.decode()))

    programs = st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=6).map(
        lambda parts: "".join(parts).encode()
    )
    explore("data/template", programs, read, count)


def mutate_part(chance: Random, content: bytes) -> bytes:
    """The steps around the model are mutated more often than the hundreds of entries of its vocabulary."""
    tree = json.loads(content)
    part = chance.choice(
        [
            "normalizer",
            "pre_tokenizer",
            "post_processor",
            "decoder",
            "added_tokens",
            "truncation",
            "padding",
            "model",
        ]
    )
    text = json.dumps(tree[part]).encode()
    damaged = mutate_tokens(chance, text)
    return content.replace(text, damaged, 1)


@cases(0.02)
def test_any_tokenizer_is_loaded_or_refused(count: int, own: Tokenizer, tmp_path: Path) -> None:
    tree = json.loads(own.json_text)
    split = {"type": "Split", "pattern": {"Regex": r"\s+|\w+"}, "behavior": "Isolated", "invert": False}
    steps = [split, tree["pre_tokenizer"]]
    more = tree | {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"},
        "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0},
    }  # fmt: skip
    seeds = [json.dumps(one).encode() for one in (tree, more)]
    config = json.dumps({"eos_token": own.eos_token})

    def read(content: bytes) -> object:
        (tmp_path / "tokenizer.json").write_bytes(content)
        (tmp_path / "tokenizer_config.json").write_text(config)
        loaded = Tokenizer.load(tmp_path)
        ids = loaded.encode("the lazy fox <|endoftext|>", specials=False) + loaded.encode_plain("a b")
        return loaded.decode(ids), loaded.vocab_size, loaded.control_ids, loaded.fewest_tokens(10**7)

    fuzz("data/tokenizer", read, seeds, count, [mutate_bytes, mutate_part, mutate_part])


@cases(0.03)
def test_any_tokenizer_config_is_read_or_refused(count: int, own: Tokenizer, tmp_path: Path) -> None:
    own.save(tmp_path)
    seed = {
        "eos_token": {"content": own.eos_token, "lstrip": False},
        "bos_token": None,
        "chat_template": [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}],
    }

    def read(content: bytes) -> object:
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        return Tokenizer.load(tmp_path).chat_template

    fuzz("data/tokenizer_config", read, [json.dumps(seed).encode()], count)


def test_a_template_that_never_ends_is_not_run_twice(own: Tokenizer) -> None:
    forever = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    tokenizer = Tokenizer(own.json_text, own.eos_token, chat_template=forever)
    for _ in range(2):
        with pytest.raises(DataError, match=r"does not end|in time"):
            tokenizer.render_chat(TURN)
