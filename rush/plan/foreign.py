"""Plans for models that rush cannot train: any `config.json`, counted with the nearest terms that the planner knows.

Every block is approximated by a decoder block of the Llama family. Each setting without its own term is
listed with what it was counted as and the possible error, which widens the plan's expected error. These
widths are estimates, not measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rush.errors import DataError, RecipeError
from rush.models import Shape, count_parameters
from rush.models.families import MODEL_TYPES
from rush.plan.planning import Plan, plan
from rush.plan.run_peak import RunPeak
from rush.plan.spec import Spec
from rush.plan.target import TargetMachine

Config = Mapping[str, Any]
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "model_dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
WIDE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim")
CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts", "experts_per_token")
INNER = ("text_config", "language_config", "llm_config")
"""Where models of several modalities keep their language model."""
UNGATED = (
    "gpt_neox",
    "gpt_neo",
    "gptj",
    "gpt_bigcode",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "phi",
    "starcoder2",
    "gpt2",
    "codegen",
)
"""Types of models whose MLP has two matrices."""


@dataclass(frozen=True)
class Doubt:
    """A setting without its own term: what it was counted as, and the error it may add to memory and time."""

    term: str
    counted: str
    memory: float
    time: float

    def __str__(self) -> str:
        return f"{self.term}: {self.counted} (±{self.memory:.0%} of the memory, ±{self.time:.0%} of the time)"


@dataclass(frozen=True)
class Foreign:
    """The nearest shape of a config: the active parameters per token, and the inactive ones."""

    shape: Shape
    doubts: tuple[Doubt, ...] = ()
    resting: int = 0
    """Parameters of experts beyond those that a token passes."""

    @property
    def parameters(self) -> int:
        return count_parameters(self.shape) + self.resting


@dataclass(frozen=True)
class ForeignPlan(Plan):
    """A plan whose expected error is widened by the unknown settings."""

    model: Foreign | None = None

    @property
    def expected_error(self) -> dict[str, float]:
        found = super().expected_error
        doubts = self.model.doubts if self.model is not None else ()
        return {
            "memory": found["memory"] + sum(doubt.memory for doubt in doubts),
            "time": found["time"] + sum(doubt.time for doubt in doubts),
        }

    def to_dict(self) -> dict[str, Any]:
        assert self.model is not None
        doubts = [vars(doubt) for doubt in self.model.doubts]
        return super().to_dict() | {"parameters": self.model.parameters, "not_known": doubts}


def nearest_shape(config: Config, refused: str = "") -> Foreign:
    """A shape for any config; DataError where even the width or the depth is missing. `refused`: why it could not be read exactly."""
    doubts: list[Doubt] = []
    inner = next((config[key] for key in INNER if isinstance(config.get(key), dict)), None)
    if inner is not None:
        doubts.append(Doubt("other modalities", "only the language model is counted", 0.10, 0.10))
        config = {**inner, "model_type": inner.get("model_type", config.get("model_type"))}
    hidden, layers, vocab = _need(config, HIDDEN), _need(config, LAYERS), _need(config, ("vocab_size",))
    kind, counted = config.get("model_type"), "its blocks are counted as Llama's"
    if refused and isinstance(kind, str) and kind in MODEL_TYPES:  # it would be trained, but for this
        counted += f", because it could not be read as a {kind}: {refused.rstrip('.')}"
    doubts.append(Doubt(f"model_type {kind!r:.60}", counted, 0.05, 0.10))
    heads, kv_heads, head_dim = _attention(config, hidden, doubts)
    wide, resting = _mlp(config, hidden, layers, doubts)
    doubts += _other_terms(config)
    try:
        shape = Shape(
            family="llama",
            vocab_size=vocab,
            context=_find(config, CONTEXT) or 4096,
            hidden=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=wide,
            norm_eps=1e-5,
            tied_head=config.get("tie_word_embeddings") is True,
            rope_theta=10000.0,
        )
    except RecipeError as error:
        raise DataError(f"config.json describes a model that cannot be planned. {error}") from error
    return Foreign(shape, tuple(doubts), resting)


def _attention(config: Config, hidden: int, doubts: list[Doubt]) -> tuple[int, int, int]:
    """Heads, key/value heads and their dim."""
    heads = _find(config, HEADS)
    if heads is None:
        heads = next(n for n in (max(1, hidden // 128), max(1, hidden // 64), 1) if hidden % n == 0)
        doubts.append(Doubt("no attention heads", f"counted as {heads} heads of full attention", 0.15, 0.30))
    kv_heads = _find(config, KV_HEADS) or heads
    head_dim = _find(config, ("head_dim", "attention_head_dim", "kv_channels")) or max(1, hidden // heads)
    if "kv_lora_rank" in config:
        kv_heads, head_dim = 1, _find(config, ("v_head_dim",)) or head_dim
        doubts.append(
            Doubt(
                "latent attention (kv_lora_rank)",
                f"counted as one key/value head for {heads} heads of {head_dim}",
                0.05,
                0.20,
            )
        )
    if hidden % heads or heads % kv_heads or head_dim % 2:
        heads_before, whole = heads, heads * head_dim
        heads = next(n for n in range(heads, 0, -1) if hidden % n == 0 and whole % n == 0)
        kv_heads, head_dim = heads, 2 * max(1, round(whole / heads / 2))
        doubts.append(
            Doubt("the division into heads", f"{heads_before} heads counted as {heads}", 0.03, 0.05)
        )
    return heads, kv_heads, head_dim


def _mlp(config: Config, hidden: int, layers: int, doubts: list[Doubt]) -> tuple[int, int]:
    """The width of the MLP that is active per token, and the parameters of the inactive experts."""
    dense = _find(config, WIDE)
    if dense is None:
        dense = 4 * hidden
        doubts.append(Doubt("no width of the MLP", f"counted as 4 × hidden = {dense:,}", 0.15, 0.15))
    if config.get("model_type") in UNGATED:
        doubts.append(Doubt("an MLP without a gate", "counted as a gated one of its size", 0.05, 0.05))
        dense = max(1, round(dense * 2 / 3))
    experts = _find(config, EXPERTS)
    if experts is None or experts < 2:
        return dense, 0
    each = _find(config, ("moe_intermediate_size", "expert_intermediate_size")) or dense
    active = min(_find(config, ACTIVE) or 1, experts)
    shared = _find(config, ("shared_expert_intermediate_size",)) or each * (
        _find(config, ("n_shared_experts", "num_shared_experts")) or 0
    )
    first_dense = min(_find(config, ("first_k_dense_replace",)) or 0, layers)
    sparse = layers - first_dense
    passed = (sparse * (active * each + shared) + first_dense * dense) / layers
    doubts.append(
        Doubt(
            f"{experts} experts, {active} per token",
            "all of them held, those of a token computed, in matmuls as large as dense ones and without their communication",
            0.05,
            0.50,
        )
    )
    return max(1, round(passed)), sparse * (experts - active) * 3 * hidden * each


def _other_terms(config: Config) -> list[Doubt]:
    """Other settings with a cost but without a term."""
    kinds = {str(kind) for kind in config.get("layer_types") or []} if isinstance(config.get("layer_types"), list) else set()  # fmt: skip
    states = ("state_size", "ssm_state_size", "ssm_cfg", "mamba_d_state", "mamba_expand", "linear_num_key_heads", "hybrid_override_pattern", "attn_layer_period", "layers_block_type")  # fmt: skip
    asked = [
        (
            any(key in config for key in states)
            or any("linear" in kind or "mamba" in kind for kind in kinds),
            Doubt("layers with a state instead of attention", "counted as attention layers", 0.20, 0.50),
        ),
        (
            (bool(config.get("sliding_window")) and config.get("use_sliding_window", True) is not False)
            or "sliding_attention" in kinds,
            Doubt("a sliding window", "counted as full attention", 0.0, 0.10),
        ),
        (
            bool(config.get("is_encoder_decoder")) or "num_encoder_layers" in config,
            Doubt("an encoder", "only the decoder is counted", 0.40, 0.40),
        ),
        (
            bool(config.get("num_nextn_predict_layers")),
            Doubt("layers that predict further tokens", "not counted", 0.05, 0.05),
        ),
        (
            config.get("quantization_config") is not None,
            Doubt("quantized weights", "counted in the recipe's precision", 0.0, 0.10),
        ),
    ]
    return [doubt for there, doubt in asked if there]


def plan_foreign(model: Foreign, spec: Spec, target: TargetMachine) -> ForeignPlan:
    """The plan of a recipe's spec with this model in place of its own."""
    spec = replace(spec, shape=model.shape, device=target.kind)
    held = _resting_bytes(model, spec)
    room = replace(target, memory_bytes=max(1.0, target.memory_bytes - held))
    found = plan(spec, room)
    step, besides = found.life.step, found.life.besides
    life, time = found.life, found.time
    if model.resting:
        life = RunPeak(
            replace(step, parts={**step.parts, "experts at rest": held}),
            {phase: value + held for phase, value in besides.items()},
        )
        grown = model.parameters / count_parameters(model.shape)
        parts = {
            part: seconds * grown if part in ("optimizer", "communication") else seconds
            for part, seconds in time.parts.items()
        }
        time = replace(time, parts=parts)
    return ForeignPlan(
        spec,
        target,
        life,
        time,
        found.largest_micro,
        found.longest_sequence,
        phase_times=found.phase_times,
        model=model,
    )


def _resting_bytes(model: Foreign, spec: Spec) -> float:
    """Weights, gradients and optimizer state of the experts that no token of a pass may meet, on one rank."""
    effects = spec.effects
    each = effects.size("parameters", 4)
    if not effects.factor("frozen"):
        each += effects.size("gradients", 4) + 4 * effects.factor("master")
        each += effects.size("optimizer", 8) * effects.factor("optimizer")
    return model.resting * each / spec.shards / spec.size("tp") / spec.size("pp")


def _find(config: Config, names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        value = (
            max(value) if isinstance(value, list) and value and all(type(n) is int for n in value) else value
        )
        if type(value) is int and value > 0:
            return value
    return None


def _need(config: Config, names: tuple[str, ...]) -> int:
    found = _find(config, names)
    if found is None:
        others = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise DataError(
            f"config.json has no {names[0]}{others}, so there is nothing to plan with; "
            "give a language model's config."
        )
    return found
