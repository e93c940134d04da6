"""What is demanded of every technique: it is complete, it takes effect, it learns the same, it refuses where it must."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from functools import cache
from importlib import import_module
from typing import Any

import pytest

from rush.errors import MachineError, RecipeError
from rush.hardware import Device, Machine, probe
from rush.kernels import fp16_linear
from rush.parallel import AXES
from rush.recipe import Recipe
from rush.techniques import check, registry
from rush.techniques.api.contract import Parity, Proof, Stage
from rush.techniques.api.evidence import prove
from tests.techniques.tiny_runs import (
    INTERPRETED_SLOWLY,
    ROOT,
    SHORT,
    Trace,
    compare,
    make_run,
    recipe_of,
    trace,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning",  # a CPU without units for bf16
    "ignore:.*_stable_hash_for_caching:UserWarning",  # torchao's state under torch.compile
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch.compile looks at block inputs
)
NAMES = sorted(registry())
GPU_ONLY = {
    "tf32", "cudnn_attention", "flex_attention", "offload_activations", "pin_memory", "cuda_graph", "liger",
    "expandable_segments", "torchao_float8",
}  # fmt: skip
# They divide the work among processes: tests/parallel holds them against one rank.
SEVERAL_RANKS = {"cp", "ddp", "fsdp", "pp", "tp"}
# What they learn differs by design: test_lora.py holds it against the written-out formula instead.
ADAPTERS = {"lora", "qlora", "int8_base"}
SIXTEEN_BITS = {
    "amp_bf16": "bfloat16",
    "amp_fp16": "float16",
    "bf16_master": "bfloat16",
    "pure_bf16": "bfloat16",
}
# Weights and activations stay fp32; operands are rounded on their way into a matmul.
CAST_OPERANDS = {"fp16_matmul": "float16", "fp8": "float8", "int8_matmul": "int8"}
KNOBS = {
    "chunked_loss": "{name='chunked_loss', chunk_tokens=64}",
    "compile": "{name='compile', scope='block'}",
}
# Compiling an update for every shape of tensor takes a minute on two cores.
SLOW = {"adam8bit"}
ON_THIS_CPU = [
    pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
    for name in NAMES
    if name not in GPU_ONLY | SEVERAL_RANKS
]


OF_GPT2 = {"fused_bias"}
FINE_TUNING = {"bucket", "flatten", "pack_best_fit", "pack_concat", "pad"}


def overrides(name: str) -> tuple[str, ...]:
    if name in FINE_TUNING:
        return ("objective.kind=sft", "batch.total_tokens=512")
    return tuple(SHORT) if name in SIXTEEN_BITS else tuple(INTERPRETED_SLOWLY.get(name, ()))


def steps(name: str) -> int:
    return 3 if name in SIXTEEN_BITS else 5


def model(name: str) -> str:
    """Most are tried on a Llama; what is about GPT-2 is tried on one."""
    return "tiny" if name in OF_GPT2 else "llama-tiny"


@cache
def made(model: str, changes: tuple[str, ...], num_steps: int) -> Trace:
    return trace(make_run(name=model, overrides=changes), num_steps, watch=True)


def plain(name: str) -> Trace:
    return made(model(name), overrides(name), steps(name))


@cache
def tried(name: str) -> tuple[Any, Trace]:
    run = make_run(KNOBS.get(name, name), name=model(name), overrides=overrides(name))
    return run, trace(run, steps(name), watch=True)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_filled_in(name: str) -> None:
    technique = registry()[name]
    module = import_module(technique.apply.__module__)
    assert technique.name == name
    assert isinstance(technique.stage, Stage)
    assert technique.claim.metric
    assert technique.claim.gain != 0
    assert technique.claim.regime
    assert technique.claim.source
    assert inspect.getdoc(technique.evidence), "the evidence must say in its docstring what it looks for"
    lesson = (module.__doc__ or "").strip().splitlines()
    assert 4 <= len(lesson) <= 15, "the docstring teaches the idea in under 15 lines"
    for knob in technique.knobs.values():
        assert knob.meaning
        assert len(set(knob.values)) == len(knob.values) > 1
        assert len({type(value) for value in knob.values}) == 1
    assert all(requirement.message for requirement in technique.requires)
    assert all(effect.factor >= 0 for effect in technique.memory)


@pytest.mark.parametrize("name", NAMES)
def test_conflicts_are_known_and_mutual(name: str) -> None:
    technique = registry()[name]
    assert list(technique.conflicts) == sorted(set(technique.conflicts))
    assert name not in technique.conflicts
    assert set(technique.after) <= set(NAMES)
    for other in technique.conflicts:
        assert name in registry()[other].conflicts, f"{other} does not know that it conflicts with {name}"
        if name not in GPU_ONLY | {"adam8bit"} and other not in GPU_ONLY | {"adam8bit"}:
            with pytest.raises(RecipeError, match="cannot be combined"):
                check(recipe_of(name, other), probe("cpu"))


def test_the_pages_of_the_techniques_are_current() -> None:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "scripts" / "technique_pages.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "techniques").glob("*.md")}
    described = {name.removesuffix(".md") for name in written} - {"README"}
    assert described <= set(NAMES), "a technique is gone; run python scripts/technique_pages.py"
    # A new technique passes without its page, which `make docs` writes.
    assert written == script.pages(described), "run python scripts/technique_pages.py"


def test_no_technique_is_known_by_name_outside_its_folder() -> None:
    paths = [
        path for room in ("training", "checkpoint", "lab") for path in (ROOT / "rush" / room).glob("**/*.py")
    ]
    assert len(paths) > 60
    for path in paths:
        words = {
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        # tf32 is also the name of a dtype, compile an ordinary word, and an axis that of a size of the layout.
        assert not words & set(NAMES) - {"compile", "tf32", *AXES}, (path, words & set(NAMES))


def machines() -> list[Machine]:
    cpu = probe("cpu")
    old = Device("an old GPU", 16 * 2**30, capability=(7, 0))
    new = Device("a new GPU", 80 * 2**30, capability=(9, 0))
    return [
        cpu,
        dataclasses.replace(cpu, device="cuda", devices=(old,), triton=None),
        dataclasses.replace(cpu, device="cuda", devices=(new,), triton="3.6"),
    ]


def recipes(name: str) -> list[Recipe]:
    unlike = [
        [],
        ["model.shape.head_dim=24"],
        ["model.shape.vocab_size=256"],
        ["batch.micro=3", "batch.total_tokens=96"],
    ]
    own = [recipe_of(name, overrides=changes) for changes in unlike]
    if name == "adam8bit":
        own.append(recipe_of("{name='adam8bit', backend='bitsandbytes'}"))
        own.append(recipe_of("{name='adam8bit', backend='rush'}"))
        own.append(recipe_of("{name='adam8bit', backend='rush', stochastic_rounding=true}"))
        own.append(recipe_of("{name='adam8bit', paged=true}"))
        own.append(recipe_of("adam8bit", overrides=["batch.micro=1", "layout.fsdp=2"]))
    if name == "fused_update":
        own.append(recipe_of("{name='fused_update', stochastic_rounding=true}"))
    if name == "muon":
        offloaded = "{name='fsdp', offload=true}"
        own.append(recipe_of(name, offloaded, overrides=["layout.fsdp=2", "batch.micro=1"]))
    if name == "fp8":
        own.append(recipe_of(name, overrides=["model.shape.intermediate=100"]))
        own.append(recipe_of("{name='fp8', recipe='rowwise', casts='kernel'}"))
        own.append(recipe_of("{name='fp8', mlp='kernel'}"))
        own.append(recipe_of("{name='fp8', mlp='kernel'}", "fused_mlp", "fused_projections"))
        own.append(recipe_of("{name='fp8', scope='blocks_and_head'}", "chunked_loss"))
        own.append(recipe_of("{name='fp8', scope='head', recipe='rowwise'}", "fused_loss"))
        own.append(recipe_of("{name='fp8', scope='head', mlp='kernel'}", "fused_loss"))
        own.append(recipe_of("{name='fp8', scope='blocks_and_head'}", overrides=["layout.tp=2"]))
        own.append(recipe_of("{name='fp8', scope='head', fast='all'}", "fused_loss"))
    if name == "int8_matmul":
        own.append(recipe_of(name, overrides=["model.shape.intermediate=100"]))
        long = [
            "batch.micro=1",
            "batch.sequence=133145",
            "batch.total_tokens=133145",
            "model.shape.context=200000",
        ]
        own.append(recipe_of(name, overrides=long))
    if name == "torchao_float8":
        own.append(recipe_of(name, overrides=["model.shape.intermediate=100"]))
        own.append(recipe_of(name, overrides=["objective.kind=sft"]))
    if name == "fp16_matmul":
        own.append(recipe_of(name, overrides=["layout.tp=2", "batch.micro=1"]))
        own.append(recipe_of("{name='fp16_matmul', scope='blocks_and_head'}", "fused_loss"))
    if name in ("fused_projections", "fused_rope"):
        own.append(recipe_of(name, name="tiny"))
    if name in OF_GPT2:
        own.append(recipe_of(name, "lora", name="tiny"))
    if name in ADAPTERS:
        own.append(recipe_of(f"{{name='{name}', variant='dora'}}", "pure_bf16"))
        if name == "lora":
            own.append(recipe_of("{name='lora', variant='dora'}", overrides=["layout.tp=2"]))
        if name == "qlora":
            own.append(recipe_of("{name='qlora', unpack='rush'}"))
            own.append(recipe_of("{name='qlora', unpack='rush', backend='torchao'}"))
        narrow = ["model.shape.hidden=36", "model.shape.num_heads=6", "model.shape.head_dim=6"]
        own.append(recipe_of(name, overrides=narrow))
    if name in FINE_TUNING:
        sft = "objective.kind=sft"
        own.append(recipe_of(name, overrides=[sft, "batch.micro=1", "batch.total_tokens=32"]))
        own.append(recipe_of(name, "accumulate", overrides=[sft]))
        if name in ("bucket", "pad"):
            own.append(recipe_of(name, "compile", overrides=[sft]))
    if name == "ddp":
        both = ["batch.micro=1", "layout.ddp=2", "layout.fsdp=2"]
        own.append(recipe_of("{name='ddp', bucket_mb=1}", overrides=both))
    if name == "fsdp":
        own.append(recipe_of("compile", overrides=["batch.micro=1", "layout.fsdp=2"]))
        whole = "{name='fsdp', unit='model', prefetch=2}"
        own.append(recipe_of(whole, overrides=["batch.micro=1", "layout.fsdp=2"]))
        for given, other in (("param_dtype='bfloat16'", "pure_bf16"), ("offload=true", "fused_update")):
            own.append(
                recipe_of(f"{{name='fsdp', {given}}}", other, overrides=["batch.micro=1", "layout.fsdp=2"])
            )
    if name == "pp":
        own.append(recipe_of("compile", overrides=["batch.micro=1", "layout.pp=2"]))
        in_blocks = "{name='compile', scope='block'}"
        sizes = ["batch.micro=1", "layout.pp=2"]
        split = "{name='pp', schedule='zero_bubble'}"
        own += [recipe_of(other, split, overrides=sizes) for other in (in_blocks, "checkpoint_selective")]
    if name == "cp":
        packed = ["objective.kind=sft", "batch.micro=1", "layout.cp=2"]
        own.append(recipe_of("triton_attention", overrides=packed[1:]))
        own.append(recipe_of("{name='cp', exchange='ring'}", "triton_attention", "flatten", overrides=packed))
        own.append(recipe_of("{name='cp', exchange='ring'}", overrides=[*packed[1:], *WINDOWS]))
        long = "{rope_type='longrope', short_factor=[1.0], long_factor=[2.0], original_context=8}"
        of_long = ["model.name=phi3-tiny", "model.shape.rotary_dim=2", f"model.shape.rope_scaling={long}"]
        own.append(recipe_of(overrides=[*packed[1:], *of_long]))
    if name in OF_FEATURES:
        own.append(recipe_of(name, overrides=["model.name=gemma2-tiny", "model.shape.window=7"]))
    if name == "checkpoint_full":
        own.append(recipe_of("{name='checkpoint_full', inputs='host'}"))
    if name == "cudnn_attention":
        own.append(recipe_of(name, "amp_bf16", "flatten", overrides=["objective.kind=sft"]))
        own.append(recipe_of(name, "amp_bf16", overrides=["run.deterministic=true"]))
    if name == "liger":
        own.append(recipe_of(name, "cuda_graph"))
    if name == "flex_attention":
        own.append(recipe_of(name, "pad", overrides=["objective.kind=sft"]))
    if name != "compile" and "compile" not in registry()[name].conflicts:
        own.append(recipe_of(name, "{name='compile', mode='reduce-overhead'}"))
    return own


WINDOWS = ("model.name=mistral-tiny", "model.shape.window=7")
OF_FEATURES = {
    "cpu_attention", "cudnn_attention", "flash_attention", "fused_loss", "fused_mlp", "liger", "triton_attention"
}  # fmt: skip
"""Techniques that need a model without windows, soft caps or gated GELU."""


@pytest.mark.parametrize("name", [name for name in NAMES if registry()[name].requires])
def test_every_requirement_can_be_unmet_and_then_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rush.techniques.optimizer.adam8bit.find_spec", lambda library: None)
    monkeypatch.setattr("rush.techniques.kernels.liger.find_spec", lambda library: None)
    monkeypatch.setattr("rush.techniques.adapters.qlora.find_spec", lambda library: None)
    monkeypatch.setattr("rush.techniques.precision.torchao_float8.find_spec", lambda library: None)
    monkeypatch.setattr(fp16_linear, "cannot_build", lambda: "there is no C++ compiler")
    monkeypatch.setattr(fp16_linear, "is_built", lambda: False)
    for requirement in registry()[name].requires:
        unmet = [(m, r) for m in machines() for r in recipes(name) if not requirement.met(m, r)]
        assert unmet, f"no situation here is without what is needed: {requirement.message}"
        with pytest.raises(MachineError, match=f"technique {name} cannot run here: .*; found") as caught:
            check(unmet[-1][1], unmet[-1][0])
        assert any(other.message in str(caught.value) for other in registry()[name].requires)


@pytest.mark.parametrize("name", sorted(GPU_ONLY))
def test_a_technique_for_gpus_is_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(MachineError, match=f"technique {name} cannot run here"):
        check(recipe_of(name), probe("cpu"))


def needs(name: str) -> None:
    if name == "adam8bit":
        pytest.importorskip("torchao", reason="torchao is not installed")
    if name in ADAPTERS - {"lora"}:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    if name == "fp16_matmul" and (reason := fp16_linear.cannot_run()):
        pytest.skip(f"its kernel cannot run here: {reason}")


@pytest.mark.parametrize("name", ON_THIS_CPU)
def test_it_takes_effect(name: str) -> None:
    needs(name)
    run, ours = tried(name)
    assert ours.seen is not None
    proof = prove(run.uses, ours.seen)[name]
    assert proof.took_effect, proof.what


@pytest.mark.parametrize("name", NAMES)
def test_its_evidence_fails_on_a_plain_run(name: str) -> None:
    technique = registry()[name]
    knobs = {key: knob.default for key, knob in technique.knobs.items()}
    seen = plain(name).seen
    assert seen is not None
    proof: Proof = technique.evidence(seen, knobs)
    assert not proof.took_effect, proof.what
    assert proof.what


@pytest.mark.parametrize("name", ON_THIS_CPU)
def test_it_learns_what_plain_fp32_learns(name: str) -> None:
    needs(name)
    if registry()[name].parity is Parity.CHANGES:
        pytest.skip("what is learned differs by design")
    run, ours = tried(name)
    verdict = compare(run, (SIXTEEN_BITS | CAST_OPERANDS).get(name, "float32"), ours, plain(name))
    assert verdict.verdict == "equal", verdict.why
