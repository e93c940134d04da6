from __future__ import annotations

import math

import pytest
import torch

from rush.models import SIZES, Shape, build_model, count_parameters
from rush.models.counts import ParameterSpec
from rush.models.initial import BLOCK, initial_value, initial_values


def test_weights_do_not_depend_on_the_way_to_the_device(small_shape: Shape) -> None:
    direct = build_model(small_shape, seed=7)
    with torch.device("meta"):
        empty = build_model(small_shape, seed=99)
    empty.to_empty(device="cpu")
    empty.init_weights(7)
    again = build_model(small_shape)
    again.init_weights(7)
    for other in (empty, again):
        pairs = zip(direct.state_dict().items(), other.state_dict().items(), strict=True)
        for (name, first), (same_name, second) in pairs:
            assert name == same_name
            assert torch.equal(first, second), name
    tokens = torch.arange(20)[None]
    assert torch.equal(direct(tokens), empty(tokens))


def test_seeds_differ_and_tensors_of_one_shape_differ() -> None:
    first, second = build_model(SIZES["tiny"], seed=1), build_model(SIZES["tiny"], seed=2)
    assert not torch.equal(first.embedding.weight, second.embedding.weight)
    ups = [linear.weight for _, linear in first.linears()["mlp_up"]]
    assert not torch.equal(ups[0], ups[1])


def test_initialization_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    build_model(SIZES["tiny"], seed=3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_initial_values_have_the_published_statistics(name: str) -> None:
    shape = SIZES[name]
    total = 0
    for parameter, value in initial_values(shape, seed=0):
        total += value.numel()
        if parameter.endswith(".bias"):
            assert torch.count_nonzero(value) == 0
        elif "norm" in parameter:
            assert torch.equal(value, torch.ones_like(value))
        else:
            residual = parameter.endswith(("attention.out.weight", "mlp.down.weight"))
            scale = 1 / math.sqrt(2 * shape.num_layers) if residual and shape.family == "gpt2" else 1.0
            sigmas = 5 / math.sqrt(value.numel())  # the mean and deviation of n draws, five sigmas wide
            assert abs(value.mean()) < 0.02 * scale * sigmas, parameter
            assert abs(value.std() / (0.02 * scale) - 1) < sigmas, parameter
    assert total == count_parameters(shape)


def test_the_blocks_of_a_large_tensor_have_their_own_generators_and_are_reproducible() -> None:
    spec = ParameterSpec("embedding.weight", "embedding", (BLOCK // 512 * 2 + 1, 512), matmul=False)
    first, again = (initial_value(SIZES["tiny"], spec, seed=5) for _ in range(2))
    assert torch.equal(first, again)
    one, two, rest = first.flatten().split(BLOCK)
    assert not torch.equal(one, two)
    assert rest.numel() == 512
    for block in (one, two, rest):
        assert abs(block.std() / 0.02 - 1) < 5 / math.sqrt(block.numel())


def test_the_loss_of_an_untrained_model_is_that_of_uniform_logits() -> None:
    """Its loss on shuffled labels is that of a uniform guess."""
    shape = SIZES["llama-tiny"]
    tokens = torch.arange(256)[None]
    labels = torch.randperm(shape.vocab_size, generator=torch.Generator().manual_seed(0))[None, :256]
    with torch.no_grad():
        loss = build_model(shape)(tokens, labels) / 256
    assert abs(float(loss) - math.log(shape.vocab_size)) < 0.1
