"""fp8 beyond the walk over all techniques: recipes, the head, what it stands beside, what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rush.errors import MachineError
from rush.hardware import probe
from rush.techniques import check, registry
from rush.techniques.api.evidence import prove
from rush.techniques.precision.cast_linear import CastLinear
from tests.in_turn import in_turn
from tests.techniques.tiny_runs import compare, make_run, recipe_of, trace

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:mkldnn_matmul failed:UserWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]
pytest.importorskip("triton", reason="the kernels need Triton")
SMALL = ["model.shape.num_layers=1", "batch.micro=2", "batch.total_tokens=64"]
HEAD = "{name='fp8', scope='blocks_and_head'}"
ONE_MLP = "{name='fp8', mlp='kernel'}"
JOINED = "fused_projections"


COMPILED = ("fp8", "{name='compile', scope='block'}")
BESIDE = [
    ("{name='fp8', recipe='rowwise'}",),
    ("{name='fp8', casts='kernel', fast='all'}", "checkpoint_full"),
    (HEAD, "vocab_pad"),
    ("fp8", "chunked_loss"),
]
FUSED_HEAD = ("{name='fp8', scope='head'}", "{name='fused_loss', chunk_tokens=512}")


@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        *in_turn(("llama-tiny", "tiny"), [(techniques,) for techniques in BESIDE]),
        ("llama-tiny", (ONE_MLP, JOINED)),
        pytest.param(
            "llama-tiny",
            (ONE_MLP, "{name='fused_projections', groups='mlp'}", "checkpoint_full", "fused_norm"),
            marks=pytest.mark.slow,
        ),
        pytest.param("llama-tiny", (ONE_MLP, JOINED, COMPILED[1]), marks=pytest.mark.slow),
        pytest.param("llama-tiny", COMPILED, marks=pytest.mark.slow),
        pytest.param("tiny", COMPILED, marks=pytest.mark.slow),
        ("tiny", FUSED_HEAD),
        pytest.param("llama-tiny", FUSED_HEAD, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_takes_effect_and_learns_what_plain_learns(name: str, techniques: tuple[str, ...]) -> None:
    run = make_run(*techniques, name=name, overrides=SMALL)
    ours = trace(run, 4, watch=True)
    assert ours.seen is not None
    for technique, proof in prove(run.uses, ours.seen).items():
        if technique not in ("chunked_loss", "fused_loss"):  # 64 tokens fit into one chunk
            assert proof.took_effect, f"{technique}: {proof.what}"
    assert "emulated on a CPU" in prove(run.uses, ours.seen)["fp8"].what
    reference = trace(make_run(name=name, overrides=SMALL), 4)
    verdict = compare(run, "float8", ours, reference)
    assert verdict.verdict == "equal", verdict.why
    assert ours.losses != reference.losses, "nothing was rounded"


def test_every_linear_layer_of_the_blocks_is_changed_and_the_head_only_when_asked() -> None:
    run = make_run("fp8", overrides=SMALL)
    for role, layers in run.model.linears().items():
        assert all(isinstance(layer, CastLinear) == (role != "head") for _, layer in layers), role
    products = 3 * sum(len(layers) for role, layers in run.model.linears().items() if role != "head")
    for techniques, more in ((("fp8",), 0), ((HEAD, "vocab_pad"), 3)):
        seen = trace(make_run(*techniques, overrides=SMALL), 1, watch=True).seen
        assert seen is not None
        assert seen.ops["rush::fp8_emulated_matmul"] == products + more


@pytest.mark.parametrize("techniques", [("fp8",), (ONE_MLP, JOINED)], ids=str)
def test_weights_keep_their_names_and_values_and_stay_wide(techniques: tuple[str, ...]) -> None:
    plain = make_run(overrides=SMALL).model.state_dict()
    run = make_run(*techniques, overrides=SMALL)
    state = run.model.state_dict()
    assert list(state) == list(plain)
    assert all(torch.equal(state[key], plain[key]) for key in plain)
    trace(run, 1)
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("techniques", "overrides", "why"),
    [
        (("fp8",), ["model.shape.intermediate=100"], "to be a multiple of 16"),
        (("fp8",), ["batch.micro=1", "batch.sequence=31", "batch.total_tokens=31"], "to be a multiple of 16"),
        ((HEAD,), [], "add vocab_pad"),
        ((HEAD, "chunked_loss"), ["model.shape.vocab_size=256"], "set scope to blocks"),
        (("{name='fp8', recipe='rowwise', casts='kernel'}",), [], "set casts to compiler"),
        ((ONE_MLP,), [], "add fused_projections with groups all or mlp"),
        (
            (ONE_MLP, "{name='fused_projections', groups='attention'}"),
            [],
            "add fused_projections with groups",
        ),
        ((ONE_MLP, JOINED, "fused_mlp"), [], "or set mlp to compiler"),
        (("{name='fp8', mlp='kernel', recipe='rowwise'}", JOINED), [], "recipe tensorwise"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_built(
    techniques: tuple[str, ...], overrides: list[str], why: str
) -> None:
    with pytest.raises(MachineError, match=f"technique fp8 cannot run here: .*{why}"):
        check(recipe_of(*techniques, overrides=overrides), probe("cpu"))


@pytest.mark.parametrize("tokens", [(3, 7), (1, 1), (2, 16)])
@pytest.mark.parametrize("scope", ["blocks_and_head", "head"])
def test_rows_of_any_length_are_multiplied_as_if_zeros_followed(scope: str, tokens: tuple[int, int]) -> None:
    # One chunk: each chunk has its own scale, and padding would move the boundaries of smaller ones.
    techniques = FUSED_HEAD if scope == "head" else (HEAD, "vocab_pad")
    model = make_run(*techniques, name="tiny", overrides=SMALL).model
    torch.manual_seed(0)
    hidden = torch.randn(*tokens, model.shape.hidden, requires_grad=True)
    labels = torch.randint(model.shape.vocab_size, tokens)
    weight = torch.randn(model.shape.vocab_size, model.shape.hidden, requires_grad=True)
    rows, columns = -(-tokens[0] // 16) * 16, tokens[1]
    zeros, no_labels = torch.zeros(rows, columns, model.shape.hidden), torch.full((rows, columns), -100)
    padded = torch.cat([hidden, zeros[tokens[0] :]]), torch.cat([labels, no_labels[tokens[0] :]])
    found = _loss_and_gradients(model.loss_head(hidden, weight, labels), hidden, weight)
    expected = _loss_and_gradients(model.loss_head(padded[0], weight, padded[1]), hidden, weight)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    if scope == "head":
        return
    layer = next(module for module in model.modules() if isinstance(module, CastLinear))
    x = hidden[..., : layer.in_features]
    alone, among = layer(x), layer(torch.cat([x, zeros[tokens[0] :, :, : layer.in_features]]))[: tokens[0]]
    torch.testing.assert_close(alone, among, rtol=0, atol=0)


def _loss_and_gradients(loss: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def test_gpt2_keeps_its_own_mlp() -> None:
    with pytest.raises(MachineError, match="it needs an MLP with SwiGLU and recipe tensorwise"):
        check(recipe_of(ONE_MLP, name="tiny"), probe("cpu"))


def test_the_evidence_fails_where_the_kernels_did_not_run() -> None:
    run = make_run("fp8", JOINED, overrides=SMALL)
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    shows = registry()["fp8"].knobs["mlp"].evidence
    assert shows is not None
    assert shows(seen, {"mlp": "compiler"}).took_effect
    proof = shows(seen, {"mlp": "kernel"})
    assert not proof.took_effect
    assert "rush::fp8_swiglu_backward" in proof.what


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(MachineError, match="technique fp8 cannot run here"):
        check(recipe_of("fp8"), probe("cpu"))


def test_the_head_alone_leaves_the_blocks_as_they_are_and_its_evidence_fails_without_its_kernel() -> None:
    run = make_run("{name='fp8', scope='head'}", "fused_loss", overrides=SMALL)
    assert run.model.loss_head.matmuls == "fp8"  # the gradients of a head never with fast accumulation
    assert not any(isinstance(module, CastLinear) for module in run.model.modules())
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    knobs = next(use.knobs for use in run.uses if use.technique.name == "fp8")
    assert registry()["fp8"].evidence(seen, knobs).took_effect
    without = {name: count for name, count in seen.ops.items() if name != "rush::fp8_logits_gradient"}
    assert not registry()["fp8"].evidence(replace(seen, ops=without), knobs).took_effect


@pytest.mark.parametrize(
    ("techniques", "said"),
    [
        (["{name='fp8', scope='head', recipe='rowwise'}", "fused_loss"], "scaled tensorwise"),
        (["{name='fp8', scope='head', mlp='kernel'}", "fused_loss", JOINED], "scope must include the blocks"),
        (["{name='fp8', scope='head'}", "chunked_loss"], "remove chunked_loss"),
        (["{name='fp8', scope='head', fast='all'}", "fused_loss"], "never use fast accumulation"),
    ],
)
def test_what_a_head_in_8_bits_cannot_stand_beside(techniques: list[str], said: str) -> None:
    with pytest.raises(MachineError, match=said):
        make_run(*techniques, name="llama-tiny", overrides=SMALL)
