"""`rush generate` and `rush chat`: hear what a model has learned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rush.cli.output import Json, note, print_json

Folder = Annotated[Path, typer.Argument(help="A run folder or a Hugging Face folder.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token; higher is wilder.")]
TopK = Annotated[int, typer.Option(help="Choose among the k likeliest tokens; 0 among all.")]
TopP = Annotated[float, typer.Option(help="Choose among the likeliest tokens that make up this probability.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same text.")]
Checkpoint = Annotated[
    str,
    typer.Option(help="Of the run (the adapter's, where --adapter is one): last, best, or a step's number."),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Adapter = Annotated[
    Path | None,
    typer.Option(help="An adapter to put on: PEFT's folder, or a run that trained one on this base."),
]
Offload = Annotated[
    Literal["none", "cpu", "disk"],
    typer.Option(
        help="Keep the layers in host memory or on disk and bring in one at a time: for models larger than the GPU."
    ),
]


def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Option(help="The text to go on from.")] = "",
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="A token that ends the text, besides the end of text and, of a chat model, of a turn."
        ),
    ] = None,
    seed: Seed = 1337,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    adapter: Adapter = None,
    offload: Offload = "none",
    json: Json = False,
) -> None:
    """Continue a prompt, streaming the text as it comes.

    Example: rush generate runs/tiny --prompt 'def ' --temperature 0.7

    Example: rush generate models/llama-3.1-8b --offload disk --prompt 'Once'
    """
    from rush.errors import RecipeError
    from rush.generate import generate as generate_ids
    from rush.generate import stream_text
    from rush.hub.tokenizers import text_ends

    model, tokenizer = _open(folder, checkpoint, device, adapter, offload)
    stop_ids = set(text_ends(folder, tokenizer, model.shape.vocab_size))
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
    adapter: Adapter = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    template: Annotated[
        str,
        typer.Option(
            help="How a conversation is written: auto (as the run was trained, or the tokenizer's own), a name (chatml, "
            "llama-3, plain), or none (continue the text as it stands)."
        ),
    ] = "auto",
    max_tokens: MaxTokens = 400,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    seed: Seed = 1337,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    offload: Offload = "none",
) -> None:
    """Talk with a model, turn by turn, through its chat template.

    With an adapter (--adapter, or a run that trained one), /switch or Ctrl-T changes between it and the base, and /again
    answers the last question once more. A base model without a template just continues the text. Leave with
    an empty line or Ctrl-D.

    Example: rush chat runs/sft-lora

    Example: rush chat models/llama-3.1-8b --adapter adapters/mine --offload cpu
    """
    from dataclasses import replace

    from rush.cli.chatting import Chat, writer
    from rush.hub.answers import answer_ends
    from rush.hub.tokenizers import text_ends

    model, tokenizer = _open(folder, checkpoint, device, adapter, offload)
    chosen = _template(template, folder, adapter, tokenizer)
    own = template == "auto" and tokenizer.chat_template is not None
    if chosen is None and not own:
        note("This tokenizer has no chat template: the model continues your text as it stands.")
    written = tokenizer if chosen is None else replace(tokenizer, chat_template=chosen.source)
    ends = {*answer_ends(written), *text_ends(folder, written, model.shape.vocab_size)}
    Chat(
        model=model,
        tokenizer=tokenizer,
        write=writer(tokenizer, chosen, own),
        sampling={"temperature": temperature, "top_k": top_k or None, "top_p": top_p},
        max_tokens=max_tokens,
        seed=seed,
        ends=tuple(end for end in ends if end < model.shape.vocab_size),
        system=system,
    ).talk()


def _template(name: str, folder: Path, adapter: Path | None, tokenizer: Any) -> Any:
    """The template asked for, or the one a run was trained with; None where neither is."""
    from rush.data.conversations import find_template
    from rush.recipe_io import load_recipe
    from rush.records.run_folder import RunFolder

    if name not in ("auto", "none"):
        return find_template(name, tokenizer)
    for path in (adapter, folder) if name == "auto" else ():
        run = None if path is None else RunFolder(path)
        recipe = load_recipe(str(run.recipe)) if run is not None and run.recipe.is_file() else None
        if recipe is not None and recipe.objective.kind != "lm":
            return find_template(recipe.data.template, tokenizer)
    return None


def _open(folder: Path, checkpoint: str, device: str, adapter: Path | None, offload: str) -> tuple[Any, Any]:
    from rush.hardware import probe
    from rush.hub.folders import load_model
    from rush.hub.tokenizers import adapted_tokenizer

    machine = probe(device)
    model = load_model(
        folder, checkpoint=checkpoint, device=machine.device, adapter=adapter, offload=offload, note=note
    )
    return model, adapted_tokenizer(folder, adapter, model.shape.vocab_size, note)
