"""The story as a page: docs/from-nothing.md and its curves, from the records that story.sh packed.

    python examples/from-nothing/page.py results/from-nothing-h200

Every figure on the page comes from a record in that folder; run it again after the records have changed.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rush.files import write_atomic
from rush.report.axes import Frame, x_axis, y_axis
from rush.report.svg import Scale, path, picture, tag, ticks, widened

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
FRAME = Frame(1040, 380, left=64, right=20, top=34, bottom=44)
STYLE = """
svg { font: 13px -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
.paper { fill: #fcfbf8; } text { fill: #22262b; } .tick, .axis-title, .note { fill: #565e68; font-size: 12px; }
.grid { stroke: #dedad1; } .axis { stroke: #565e68; } path { fill: none; stroke-width: 1.6; }
.train { stroke: #9bbbe0; } .held { stroke: #2f6db3; stroke-width: 2.2; } .kill { stroke: #a82c2c; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  .paper { fill: #14171b; } text { fill: #e6e4de; } .tick, .axis-title, .note { fill: #a5adb8; } .grid { stroke: #343a43; }
  .train { stroke: #3f618a; } .held { stroke: #6ba3e0; } .kill { stroke: #f39a92; }
}
"""


class Records:
    """What the run left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

    def value(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())

    def text(self, name: str) -> str:
        return (self.folder / name).read_text().strip()

    def recipe(self, run: str) -> dict[str, Any]:
        return tomllib.loads(self.text(f"{run}/recipe.toml"))

    def kills(self) -> list[list[dict[str, Any]]]:
        return [self.rows(f"kills/{number}.jsonl") for number in (1, 2)]


def main() -> None:
    folder = Path(sys.argv[1])
    records = Records(folder)
    pictures = ROOT / "docs" / "pictures"
    write_atomic(pictures / "from-nothing-pretrain.svg", _pretraining_curve(records) + "\n")
    write_atomic(pictures / "from-nothing-finetune.svg", _finetuning_curves(records) + "\n")
    shown = folder.resolve().relative_to(ROOT) if folder.resolve().is_relative_to(ROOT) else Path(folder.name)
    write_atomic(ROOT / "docs" / "from-nothing.md", _page(records, shown))


# --- curves ---------------------------------------------------------------------------------------------------------


def _pretraining_curve(records: Records) -> str:
    rows = records.rows("pretrain/metrics.jsonl")
    marks = _losses(
        FRAME, rows, "tokens", lambda value: f"{value / 1e6:g}M", "tokens trained on", log_x=False
    )
    tokens = {row["step"]: row["tokens"] for row in rows}
    x = _x_scale(FRAME, rows, "tokens")
    for number, lost in enumerate(records.kills(), 1):
        if lost:
            at = x(tokens[lost[-1]["step"]])
            marks.append(tag("line", class_="kill", x1=at, x2=at, y1=FRAME.top, y2=FRAME.y_end))
            marks.append(tag("text", f"SIGKILL {number}", class_="note", x=at + 5, y=FRAME.top + 12))
    return _drawn(FRAME, f"Loss of pretraining over {rows[-1]['tokens']:,} tokens, with two kills.", marks)


def _finetuning_curves(records: Records) -> str:
    height = FRAME.height
    sft = _losses(FRAME, records.rows("sft/metrics.jsonl"), "step", lambda value: f"{value:g}", "step of SFT")
    dpo = _losses(FRAME, records.rows("dpo/metrics.jsonl"), "step", lambda value: f"{value:g}", "step of DPO")
    lower = tag("g", *dpo, transform=f"translate(0 {height:g})")
    whole = Frame(FRAME.width, 2 * height)
    return _drawn(whole, "Losses of SFT (above) and of DPO (below).", [*sft, lower])


def _x_scale(frame: Frame, rows: Sequence[dict[str, Any]], key: str) -> Scale:
    return Scale(0, rows[-1][key], frame.left, frame.x_end)


def _losses(
    frame: Frame, rows: Sequence[dict[str, Any]], key: str, label: Any, title: str, log_x: bool = False
) -> list[Markup]:
    """The training loss of every step, and the held-out loss over it."""
    drawn = rows[max(1, len(rows) // 50) :] or rows  # the fall of the first steps would flatten the rest
    held = [(row[key], row["val_loss"]) for row in drawn if row.get("val_loss") is not None]
    low, high = widened([row["loss"] for row in drawn] + [loss for _, loss in held])
    x, y = _x_scale(frame, rows, key), Scale(low, high, frame.y_end, frame.top)
    marks = y_axis(
        frame, y, ticks(low, high, 5), lambda value: f"{value:g}", "loss: each step (pale), held out (dark)"
    )
    marks += x_axis(frame, x, ticks(0, rows[-1][key], 8), label, title)
    marks.append(tag("path", class_="train", d=path([(x(row[key]), y(row["loss"])) for row in drawn])))
    if held:
        marks.append(tag("path", class_="held", d=path([(x(at), y(loss)) for at, loss in held])))
    return marks


def _drawn(frame: Frame, alt: str, marks: Sequence[Markup]) -> str:
    paper = tag("rect", class_="paper", width=frame.width, height=frame.height, rx=8)
    return str(
        picture(
            alt, tag("style", Markup(STYLE)), paper, *marks,
            xmlns="http://www.w3.org/2000/svg", viewBox=frame.view_box, width=frame.width, height=frame.height,
        )
    )  # fmt: skip


# --- the page -------------------------------------------------------------------------------------------------------


def _page(records: Records, folder: Path) -> str:
    parts = [
        _opening(records, folder),
        _text_part(records),
        _pretraining_part(records),
        _finetuning_part(records),
        _evaluation_part(records),
        _conversation_part(records),
        _again_part(records, folder),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _opening(records: Records, folder: Path) -> str:
    rows = records.rows("pretrain/metrics.jsonl")
    machine = records.value("pretrain/machine.json")
    shares = _accuracy(records, "dpo", "definitions")
    return f"""
# From nothing to a conversation

One GPU, {_minutes(_train_seconds(records))} of training, nothing but `rush` commands, and text that any Debian machine can fetch: a GPT-2 of
124M parameters is pretrained from random weights, killed twice on the way, taught to answer questions, and taught to prefer
right answers to wrong ones. In the end it tells four definitions of a word apart in {shares["share"]:.0%} of the cases (chance: 25 %) and
holds a small conversation. It is a small model of {rows[-1]["tokens"] / 1e6:,.0f}M tokens, no more: what it says about words is often
right and often nonsense, and this page shows both.

Machine: {_machine_name(machine)}. The scripts are in [examples/from-nothing](../examples/from-nothing), the records in
[{folder}](../{folder}); this page is written from them by `examples/from-nothing/page.py`.

| stage | command | seconds |
| --- | --- | --- |
{_stage_rows(records)}
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
        f"| {pipeline} | {stage['name']} | {stage['removed']:,} of {stage['documents']:,} |"
        for pipeline in ("words", "prose")
        for stage in records.value(f"gathered/{pipeline}.json")["stages"]
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
Half of all steps ran at {steady:,.0f} tokens/s or more. The held-out loss went from {held[0]:.3f} at the first validation to {held[-1]:.3f}.

![Loss of pretraining](pictures/from-nothing-pretrain.svg)

{_kill_words(records, rows)}

What the model wrote after the prompt "{recipe["run"]["sample_prompt"]}", as it learned:

{_samples(records, "pretrain")}

And at the end, by `rush generate`:

{_written(records)}
"""


def _kill_words(records: Records, rows: Sequence[dict[str, Any]]) -> str:
    again = {row["step"]: row for row in rows}
    words = []
    for number, lost in enumerate(records.kills(), 1):
        if not lost:
            continue
        apart = max(abs(row["loss"] - again[row["step"]]["loss"]) for row in lost)
        equal = sum(row["loss"] == again[row["step"]]["loss"] for row in lost)
        words.append(
            f"SIGKILL {number} came after step {lost[-1]['step']:,}; the run went on from the checkpoint of step "
            f"{lost[0]['step'] - 1:,} and made {len(lost)} steps again. {equal} of their losses were equal to the last bit, the "
            f"largest difference was {apart:.2g}."
        )
    return _filled("**Killed twice.** " + " ".join(words)) if words else ""


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
    told = "" if margin is None else f" The reward margin ended at {margin:.2f}."
    return f"""
## Fine-tuning

`questions.py` makes conversations out of WordNet's senses (what a word means, a synonym, the opposite, a sentence, what it is a kind of;
often in two turns), FOLDOC, the Devil's Dictionary, the chemical elements, manual pages, package descriptions, Python's
docstrings and a little small talk. A twentieth of the words is never asked about. (Their entries are in the pretraining text.)

**SFT** ([sft.toml](../examples/from-nothing/sft.toml)): {sft[-1]["step"]:,} steps of up to {settings["sft"]["batch"]["total_tokens"]:,} tokens at a learning rate of
{settings["sft"]["optimizer"]["lr"]:g}; held-out loss {before[0]:.3f} → {before[-1]:.3f}.

**DPO** ([dpo.toml](../examples/from-nothing/dpo.toml)): the right definition is preferred to another word's, to one that repeats
itself and to one that breaks off. {dpo[-1]["step"]:,} steps at a learning rate of {settings["dpo"]["optimizer"]["lr"]:g}; held-out loss
{after[0]:.3f} → {after[-1]:.3f} (0.693 is indifference).{told}

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

`rush export` writes the model for transformers. Its logits there and here differ by at most {logits["largest_difference"]:.1e} (the largest
logit is {logits["largest_logit"]:.0f}), both in fp32.
"""


def _share(found: dict[str, float]) -> str:
    return f"{found['share']:.1%} [{found['low']:.1%}, {found['high']:.1%}]"


def _conversation_part(records: Records) -> str:
    return f"""
## The conversation

`rush chat runs/from-nothing/dpo --temperature 0`, typed by a script, nothing left out. The words that are asked about
are held-out ones; `/new` forgets what was said before.

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
        line for line in lines if not line.startswith(("$ ", "Leave with", "The conversation is forgotten"))
    ]
    return "\n".join(wrapped for line in said for wrapped in (textwrap.wrap(line, 118) or [""]))


def _again_part(records: Records, folder: Path) -> str:
    commands = [line for line in records.text("commands.log").splitlines() if line.startswith("$ ")]
    shown = "\n".join(textwrap.shorten(line, 400) for line in commands if "--json" not in line)
    wrapped = "\n".join(
        " \\\n    ".join(textwrap.wrap(line, 112, break_on_hyphens=False, break_long_words=False))
        for line in shown.splitlines()
    )
    return f"""
## Once more

```sh
bash examples/from-nothing/text.sh                        # Debian or Ubuntu, network: build/from-nothing/packed
bash examples/from-nothing/story.sh prepare pretrain      # on the GPU machine
bash examples/from-nothing/story.sh finetune
TINY=1 bash examples/from-nothing/story.sh …              # a rehearsal on a CPU
```

The commands of this run, as its log has them:

```sh
{wrapped}
```
"""


def _quoted(text: str, most: int) -> str:
    text = text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} …"
    lines = [wrapped for line in text.splitlines() for wrapped in (textwrap.wrap(line, 116) or [""])]
    return "\n".join(f"> {line}".rstrip() + ("  " if line else "") for line in lines)


def _filled(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120, break_on_hyphens=False))


if __name__ == "__main__":
    main()
