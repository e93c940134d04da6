"""The kernels for a CPU beyond what every kernel's own tests ask of them: long rows, threads, and where they cannot run.

(`device` is also "c++" in the tests of gelu, swiglu, cross_entropy, linear_cross_entropy and flash_attention.)
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rush.errors import MachineError
from rush.kernels import cpu, support
from rush.kernels.cross_entropy import cross_entropy, cross_entropy_
from rush.kernels.cross_entropy.reference import cross_entropy as plain_loss
from rush.kernels.flash_attention import flash_attention
from rush.kernels.flash_attention.reference import attention
from rush.kernels.gelu import gelu, reference

Check = Callable[..., None]


@pytest.fixture
def uses_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := cpu.cannot_run():
        pytest.skip(f"kernels for a CPU cannot run here: {reason}")
    monkeypatch.setattr(support, "INTERPRETED", False)


def random(*dims: int, seed: int = 0) -> Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed))


def heads(batch: int, count: int, length: int, dim: int, seed: int) -> Tensor:
    """As a model has them: a view of one tensor of queries, keys and values."""
    return random(batch, length, 3, count, dim, seed=seed)[:, :, 1].transpose(1, 2)


def with_gradients(
    function: Callable[..., Tensor], *inputs: Tensor, dout: Tensor, **options: object
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [2, 15, 16, 17, 517])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_attention_over_long_rows_is_as_exact_as_plain_torch(
    head_dim: int, length: int, causal: bool, uses_cpp: None, check_errors: Check
) -> None:
    q, dout = heads(2, 4, length, head_dim, 0), random(2, 4, length, head_dim, seed=3)
    k, v = heads(2, 2, length, head_dim, 1), heads(2, 2, length, head_dim, 2)
    documents = torch.arange(length).div(100, rounding_mode="floor")[None].expand(2, -1)
    for options in ({}, {"documents": documents}):
        ours = with_gradients(flash_attention, q, k, v, dout=dout, causal=causal, **options)
        plain = with_gradients(attention, q, k, v, dout=dout, causal=causal, **options)
        wide = (x.double() for x in (q, k, v))
        exact = with_gradients(attention, *wide, dout=dout.double(), causal=causal, **options)
        for name, mine, theirs, truth in zip(("o", "dq", "dk", "dv"), ours, plain, exact, strict=True):
            check_errors(mine, theirs, truth, 2 if name == "o" else 3, name)


def test_what_a_query_must_not_see_changes_no_bit(uses_cpp: None) -> None:
    q, k, v = (heads(1, 1, 40, 16, seed) for seed in range(3))
    documents = torch.tensor([[0] * 13 + [1] * 27])
    before = flash_attention(q, k, v, documents=documents)
    k, v = k.clone(), v.clone()
    k[:, :, :13], v[:, :, :13] = 1e6, -1e30
    after = flash_attention(q, k, v, documents=documents)
    assert torch.equal(after[:, :, 13:], before[:, :, 13:])
    assert not torch.equal(after[:, :, :13], before[:, :, :13])


@pytest.mark.parametrize("columns", [1, 3, 4, 5, 4097])
def test_a_large_vocabulary_and_rows_that_end_within_a_vector(
    columns: int, uses_cpp: None, check_errors: Check
) -> None:
    logits, labels = 10 * random(9, columns), torch.arange(9) % columns
    exact = plain_loss(logits.double(), labels)
    for form in (cross_entropy, lambda x, *rest, **more: cross_entropy_(x.clone(), *rest, **more)):
        check_errors(form(logits, labels, reduction="none"), plain_loss(logits, labels), exact, 2)


def test_powers_are_right_to_the_last_place_or_two_over_all_their_range(uses_cpp: None) -> None:
    """The sum over one logit x and one of zero is 1 + e^x, so that its logarithm shows the power."""
    x = torch.linspace(-80, 0, 4001)
    rows = torch.stack((x, torch.zeros_like(x)), 1)
    # In place, the gradient of the label's neighbour is the probability e^x / (1 + e^x).
    cross_entropy_(rows, torch.ones(len(x), dtype=torch.int64))
    exact = torch.sigmoid(x.double())
    assert float(((rows[:, 0] - exact) / exact).abs().max()) < 1e-5  # x·log2(e) is rounded once: 115 · 2^-24
    near = x > -2
    assert float(((rows[:, 0] - exact) / exact)[near].abs().max()) < 4e-7


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_other_numbers_of_threads_give_the_same_bits(threads: int, uses_cpp: None) -> None:
    x, dout = random(3000, 33), random(3000, 33, seed=1)
    q, k, v, do = (heads(3, 2, 100, 32, seed) for seed in range(4))
    logits, labels = random(500, 77), torch.arange(500) % 77

    def everything() -> list[Tensor]:
        return [
            *with_gradients(gelu, x, dout=dout),
            *with_gradients(flash_attention, q, k, v, dout=do),
            *with_gradients(cross_entropy, logits, labels=labels, dout=torch.ones(())),
        ]

    before = torch.get_num_threads()
    expected = everything()
    torch.set_num_threads(threads)
    try:
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(everything(), expected, strict=True))
    finally:
        torch.set_num_threads(before)


def test_16_bits_are_widened_and_rounded_once(uses_cpp: None) -> None:
    x = random(7, 65).bfloat16()
    assert torch.equal(gelu(x), cpu.elementwise("gelu_forward", x.float()).bfloat16())
    torch.testing.assert_close(gelu(x), reference.gelu(x), rtol=1e-2, atol=1e-3)


def test_without_a_compiler_or_on_another_system_it_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpu.cannot_run() == "there is no C++ compiler (no-such-compiler)"
    monkeypatch.setattr(cpu, "_loaded", False)
    with pytest.raises(MachineError, match=r"kernels for a CPU cannot run here: there is no C\+\+ compiler"):
        cpu.load()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu.cannot_run() == "they need Linux, and this is darwin"


@pytest.mark.slow
def test_a_script_finds_them_without_an_option(uses_cpp: None) -> None:
    """No TRITON_INTERPRET, as a user has it: compiled code finds the kernel in C++ by itself."""
    script = """
import torch
from rush.kernels.gelu import gelu
x = torch.randn(5, 64, requires_grad=True)
plain = torch.nn.functional.gelu(x, approximate="tanh")
torch.testing.assert_close(torch.compile(gelu, fullgraph=True, backend="aot_eager")(x), plain)
with torch.profiler.profile() as profile:
    gelu(x).sum().backward()
names = {event.key for event in profile.key_averages()}
assert {"rush_cpu::gelu_forward", "rush_cpu::gelu_backward"} <= names, names
"""
    told = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, env=told, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
