"""The recipe: one TOML file that describes a run completely.

The ladder varies it, the tuner writes it, the planner predicts it, the trainer runs it, so what was measured is
what is trained. Every section is strict: an unknown key or a value of the wrong type is refused, with the nearest
key. `Recipe.digest` identifies the content: two recipes with the same digest describe the same run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from rush.batch_schedule import BatchSizes, check_phases, last_step, read_phases
from rush.errors import RecipeError, nearest
from rush.models import SIZES, Shape
from rush.models.numbers import LARGEST
from rush.models.rope_scaling import rope_scaling_from
from rush.models.shape import not_of_family

Knob = bool | int | float | str
AUTO = "auto"
FORMER_NAMES = {"half_products": "fp16_matmul"}
"""Techniques that were renamed. A recipe may still use the former name, and digests are computed with it."""
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


LARGEST_MICRO = 2**24
LARGEST_EPOCHS = 1e6
LARGEST_PASS = 2**26
"""Maximum tokens of one forward pass: the activations of more fit on no device."""
LARGEST_NUMBER = 2**63 - 1
"""The largest number of any key: 64 bits."""


IN_SCHEDULE = ("batch.schedule has a step of", " tokens")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _fits_64_bits(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
            key = f"{cls.__name__.removesuffix('Section').lower()}.{info.field_name}"
            digits = len(str(abs(value)))
            raise ValueError(f"{key} is a number with {digits} digits; allowed: at most {LARGEST_NUMBER:,}")
        return value


class ModelSection(Section):
    name: str
    """A published size (see `rush recipes`); `shape` may override fields of it."""
    init_from: str | None = None
    """The initial weights: a run folder, a Hugging Face folder, or an id on the hub, `OWNER/NAME` or `OWNER/NAME@REVISION`; random
    weights without it. A run records the commit of an id."""
    shape: dict[
        str, int | float | bool | str | list[bool] | dict[str, int | float | bool | str | list[float]]
    ] = {}
    """Fields of the shape to override, as in `model.shape.num_layers = 2`. RoPE scaling is a table:
    `model.shape.rope_scaling = {rope_type = "linear", factor = 4.0}`, or `llama3` with `low_freq_factor`, `high_freq_factor` and
    `original_context` as well, `yarn`, `longrope`; `{rope_type = "default"}` turns it off. `"none"` turns off a field that a model
    may lack (`model.shape.window = "none"`); patterns of layers are lists (`model.shape.window_layers = [true, false]`)."""


class DataSection(Section):
    source: str = "python-stdlib"
    """`python-stdlib`, `python-packages` (with the packages that rush needs), `files`, `fineweb-edu`, `redpajama`, or
    `OWNER/NAME[@REVISION][:CONFIG[:SPLIT]]` for any dataset on the hub (with `hub:` before it where OWNER is a folder here).
    For fine-tuning also `python-docstrings`, `python-docstring-pairs`, `python-readings`, `python-reading-pairs`, `ultrachat`
    and `ultrafeedback`."""
    files: list[str] = []
    """Paths or globs of .jsonl, .json, .csv, .tsv or .parquet files, or of text; with a named source, local files in its schema."""
    text_field: str = "text"
    """The field that holds the text in JSONL, CSV and Parquet rows."""
    tokenizer: str = "train"
    """`train` (byte-level BPE on this corpus), `gpt2`, `llama-3`, a path to a tokenizer.json or its folder, or, for
    fine-tuning, `model`: the one of `model.init_from`."""
    vocab_size: Annotated[int, Field(gt=0, le=LARGEST["vocab_size"])] | None = None
    """Vocabulary of the trained tokenizer; the model's vocabulary without it."""
    validation: Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False)] = 0.01
    """Fraction of documents held out, chosen by a hash of each document."""
    limit: Positive | None = None
    """Read at most this many documents."""
    shuffle: bool = True
    """Shuffle the samples every epoch, as a pure function of the seed."""
    format: Literal["auto", "chat", "prompt", "instruction", "text", "preference"] = "auto"
    """For fine-tuning, what a row holds: `messages`; `prompt` and `completion`; `instruction`, `input`, `output`; a text;
    or `chosen` and `rejected`. `auto` looks at the fields."""
    template: str = "auto"
    """Chat template: `auto` (the tokenizer's own template, else chatml), `chatml`, `llama-3`, `plain`, or
    `raw` (prompt and answer back to back)."""
    bad_rows: Literal["error", "drop"] = "error"
    """What happens to a row that is no conversation (a missing role, an empty answer, no labels); dropped rows are
    counted by reason."""
    too_long: Literal["error", "drop", "cut"] = "error"
    """What happens to a conversation longer than `batch.sequence`; dropped and truncated ones are counted."""


class ObjectiveSection(Section):
    kind: Literal["lm", "sft", "dpo"] = "lm"
    """`lm`: predict the next token of a corpus. `sft`: of the answers in conversations. `dpo`: prefer one answer."""
    train_on: Literal["completion", "all"] = "completion"
    """With sft, which tokens are labels: the assistant's answers, or everything."""
    loss: Literal["sigmoid", "ipo", "orpo", "simpo"] = "sigmoid"
    """With dpo, the loss of a preference; orpo and simpo need no reference model."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    """With dpo, the strength of the KL constraint to the reference (orpo: the weight of the odds ratio)."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """With dpo and sigmoid, the fraction of pairs assumed to be swapped."""
    margin: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """With simpo, the target reward margin."""
    reference: Literal["cached", "live"] = "cached"
    """With dpo, the reference's log-probabilities: computed once before training, or in every step."""


class BatchPhase(Section):
    """The first steps of a batch-size schedule, or the next ones."""

    tokens: Positive
    """Tokens per optimizer step."""
    until: Positive | float
    """The last step of this size; below 1 as a fraction of all steps."""


class BatchSection(Section):
    micro: Positive | Literal["auto"]
    """Sequences per forward pass. `auto`: the fastest that fits according to the planner, checked with a real step when a
    run starts (see docs/plan.md)."""
    sequence: Positive
    """Tokens per sequence."""
    total_tokens: Positive | None = None
    """Tokens per optimizer step, over all devices; gradients accumulate up to it. One micro batch without it."""
    schedule: list[BatchPhase] | None = None
    """Batch-size warmup: `[{tokens = 16384, until = 0.1}, {tokens = 32768, until = 0.3}]` takes steps of 16,384 tokens for the
    first tenth of all steps, of 32,768 until 0.3, and of `total_tokens` from then on. From 1 on, `until` is a number of steps. The
    learning rate does not follow the batch (docs/recipes.md)."""

    @field_validator("schedule", mode="before")
    @classmethod
    def _phases(cls, value: object) -> object:
        return None if value is None else read_phases(value)

    @field_validator("micro", mode="before")
    @classmethod
    def _number_or_auto(cls, value: object) -> object:
        if value == AUTO or (type(value) is int and 0 < value <= LARGEST_MICRO):
            return value
        raise ValueError(
            f'batch.micro is {value!r}; allowed: a whole number (an integer) greater than 0, at most {LARGEST_MICRO:,}, or "{AUTO}"'
        )


class OptimizerSection(Section):
    kind: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Weight decay of tensors with two or more dims; norm weights and biases never decay."""
    clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""


class ScheduleSection(Section):
    kind: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up: cosine decay, no decay, or warmup-stable-decay (wsd), constant and then a linear decay at the end."""
    steps: Positive | None = None
    """Optimizer steps in the whole run. A recipe has `steps` or `epochs`."""
    epochs: Annotated[float, Field(gt=0, le=LARGEST_EPOCHS, allow_inf_nan=False)] | None = None
    """Passes over the training data. A run computes `steps` from it once the data is prepared, and records both."""
    warmup: NotNegative | Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] = 0
    """Steps of linear warm-up; below 1, as in 0.05, the fraction of all steps."""
    final: Fraction = 0.1
    """Fraction of the learning rate at the last step."""
    decay: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """The last fraction of the steps, in which wsd decays. Default: 0.2."""


class LayoutSection(Section):
    """Sizes of the parallelism axes; the number of ranks is their product (see docs/scale.md)."""

    ddp: Positive = 1
    """Data-parallel replicas of the (sharded) model, each with other samples."""
    fsdp: Positive = 1
    """Shards of weights, gradients and optimizer state; each rank has other samples."""
    tp: Positive = 1
    """Shards of every layer; the ranks have the same samples."""
    pp: Positive = 1
    """Pipeline stages, each with other blocks and the same samples."""
    cp: Positive = 1
    """Shards of every sequence."""


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def tracker_name(entry: str) -> str:
    """The tracker of an entry of `run.trackers`, which may name a project after a colon."""
    return entry.partition(":")[0]


def with_former_keys(values: dict[str, Any]) -> dict[str, Any]:
    """`tensorboard = true` and `wandb = "PROJECT"`, as recipes had them, beside or instead of `trackers`."""
    former = {key: values[key] for key in ("tensorboard", "wandb") if key in values}
    if not former:
        return values
    rest = {key: value for key, value in values.items() if key not in former}
    entries = rest.get("trackers", ["tensorboard"])
    if not isinstance(entries, list):
        return rest  # refused with its own message
    board, project = former.get("tensorboard"), former.get("wandb")
    if "tensorboard" in former and not isinstance(board, bool):
        raise ValueError(f"run.tensorboard is {board!r}; allowed: true or false, or run.trackers instead")
    if project is not None and not isinstance(project, str):
        raise ValueError(f"run.wandb is {project!r}; allowed: the name of a project, or run.trackers instead")
    kept = [entry for entry in entries if str(entry).partition(":")[0] not in former]
    boards = ["tensorboard"] * bool(board)
    return {**rest, "trackers": [*boards, *kept, *[f"wandb:{project}"] * (project not in (None, "none"))]}


class RunSection(Section):
    seed: NotNegative = 1337
    deterministic: bool = False
    """Bit-for-bit reproducible runs and resumes, on a GPU with slower kernels; techniques that are not deterministic are
    refused."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    save_every: NotNegative = 0
    """Steps between checkpoints; 0: at the end only."""
    keep: Positive = 2
    """Checkpoints to keep besides the best one."""
    save_async: bool = True
    """Asynchronous checkpoints: copy the state to host memory and write it while training continues; false writes
    synchronously, without a copy."""
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0
    """On several ranks, timeout of a collective; then the late rank is reported and the run restarts."""
    drift_every: NotNegative = 100
    """On several ranks, steps between checks that replicas are equal bit for bit; also before every checkpoint. 0: never."""
    validate_every: NotNegative = 0
    """Steps between validations; 0: at the end only."""
    validate_every_tokens: NotNegative = 0
    """Validate also after each step that reaches a multiple of so many tokens, to compare runs whose batches differ; 0: never."""
    validate_sequences: Positive = 64
    """Sequences in each validation, always the same ones."""
    sample_every: NotNegative = 0
    """Steps between text samples; 0: at the end only."""
    sample_prompt: str = "def "
    """The prompt of samples. In fine-tuning on conversations it is a user's turn in the run's chat template; a prompt with
    special tokens is used unchanged."""
    sample_tokens: NotNegative = 100
    memory_limit_gb: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] | None = None
    """Limit of device memory (GB of 10⁹ bytes), as if the device were smaller. On a CPU (Linux) a step that needs more stops
    the run."""
    trackers: list[str] = ["tensorboard"]
    """Where metrics and samples go besides the run folder: `tensorboard`, `wandb`, `mlflow`, `trackio`; with a project, as in
    `wandb:PROJECT`. Logins come from the environment, never from a recipe (docs/trackers.md)."""

    @model_validator(mode="before")
    @classmethod
    def _former_keys(cls, values: object) -> object:
        """`run.tensorboard` and `run.wandb` of older recipes change the list."""
        return with_former_keys(values) if isinstance(values, dict) else values

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, entries: list[str]) -> list[str]:
        names = [tracker_name(entry) for entry in entries]
        for entry, name in zip(entries, names, strict=True):
            if name not in TRACKERS:
                raise ValueError(f"run.trackers names {entry!r}; {nearest(name, TRACKERS).rstrip('.')}")
            if name != entry and (name == "tensorboard" or not entry.removeprefix(f"{name}:").strip()):
                raise ValueError(
                    f"run.trackers names {entry!r}; allowed: a project after the colon, as in wandb:PROJECT, and none for tensorboard"
                )
        _named_once("run.trackers", names)
        return entries


class Recipe(Section):
    """A complete description of a run."""

    about: str = ""
    """One-line description."""
    model: ModelSection
    data: DataSection = DataSection()
    objective: ObjectiveSection = ObjectiveSection()
    batch: BatchSection
    optimizer: OptimizerSection
    schedule: ScheduleSection
    techniques: list[str | dict[str, Knob]] = []
    """Names, or tables of a name with knobs: `{name = "compile", mode = "max-autotune"}`. Order does not matter."""
    layout: LayoutSection = LayoutSection()
    run: RunSection = RunSection()

    @field_validator("techniques")
    @classmethod
    def _current_names(cls, entries: list[str | dict[str, Knob]]) -> list[str | dict[str, Knob]]:
        return _renamed(entries, FORMER_NAMES)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        steps, warmup = self.schedule.steps, self.schedule.warmup
        if steps is None and self.schedule.epochs is None:
            raise ValueError(
                "schedule.steps is missing; add it to the recipe or give it as schedule.steps=VALUE, or give "
                "schedule.epochs=VALUE"
            )
        if steps is not None and warmup > steps:
            raise ValueError(
                f"schedule.warmup is {warmup} but the run has only schedule.steps = {steps}; make the warm-up "
                "shorter (schedule.warmup=0.05 is the fraction of all steps) or the run longer"
            )
        if self.schedule.decay is not None and self.schedule.kind != "wsd":
            raise ValueError(
                f"schedule.decay is {self.schedule.decay:g} and schedule.kind is {self.schedule.kind}; only wsd has a decay at the "
                "end: set schedule.kind=wsd, or remove schedule.decay"
            )
        check_phases(
            [(one.tokens, one.until) for one in self.batch.schedule or ()], self.batch.total_tokens, steps
        )
        _named_once("techniques", [name for name, _ in self.technique_uses()])
        return self

    def technique_uses(self) -> list[tuple[str, dict[str, Knob]]]:
        """The techniques with their knobs, as (name, knobs)."""
        uses: list[tuple[str, dict[str, Knob]]] = []
        for entry in self.techniques:
            if isinstance(entry, str):
                uses.append((entry, {}))
                continue
            name = entry.get("name")
            if not isinstance(name, str):
                raise ValueError(f'a technique table needs a name, as in {{name = "compile"}}; found {entry}')
            uses.append((name, {key: value for key, value in entry.items() if key != "name"}))
        return uses

    def shape(self) -> Shape:
        """The model's shape: the published one with this recipe's overrides."""
        overrides = tuple((key, type(value), _hashable(value)) for key, value in self.model.shape.items())
        return _shape_of(self.model.name, overrides)

    @property
    def data_ranks(self) -> int:
        """Ranks with different samples."""
        return self.layout.ddp * self.layout.fsdp

    @property
    def world(self) -> int:
        """Number of ranks."""
        layout = self.layout
        return layout.ddp * layout.fsdp * layout.tp * layout.pp * layout.cp

    @property
    def auto(self) -> bool:
        """Whether `batch.micro` is `auto`."""
        return self.batch.micro == AUTO

    @property
    def micro(self) -> int:
        """Sequences per forward pass, as a number."""
        if isinstance(self.batch.micro, int):
            return self.batch.micro
        raise RecipeError(
            f'batch.micro is "{AUTO}", which only `rush train` and `rush plan` choose; '
            "here it must be a number."
        )

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run; with `schedule.epochs` known once the data is prepared."""
        if self.schedule.steps is not None:
            return self.schedule.steps
        raise RecipeError(
            f"schedule.epochs is {self.schedule.epochs:g}, whose number of steps depends on the data; here "
            "schedule.steps must be a number."
        )

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up, as a number."""
        warmup = self.schedule.warmup
        return warmup if isinstance(warmup, int) else round(warmup * self.steps)

    @property
    def step_tokens(self) -> int:
        """Tokens per optimizer step; with a batch-size schedule, of the last steps."""
        return self.batch.total_tokens or self.micro * self.batch.sequence * self.data_ranks

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Tokens per optimizer step in the course of a run: several with a batch-size schedule, in order."""
        return (*(one.tokens for one in self.batch.schedule or ()), self.step_tokens)

    @property
    def pass_tokens(self) -> int:
        """Tokens of a micro batch."""
        return self.micro * self.batch.sequence

    @property
    def common_tokens(self) -> int:
        """The largest number of tokens that divides steps of every size."""
        return math.gcd(*self.step_sizes)

    def batch_sizes(self, steps: int | None = None) -> BatchSizes:
        """Tokens of every step of the run, or of one of so many steps."""
        steps = self.steps if steps is None else steps
        ends = [last_step(one.until, steps) for one in self.batch.schedule or ()]
        return BatchSizes(tuple(ends), self.step_sizes)

    @property
    def run_tokens(self) -> int:
        """Tokens of the whole run."""
        return self.batch_sizes().until(self.steps)

    @property
    def accumulation(self) -> int:
        """Micro batches per optimizer step on each data rank; with a batch-size schedule, of the last steps."""
        return self.accumulations[-1]

    @property
    def accumulations(self) -> tuple[int, ...]:
        """The same for every step size."""
        return tuple(self._accumulation(tokens) for tokens in self.step_sizes)

    def _accumulation(self, tokens: int) -> int:
        per_pass = self.micro * self.batch.sequence * self.data_ranks
        whole, rest = divmod(tokens, per_pass)
        if rest or not whole:
            below = whole * per_pass
            legal = f"{below:,} or {below + per_pass:,}" if below else f"{per_pass:,}"
            what, unit = ("batch.total_tokens is", "") if tokens == self.step_tokens else IN_SCHEDULE
            raise RecipeError(
                f"{what} {tokens:,}{unit}, which is not a multiple of batch.micro × batch.sequence "
                f"× data ranks = {self.micro} × {self.batch.sequence} × {self.data_ranks} = {per_pass:,}; "
                f"the nearest allowed: {legal}."
            )
        return whole

    def content(self) -> dict[str, Any]:
        """What the digest covers. `run` without its defaults, so that a key that a later version adds there does not change the
        digests of older recipes."""
        content = self.model_dump(mode="json")
        content["techniques"] = _renamed(self.techniques, {new: old for old, new in FORMER_NAMES.items()})
        if self.schedule.epochs is None:  # as in recipes from before there were epochs
            del content["schedule"]["epochs"]
        if self.schedule.decay is None:  # likewise
            del content["schedule"]["decay"]
        if self.batch.schedule is None:
            del content["batch"]["schedule"]
        content["run"] = _former_run(self.run.model_dump(mode="json", exclude_defaults=True))
        return content

    @property
    def digest(self) -> str:
        """SHA-256 of the content: equal for recipes that describe the same run."""
        canonical = json.dumps(self.content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def _named_once(key: str, names: list[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{key} names {', '.join(twice)} more than once; name each one once")


def _former_run(content: dict[str, Any]) -> dict[str, Any]:
    """Trackers under the keys of older recipes, if those can express them: digests stay unchanged."""
    entries = content.get("trackers")
    project = next((entry[len("wandb:") :] for entry in entries or () if entry.startswith("wandb:")), None)
    board = [entry for entry in entries or () if entry == "tensorboard"]
    if entries is None or entries != board + [f"wandb:{project}"] * (project is not None):
        return content
    former = {} if board else {"tensorboard": False}
    former |= {} if project is None else {"wandb": project}
    return {key: value for key, value in content.items() if key != "trackers"} | former


def _renamed(entries: list[str | dict[str, Knob]], names: Mapping[str, str]) -> list[str | dict[str, Knob]]:
    return [
        names.get(entry, entry)
        if isinstance(entry, str)
        else {key: names.get(str(value), value) if key == "name" else value for key, value in entry.items()}
        for entry in entries
    ]


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(inner)) for key, inner in value.items())
    return tuple(value) if isinstance(value, list) else value


_OPTIONAL: dict[str, type] = {
    "rotary_dim": int,
    "window": int,
    **dict.fromkeys(
        ("local_rope_theta", "attention_scale", "attention_softcap", "logit_softcap", "embedding_scale",
         "residual_scale", "logit_divisor"),
        float,
    ),
}  # fmt: skip
"""Fields that a model may lack, of models with RoPE."""
_PATTERNS = ("rope_layers", "window_layers")


@lru_cache(maxsize=1024)
def _shape_of(name: str, overrides: tuple[tuple[str, type, Any], ...]) -> Shape:
    """The published shape of a model with these fields changed, of (key, type, value): 1 and True are equal, but not alike."""
    if name not in SIZES:
        raise RecipeError(f"model.name is {name!r}, which is not a known model; {nearest(name, SIZES)}")
    base = SIZES[name]
    fields = {field.name: field for field in dataclasses.fields(Shape)}
    values: dict[str, Any] = {}
    for key, kind, value in overrides:
        values[key] = value
        if key == "rope_scaling":
            values[key] = _rope_scaling(base, kind, value)
            continue
        if key in _PATTERNS and base.has_rope:
            if kind is not list:
                raise RecipeError(
                    f"model.shape.{key} is {value!r}; allowed: a list such as [true, false], repeated over the layers."
                )
            continue
        if key in _OPTIONAL and base.has_rope and value == "none":
            values[key] = None
            continue
        known = getattr(base, key) if key in fields else None
        if known is None and base.has_rope:
            known = {int: 1024, float: 0.5}.get(_OPTIONAL.get(key, object))  # an example of its type
        if not isinstance(known, (bool, int, float)):
            allowed = [field for field in fields if isinstance(getattr(base, field), (bool, int, float))]
            allowed += ["rope_scaling", *_OPTIONAL, *_PATTERNS] if base.has_rope else []
            raise RecipeError(f"model.shape.{key} is not a field of a shape; {nearest(key, {*allowed})}")
        if kind is not type(known) and not (isinstance(known, float) and kind is int):
            raise RecipeError(
                f"model.shape.{key} is {value!r}; found {_kind(value)}, allowed: {_kind(known)} (as in {known!r})."
            )
    try:
        shape = dataclasses.replace(base, **values)
    except RecipeError as error:
        raise RecipeError(f"model.shape: {error}") from None
    if lost := [key for key in not_of_family(shape) if key in values] if values else []:
        raise RecipeError(
            f"model.shape.{lost[0]} is {values[lost[0]]!r}, which models of the family {shape.family} do not have: an exported one "
            "would be another model; leave it out, or take a model of a family that has it (docs/families.md)."
        )
    return shape


def _rope_scaling(base: Shape, kind: type, value: Any) -> object:
    if kind is not dict:
        raise RecipeError(
            f"model.shape.rope_scaling is {value!r}; found {_kind(value)}, allowed: a table such as "
            '{rope_type = "linear", factor = 4.0}.'
        )
    try:
        return rope_scaling_from(dict(value), base.rope_scaling)
    except RecipeError as error:
        raise RecipeError(f"model.shape.{error}") from None


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "true or false"
    return {int: "a whole number", float: "a number", str: "a text"}.get(type(value), type(value).__name__)
