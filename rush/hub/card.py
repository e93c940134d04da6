"""The model card of an upload: base model, data, training, results, and what was verified.

Everything comes from the run's own records. A card is public, so it names no path, host or user: files are named without their
folders, a base on this machine by the last part of its path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.data.hub_client import parse_id
from rush.data.sources import find_dataset
from rush.errors import DataError
from rush.files import parse_json
from rush.models import Shape, count_parameters
from rush.recipe import Recipe, tracker_name
from rush.recipe_io import changed, load_recipe, write_toml
from rush.records.ladder import read_ladder
from rush.records.life import life_words
from rush.records.metrics import MetricsRow, read_rows
from rush.records.run_folder import RunFolder
from rush.techniques import registry

CURVE_ROWS = 12


@dataclass(frozen=True)
class Card:
    """The content of a card."""

    title: str
    """OWNER/NAME, or a name."""
    shape: Shape | None
    """None for an adapter without its run."""
    adapter: bool = False
    license: str | None = None
    recipe: Recipe | None = None
    """The recipe of the run, made shareable; None for a folder that is no run."""
    step: int | None = None
    """The checkpoint that was exported."""
    rows: Sequence[MetricsRow] = ()
    machine: str = ""
    base: str | None = None
    """OWNER/NAME on the hub, or a name."""
    verified: Sequence[tuple[str, str, str, str]] = ()
    """Technique, parity, evidence, life."""
    verified_on: str = ""
    evaluation: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        parts = [
            _front_matter(self),
            f"# {self.title.split('/')[-1]}\n\n{_opening(self)}",
            _use(self),
            _training(self),
            _curve(self),
            _evaluated(self),
            _verification(self),
            _recipe(self),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"


def card_of(
    folder: Path,
    title: str,
    shape: Shape | None,
    *,
    step: int | None = None,
    adapter: bool = False,
    license: str | None = None,
    base: str | None = None,
    record: Path | None = None,
    evaluation: Path | None = None,
) -> Card:
    """The card of a run, or of another folder, whose records are not known."""
    run = RunFolder(folder)
    shown = _read_evaluation(evaluation) if evaluation is not None else {}
    if not run.recipe.is_file():
        return Card(title, shape, adapter=adapter, license=license, base=base, evaluation=shown)
    whole = load_recipe(str(run.recipe))
    named = base if base is not None else public_base(whole.model.init_from)
    verified, where = _verified(whole, record) if record is not None else ([], "")
    return Card(
        title,
        shape,
        adapter=adapter,
        license=license,
        recipe=shareable_recipe(whole),
        step=step,
        rows=list(read_rows(run.metrics, MetricsRow)) if run.metrics.is_file() else [],
        machine=_machine(run.machine),
        base=named,
        verified=verified,
        verified_on=where,
        evaluation=shown,
    )


def public_base(named: str | None) -> str | None:
    """The base of a run without private paths: an id unchanged, of a path the last part."""
    if named is None:
        return None
    repo = parse_id(named)
    return Path(named).name if repo is None else str(repo)


def shareable_recipe(recipe: Recipe) -> Recipe:
    """The recipe without folders of this machine and without the project it was logged to."""
    data = recipe.data
    values: dict[str, Any] = {
        "data.files": [Path(name).name for name in data.files],
        "data.source": f"hub:{Path(data.source).name}" if "hub:/" in data.source else data.source,
    }
    if recipe.model.init_from is not None:
        values["model.init_from"] = public_base(recipe.model.init_from)
    if data.tokenizer.startswith(("/", "~", ".")) or data.tokenizer.count("/") > 1:
        values["data.tokenizer"] = Path(data.tokenizer).name
    quiet = recipe.run.model_copy(update={"trackers": [tracker_name(entry) for entry in recipe.run.trackers]})
    return changed(recipe.model_copy(update={"run": quiet}), values)


# --- the parts -----------------------------------------------------------------------------------


def _front_matter(card: Card) -> str:
    """The table that the hub reads."""
    repo = None if card.base is None else parse_id(card.base)
    dataset = None if card.recipe is None or card.recipe.data.files else _dataset(card.recipe.data.source)
    lines = [
        "---",
        f"library_name: {'peft' if card.adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"license: {json.dumps(card.license)}"] if card.license else []),
        *([f"base_model: {json.dumps(repo.name)}"] if repo is not None else []),
        *(["datasets:", f"- {json.dumps(dataset)}"] if dataset else []),
        "tags:",
        "- optimization-rush",
        "---",
    ]
    return "\n".join(lines)


def _dataset(source: str) -> str | None:
    from rush.data.conversations.rows import HUB_CONVERSATIONS

    found = find_dataset(HUB_CONVERSATIONS.get(source.split("@")[0], source))
    return None if found is None or found.local else found.name


def _opening(card: Card) -> str:
    family = (
        ""
        if card.shape is None
        else f" of the {card.shape.family} family with {count_parameters(card.shape):,} parameters"
    )
    what = {"lm": "pretrained", "sft": "fine-tuned on conversations", "dpo": "trained on preferences"}
    how = "" if card.recipe is None else f", {what[card.recipe.objective.kind]}"
    start = "from random weights" if card.base is None else f"from `{card.base}`"
    kind = "An adapter (LoRA) for a model" if card.adapter else "A model"
    begun = f" {start}" if card.recipe is not None or card.base is not None else ""
    return (
        f"{kind}{family}{how}{begun}, by "
        "[Optimization Rush](https://github.com/optimization-rush/optimization-rush)."
    )


def _use(card: Card) -> str:
    base = card.base if card.base is not None and parse_id(card.base) else "BASE"
    name, _, revision = base.partition("@")
    at = f', revision="{revision}"' if revision else ""
    if card.adapter:
        code = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{name}"{at})\n'
            f'model = PeftModel.from_pretrained(base, "{card.title}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{card.title}")'
        )
    else:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{card.title}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{card.title}")'
        )
    return f"## Use\n\n```python\n{code}\n```"


def _training(card: Card) -> str:
    recipe = card.recipe
    if recipe is None:
        return ""
    data = recipe.data
    last = card.rows[-1] if card.rows else None
    files = f" ({', '.join(data.files[:5])}{' …' if len(data.files) > 5 else ''})" if data.files else ""
    facts = {
        "data": f"`{data.source}`{files}; {data.validation:.1%} of the documents held out",
        "tokenizer": f"`{data.tokenizer}`",
        "objective": recipe.objective.kind,
        "checkpoint": None if card.step is None else f"step {card.step:,} of {recipe.schedule.steps or 0:,}",
        "batch": f"{' → '.join(f'{size:,}' for size in recipe.step_sizes)} tokens a step, sequences of {recipe.batch.sequence:,}",
        "tokens": f"{last['tokens']:,}" if last and "tokens" in last else None,
        "passes over the data": f"{last['epoch']:.3g}" if last and "epoch" in last else None,
        "learning rate": f"{recipe.optimizer.lr:g}, {recipe.schedule.kind}, warm-up of {recipe.schedule.warmup:g}",
        "techniques": ", ".join(f"`{name}`" for name, _ in recipe.technique_uses()) or "none",
        "devices": f"{recipe.world} × {card.machine}" if card.machine else None,
    }
    return "## Training\n\n" + _table(["", ""], [[key, value] for key, value in facts.items() if value])


def _curve(card: Card) -> str:
    """The loss, at a dozen steps."""
    rows = [row for row in card.rows if isinstance(row.get("loss"), float)]
    if not rows:
        return ""
    marks = {round(index * (len(rows) - 1) / (CURVE_ROWS - 1)) for index in range(CURVE_ROWS)}
    marks |= {index for index, row in enumerate(rows) if "val_loss" in row} if len(rows) < 10_000 else set()
    chosen = sorted(marks) if len(marks) <= 2 * CURVE_ROWS else sorted(marks)[:: len(marks) // CURVE_ROWS]
    chosen = sorted({*chosen, len(rows) - 1})
    table = [
        [f"{rows[i]['step']:,}", f"{rows[i]['loss']:.4f}", _number(rows[i].get("val_loss"))] for i in chosen
    ]
    return "## Loss\n\n" + _table(["step", "training loss", "held-out loss"], table)


def _evaluated(card: Card) -> str:
    held_out = [row["val_loss"] for row in card.rows if isinstance(row.get("val_loss"), float)]
    lines = []
    if held_out:
        lines.append(
            f"Held-out loss during training: {held_out[-1]:.4f} at the last validation, {min(held_out):.4f} at the lowest."
        )
    models = card.evaluation.get("models") or []
    for model in models[-1:]:
        shown = {
            f"{part} {key}": value
            for part in ("held_out", "wins", "choices")
            for key, value in (model.get(part) or {}).items()
            if isinstance(value, int | float)
        }
        table = [
            [name.replace("_", " "), f"{value:,.4f}".rstrip("0").rstrip(".")] for name, value in shown.items()
        ]
        lines.append("By `rush evaluate`:\n\n" + _table(["", ""], table))
    return "## Evaluation\n\n" + "\n\n".join(lines) if lines else ""


def _verification(card: Card) -> str:
    if card.recipe is None:
        return ""
    known = registry()
    lines = ["Every file of the checkpoint was compared with its SHA-256 when it was exported."]
    promised = [
        [f"`{name}`", known[name].parity.value if name in known else "not known"]
        for name, _ in card.recipe.technique_uses()
    ]
    if card.verified:
        table = [[f"`{name}`", *rest] for name, *rest in card.verified]
        lines.append(f"Measured on {card.verified_on}, each technique against plain fp32:")
        lines.append(_table(["technique", "parity", "took effect", "life"], table))
    elif promised:
        lines.append("What each technique promises against plain fp32; it was not measured for this card:")
        lines.append(_table(["technique", "parity"], promised))
    return "## Verified\n\n" + "\n\n".join(lines)


def _recipe(card: Card) -> str:
    if card.recipe is None:
        return ""
    return f"## Recipe\n\n```toml\n{write_toml(card.recipe)}```"


# --- records -------------------------------------------------------------------------------------


def _verified(recipe: Recipe, record: Path) -> tuple[list[tuple[str, str, str, str]], str]:
    """A ladder's findings about the techniques of a recipe: parity, evidence and life."""
    ladder = read_ladder(record / "ladder.json" if record.is_dir() else record)
    names = [name for name, _ in recipe.technique_uses()]
    found: dict[str, tuple[str, str, str, str]] = {}
    for rung in ladder["rungs"]:
        for seen in rung["evidence"]:
            name = str(seen.get("technique", ""))
            if name in names and name not in found and seen.get("took_effect") is not None:
                parity = (rung.get("parity") or {}).get("verdict", "not judged")
                effect = "yes" if seen["took_effect"] else "no"
                found[name] = (name, str(parity), effect, life_words(rung.get("life")))
    return [found.get(name, (name, "not measured", "", "")) for name in names], _device(ladder["machine"])


def _machine(path: Path) -> str:
    try:
        return _device(parse_json(path.read_bytes()))
    except (OSError, ValueError):
        return ""


def _device(machine: Any) -> str:
    """The name of the device, a product name; the card contains nothing else about the machine."""
    devices = machine.get("devices") if isinstance(machine, dict) else None
    name = devices[0].get("name") if isinstance(devices, list) and devices else None
    return str(name) if name else ""


def _read_evaluation(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not what `rush evaluate --json` writes: {error}.") from None
    if not isinstance(found, dict) or not isinstance(found.get("models"), list):
        raise DataError(f"{path} is not what `rush evaluate --json` writes: it has no models.")
    return found


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )
