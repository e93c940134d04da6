"""The kernels for a CPU where neither Triton nor ninja is installed: a compiler is all they need, and techniques know it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rush.hardware import probe
from rush.kernels import cpu
from rush.recipe_io import load_recipe
from rush.techniques.api.seams import needs_kernels, needs_triton

KERNELS = """
import sys
sys.modules["triton"] = None  # import triton raises ImportError
import shutil
import torch
import torch.nn.functional as F
from rush.kernels.cross_entropy import cross_entropy, cross_entropy_
from rush.kernels.flash_attention import flash_attention
from rush.kernels.gelu import gelu
from rush.kernels.linear_cross_entropy import linear_cross_entropy
from rush.kernels.swiglu import swiglu

assert shutil.which("ninja") is None
torch.manual_seed(0)
labels = torch.tensor([3, -100, 0, 9, 12])

def head(hidden, weight):
    return F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")

def loss(logits):
    return F.cross_entropy(logits, labels, reduction="sum")

def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

heads = [(2, 4, 21, 16)] * 3
cases = {
    "gelu": (gelu, lambda x: F.gelu(x, approximate="tanh"), [(5, 67)]),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, [(5, 67), (5, 67)]),
    "flash_attention": (flash_attention, attention, heads),
    "flash_attention, compiled": (torch.compile(flash_attention, backend="aot_eager", fullgraph=True), attention, heads),
    "cross_entropy": (lambda x: cross_entropy(x, labels), loss, [(5, 13)]),
    "cross_entropy_": (lambda x: cross_entropy_(x * 1, labels), loss, [(5, 13)]),
    "linear_cross_entropy": (lambda x, w: linear_cross_entropy(x, w, labels, chunk_tokens=2), head, [(5, 8), (13, 8)]),
}
for name, (ours, plain, shapes) in cases.items():
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found, expected = ours(*inputs), plain(*inputs)
    above = torch.randn_like(expected)
    for mine, theirs in zip(
        [found, *torch.autograd.grad(found, inputs, above)], [expected, *torch.autograd.grad(expected, inputs, above)]
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=lambda said: f"{name}: {said}")
"""

TECHNIQUES = """
from dataclasses import replace
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.training.build import build

machine = replace(probe("cpu"), triton=None)
run = build(load_recipe("tiny", ["techniques=['cpu_attention', 'fused_mlp', 'fused_loss']"]), machine)
tokens = torch.randint(0, run.model.shape.vocab_size, (1, 32))
run.model(tokens, tokens).backward()
assert all(weight.grad.isfinite().all() for weight in run.model.parameters())
assert not [name for name in sys.modules if name.startswith("rush.kernels.") and name.endswith(".triton")]
"""


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := cpu.cannot_run():
        pytest.skip(f"kernels for a CPU cannot run here: {reason}")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def path_without_ninja(folder: Path) -> str:
    """A folder of links to all that can be called here, but for ninja."""
    folder.mkdir()
    for place in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in place.iterdir() if place.is_dir() else ():
            link = folder / program.name
            if program.name not in ("ninja", "ninja-build") and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


@pytest.mark.slow
def test_kernels_and_techniques_for_a_cpu_need_a_compiler_only(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')  # in a third of the time
    compiler.chmod(0o755)
    places = {
        "PATH": path_without_ninja(tmp_path / "bin"),
        "RUSH_CACHE": str(tmp_path / "cache"),
        "CXX": str(compiler),
    }
    ended = subprocess.run(
        [sys.executable, "-c", KERNELS + TECHNIQUES],
        check=False,
        env=os.environ | places,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.count("rush: building rush_cpu") == 1
    assert [file.suffix for file in (tmp_path / "cache" / "extensions").iterdir()] == [".so"]


def test_triton_is_required_only_where_it_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, without = load_recipe("tiny", []), replace(probe("cpu"), triton=None)
    assert needs_kernels.met(without, recipe)
    assert not needs_triton.met(without, recipe)
    assert not needs_kernels.met(replace(without, device="cuda"), recipe)
    assert not needs_kernels.met(replace(without, device="mps"), recipe)
    assert needs_kernels.met(replace(without, device="cuda", triton="3.6"), recipe)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not needs_kernels.met(without, recipe)
    assert needs_kernels.met(replace(without, triton="3.6"), recipe)
