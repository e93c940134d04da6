"""A checkpoint of any layout is loaded into any other: the same weights, optimizer state and data position, to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rush.checkpoint import restore
from rush.checkpoint.reader import SavedTensors
from rush.hardware import probe
from rush.records.checkpoint_pieces import PIECES, read_pieces
from rush.records.checkpoint_store import CheckpointStore, verify
from rush.training.build import build
from rush.training.step import train_step
from tests.parallel.knob_work import reshard_blocks
from tests.parallel.rank_work import (
    Result,
    loader,
    on_ranks,
    recipe,
    save_on_a_full_disk,
    take_over,
    whole_state,
)

LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "ddp 2": {"ddp": 2},
    "fsdp 2": {"fsdp": 2},
    "fsdp 4": {"fsdp": 4},
    "ddp 2 × fsdp 2": {"ddp": 2, "fsdp": 2},
    "pp 2": {"pp": 2},
    "pp 2 × fsdp 2": {"pp": 2, "fsdp": 2},
    "tp 2": {"tp": 2},
    "tp 2 × fsdp 2": {"tp": 2, "fsdp": 2},
    "cp 2": {"cp": 2},
    "cp 2 × fsdp 2": {"cp": 2, "fsdp": 2},
}
QUICK = ["ddp 2", "fsdp 2"]
SLOW = [name for name in LAYOUTS if name != "one"]


class Passes:
    """A state, saved by one rank after two steps, then taken over by every layout, and by each from all of those."""

    def __init__(
        self, folder: Path, family: str, techniques: tuple[str, ...] = (), more: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.family, self.techniques, self.more = folder, family, techniques, more
        chosen = recipe(family, {}, techniques, *more)
        run = build(chosen, probe("cpu"))
        with loader(run) as given:
            for step in (1, 2):
                train_step(run, step, chosen.optimizer.lr, given.next_step())
            store, extra = CheckpointStore(folder / "start"), {"loader": given.state()}
            self.first = restore.save(store, 7, run.model, run.optimizer, extra)
            self.random = torch.rand(2).tolist()
            self.samples = sorted(sample for batch in given.next_step() for sample in batch.samples)
        self.state = whole_state(run)

    def take_over(self, layout: str, sources: Mapping[str, str], target: Path) -> list[Result]:
        sizes = LAYOUTS[layout]
        return on_ranks(
            math.prod(sizes.values()),
            take_over,
            self.family,
            sizes,
            sources,
            str(target),
            self.techniques,
            self.more,
        )

    @cache  # noqa: B019 (a few of them, for the length of a test)
    def saved_by(self, layout: str) -> Path:
        self.check(layout, self.take_over(layout, {"one": str(self.first)}, self.folder / layout))
        return self.folder / layout / "step-000007"

    def check(self, layout: str, found: list[Result]) -> None:
        for source in found[0]:
            state: dict[str, str] = {}
            for answer in found:  # ranks that hold other names add to it; the same name must be the same
                told = answer[source]["state"]
                assert all(state.get(name, value) == value for name, value in told.items())
                state |= told
                assert answer[source]["random"] == self.random
            assert state == self.state, (source, layout)
            samples = {sample for answer in found for sample in answer[source]["samples"]}
            assert sorted(samples) == self.samples, (source, layout)

    def check_pairs(self, layout: str, sources: list[str]) -> None:
        places = {name: str(self.saved_by(name)) for name in sources}
        self.check(layout, self.take_over(layout, places, self.folder / f"{layout} again"))
        target = verify(self.folder / f"{layout} again" / "step-000007")
        if layout == "one":
            for file in ("model.safetensors", "optimizer.safetensors", "state.json"):
                assert (target.path / file).read_bytes() == (self.first / file).read_bytes(), file
        first = verify(self.first)
        for kind in ("model", "optimizer"):
            with SavedTensors(first, kind) as a, SavedTensors(target, kind) as b:
                assert dict(a).keys() == dict(b).keys()
                # Scales of blocks may be a row or a table.
                assert all(torch.equal(a[name].flatten(), b[name].flatten()) for name in a)


def test_a_checkpoint_of_each_layout_is_taken_over_by_the_others(tmp_path: Path) -> None:
    passes = Passes(tmp_path, "gpt2")
    for layout in ("one", "fsdp 2", "ddp 2"):
        passes.check_pairs(layout, QUICK)
    _check_written_once_and_evenly(passes.saved_by("ddp 2"), whole=passes.first)
    _check_written_once_and_evenly(passes.saved_by("fsdp 2"), whole=passes.first)
    _check_torch_reads_it(passes)


def _check_written_once_and_evenly(path: Path, whole: Path) -> None:
    files = sorted(path.glob("*-of-*.safetensors"))
    assert [file.name for file in files] == [
        f"{kind}-0000{rank}-of-00002.safetensors" for kind in ("model", "optimizer") for rank in (1, 2)
    ]
    tables = read_pieces(path / PIECES, verify(path).manifest.files)  # which refuses gaps and overlaps
    values = 0
    for file in files:
        with safe_open(file, framework="pt") as open_file:
            values += sum(math.prod(open_file.get_slice(name).get_shape()) for name in open_file.keys())  # noqa: SIM118
    named = sum(math.prod(tensor.shape) for table in tables.values() for tensor in table.tensors.values())
    assert values == named, "no value is in the files twice"
    by_rank = [
        sum(file.stat().st_size for file in files if f"-0000{rank}-of" in file.name) for rank in (1, 2)
    ]
    assert max(by_rank) < 1.1 * min(by_rank), by_rank
    once = sum((whole / name).stat().st_size for name in ("model.safetensors", "optimizer.safetensors"))
    assert sum(by_rank) < 1.5 * once


def _check_torch_reads_it(passes: Passes) -> None:
    """The files are those of torch's own safetensors checkpoints: its reader puts the whole together."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    with SavedTensors(verify(passes.first), "model") as saved:
        expected = dict(saved)
    found: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(found, storage_reader=HuggingFaceStorageReader(str(passes.saved_by("fsdp 2"))), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


ROWS_OF_BLOCKS = tuple(
    f"model.shape.{key}"
    for key in (
        "num_layers=1",
        "hidden=256",
        "num_heads=4",
        "num_kv_heads=4",
        "head_dim=64",
        "intermediate=256",
    )
)

PARTS_OF_ROWS = (*ROWS_OF_BLOCKS, "model.shape.head_dim=128", "model.shape.intermediate=512")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize(
    ("technique", "more", "layouts"),
    [
        ("bf16_master", (), ["fsdp 2"]),
        ("lora", (), ["fsdp 2", "tp 2", "pp 2", "tp 2 × fsdp 2"]),
        ("qlora", (), ["pp 2"]),
        ("{name='adam8bit', backend='rush'}", ROWS_OF_BLOCKS, ["fsdp 2"]),
        ("{name='adam8bit', backend='rush'}", PARTS_OF_ROWS, ["tp 2", "tp 2 × fsdp 2"]),
    ],
)
def test_masters_adapters_and_blocks_go_through_layouts(
    tmp_path: Path, technique: str, more: tuple[str, ...], layouts: list[str]
) -> None:
    passes = Passes(tmp_path, "llama", (technique,), more)
    for layout in ("one", *layouts):
        passes.check_pairs(layout, layouts)


@pytest.mark.slow
def test_blocks_that_a_layout_would_cut_are_refused_before_anything_is_changed(tmp_path: Path) -> None:
    passes = Passes(tmp_path, "llama", ("{name='adam8bit', backend='rush'}",), ROWS_OF_BLOCKS)
    with pytest.raises(AssertionError, match="blocks, which this layout would split; resume with the layout"):
        passes.saved_by("tp 2")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("family", "techniques"), [("gpt2", ("fused_adamw",)), ("llama", ())])
def test_every_pair_of_layouts(tmp_path: Path, family: str, techniques: tuple[str, ...]) -> None:
    passes = Passes(tmp_path, family, techniques)
    for layout in LAYOUTS:
        passes.check_pairs(layout, SLOW)


def test_what_one_rank_cannot_write_all_hear_of_and_nothing_of_it_stays(tmp_path: Path) -> None:
    first, second = on_ranks(2, save_on_a_full_disk, str(tmp_path / "checkpoints"))
    told = "rank 1: Cannot write .writing-step-000002: the disk is full."
    assert first["said"] == ["saved", f"{told} ['reported by rank 0']", "saved"]
    assert second["said"] == first["said"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000001", "step-000003"]


def test_scales_of_8_bit_blocks_go_from_two_ranks_to_one_and_to_four(tmp_path: Path) -> None:
    """On one rank they are flat, where rows are sharded a table; the same numbers belong to the same blocks."""
    written = on_ranks(2, reshard_blocks, 2, str(tmp_path / "two"), None)
    assert [found["held"] for found in written] == [(12, 4)] * 2
    source = str(tmp_path / "two" / "step-000001")
    for count in (1, 4):
        assert all(found["right"] for found in on_ranks(count, reshard_blocks, count, "", source)), count
    on_ranks(1, reshard_blocks, 1, str(tmp_path / "one"), None)
    flat = str(tmp_path / "one" / "step-000001")
    assert all(found["right"] for found in on_ranks(4, reshard_blocks, 4, "", flat))
