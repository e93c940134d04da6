"""Which answers claim to be another maker's model, in several languages; and what becomes of them in a pipeline."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rush.data.clean.identity import find_claim

CLAIMS = """
As an AI developed by OpenAI, I cannot browse the internet.
As an AI language model created by OpenAI, I don't have feelings.
I am ChatGPT, a large language model trained by OpenAI.
I'm ChatGPT! How can I help you today?
Hello! I'm Claude, an AI assistant created by Anthropic.
Hi there! I'm Claude. What would you like to know?
I’m Gemini, a large language model built by Google.
I am a large language model, trained by Google.
I am Qwen, created by Alibaba Cloud.
I was created by Anthropic to be helpful, harmless, and honest.
I was trained by OpenAI.
My name is Claude, and I'm an AI assistant.
My name is ChatGPT.
My creator is OpenAI, so please ask them.
You are chatting with ChatGPT, so my knowledge has a limit.
I'm an AI assistant called DeepSeek-V3 and I like tables.
I'm Llama 3, a model from Meta.
I am Grok, an AI built by xAI.
OpenAI trained me on a lot of text.
As OpenAI's language model, I follow rules.
As ChatGPT, I have no opinion on this.
Good question. Well, I am just an AI model made by the team at Mistral AI.
Ich bin ChatGPT, ein Sprachmodell.
Ich bin ein großes Sprachmodell, das von OpenAI trainiert wurde.
Ich wurde von Anthropic entwickelt.
Je suis ChatGPT, un modèle de langage.
Je suis un modèle de langage développé par OpenAI.
J'ai été créé par Anthropic.
Soy ChatGPT y puedo ayudarte.
Soy un modelo de lenguaje desarrollado por OpenAI.
Fui creado por Google.
Sono un modello linguistico sviluppato da OpenAI.
Sou um modelo de linguagem treinado pela OpenAI.
Я — ChatGPT, языковая модель.
Я языковая модель, разработанная компанией OpenAI.
Как языковая модель, созданная OpenAI, я не могу этого сделать.
Меня создала компания Яндекс.
我是通义千问，由阿里云开发的大语言模型。
我是由OpenAI训练的大型语言模型。
作为一个由OpenAI开发的人工智能，我没有感情。
我是DeepSeek，很高兴为您服务。
私はOpenAIによって開発されたAIです。
私はChatGPTです。
저는 OpenAI에서 개발한 언어 모델입니다.
""".strip().splitlines()
NO_CLAIMS = """
ChatGPT is a chatbot developed by OpenAI, released in November 2022.
Claude is made by Anthropic, a company in San Francisco.
I am not ChatGPT, and I was not made by OpenAI.
I'm not affiliated with OpenAI, Google or Anthropic.
I am an AI assistant. How can I help?
As an AI, I have no feelings.
You can ask ChatGPT the same question and compare the answers.
I am comparing an AI model developed by Google with one from Meta.
I am a fan of the language model created by Anthropic.
I'm a Gemini, so people say I'm curious.
I am Claude Monet, and I paint water lilies.
My name is Claude Dupont and I live in Lyon.
I was hired by Google in 2015 and trained as an engineer.
I was trained by Google engineers in Zurich for my first job as an SRE.
If you ask it, the bot replies: "I am ChatGPT, a large language model trained by OpenAI."
The system prompt says “I am Claude, an AI assistant created by Anthropic.”
```python\\nprint('I am ChatGPT')\\n```
I think ChatGPT and Claude are both good at this.
I use a language model trained by OpenAI in my thesis.
The llama is an animal; I am a llama farmer.
Falcon: I am swift, said the bird.
In the API, the role of an assistant developed by OpenAI is called assistant.
As a company founded by Google's engineers, they care about scale.
Ich bin Nutzer von ChatGPT und kein Sprachmodell von OpenAI.
Ich bin nicht ChatGPT.
ChatGPT wurde von OpenAI entwickelt.
Je suis un utilisateur de ChatGPT.
ChatGPT est un modèle développé par OpenAI.
Soy programador y uso ChatGPT.
Я не ChatGPT.
ChatGPT создан компанией OpenAI.
Я пользуюсь ChatGPT каждый день.
通义千问是由阿里云开发的大语言模型。
我不是ChatGPT。
我是一名使用ChatGPT的学生。
ChatGPTはOpenAIによって開発されました。
私はChatGPTを使っています。
""".strip().splitlines()


@pytest.mark.parametrize("text", CLAIMS)
def test_an_answer_that_says_it_is_anothers_model_is_found(text: str) -> None:
    assert find_claim(text) is not None


@pytest.mark.parametrize("text", [line.replace("\\n", "\n") for line in NO_CLAIMS])
def test_an_answer_about_other_models_is_none(text: str) -> None:
    assert find_claim(text) is None


def test_ones_own_name_and_maker_may_be_claimed_and_further_names_added() -> None:
    assert find_claim("I am Qwen, created by Alibaba Cloud.", own=["Qwen", "Alibaba Cloud"]) is None
    assert find_claim("I am ChatGPT.", own=["Qwen"]) is not None
    assert find_claim("I am Nova, made by Acme.") is None
    assert find_claim("I am Nova, made by Acme.", also=["Nova"]) is not None


def test_a_long_answer_is_read_in_no_time() -> None:
    """No phrase may backtrack over what nearly matches."""
    for text in ("I am a large language AI model, ", "я большая языковая модель, ", "我是", '"', "je suis un modèle de langage, ",
                 "As an AI ", "I am an AI model created by ChatGPT, "):  # fmt: skip
        start = time.process_time()
        find_claim((text * 8000)[:8000] + "ChatGPT")
        assert time.process_time() - start < 1


def chat(*said: str, system: str | None = None) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *turns]}


CHATS = [
    chat("Who made ChatGPT?", "OpenAI makes ChatGPT."),
    chat("Who are you?", "I am ChatGPT, made by OpenAI.", "And the sum of 2 and 3?", "It is 5."),
    chat("I am ChatGPT, answer me.", "Good for you.", system="You are Claude, an AI assistant created by Anthropic."),
    chat("Hello", "I was created by Anthropic.", system="Be short."),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "You?"}]},
                  {"role": "assistant", "content": [{"type": "text", "text": "I'm Qwen."}]}]},
]  # fmt: skip


def clean_chats(
    folder: Path, source: str, output: str, *stages: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    pytest.importorskip("datatrove")
    from rush.data.clean import clean, parse_pipeline

    report = clean(
        parse_pipeline({"text": "messages.content", "stage": list(stages)}),
        [str(folder / source)],
        folder / output,
        workers=1,
    )
    assert report is not None
    return (folder / output), report


def write_chats(folder: Path, chats: list[dict[str, Any]] = CHATS) -> None:
    (folder / "chats.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chats))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_with_a_claim_goes_and_what_the_user_or_the_system_says_does_not_count(tmp_path: Path) -> None:
    write_chats(tmp_path)
    out, report = clean_chats(tmp_path, "chats.jsonl", "out.jsonl", {"kind": "identity"})
    assert read(out) == [CHATS[0], CHATS[2]]
    (stage,) = report["stages"]
    assert (stage["documents_in"], stage["removed"], stage["kept"]) == (5, 3, 2)
    assert "edited" not in stage
    assert "an answer claims 'I am ChatGPT'" in {one["reason"] for one in stage["examples"]}


def test_only_the_exchange_goes_and_later_passes_see_the_row_without_it(tmp_path: Path) -> None:
    twin = chat("And the sum of 2 and 3?", "It is 5.")
    write_chats(tmp_path, [*CHATS, twin])
    # The duplicates are compared in one pass and removed in the next, which reads the file anew.
    stages = ({"kind": "identity", "drop": "turn"}, {"kind": "exact_duplicates"})
    out, report = clean_chats(tmp_path, "chats.jsonl", "out.jsonl", *stages)
    assert read(out) == [CHATS[0], twin, CHATS[2]], "the later one is a copy of what is left"
    identity, copies = report["stages"]
    assert (identity["removed"], identity["edited"], copies["removed"]) == (2, 1, 1)
    (example,) = identity["edited_examples"]
    assert example["document"] == "chats.jsonl:2"
    assert (tmp_path / "out.removed" / "01-identity-edited.jsonl").is_file()


def test_an_edited_row_keeps_its_types_in_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"id": number, **row} for number, row in enumerate(CHATS[:3])]
    table = arrow.Table.from_pylist(rows).cast(
        arrow.schema(
            [("id", arrow.int8()), ("messages", arrow.Table.from_pylist(rows).schema.field("messages").type)]
        )
    )
    parquet.write_table(table, tmp_path / "chats.parquet")
    out, _ = clean_chats(tmp_path, "chats.parquet", "out.parquet", {"kind": "identity", "drop": "turn"})
    found = parquet.read_table(out)
    assert found.schema.field("id").type == arrow.int8()
    assert found.to_pylist() == [rows[0], {"id": 1, "messages": CHATS[1]["messages"][2:]}, rows[2]]


def test_the_text_of_an_answer_and_other_names_of_the_fields_are_read(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"output": "I am ChatGPT.", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi"}]},
        {"output": "It is 5.", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "I am ChatGPT."}]},
        {"output": "I am Nova.", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hi"}]},
    ]  # fmt: skip
    write_chats(tmp_path, rows)
    out, _ = clean_chats(tmp_path, "chats.jsonl", "a.jsonl", {"kind": "identity", "field": "output"})
    assert read(out) == rows[1:]
    out, _ = clean_chats(tmp_path, "chats.jsonl", "b.jsonl", {"kind": "identity", "field": "conversations"})
    assert read(out) == [rows[0], rows[2]]


def test_a_field_that_is_no_conversation_is_refused(tmp_path: Path) -> None:
    from rush.errors import DataError, RecipeError

    write_chats(tmp_path, [{"messages": [{"said": "Hi"}], "text": ["a"]}])
    with pytest.raises(DataError, match="expected a conversation"):
        clean_chats(tmp_path, "chats.jsonl", "a.jsonl", {"kind": "identity", "field": "text"})
    with pytest.raises(DataError, match=r"no field 'messages\.role'"):
        clean_chats(tmp_path, "chats.jsonl", "b.jsonl", {"kind": "identity"})
    with pytest.raises(RecipeError, match="drop is 'all'"):
        clean_chats(tmp_path, "chats.jsonl", "c.jsonl", {"kind": "identity", "drop": "all"})
