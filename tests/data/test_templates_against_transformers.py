"""Chat templates are rendered as transformers renders them: strings, token ids, masks and refusals."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import pytest

from rush.data import Tokenizer, train_bpe
from rush.data.conversations import Conversation, encode, find_template
from rush.errors import DataError
from tests.data.chat_templates import CHATML, TEMPLATES, some_messages, some_text, some_tools
from tests.data.conftest import make_texts

pytestmark = pytest.mark.skipif(not find_spec("transformers"), reason="transformers is not installed")
CONVERSATIONS = 60
MARKS = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>",
)  # fmt: skip


@pytest.fixture(scope="module")
def marked() -> Tokenizer:
    """A tokenizer with the control tokens of the templates, and with and without a beginning-of-text token."""
    import tokenizers

    trained = train_bpe(make_texts(200), 400)
    core = tokenizers.Tokenizer.from_str(trained.json_text)
    core.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in ("<s>", *MARKS)])
    return Tokenizer(core.to_str(), trained.eos_token, "<s>")


def both(folder: Path, tokenizer: Tokenizer, template: str, bos: bool = True) -> tuple[Tokenizer, Any]:
    """Ours and transformers', from the same files."""
    ours = Tokenizer(tokenizer.json_text, tokenizer.eos_token, "<s>" if bos else None, template)
    ours.save(folder)
    import transformers  # takes seconds, and every worker reads this file

    return Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)


def outcome(render: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """What came of a rendering: a text, or that it was refused and why."""
    try:
        return "text", render(*args, **options)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        return "refused", str(error)
    except DataError as error:
        return "refused", str(error).split(": ", 1)[-1]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("bos", [True, False])
def test_text_ids_and_refusals_are_the_reference_librarys(
    name: str, bos: bool, marked: Tokenizer, tmp_path: Path
) -> None:
    ours, theirs = both(tmp_path, marked, TEMPLATES[name], bos)
    draw = random.Random(f"{name}{bos}")
    refused = 0
    for _ in range(CONVERSATIONS):
        messages, tools = some_messages(draw), some_tools(draw)
        settings = draw.choice(({}, {}, {"enable_thinking": False}, {"date_string": "1 Jan 2020"}))
        prompt = draw.random() < 0.5
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, **settings}
        kind, wanted = outcome(theirs.apply_chat_template, messages, tokenize=False, **options)
        found_kind, found = outcome(ours.render_chat, messages, prompt, tools=tools, settings=settings)
        assert found_kind == kind, (messages, wanted, found)
        if kind == "refused":
            refused += 1
            assert found.rstrip(".")[:60] == wanted.rstrip(".")[:60]
            continue
        assert found == wanted, messages
        assert ours.encode(found) == theirs.apply_chat_template(messages, return_dict=False, **options)
    if name in ("llama", "mistral", "gemma"):
        assert 0 < refused < CONVERSATIONS


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_continued_message_is_left_open_as_in_the_reference_library(
    name: str, marked: Tokenizer, tmp_path: Path
) -> None:
    ours, theirs = both(tmp_path, marked, TEMPLATES[name])
    draw = random.Random(name)
    texts = 0
    for _ in range(CONVERSATIONS // 2):
        messages = [message for message in some_messages(draw) if "tool_calls" not in message]
        if not messages or not isinstance(messages[-1]["content"], str):
            continue
        kind, wanted = outcome(
            theirs.apply_chat_template, messages, tokenize=False, continue_final_message=True
        )
        found_kind, found = outcome(ours.render_chat, messages, continued=True)
        assert found_kind == kind, (messages, wanted, found)
        if kind == "text":
            texts += 1
            assert found == wanted, messages
    assert texts > 10


def test_a_continued_message_and_a_generation_prompt_exclude_each_other(
    marked: Tokenizer, tmp_path: Path
) -> None:
    ours, _ = both(tmp_path, marked, CHATML)
    with pytest.raises(DataError, match="one of the two"):
        ours.render_chat([{"role": "user", "content": "x"}], True, continued=True)
    with pytest.raises(DataError, match="no text that could be continued"):
        ours.render_chat([{"role": "user", "content": None}], continued=True)
    dropping, _ = both(tmp_path, marked, "{{ messages[0].content }}")
    with pytest.raises(DataError, match="does not write the message"):
        dropping.render_chat(
            [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], continued=True
        )


def test_targets_are_the_tokens_between_generation_marks(marked: Tokenizer, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, marked, CHATML)
    draw = random.Random(5)
    template = find_template("auto", ours)
    for _ in range(CONVERSATIONS):
        messages = [{"role": "system", "content": some_text(draw)}] if draw.random() < 0.5 else []
        for _ in range(draw.randint(1, 3)):
            # An answer that begins with white space is encoded apart from the line end before it, as in generation.
            messages.append({"role": "user", "content": some_text(draw)})
            messages.append({"role": "assistant", "content": some_text(draw).lstrip()})
        found = encode(Conversation.of(messages), ours, template)
        wanted = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        # The line end after the last turn is not trained on, and not kept.
        assert found.tokens == wanted["input_ids"][: len(found)]
        assert theirs.decode(wanted["input_ids"][len(found) :]).strip() == ""
        assert found.trained == [bool(mask) for mask in wanted["assistant_masks"][: len(found)]]


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
    ],
)
def test_pythons_own_names_stay_out_of_reach(template: str, marked: Tokenizer, tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, marked, template)
    messages = [{"role": "user", "content": "x"}]
    theirs_kind, _ = outcome(theirs.apply_chat_template, messages, tokenize=False)
    assert outcome(ours.render_chat, messages)[0] == theirs_kind == "refused"
