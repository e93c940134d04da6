"""What ranks do in the tests of techniques beside layers that are cut and stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tests.parallel.rank_work import Result, loader, recipe

WORDS, WIDTH, TOKENS = 11, 5, 9


def given_loss() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden vectors, weight and labels: ignored ones, the first and the last word, and logits that no exponent holds."""
    generator = torch.Generator().manual_seed(3)
    hidden_nd = torch.randn(TOKENS, WIDTH, generator=generator)
    hidden_nd[4] *= 300
    weight_vd = torch.randn(WORDS, WIDTH, generator=generator)
    labels_n = torch.tensor([0, 10, 5, 6, 2, -100, 7, 3, -100])
    return hidden_nd, weight_vd, labels_n


def lose_in_parts(tokens_at_once: int) -> Result:
    """The fused loss of which each rank has some of the words: loss, gradients, and what an unknown label gives."""
    from torch.distributed import all_reduce

    from rush.kernels.linear_cross_entropy import VocabShard, linear_cross_entropy
    from rush.parallel import AXES, join

    sizes = dict.fromkeys(AXES, 1) | {"tp": 2}
    with join(sizes, "cpu") as ranks:
        assert ranks.mesh is not None
        mesh = ranks.mesh["tp"]
        first = 0 if ranks.rank == 0 else 6
        shard = VocabShard(first, WORDS, 2, mesh.get_group().group_name)
        hidden_nd, weight_vd, labels_n = given_loss()
        own_vd = weight_vd[first : first + 6].clone().requires_grad_()
        hidden_nd.requires_grad_()
        options = {"chunk_tokens": tokens_at_once, "vocab_shard": shard}
        loss = linear_cross_entropy(hidden_nd, own_vd, labels_n, **options)
        (loss * 2).backward()  # type: ignore[no-untyped-call]
        assert hidden_nd.grad is not None
        assert own_vd.grad is not None
        all_reduce(hidden_nd.grad)
        with torch.no_grad():
            unknown = linear_cross_entropy(hidden_nd, own_vd, torch.full_like(labels_n, WORDS), **options)
            silent = linear_cross_entropy(hidden_nd, own_vd, torch.full_like(labels_n, -100), **options)
        return {
            "loss": float(loss.detach()),
            "hidden": hidden_nd.grad.numpy(),
            "weight": own_vd.grad.numpy(),
            "unknown": float(unknown),
            "silent": float(silent),
        }


def overflow(layout: Mapping[str, int], more: Iterable[str]) -> Result:
    """Three steps in fp16; at the second one the gradients that rank 1 holds are not finite, and no others."""
    from rush.hardware import probe
    from rush.parallel import join
    from rush.parallel.sharded import local_tensor
    from rush.training.build import build
    from rush.training.step import launch_step

    chosen = recipe("llama", layout, ("amp_fp16",), *more)
    with join(chosen.layout.model_dump(), "cpu") as ranks:
        run = build(chosen, probe("cpu"), None, ranks)
        plain, step = run.passes.train, 0

        def train(batches: Any, loss_scale: torch.Tensor) -> torch.Tensor:
            total = plain(batches, loss_scale)
            if step == 2 and ranks.rank == 1:
                gradient = next(p.grad for p in run.model.blocks.parameters() if p.dim() == 2)
                assert gradient is not None
                local_tensor(gradient).fill_(torch.inf)
            return total

        run.passes.train = train  # type: ignore[method-assign]
        skipped, scales, weights = [], [], []
        with loader(run) as given:
            for step in (1, 2, 3):
                skipped.append(launch_step(run, step, 1e-3, list(given.next_step())).result().skipped)
                scales.append(run.scaler.get_scale())
                held = [local_tensor(p).detach().numpy().tobytes() for p in run.model.parameters()]
                weights.append(hash(tuple(held)))
        return {"skipped": skipped, "scales": scales, "weights": weights}
