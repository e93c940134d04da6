"""AdamW with 8-bit moments.

Adam's two moments take 8 bytes per parameter in fp32, as much as weights and gradients together. Here they
are block-wise quantized to 8 bits with a scale per block, and dequantized, updated and quantized again inside
one kernel: about 2 bytes. Small tensors stay in fp32. It buys memory, not speed: the update moves fewer
bytes but does more arithmetic. Backend `rush` is our own kernel, one launch for all tensors; it also offers
stochastic rounding of bf16 weights (see `fused_update`), and supports sharded parameters (`fsdp`, `tp`):
blocks lie within rows, so they are the same on any number of ranks; a tensor whose rows, or a rank's shard of
them, are no multiple of 256 keeps fp32 moments. With `paged` (bitsandbytes) the moments of large tensors are
in unified memory: on the device while there is room, in host memory otherwise. It saves a run that would run
out of memory now and then; a run that always needs the room pays for the transfers at every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

import rush.techniques.api.contract as api
from rush.libraries import load_library
from rush.parallel.placement import table_like
from rush.parallel.sharded import local_tensor
from rush.recipe import Recipe
from rush.techniques.api.evidence import state_per_parameter
from rush.techniques.api.seams import needs_triton

BACKENDS = ("torchao", "bitsandbytes", "rush")
OWNERS = {"torchao": "torchao", "bitsandbytes": "bitsandbytes", "rush": "rush.kernels"}
"""Where the optimizer of a backend is defined."""
OP, KERNEL = "rush::adamw8bit", "adamw8bit_kernel"
STOCHASTIC = "rush::stochastic_rounding"
PAGED_FROM = 100_000
"""Elements of a tensor from which bitsandbytes pages its moments."""


def _torchao(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    """torchao's AdamW8bit with plain tensors as state between steps, so that checkpoints can hold it."""
    base: Any = load_library("torchao.optim").AdamW8bit
    packed_type: Any = load_library("torchao.optim.subclass_8bit").OptimState8bit

    class PlainAdamW8bit(base):  # type: ignore[misc]
        def step(self, closure: Callable[[], float] | None = None) -> None:
            for parameter, state in self.state.items():
                for key in ("exp_avg", "exp_avg_sq"):
                    if f"{key}.codes" in state:
                        parts = [state.pop(f"{key}.{part}") for part in ("codes", "scale", "qmap")]
                        state[key] = packed_type(*parts, key == "exp_avg", dtype=parameter.dtype)
            with warnings.catch_warnings():
                # A hint about the compiler's cache.
                warnings.filterwarnings("ignore", "OptimState8bit does not implement")
                super().step(closure)
            for state in self.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    if isinstance(state.get(key), packed_type):
                        packed = state.pop(key)
                        for part in ("codes", "scale", "qmap"):
                            state[f"{key}.{part}"] = getattr(packed, part)

    made: torch.optim.Optimizer = PlainAdamW8bit(*args, **kwargs)
    return made


def _bitsandbytes(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = load_library("bitsandbytes.optim").AdamW8bit(*args, **kwargs)
    return made


def _paged(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    """AdamW8bit with paged moments. Those loaded from a checkpoint are on the device, where the library would leave them,
    so they are paged before the next update."""
    base: Any = load_library("bitsandbytes.optim").PagedAdamW8bit

    class PagedAdamW8bit(base):  # type: ignore[misc]
        def step(self, closure: Callable[[], float] | None = None) -> None:
            for parameter, state in self.state.items():
                for key in ("state1", "state2"):
                    held = state.get(key)
                    if held is not None and held.is_cuda and held.numel() >= PAGED_FROM:
                        state[key] = self.get_state_buffer(parameter, dtype=held.dtype)
                        torch.cuda.synchronize()  # zero-filled by the device, written by the host
                        state[key].copy_(held)
            super().step(closure)

    made: torch.optim.Optimizer = PagedAdamW8bit(*args, **kwargs)
    return made


def paged_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of moments in unified memory, as the library marks them."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if getattr(value, "is_paged", False))


def _rush(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = import_module("rush.kernels.adamw8bit").RushAdamW8bit(*args, **kwargs)
    return made


@dataclass(frozen=True)
class QuantizedState:
    """The optimizer whose moments are quantized."""

    optimizer: torch.optim.Optimizer


def apply(build: api.Build, knobs: api.Knobs) -> None:
    makers = {"torchao": _torchao, "bitsandbytes": _bitsandbytes, "rush": _rush}
    build.make_optimizer = _paged if knobs["paged"] else makers[str(knobs["backend"])]
    build.optimizer_options.clear()

    def note(optimizer: torch.optim.Optimizer) -> None:
        build.facts.note(QuantizedState(optimizer))

    build.optimizer_hooks.append(note)
    if knobs["backend"] == "rush":
        build.optimizer_options |= {
            "stochastic_rounding": bool(knobs["stochastic_rounding"]),
            "seed": build.recipe.run.seed,
            "local": local_tensor,
            "alike": table_like,
        }
        # An upper bound: small tensors stay in fp32.
        build.facts.state_bytes_per_parameter = 5.5


def evidence(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The optimizer state is partly uint8 and less than 6 bytes per parameter (plain: 8, all quantized: 2)."""
    per_parameter = state_per_parameter(seen)
    return api.Proof(
        seen.state_bytes.get("uint8", 0) > 0 and per_parameter < 6,
        f"optimizer state {per_parameter:.2f} bytes per parameter, by dtype: "
        + (", ".join(f"{dtype} {size:,}" for dtype, size in sorted(seen.state_bytes.items())) or "none"),
    )


def _backend_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The optimizer's class is the library's, and our own kernel ran if, and only if, backend is rush."""
    noted = seen.facts.noted(QuantizedState)
    kinds = type(noted.optimizer).__mro__ if noted is not None else ()
    found = next(
        (b for b in BACKENDS for kind in kinds if kind.__module__.startswith(f"{OWNERS[b]}.")), "none"
    )
    ours = any(KERNEL in name for name in seen.kernels) if seen.kernels else OP in seen.ops
    return api.Proof(
        found == knobs["backend"] and ours == (found == "rush"),
        f"the optimizer is of {found}; our own kernel {'ran' if ours else 'did not run'}",
    )


def _rounding_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The profile shows our operator of stochastic rounding if, and only if, asked for."""
    stochastic = STOCHASTIC in seen.ops
    return api.Proof(
        stochastic == knobs["stochastic_rounding"],
        f"weights were rounded {'stochastically' if stochastic else 'to nearest'}",
    )


def _paged_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """Moments are in unified memory, as the library marks them, if, and only if, asked for."""
    noted = seen.facts.noted(QuantizedState)
    paged = paged_bytes(noted.optimizer) if noted is not None else 0
    return api.Proof(
        noted is not None and (paged > 0) == knobs["paged"], f"in unified memory: {paged:,} bytes of moments"
    )


def _backend(recipe: Recipe) -> str:
    return str(api.knob_of(recipe, "adam8bit", "backend", BACKENDS[0]))


def _installed(recipe: Recipe) -> bool:
    return _backend(recipe) == "rush" or find_spec(_backend(recipe)) is not None


def _reaches(knobs: api.Knobs) -> float:
    """Share of the copy rate, from `rush bench kernels` on an H200."""
    if knobs["backend"] != "rush":
        return 0.2
    return 0.73 if knobs["stochastic_rounding"] else 0.85


technique = api.Technique(
    name="adam8bit",
    stage=api.Stage.UPDATE,
    apply=apply,
    requires=(
        api.Requirement(
            "stochastic rounding is for bf16 weights and backend rush; add pure_bf16 and set backend rush",
            lambda machine, recipe: (
                not api.knob_of(recipe, "adam8bit", "stochastic_rounding", False)
                or (_backend(recipe) == "rush" and api.used(recipe, "pure_bf16"))
            ),
        ),
        api.Requirement(
            "it needs the library that its backend knob names (rush is our own kernel): "
            'pip install "optimization-rush[quant]"',
            lambda machine, recipe: _installed(recipe),
            library=True,
        ),
        api.Requirement(
            "with backend bitsandbytes it needs a CUDA GPU; torchao runs everywhere",
            lambda machine, recipe: machine.device == "cuda" or _backend(recipe) != "bitsandbytes",
        ),
        api.Requirement(
            "sharded parameters (layout.fsdp, layout.tp) need backend rush: the libraries' moments cannot be saved in a "
            "checkpoint; set backend rush",
            lambda machine, recipe: recipe.layout.fsdp * recipe.layout.tp == 1 or _backend(recipe) == "rush",
        ),
        api.Requirement(
            "paged moments need backend bitsandbytes; set it, or set paged to false",
            lambda machine, recipe: (
                not api.knob_of(recipe, "adam8bit", "paged", False) or _backend(recipe) == "bitsandbytes"
            ),
        ),
        api.Requirement(
            f"with backend rush {needs_triton.message}",
            lambda machine, recipe: _backend(recipe) != "rush" or needs_triton.met(machine, recipe),
        ),
    ),
    conflicts=("bf16_master", "fused_adamw", "fused_update"),
    knobs={
        "backend": api.KnobRange(BACKENDS, "implementation of the update", _backend_seen),
        "stochastic_rounding": api.KnobRange(
            (False, True), "stochastic rounding of bf16 weights (backend rush)", _rounding_seen
        ),
        "paged": api.KnobRange(
            (False, True),
            f"moments of tensors with at least {PAGED_FROM:,} elements in unified memory (backend bitsandbytes)",
            _paged_seen,
        ),
    },
    claim=api.Claim(
        "optimizer state bytes",
        -0.75,
        regime="block-wise quantized moments, the large tensors",
        source="Dettmers et al. 2021, arXiv:2110.02861",
        of_memory=True,
    ),
    parity=api.Parity.STATISTICAL,
    evidence=evidence,
    compiles=lambda knobs: knobs["backend"] == "torchao",
    memory=(
        api.MemoryEffect(
            "optimizer",
            1.0,
            "1 byte per moment and a scale per block of 256; paged: in host memory where there is no room",
            size=2.03,
        ),
        api.MemoryEffect("update", 0.0, "one kernel"),
    ),
    settings=(api.Setting({"backend": "rush"}), api.Setting({"backend": "bitsandbytes"}), api.Setting()),
    work=(
        api.WorkEffect(
            "update.bytes",
            6.0,
            "our kernel reads and writes the weight and reads its gradient",
            by_knob=lambda knobs: 4.0 if knobs["backend"] == "rush" else 6.0,
        ),
        api.WorkEffect("update.extra_bytes", 4.0, "quantized moments and scales"),
        api.WorkEffect(
            "update.efficiency",
            0.2,
            "measured; our kernel 0.85, with stochastic rounding 0.73",
            by_knob=_reaches,
        ),
        api.WorkEffect(
            "update.launches",
            39.0,
            "9 with other backends",
            by_knob=lambda knobs: 39.0 if knobs["backend"] == "torchao" else 9.0,
        ),
    ),
)
