"""First-person claims of another maker's identity: "As an AI developed by OpenAI", "I'm Claude", "我是通义千问".

Collected answers contain the name of the model that wrote them, and a model fine-tuned on them claims to be
that model. A claim is a sentence in the first person in which the speaker states what they are, or who made
them. A question about ChatGPT, an explanation of who makes Claude, "I am not ChatGPT", a quotation and code
are not claims. Some names are also common words or names of people (Claude, Gemini, Falcon): they count only
if the answer begins with them, or if "an AI", "a language model" or similar follows. A phrase that is not in
the list is missed; the list covers English, German, French, Spanish, Italian, Portuguese, Russian, Chinese,
Japanese and Korean.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

MAKERS = (
    "OpenAI", "Open AI", "Anthropic", "Google DeepMind", "Google AI", "Google", "DeepMind", "Meta AI", "Meta", "Facebook", "Microsoft",
    "Mistral AI", "Mistral", "Alibaba Cloud", "Alibaba Group", "Alibaba", "DeepSeek", "深度求索", "阿里云", "阿里巴巴", "通义实验室", "xAI",
    "Cohere", "AI21 Labs", "Amazon", "Baidu", "百度", "Tencent", "腾讯", "ByteDance", "字节跳动", "Zhipu AI", "智谱", "Moonshot AI", "月之暗面",
    "MiniMax", "01.AI", "零一万物", "Yandex", "Яндексом", "Яндекс", "Sber", "Сбером", "Сбер", "IBM", "NVIDIA", "Databricks", "LMSYS",
    "Hugging Face", "Stability AI", "Technology Innovation Institute", "Perplexity", "Inflection AI", "Nous Research",
)  # fmt: skip
NAMES = (
    "ChatGPT", "Chat GPT", r"GPT-?[345]\w*(?:[.-]\w+)*", "Qwen", r"Qwen-?\d[\w.-]*", "QwQ", "Tongyi Qianwen", "通义千问", "千问", "文心一言",
    "ERNIE Bot", "ChatGLM", "智谱清言", "豆包", "Doubao", "Kimi", "混元", "DeepSeek", r"DeepSeek-\w[\w.-]*", "YandexGPT", "GigaChat", "Mixtral",
    "GitHub Copilot", "Microsoft Copilot", "Bing Chat", "Google Bard", "Google Assistant", "Google Gemini", "Claude AI", r"Claude [\d.]+\w*",
    "Meta AI", r"Llama[ -]?\d[\w.-]*", r"Gemma[ -]?\d\w*", "Open Assistant", "HuggingChat", "Command R",
)  # fmt: skip
WORDS_TOO = (
    "Claude", "Gemini", "Bard", "Llama", "Gemma", "Grok", "Mistral", "Copilot", "Falcon", "Vicuna", "Alpaca", "Alexa", "Cortana", "Siri",
    "Phi", "Granite", "Nemotron", "Baichuan", "Bing",
)  # fmt: skip
"""Names that are also common words or names of people."""

QUOTED = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`|^\s*>.*$|\"[^\"\n]{0,400}\"|“[^”\n]{0,400}”|«[^»\n]{0,400}»|„[^“”\n]{0,400}[“”]|「[^」\n]{0,400}」"
    r"|『[^』\n]{0,400}』|(?<!\w)'[^'\n]{0,400}'(?!\w)|(?<!\w)‘[^’\n]{0,400}’(?!\w)",
    re.DOTALL | re.MULTILINE,
)
"""Quotations and code."""

GREETING = r"(?:(?:hello|hi|hey|greetings|hallo|guten tag|bonjour|salut|¡?hola|ciao|olá|oi|привет|здравствуйте|你好|您好|こんにちは|안녕하세요)\b[^.!?。！？\n]{0,20}[,.!?。！？、 ]+|(?:sure|yes|well|of course)[,.!] )?"  # fmt: skip

ADJECTIVES = (
    r"(?:(?:large|big|small|helpful|friendly|powerful|advanced|conversational|virtual|digital|multimodal|open|generative|artificial|"
    r"intelligence|intelligent|language|AI|A\.I\.|text|based|chat|personal|computer|neural|pre-?trained|machine|learning)[ -])*"
)
NOUN = (
    r"(?:AI|A\.I\.|artificial intelligence|language model|model|assistant|chat ?bot|bot|program|system|LLM)"
)
MADE = r"(?:developed|created|made|trained|built|designed|produced|programmed|engineered|fine-tuned|provided)"
TEAM = r"(?:(?:the )?(?:company|team|researchers|engineers|developers|people|folks)(?: at| of| from)? )?"

# {N}: a name that is nothing else. {W}: one that is also a word. {M}: a maker. Each pattern is one way to say it.
ENGLISH = (
    rf"\bI(?: am|['’]m) (?:(?:actually|really|just|simply|indeed|only) )?(?:(?:an?|the) )?{ADJECTIVES}(?:{NOUN} )?(?:called |named |known as )?"
    rf"(?:{{M}}['’]s )?{ADJECTIVES}{{N}}",
    rf"\bI(?: am|['’]m) (?:{{M}}['’]s )?{{W}}[,:]? (?:an?|the|your|{{M}}['’]s) {ADJECTIVES}{NOUN}\b",
    rf"\bI(?: am|['’]m) {{W}}[,:]? (?:\w+ )?{MADE} by {TEAM}{{M}}",
    rf"\bI(?: am|['’]m) (?:(?:just|only|simply) )?(?:an?|the) {ADJECTIVES}{NOUN},? (?:(?:that|which) (?:was|is|has been) )?(?:called|named|known as) {{W}}",
    rf"\bI(?: am|['’]m| was) (?:(?:just|only|simply) )?(?:an?|the) {ADJECTIVES}{NOUN}(?:,? (?:called|named|known as) [\w. \ue000-\ue004-]{{1,30}})?,? "
    rf"(?:(?:that|which) (?:was|is|has been|have been) )?{MADE} (?:and \w+ )?by {TEAM}{{M}}",
    rf"\bI(?: am|['’]m) (?:an?|the) {{M}} {ADJECTIVES}{NOUN}\b|\bI(?: am|['’]m) {{M}}['’]s {ADJECTIVES}{NOUN}\b",
    rf"\bAs (?:an?|the) {ADJECTIVES}{NOUN}(?:,? (?:called|named|known as) [\w. \ue000-\ue004-]{{1,30}})?,? (?:(?:that|which) (?:was|is|has been) )?{MADE} (?:and \w+ )?"
    rf"by {TEAM}{{M}}",
    rf"\bAs {{M}}['’]s {ADJECTIVES}{NOUN}\b|\bAs {{N}}, I\b|\bAs {{W}}, an? {ADJECTIVES}{NOUN}\b",
    rf"\bI (?:was|have been|am|['’]ve been) (?:originally )?(?:developed|created|built|designed|programmed|engineered) (?:and \w+ )?by {TEAM}{{M}}",
    rf"\bI (?:was|have been|am) (?:originally )?(?:trained|made|fine-tuned) (?:and \w+ )?by {TEAM}{{M}}(?=\s*(?:[.!?,;:]|$|to (?:assist|help|be|answer)|as an? AI))",
    rf"\bmy (?:creators?|developers?|makers?|programmers?)(?: is| are|,| at) {TEAM}{{M}}|{{M}},? (?:who|which|that) (?:created|developed|trained|made|built) me\b",
    r"{M} (?:has )?(?:created|developed|trained|made|built|designed|programmed) me\b",
    r"\bmy name is {N}|\bmy name is {W}[,.]? (?:and )?(?:I(?: am|['’]m) )?(?:an?|your) "
    + ADJECTIVES
    + NOUN
    + r"\b",
    r"\byou(?: are|['’]re) (?:talking|chatting|speaking) (?:to|with) {N}",
    r"^\s*" + GREETING + r"(?:I(?: am|['’]m)|my name is) {W}(?=\s*(?:[.!,;:—–]|$))",
)
OTHERS = (
    # German
    r"\bich (?:bin|heiße) (?:ein(?:e)? )?(?:(?:KI|großes|KI-basiertes)[ -])?(?:Sprachmodell |Assistent |Chatbot )?(?:namens )?{N}",
    r"\b(?:ich bin|als) ein(?:e)? (?:\w+[ -]){0,3}?(?:KI|KI-\w+|Sprachmodell|Assistent|Modell|Chatbot),? (?:(?:das|der|die) )?von (?:der Firma )?{M} \w*(?:entwickelt|trainiert|erstellt|geschaffen)",
    r"\bich (?:wurde|bin) von (?:der Firma )?{M} \w*(?:entwickelt|trainiert|erstellt|geschaffen|programmiert)",
    r"\bich bin {W}, (?:ein|eine|der|die|das) (?:\w+[ -]){0,2}?(?:KI|KI-\w+|Sprachmodell|Assistent|Chatbot)",
    # French
    r"\bje (?:suis|m['’]appelle) (?:un (?:modèle|assistant)[\w' -]{0,30} (?:appelé|nommé) )?{N}",
    r"\b(?:je suis|en tant qu['’])\s?(?:une? )?(?:(?:grand|assistant|modèle|IA|intelligence|artificielle|de|langage|linguistique|virtuel|conversationnel)[ ,]*){1,6}(?:qui a été )?(?:développé|créé|entraîné|conçu|formé)e? par {M}",
    r"\bj['’]ai été (?:développé|créé|entraîné|conçu|formé)e? par {M}",
    r"\bje suis {W}, (?:un|une|l['’]) ?(?:assistant|modèle|IA|intelligence artificielle)",
    # Spanish
    r"\b(?:yo )?(?:soy|me llamo) (?:un (?:modelo|asistente)[\w ]{0,30} llamado )?{N}",
    r"\b(?:soy|como) (?:una? )?(?:(?:gran|modelo|asistente|IA|inteligencia|artificial|de|lenguaje|virtual)[ ,]*){1,6}(?:que fue )?(?:desarrollad|cread|entrenad|diseñad)[oa] por {M}",
    r"\bfui (?:desarrollad|cread|entrenad|diseñad)[oa] por {M}",
    r"\bsoy {W}, (?:un|una|el|la) (?:asistente|modelo|IA|inteligencia artificial)",
    # Italian
    r"\b(?:io )?(?:sono|mi chiamo) (?:un (?:modello|assistente)[\w ]{0,30} (?:chiamato|di nome) )?{N}",
    r"\b(?:sono|in quanto|come) (?:una? |un['’])?(?:(?:grande|modello|assistente|IA|intelligenza|artificiale|di|linguaggio|linguistico|virtuale)[ ,]*){1,6}(?:sviluppat|creat|addestrat)[oa] da {M}",
    r"\bsono stat[oa] (?:sviluppat|creat|addestrat)[oa] da {M}",
    # Portuguese
    r"\b(?:eu )?(?:sou|me chamo) (?:o |um (?:modelo|assistente)[\w ]{0,30} chamado )?{N}",
    r"\b(?:sou|como) (?:uma? )?(?:(?:grande|modelo|assistente|IA|inteligência|artificial|de|linguagem|virtual)[ ,]*){1,6}(?:desenvolvid|criad|treinad)[oa] (?:por|pela|pelo) {M}",
    r"\bfui (?:desenvolvid|criad|treinad)[oa] (?:por|pela|pelo) {M}",
    # Russian
    r"(?<!\w)(?:я|меня зовут)\s*[—–-]?\s*(?:(?:большая |языковая |нейросетевая )*(?:модель|нейросеть|ассистент|чат-бот|ИИ),? )?{N}",
    r"(?<!\w)(?:я\s*[—–-]?|как|будучи)\s*(?:(?:большая|большой|языковая|языковой|нейросетевая|виртуальный|искусственный|интеллект\w*|ИИ|модель\w*|моделью|нейросеть\w*|ассистент\w*|помощник\w*|чат-бот\w*)[ ,-]*){1,5}(?:разработан|создан|обучен|созданн|разработанн|обученн)\w* (?:компанией |командой )?{M}",
    r"(?<!\w)(?:меня (?:создал|разработал|обучил)[аи]?|я был[ао]? (?:создан|разработан|обучен)[ао]?) (?:компани\w+ |команд\w+ )?{M}",
    r"(?<!\w)я\s*[—–-]?\s*{W}, (?:\w+ ){0,2}?(?:ИИ|модель|ассистент|помощник|нейросеть)",
    # Chinese
    r"(?:我是|我叫|我的名字是|作为)(?:一个|一款)?(?:名为|叫做)?(?:由?{M}(?:公司)?(?:开发|研发|训练|创建|推出|打造)?的?)?(?:大型|人工智能|AI|语言模型|大模型|助手|，|,|\s)*{N}",
    r"(?:我是|作为)(?:一个|一款|一种)?由\s?{M}(?:公司)?(?:独立|自主)?(?:开发|研发|训练|创建|推出|打造|创造)",
    r"我(?:是|由)[^。！？\n]{0,12}{M}(?:公司)?(?:开发|研发|训练|创建|推出|打造|创造)",
    r"我是\s?{W}[，,、](?:一个|一款|由|{M})",
    # Japanese
    r"(?:私|わたし|僕)は[、\s]?(?:{M}(?:社)?(?:が|によって|により)(?:開発|作成|訓練|作ら)[^。\n]{0,20}|{N}(?:です|と申します|といいます))",
    # Korean
    r"(?:저는|나는)\s?(?:{M}(?:에서|가|이|에 의해)\s?(?:개발|만든|훈련|학습)|{N}(?:입니다|이에요|예요|라고))",
)  # fmt: skip


# A name is replaced by one character before the phrases are tried, so they stay short, whatever the names are.
NAME, WORD, MAKER, NAME_AND_MAKER, WORD_AND_MAKER = "\ue000\ue001\ue002\ue003\ue004"
SIGNS = {
    "{N}": f"[{NAME}{NAME_AND_MAKER}]",
    "{W}": f"[{WORD}{WORD_AND_MAKER}]",
    "{M}": f"[{MAKER}{NAME_AND_MAKER}{WORD_AND_MAKER}]",
}
SIGN = re.compile("[\ue000-\ue004]")


@functools.cache
def phrases() -> re.Pattern[str]:
    """All patterns."""
    written = "|".join(f"(?:{phrase})" for phrase in (*ENGLISH, *OTHERS))
    for sign, characters in SIGNS.items():
        written = written.replace(sign, characters)
    return re.compile(written, re.IGNORECASE)


@functools.cache
def names(
    own: tuple[str, ...], also: tuple[str, ...]
) -> tuple[re.Pattern[str], tuple[tuple[re.Pattern[str], str], ...]]:
    """An expression for every name except the user's own, and the placeholder of each."""
    signs: dict[str, str] = {}
    for sign, listed in (
        (WORD, WORDS_TOO),
        (MAKER, MAKERS),
        (NAME, NAMES),
        (NAME_AND_MAKER, map(re.escape, also)),
    ):
        for name in listed:
            both = {WORD: WORD_AND_MAKER, NAME: NAME_AND_MAKER}
            known = signs.get(name)
            signs[name] = (
                both.get(known, sign)
                if known and sign == MAKER
                else NAME_AND_MAKER
                if known == MAKER
                else sign
            )
    kept = [name for name in signs if not any(re.fullmatch(name, word, re.IGNORECASE) for word in own)]
    # A name ends where a word ends; Chinese and Japanese write on without a space.
    longest = sorted(kept, key=len, reverse=True)
    written = (rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])" if name.isascii() else name for name in longest)
    each = tuple((re.compile(name, re.IGNORECASE), signs[name]) for name in longest)
    return re.compile("|".join(written), re.IGNORECASE), each


@functools.cache
def stems(own: tuple[str, ...], also: tuple[str, ...]) -> tuple[str, ...]:
    """Prefixes of all names. Most answers contain none of them, and this check is a hundred times faster."""
    _, each = names(own, also)
    plain = {re.sub(r".(?=\?)|[\\\[(?].*", "", name.pattern).casefold() for name, _ in each}
    return tuple(sorted(plain, key=len))


def find_claim(text: str, own: Sequence[str] = (), also: Sequence[str] = ()) -> str | None:
    """The text in which an answer claims to be another maker's model; None if it does not."""
    any_name, each = names(tuple(own), tuple(also))
    folded = text.casefold()
    if not any(stem in folded for stem in stems(tuple(own), tuple(also))):
        return None
    text = SIGN.sub(" ", text)
    replaced: list[str] = []

    def sign(found: re.Match[str]) -> str:
        replaced.append(found.group())
        return next(sign for name, sign in each if name.fullmatch(found.group()))

    said = any_name.sub(sign, QUOTED.sub(" … ", text))
    found = phrases().search(said)
    if found is None:
        return None
    written = iter(replaced[len(SIGN.findall(said[: found.start()])) :])
    return SIGN.sub(lambda _: next(written), found.group()).strip()
