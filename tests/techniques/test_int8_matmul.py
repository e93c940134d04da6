"""int8_matmul beyond the walk over all techniques: what it stands beside, its evidence pass by pass, its random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import probe
from rush.techniques import check, registry
from rush.techniques.api.contract import Call, Observation
from rush.techniques.api.evidence import prove
from rush.techniques.precision.cast_linear import CastLinear
from rush.techniques.precision.int8_matmul import MATMUL, Int8Layers
from tests.in_turn import in_turn
from tests.techniques.tiny_runs import Trace, compare, make_loader, make_run, recipe_of, trace

pytestmark = pytest.mark.filterwarnings(
    "ignore:mkldnn_matmul failed:UserWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)
SMALL = ["model.shape.num_layers=1", "batch.micro=2", "batch.total_tokens=64"]
COMPILED = ("int8_matmul", "{name='compile', scope='block'}")
BESIDE = [
    ("int8_matmul", "checkpoint_full"),
    ("int8_matmul", "checkpoint_selective"),
    ("int8_matmul", "chunked_loss", "vocab_pad"),
]


@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        *in_turn(("llama-tiny", "tiny"), [(techniques,) for techniques in BESIDE]),
        ("llama-tiny", ("int8_matmul", "fused_projections")),
        pytest.param("llama-tiny", COMPILED, marks=pytest.mark.slow),
        pytest.param("tiny", COMPILED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_takes_effect_and_learns_what_plain_learns(name: str, techniques: tuple[str, ...]) -> None:
    run = make_run(*techniques, name=name, overrides=SMALL)
    ours = trace(run, 4, watch=True)
    assert ours.seen is not None
    for technique, proof in prove(run.uses, ours.seen).items():
        if technique != "chunked_loss":  # 64 tokens fit into one chunk
            assert proof.took_effect, f"{technique}: {proof.what}"
    reference = trace(make_run(name=name, overrides=SMALL), 4)
    verdict = compare(run, "int8", ours, reference)
    assert verdict.verdict == "equal", verdict.why
    assert ours.losses != reference.losses, "nothing was rounded"


@pytest.fixture(scope="module")
def seen() -> Observation:
    found = trace(make_run("int8_matmul", overrides=SMALL), 1, watch=True).seen
    assert found is not None
    return found


def test_every_linear_layer_of_the_blocks_is_changed_and_the_head_is_not(seen: Observation) -> None:
    run = make_run("int8_matmul", overrides=SMALL)
    for role, layers in run.model.linears().items():
        assert all(isinstance(layer, CastLinear) == (role != "head") for _, layer in layers), role
    layers = sum(len(layers) for role, layers in run.model.linears().items() if role != "head")
    assert seen.matmuls_by_op[MATMUL] == 3 * layers
    assert not any(
        seen.head_widths & {*dims} for call in seen.calls[MATMUL] for dims in call.shapes if dims
    ), "the LM head"


def _proof(seen: Observation) -> tuple[bool, str]:
    proof = registry()["int8_matmul"].evidence(seen, {})
    return proof.took_effect, proof.what


def test_its_evidence_fails_where_a_pass_of_one_role_was_not_in_int8(seen: Observation) -> None:
    assert _proof(seen)[0]
    fewer = {**seen.matmuls_by_op, MATMUL: seen.matmuls_by_op[MATMUL] - 1}
    assert not _proof(replace(seen, matmuls_by_op=fewer))[0]
    tokens = 64

    def without(of_one: tuple[int, int, int]) -> Observation:
        calls = seen.calls[MATMUL]

        def is_it(call: Call) -> bool:
            return (*call.shapes[0], call.shapes[1][1]) == of_one

        assert any(map(is_it, calls)), of_one
        kept = {call: count for call, count in calls.items() if not is_it(call)}
        return replace(seen, calls={**seen.calls, MATMUL: kept})

    # The MLP's layers are 96 × 64 (gate and up) and 64 × 96 (down); keys and values 32 × 64.
    for shape, said in {
        (96, tokens, 64): "the weight gradient of 96 × 64",
        (tokens, 32, 64): "the input gradient of 32 × 64",
        (tokens, 64, 32): "the output of 32 × 64",
    }.items():
        held, what = _proof(without(shape))
        assert not held
        assert f"not seen: {said}" in what


def test_weights_keep_their_names_and_values_and_stay_wide() -> None:
    plain = make_run(overrides=SMALL).model.state_dict()
    run = make_run("int8_matmul", overrides=SMALL)
    state = run.model.state_dict()
    assert list(state) == list(plain)
    assert all(torch.equal(state[key], plain[key]) for key in plain)
    trace(run, 1)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


def _trained(*more: str, steps: int = 2) -> tuple[Trace, int]:
    run = make_run("int8_matmul", overrides=[*SMALL, *more])
    found, noted = trace(run, steps), run.facts.noted(Int8Layers)
    assert noted is not None
    return found, int(noted.seed)


def test_a_step_has_its_own_random_numbers_by_the_seed_of_the_run() -> None:
    (first, seed), (again, same), (_, another) = _trained(), _trained(), _trained("run.seed=7")
    assert (first.losses, seed) == (again.losses, same)
    assert len({seed, another, _trained(steps=1)[1]}) == 3


def test_random_numbers_do_not_depend_on_what_was_drawn_before() -> None:
    """A resumed run compiles and captures once more, which may draw; its gradients must be rounded as the other's."""
    torch.rand(1000)
    moved = _trained()[0]
    torch.manual_seed(99)
    assert moved.losses == _trained()[0].losses


@pytest.mark.parametrize(
    "techniques", [COMPILED[:1], pytest.param(COMPILED, marks=pytest.mark.slow)], ids=str
)
def test_gradients_are_rounded_by_the_seed_of_the_step_also_compiled(techniques: tuple[str, ...]) -> None:
    run = make_run(*techniques, overrides=SMALL)
    noted = run.facts.noted(Int8Layers)
    assert noted is not None
    with make_loader(run) as loader:
        batch = next(iter(loader.next_step()))
    scale = torch.tensor(1.0)

    def gradients(seed: int) -> list[torch.Tensor]:
        noted.seed.fill_(seed)
        run.optimizer.zero_grad()
        run.micro_pass(batch, scale)
        return [p.grad.clone() for p in run.model.parameters() if p.grad is not None]

    one, other, again = gradients(1), gradients(2), gradients(1)
    assert all(map(torch.equal, one, again))
    assert not all(map(torch.equal, one, other))


@pytest.mark.parametrize("tokens", [(3, 7), (1, 1), (2, 16)])
def test_rows_of_any_length_are_multiplied_as_if_zeros_followed(tokens: tuple[int, int]) -> None:
    layer = next(
        m for m in make_run("int8_matmul", overrides=SMALL).model.modules() if isinstance(m, CastLinear)
    )
    torch.manual_seed(0)
    x = torch.randn(*tokens, layer.in_features)
    padded = torch.cat([x.flatten(0, 1), torch.zeros(-x[..., 0].numel() % 32, layer.in_features)])
    found = []
    for given in (x, padded):
        torch.manual_seed(1)
        leaf = given.clone().requires_grad_()
        out = layer(leaf)
        real = out.reshape(-1, out.shape[-1])[: x[..., 0].numel()]
        (dx,) = torch.autograd.grad(real.square().sum(), leaf)
        found.append((real.detach(), dx.reshape(-1, layer.in_features)[: len(real)]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("other", "why"),
    [("fp8", "both replace the matmuls"), ("qlora", "use lora"), ("fp16_matmul", "both replace")],
)
def test_what_it_cannot_stand_beside_is_refused_with_the_reason(other: str, why: str) -> None:
    with pytest.raises(RecipeError, match=f"cannot be combined.*{why}"):
        check(recipe_of("int8_matmul", other), probe("cpu"))


def test_an_older_gpu_and_widths_that_do_not_fit_are_refused() -> None:
    cpu = probe("cpu")
    from rush.hardware import Device

    for capability, overrides, why in (
        ((7, 5), [], "compute capability 8.0"),
        ((8, 0), ["model.shape.intermediate=100"], "a multiple of 16 and at least 32"),
        ((8, 0), ["layout.tp=2", "batch.micro=1"], "at least 32, also after sharding"),
    ):
        gpu = replace(
            cpu, device="cuda", devices=(Device("a GPU", 80 * 2**30, capability),) * 2, triton="3.6"
        )
        with pytest.raises(MachineError, match=why):
            check(recipe_of("int8_matmul", "amp_bf16", overrides=overrides), gpu)
