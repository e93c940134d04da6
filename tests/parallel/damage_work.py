"""What ranks do in the tests of damaged checkpoints: save two, damage copies of the newer, search for the newest good one."""

from __future__ import annotations

import shutil
from pathlib import Path

from rush.parallel import AXES, Ranks
from rush.records.checkpoint_store import CheckpointStore
from tests.checkpoint.damages import ALONE, NEW, Damage, damages
from tests.parallel.rank_work import Result


def verify_damaged(world: int, place: str) -> Result:
    """For checkpoints of one rank and of all ranks, and every damage: what the search took, and what it reported."""
    from rush.parallel import join

    alone, together = CheckpointStore(Path(place) / "alone"), CheckpointStore(Path(place) / "together")
    with join({axis: world if axis == "ddp" else 1 for axis in AXES}, "cpu") as ranks:
        _save_twice(together, ranks)
        if ranks.main:
            _save_twice(alone, Ranks())
        written = ranks.on_rank0(lambda: sorted(file.name for file in together.path(20).iterdir()))
        pieces = sorted((name for name in written if name != "manifest.json"), key=_model_and_optimizer_first)
        found = {"intact": _search(together, ranks)["took"], "pieces": pieces}
        for store, files in ((alone, ALONE), (together, pieces)):
            for name, (damage, expected) in damages(files).items():
                copy = CheckpointStore(Path(place) / "copy")
                _damaged_copy(store, copy, damage, ranks)
                found[f"{store.folder.name}: {name}"] = {"expected": expected, **_search(copy, ranks)}
    return found


def _damaged_copy(store: CheckpointStore, copy: CheckpointStore, damage: Damage, ranks: Ranks) -> None:
    def make() -> None:
        shutil.rmtree(copy.folder, ignore_errors=True)
        shutil.copytree(store.folder, copy.folder)
        damage(copy.folder / NEW)

    ranks.on_rank0(make)


def _search(store: CheckpointStore, ranks: Ranks) -> Result:
    from rush.checkpoint.verification import newest_good

    heard: list[str] = []
    good = newest_good(store, ranks, lambda path, problem: heard.append(problem))
    ranks.all_gather_object("")  # nobody damages the next copy while another rank still reads
    return {"took": good.path.name if good else None, "heard": heard}


def _model_and_optimizer_first(name: str) -> tuple[bool, bool, str]:
    return not name.startswith("model"), not name.startswith("optimizer"), name


def _save_twice(store: CheckpointStore, ranks: Ranks) -> None:
    """Two checkpoints of equal shape and different content."""
    import torch
    from torch import nn

    from rush.checkpoint.saver import Saver

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saver = Saver(store, ranks, background=False)
    for step in (10, 20):
        torch.rand(1)  # so that the random state of the two differs as well
        model(torch.arange(11)).square().sum().backward()
        optimizer.step()
        saver.save(step, model, optimizer, {"position": step}, {"val_loss": 10 / step})
        saver.wait()
