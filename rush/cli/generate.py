"""`rush generate` and `rush chat`: text from a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rush.cli.options import Device, Json, ModelFolder
from rush.cli.output import note, print_json, write_piece

MaxTokens = Annotated[int, typer.Option(help="Maximum new tokens.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Top-k sampling; 0 samples from all tokens.")]
TopP = Annotated[float, typer.Option(help="Top-p (nucleus) sampling.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Checkpoint = Annotated[
    str,
    typer.Option(
        help="Checkpoint of the run (the adapter's, where --adapter is a run): last, best, or a step."
    ),
]
Adapter = Annotated[
    Path | None,
    typer.Option(help="Adapter to load: a PEFT folder, or a run that trained one on this base."),
]
Offload = Annotated[
    Literal["none", "cpu", "disk"],
    typer.Option(
        help="Keep the layers in host memory or on disk and load one at a time, for models larger than the GPU."
    ),
]


def generate(
    folder: ModelFolder,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "",
    max_tokens: MaxTokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 50,
    top_p: TopP = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="An additional stop token, besides the end-of-text and end-of-turn tokens. May be repeated."
        ),
    ] = None,
    seed: Seed = 1337,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    adapter: Adapter = None,
    offload: Offload = "none",
    json: Json = False,
) -> None:
    """Continue a prompt, streaming the text.

    Example: rush generate runs/tiny --prompt 'def ' --temperature 0.7

    Example: rush generate models/llama-3.1-8b --offload disk --prompt 'Once'
    """
    from rush.api import generate as continue_prompt

    said = continue_prompt(
        folder,
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=stop or [],
        seed=seed,
        checkpoint=checkpoint,
        device=device,
        adapter=adapter,
        offload=offload,
        show=None if json else write_piece,
        note=note,
    )
    if json:
        print_json({"prompt": prompt, "text": said.text, "tokens": said.tokens})
    else:
        sys.stdout.write("\n")


def chat(
    folder: ModelFolder,
    adapter: Adapter = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    template: Annotated[
        str,
        typer.Option(
            help="Chat template: auto (the one the run was trained with, or the tokenizer's own), a name (chatml, llama-3, "
            "plain), or none (continue the text unchanged)."
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
    """Chat with a model, turn by turn, through its chat template.

    With an adapter (--adapter, or a run that trained one), /switch or Ctrl-T toggles between adapter and base, and /again
    answers the last question again. A base model without a chat template continues the text. Exit with an empty line or
    Ctrl-D.

    Example: rush chat runs/sft-lora

    Example: rush chat models/llama-3.1-8b --adapter adapters/mine --offload cpu
    """
    from dataclasses import replace

    from rush.api import open_model
    from rush.cli.chat_session import ChatSession, encoder
    from rush.hub.answers import answer_stop_ids
    from rush.hub.tokenizers import text_stop_ids

    model, tokenizer = open_model(folder, checkpoint, device, adapter, offload, note)
    chosen = _template(template, folder, adapter, tokenizer)
    own = template == "auto" and tokenizer.chat_template is not None
    if chosen is None and not own:
        note("This tokenizer has no chat template: the model continues your text unchanged.")
    written = tokenizer if chosen is None else replace(tokenizer, chat_template=chosen.source)
    ends = {*answer_stop_ids(written), *text_stop_ids(folder, written, model.shape.vocab_size)}
    ChatSession(
        model=model,
        tokenizer=tokenizer,
        encode=encoder(tokenizer, chosen, own),
        sampling={"temperature": temperature, "top_k": top_k or None, "top_p": top_p},
        max_tokens=max_tokens,
        seed=seed,
        ends=tuple(end for end in ends if end < model.shape.vocab_size),
        system=system,
    ).run()


def _template(name: str, folder: Path, adapter: Path | None, tokenizer: Any) -> Any:
    """The requested template, or the one the run was trained with; None if there is neither."""
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
