"""What ranks do in the tests of techniques beside sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rank_work import Result, loader, recipe


def overfit(
    layout: Mapping[str, int], techniques: Iterable[str], steps: int, more: Iterable[str] = ()
) -> Result:
    """The losses of training on one step's batches over and over, and the bytes this rank holds by part."""
    from rush.hardware import probe
    from rush.models.initial import initial_values
    from rush.parallel import join
    from rush.train.build import build
    from rush.train.step import train_step

    chosen = recipe("llama", layout, techniques, *more)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        # Tokens far apart from each other: with a frozen head of random directions no answer could become certain.
        start = {
            name: value * (8 if value.dim() == 2 else 1)
            for name, value in initial_values(chosen.shape(), seed=1)
        }
        run = build(chosen, probe("cpu"), start, ranks)
        with loader(run) as given:
            batches = list(given.next_step())
        losses = [train_step(run, step, chosen.optimizer.lr, batches).loss for step in range(1, steps + 1)]
        return {"losses": losses, **held_bytes(run)}


def held_bytes(run: Any) -> dict[str, int]:
    """What lies in this rank's memory between two steps: the frozen base, the trained parameters, their moments."""
    from rush.parallel.sharded import own_part

    tensors = [*run.model.parameters(), *run.model.buffers()]
    tensors = [tensor for tensor in tensors if tensor is not run.model.rotary.frequencies]
    state = [value for held in run.optimizer.state.values() for value in held.values()]
    return {
        "base": sum(own_part(tensor).nbytes for tensor in tensors if not tensor.requires_grad),
        "trained": sum(own_part(tensor).nbytes for tensor in tensors if tensor.requires_grad),
        "moments": sum(own_part(value).nbytes for value in state if value.dim()),
    }


def pass_adapters(
    layout: Mapping[str, int], techniques: Iterable[str], source: str | None, target: str, steps: int
) -> Result:
    """Load adapters into this layout, make some steps, save them."""
    from rush.hardware import probe
    from rush.parallel import join
    from rush.records.checkpoints import CheckpointStore
    from rush.train import checkpoint
    from rush.train.build import build
    from rush.train.frozen import whole_model
    from rush.train.step import train_step

    chosen = recipe("llama", layout, techniques)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        with loader(run) as given:
            if source is not None:
                given.load_state(checkpoint.load(Path(source), run.model, run.optimizer)["loader"])
            losses = [
                train_step(run, step, chosen.optimizer.lr, given.next_step()).loss
                for step in range(1, steps + 1)
            ]
            store = CheckpointStore(Path(target))
            extra = {"loader": given.state()}
            path = checkpoint.save(store, 7, run.model, run.optimizer, extra, ranks=ranks)
            twin = whole_model(run.model, keep=ranks.main)
        logits = None if twin is None else twin(batch_of(run).tokens_bt).detach().numpy()
        return {"path": str(path), "losses": losses, "logits": logits}


def batch_of(run: Any) -> Any:
    with loader(run) as given:
        return next(iter(given.next_step()))
