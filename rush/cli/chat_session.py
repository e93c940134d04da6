"""An interactive chat: turns, slash commands, and the switch between adapter and base."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from rush.cli.output import note, write_piece

COMMANDS = {
    "/switch": "toggle between adapter and base (key: Ctrl-T)",
    "/base": "answer with the base, without the adapter",
    "/adapter": "answer with the adapter",
    "/again": "answer the last question again (after /switch: with the other model)",
    "/new": "start a new conversation",
    "/help": "this list",
    "/quit": "exit (as does an empty line, or Ctrl-D)",
}


@dataclass
class ChatSession:
    model: Any
    tokenizer: Any
    encode: Callable[[list[dict[str, str]]], list[int]]
    """From the messages to the prompt's token ids."""
    sampling: dict[str, Any]
    max_tokens: int
    seed: int
    ends: tuple[int, ...]
    """Stop token ids."""
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    turn: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def run(self) -> None:
        """Read and answer lines until the user exits."""
        at_terminal = sys.stdin.isatty()
        if at_terminal:
            bind_key()
            note("Exit with an empty line; /help lists the commands.")
        while True:
            try:
                line = input("you> " if at_terminal else "").strip()
            except EOFError:
                return
            if not line or line == "/quit":
                return
            if line.startswith("/"):
                self.command(line)
                continue
            self.messages.append({"role": "user", "content": line})
            if not self.answer():
                return

    def command(self, line: str) -> None:
        if line in ("/switch", "/base", "/adapter"):
            self.switch(line)
        elif line == "/again":
            while self.messages and self.messages[-1]["role"] == "assistant":
                self.messages.pop()
            if self.messages and self.messages[-1]["role"] == "user":
                self.answer()
            else:
                note("There is no question to answer again yet.")
        elif line == "/new":
            self.reset()
            note("New conversation.")
        else:
            if line != "/help":
                note(f"Unknown command {line!r}; the commands are:")
            for name, meaning in COMMANDS.items():
                note(f"  {name:9} {meaning}")

    def switch(self, line: str) -> None:
        """Switch between adapter and base, from the next answer on."""
        from rush.models.adapters import adapters, set_active

        active = next((adapter.active for _, _, adapter in adapters(self.model)), None)
        if active is None:
            note("This model has no adapter; start with --adapter, or chat with a run that trained one.")
            return
        wanted = not active if line == "/switch" else line == "/adapter"
        set_active(self.model, active=wanted)
        note(f"Now answering with {'the adapter' if wanted else 'the base model'}.")

    def answer(self) -> bool:
        """Stream an answer; False if the conversation no longer fits into the context."""
        from rush.sampling import generate, stream_text

        start = self.encode(self.messages)
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
            write_piece(piece)
        sys.stdout.write("\n")
        self.messages.append({"role": "assistant", "content": text})
        return True


def encoder(tokenizer: Any, template: Any, own: bool) -> Callable[[list[dict[str, str]]], list[int]]:
    """With the training `template`, with the tokenizer's `own` one, or as plain text."""
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
    """Bind Ctrl-T to /switch, where readline is available."""
    if find_spec("readline") is None:
        return
    import readline

    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind -s ^T /switch^M")
    else:
        readline.parse_and_bind(r'"\C-t": "\C-a\C-k/switch\C-m"')
