"""Mixed precision in fp16: fp32 weights, fp16 matmuls, dynamic loss scaling.

fp16 has three more mantissa bits than bf16 but a far smaller range: gradients below about 6e-8 underflow to
zero. So the loss is multiplied by a scale before the backward pass, and the gradients are unscaled before
they are used. If a gradient is non-finite on any rank, all ranks skip the step and halve the scale; after
many finite steps it doubles. It is for GPUs without bf16 tensor cores (Volta, Turing); elsewhere `amp_bf16`
is as fast and needs no scaling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

import rush.techniques.api.contract as api
from rush.parallel import Ranks
from rush.techniques.api.evidence import matmuls_in

SCALE, GOOD_STEPS = "loss_scale", "loss_scale_good_steps"


class LossScaler(torch.amp.GradScaler):
    """torch's GradScaler with its state in the optimizer's first param group, so that checkpoints hold it."""

    ranks = Ranks()
    initial = 0.0
    """The scale that the optimizer's first group got."""

    def attach(self, optimizer: Optimizer) -> None:
        self.group = optimizer.param_groups[0]
        self.initial = float(self.get_scale())
        self.group[SCALE], self.group[GOOD_STEPS] = self.initial, 0
        self._known = (self.group[SCALE], self.group[GOOD_STEPS])

    def scale(self, outputs: Tensor) -> Tensor:  # type: ignore[override]
        stored = (self.group[SCALE], self.group[GOOD_STEPS])
        if stored != self._known:  # a checkpoint was loaded
            self.load_state_dict({**self.state_dict(), "scale": stored[0], "_growth_tracker": stored[1]})
            self._known = stored
        scaled: Tensor = super().scale(outputs)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        super().unscale_(optimizer)
        # Each rank checked its own gradients only: those of its stage, of its shard of a layer.
        for found in self._found_inf_per_device(optimizer).values():
            self.ranks.all_reduce_any(found)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        state = self.state_dict()
        self._known = self.group[SCALE], self.group[GOOD_STEPS] = state["scale"], state["_growth_tracker"]


def apply(build: api.Build, knobs: api.Knobs) -> None:
    build.autocast_dtype = torch.float16
    scaler = LossScaler(build.device.type, init_scale=float(knobs["initial_scale"]))
    scaler.ranks = build.ranks
    build.scaler = scaler
    build.optimizer_hooks.append(scaler.attach)
    build.facts.note(scaler)


_fp16_matmuls = matmuls_in("float16", weights="float32")


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Matmuls ran in fp16 from fp32 weights, and the gradients were checked and unscaled."""
    proof = _fp16_matmuls(seen, knobs)
    unscaled = any("_amp_foreach_non_finite_check_and_unscale_" in name for name in seen.ops)
    scaler = seen.facts.noted(LossScaler)
    scale = f"loss scale {scaler.get_scale():g}" if scaler is not None else "no loss scale"
    return api.Proof(
        proof.took_effect and unscaled, f"{proof.what}; {scale}, {seen.skipped_steps} steps skipped"
    )


def _scale_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The gradient scaler began with this scale, and its scale now is that times a power of two."""
    scaler = seen.facts.noted(LossScaler)
    began, now = (scaler.initial, float(scaler.get_scale())) if scaler is not None else (0.0, 0.0)
    doublings = math.log2(now / began) if began and now else 0.5
    return api.Proof(
        began == knobs["initial_scale"] and doublings.is_integer(),
        f"it began at {began:g} and is {now:g} now",
    )


technique = api.Technique(
    name="amp_fp16",
    alternative=api.Alternative.PRECISION,
    relative_error=2**-11,
    half_dtype="float16",
    stage=api.Stage.MODEL,
    apply=apply,
    conflicts=("amp_bf16", "bf16_master", "fp16_matmul", "pure_bf16"),
    knobs={"initial_scale": api.KnobRange((65536, 4096, 256), "loss scale at the first step", _scale_seen)},
    claim=api.Claim(
        "matmul rate",
        15.0,
        regime="fp16 tensor cores of an A100 against its fp32 units: 312 TFLOP/s dense against 19.5",
        source="NVIDIA A100 Tensor Core GPU datasheet; Micikevicius et al. 2017, arXiv:1710.03740",
        relative_to="plain fp32",
    ),
    parity=api.Parity.CLOSE,
    evidence=evidence,
    memory=(
        api.MemoryEffect("compute", 1.0, "2 bytes an element", size=2),
        api.MemoryEffect("casts", 1.0, "2 bytes for each weight of a matmul", size=2),
    ),
    work=(api.WorkEffect("matmul.dtype", "float16"),),
)
