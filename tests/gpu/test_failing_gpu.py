"""On a CUDA device: a device error and a kernel that does not compile end a run in one message, and never in an abort."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.records.checkpoint_store import verify
from rush.records.run_folder import RunFolder
from tests.training.small_runs import rush_alone, small_recipe, write_corpus

pytestmark = pytest.mark.gpu
HEAD = """
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from rush.recipe import Knob
from rush.techniques.api.contract import Build, Claim, Parity, Proof, Stage, Technique

passes = 0
"""
TAIL = """

def fail_in_the_third_step(block: Any, given: Any) -> None:
    global passes
    passes += torch.is_grad_enabled()
    if passes > 4:
        fail()


def apply(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.model.blocks[0].register_forward_pre_hook(fail_in_the_third_step)


technique = Technique(
    name="planted", stage=Stage.MODEL, apply=apply, claim=Claim("tokens_per_s", 0.0, regime="planted", source="tests"),
    parity=Parity.EXACT, evidence=lambda seen, knobs: Proof(True, "planted"),
)
"""
ASSERT = """

def fail() -> None:
    torch.zeros(4, device="cuda")[torch.full((1,), 99, device="cuda")]
"""
OUTSIDE = """

@triton.jit
def write(x, far):
    tl.store(x + far, 1.0)


def fail() -> None:
    write[(1,)](torch.zeros(4, device="cuda"), 1 << 45)
"""
BROKEN = """

@triton.jit
def write(x):
    tl.store(x, tl.no_such_function(1.0))


def fail() -> None:
    write[(1,)](torch.zeros(4, device="cuda"))
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (ASSERT, ["CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING=1"]),
        (OUTSIDE, ["CUDA error: an illegal memory access was encountered", "CUDA_LAUNCH_BLOCKING=1"]),
        (
            BROKEN,
            [
                "step 3 failed with CompilationError",
                "The code of the technique planted (",
                "techniques-=planted",
            ],
        ),
    ],
    ids=["assert", "illegal access", "kernel that does not compile"],
)
def test_a_failing_device_or_kernel_is_one_message_and_exit_code_4(
    code: str, said: list[str], tmp_path: Path
) -> None:
    recipe, file, out = tmp_path / "small.toml", tmp_path / "planted.py", tmp_path / "run"
    settings = {"device": "cuda", "deterministic": False, "sample_tokens": 0}
    recipe.write_text(
        small_recipe(write_corpus(tmp_path / "corpus"), schedule={"steps": 6, "warmup": 1}, run=settings)
    )
    file.write_text(HEAD + code + TAIL)
    words = ["train", recipe, "techniques=['planted']", "--technique", file, "--out", out]
    done = rush_alone(*words, cache=tmp_path / "cache")
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr[done.stderr.index("error: ") :].strip()
    assert "\n" not in message
    assert all(part in message for part in said), message
    assert "Traceback" in (out / "failure.log").read_text()
    store = RunFolder(out).checkpoints
    last = store.steps()[-1]
    assert f"The last checkpoint (step-{last:06d}) is intact" in message
    assert verify(store.path(last)).step == last
