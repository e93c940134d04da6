"""The story as a page: docs/from-nothing.md and its curves, from the records that story.sh packed.

    python examples/from-nothing/page.py results/from-nothing-h200

Every figure on the page comes from a record in that folder; run it again after the records have changed.
"""

from __future__ import annotations

import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curves import finetuning_curves, pretraining_curve
from records import Records

from rush.files import write_atomic

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def main() -> None:
    folder = Path(sys.argv[1])
    records = Records(folder)
    pictures = ROOT / "docs" / "pictures"
    write_atomic(pictures / "from-nothing-pretrain.svg", pretraining_curve(records) + "\n")
    write_atomic(pictures / "from-nothing-finetune.svg", finetuning_curves(records) + "\n")
    shown = folder.resolve().relative_to(ROOT) if folder.resolve().is_relative_to(ROOT) else Path(folder.name)
    write_atomic(ROOT / "docs" / "from-nothing.md", _page(records, shown))


def _page(records: Records, folder: Path) -> str:
    parts = [
        _opening(records, folder),
        _text_part(records),
        _pretraining_part(records),
        _finetuning_part(records),
        _evaluation_part(records),
        _conversation_part(records),
        _again_part(records),
    ]
    return "\n\n".join(_tidy(part) for part in parts) + "\n"


def _tidy(part: str) -> str:
    """Paragraphs in lines of one length; tables, quotations, headings and code as they are."""
    pieces = re.split(r"(```.*?```)", part.strip(), flags=re.S)
    for at in range(0, len(pieces), 2):
        blocks = pieces[at].split("\n\n")
        pieces[at] = "\n\n".join(
            _filled(block) if re.match(r"\s*[\w`*(]", block) else block for block in blocks
        )
    return "".join(pieces)


def _opening(records: Records, folder: Path) -> str:
    rows = records.rows("pretrain/metrics.jsonl")
    machine = records.value("pretrain/machine.json")
    shares = _accuracy(records, "dpo", "definitions")
    return f"""
# From nothing to a conversation

One GPU, {_minutes(_train_seconds(records))} of training, nothing but `rush` commands, and text that any Debian machine can fetch: a GPT-2 of
124M parameters is pretrained from random weights, killed twice on the way, taught to answer questions, and taught to prefer
right answers to wrong ones. In the end it picks the right one of four definitions of a word in {shares["share"]:.0%} of the cases (chance: 25 %) and
answers questions. It is a small model that has read {rows[-1]["tokens"] / 1e6:,.0f}M tokens, no more: what it says, right or wrong, is
below as it came.

Machine: {_machine_name(machine)}. The scripts are in [examples/from-nothing](../examples/from-nothing), the records in
[{folder}](../{folder}); this page is written from them by `examples/from-nothing/page.py`.

| stage | command | seconds |
| --- | --- | --- |
{_stage_rows(records)}

{records.remarks()}
"""


def _stage_rows(records: Records) -> str:
    """What took how long, by the log of the commands."""
    words = {
        "prepare": ("tokenizer and shards", "rush data prepare"),
        "pretrain-1": ("pretraining, to the first SIGKILL", "rush train gpt2-124m-fp8 …"),
        "pretrain-2": ("resumed, to the second SIGKILL", "rush train … --resume"),
        "pretrain-3": ("resumed, to the end", "rush train … --resume"),
        "sft": ("SFT", "rush train sft.toml"),
        "dpo": ("DPO", "rush train dpo.toml"),
        "chat-dpo": ("a conversation", "rush chat"),
        "export": ("export for transformers", "rush export"),
    }
    seconds = _seconds(records)
    rows = [
        f"| {what} | `{command}` | {seconds[name]} |"
        for name, (what, command) in words.items()
        if name in seconds
    ]
    return "\n".join(rows)


def _seconds(records: Records) -> dict[str, int]:
    found = re.findall(r"# ([\w-]+): (\d+) s", records.text("commands.log"))
    return {name: int(seconds) for name, seconds in found}


def _train_seconds(records: Records) -> int:
    seconds = _seconds(records)
    return sum(seconds.get(name, 0) for name in ("pretrain-1", "pretrain-2", "pretrain-3", "sft", "dpo"))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _machine_name(machine: dict[str, Any]) -> str:
    devices = machine.get("devices") or []
    name = (
        devices[0].get("name")
        if devices and isinstance(devices[0], dict)
        else machine.get("cpu", machine.get("device"))
    )
    return f"{name}, torch {machine.get('versions', {}).get('torch', machine.get('torch', ''))}".strip(", ")


def _text_part(records: Records) -> str:
    packages = tomllib.loads((HERE / "packages.toml").read_text())
    counted = records.value("gathered/packages.json")
    rows = [
        f"| `{entry.get('package', name)}` | {entry['about']} | {entry['licence']} | {counted[name]['bytes'] / 1e6:.1f} |"
        for name, entry in packages.items()
        if name in counted
    ]
    stages = [
        f"| {pipeline} | {stage['name']} | {stage['removed']:,} of {stage['documents_in']:,} |"
        for pipeline in ("words", "prose")
        for stage in records.value(f"gathered/{pipeline}.json")
    ]
    corpus = records.value("evaluations/corpus.json")
    train, held = (corpus["splits"][split] for split in ("train", "validation"))
    rows_, stages_ = "\n".join(rows), "\n".join(stages)
    return f"""
## The text

`gather.py` downloads packages from Debian's archive (`apt-get download`, nothing is installed) and turns dictionaries, books, manuals
and games into plain documents. Only scripts and records are in this repository, not the texts; each has its own licence:

| package | what it is | licence | MB of text |
| --- | --- | --- | --- |
{rows_}

`rush data clean` removed what is too short, what only names other packages, copies and near copies:

| pipeline | stage | removed |
| --- | --- | --- |
{stages_}

Beside them stand the Python sources of torch, as they are installed. `rush data prepare` trained a byte-level BPE of
{corpus["vocab_size"]:,} entries on the first 64 MB and wrote {train["tokens"]:,} tokens to train on and {held["tokens"]:,} held out.
"""


def _pretraining_part(records: Records) -> str:
    rows = records.rows("pretrain/metrics.jsonl")
    recipe = records.recipe("pretrain")
    corpus = records.value("evaluations/corpus.json")
    epochs = rows[-1]["tokens"] / corpus["splits"]["train"]["tokens"]
    held = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    steady = sorted(row["tokens_per_s"] for row in rows)[len(rows) // 2]
    return f"""
## Pretraining

The ready recipe `{recipe["model"]["name"]}-fp8` with its own techniques, at {recipe["batch"]["total_tokens"]:,} tokens a step instead of 524,288: so
short a run needs more steps rather than larger ones. {rows[-1]["step"]:,} steps, a learning rate of {recipe["optimizer"]["lr"]:g} with
{recipe["schedule"]["warmup"]} steps of warm-up and a cosine down to a tenth. {rows[-1]["tokens"]:,} tokens are {epochs:.1f} times the text. Up
to four repetitions are nearly as good as new text, and beyond that the gain shrinks (Muennighoff et al. 2023, arXiv:2305.16264).
Half of all steps ran at {steady:,.0f} tokens/s or more. The held-out loss went from {held[0]:.3f} at the first validation to {held[-1]:.3f}.{_overfit_words(rows)}

![Loss of pretraining](pictures/from-nothing-pretrain.svg)

{_kill_words(records, rows)}

What the model wrote after the prompt "{recipe["run"]["sample_prompt"]}", as it learned:

{_samples(records, "pretrain")}

And at the end, by `rush generate`:

{_written(records)}
"""


def _overfit_words(rows: Sequence[dict[str, Any]]) -> str:
    """A sentence if the held-out loss had been lower before the end."""
    validated = [row for row in rows if row.get("val_loss") is not None]
    lowest = min(validated, key=lambda row: row["val_loss"])
    if lowest is validated[-1]:
        return ""
    return (
        f" It was lowest at step {lowest['step']:,}, with {lowest['val_loss']:.3f}: from there on the model memorized the text. "
        "The GPU had time for more text than there was."
    )


def _kill_words(records: Records, rows: Sequence[dict[str, Any]]) -> str:
    again = {row["step"]: row for row in rows}
    words = []
    for number, lost in enumerate(records.kills(), 1):
        if not lost:
            continue
        apart = max(abs(row["loss"] - again[row["step"]]["loss"]) for row in lost)
        equal = sum(row["loss"] == again[row["step"]]["loss"] for row in lost)
        words.append(
            f"SIGKILL {number} came after step {lost[-1]['step']:,}; the run resumed from the checkpoint of step "
            f"{lost[0]['step'] - 1:,} and made {len(lost)} steps again. {equal} of their losses were equal to the last bit, the "
            f"largest difference was {apart:.2g}."
        )
    return "**Killed twice.** " + " ".join(words) if words else ""


def _samples(records: Records, run: str) -> str:
    rows = records.rows(f"{run}/samples.jsonl")
    kept = [rows[at] for at in sorted({0, len(rows) // 3, len(rows) - 1})] if rows else []
    return "\n\n".join(f"Step {row['step']:,}:\n\n{_quoted(row['text'], 420)}" for row in kept)


def _written(records: Records) -> str:
    names = sorted(path.name for path in (records.folder / "evaluations").glob("wrote-*.txt"))
    return "\n\n".join(_quoted(records.text(f"evaluations/{name}"), 420) for name in names)


def _finetuning_part(records: Records) -> str:
    sft, dpo = records.rows("sft/metrics.jsonl"), records.rows("dpo/metrics.jsonl")
    settings = {run: records.recipe(run) for run in ("sft", "dpo")}
    before, after = (_held(rows) for rows in (sft, dpo))
    margin = next((row["reward_margin"] for row in reversed(dpo) if "reward_margin" in row), None)
    margin_text = "" if margin is None else f" The reward margin ended at {margin:.2f}."
    return f"""
## Fine-tuning

`questions.py` makes conversations out of WordNet's senses (what a word means, a synonym, the opposite, a sentence, what it is a kind of;
often in two turns), FOLDOC, the Devil's Dictionary, the chemical elements, manual pages, package descriptions, Python's
docstrings and a little small talk. A twentieth of the words is never asked about. (Their entries are in the pretraining text.)

**SFT** ([sft.toml](../examples/from-nothing/sft.toml)): {sft[-1]["step"]:,} steps of up to {settings["sft"]["batch"]["total_tokens"]:,} tokens at a learning rate of
{settings["sft"]["optimizer"]["lr"]:g}; held-out loss {before[0]:.3f} → {before[-1]:.3f}.

**DPO** ([dpo.toml](../examples/from-nothing/dpo.toml)): the right definition is preferred to another word's, to one that repeats
itself and to one that breaks off. {dpo[-1]["step"]:,} steps at a learning rate of {settings["dpo"]["optimizer"]["lr"]:g}; held-out loss
{after[0]:.3f} → {after[-1]:.3f} (0.693 is indifference).{margin_text}

![Losses of SFT and DPO](pictures/from-nothing-finetune.svg)
"""


def _held(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["val_loss"] for row in rows if row.get("val_loss") is not None] or [float("nan")]


def _accuracy(records: Records, run: str, task: str) -> dict[str, float]:
    found: dict[str, float] = records.value(f"evaluations/{run}-{task}.json")["models"][-1]["choices"][
        "acc_norm"
    ]
    return found


def _evaluation_part(records: Records) -> str:
    lines = []
    for task, words in (
        ("definitions", "which of four definitions is the word's"),
        ("synonyms", "which of four words means the same"),
    ):
        cells = [_share(_accuracy(records, run, task)) for run in ("pretrain", "sft", "dpo")]
        lines.append(f"| {words} (acc_norm; chance 25 %) | {' | '.join(cells)} |")
    asked = records.value("evaluations/sft-questions.json")["models"]
    after = records.value("evaluations/dpo-questions.json")["models"][-1]
    losses = [asked[0]["held_out"]["loss"], asked[1]["held_out"]["loss"], after["held_out"]["loss"]]
    lines.append(
        "| loss of the right answers to held-out questions | "
        + " | ".join(f"{loss:.3f}" for loss in losses)
        + " |"
    )
    pairs = records.value("evaluations/dpo-pairs.json")["models"]
    for key, words in (
        ("by_sum", "the right answer wins over the wrong one, whole answer"),
        ("by_token", "the same, per token"),
    ):
        cells = [_share(model["wins"][key]) for model in pairs]
        lines.append(f"| {words} | | {' | '.join(cells)} |")
    change = pairs[1]["wins"]["change_by_sum"]
    logits = records.value("evaluations/logits.json")
    table = "\n".join(lines)
    return f"""
## Evaluation

All of it about words that fine-tuning never asked about, by `rush evaluate`; in brackets the 95 % interval:

| | pretrained | after SFT | after DPO |
| --- | --- | --- | --- |
{table}

On the same {change["count"]:,} pairs DPO won {change["won"]:g} and lost {change["lost"]:g}: {100 * change["change"]:+.1f} points
[{100 * change["low"]:+.1f}, {100 * change["high"]:+.1f}], by the probability of the whole answer.

The same held-out questions, answered with the likeliest token each time by the pretrained model, which knows of no questions, and
after SFT:

{_answers(records)}

`rush export` writes the model for transformers. Its logits there and here differ by at most {logits["largest_difference"]:.1e} (the largest
logit is {logits["largest_logit"]:.0f}), both in fp32.
"""


def _answers(records: Records) -> str:
    rows = ["| question | pretrained | after SFT |", "| --- | --- | --- |"]
    for said in records.value("evaluations/sft-questions.json")["answers"][:5]:
        turns = re.split(r"<\|endoftext\|>|User:|Assistant:", said["prompt"])
        question = next((turn.strip() for turn in reversed(turns) if turn.strip()), "")
        rows.append("| " + " | ".join(_cell(text) for text in (question, *said["texts"])) + " |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return textwrap.shorten(text.replace("|", "\\|"), 160, placeholder=" …") or "(nothing)"


def _share(found: dict[str, float]) -> str:
    return f"{found['share']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _conversation_part(records: Records) -> str:
    return f"""
## The conversation

`rush chat runs/from-nothing/dpo --temperature 0`, typed by a script, nothing left out. The English words that are
asked about are held-out ones; `/new` forgets what was said before.

```text
{_chat(records, "dpo")}
```

The same after SFT alone:

```text
{_chat(records, "sft")}
```
"""


def _chat(records: Records, run: str) -> str:
    lines = records.text(f"evaluations/chat-{run}.txt").splitlines()
    said = [
        line
        for line in lines
        if not line.startswith(
            ("$ ", "Leave with", "Exit with", "The conversation is forgotten", "New conversation")
        )
    ]
    return "\n".join(wrapped for line in said for wrapped in (textwrap.wrap(line, 118) or [""]))


def _again_part(records: Records) -> str:
    commands = [line[2:] for line in records.text("commands.log").splitlines() if line.startswith("$ ")]
    shown = "\n".join(_broken(line) for line in dict.fromkeys(commands) if not line.endswith("--json"))
    return f"""
## Once more

```sh
bash examples/from-nothing/text.sh                        # Debian or Ubuntu, network: build/from-nothing/packed
bash examples/from-nothing/story.sh prepare pretrain      # on the GPU machine
bash examples/from-nothing/story.sh finetune
TINY=1 bash examples/from-nothing/story.sh …              # a rehearsal on a CPU
```

The commands of this run, as its log has them (evaluations left out):

```sh
{shown}
```
"""


def _broken(command: str) -> str:
    """A command in lines that a shell reads as one; what is quoted stays whole."""
    lines = [""]
    for word in re.findall(r"(?:'[^']*'|[^\s'])+", command):
        if len(lines[-1]) + len(word) > 112 and lines[-1]:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _quoted(text: str, most: int) -> str:
    text = text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} …"
    lines = [wrapped for line in text.splitlines() for wrapped in (textwrap.wrap(line, 116) or [""])]
    return "\n".join(f"> {line}".rstrip() + ("  " if line else "") for line in lines)


def _filled(text: str) -> str:
    lines = textwrap.wrap(text, 118, break_on_hyphens=False, break_long_words=False)
    start = re.match(r"\n*", text)
    return (start[0] if start else "") + "\n".join(lines)


if __name__ == "__main__":
    main()
