"""One optimizer step, against plain arithmetic on the same model."""

from __future__ import annotations

import math

import pytest
import torch

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.errors import DataError, Diverged, MachineError
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.training.build import Run, build
from rush.training.optimizer import parameter_groups
from rush.training.step import gradient_norm, launch_step, train_step, update_is_async, validate
from tests.new_process import in_new_process

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")  # bf16 on older CPUs
SMALL = ["model.shape.num_layers=2", "model.shape.hidden=32", "model.shape.vocab_size=64", "model.shape.head_dim=8",
         "model.shape.intermediate=64", "batch.sequence=16", "batch.total_tokens=16", "batch.micro=1",
         "schedule.steps=50", "optimizer.lr=0.01"]  # fmt: skip


ONE_LAYER = "model.shape.num_layers=1"  # an interpreted kernel takes its time over every tensor


def make_run(*overrides: str, name: str = "tiny") -> Run:
    return build(load_recipe(name, [*SMALL, *overrides]), probe("cpu"))


def make_batch(rows: int, seed: int, labelled: list[int] | None = None) -> Batch:
    """Rows of tokens; `labelled` says how many labels each row keeps."""
    tokens = torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(seed))
    labels = tokens[:, 1:].clone()
    for row, kept in enumerate(labelled or []):
        labels[row, kept:] = IGNORED
    return Batch(tokens[:, :-1].contiguous(), labels, tuple(f"row {row}" for row in range(rows)))


def gradients(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}


def captured_step(run: Run, batches: list[Batch]) -> tuple[dict[str, torch.Tensor], float, float]:
    """The (clipped) gradients the update saw, with loss and norm."""
    seen: dict[str, torch.Tensor] = {}
    run.optimizer.register_step_pre_hook(lambda *_: seen.update(gradients(run)))
    result = train_step(run, 1, 0.01, batches)
    return seen, result.loss, result.grad_norm


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_accumulation_equals_one_big_batch_with_unequal_label_counts(name: str) -> None:
    whole = make_batch(4, seed=1, labelled=[16, 3, 9, 1])
    parts = [Batch(whole.tokens_bt[i : i + 1], whole.labels_bt[i : i + 1], ("",)) for i in range(4)]
    big, big_loss, big_norm = captured_step(make_run("optimizer.clip=0", name=name), [whole])
    cut, cut_loss, cut_norm = captured_step(make_run("optimizer.clip=0", name=name), parts)
    assert cut_loss == pytest.approx(big_loss, rel=1e-6)
    assert cut_norm == pytest.approx(big_norm, rel=1e-5)
    for key, gradient in big.items():
        torch.testing.assert_close(cut[key], gradient, rtol=1e-4, atol=1e-7)


def test_the_loss_is_the_mean_over_labels_and_not_over_micro_batches() -> None:
    run = make_run()
    batches = [make_batch(1, 1, [16]), make_batch(1, 2, [2])]
    sums = []
    for batch in batches:
        with torch.no_grad():
            logits = run.model(batch.tokens_bt).double().log_softmax(-1)
        labels = batch.labels_bt
        sums.append(sum(-float(logits[0, t, labels[0, t]]) for t in range(16) if labels[0, t] != IGNORED))
    assert train_step(run, 1, 0.01, batches).loss == pytest.approx(sum(sums) / 18, rel=1e-6)


def test_clipping_scales_the_gradient_to_the_limit_and_reports_the_norm_before_it() -> None:
    free, _, norm = captured_step(make_run("optimizer.clip=0"), [make_batch(2, 3)])
    independent = math.sqrt(sum(float(g.double().square().sum()) for g in free.values()))
    assert norm == pytest.approx(independent, rel=1e-5)
    limit = norm / 4
    clipped, _, reported = captured_step(make_run(f"optimizer.clip={limit}"), [make_batch(2, 3)])
    assert reported == pytest.approx(norm, rel=1e-6)
    assert math.sqrt(sum(float(g.double().square().sum()) for g in clipped.values())) == pytest.approx(
        limit, rel=1e-4
    )


def test_the_update_is_adamw_as_the_paper_writes_it() -> None:
    run = make_run("optimizer.weight_decay=0.3", "optimizer.beta2=0.9", "optimizer.clip=0")
    before = {name: p.detach().double().clone() for name, p in run.model.named_parameters()}
    seen, _, _ = captured_step(run, [make_batch(2, 5)])
    for name, parameter in run.model.named_parameters():
        g = seen[name].double()
        decay = 0.3 if parameter.dim() >= 2 else 0.0
        # First step: the bias-corrected moments are g and g².
        expected = before[name] * (1 - 0.01 * decay) - 0.01 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_only_tensors_of_two_or_more_dims_decay_and_each_parameter_is_in_one_group(name: str) -> None:
    run = make_run(name=name)
    decayed, kept = parameter_groups(run.model, 0.1)
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() < 2 for p in kept["params"])
    ids = [id(p) for group in (decayed, kept) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in run.model.parameters())
    assert kept["weight_decay"] == 0.0
    assert decayed["weight_decay"] == 0.1


def test_a_non_finite_loss_stops_before_the_update_and_names_step_and_samples() -> None:
    run = make_run()
    with torch.no_grad():
        run.model.embedding.weight[5, 0] = math.inf
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    batch = make_batch(3, 7)
    batch.tokens_bt[0, 0] = 5
    with pytest.raises(Diverged, match=r"step 9: the loss is nan.*row 0, row 1, row 2"):
        train_step(run, 9, 0.01, [batch])
    assert all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
    assert not run.optimizer.state
    assert float(gradient_norm(run)) == 0


def test_a_step_without_labels_is_refused() -> None:
    with pytest.raises(DataError, match="step 1 has no label"):
        train_step(make_run(), 1, 0.01, [make_batch(2, 1, [0, 0])])


def test_validation_is_the_mean_over_labels_and_leaves_no_gradient() -> None:
    run = make_run()
    batches = [make_batch(2, 1, [16, 4]), make_batch(1, 2, [3])]
    with torch.no_grad():
        total = sum(float(run.model(b.tokens_bt, b.labels_bt)) for b in batches)
    assert validate(run, batches) == pytest.approx(total / 23, rel=1e-6)
    assert all(p.grad is None for p in run.model.parameters())


def test_the_model_overfits_one_batch() -> None:
    run, batch = make_run(), make_batch(2, 11)
    losses = [train_step(run, step, 0.01, [batch]).loss for step in range(1, 51)]
    assert losses[0] == pytest.approx(math.log(64), rel=0.05)
    assert losses[-1] < 0.5


def test_the_norm_of_bf16_gradients_has_more_digits_than_bf16() -> None:
    """In bf16 the norm would be one of 128 values between two powers of two, and clipping off by up to 0.4 %."""
    run = make_run()
    run.model.bfloat16()
    exact = 0.0
    generator = torch.Generator().manual_seed(5)
    for parameter in run.model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
        exact += float(parameter.grad.double().square().sum())
    norm = gradient_norm(run)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(exact**0.5, rel=1e-5)


def test_a_memory_limit_on_a_cpu_ends_the_step_that_took_more() -> None:
    run, batch = make_run("run.memory_limit_gb=0.4"), make_batch(2, 11)
    train_step(run, 1, 0.01, [batch])
    held = torch.zeros(0)

    def take(last: bool) -> None:
        nonlocal held
        held = torch.ones(450_000_000, dtype=torch.uint8)

    run.before_pass.append(take)
    with pytest.raises(MemoryError, match="allowed"):
        train_step(run, 2, 0.01, [batch])
    assert held.numel()
    train_step(make_run(), 1, 0.01, [batch])  # the limit is that run's, not the process's


def test_a_memory_limit_is_not_ignored_where_it_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(MachineError, match=r"run\.memory_limit_gb is 2, but this run is on the CPU"):
        make_run("run.memory_limit_gb=2")


@pytest.mark.gpu
def test_a_memory_limit_holds_on_a_larger_card() -> None:
    in_new_process(check_memory_limit)


def check_memory_limit() -> None:
    recipe = load_recipe("tiny", [*SMALL, "run.memory_limit_gb=1", "run.device='cuda'"])
    build(recipe, probe("cuda"))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")
    build(load_recipe("tiny", [*SMALL, "run.device='cuda'"]), probe("cuda"))
    torch.empty(2 * 10**9, dtype=torch.uint8, device="cuda")  # without a limit the whole card is there again
    with pytest.raises(MachineError, match="more than the"):
        build(load_recipe("tiny", [*SMALL, "run.memory_limit_gb=100000", "run.device='cuda'"]), probe("cuda"))


EARLY = [
    "techniques=['fused_adamw']",
    "techniques=['fused_update']",
    "techniques=['pure_bf16', {name='fused_update', stochastic_rounding=true, state='bfloat16'}]",
    "techniques=['bf16_master', 'fused_adamw']",
]
"""Updates that are launched before the loss is known."""


def everything(run: Run) -> list[torch.Tensor]:
    """Weights and moments, copied. (Updates that were held back may count as steps.)"""
    state = [
        value
        for p in run.model.parameters()
        for name, value in run.optimizer.state[p].items()
        if name != "step"
    ]
    return [tensor.detach().clone() for tensor in (*run.model.parameters(), *state)]


@pytest.mark.parametrize("techniques", EARLY)
def test_an_update_launched_early_holds_back_and_so_do_all_after_it(techniques: str) -> None:
    run = make_run(techniques, ONE_LAYER)
    assert update_is_async(run)
    train_step(run, 1, 0.01, [make_batch(2, 1)])
    before, sound_pass = everything(run), run.micro_pass

    def spoiled_pass(batch: Batch, loss_scale: torch.Tensor) -> torch.Tensor:
        loss = sound_pass(batch, loss_scale)
        gradient = run.model.final_norm.get_parameter("weight").grad
        assert gradient is not None
        gradient[0] = math.nan
        return loss

    run.micro_pass = spoiled_pass
    bad = launch_step(run, 2, 0.01, [make_batch(3, 7)])
    run.micro_pass = sound_pass
    after_it = launch_step(run, 3, 0.01, [make_batch(2, 3)])
    with pytest.raises(Diverged, match=r"step 2: the gradient norm is nan.*row 0, row 1, row 2"):
        bad.result()
    assert math.isfinite(after_it.result().grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(everything(run), before, strict=True))


@pytest.mark.parametrize("techniques", EARLY[:2])
@pytest.mark.parametrize("part", [0.0, 0.25, 4.0])
def test_clipping_in_the_update_is_clipping_before_it(techniques: str, part: float) -> None:
    batch = make_batch(2, 3)
    norm = train_step(make_run(ONE_LAYER), 1, 0.01, [batch]).grad_norm
    clip = f"optimizer.clip={part * norm}"
    plain, early = make_run(ONE_LAYER, clip), make_run(ONE_LAYER, techniques, clip)
    for step in (1, 2):
        expected = train_step(plain, step, 0.01, [batch])
        assert train_step(early, step, 0.01, [batch]).grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    for ours, theirs in zip(early.model.parameters(), plain.model.parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                early.optimizer.state[ours][name], plain.optimizer.state[theirs][name], rtol=1e-3, atol=1e-9
            )


@pytest.mark.parametrize("techniques", [*EARLY, "techniques=['amp_bf16']"])
def test_looking_at_the_numbers_later_changes_nothing(techniques: str) -> None:
    batches = [make_batch(1, seed) for seed in range(3)]
    waiting, going_on = make_run(ONE_LAYER, techniques), make_run(ONE_LAYER, techniques)
    expected = [train_step(waiting, step, 0.01, [batch]) for step, batch in enumerate(batches, 1)]
    launched = [launch_step(going_on, step, 0.01, [batch]) for step, batch in enumerate(batches, 1)]
    assert [step.result() for step in launched] == expected
    assert all(torch.equal(a, b) for a, b in zip(everything(going_on), everything(waiting), strict=True))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("techniques", EARLY)
def test_on_a_device_the_host_waits_for_nothing(techniques: str) -> None:
    recipe = load_recipe("tiny", [*SMALL, "run.device='cuda'", techniques])
    run = build(recipe, probe("cuda"))
    batches = [make_batch(2, seed).pin() for seed in range(3)]
    train_step(run, 1, 0.01, [batches[0]])  # compiles kernels and makes the state
    try:
        torch.cuda.set_sync_debug_mode("error")
        launched = launch_step(run, 2, 0.01, [batches[1]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(launched.result().loss)
