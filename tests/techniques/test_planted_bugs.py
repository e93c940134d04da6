"""Techniques that are wrong on purpose, through the same doors as real ones: each must be caught."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import rush.techniques
from rush.data import Batch
from rush.recipe import Knob
from rush.records.loss_curves import CLOSE, CLOSE_STEPS, TIMES_PERTURBED, ParityVerdict, PerturbedRun
from rush.techniques import registry
from rush.techniques.api.contract import Build, Claim, Parity, Pass, Stage, Technique
from rush.techniques.api.evidence import prove, ran
from rush.techniques.api.tolerances import gradient_errors, judge
from tests.techniques.tiny_runs import Trace, compare, make_run, trace

Apply = Callable[[Build, Mapping[str, Knob]], None]


@pytest.fixture(scope="module")
def plain() -> Trace:
    return trace(make_run(), 3)


def plant(monkeypatch: pytest.MonkeyPatch, apply: Apply, parity: Parity = Parity.CLOSE) -> None:
    technique = Technique(
        name="planted",
        stage=Stage.STEP,
        apply=apply,
        claim=Claim("tokens_per_s", 1.0, "nowhere", "nobody"),
        parity=parity,
        evidence=ran("fused_adam"),
    )
    known = {**registry(), "planted": technique}
    monkeypatch.setattr(rush.techniques, "registry", lambda: known)


def does_nothing(build: Build, knobs: Mapping[str, Knob]) -> None: ...


def scales_one_gradient(build: Build, knobs: Mapping[str, Knob]) -> None:
    weight = build.model.get_parameter("blocks.0.attention.q.weight")
    weight.register_hook(lambda gradient: gradient * 1.01)


def averages_micro_batches(build: Build, knobs: Mapping[str, Knob]) -> None:
    """Half of the micro batch counts double: the mean of means where label counts differ."""

    def wrap(inner: Pass) -> Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            first = inner(batch.each(lambda rows: rows[:1]), loss_scale * 2)
            return first + inner(batch.each(lambda rows: rows[1:]), loss_scale * 2 / 3)

        return passes

    build.pass_wrappers.append(wrap)


class ForgetfulHead(nn.Module):
    """A chunked loss that leaves out what does not fill a chunk."""

    def forward(self, hidden_btd: Tensor, weight_vd: Tensor, labels_bt: Tensor) -> Tensor:
        whole = labels_bt.numel() // 50 * 50
        logits = nn.functional.linear(hidden_btd.flatten(0, 1)[:whole], weight_vd)
        return nn.functional.cross_entropy(logits, labels_bt.flatten()[:whole], reduction="sum")


def forgets_the_rest(build: Build, knobs: Mapping[str, Knob]) -> None:
    build.model.loss_head = ForgetfulHead()


def drops_decay(build: Build, knobs: Mapping[str, Knob]) -> None:
    def harmless_looking(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0

    build.optimizer_hooks.append(harmless_looking)


def test_a_technique_that_does_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch, plain: Trace) -> None:
    plant(monkeypatch, does_nothing, Parity.EXACT)
    run = make_run("planted")
    ours = trace(run, 3, watch=True)
    assert ours.seen is not None
    proof = prove(run.uses, ours.seen)["planted"]
    assert not proof.took_effect
    assert "nothing named fused_adam ran" in proof.what
    assert compare(run, "float32", ours, plain).verdict == "equal"


@pytest.mark.parametrize("bug", [scales_one_gradient, averages_micro_batches, forgets_the_rest])
def test_a_technique_that_breaks_the_gradient_is_called_different(
    bug: Apply, monkeypatch: pytest.MonkeyPatch, plain: Trace
) -> None:
    plant(monkeypatch, bug)
    run = make_run("planted")
    verdict = compare(run, "float32", trace(run, 3), plain)
    assert verdict.verdict == "different"
    assert verdict.worst is not None
    assert verdict.tolerance is not None
    assert verdict.worst > 5 * verdict.tolerance, verdict.why


def test_a_gradient_scaled_by_a_hundredth_is_named_by_its_tensor(
    monkeypatch: pytest.MonkeyPatch, plain: Trace
) -> None:
    plant(monkeypatch, scales_one_gradient)
    run = make_run("planted")
    verdict = compare(run, "float32", trace(run, 3), plain)
    assert "the gradient of blocks.0.attention.q.weight is off by 1.0e-02" in verdict.why


def test_an_update_that_differs_in_the_last_bits_is_not_exact(
    monkeypatch: pytest.MonkeyPatch, plain: Trace
) -> None:
    plant(monkeypatch, drops_decay, Parity.EXACT)
    run = make_run("planted")
    assert compare(run, "float32", trace(run, 3), plain).verdict == "different"


def judged(parity: Parity, factor: float, dtype: str = "float32") -> str:
    reference = [5.0, 4.0, 3.0, 2.0]
    ours = [loss * factor for loss in reference]
    return judge(parity, dtype, ours, reference, reference, reference, {"w": 0.0}).verdict


def test_each_class_and_dtype_has_its_own_tolerance() -> None:
    assert judged(Parity.EXACT, 1.0) == "equal"
    assert judged(Parity.EXACT, 1 + 1e-15) == "different"
    for dtype, tolerance in CLOSE.items():
        assert judged(Parity.CLOSE, 1 + 0.9 * tolerance.loss, dtype) == "equal"
        assert judged(Parity.CLOSE, 1 + 1.1 * tolerance.loss, dtype) == "different"
    assert CLOSE["float32"].gradient < CLOSE["float16"].gradient < CLOSE["bfloat16"].gradient
    # The loss falls from 5 to 2, to a mean of 2.5 over the second half: 2 % of its end are less than 5 % of that fall.
    assert judged(Parity.STATISTICAL, 1.019) == "equal"
    assert judged(Parity.STATISTICAL, 1.021) == "different"
    assert judged(Parity.STATISTICAL, 0.979) == "different"
    assert judged(Parity.CHANGES, 7.0) == "not judged"
    assert judged(Parity.CLOSE, float("nan")) == "different"
    assert judged(Parity.STATISTICAL, float("inf")) == "different"


def test_what_one_rounding_grows_to_is_allowed_and_no_more() -> None:
    reference, plain_norms = [5.0, 4.0, 3.0, 2.0], [1.0, 1.0, 1.0, 1.0]
    twin = PerturbedRun([5.0, 4.0, 3.0, 2.0], [1.0, 1.0, 1.02, 1.1])

    def norms(*found: float) -> str:
        given = Parity.CLOSE, "bfloat16", reference, reference, found, plain_norms, {"w": 0.0}
        assert judge(*given).verdict == "different"  # without the twin none of these would pass
        return judge(*given, twin).verdict

    edge = 0.05 + TIMES_PERTURBED * 0.1
    assert norms(1.0, 1.0, 1.1, 1 + 0.95 * edge) == "equal"
    assert norms(1.0, 1.06, 1.0, 1.0) == "different"  # the twin was not off yet: rounding does not explain it
    assert norms(1.0, 1.0, 1.0, 1 + 1.05 * edge) == "different"
    tight = Parity.CLOSE, "float32", reference, reference, (1.0, 1.0, 1.0, 1.01), plain_norms, {"w": 0.0}
    assert judge(*tight, twin).verdict == "different"  # fp32 rounds 65,536 times finer
    late = [5.0, 4.0, 3.3, 2.3]
    given = Parity.STATISTICAL, "bfloat16", late, reference, plain_norms, plain_norms, {"w": 0.0}
    assert judge(*given).verdict == "different"
    assert judge(*given, PerturbedRun([5.0, 4.0, 3.1, 2.1], plain_norms)).verdict == "equal"


def test_a_run_that_falls_behind_is_not_called_equal_for_what_it_learned_at_first() -> None:
    """Every 25th step and mean of Llama 3.2 1B on an H200 over 200 steps, with the head's 8-bit gradients summed in short
    accumulators and with a head in bf16, as traced. Both are within 5 % of what was learned, most of it in the first 50 steps."""
    plain = [12.176, 10.820, 8.150, 6.815, 6.516, 6.210, 5.997, 6.096, 5.811]
    twin = PerturbedRun([12.176, 10.820, 8.150, 6.815, 6.516, 6.210, 5.995, 6.084, 5.802], [1.0] * 9)
    short = [12.173, 10.829, 8.203, 6.830, 6.532, 6.285, 6.174, 6.426, 6.339]
    sound = [12.175, 10.828, 8.151, 6.821, 6.523, 6.222, 5.997, 6.064, 5.765]

    def told(losses: list[float]) -> ParityVerdict:
        return judge(Parity.STATISTICAL, "float8", losses, plain, [1.0] * 9, [1.0] * 9, {}, twin)

    assert told(short).verdict == "different"
    assert told(short).why.startswith(
        "in the last quarter of the steps the loss is 6.313 against 5.968: off by 3.4e-01"
    )
    assert told(sound).verdict == "equal"


def test_a_run_that_loses_its_warm_up_and_comes_near_again_is_not_called_equal() -> None:
    """The first loss and the means of 25 steps each of Llama 3.2 1B on an H200 while the learning rate climbs over 200, plain fp32 and in bf16 weights that are
    rounded to the nearest, which lose small updates: as traced."""
    plain = [12.193, 10.727, 7.952, 6.989, 6.638, 6.34, 6.177, 6.203, 6.242]
    nearest = [12.193, 11.908, 9.178, 7.459, 6.836, 6.492, 6.306, 6.357, 6.233]
    norms = [1.0] * len(plain)
    told = judge(Parity.STATISTICAL, "bfloat16", nearest, plain, norms, norms, {}, PerturbedRun(plain, norms))
    assert told.verdict == "different"
    assert told.why.startswith("in the first quarter of the steps")


def test_rounding_is_held_to_its_first_steps_and_to_the_curve_of_a_long_run() -> None:
    plain = [10.0 - 0.04 * step for step in range(100)]

    def told(losses: list[float]) -> ParityVerdict:
        norms = [1.0] * len(losses)
        return judge(Parity.CLOSE, "float32", losses, plain[: len(losses)], norms, norms, {"w": 0.0})

    early, late, behind = list(plain), list(plain), list(plain)
    early[CLOSE_STEPS - 1] *= 1.001
    late[CLOSE_STEPS] *= 1.001
    behind[50:] = [loss + 0.02 * step for step, loss in enumerate(behind[50:])]
    assert told(early).verdict == "different"
    assert told(late).verdict == "equal"
    assert f"in the first {CLOSE_STEPS} steps; over all from 10.000" in told(late).why
    assert told(behind[:60]).verdict == "equal"
    assert told(behind).verdict == "different"


def test_where_plain_training_jumps_nothing_is_called_equal_for_its_twins_sake() -> None:
    """Steps 1 and 11 to 20 of the `tiny` recipe, plain, from rounded weights, and with fp16 sums in the head: as traced."""
    plain = [7.645] * 10 + [6.630, 6.636, 6.518, 6.368, 9.108, 6.407, 7.499, 6.462, 6.493, 6.380]
    twin = [7.645] * 10 + [6.630, 6.636, 6.518, 6.368, 9.660, 6.404, 7.909, 6.442, 6.451, 6.473]
    ours = [7.645] * 10 + [6.630, 6.636, 6.519, 6.369, 6.518, 6.400, 6.995, 6.455, 6.468, 6.414]

    def told(losses: list[float]) -> ParityVerdict:
        norms = [1.0] * len(plain)
        return judge(
            Parity.STATISTICAL, "float16", losses, plain, norms, norms, {}, PerturbedRun(twin, norms)
        )

    assert told(ours).verdict == "not judged"
    assert "too unsteady to judge" in told(ours).why
    assert (
        told([loss + 0.03 for loss in plain]).verdict == "equal"
    )  # within 5 % of what was learned, twin or not
    assert told([loss + 1.0 for loss in plain]).verdict == "different"


def test_gradient_errors_are_relative_to_the_reference_with_a_floor_for_gradients_that_are_nothing() -> None:
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-12, 0.0])}
    ours = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([2e-12, 0.0])}
    errors = gradient_errors(ours, reference)
    assert errors["a"] == pytest.approx(0.1)
    assert errors["b"] < 1e-8
