"""A knob that does nothing is found: a run shows the value of every knob that it uses, and no other value."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pytest

from rush.kernels import fp16_linear
from rush.techniques import registry
from rush.techniques.api.contract import Observation, Use
from rush.techniques.api.evidence import prove
from tests.techniques.knob_values import unclear
from tests.techniques.tiny_runs import SHORT, make_run, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning",  # a CPU without units for bf16
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:.*_stable_hash_for_caching:UserWarning",
)
slow = pytest.mark.slow
SFT = ["objective.kind=sft", "model.shape.num_layers=1", "batch.total_tokens=256"]
ONE_LAYER = ["model.shape.num_layers=1", "batch.micro=2", "batch.total_tokens=64"]
CHUNKS = [
    "model.shape.num_layers=1",
    "model.shape.hidden=32",
    "model.shape.head_dim=8",
    "model.shape.intermediate=32",
]


def shown(
    *techniques: str, changes: Iterable[str] = (), name: str = "llama-tiny"
) -> tuple[list[Use], Observation]:
    run = make_run(*techniques, name=name, overrides=changes)
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    return run.uses, seen


@pytest.mark.parametrize("name", sorted(registry()))
def test_every_knob_says_how_its_effect_is_seen(name: str) -> None:
    for knob, choice in registry()[name].knobs.items():
        assert choice.evidence is not None, f"nothing shows {name}.{knob}"
        assert inspect.getdoc(choice.evidence), f"the evidence of {name}.{knob} has no docstring"


# Technique with knobs, what it needs beside it, changes of the recipe, knobs whose values do the same here.
CASES = {
    "accumulate": [("{name='accumulate', factor=%s}", value, (), (), ()) for value in (2, 4)],
    "chunked_loss": [("{name='chunked_loss', chunk_tokens=%s}", value, (), (), ()) for value in (64,)],
    "fused_loss": [("{name='fused_loss', chunk_tokens=%s}", value, (), ONE_LAYER, ()) for value in (0, 512, 8192)],
    "vocab_pad": [("{name='vocab_pad', multiple=%s}", value, (), (), ()) for value in (64, 128)],
    "checkpoint_selective": [("{name='checkpoint_selective', keep='%s'}", value, (), (), ()) for value in ("all", "half")],
    "fused_projections": [
        ("{name='fused_projections', groups='%s'}", value, (), (), ()) for value in ("all", "attention", "mlp")
    ],
    "gc_control": [("{name='gc_control', every=%s}", value, (), SHORT, ()) for value in (100, 20, 1000)],
    "loader_workers": [("{name='loader_workers', count=%s}", value, (), SHORT, ()) for value in (2, 1, 4, 8)],
    "lora": [
        ("{name='lora', rank=%s, alpha=%s, roles='%s', variant='%s'}", values, (), ONE_LAYER, ())
        for values in ((16, 32, "all", "lora"), (2, 1, "attention", "dora"), (4, 8, "mlp", "lora"), (8, 64, "qv", "lora"))
    ],
    "pad": [("{name='pad', shapes=%s}", value, (), SFT, ()) for value in (0, 1, 4)],
    "bucket": [("{name='bucket', shapes=%s, window=%s}", values, (), SFT, ()) for values in ((0, 100), (2, 10))],
    "flatten": [("{name='flatten', window=%s}", value, (), SFT, ()) for value in (1024, 128)],
    "pack_best_fit": [("{name='pack_best_fit', window=%s}", value, (), SFT, ()) for value in (4096, 256)],
    "compile": [
        ("{name='compile', scope='%s', mode='%s'}", values, (), SHORT, ())
        for values in (("model", "default"), ("block", "max-autotune"), ("block", "reduce-overhead"))
    ],
    "fp8": [
        ("{name='fp8', recipe='%s', scope='%s', fast='%s', casts='%s', mlp='%s'}", values, beside, ONE_LAYER, ())
        for values, beside in (
            (("tensorwise", "blocks", "forward", "compiler", "compiler"), ()),
            (("rowwise", "blocks_and_head", "all", "compiler", "compiler"), ("vocab_pad",)),
            (("tensorwise", "head", "forward", "compiler", "compiler"), ("vocab_pad",)),
            (("tensorwise", "blocks", "all", "kernel", "kernel"), ("fused_projections",)),
        )
    ],
}  # fmt: skip
SLOW_CASES = {
    "amp_fp16": [("{name='amp_fp16', initial_scale=%s}", value, (), SHORT, ()) for value in (65536, 4096, 256)],
    "fused_update": [
        ("{name='fused_update', stochastic_rounding=%s, state='%s'}", values, ("pure_bf16",), SHORT, ())
        for values in (("false", "float32"), ("true", "bfloat16"))
    ],
    "adam8bit": [
        ("{name='adam8bit', backend='%s', stochastic_rounding=%s}", values, ("pure_bf16",), ONE_LAYER, ("paged",))
        for values in (("torchao", "false"), ("rush", "false"), ("rush", "true"))
    ],
    "fp16_matmul": [("{name='fp16_matmul', scope='%s'}", value, (), ONE_LAYER, ()) for value in ("blocks", "blocks_and_head")],
    "qlora": [
        ("{name='qlora', backend='%s', unpack='%s', rank=%s}", values, (), ONE_LAYER, alike)
        for values, alike in (
            (("bitsandbytes", "auto", 16), ("unpack",)),
            (("bitsandbytes", "rush", 4), ()),
            (("torchao", "library", 4), ("unpack",)),
        )
    ],
    "int8_base": [("{name='int8_base', backend='%s'}", value, (), ONE_LAYER, ()) for value in ("bitsandbytes", "torchao")],
}  # fmt: skip
EVERY_VALUE = {"fp8"}
"""Techniques whose knobs choose other kernels. Of the others two values tell a knob that does nothing from one that works."""


def _further(name: str, place: int) -> bool:
    return place >= 2 and name not in EVERY_VALUE


LISTED = [
    *(
        pytest.param(name, *case, id=f"{name} {case[1]}", marks=slow if _further(name, place) else ())
        for name, some in CASES.items()
        for place, case in enumerate(some)
    ),
    *(
        pytest.param(name, *case, id=f"{name} {case[1]}", marks=slow)
        for name, some in SLOW_CASES.items()
        for case in some
    ),
]


@pytest.mark.parametrize(("name", "table", "values", "beside", "changes", "alike"), LISTED)
def test_a_run_shows_the_value_of_each_knob_and_no_other(
    name: str, table: str, values: object, beside: tuple[str, ...], changes: list[str], alike: tuple[str, ...]
) -> None:
    if name in ("qlora", "int8_base", "adam8bit"):
        pytest.importorskip("bitsandbytes")
        pytest.importorskip("torchao")
    if name == "fp16_matmul" and (reason := fp16_linear.cannot_run()):
        pytest.skip(f"its kernel cannot run here: {reason}")
    uses, seen = shown(table % values, *beside, changes=changes)
    use = next(use for use in uses if use.technique.name == name)
    assert unclear(use, seen, alike) == {}, prove([use], seen)[name].what
