"""A conversation at the terminal: turns, the few commands between them, and the switch from adapter to base."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from rush.cli.output import note

COMMANDS = {
    "/switch": "change between the adapter and the base without it (key: Ctrl-T)",
    "/base": "answer with the base, without the adapter",
    "/adapter": "answer with the adapter",
    "/again": "answer the last question once more (with /switch: the other's answer)",
    "/new": "forget the conversation",
    "/help": "this list",
    "/quit": "leave (as does an empty line, or Ctrl-D)",
}


@dataclass
class Chat:
    """What a chat needs to answer, and the conversation so far."""

    model: Any
    tokenizer: Any
    write: Callable[[list[dict[str, str]]], list[int]]
    """How a conversation is written: its messages as the tokens to go on from."""
    sampling: dict[str, Any]
    max_tokens: int
    seed: int
    ends: tuple[int, ...]
    """Tokens that end an answer."""
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def talk(self) -> None:
        """Read lines until there is nothing more to say."""
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            bind_key()
            note("Leave with an empty line; /help lists the commands.")
        while True:
            try:
                line = input("you> " if at_terminal else "").strip()
            except EOFError:
                return
            if not line or line == "/quit":
                return
            if line.startswith("/"):
                self.obey(line)
                continue
            self.messages.append({"role": "user", "content": line})
            if not self.answer():
                return

    def obey(self, line: str) -> None:
        if line in ("/switch", "/base", "/adapter"):
            self.switch(line)
        elif line == "/again":
            while self.messages and self.messages[-1]["role"] == "assistant":
                self.messages.pop()
            if self.messages and self.messages[-1]["role"] == "user":
                self.answer()
            else:
                note("There is no question yet to answer again.")
        elif line == "/new":
            self.forget()
            note("The conversation is forgotten.")
        else:
            if line != "/help":
                note(f"There is no command {line!r}; these are:")
            for name, meaning in COMMANDS.items():
                note(f"  {name:9} {meaning}")

    def switch(self, line: str) -> None:
        """Adapter or base, from the next answer on."""
        from rush.models.adapters import adapters, set_active

        active = next((adapter.active for _, _, adapter in adapters(self.model)), None)
        if active is None:
            note(
                "This model has no adapter beside its base; start with --adapter, or chat with a run that trained one."
            )
            return
        wanted = not active if line == "/switch" else line == "/adapter"
        set_active(self.model, active=wanted)
        note(f"Now answering: {'base and adapter' if wanted else 'the base alone'}.")

    def answer(self) -> bool:
        """Stream an answer to the conversation so far; False where it no longer fits into the context."""
        from rush.generate import generate, stream_text

        start = self.write(self.messages)
        room = self.model.shape.context - len(start)
        if room <= 0:
            note(f"The conversation fills the model's {self.model.shape.context} tokens; start again.")
            return False
        ids = generate(
            self.model,
            start,
            max_new_tokens=min(self.max_tokens, room),
            stop_ids=self.ends,
            seed=self.seed + self.turn,
            **self.sampling,
        )
        self.turn += 1
        text = ""
        for piece in stream_text(self.tokenizer.decode, ids):
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        self.messages.append({"role": "assistant", "content": text})
        return True


def writer(tokenizer: Any, template: Any, own: bool) -> Callable[[list[dict[str, str]]], list[int]]:
    """As training wrote conversations (`template`), by the tokenizer's `own` template, or the plain text so far."""
    from rush.data.conversations import Conversation, encode_prompt

    def trained(messages: list[dict[str, str]]) -> list[int]:
        return list(encode_prompt(Conversation.of(messages), tokenizer, template))

    def rendered(messages: list[dict[str, str]]) -> list[int]:
        return list(tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt=True)))

    def plain(messages: list[dict[str, str]]) -> list[int]:
        ends = {"system": "", "user": "\n", "assistant": ""}
        return list(
            tokenizer.encode("".join(message["content"] + ends[message["role"]] for message in messages))
        )

    return trained if template is not None else rendered if own else plain


def bind_key() -> None:
    """Ctrl-T enters /switch, where the terminal's line editor can be told so."""
    if find_spec("readline") is None:
        return
    import readline

    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind -s ^T /switch^M")
    else:
        readline.parse_and_bind(r'"\C-t": "\C-a\C-k/switch\C-m"')
