"""Knobs of the layout's techniques: the profile of a rank shows the value in use, and no other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.parallel.knob_work import shard_all_but_one_block, show_knobs
from tests.parallel.rank_work import on_ranks

slow = pytest.mark.slow
SMALL = ("model.shape.hidden=32", "model.shape.head_dim=8", "model.shape.intermediate=32", "batch.sequence=16",
         "batch.total_tokens=64")  # fmt: skip
FOUR = (*SMALL, "model.shape.num_layers=4")
EIGHT = (*SMALL, "model.shape.num_layers=8")
"""Four blocks have one way to be four stages, whatever is balanced."""
Layout = dict[str, int]


def shown(
    layout: Layout, settings: Sequence[Iterable[str]], more: tuple[str, ...]
) -> list[list[dict[str, Any]]]:
    """What each rank shows of each setting."""
    found: list[list[dict[str, Any]]] = on_ranks(
        int(np.prod(list(layout.values()))), show_knobs, "llama", layout, settings, more
    )
    return found


FSDP = "{name='fsdp', %s}"
FP32 = [
    (),
    (FSDP % "stage='gradients', prefetch=2, reduce_dtype='bfloat16'",),
    (FSDP % "stage='optimizer', unit='model', reduce_dtype='float32', offload=true",),
]
BF16 = [
    (FSDP % "prefetch=4",),
    (FSDP % "param_dtype='bfloat16'",),
    (FSDP % "param_dtype='bfloat16', reduce_dtype='float32'",),
]
DDP = [(), ("{name='ddp', bucket_mb=1, bucket_view=false, send_once=false}",)]
TP = [(), ("{name='tp', sequence=false}",)]
CP = [(), ("{name='cp', exchange='ring', balance=false}",)]
PP = [("{name='pp', balance='parameters'}",), ("{name='pp', schedule='gpipe'}",)]
LOOPED = [
    (f"{{name='pp', schedule='{name}', stages={stages}}}",)
    for name, stages in (("interleaved", 2), ("zero_bubble", 1), ("zbv", 2))
]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
@pytest.mark.parametrize(
    ("layout", "settings", "more"),
    [
        pytest.param({"fsdp": 2}, FP32, FOUR, id="fsdp"),
        pytest.param({"fsdp": 2}, BF16, FOUR, marks=slow, id="fsdp in bf16"),
        pytest.param({"ddp": 2}, DDP, SMALL, marks=slow, id="ddp"),
        pytest.param({"tp": 2}, TP, SMALL, marks=slow, id="tp"),
        pytest.param({"cp": 2}, CP, SMALL, marks=slow, id="cp"),
        pytest.param({"pp": 2}, PP, FOUR, marks=slow, id="pp"),
        pytest.param({"pp": 2}, LOOPED, EIGHT, marks=slow, id="pp with several stages"),
    ],
)
def test_ranks_show_the_value_of_each_knob_and_no_other(
    layout: Layout, settings: Sequence[Iterable[str]], more: tuple[str, ...]
) -> None:
    (name,) = layout
    looked = [found for found in shown(layout, settings, more) if found]
    assert len(looked) == (2 if name == "pp" else 1)
    for ranks in zip(*looked, strict=True):
        for rank, ours in enumerate(ranks):
            took_effect, what = ours["proofs"][name]
            assert took_effect, (rank, what)
            for knob, value in ours["used"][name].items():
                found = ours["accepted"][name][knob]
                if knob == "stages":  # 0: as few as the schedule supports
                    assert value in found, (rank, what)
                    assert len(found) < 3, (rank, found)
                else:
                    assert found == [value], (rank, knob, found, what)


def test_a_block_that_is_not_sharded_is_found() -> None:
    for found in filter(None, on_ranks(2, shard_all_but_one_block)):
        assert not found["own"]["fsdp"]
        assert "9 are not sharded, blocks.1." in found["proofs"]["fsdp"][1]
