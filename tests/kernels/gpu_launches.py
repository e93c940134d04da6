"""Calls of every kernel with the shapes and dtypes of training, for `offline_compiler`: nothing is computed.

Each is one public function, forward and backward. Which kernel comes of it, with which tiles and which types, is the
launching code's own choice, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rush.kernels.adamw import adamw_
from rush.kernels.adamw8bit import adamw8bit_, dynamic_map, quantized_zeros
from rush.kernels.bias_grad import gelu_bias_grad, split_bias_grad
from rush.kernels.cross_entropy import cross_entropy, cross_entropy_
from rush.kernels.flash_attention import flash_attention
from rush.kernels.fp8_linear import fp8_linear
from rush.kernels.fp8_mlp import fp8_mlp
from rush.kernels.geglu import geglu
from rush.kernels.gelu import gelu
from rush.kernels.grad_norm import grad_norm
from rush.kernels.layernorm import add_layernorm, layernorm
from rush.kernels.linear_cross_entropy import linear_cross_entropy
from rush.kernels.nf4 import dequantize_nf4
from rush.kernels.rmsnorm import add_rmsnorm, rmsnorm
from rush.kernels.rope import rope
from rush.kernels.swiglu import swiglu

PACKAGES = ["rush.kernels", "rush.explain.native"]

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS, WIDTH = 64, 2048


def both_ways(function: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor) -> None:
    """The function and its backward pass, with dense gradients from above."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    outs = [out] if isinstance(out, Tensor) else list(out)
    torch.autograd.grad(outs, leaves, [torch.zeros_like(x) for x in outs])


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def rms(dtype: torch.dtype, width: int = WIDTH) -> None:
    both_ways(partial(rmsnorm, eps=1e-5), zeros(ROWS, width, dtype=dtype), zeros(width, dtype=dtype))


def add_rms(dtype: torch.dtype, width: int = WIDTH) -> None:
    x = zeros(ROWS, width, dtype=dtype)
    both_ways(partial(add_rmsnorm, eps=1e-5), x, x, zeros(width, dtype=dtype))


def layer(dtype: torch.dtype, width: int = WIDTH) -> None:
    weight = zeros(width, dtype=dtype)
    both_ways(partial(layernorm, eps=1e-5), zeros(ROWS, width, dtype=dtype), weight, weight)


def add_layer(dtype: torch.dtype, width: int = WIDTH) -> None:
    x, weight = zeros(ROWS, width, dtype=dtype), zeros(width, dtype=dtype)
    both_ways(partial(add_layernorm, eps=1e-5), x, x, weight, weight)


def turn(dtype: torch.dtype, head_dim: int, heads: int = 16, kv_heads: int = 4) -> None:
    q, k = (zeros(1, ROWS, count, head_dim, dtype=dtype).transpose(1, 2) for count in (heads, kv_heads))
    angles = zeros(1, ROWS, head_dim, dtype=FP32)
    both_ways(lambda q, k: rope(q, k, angles, angles), q, k)


def swi(dtype: torch.dtype) -> None:
    x = zeros(ROWS, WIDTH, dtype=dtype)
    both_ways(swiglu, x, x)


def gaussian_gate(dtype: torch.dtype) -> None:
    x = zeros(ROWS, WIDTH, dtype=dtype)
    both_ways(geglu, x, x)


def gaussian(dtype: torch.dtype) -> None:
    both_ways(gelu, zeros(ROWS, WIDTH, dtype=dtype))


def after_bias(dtype: torch.dtype) -> None:
    total, bias = zeros(ROWS, 3 * WIDTH, dtype=dtype), zeros(3 * WIDTH, dtype=dtype)
    both_ways(gelu_bias_grad, total, bias)
    both_ways(lambda total, bias: torch.cat(split_bias_grad(total, bias)), total, bias)


def loss(dtype: torch.dtype, vocabulary: int) -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    function = partial(cross_entropy, labels=labels)
    both_ways(function, zeros(4, vocabulary, dtype=dtype))


def loss_over_logits(dtype: torch.dtype, vocabulary: int) -> None:
    labels = torch.zeros(4, dtype=torch.int64)
    both_ways(lambda x: cross_entropy_(x * 1, labels), zeros(4, vocabulary, dtype=dtype))


def head_and_loss(dtype: torch.dtype) -> None:
    labels = torch.zeros(ROWS, dtype=torch.int64)
    # The vocabulary is no round number; the launching code pads it.
    hidden, weight = zeros(ROWS, 256, dtype=dtype), zeros(1001, 256, dtype=dtype)
    both_ways(partial(linear_cross_entropy, labels=labels), hidden, weight)


def attend(
    dtype: torch.dtype,
    head_dim: int,
    *,
    causal: bool = True,
    kv_heads: int = 4,
    length: int = 256,
    documents: bool = False,
) -> None:
    q, k, v = (
        zeros(1, length, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (4, kv_heads, kv_heads)
    )
    ids = torch.arange(length)[None] // 100 if documents else None
    both_ways(partial(flash_attention, causal=causal, documents=ids), q, k, v)


def eight_bit_linear() -> None:
    x, weight = zeros(ROWS, 128, dtype=BF16), zeros(256, 128, dtype=BF16)
    both_ways(partial(fp8_linear, casts="kernel"), x, weight)


def eight_bit_head() -> None:
    hidden, weight = zeros(ROWS, 256, dtype=BF16), zeros(1001, 256, dtype=BF16)
    labels = torch.zeros(ROWS, dtype=torch.int64)
    both_ways(partial(linear_cross_entropy, labels=labels, matmuls="fp8"), hidden, weight)


def eight_bit_mlp() -> None:
    x, down = zeros(256, 128, dtype=BF16), zeros(128, 512, dtype=BF16)
    both_ways(fp8_mlp, x, zeros(1024, 128, dtype=BF16), down)


UPDATE = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "step": 3}


def update(
    dtype: torch.dtype, moments: torch.dtype, stochastic: bool, size: int = 8192, told: tuple[str, ...] = ()
) -> None:
    p, m = zeros(size, dtype=dtype), zeros(size, dtype=moments)
    settings: dict[str, Any] = {**UPDATE, **{name: zeros(1, dtype=torch.float32) for name in told}}
    adamw_([p], [p], [m], [m], lr=1e-3, stochastic_rounding=stochastic, **settings)


def norm(dtype: torch.dtype, size: int = 8192) -> None:
    grad_norm([zeros(size, dtype=dtype)])


def nf4(dtype: torch.dtype) -> None:
    count = ROWS * WIDTH
    codes, scales = zeros(count // 2, dtype=torch.uint8), zeros(count // 64, dtype=torch.uint8)
    tables = zeros(count // 64 // 256, dtype=FP32), zeros(256, dtype=FP32), zeros(1, dtype=FP32)
    dequantize_nf4(codes, scales, *tables, (ROWS, WIDTH), dtype)


def update_8bit(dtype: torch.dtype, stochastic: bool, size: int = 8192) -> None:
    p = zeros(size, dtype=dtype)
    moments = [quantized_zeros(p, signed=True)], [quantized_zeros(p, signed=False)]
    values = (dynamic_map(True), dynamic_map(False))
    adamw8bit_([p], [p], *moments, values, lr=1e-3, stochastic_rounding=stochastic, **UPDATE)  # type: ignore[arg-type]


def walks() -> None:
    from rush.explain.native.device import Chase, DeviceStream, Tasks

    Chase(2**16, 128, hops=64, device="cpu")()
    DeviceStream(2**16, num_sms=4, moved_bytes=2**20, device="cpu")()
    Tasks(8, rounds=64, device="cpu")(8)


def attend_first(dtype: torch.dtype) -> None:
    from rush.kernels.flash_attention.first_order import first_order_attention

    q = zeros(1, 2, 256, 64, dtype=dtype)
    first_order_attention(q, q, q)


def example(dtype: torch.dtype) -> None:
    from rush.kernels.cuda_example.triton import squared_relu

    both_ways(squared_relu, zeros(ROWS, 2048, dtype=dtype))


def ways() -> None:
    from rush.explain.native.warps import Ways

    run = Ways(2, 10, "cpu")
    run(32, whole_warps=False)
    run(32, whole_warps=True)


STREAMING: dict[str, Callable[[], None]] = {
    "rmsnorm bf16": partial(rms, BF16),
    "rmsnorm fp32": partial(rms, FP32),
    "add_rmsnorm bf16": partial(add_rms, BF16),
    "layernorm bf16": partial(layer, BF16),
    "add_layernorm fp32": partial(add_layer, FP32),
    "rope bf16 64": partial(turn, BF16, 64),
    "rope fp32 128": partial(turn, FP32, 128),
    "swiglu bf16": partial(swi, BF16),
    "swiglu fp32": partial(swi, FP32),
    "geglu bf16": partial(gaussian_gate, BF16),
    "gelu bf16": partial(gaussian, BF16),
    "gelu fp32": partial(gaussian, FP32),
    "bias_grad bf16": partial(after_bias, BF16),
    "bias_grad fp32": partial(after_bias, FP32),
    "fp8_linear bf16": eight_bit_linear,
    "fp8_mlp bf16": eight_bit_mlp,
    "linear_cross_entropy fp8": eight_bit_head,
    "walks of explain": walks,
    "ways of explain": ways,
    "example bf16": partial(example, BF16),
    "attention in the first order bf16": partial(attend_first, BF16),
    "cross_entropy bf16": partial(loss, BF16, 128256),
    "cross_entropy fp32": partial(loss, FP32, 50304),
    "cross_entropy_ bf16": partial(loss_over_logits, BF16, 128256),
    "linear_cross_entropy bf16": partial(head_and_loss, BF16),
    "adamw fp32": partial(update, FP32, FP32, False),
    "adamw bf16 stochastic": partial(update, BF16, BF16, True),
    "adamw bf16 told": partial(update, BF16, BF16, True, told=("found_inf", "grad_scale")),
    "grad_norm fp32": partial(norm, FP32),
    "grad_norm bf16": partial(norm, BF16),
    "nf4 bf16": partial(nf4, BF16),
    "nf4 fp32": partial(nf4, FP32),
    "adamw8bit fp32": partial(update_8bit, FP32, False),
    "adamw8bit bf16 stochastic": partial(update_8bit, BF16, True),
}
"""Limited by memory: every kernel but attention's, in the dtypes that matter. Rows and sizes are multiples of 16."""

ATTENTION: dict[str, Callable[[], None]] = {
    "attention bf16 128": partial(attend, BF16, 128),
    "attention bf16 64 documents": partial(attend, BF16, 64, documents=True, kv_heads=2, length=250),
    "attention fp32 64": partial(attend, FP32, 64),
}

RARE: dict[str, Callable[[], None]] = {
    "attention bf16 64": partial(attend, BF16, 64),
    "attention bf16 256": partial(attend, BF16, 256, kv_heads=2),
    "attention bf16 256 documents": partial(attend, BF16, 256, documents=True, kv_heads=2, length=250),
    "attention fp32 256": partial(attend, FP32, 256),
    "attention bf16 128 documents": partial(attend, BF16, 128, documents=True, kv_heads=2, length=250),
    "attention bf16 64 all keys": partial(attend, BF16, 64, causal=False),
    "attention bf16 32": partial(attend, BF16, 32, length=250),
    "attention bf16 16": partial(attend, BF16, 16),
    "attention fp16 64": partial(attend, FP16, 64),
    "attention fp32 128": partial(attend, FP32, 128),
    "rmsnorm fp16 768": partial(rms, FP16, 768),
    "add_rmsnorm fp32 8192": partial(add_rms, FP32, 8192),
    "add_layernorm bf16 768": partial(add_layer, BF16, 768),
    "layernorm bf16 8192": partial(layer, BF16, 8192),
    "rope fp16 80": partial(turn, FP16, 80, 12, 12),
    "swiglu fp16": partial(swi, FP16),
    "geglu fp32": partial(gaussian_gate, FP32),
    "gelu fp16": partial(gaussian, FP16),
    "nf4 fp16": partial(nf4, FP16),
    "cross_entropy_ fp16": partial(loss_over_logits, FP16, 50304),
    "linear_cross_entropy fp16": partial(head_and_loss, FP16),
    "adamw bf16, moments fp32": partial(update, BF16, FP32, True),
    "adamw bf16, odd size": partial(update, BF16, BF16, False, size=8191),
    "grad_norm bf16, odd size": partial(norm, BF16, size=8191),
    "adamw8bit bf16, odd size": partial(update_8bit, BF16, False, size=8191),
}

LAUNCHES = STREAMING | ATTENTION | RARE
