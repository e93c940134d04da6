"""Preference objectives, against the papers' formulas in float64 and against plain arithmetic on the same model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.errors import DataError, RecipeError
from rush.hardware import probe
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.training.build import Run, build
from rush.training.objectives import Preference
from rush.training.objectives.preference import LOSSES, Pairs, log_probabilities
from rush.training.step import train_step, validate

SMALL = ["model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.vocab_size=64", "model.shape.head_dim=8",
         "model.shape.intermediate=64", "batch.sequence=16", "batch.total_tokens=16", "batch.micro=1",
         "schedule.steps=50", "optimizer.lr=0.01", "objective.kind='dpo'"]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # bf16 on older CPUs

KINDS = ["sigmoid", "ipo", "orpo", "simpo"]


def recipe_of(*overrides: str, name: str = "tiny") -> Recipe:
    return load_recipe(name, [*SMALL, *overrides])


def make_run(*overrides: str, name: str = "tiny") -> Run:
    return build(recipe_of(*overrides, name=name), probe("cpu"))


def preference(run: Run) -> Preference:
    assert isinstance(run.objective, Preference)
    return run.objective


def make_pairs(count: int, seed: int, width: int = 16, reference: bool = True) -> Batch:
    """Pairs that share a prompt, with answers of unequal lengths and padding behind them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 64, (2 * count, width + 1), generator=generator)
    labels = torch.full((2 * count, width), IGNORED)
    for row in range(2 * count):
        prompt = 3 + (row % count) % 3
        length = int(torch.randint(1, width - prompt, (), generator=generator))
        tokens[row, :prompt] = tokens[row % count, :prompt]
        labels[row, prompt - 1 : prompt - 1 + length] = tokens[row, prompt : prompt + length]
        tokens[row, prompt + length :] = 0
    names = tuple(
        f"pair {row % count} {'rejected' if row >= count else 'chosen'}" for row in range(2 * count)
    )
    held = -40 * torch.rand(2 * count, generator=generator) if reference else None
    return Batch(tokens[:, :-1].contiguous(), labels, names, reference_b=held, paired=True)


def log_probs_float64(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Row sums of label log-probabilities from full logits, one label at a time."""
    logits = model(batch.tokens_bt).double().log_softmax(-1)
    sums = []
    for row in range(logits.shape[0]):
        found = [(t, int(label)) for t, label in enumerate(batch.labels_bt[row]) if label != IGNORED]
        sums.append(torch.stack([logits[row, t, label] for t, label in found]).sum())
    return torch.stack(sums)


# The papers' formulas, each written for one pair: log-probabilities (w: chosen, l: rejected), reference, lengths.


def dpo(w: Tensor, l: Tensor, rw: float, rl: float, nw: int, nl: int, o: Any) -> Tensor:  # noqa: E741
    """Rafailov et al. 2023, equation 7; Mitchell's note: a label is wrong with probability eps."""
    z = o.beta * torch.log((w - rw).exp() / (l - rl).exp())
    p = 1 / (1 + torch.exp(-z))
    return -(1 - o.label_smoothing) * torch.log(p) - o.label_smoothing * torch.log(1 - p)


def ipo(w: Tensor, l: Tensor, rw: float, rl: float, nw: int, nl: int, o: Any) -> Tensor:  # noqa: E741
    """Azar et al. 2023, equation 17, with log-likelihoods per token."""
    h = (w - rw) / nw - (l - rl) / nl
    return (h - 1 / (2 * o.beta)) ** 2


def orpo(w: Tensor, l: Tensor, rw: float, rl: float, nw: int, nl: int, o: Any) -> Tensor:  # noqa: E741
    """Hong et al. 2024, equations 4 to 7: odds = P / (1 - P), with P the geometric mean over tokens."""
    pw, pl = torch.exp(w / nw), torch.exp(l / nl)
    ratio = (pw / (1 - pw)) / (pl / (1 - pl))
    return -w / nw + o.beta * -torch.log(1 / (1 + 1 / ratio))


def simpo(w: Tensor, l: Tensor, rw: float, rl: float, nw: int, nl: int, o: Any) -> Tensor:  # noqa: E741
    """Meng et al. 2024, equation 6."""
    z = o.beta / nw * w - o.beta / nl * l - o.margin
    return -torch.log(1 / (1 + torch.exp(-z)))


FORMULAS: dict[str, Callable[..., Tensor]] = {"sigmoid": dpo, "ipo": ipo, "orpo": orpo, "simpo": simpo}
SETTINGS = {
    "sigmoid": ["objective.beta=0.3", "objective.label_smoothing=0.2"],
    "ipo": ["objective.beta=0.25"],
    "orpo": ["objective.beta=0.4"],
    "simpo": ["objective.beta=2.0", "objective.margin=0.7"],
}


def options(kind: str) -> list[str]:
    return [f"objective.loss='{kind}'", *SETTINGS[kind]]


def formula(kind: str, logp_b: Tensor, batch: Batch, settings: Any) -> Tensor:
    """The summed loss of a batch, pair by pair."""
    pairs = batch.tokens_bt.shape[0] // 2
    lengths = (batch.labels_bt != IGNORED).sum(1).tolist()
    held = batch.reference_b.tolist() if batch.reference_b is not None else [0.0] * (2 * pairs)
    losses = [
        FORMULAS[kind](
            logp_b[i], logp_b[i + pairs], held[i], held[i + pairs], lengths[i], lengths[i + pairs], settings
        )
        for i in range(pairs)
    ]
    return torch.stack(losses).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_of_each_loss_are_the_papers_in_float64(kind: str) -> None:
    settings = recipe_of(*options(kind)).objective
    generator = torch.Generator().manual_seed(3)
    values = [-20 * torch.rand(7, generator=generator, dtype=torch.float64) - 0.5 for _ in range(4)]
    lengths = [torch.randint(1, 9, (7,), generator=generator) for _ in range(2)]
    chosen, rejected = (value.clone().requires_grad_() for value in values[:2])
    pairs = Pairs(chosen, rejected, *(length.double() for length in lengths), values[2], values[3])
    ours = LOSSES[kind](pairs, settings).loss_n
    ours.sum().backward()  # type: ignore[no-untyped-call]
    w, l = (value.clone().requires_grad_() for value in values[:2])  # noqa: E741
    wanted = [
        FORMULAS[kind](w[i], l[i], float(values[2][i]), float(values[3][i]), int(lengths[0][i]), int(lengths[1][i]), settings)
        for i in range(7)
    ]  # fmt: skip
    torch.stack(wanted).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours.detach(), torch.stack(wanted).detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(chosen.grad, w.grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(rejected.grad, l.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_a_models_loss_and_gradients_follow_the_formula(kind: str, name: str) -> None:
    run, batch = make_run(*options(kind), name=name), make_pairs(3, seed=1)
    logp_b = log_probs_float64(run.model, batch)
    wanted = formula(kind, logp_b, batch, run.recipe.objective)
    parameters = dict(run.model.named_parameters())
    grads = torch.autograd.grad(wanted, list(parameters.values()))
    loss = run.forward_backward(batch, torch.ones(()))
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-5)
    for (key, parameter), grad in zip(parameters.items(), grads, strict=True):
        scale = float(grad.abs().max())
        torch.testing.assert_close(
            parameter.grad, grad, rtol=2e-4, atol=2e-5 * scale, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize(
    "techniques", [[], ["chunked_loss"], ["fused_loss"], ["vocab_pad"], ["checkpoint_full"]]
)
def test_row_sums_are_the_same_through_every_loss_head(techniques: list[str]) -> None:
    changes = [f"techniques={techniques}"] + (
        ["model.shape.vocab_size=63"] if techniques == ["vocab_pad"] else []
    )
    run, batch = make_run(*changes), make_pairs(2, seed=4)
    batch.tokens_bt.clamp_(max=62)
    batch.labels_bt.clamp_(max=62)
    wanted = log_probs_float64(run.model, batch)
    weights_b = torch.tensor([1.0, -2.0, 0.5, 3.0])
    grad = torch.autograd.grad((wanted * weights_b).sum(), run.model.embedding.weight)[0]
    found = log_probabilities(run.model, batch)
    (found * weights_b).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run.model.embedding.weight.grad, grad, rtol=1e-3, atol=1e-5)


def test_the_logits_of_only_one_row_exist_at_a_time() -> None:
    """Of what forward keeps for backward, nothing is as large as the logits of all rows (or of one)."""
    run, batch = make_run("model.shape.vocab_size=4096"), make_pairs(4, seed=2)
    kept: list[int] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = run.objective.loss(run.model, batch)
    weight = run.model.head.weight.numel()
    assert max(size for size in kept if size != weight) < 16 * 4096, "a row's logits were kept"
    loss.backward()  # type: ignore[no-untyped-call]


def started(reference: str, *overrides: str) -> tuple[Run, Batch]:
    """A run at its start, and a batch whose reference is the start itself."""
    run, batch = (
        make_run(f"objective.reference='{reference}'", *overrides),
        make_pairs(4, seed=9, reference=False),
    )
    if reference == "live":
        preference(run).reference_model = make_run(*overrides).model.requires_grad_(False)
        return run, batch
    with torch.no_grad(), run.in_step(), run.autocast():
        held = log_probabilities(run.model, batch)
    return run, Batch(batch.tokens_bt, batch.labels_bt, batch.samples, reference_b=held, paired=True)


@pytest.mark.parametrize("reference", ["cached", "live"])
@pytest.mark.parametrize("techniques", [[], ["amp_bf16"], ["pure_bf16"], ["chunked_loss", "amp_bf16"]])
def test_dpo_starts_at_exactly_log_two(reference: str, techniques: list[str]) -> None:
    run, batch = started(reference, f"techniques={techniques}")
    result = train_step(run, 1, 0.01, [batch])
    assert result.loss == float(torch.tensor(math.log(2), dtype=torch.float32))
    assert result.grad_norm > 0
    assert result.figures["accuracy"] == 0.5
    assert result.figures["reward_margin"] == 0.0
    after = train_step(run, 2, 0.01, [batch])
    assert after.loss < result.loss


@pytest.mark.slow
def test_compiled_dpo_starts_at_log_two_as_well() -> None:
    """Another graph makes the pass without gradients; that it rounds alike is seen, not promised."""
    test_dpo_starts_at_exactly_log_two("live", ["compile"])


def test_a_live_reference_stays_where_it_was_while_the_model_moves() -> None:
    run, batch = started("live")
    before = float(preference(run).pairs(run.model, batch)[0].reference_chosen_n.sum())  # type: ignore[union-attr]
    for step in range(3):
        train_step(run, step, 0.01, [batch])
    pairs, _ = preference(run).pairs(run.model, batch)
    assert pairs.reference_chosen_n is not None
    assert float(pairs.reference_chosen_n.sum()) == before
    assert float(pairs.chosen_n.detach().sum()) != before


@pytest.mark.parametrize("techniques", ["['lora']", "['lora', 'amp_bf16']"])
def test_with_adapters_the_live_reference_is_the_base_without_them(techniques: str) -> None:
    run = make_run("objective.reference='live'", f"techniques={techniques}")
    batch = make_pairs(4, seed=9, reference=False)
    with torch.no_grad(), run.autocast():
        start = log_probabilities(run.model, batch)
    losses = [train_step(run, step, 0.01, [batch]).loss for step in range(1, 5)]
    assert losses[0] == float(torch.tensor(math.log(2), dtype=torch.float32))
    assert losses[-1] < losses[0]
    with torch.no_grad(), run.autocast():
        pairs, _ = preference(run).pairs(run.model, batch)
        assert not torch.equal(log_probabilities(run.model, batch), start), "the adapters learned nothing"
    held = torch.cat((pairs.reference_chosen_n, pairs.reference_rejected_n))  # type: ignore[arg-type]
    assert torch.equal(held, start)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_equals_one_big_batch_of_pairs_with_unequal_answers(kind: str) -> None:
    whole = make_pairs(4, seed=5)
    seen: list[dict[str, Tensor]] = []
    losses = []
    for batches in ([whole], whole.split(4), whole.split(2)):
        run = make_run(*options(kind), "optimizer.clip=0")
        caught: dict[str, Tensor] = {}
        run.optimizer.register_step_pre_hook(
            lambda *_, run=run, caught=caught: caught.update(
                {k: p.grad.clone() for k, p in run.model.named_parameters() if p.grad is not None}
            )
        )
        losses.append(train_step(run, 1, 0.01, batches).loss)
        seen.append(caught)
    for loss, caught in zip(losses[1:], seen[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-5)
        for key, gradient in seen[0].items():
            torch.testing.assert_close(
                caught[key], gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max())
            )


def test_the_accumulate_technique_keeps_pairs_together() -> None:
    batch = make_pairs(4, seed=6)
    plain = train_step(make_run("batch.micro=4", "batch.total_tokens=64"), 1, 0.01, [batch])
    cut = train_step(
        make_run("batch.micro=4", "batch.total_tokens=64", "techniques=[{name='accumulate', factor=2}]"),
        1,
        0.01,
        [batch],
    )
    assert cut.loss == pytest.approx(plain.loss, rel=1e-6)
    assert cut.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert dict(cut.figures) == pytest.approx(dict(plain.figures), rel=1e-5)


def test_pairs_that_only_fill_up_a_batch_count_for_nothing() -> None:
    run = make_run()
    small = make_pairs(2, seed=7)
    blank = torch.zeros(1, 16, dtype=torch.int64)

    def padded(x: Tensor, filler: Tensor) -> Tensor:
        first, second = x.chunk(2)
        return torch.cat((first, filler, second, filler))

    assert small.reference_b is not None
    large = Batch(
        padded(small.tokens_bt, blank),
        padded(small.labels_bt, blank + IGNORED),
        [*small.samples[:2], "filler", *small.samples[2:], "filler"],
        reference_b=padded(small.reference_b, torch.zeros(1)),
        paired=True,
    )
    assert run.objective.units(large) == run.objective.units(small) == 2
    assert validate(run, [large]) == pytest.approx(validate(run, [small]), rel=1e-6)
    run.objective.figures()
    validate(run, [small])
    wanted = run.objective.figures()
    validate(run, [large])
    assert dict(run.objective.figures()) == pytest.approx(dict(wanted), rel=1e-5)


def test_figures_are_means_over_the_pairs_of_the_step_and_start_anew() -> None:
    run, batch = make_run("objective.beta=0.3"), make_pairs(4, seed=8)
    logp_b = log_probs_float64(run.model, batch).detach()
    assert batch.reference_b is not None
    rewards_b = 0.3 * (logp_b - batch.reference_b)
    chosen, rejected = rewards_b.chunk(2)
    figures = train_step(run, 1, 0.0, batch.split(2)).figures
    assert figures["reward_chosen"] == pytest.approx(float(chosen.mean()), rel=1e-4)
    assert figures["reward_rejected"] == pytest.approx(float(rejected.mean()), rel=1e-4)
    assert figures["reward_margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-4)
    assert figures["accuracy"] == pytest.approx(float((chosen > rejected).double().mean()))
    assert figures["logp_chosen"] == pytest.approx(float(logp_b[:4].mean()), rel=1e-5)
    assert run.objective.figures() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_training_raises_the_margin_of_each_loss(kind: str) -> None:
    run, batch = started("cached", *options(kind))
    figures = [dict(train_step(run, step, 0.003, [batch]).figures) for step in range(1, 16)]
    assert figures[-1]["reward_margin"] > figures[0]["reward_margin"]
    assert figures[-1]["accuracy"] == 1.0


def test_orpo_stays_finite_where_an_answer_is_all_but_certain() -> None:
    zero = torch.tensor([-1e-9, -60.0], requires_grad=True)
    settings = recipe_of(*options("orpo")).objective
    loss = LOSSES["orpo"](Pairs(zero[:1], zero[1:], torch.ones(1), torch.ones(1)), settings).loss_n
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert bool(torch.isfinite(loss).all())
    assert zero.grad is not None
    assert bool(torch.isfinite(zero.grad).all())


def spoiled(what: str) -> tuple[Run, Batch]:
    run, batch = make_run(), make_pairs(2, seed=12)
    if what == "equal":
        batch.tokens_bt[3], batch.labels_bt[3] = batch.tokens_bt[1], batch.labels_bt[1]
    if what == "one side":
        batch.labels_bt[2] = IGNORED
    if what == "no pairs":
        batch = Batch(batch.tokens_bt, batch.labels_bt, batch.samples, reference_b=batch.reference_b)
    if what == "odd":
        batch = Batch(batch.tokens_bt[:3], batch.labels_bt[:3], batch.samples[:3], paired=True)
    if what == "no reference":
        batch = Batch(batch.tokens_bt, batch.labels_bt, batch.samples, paired=True)
    return run, batch


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("equal", "chosen and rejected are equal in the pair pair 1 chosen"),
        ("one side", "one answer of the pair pair 0 chosen has no trained token"),
        ("no pairs", "does not hold pairs"),
        ("odd", "3 rows .* does not hold pairs"),
        ("no reference", "carries no log-probabilities of a reference"),
    ],
)
def test_what_is_no_preference_is_refused_before_the_update(what: str, message: str) -> None:
    run, batch = spoiled(what)
    with pytest.raises(DataError, match=message):
        train_step(run, 1, 0.01, [batch])
    assert not run.optimizer.state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["objective.loss='orpo'", "objective.reference='live'"], "orpo compares with no reference"),
        (["objective.loss='simpo'", "objective.reference='live'"], "simpo compares with no reference"),
        (["objective.loss='ipo'", "objective.label_smoothing=0.1"], "has no such term"),
        (["objective.margin=0.5"], "objective.margin is 0.5"),
        (["objective.beta=0.0"], "objective.beta"),
        (["objective.beta=-1.0"], "objective.beta"),
        (["objective.label_smoothing=0.5"], "objective.label_smoothing"),
        (["objective.loss='kto'"], "objective.loss"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_run(*changes)
