"""LoRA: freeze the model and train a low-rank adapter on each linear layer.

A frozen weight needs no gradient, no optimizer state and a third fewer FLOPs (the matmul of its weight
gradient). What is trained is rank·(in + out) values per layer, at rank 16 about 0.5 % of an 8B model. So
fine-tuning fits where full training does not, and the result is a file of megabytes. B starts at zero: at the
start the model equals the base bit for bit. It wins by memory; in time it saves only the weight gradients,
and each adapter costs six thin matmuls, which read the wide activations again. It learns less than full
fine-tuning if there is much to learn. Adapters have the dtype of the recipe's weights: fp32 plain and under
autocast, bf16 with pure_bf16 and bf16_master (which keeps fp32 master weights for the adapters alone: the
usual choice). `dora` also trains the magnitude of each row. There is no dropout: every recomputation would
have to draw it again.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

import rush.techniques.api.contract as api
from rush.models import count_parameters
from rush.models.adapters import (
    ROLE_GROUPS,
    Adapter,
    AdapterSpec,
    adapt,
    adapters,
    chosen_linears,
    init_adapters,
)
from rush.parallel.sharded import fill, full_tensor
from rush.recipe import Knob
from rush.techniques.api.evidence import read_back
from rush.techniques.api.facts import AdapterFacts

OPERATORS = {"rush::adapted_linears": 4, "rush::adapted_quantized_linears": 4}
"""Operators of layers with adapters, and the place of their scales among the arguments."""


def _of_adapters(
    knob: str, what: str, read: Callable[[nn.Linear, Adapter], Knob]
) -> Callable[[api.Observation, api.Knobs], api.Proof]:
    """What every adapter of the model has."""

    def found(seen: api.Observation) -> list[Knob]:
        noted = seen.facts.adapters
        return [read(layer, adapter) for _, layer, adapter in adapters(noted.model)] if noted else []

    return read_back(knob, what, found)


def _rank(layer: nn.Linear, adapter: Adapter) -> int:
    """The rows of A; from `_parameters`, which has the whole of a sharded one."""
    a = adapter._parameters["a"]
    assert a is not None
    return int(a.shape[0])


def _alpha_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The operators of adapted layers were called with alpha / rank as their scale; where there are none (DoRA, fp8), the
    adapters have it."""
    noted = seen.facts.adapters
    calls = [call.values[place] for name, place in OPERATORS.items() for call in seen.calls.get(name, {})]
    scales = {scale for given in calls for scale in given}
    if noted is not None and not scales:
        scales = {adapter.spec.scale for _, _, adapter in adapters(noted.model)}
    return api.Proof(
        scales == {float(knobs["alpha"]) / int(knobs["rank"])},
        f"scales of the adapters: {', '.join(map(str, sorted(scales))) or 'none'}",
    )


def _roles_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The layers of these roles have an adapter that is trained, and no others."""
    noted = seen.facts.adapters
    if noted is None:
        return api.Proof(False, "no adapters were added")
    found = {
        name
        for name, _, adapter in adapters(noted.model)
        if any(p.requires_grad for p in adapter.parameters())
    }
    wanted = {name for name, _ in chosen_linears(noted.model, str(knobs["roles"]))}
    return api.Proof(
        found == wanted, f"{len(found)} layers have an adapter, {len(wanted)} have one of the roles"
    )


KNOBS = {
    "rank": api.KnobRange(
        (16, 1, 2, 4, 8, 32, 64, 128, 256),
        "rank of the adapters",
        _of_adapters("rank", "rows of the adapters' first matrices", _rank),
    ),
    "alpha": api.KnobRange(
        (32, 1, 2, 4, 8, 16, 64, 128, 256, 512), "adapters are scaled by alpha / rank", _alpha_seen
    ),
    "roles": api.KnobRange(
        tuple(ROLE_GROUPS), "linear layers of the blocks that get an adapter", _roles_seen
    ),
    "variant": api.KnobRange(
        ("lora", "dora"),
        "dora also trains the magnitude of each row of a weight",
        _of_adapters(
            "variant",
            "adapters with magnitudes are dora, others lora",
            lambda layer, adapter: "lora" if adapter.magnitude is None else "dora",
        ),
    ),
}
"""Knobs of every technique that trains adapters."""


def add_adapters(build: api.Build, knobs: api.Knobs) -> None:
    """Freeze the model and add adapters to the chosen layers."""
    model, seed = build.model, build.recipe.run.seed
    rank, alpha = int(knobs["rank"]), float(knobs["alpha"])
    spec = AdapterSpec(rank, alpha, dora=knobs["variant"] == "dora")
    layers = chosen_linears(model, str(knobs["roles"]))
    adapt(model, {name: spec for name, _ in layers})
    build.weight_hooks.append(lambda model: init_adapters(model, seed, fill, full_tensor))
    build.facts.adapters = AdapterFacts(
        model=model,
        base=count_parameters(model.shape),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        layers=len(layers),
        widths=frozenset((layer.out_features, layer.in_features) for layer in _frozen_linears(build)),
    )


def _frozen_linears(build: api.Build) -> list[nn.Linear]:
    return [layer for entries in build.model.linears().values() for _, layer in entries]


def apply(build: api.Build, knobs: api.Knobs) -> None:
    add_adapters(build, knobs)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Matmuls with the adapters' rank ran, none computed the gradient of a frozen weight, and the optimizer state is
    that of the adapters alone."""
    noted = seen.facts.adapters
    if noted is None:
        return api.Proof(False, "no adapters were added")
    rank, tokens = int(knobs["rank"]), seen.micro_tokens
    # Layers may be sharded by outputs or by inputs.
    parts = {1, seen.facts.tp.ranks if seen.facts.tp is not None else 1}
    widths = {
        pair for out, into in noted.widths for n in parts for pair in ((out // n, into), (out, into // n))
    }
    thin_widths = {rank, 2 * rank, 3 * rank}  # adapters of one input share a matmul
    thin = sum(count for shape, count in seen.matmul_shapes.items() if thin_widths.intersection(shape))
    wide = [
        shape
        for shape in seen.matmul_shapes
        # A weight's gradient is a matmul over all tokens. A layer as wide as the number of tokens, or as narrow as
        # an adapter, is ambiguous.
        if shape[1] == tokens
        and {(shape[0], shape[2]), (shape[2], shape[0])} & widths
        and not {tokens, *thin_widths}.intersection((shape[0], shape[2]))
    ]
    state = sum(seen.state_bytes.values())
    per_trained = state / seen.num_parameters  # in a pipeline, of this rank's stages
    return api.Proof(
        thin > 0 and not wide and 0 < per_trained <= 16,
        f"{noted.trained:,} of {noted.base + noted.trained:,} parameters are trained, in {noted.layers} "
        f"layers; per step {thin:.0f} thin matmuls and {len(wide)} for the gradient of a frozen weight; "
        f"optimizer state {state:,} bytes, {per_trained:.1f} per trained parameter",
    )


dora_in_fp32 = api.Requirement(
    "variant dora compares magnitudes, for which bf16 is too coarse: use amp_bf16 in place of pure_bf16 or bf16_master, or "
    "variant lora",
    lambda machine, recipe: (
        not api.used(recipe, "pure_bf16", "bf16_master")
        or all(
            api.knob_of(recipe, name, "variant", "lora") == "lora" for name in ("lora", "qlora", "int8_base")
        )
    ),
)

dora_unsharded = api.Requirement(
    "variant dora needs the norm of whole rows of a weight, which layout.tp shards; use variant lora, or set "
    "layout.tp to 1",
    lambda machine, recipe: (
        recipe.layout.tp == 1
        or all(
            api.knob_of(recipe, name, "variant", "lora") == "lora" for name in ("lora", "qlora", "int8_base")
        )
    ),
)

FROZEN_MEMORY = (
    api.MemoryEffect("frozen", 1.0, "gradients, moments and master weights of the adapters only"),
    api.MemoryEffect("norm.scaled", 0.0, "the norm's weight has no gradient"),
    api.MemoryEffect("norm.copies", 0.0, "cast once for all adapters"),
)

technique = api.Technique(
    name="lora",
    stage=api.Stage.ADAPT,
    apply=apply,
    requires=(dora_in_fp32, dora_unsharded),
    conflicts=("fused_projections", "int8_base", "qlora"),
    knobs=KNOBS,
    claim=api.Claim(
        "trained parameters",
        -0.9999,
        regime="GPT-3 175B, rank 4 on queries and values; a third of the memory of full fine-tuning, 25 % faster",
        source="Hu et al. 2021, arXiv:2106.09685; DoRA: Liu et al. 2024, arXiv:2402.09353",
    ),
    parity=api.Parity.CHANGES,
    evidence=evidence,
    memory=FROZEN_MEMORY,
)
