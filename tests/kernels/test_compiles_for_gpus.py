"""Every Triton kernel compiles for a GPU, on a machine without one: what only the interpreter tolerates is found here.

The launches are those of the public functions (`gpu_launches`), stopped where a driver would start them
(`offline_compiler`). So types, tiles and warps are the ones a GPU would get. Nothing runs: that results are right, or
quick, is for other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rush.files import cache_folder
from tests.kernels import gpu_launches

HERE = Path(__file__).parent
Report = dict[str, Any]
HOPPER, AMPERE = 90, 80

NEEDS_HOPPER = {"fp8_linear bf16", "fp8_mlp bf16", "linear_cross_entropy fp8"}
"""Ampere has no 8-bit floats of the kind that forward passes use."""

STACK_BYTES = {
    "attention bf16 128 documents: flash_dkdv_tiles": 128,
    "attention bf16 128 documents: flash_forward_tiles": 160,
    "attention bf16 128: flash_dkdv_tiles": 16,
    "attention bf16 128: flash_forward_tiles": 72,
    "attention bf16 256 documents: flash_dkdv_tiles": 72,
    "attention bf16 256 documents: flash_dq_tiles": 16,
    "attention bf16 256 documents: flash_forward_tiles": 16,
    "attention bf16 256: flash_dkdv_tiles": 32,
    "attention bf16 256: flash_dq_tiles": 16,
    "attention bf16 64 documents: flash_forward_tiles": 16,
    "attention fp32 256: flash_dq_tiles": 176,
    "attention fp32 64: flash_dkdv_tiles": 32,
    "cross_entropy fp32: cross_entropy_forward_kernel": 16,
    "cross_entropy_ fp16: cross_entropy_forward_kernel": 16,
    "rope fp16 80: rope_kernel": 8,
}
"""What a thread may keep outside its registers; everywhere else nothing. These were found by compiling, rounded up, and
must not grow with the Tritons of the locks, 3.6 and 3.7.1. Another compiler may keep less: by 3.9, with which this list began,
the forward pass of head dim 128 had none. Its tiles were measured, with 3.6, as the fastest on an H200. Some come from one GPU
only: the first is 48 and 64 bytes for Hopper, 8 for Ampere; the last is Ampere's. The loss kernels' came with the one that halved
their time."""

NARROW_LOADS = {
    "rmsnorm_forward_kernel": 0,
    "rmsnorm_backward_kernel": 12,
    "layernorm_forward_kernel": 0,
    "layernorm_backward_kernel": 24,
    "sum_partials_kernel": 0,
    "swiglu_forward_kernel": 0,
    "swiglu_backward_kernel": 0,
    "geglu_forward_kernel": 0,
    "geglu_backward_kernel": 0,
    "gelu_forward_kernel": 0,
    "squared_relu_kernel": 0,
    "squared_relu_backward_kernel": 0,
    "gelu_backward_kernel": 0,
    "gelu_bias_grad_backward_kernel": 0,
    "concat_bias_grad_kernel": 0,
    "fp8_cast_transpose_kernel": 2,
    "fp8_logits_gradient_kernel": 12,  # a 1, and of rows: labels and normalizers of four at a time, then those of one with its logit
    "fp8_swiglu_amax_kernel": 0,
    "fp8_swiglu_kernel": 1,
    "fp8_swiglu_bound_kernel": 4,
    "fp8_swiglu_backward_kernel": 3,
    "read_kernel": 0,
    "cross_entropy_forward_kernel": 2,
    "cross_entropy_backward_kernel": 3,
    "scale_rows_kernel": 1,
    "adamw_kernel": 10,
}
"""Load instructions of less than 16 bytes a thread: one number of a row, of the table of tensors, a scale. In the norms'
backward pass a row's mean and deviation, for each row of a step and each step read ahead; a tensor of activations read by
single elements would take 32 more. Left out: rope, whose few key heads give a thread 4 or 8 bytes; adamw8bit,
whose codes are bytes, 8 to a thread; nf4, which reads a word of eight weights and looks the rest up; attention, which on Hopper loads by the copy engine."""


def compile_offline(folder: Path, module: str, *options: str) -> Report:
    """The report of a process in which nothing is interpreted."""
    report = folder / "report.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {
        # As a user's: named after the sources and the compiler, so that what has not changed is not compiled anew.
        "TRITON_CACHE_DIR": str(cache_folder() / "triton"),
        "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), str(HERE.parents[1])]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(HERE / "offline_compiler.py"), module, str(report), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: Report = json.loads(report.read_text())
    return found


def short(kernel: dict[str, Any]) -> str:
    return str(kernel["kernel"].rsplit(".", 1)[1])


def label(kernel: dict[str, Any]) -> str:
    return f"{kernel['launch']}: {short(kernel)}"


def spilled(report: Report) -> dict[str, int]:
    """Kernels that keep more on the stack than is allowed, and how many bytes."""
    return {
        label(kernel): kernel["stack_bytes"]
        for kernel in report["compiled"]
        if kernel["stack_bytes"] > STACK_BYTES.get(label(kernel), 0)
    }


def narrow(report: Report, allowed: dict[str, int] = NARROW_LOADS) -> dict[str, dict[str, int]]:
    """Memory-bound kernels that load fewer than 16 bytes at a time, more often than is allowed: bytes → instructions."""
    found = {}
    for kernel in report["compiled"]:
        if "odd size" in kernel["launch"]:
            continue
        loads = {int(width): count for width, count in kernel["loads"].items()}
        small = sum(count for width, count in loads.items() if width < 16)
        if short(kernel) in allowed and (small > allowed[short(kernel)] or max(loads) < 16):
            found[label(kernel)] = kernel["loads"]
    return found


def multiplied_by(report: Report) -> dict[str, set[str]]:
    """The units that attention uses, for each launch."""
    units: dict[str, set[str]] = {}
    for kernel in report["compiled"]:
        if short(kernel).startswith("flash_"):
            named = units.setdefault(label(kernel), set())
            named.update(name for name, count in kernel["instructions"].items() if count)
    return units


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The kernels that memory limits, compiled for Hopper; the launches of attention are noted only."""
    names = ["--only", *gpu_launches.STREAMING, "--note", *gpu_launches.ATTENTION]
    return compile_offline(
        tmp_path_factory.mktemp("compiled"), "gpu_launches", "--architecture", str(HOPPER), *names
    )


@pytest.mark.slow
def test_every_kernel_is_launched(streaming: Report) -> None:
    """A new kernel that no launch reaches, directly or by a call from another kernel, is named.

    Only what is compiled above or by `test_more_kernels_compile` counts.
    """
    report = streaming
    assert report["errors"] == {}
    assert report["forgotten"] == [], "add a launch to gpu_launches.py"
    assert len(report["launched"]) > 20


def check(report: Report, names: list[str], architecture: int) -> None:
    assert report["errors"] == {}
    # Two launches may share a kernel, but these here have at least one of their own.
    assert {kernel["launch"] for kernel in report["compiled"]} == set(names)
    assert {kernel["target"] for kernel in report["compiled"]} == {f"sm_{architecture}"}
    # Bytes of registers' contents in device memory; bytes of a load → how many instructions.
    assert {"spilled": spilled(report), "narrow": narrow(report)} == {"spilled": {}, "narrow": {}}
    for what, units in multiplied_by(report).items():
        expected = {"wgmma.mma_async", "cp.async.bulk.tensor"} if architecture == HOPPER else {"mma.sync"}
        assert units == (set() if "fp32" in what else expected), what


@pytest.mark.slow
def test_kernels_that_memory_limits_compile(streaming: Report) -> None:
    check(streaming, list(gpu_launches.STREAMING), HOPPER)


MORE = {
    "Hopper, attention": (HOPPER, list(gpu_launches.ATTENTION)),
    "Ampere": (AMPERE, [name for name in gpu_launches.STREAMING if "bf16" in name and name not in NEEDS_HOPPER]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("which", MORE)
def test_more_kernels_compile(tmp_path: Path, which: str) -> None:
    architecture, names = MORE[which]
    report = compile_offline(tmp_path, "gpu_launches", "--architecture", str(architecture), "--only", *names)
    check(report, names, architecture)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", [HOPPER, AMPERE])
def test_the_rarer_kernels_compile(tmp_path: Path, architecture: int) -> None:
    done = {name for where, names in MORE.values() if where == architecture for name in names}
    done |= set(gpu_launches.STREAMING) if architecture == HOPPER else set()
    names = [name for name in gpu_launches.LAUNCHES if name not in done]
    if architecture == AMPERE:
        names = [name for name in names if name not in NEEDS_HOPPER]
    report = compile_offline(tmp_path, "gpu_launches", "--architecture", str(architecture), "--only", *names)
    check(report, names, architecture)


PLANTED = """
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PACKAGES = ["planted"]
SCALE = 3.0


@triton.jit
def helper(x):
    return x + 1.0


@triton.jit
def sound_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, helper(tl.load(x_ptr + at)))


@triton.jit
def annotated_kernel(x_ptr: Any, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at))


@triton.jit
def global_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * SCALE)


@triton.jit
def joined_kernel(x_ptr, BLOCK: tl.constexpr):
    total = 0
    if tl.load(x_ptr) > 0:
        total = tl.load(x_ptr + 1)
    tl.store(x_ptr, total)


@triton.jit
def spilling_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    x = x - tl.sum(x)
    x = x * tl.sum(x * x)
    tl.store(x_ptr + at, x)


@triton.jit
def narrow_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + 2 * at))


@triton.jit
def greedy_kernel(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, 256)[:, None] * 256 + tl.arange(0, 256)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(x_ptr + at, tl.trans(x) + 1.0)


@triton.jit
def forgotten_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), 0.0)


def launch(kernel, block=1024, **options):
    return lambda: kernel[(1,)](torch.zeros(2**18), BLOCK=block, **options)


LAUNCHES = {
    "sound": launch(sound_kernel),
    "Any": launch(annotated_kernel),
    "a global": launch(global_kernel),
    "a join": launch(joined_kernel),
    "spilling": launch(spilling_kernel, block=16384, num_warps=1),
    "narrow": launch(narrow_kernel),
    "greedy": launch(greedy_kernel, num_warps=32),
}
"""


@pytest.mark.slow
def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    """Each of these runs in the interpreter."""
    (tmp_path / "planted.py").write_text(PLANTED)
    report = compile_offline(tmp_path, "planted", "--architecture", "80")
    errors = report["errors"]
    assert set(errors) == {"Any", "a global", "a join", "greedy"}
    assert "Any" in errors["Any"]
    assert "SCALE" in errors["a global"]
    assert "total" in errors["a join"]
    assert "shared memory" in errors["greedy"]
    assert list(spilled(report)) == ["spilling: spilling_kernel"]
    allowed = {"narrow_kernel": 0, "sound_kernel": 0}
    assert list(narrow(report, allowed)) == ["narrow: narrow_kernel"]
    assert report["forgotten"] == ["planted.forgotten_kernel"]
