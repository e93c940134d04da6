"""What ranks do in the tests of layers that are cut, as functions that a fresh process can find."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from tests.parallel.rank_work import Result, recipe


class Odd(nn.Module):
    """Parameters that divide by nothing, and one layer of three parts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.words = nn.Linear(5, 13)
        self.three = nn.Linear(5, 18)
        self.narrow = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(5)
        self.blocks = nn.Linear(1536, 18)
        self.across = nn.Linear(1536, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)


def hold_in_parts(layout: Mapping[str, int]) -> Result:
    """Tensors that torch cut once or twice: what `sharded` makes of them, and what plain ones would be."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    from rush.parallel import AXES, join
    from rush.parallel.placement import table_like
    from rush.parallel.sharded import (
        boxes,
        fill,
        full_tensor,
        gather,
        local_norm,
        local_tensor,
        scale,
        total_norm,
    )
    from rush.parallel.tensor_parallel import ColwiseLinear, ReplicatedOnStream, ResidualStream, RowwiseLinear

    with join({axis: layout.get(axis, 1) for axis in AXES}, "cpu") as ranks:
        assert ranks.mesh is not None
        plain, cut = Odd(), Odd()
        stream = ResidualStream(ranks.mesh["tp"], True)
        styles = {
            "words": ColwiseLinear(),
            "three": ColwiseLinear(3),
            "narrow": RowwiseLinear(stream),
            "norm": ReplicatedOnStream(stream),
        }
        styles |= {"blocks": ColwiseLinear(3), "across": RowwiseLinear(stream)}
        parallelize_module(cut, ranks.mesh["tp"], styles)
        if ranks.size("fsdp") > 1:
            fully_shard(cut, mesh=ranks.mesh["fsdp"])
        values, parts = dict(plain.named_parameters()), dict(cut.named_parameters())
        apart = {
            name: float((full_tensor(parts[name]) - value).abs().max()) for name, value in values.items()
        }
        for name, value in values.items():
            mine = [
                value[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in boxes(parts[name])
            ]
            apart[f"{name}, in boxes"] = float((torch.cat(mine) - local_tensor(parts[name])).abs().max())
        for name, value in values.items():
            fill(parts[name], 2 * value)
        again = gather(parts, keep=True)
        apart |= {f"{name}, filled": float((again[name] - 2 * values[name]).abs().max()) for name in values}
        for name in ("blocks.weight", "across.weight"):  # a number for each 256 of a row
            numbers = torch.arange(values[name].numel() / 256).view(-1, 6)
            table = table_like(parts[name], tuple(numbers.shape), torch.float32)
            fill(table, numbers)
            apart[f"{name}, its blocks"] = float((full_tensor(table) - numbers).abs().max())
        norm, wanted = (
            float(total_norm([p.detach() for p in tensors.values()], local_norm))
            for tensors in (parts, values)
        )
        scale([part.detach() for part in parts.values()], torch.tensor(0.25))
        halved = float(total_norm([part.detach() for part in parts.values()]))
        return {"apart": apart, "norm": norm / 2, "wanted": wanted, "scaled": 2 * halved}


def look_inside(family: str, techniques: Iterable[str] = ()) -> Result:
    """The plain tensors that reach attention, MLP and norms of a rank, the logits of its head, and what it initially holds."""
    from rush.hardware import probe
    from rush.models.initial import initial_values
    from rush.parallel import join
    from rush.parallel.sharded import full_tensor, is_sharded
    from rush.training.build import build
    from rush.training.step import launch_step
    from tests.techniques.tiny_runs import make_loader

    chosen = recipe(family, {"tp": 2}, techniques)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        block: Any = run.model.blocks[0]
        shapes: dict[str, list[tuple[int, ...]]] = {}

        def watch(name: str, module: nn.Module) -> None:
            def look(_: Any, given: tuple[Any, ...]) -> None:
                tensors = [x for x in given if isinstance(x, torch.Tensor)]
                assert not any(is_sharded(x) for x in tensors), name
                shapes[name] = [tuple(x.shape) for x in tensors]

            module.register_forward_pre_hook(look)

        slots = {"core": block.attention.core, "activation": block.mlp.activation, "norm": block.mlp_norm}
        if family == "llama":
            slots |= {"rotate": block.attention.rotate, "fan_out": block.attention.fan_out}
        for name, module in slots.items():
            watch(name, module)
        # The values that one rank would start with.
        start = {name: full_tensor(p) for name, p in run.model.named_parameters()}
        same = all(torch.equal(start[n], v) for n, v in initial_values(run.model.shape, chosen.run.seed))
        with make_loader(run) as given:
            batches = list(given.next_step())
            launch_step(run, 1, 1e-3, batches).result()
            with torch.no_grad(), run.in_step():
                logits = run.model(batches[0].tokens_bt)
        return {"shapes": shapes, "same start": same, "logits": tuple(logits.shape)}
