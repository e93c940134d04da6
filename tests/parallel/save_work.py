"""What ranks do in the tests of how long a save keeps training waiting."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tests.parallel.rank_work import Result, loader, recipe

LARGE = (
    "model.shape.num_layers=4",
    "model.shape.hidden=768",
    "model.shape.head_dim=192",
    "model.shape.intermediate=2048",
)
"""28 million parameters, with AdamW's moments 330 MB."""


def save_often(
    layout: Mapping[str, int], target: str, saves: int, disk_s: float = 0.0, background: bool = True
) -> Result:
    """Train and save so many times to a disk that takes `disk_s` longer: what each save took, where its copy lay in memory,
    and the digests of what it wrote."""
    from rush.checkpoint.saver import Saver
    from rush.hardware import probe
    from rush.parallel import join
    from rush.records.checkpoint_manifest import read_manifest
    from rush.records.checkpoint_store import CheckpointStore
    from rush.records.metrics import SaveRow
    from rush.training.build import build
    from rush.training.step import launch_step

    class Disk(CheckpointStore):
        def begin(self, step: int) -> Path:
            time.sleep(disk_s)
            return super().begin(step)

    chosen = recipe("llama", layout, (), *LARGE)
    digests: dict[str, str] = {}

    def look(saved: SaveRow) -> None:
        path = CheckpointStore(Path(target)).path(saved["step"])
        files = read_manifest(path).files
        tensors = {name: entry for name, entry in files.items() if name.startswith(("model", "optimizer"))}
        digests.update({f"{saved['step']}/{name}": entry.sha256 for name, entry in tensors.items()})
        shutil.rmtree(path)

    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        saver = Saver(Disk(Path(target)), ranks, background, after=look)
        done, places = [], []
        with loader(run) as given:

            def go(step: int) -> None:
                launch_step(run, step, 1e-3, list(given.next_step())).result()

            go(1)
            saver.prepare(run.model, run.optimizer)
            for step in range(2, 2 * saves + 1, 2):
                go(step)
                saver.save(step, run.model, run.optimizer, {"loader": given.state()})
                places.append({name: held.data_ptr() for name, held in saver._staging._buffers.items()})
                go(step + 1)  # at the same time as the save
                if (saved := saver.wait()) is not None:
                    done.append(saved)
        return {"saves": done, "places": places, "digests": digests}
