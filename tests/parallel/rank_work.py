"""What ranks do in these tests, as functions that a fresh process can find; and a way to run one on several ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from pkgutil import walk_packages
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import rush.techniques
from tests.forks import Process

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
PRELOADED = [
    "tests.parallel.rank_work",
    "rush.profiling.observe",
    "rush.cli",
    "rush.training.loop",
    "tests.techniques.tiny_runs",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    *(module.name for module in walk_packages(rush.techniques.__path__, "rush.techniques.")),
    *(["tests.quick_interpreter"] if os.environ.get("TRITON_INTERPRET") == "1" else []),
]
Result = dict[str, Any]


def on_ranks(num_ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(*arguments)` in `num_ranks` new processes, which find each other as under torchrun; what each returned."""
    port = free_port()
    processes = [
        Process(_rank, rank, num_ranks, port, work, arguments, preloaded=PRELOADED)
        for rank in range(num_ranks)
    ]
    try:
        return _answers(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.line.close()


def _answers(processes: list[Process]) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(found) < len(processes):
        left = [process.line for rank, process in enumerate(processes) if rank not in found]
        ready = wait(left, max(0.0, deadline - time.monotonic()))
        assert ready, (
            f"ranks {[r for r in range(len(processes)) if r not in found]} did not answer in {LIMIT_S:g} s"
        )
        for rank, process in enumerate(processes):
            if process.line in ready and process.hear() == "answer":
                succeeded, answer = process.tell("answer")
                assert succeeded, f"rank {rank} failed:\n{answer}"
                found[rank] = answer
    return [found[rank] for rank in range(len(processes))]


def _rank(rank: int, world: int, port: int, work: Callable[..., Any], arguments: Any) -> Any:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    return work(*arguments)


def sharing_a_gpu(work: Callable[..., Any], *arguments: Any) -> Any:
    """On a rank: the work, with all ranks on one GPU if there are no more."""
    if torch.cuda.device_count() == 1:
        os.environ["RUSH_SHARE_DEVICE"] = "1"
    return work(*arguments)


def as_a_group(work: Callable[..., Any], *arguments: Any) -> Any:
    """On the only rank: the work, as a group of its own."""
    os.environ["RUSH_GROUP_OF_ONE"] = "1"
    return work(*arguments)


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def recipe(family: str, layout: Mapping[str, int], techniques: Iterable[str] = (), *more: str) -> Any:
    """A recipe of a few thousand parameters on documents of unequal length, four micro batches a step in all."""
    from tests.techniques.tiny_runs import recipe_of

    name = {"gpt2": "tiny", "llama": "llama-tiny"}[family]
    sizes = [f"layout.{axis}={size}" for axis, size in layout.items()]
    changes = ["objective.kind=sft", "batch.micro=1", "model.shape.vocab_size=259", *sizes, *more]
    return recipe_of(*techniques, name=name, overrides=changes)


def loader(run: Any) -> Any:
    from rush.data.document_loader import DocumentLoader
    from tests.techniques.tiny_runs import TextDocuments

    batch = run.recipe.batch
    return DocumentLoader(
        TextDocuments(longest=batch.sequence + 1),
        micro=batch.micro,
        sequence=batch.sequence,
        batches_per_step=run.recipe.accumulation * run.recipe.data_ranks,
        seed=run.recipe.run.seed,
        **run.loader_options,
    )


def learn(
    family: str,
    layout: Mapping[str, int],
    techniques: Iterable[str] = (),
    steps: int = 20,
    plant: str = "",
    more: Iterable[str] = (),
    device: str = "cpu",
) -> Result:
    """Losses and norms of the steps, the whole gradients of the first, what each technique proved, what this rank holds."""
    from rush.hardware import probe
    from rush.parallel import join
    from rush.parallel.sharded import full_tensor, local_tensor
    from rush.profiling.observe import observe
    from rush.techniques.api.evidence import prove
    from rush.training.build import build
    from rush.training.step import clip_factor, launch_step, validate

    chosen = recipe(family, layout, techniques, *more)
    with join(chosen.layout.model_dump(), device) as ranks:
        run = build(chosen, probe(device), None, ranks)
        _plant(run, plant)
        gradients: dict[str, np.ndarray[Any, Any]] = {}

        def keep(*_: Any) -> None:
            if not gradients:
                for name, parameter in run.model.named_parameters():
                    assert (parameter.grad is not None) == parameter.requires_grad
                    if parameter.grad is not None:
                        gradients[name] = full_tensor(parameter.grad).float().cpu().numpy().copy()

        run.optimizer.register_step_pre_hook(keep)
        losses, norms, labels, own_labels = [], [], [], []
        with loader(run) as given:
            for step in range(1, steps + 1):
                launched = launch_step(run, step, chosen.optimizer.lr, list(given.next_step()))
                own_labels.append(launched.counts.labels)
                result = launched.result()
                losses.append(result.loss)
                norms.append(result.grad_norm)
                labels.append(result.counts.labels)
            held_out = validate(run, given.next_step())
            result = launch_step(run, steps + 1, chosen.optimizer.lr, list(given.next_step())).result()
            losses.append(result.loss)
            proofs = {}
            # One is looked at while it makes a step with the others; of a pipeline each, because they do other things.
            if run.uses and (ranks.main or ranks.stages is not None):
                seen = observe(run, lambda: list(given.next_step()), steps=1)
                proofs = {name: (p.took_effect, p.what) for name, p in prove(run.uses, seen).items()}
            else:
                launch_step(run, steps + 2, chosen.optimizer.lr, list(given.next_step())).result()
        if not ranks.alone:
            torch.distributed.barrier()  # looking takes one longer than another, and rank 0 keeps the store
        parameters = list(run.model.parameters())
        state = [local_tensor(value) for held in run.optimizer.state.values() for value in held.values()]
        return {
            "losses": losses,
            "norms": norms,
            "labels": labels,
            "own_labels": own_labels,
            "held_out": held_out,
            "gradients": {name: value / clip_factor(run, norms[0]) for name, value in gradients.items()},
            "proofs": proofs,
            "parameter_bytes": sum(local_tensor(parameter).nbytes for parameter in parameters),
            "state_bytes": sum(value.nbytes for value in state),
        }


def _plant(run: Any, bug: str) -> None:
    """A historical bug, put back on purpose."""
    if bug == "the gradients are never reduced":
        told = list(run.before_pass)
        run.before_pass[:] = [lambda last: [tell(False) for tell in told]]
    elif bug == "every rank divides by its own labels":
        # What averaging the ranks' means comes to.
        plain = run.micro_pass
        own: list[int] = []

        def passes(batch: Any, loss_scale: Any) -> Any:
            own.append(batch.num_labels)
            return plain(batch, torch.full_like(loss_scale, 1 / batch.num_labels / run.recipe.accumulation))

        run.micro_pass = passes
    elif bug == "a tied embedding learns from one end only":
        run.passes.tied_with = None
    elif bug == "a stage's loss scale is applied twice":
        handed_on = run.micro_pass
        run.micro_pass = lambda batch, loss_scale: handed_on(batch, loss_scale * loss_scale)
    elif bug == "positions restart on each rank":
        cut = run.shard_batch

        def restarted(batch: Any) -> Any:
            part = cut(batch)
            return replace(part, positions_bt=torch.arange(part.tokens_bt.shape[1]).expand_as(part.tokens_bt))

        run.shard_batch = restarted
    elif bug == "labels are counted on every rank":
        units = run.objective.units
        run.objective.units = lambda batch: units(batch) * run.ranks.size("cp")
    elif bug == "the parts of a layer are not summed":
        (end,) = run.model.blocks[0].mlp.down._forward_hooks.values()
        end.__self__.stream = SimpleNamespace(sharded=False, reduce=lambda part_btd: part_btd)
    elif bug == "gradients of a norm stay those of a rank's tokens":
        run.model.blocks[0].mlp_norm.reduce_grads = False
    elif bug == "the whole matrix of an adapter learns from a rank's part of the layer only":
        for module in run.model.modules():
            if "adapter" in module._modules:
                kind = type(module.adapter)
                kind._read = lambda adapter, name: adapter._parameters[name].to_local()
    else:
        assert not bug


def take_over(
    family: str,
    layout: Mapping[str, int],
    sources: Mapping[str, str],
    target: str,
    techniques: Iterable[str] = (),
    more: Iterable[str] = (),
) -> Result:
    """Load checkpoints one after another and tell the whole state each gives, put together by torch; save the last one."""
    from rush.checkpoint import restore
    from rush.hardware import probe
    from rush.parallel import join
    from rush.records.checkpoint_store import CheckpointStore
    from rush.training.build import build

    chosen = recipe(family, layout, techniques, *more)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        found: Result = {}
        for name, source in sources.items():
            extra = restore.load(Path(source), run.model, run.optimizer, ranks=ranks)
            with loader(run) as given:
                given.load_state(extra["loader"])
                samples = [sample for batch in given.next_step() for sample in batch.samples]
            found[name] = {"state": whole_state(run), "samples": samples, "random": torch.rand(2).tolist()}
        restore.load(Path(source), run.model, run.optimizer, ranks=ranks)
        restore.save(CheckpointStore(Path(target)), 7, run.model, run.optimizer, extra, ranks=ranks)
        return found


def whole_state(run: Any) -> dict[str, str]:
    """A digest of every tensor of the model and the optimizer, whole, as all ranks together hold it."""
    import hashlib

    from rush.parallel.sharded import full_tensor

    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    tensors = dict(run.model.state_dict())
    for parameter, values in run.optimizer.state.items():
        tensors |= {f"{names[id(parameter)]}/{key}": value for key, value in values.items()}
    told = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor).detach().contiguous()
        content = full.reshape(-1).view(torch.uint8).numpy().tobytes()
        told[name] = f"{full.dtype} {full.numel()} {hashlib.sha256(content).hexdigest()}"
    return told


def spoken_over(layout: Mapping[str, int], device: str) -> str:
    """Whose operations carry what the ranks exchange."""
    from rush.parallel import join

    with join(recipe("gpt2", layout).layout.model_dump(), device):
        return str(torch.distributed.get_backend())


def look_around(layout: Mapping[str, int]) -> Result:
    """A rank's place, what it hears from the others, and the samples it is given in three steps."""
    from rush.errors import DataError
    from rush.hardware import probe
    from rush.parallel import join
    from rush.training.build import build

    def fail() -> str:
        raise DataError("no such corpus")

    chosen = recipe("gpt2", layout)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        found: Result = {
            "alone": ranks.alone,
            "process group": torch.distributed.is_initialized(),
            "data_rank": ranks.data_rank,
            "sum": float(ranks.all_reduce(torch.tensor(float(ranks.rank)))),
            "told": ranks.on_rank0(lambda: f"by rank {ranks.rank}"),
        }
        if ranks.mesh is not None:
            found["place"] = tuple(ranks.mesh.get_local_rank(axis) for axis in ("ddp", "fsdp"))
        try:
            ranks.on_rank0(fail)
        except DataError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        run = build(chosen, probe("cpu"), None, ranks)
        with loader(run) as given:
            found["samples"] = [list(batch.samples) for _ in range(3) for batch in given.next_step()]
        return found


def meet_trouble(layout: Mapping[str, int], techniques: Iterable[str]) -> Result:
    """Three steps: rank 1 has no label; nobody has one; rank 1's loss is not a number."""
    from rush.data.batch import IGNORED
    from rush.errors import RushError
    from rush.hardware import probe
    from rush.parallel import join
    from rush.parallel.sharded import full_tensor
    from rush.training.build import build
    from rush.training.step import launch_step

    chosen = recipe("gpt2", layout, techniques)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        plain = run.micro_pass
        said: list[str] = []
        weights: list[bytes] = []
        with loader(run) as given:
            for step in (1, 2, 3):
                batches = list(given.next_step())
                if step == 2 or (step == 1 and ranks.data_rank == 1):
                    for batch in batches:
                        batch.labels_bt.fill_(IGNORED)
                spoiled = step == 3 and ranks.rank == 1
                run.micro_pass = (lambda b, s: plain(b, s * torch.nan) * torch.nan) if spoiled else plain
                try:
                    result = launch_step(run, step, 1e-3, batches).result()
                    said.append(f"loss {result.loss:.5f} over {result.counts.labels} labels")
                except RushError as error:
                    said.append(f"{type(error).__name__}: {str(error).split(',')[0]}")
                weights.append(full_tensor(run.model.embedding.weight).detach().numpy().tobytes())
        return {"said": said, "weights": weights}


def save_on_a_full_disk(target: str) -> Result:
    """Three saves in the background of two ranks; at the second, rank 1's disk is full. What each rank hears, and what stays."""
    from rush.checkpoint.saver import Saver
    from rush.checkpoint.writer import Writer
    from rush.errors import MachineError
    from rush.hardware import probe
    from rush.parallel import join
    from rush.records.checkpoint_store import CheckpointStore
    from rush.training.build import build

    class FullDisk(Writer):
        def _write_part(self, content: Any, folder: Path) -> dict[str, Any]:
            if content.step == 2 and self.ranks.rank == 1:
                raise MachineError(f"Cannot write {folder.name}: the disk is full.")
            return super()._write_part(content, folder)

    chosen = recipe("gpt2", {"fsdp": 2})
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        saver, said = Saver(CheckpointStore(Path(target)), ranks), []
        saver._writer = FullDisk(saver.checkpoints, ranks, saver._check_abandoned)
        for step in (1, 2, 3):
            try:
                saver.save(step, run.model, run.optimizer, {})
                saver.wait()
                said.append("saved")
            except MachineError as error:
                said.append(f"{error} {getattr(error, '__notes__', [])}")
        return {"said": said}


def gather_both_ways() -> list[list[list[float]]]:
    """The functional gather as torch has it, then through the host; on a CPU, which both can read."""
    from rush.parallel import AXES, join
    from rush.parallel.shared_gpu import gather_through_host

    with join({axis: 2 if axis == "cp" else 1 for axis in AXES}, "cpu") as ranks:
        assert ranks.mesh is not None
        own, group = torch.arange(6.0).view(3, 2) + 10 * ranks.rank, ranks.mesh["cp"].get_group().group_name
        functional = torch.ops._c10d_functional

        def gather() -> list[list[float]]:
            whole: torch.Tensor = functional.wait_tensor(functional.all_gather_into_tensor(own, 2, group))
            return [list(map(float, row)) for row in whole.tolist()]

        plain = gather()
        gather_through_host("CPU")
        return [plain, gather()]


def read_late(seconds: float) -> str:
    """Rank 0 is done at once; rank 1 reads what it was told after a while."""
    from rush.parallel import AXES, join

    with join({axis: 2 if axis == "ddp" else 1 for axis in AXES}, "cpu") as ranks:
        assert ranks.store is not None
        if ranks.main:
            ranks.store.set("last words", "farewell")
            return "gone"
        time.sleep(seconds)
        return str(ranks.store.get("last words").decode())
