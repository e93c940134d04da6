"""Ranks that use techniques with one setting of the knobs after another, and what the profile shows of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.parallel.rank_work import Result, loader, recipe


def show_knobs(
    family: str,
    layout: Mapping[str, int],
    settings: Sequence[Iterable[str]],
    more: Iterable[str] = (),
) -> list[Result]:
    """For each setting (techniques): the proofs, and the values of their knobs that this rank's profile shows. Of ranks that
    all do the same the first looks; the others have nothing to tell."""
    from rush.hardware import probe
    from rush.parallel import join
    from rush.profiling.observe import observe
    from rush.techniques.api.evidence import prove
    from rush.training.build import build
    from rush.training.step import launch_step
    from tests.techniques.knob_values import accepted

    chosen = [recipe(family, layout, techniques, *more) for techniques in settings]
    found = []
    with join(chosen[0].layout.model_dump(), "cpu") as ranks:
        for asked in chosen:
            run = build(asked, probe("cpu"), None, ranks)
            with loader(run) as given:
                launch_step(run, 1, 1e-3, list(given.next_step())).result()
                if not ranks.main and ranks.stages is None:  # it does what rank 0 does, which looks at itself
                    launch_step(run, 2, 1e-3, list(given.next_step())).result()
                    torch.distributed.barrier()
                    continue
                seen = observe(run, lambda given=given: list(given.next_step()), steps=1)  # type: ignore[misc]
                torch.distributed.barrier()
            found.append(
                {
                    "proofs": {name: (p.took_effect, p.what) for name, p in prove(run.uses, seen).items()},
                    "own": {
                        u.technique.name: u.technique.evidence(seen, u.knobs).took_effect for u in run.uses
                    },
                    "accepted": {use.technique.name: accepted(use, seen) for use in run.uses},
                    "used": {use.technique.name: dict(use.knobs) for use in run.uses},
                }
            )
    return found


def shard_all_but_one_block() -> Result:
    """Sharding leaves out the parameters of the second block: what the evidence of `fsdp` makes of it."""
    import torch.distributed.fsdp as library

    plain = library.fully_shard
    left_out: list[Any] = []

    def skipping(module: Any, **options: Any) -> Any:
        if not hasattr(module, "embedding") and len(left_out) < 2:
            left_out.append(module)
        if module in left_out[1:2]:
            module.set_gradient_divide_factor = module.set_force_sum_reduction_for_comms = lambda _: None
            return module
        ignored = {p for block in left_out[1:2] for p in block.parameters()}
        return plain(module, **options, ignored_params=ignored)

    library.fully_shard = skipping
    try:
        return next(iter(show_knobs("llama", {"fsdp": 2}, [()])), {})
    finally:
        library.fully_shard = plain


def reshard_blocks(ranks_of_fsdp: int, folder: str, source: str | None) -> dict[str, Any]:
    """Moments in blocks of 256 with a scale each, saved by these ranks, or loaded by them: what they hold, whole."""
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from rush.checkpoint import restore
    from rush.parallel import AXES, join
    from rush.parallel.placement import table_like
    from rush.parallel.sharded import fill, full_tensor, is_sharded
    from rush.records.checkpoint_store import CheckpointStore

    rows, width = 12, 1024
    sizes = {axis: ranks_of_fsdp if axis == "fsdp" else 1 for axis in AXES}
    with join(sizes, "cpu") as ranks:
        model = nn.Linear(width, rows, bias=False)
        if ranks.mesh is not None:
            fully_shard(model, mesh=ranks.mesh["fsdp"])
        optimizer = torch.optim.AdamW(model.parameters())
        state = optimizer.state[model.weight]
        codes = torch.arange(rows * width).remainder(251).to(torch.uint8).view(rows, width)
        scales = torch.arange(1, rows * width // 256 + 1, dtype=torch.float32)
        if source is None:
            whole = codes, scales.view(rows, -1) if is_sharded(model.weight) else scales
            state["exp_avg.codes"] = torch.empty_like(model.weight, dtype=torch.uint8, requires_grad=False)
            state["exp_avg.scales"] = (
                table_like(model.weight, tuple(whole[1].shape), torch.float32)
                if is_sharded(model.weight)
                else torch.empty_like(scales)
            )
            for name, value in zip(("exp_avg.codes", "exp_avg.scales"), whole, strict=True):
                fill(state[name], value)
            restore.save(CheckpointStore(Path(folder)), 1, model, optimizer, {}, ranks=ranks)
        else:
            restore.load(Path(source), model, optimizer, ranks=ranks)
            state = optimizer.state[model.weight]
        return {
            "right": torch.equal(full_tensor(state["exp_avg.codes"]), codes)
            and torch.equal(full_tensor(state["exp_avg.scales"]).flatten(), scales),
            "held": tuple(state["exp_avg.scales"].shape),
        }
