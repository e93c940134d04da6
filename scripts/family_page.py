"""Write docs/families.md from the families' own files, the techniques' requirements, and results/families.json.

`--measure` compares every family with transformers first, at its tiny size on a CPU, and writes the errors to that file.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from rush.hardware import Machine, probe  # noqa: E402
from rush.hub.config import config_from_shape  # noqa: E402
from rush.hub.weights import load_hf_folder, save_hf_folder  # noqa: E402
from rush.models import SIZES, Shape, build_model  # noqa: E402
from rush.models.families import FAMILIES, Family  # noqa: E402
from rush.recipe import Recipe  # noqa: E402
from rush.recipe_io import load_recipe  # noqa: E402
from rush.techniques import registry  # noqa: E402

PAGE, FIGURES = ROOT / "docs" / "families.md", ROOT / "results" / "families.json"
LAYOUTS = ("tp", "cp", "pp", "fsdp", "ddp")

HEAD = """# Families

A family of models is one file of data in `rush/models/families`: how its `config.json` maps to a shape and back, how its weights
are named, what its blocks have. The plain model is one decoder with slots; a family fills some of them. A `model_type` that is
not here is refused with the nearest one. (This page is written by `scripts/family_page.py`.)

"""
TAIL = """
## Limits

- RoPE scaling: `linear`, `llama3`, `yarn` (with its attention factor) and `longrope` are computed as transformers does. `dynamic`
  is refused: its frequencies change while a text grows.
- LongRoPE has other angles in rows longer than its original context. Generation reads the text again when it grows past that.
- A Gemma 3 with its vision tower (`model_type` gemma3) is read as its text model, and exported as `gemma3_text`.
- PEFT adapters of Phi-3 and Phi-4 are neither read nor written: PEFT adapts stored tensors that hold several of our layers.
  Merge instead (`rush merge`).
- `model.shape` may set what a family's config can express; anything else is refused, because an exported model would be another.

## Adding a family

1. Write a file in `rush/models/families` with a `FAMILY`. Most are Llama with a few differences: start from `qwen3.py` (a norm and
   its names), `granite.py` (numbers of its own) or `phi3.py` (several layers in one stored tensor). `Structure` says what all its
   models have; `read` returns fields of a `Shape` from a config, `write` the config of a shape. Settings that change the
   result and that rush does not have belong into `supported`, so that they are refused by name.
2. Add its published sizes and a tiny one to `rush/models/sizes.py`, and a small, odd shape to `tests/models/small_models.py`.
3. Run `pytest tests/models tests/hub`: logits and gradients against transformers, export and back, generation with a cache.
4. Run `python scripts/family_page.py --measure`.

A feature that no family has yet is a field of `Structure` or `Shape`, a slot in `rush/models/llama.py` or `decoder.py`, its
parameters in `counts.py`, and its bytes in `rush/plan/memory.py`; techniques ask the shape for it in their `requires`.
"""


def features(family: Family, shape: Shape) -> str:
    """What a family has besides RMSNorm before sublayers, RoPE, SwiGLU and grouped-query attention."""
    own = family.structure
    found = [
        ("LayerNorm", own.norm == "layer"),
        ("norms before and after sublayers", own.norm_position == "both"),
        ("norms after sublayers only", own.norm_position == "after"),
        ("norms with 1 + weight", own.norm_offset),
        ("learned positions", own.learned_positions),
        ("one layer for queries, keys and values", own.joined_qkv),
        ("biases", own.biases == "all"),
        ("biases of queries, keys and values", own.biases == "qkv"),
        ("RMSNorm of each head's queries and keys", own.qk_norm == "head"),
        ("RMSNorm of all queries and all keys", own.qk_norm == "width"),
        ("GELU without a gate", not own.gated_mlp),
        ("gated GELU", own.gated_mlp and own.activation == "gelu"),
        ("embeddings × √hidden", own.embedding_by_width),
        ("sliding windows in some layers", shape.has_windows and False in shape.window_layers),
        ("a sliding window", shape.has_windows and False not in shape.window_layers),
        ("another theta in layers with a window", shape.local_rope_theta is not None),
        ("soft caps of scores and logits", shape.attention_softcap is not None),
        ("partial RoPE", shape.rotary_dim is not None),
        ("layers without RoPE", False in shape.rope_layers),
        ("multipliers of embeddings, residuals, scores and logits", shape.residual_scale is not None),
        ("fused tensors in its files", bool(family.joined)),
    ]
    return ", ".join(text for text, there in found if there) or "—"


def sizes_of(family: str) -> list[str]:
    return [name for name, shape in SIZES.items() if shape.family == family]


def tiny_of(family: str) -> str:
    return next(name for name in sizes_of(family) if name.endswith("tiny"))


def _recipe(size: str, technique: str) -> Recipe:
    layout = [f"layout.{technique}=2"] if technique in LAYOUTS else []
    layout += ["batch.micro=1", "batch.sequence=256", "batch.total_tokens=none"]
    named = [f"techniques=['amp_bf16', '{technique}']"] if technique not in ("amp_bf16", *LAYOUTS) else []
    return load_recipe("llama-tiny", [f"model.name={size}", *layout, *named])


def _gpu() -> Machine:
    """A machine that has what techniques need, so that only the model decides."""
    here = probe("cpu")
    device = dataclasses.replace(here.devices[0], capability=(9, 0))
    return dataclasses.replace(here, device="cuda", devices=(device,), triton="3.0")


def refusals(size: str) -> Iterator[tuple[str, str]]:
    """Techniques that this model cannot have and a Llama can, with their sentences."""
    machine = _gpu()
    for name, technique in registry().items():
        for requirement in technique.requires:
            known = requirement.met(machine, _recipe("llama-3.2-1b", name))
            if known and not requirement.met(machine, _recipe(size, name)):
                yield name, requirement.message


def measure() -> dict[str, dict[str, float]]:
    return {name: _errors(SIZES[tiny_of(name)]) | {"plan": _plan_error(tiny_of(name))} for name in FAMILIES}


def _plan_error(size: str) -> float:
    """The planner's error in what autograd keeps for the backward pass: the largest of plain fp32, autocast and LoRA."""
    from rush.plan.spec import spec_of
    from tests.plan.test_plan_memory import kept_by_forward, planned, recipe_of

    recipes = [recipe_of(size, *techniques) for techniques in ((), ("amp_bf16",), ("lora",))]
    return max(abs(planned(spec_of(one, "cpu")) / kept_by_forward(one) - 1) for one in recipes)


def _errors(shape: Shape) -> dict[str, float]:
    """The largest differences to transformers, relative to the largest value, in fp32 on a CPU."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**config_from_shape(shape))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    rows = torch.randint(0, shape.vocab_size, (2, 129))
    tokens, labels = rows[:, :-1], rows[:, 1:]
    with tempfile.TemporaryDirectory() as folder:
        ours = _imported(theirs, Path(folder) / "in", shape)
        save_hf_folder(Path(folder) / "out", ours, shape)
        again = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "out", attn_implementation="eager"
        )
        with torch.no_grad():
            wanted, found = theirs(tokens).logits, ours(tokens)
            exported = again.eval()(tokens).logits
        ours(tokens, labels).backward()
        loss = torch.nn.functional.cross_entropy(
            theirs(tokens).logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )
        loss.backward()
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(parameter.grad)
        gradients = dict(_imported(theirs, Path(folder) / "gradients", shape).named_parameters())
    errors = [
        float((p.grad - gradients[name]).abs().max() / gradients[name].abs().max())
        for name, p in ours.named_parameters()
        if p.grad is not None
    ]
    largest = wanted.abs().max()
    return {
        "logits": float((found - wanted).abs().max() / largest),
        "gradients": max(errors),
        "export": float((exported - wanted).abs().max() / largest),
    }


def _imported(theirs: Any, folder: Path, shape: Shape) -> Any:
    theirs.save_pretrained(folder)
    found, state = load_hf_folder(folder)
    assert found == shape, (found, shape)
    model = build_model(shape)
    model.load_state_dict(state)
    return model


def wrapped(text: str) -> str:
    """Paragraphs and list items in lines that fit a screen; tables and headings as they are."""
    items: list[str] = []
    for line in text.splitlines():
        alone = not line.strip() or line.startswith(("|", "#", "- ")) or re.match(r"\d\. ", line)
        if alone or not items or not items[-1].strip() or items[-1].startswith(("|", "#")):
            items.append(line)
        else:
            items[-1] += " " + line.strip()
    lines = []
    for item in items:
        hanging = " " * (2 if item.startswith("- ") else 3 if re.match(r"\d\. ", item) else 0)
        whole = item.startswith(("|", "#")) or not item
        lines += (
            [item] if whole else textwrap.wrap(item, 118, subsequent_indent=hanging, break_on_hyphens=False)
        )
    return "\n".join(lines) + "\n"


def page() -> str:
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = [
        HEAD,
        "| family | `model_type` | what it has besides Llama's parts | sizes |",
        "| --- | --- | --- | --- |",
    ]
    for name, family in FAMILIES.items():
        types = ", ".join(f"`{one}`" for one in (name, *family.also))
        listed = ", ".join(f"`{one}`" for one in sizes_of(name))
        lines.append(f"| {family.title} | {types} | {features(family, SIZES[tiny_of(name)])} | {listed} |")
    lines += [
        "", "## Against transformers", "",
        f"Largest differences relative to the largest value, at the tiny size, fp32 on a CPU, transformers "
        f"{figures['transformers']}. Exported: transformers reads the folder that rush wrote. Plan: the planner's largest error in what "
        "autograd keeps for the backward pass, of plain fp32, autocast and LoRA. Every tiny size lives a whole life in "
        "`tests/lives/test_recipes.py`: trained, killed, resumed, exported, generated from.", "",
        "| family | logits | gradients | exported logits | plan |", "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, family in FAMILIES.items():
        found = figures["families"][name]
        errors = " | ".join(
            f"{found[key]:.0e}" if found[key] else "same bits" for key in ("logits", "gradients", "export")
        )
        lines.append(f"| {family.title} | {errors} | {100 * found['plan']:.1f} % |")
    lines += [
        "", "## Techniques", "",
        "A technique that is not refused here takes the family. The size decides, too: a head dim of 256, for example. On a CPU this is "
        "tested (`tests/techniques/test_families.py`). Windows, caps and scales of the GPU's kernels have tests in "
        "`tests/gpu/test_families_gpu.py`, which hold on an H200. What was trained there is in [performance.md](performance.md).",
        "", "| model | refused | because |", "| --- | --- | --- |",
    ]  # fmt: skip
    for name in FAMILIES:
        size = next((one for one in sizes_of(name) if not one.endswith("tiny")), tiny_of(name))
        rows = [f"| `{size}` | `{technique}` | {why} |" for technique, why in refusals(size)]
        lines += rows or [f"| `{size}` | none | |"]
    return wrapped("\n".join(lines) + "\n" + TAIL)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        import transformers

        content = {"transformers": transformers.__version__, "families": measure()}
        FIGURES.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
