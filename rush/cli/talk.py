"""`rush generate` and `rush chat`: hear what a model has learned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rush.cli.output import Json, note, print_json

Folder = Annotated[Path, typer.Argument(help="A run folder or a Hugging Face folder.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; higher is wilder.")]
TopK = Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 among all.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest tokens that make up this probability.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Checkpoint = Annotated[str, typer.Option(help="Of a run: last, best, or a step's number.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="A token that ends the text, besides the end of text.")
    ] = None,
    seed: Seed = 1337,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Continue a prompt, streaming the text as it comes.

    Example: rush generate runs/tiny --prompt 'def ' --temperature 0.7
    """
    from rush.errors import RecipeError
    from rush.generate import generate as generate_ids
    from rush.generate import stream_text

    model, tokenizer = _open(folder, checkpoint, device)
    stop_ids = {tokenizer.eos_id}
    for word in stop or []:
        ids = tokenizer.encode(word)
        if len(ids) != 1:
            raise RecipeError(
                f"--stop {word!r} is {len(ids)} tokens for this tokenizer; give text that is one token."
            )
        stop_ids.add(ids[0])
    start = tokenizer.encode(prompt) or [
        tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    ]
    ids = generate_ids(
        model,
        start,
        max_new_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k or None,
        top_p=top_p,
        stop_ids=tuple(stop_ids),
        seed=seed,
    )
    if json:
        written = list(ids)
        text = tokenizer.decode(written)
        print_json({"prompt": prompt, "text": text, "tokens": written})
        return
    sys.stdout.write(prompt)
    for piece in stream_text(tokenizer.decode, ids):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def chat(
    folder: Folder,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = 400,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    seed: Seed = 1337,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
) -> None:
    """Talk with a model, turn by turn, through its tokenizer's chat template.

    A base model without a template just continues the text. Leave with an empty line or Ctrl-D.
    """
    from rush.generate import generate as generate_ids
    from rush.generate import stream_text

    model, tokenizer = _open(folder, checkpoint, device)
    templated = tokenizer.chat_template is not None
    if not templated:
        note("This tokenizer has no chat template: the model continues your text as it stands.")
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    plain = system or ""
    for turn in range(sys.maxsize):
        try:
            line = input("you> " if sys.stdin.isatty() else "")
        except EOFError:
            break
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        plain += line if templated else line + "\n"
        text = tokenizer.render_chat(messages, add_generation_prompt=True) if templated else plain
        start = tokenizer.encode(text)
        room = model.shape.context - len(start)
        if room <= 0:
            note(f"The conversation fills the model's {model.shape.context} tokens; start again.")
            break
        ids = generate_ids(
            model,
            start,
            max_new_tokens=min(max_tokens, room),
            temperature=temperature,
            top_k=top_k or None,
            top_p=top_p,
            stop_ids=tuple(_ends(tokenizer)),
            seed=seed + turn,
        )
        answer = ""
        for piece in stream_text(tokenizer.decode, ids):
            answer += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": answer})
        plain += answer


def _ends(tokenizer: Any) -> set[int]:
    """Tokens that end an answer: end of text, and the usual end-of-turn marks where the tokenizer has them."""
    marks = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
    return {
        tokenizer.eos_id,
        *(tokenizer.special_ids[mark] for mark in marks if mark in tokenizer.special_ids),
    }


def _open(folder: Path, checkpoint: str, device: str) -> tuple[Any, Any]:
    from rush.hardware import probe
    from rush.train.folders import load_model, load_tokenizer

    machine = probe(device)
    return load_model(folder, checkpoint=checkpoint, device=machine.device, note=note), load_tokenizer(folder)
