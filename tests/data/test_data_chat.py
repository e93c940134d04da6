from __future__ import annotations

from pathlib import Path

import pytest

from rush.data import Tokenizer
from rush.errors import DataError

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
MESSAGES = [{"role": "user", "content": "Hi! "}, {"role": "assistant", "content": "Hello."}]


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(tokenizer.json_text, tokenizer.eos_token, tokenizer.bos_token, template)


def test_a_conversation_is_written_by_the_templates_rule(tokenizer: Tokenizer) -> None:
    chatty = with_template(tokenizer, CHATML)
    plain = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    assert chatty.render_chat(MESSAGES) == plain
    assert chatty.render_chat(MESSAGES, add_generation_prompt=True) == plain + "<|im_start|>assistant\n"


def test_the_text_is_the_reference_librarys(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = (
        "{{ bos_token }}{% for m in messages %}\n  {% if loop.last %}\n  {{ m | tojson }}\n  {% endif %}\n"
        "  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{{ m.role }}: {{ m.content }}{{ eos_token }}\n"
        "{% endfor %}"
    )
    chatty = with_template(tokenizer, template)
    chatty.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "größer"}, *MESSAGES, {"role": "user", "content": "<&'日\"\n"}]
    expected = reference.apply_chat_template(messages, tokenize=False)
    assert chatty.render_chat(messages) == expected


def test_the_template_may_come_as_a_file_of_its_own_or_as_a_named_list(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import json

    tokenizer.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "yes"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "from the file"


def test_a_tokenizer_without_a_template_says_so(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no chat template"):
        tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for x in range(10**9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_hostile_template_is_refused(tokenizer: Tokenizer, template: str) -> None:
    with pytest.raises(DataError):
        with_template(tokenizer, template).render_chat(MESSAGES)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[0]['content'] + 3 }}", "chat template"),
    ],
)
def test_a_template_that_refuses_passes_its_reason_on(tokenizer: Tokenizer, template: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        with_template(tokenizer, template).render_chat(MESSAGES)
