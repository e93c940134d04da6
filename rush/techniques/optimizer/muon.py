"""Muon: momentum whose matrices are orthogonalized before the update, AdamW for the rest.

The gradient of a matrix has a few large singular values and many small ones, and momentum or Adam mostly
follow the large ones. Muon takes the momentum of a block's matrix and makes all its singular values about 1,
with five Newton–Schulz iterations: bf16 matmuls, which are fast on a GPU. So rare directions are learned as
fast as common ones, and the same loss needs fewer steps. It changes what is learned, so a race judges it
(`rush race`), not parity. Its updates are scaled to the size of AdamW's, so `optimizer.lr` keeps its meaning.
State is one momentum per matrix instead of two moments. It loses where steps are small: the cost of an
iteration does not depend on the batch, so it is a few per cent of a step of half a million tokens and most of
a step of a thousand. Embeddings, the LM head, norms and biases stay with AdamW. With `fsdp` each rank
orthogonalizes its share of the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import rush.techniques.api.contract as api
from rush.models import Decoder
from rush.techniques.optimizer.muon_update import ITERATIONS, LABEL, Muon


@dataclass(frozen=True)
class OrthogonalizedState:
    """The optimizer, and how many matrices it orthogonalizes."""

    optimizer: torch.optim.Optimizer
    matrices: int


def matrices_of(model: Decoder) -> dict[int, tuple[int, ...]]:
    """The blocks' matrices by the id of their parameter, with the rows of each that are a matrix of their own: queries, keys and
    values that are stored as one, and otherwise all."""
    found: dict[int, tuple[int, ...]] = {}
    for role, layers in model.linears().items():
        for _, layer in layers if role != "head" else []:
            found[id(layer.weight)] = model.shape.qkv_rows if role == "qkv" else (layer.weight.shape[0],)
    return found


def apply(build: api.Build, knobs: api.Knobs) -> None:
    matrices = matrices_of(build.model)
    build.make_optimizer = Muon
    build.optimizer_options.clear()
    # A CPU without bf16 units multiplies bf16 a hundred times slower than fp32.
    dtype = torch.bfloat16 if build.device.type == "cuda" else torch.float32
    build.optimizer_options |= {"matrices": matrices, "dtype": dtype}
    build.facts.state_bytes_per_parameter = 8  # an upper bound: AdamW's for what is no matrix

    def note(optimizer: torch.optim.Optimizer) -> None:
        build.facts.note(OrthogonalizedState(optimizer, len(matrices)))

    build.optimizer_hooks.append(note)


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows the Newton–Schulz iteration, and the blocks' matrices, and nothing else, have one momentum and no second
    moment."""
    noted = seen.facts.noted(OrthogonalizedState)
    states = list(noted.optimizer.state.values()) if noted is not None else []
    momenta = sum(set(state) == {"momentum_buffer"} for state in states)
    iterated = any(LABEL in name for name in seen.ops)
    return api.Proof(
        noted is not None and iterated and momenta == noted.matrices > 0,
        f"the Newton–Schulz iteration {'ran' if iterated else 'did not run'}; {momenta} of {noted.matrices if noted else 0} matrices of "
        f"the blocks have one momentum and no second moment",
    )


technique = api.Technique(
    name="muon",
    stage=api.Stage.UPDATE,
    apply=apply,
    requires=(
        api.Requirement(
            "it updates on the device; set fsdp's knob offload to false",
            lambda machine, recipe: not api.knob_of(recipe, "fsdp", "offload", False),
        ),
    ),
    conflicts=(
        "adam8bit",
        "bf16_master",
        "fused_adamw",
        "fused_update",
        "int8_base",
        "lora",
        "pure_bf16",
        "qlora",
        "tp",
    ),
    reasons={
        "adam8bit": "both replace the update",
        "bf16_master": "it keeps its momentum and weights in fp32; take amp_bf16",
        "fused_adamw": "both replace the update; what is no matrix is updated by torch's fused AdamW anyway",
        "fused_update": "both replace the update; what is no matrix is updated by torch's fused AdamW anyway",
        "int8_base": "its update is for whole matrices, and the base is frozen",
        "lora": "its update is for whole matrices, and adapters have a low rank by design",
        "pure_bf16": "most of its updates are below the last bit of a bf16 weight; take amp_bf16",
        "qlora": "its update is for whole matrices, and adapters have a low rank by design",
        "tp": "it orthogonalizes whole matrices, of which tp gives each rank a part; use fsdp",
    },
    claim=api.Claim(
        "tokens to the same loss",
        -0.48,
        regime="about 52 % of AdamW's training FLOPs, compute-optimal models of 0.4B to 1.5B parameters",
        source="Liu et al. 2025, arXiv:2502.16982",
    ),
    parity=api.Parity.CHANGES,
    evidence=evidence,
    memory=(
        api.MemoryEffect("optimizer.blocks", 1.0, "one momentum, 4 bytes per weight of a matrix", size=4),
        api.MemoryEffect(
            "update.matrices", 1.0, "gradients, momenta and updates of those updated at once", size=20
        ),
        api.MemoryEffect("update", 0.0, "torch's fused AdamW for the rest"),
    ),
    work=(
        api.WorkEffect("update.bytes", 12.0, "momentum and update of a matrix are written and read"),
        api.WorkEffect("update.launches", 6.0, "of lists of tensors, and the iterations' matmuls"),
        api.WorkEffect("update.iterations", float(ITERATIONS), "Newton–Schulz, in bf16"),
    ),
)
