"""Fused projections: linear layers with the same input are one matmul (queries, keys, values; gate and up).

A wide matmul runs nearer to the peak than narrow ones, and Llama's key and value layers are narrow. Backward
the input's gradient is one matmul instead of two or three that are then added up; in fp8 input and gradients
are cast once. The parameters stay separate, for names, checkpoints and the optimizer, but share one
contiguous buffer, so no weight is copied: the matmul reads them as one matrix, and the rows of its gradient
are theirs. It wins where the compiler writes the incoming gradients into one buffer; eager, concatenating
them is a copy as wide as the layers, which can cost more than is saved, and kernels that need contiguous
tensors (`fused_mlp`) copy their inputs. The outputs are views: saving the values for the backward pass saves
queries and keys too. In fp8 the layers of a group share their scales.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rush.techniques.api.contract as api
from rush.errors import RecipeError
from rush.models import Decoder
from rush.models.layers import FanOut, matmul_of

# Shapes: b batch, t position, d input width, o output width of all layers of a group.

LAYERS = {"attention": ("q", "k", "v"), "mlp": ("gate", "up")}
"""For each module of a block, its layers with the same input, in the order of its `fan_out`."""

Weight = tuple[int, int]
"""The two dims of a weight, the smaller first: a matmul's shape does not show which is which."""


class JoinedWeight(torch.autograd.Function):
    """Parameters of one contiguous buffer as one matrix, whose gradient is split into views."""

    @staticmethod
    def forward(ctx: Any, joined_od: Tensor, *weights: Tensor) -> Tensor:
        ctx.rows = [weight.shape[0] for weight in weights]
        # Saved only for autograd's version check.
        ctx.save_for_backward(*weights)
        return joined_od.view_as(joined_od)

    @staticmethod
    def backward(ctx: Any, gradient_od: Tensor) -> tuple[Tensor | None, ...]:
        assert len(ctx.saved_tensors) == len(ctx.rows)
        return None, *torch.split(gradient_od, ctx.rows)


class JoinedFanOut(FanOut):
    """Several linear layers with one input as one matmul."""

    joined: Tensor

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        # A buffer, so that CUDA graphs see a static address; not persistent: it is the weights' own memory.
        self.register_buffer("joined", lay_out(layers), persistent=False)

    def forward(self, x_btd: Tensor, *layers: nn.Linear) -> tuple[Tensor, ...]:
        matmul = matmul_of(layers[0])
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        if not biases:
            out_bto = matmul(x_btd, self.weight(*layers))
        elif matmul is F.linear:
            out_bto = F.linear(x_btd, self.weight(*layers), torch.cat(biases))
        else:
            out_bto = matmul(x_btd, self.weight(*layers))
            out_bto = out_bto + torch.cat(biases).to(out_bto.dtype)
        return torch.split(out_bto, [layer.weight.shape[0] for layer in layers], dim=-1)

    def weight(self, *layers: nn.Linear) -> Tensor:
        # Tracing has no addresses; `apply` checks all groups before each step.
        if not torch.compiler.is_compiling():
            self.check(layers)
        if not torch.is_grad_enabled():
            # Without gradients torch.compile drops `ctx` where the number of arguments happens to equal the number of
            # parameters of `forward`, as `*weights` does with two layers.
            return self.joined
        weight_od: Tensor = JoinedWeight.apply(self.joined, *(layer.weight for layer in layers))  # type: ignore[no-untyped-call]
        return weight_od

    def check(self, layers: Sequence[nn.Linear]) -> None:
        """Raise if the weights are no longer views of the joined buffer."""
        place = self.joined.data_ptr()
        for layer in layers:
            weight = layer.weight
            if weight.data_ptr() != place or weight.dtype != self.joined.dtype:
                raise RecipeError(
                    "fused_projections needs its weights to share one buffer, but they no longer do: something replaced "
                    "them after the build (Module.to, load_state_dict with assign=True, a deep copy). Copy values "
                    "into the weights in place, rebuild the run, or remove the technique."
                )
            place += weight.numel() * weight.element_size()


@dataclass(frozen=True)
class LayerGroup:
    """The layers with one input in one block, looked up each time: a module may have been replaced."""

    owner: nn.Module
    names: tuple[str, ...]

    def layers(self) -> list[nn.Linear]:
        found: list[Any] = [self.owner.get_submodule(name) for name in self.names]
        assert all(isinstance(layer, nn.Linear) for layer in found)
        return found

    def check(self) -> None:
        joined = self.owner.get_submodule("fan_out")
        assert isinstance(joined, JoinedFanOut), type(joined)
        joined.check(self.layers())


@torch.no_grad()
def lay_out(layers: Sequence[nn.Linear]) -> Tensor:
    """Move the weights of these layers into one contiguous buffer, and return it."""
    assert len({type(layer) for layer in layers}) == 1, "layers of different types"
    joined_od = torch.cat([layer.weight.detach() for layer in layers])
    parts = torch.split(joined_od, [layer.out_features for layer in layers])
    for layer, rows in zip(layers, parts, strict=True):
        layer.weight.data = rows
    return joined_od


@dataclass(frozen=True)
class JoinedWeights:
    """How many layers have weights of these dims."""

    joined: Counter[Weight]
    others: Counter[Weight]
    model: Decoder


def apply(build: api.Build, knobs: api.Knobs) -> None:
    chosen = [part for part in LAYERS if knobs["groups"] in ("all", part)]
    groups = [
        LayerGroup(block.get_submodule(part), LAYERS[part]) for block in build.model.blocks for part in chosen
    ]
    fused: Counter[Weight] = Counter()
    plain = Counter(
        _weight(layer.out_features, layer.in_features)
        for role, layers in build.model.linears().items()
        for _, layer in (layers if role != "head" else [])
    )
    for group in groups:
        layers = group.layers()
        assert isinstance(group.owner.get_submodule("fan_out"), FanOut)
        group.owner.fan_out = JoinedFanOut(layers)
        fused[_weight(sum(layer.out_features for layer in layers), layers[0].in_features)] += 1
        plain.subtract(_weight(layer.out_features, layer.in_features) for layer in layers)

    @contextmanager
    def checked() -> Iterator[None]:
        for group in groups:
            group.check()
        yield

    build.step_contexts.append(checked)
    build.facts.note(JoinedWeights(fused, plain, build.model))
    build.facts.matmuls_saved = sum(len(group.names) - 1 for group in groups)


def _weight(outputs: int, inputs: int) -> Weight:
    return min(outputs, inputs), max(outputs, inputs)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Matmuls by shape: with each joined weight one forward and two backward in every pass, and with the narrow weights
    only those of other layers of that shape."""
    noted = seen.facts.noted(JoinedWeights)
    if noted is None:
        return api.Proof(False, "no layers were joined")
    fused, others = noted.joined, noted.others
    surely, at_most = matmuls_by_weight(seen, {*fused, *others})
    most = 4 if seen.block_forwards > 1.05 else 3  # once more forward, where blocks are recomputed
    wide_ran = all(
        at_most[weight] >= 3 * (layers + others[weight]) * seen.micro_batches
        for weight, layers in fused.items()
    )
    narrow_ran = any(
        surely[weight] > most * layers * seen.micro_batches
        for weight, layers in others.items()
        if weight not in fused
    )
    said = [f"{at_most[weight]:g} matmuls with {_shape(weight)}, {n} joined" for weight, n in fused.items()]
    said += [
        f"{surely[weight]:g} with {_shape(weight)}, which {layers or 'no'} other layers have"
        for weight, layers in others.items()
        if weight not in fused
    ]
    return api.Proof(
        wide_ran and not narrow_ran, f"in a step of {seen.micro_batches} passes: {'; '.join(said)}"
    )


def _groups_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Every block of the model joins the layers of these groups, and no others."""
    noted = seen.facts.noted(JoinedWeights)
    blocks = list(noted.model.blocks) if noted is not None else []
    found = {
        part: sum(
            isinstance(block.get_submodule(part).get_submodule("fan_out"), JoinedFanOut) for block in blocks
        )
        for part in LAYERS
    }
    wanted = {part: len(blocks) * (knobs["groups"] in ("all", part)) for part in LAYERS}
    said = " and ".join(f"{part} in {count}" for part, count in found.items())
    return api.Proof(bool(blocks) and found == wanted, f"joined layers of {said} of {len(blocks)} blocks")


def matmuls_by_weight(
    seen: api.Observation, weights: set[Weight]
) -> tuple[dict[Weight, float], dict[Weight, float]]:
    """The least and the most matmuls of a step, forward and backward, with weights of these dims.

    All three matmuls of a layer have the same three dims: inputs, outputs, tokens. Where batches differ in length and one
    is as long as a layer is wide, a matmul may be of more than one weight. Those of the LM head are left out.
    """
    shapes = {shape: count for shape, count in seen.matmul_shapes.items() if not seen.head_widths & {*shape}}
    tokens = seen.pass_tokens
    of_one_length = all(tokens in shape for shape in shapes)
    surely, at_most = (dict.fromkeys(weights, 0.0) for _ in range(2))
    for shape, count in shapes.items():
        rest = Counter(shape) - Counter([tokens] if of_one_length else [])
        fitting = [weight for weight in weights if rest >= Counter(weight)]
        for weight in fitting:
            at_most[weight] += count
        if len(fitting) == 1:
            surely[fitting[0]] += count
    return surely, at_most


def _shape(weight: Weight) -> str:
    return f"{weight[0]} × {weight[1]}"


technique = api.Technique(
    name="fused_projections",
    stage=api.Stage.MATERIALIZE,
    apply=apply,
    requires=(
        api.Requirement(
            "it needs a model with several linear layers that share an input, as Llama has (GPT-2's queries, keys and values are "
            "one layer already)",
            lambda machine, recipe: recipe.shape().gated_mlp and not recipe.shape().joined_qkv,
        ),
    ),
    conflicts=("fsdp", "int8_base", "lora", "qlora", "tp"),
    knobs={
        "groups": api.KnobRange(
            ("all", *LAYERS),
            "layers that are joined: queries, keys and values; gate and up; or both",
            _groups_seen,
        )
    },
    claim=api.Claim(
        "matmuls of a block",
        -0.43,
        regime="Llama, forward and backward: 12 instead of 21, with the same FLOPs",
        source="arithmetic: 4 layers instead of 7, one matmul forward and two backward each",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect("norm.copies", 0.0, "one matmul, one cast"),
        api.MemoryEffect(
            "values.joined",
            1.0,
            "views of the joined output: queries and keys before RoPE are saved too",
            when=lambda knobs: knobs["groups"] != "mlp",
        ),
    ),
)
