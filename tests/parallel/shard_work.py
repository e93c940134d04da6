"""What ranks do in the tests of techniques beside sharding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.parallel.rank_work import Result, loader, recipe


def overfit(
    layout: Mapping[str, int], techniques: Iterable[str], steps: int, more: Iterable[str] = ()
) -> Result:
    """The losses of training on one step's batches over and over, and the bytes this rank holds by part."""
    from rush.hardware import probe
    from rush.models.initial import initial_values
    from rush.parallel import join
    from rush.training.build import build
    from rush.training.step import train_step

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
    from rush.parallel.sharded import local_tensor

    tensors = [*run.model.parameters(), *run.model.buffers()]
    tensors = [tensor for tensor in tensors if tensor is not run.model.rotary.frequencies]
    state = [value for held in run.optimizer.state.values() for value in held.values()]
    return {
        "base": sum(local_tensor(tensor).nbytes for tensor in tensors if not tensor.requires_grad),
        "trained": sum(local_tensor(tensor).nbytes for tensor in tensors if tensor.requires_grad),
        "moments": sum(local_tensor(value).nbytes for value in state if value.dim()),
    }


def pass_adapters(
    layout: Mapping[str, int],
    techniques: Iterable[str],
    source: str | None,
    target: str,
    steps: int,
    more: Iterable[str] = (),
) -> Result:
    """Load adapters (or a whole model) into this layout, make some steps, save them."""
    from rush.checkpoint import restore
    from rush.checkpoint.frozen_base import gathered_model
    from rush.hardware import probe
    from rush.parallel import join
    from rush.records.checkpoint_store import CheckpointStore
    from rush.training.build import build
    from rush.training.step import train_step

    chosen = recipe("llama", layout, techniques, *more)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        with loader(run) as given:
            if source is not None:
                given.load_state(restore.load(Path(source), run.model, run.optimizer, ranks=ranks)["loader"])
            losses = [
                train_step(run, step, chosen.optimizer.lr, given.next_step()).loss
                for step in range(1, steps + 1)
            ]
            store = CheckpointStore(Path(target))
            extra = {"loader": given.state()}
            path = restore.save(store, 7, run.model, run.optimizer, extra, ranks=ranks)
            twin = gathered_model(run.model, ranks)
        logits = None if twin is None else twin(batch_of(run).tokens_bt).detach().numpy()
        return {"path": str(path), "losses": losses, "logits": logits}


def batch_of(run: Any) -> Any:
    with loader(run) as given:
        return next(iter(given.next_step()))


def prefer(layout: Mapping[str, int], techniques: Iterable[str], more: Iterable[str], cache: str) -> Result:
    """Losses and figures of learning preferences, the reference's numbers, and a validation over an odd number of pairs."""
    import numpy as np

    from rush.data.document_loader import DocumentLoader, document_validation
    from rush.hardware import probe
    from rush.parallel import join
    from rush.training.build import build
    from rush.training.reference import compute, set_live_reference, wants_cached
    from rush.training.step import launch_step, validate
    from tests.training.small_pairs import PairsInMemory

    changes = ("objective.kind='dpo'", "batch.micro=2", "batch.total_tokens=256", *more)
    chosen = recipe("llama", layout, techniques, *changes)
    pairs = PairsInMemory(25, vocabulary=200)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        set_live_reference(run, None)
        held = None
        if wants_cached(run):
            held = compute(run, pairs, len(pairs), Path(cache) / "reference.npy")
        settings = {"paired": True, "references": held}
        losses, figures = [], []
        with DocumentLoader(
            pairs,
            micro=2,
            sequence=chosen.batch.sequence,
            batches_per_step=chosen.accumulation * chosen.data_ranks,
            seed=1,
            **settings,
            **run.loader_options,
        ) as given:
            for step in range(1, 7):
                launched = launch_step(run, step, chosen.optimizer.lr, list(given.next_step()))
                losses.append(launched.result().loss)
                figures.append(dict(launched.figures))
        place = {"rank": ranks.data_rank, "world": ranks.data_ranks}
        held_out = validate(
            run, document_validation(pairs, None, 2, chosen.batch.sequence, 23, **settings, **place)
        )
        figures.append(dict(run.objective.figures(ranks.all_reduce)))
        left = sorted(path.name for path in Path(cache).iterdir())
        return {
            "losses": losses,
            "figures": figures,
            "held_out": held_out,
            "reference": None if held is None else np.array(held),
            "left": left,
        }


def wait_on_host(layout: Mapping[str, int], techniques: Iterable[str] = ()) -> Result:
    """Losses of steps whose activations are kept elsewhere; what asks for a GPU is taken away, as a CPU has host memory."""
    from dataclasses import replace

    from rush.hardware import probe
    from rush.parallel import join
    from rush.techniques import registry
    from rush.techniques.memory.on_host import OffloadedActivations
    from rush.training.build import build
    from rush.training.step import train_step

    known: Any = registry()
    known["offload_activations"] = replace(known["offload_activations"], requires=())
    more = ("batch.micro=8", "batch.total_tokens=512", "model.shape.num_layers=4")
    chosen = recipe("llama", layout, ("{name='offload_activations', pin=false}", *techniques), *more)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        with loader(run) as given:
            losses = [train_step(run, step, 1e-3, given.next_step()).loss for step in range(1, 4)]
        offloaded = run.facts.noted(OffloadedActivations)
        assert offloaded is not None
        return {"losses": losses, "moved": offloaded.moved["bytes"]}


def reductions(layout: Mapping[str, int], techniques: Iterable[str], more: Iterable[str]) -> int:
    """How often the ranks add something up in one step."""
    from rush.hardware import probe
    from rush.parallel import join
    from rush.training.build import build
    from rush.training.step import launch_step

    chosen = recipe("gpt2", layout, techniques, *more)
    with join(chosen.layout.model_dump(), "cpu") as ranks, torch.profiler.profile() as profile:
        run = build(chosen, probe("cpu"), None, ranks)
        with loader(run) as given:
            launch_step(run, 1, chosen.optimizer.lr, list(given.next_step())).result()
        torch.distributed.barrier()
    return sum(event.count for event in profile.key_averages() if event.key == "c10d::allreduce_")


def whole_matrices(shape: tuple[int, int], number: int) -> bool:
    """Whether each rank gets its rows of a computation on whole matrices, of which it had its rows only."""
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from rush.parallel.sharded import local_tensor
    from rush.parallel.whole_matrices import on_whole_matrices

    torch.distributed.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        generator = torch.Generator().manual_seed(1)
        matrices = torch.randn(number, *shape, generator=generator)
        sharded = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in matrices]

        def compute(whole_kmn: torch.Tensor) -> torch.Tensor:
            return whole_kmn.flip(1).cumsum(1)  # every row depends on others

        found = on_whole_matrices(compute, [local_tensor(one) for one in sharded], sharded[0])
        wanted = [local_tensor(distribute_tensor(one, mesh, [Shard(0)])) for one in compute(matrices)]
        return all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))
    finally:
        torch.distributed.destroy_process_group()
