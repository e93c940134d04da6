"""A training state saved and loaded is the same state, to the last bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from rush.checkpoint import restore
from rush.checkpoint.tensor_names import TensorFile, save_tensors
from rush.errors import DataError
from rush.hardware.memory_use import process_memory, reset_peak_memory
from rush.records.checkpoint_store import CheckpointStore, verify


class Small(nn.Module):
    """What is easy to get wrong: a tied head, odd dtypes, a scalar, an empty and a transposed tensor."""

    def __init__(self, *, tied: bool = True, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.turned = nn.Parameter(torch.randn(4, width).t())
        self.frozen = nn.Parameter(torch.randn(3).bfloat16(), requires_grad=False)
        self.register_buffer("counts", torch.randint(0, 9, (5,)))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens)) * self.scale
        return self.head(hidden + (hidden @ self.turned).mean())


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw plain": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.02, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True, betas=(0.8, 0.9)),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "rprop": torch.optim.Rprop,
    "nadam": torch.optim.NAdam,
}


def build(kind: str = "adamw plain", **options: Any) -> tuple[Small, Optimizer]:
    model = Small(**options)
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, OPTIMIZERS[kind](groups)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Steps on random batches, so that they depend on the state of torch's generator."""
    for _ in range(steps):
        tokens = torch.randint(0, 11, (4, 5))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def assert_same_state(ours: tuple[nn.Module, Optimizer], theirs: tuple[nn.Module, Optimizer]) -> None:
    a, b = ours[0].state_dict(), theirs[0].state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert same_bits(a[name], b[name]), name
    x, y = ours[1].state_dict(), theirs[1].state_dict()
    assert [{k: v for k, v in g.items() if not isinstance(v, Tensor)} for g in x["param_groups"]] == [
        {k: v for k, v in g.items() if not isinstance(v, Tensor)} for g in y["param_groups"]
    ]
    assert x["state"].keys() == y["state"].keys()
    for index in x["state"]:
        assert list(x["state"][index]) == list(y["state"][index])
        for key, value in x["state"][index].items():
            other = y["state"][index][key]
            assert same_bits(value, other) if isinstance(value, Tensor) else value == other, (index, key)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(
    store: CheckpointStore, kind: str, tied: bool
) -> None:
    torch.manual_seed(1)
    run = build(kind, tied=tied)
    train(*run, steps=3)
    path = restore.save(store, 3, *run, {"loader": {"position": 12}})
    train(*run, steps=3)

    torch.manual_seed(2)
    resumed = build(kind, tied=tied)
    train(*resumed, steps=1)  # whatever was there before must be gone, optimizer state included
    assert restore.load(path, *resumed) == {"loader": {"position": 12}}
    train(*resumed, steps=3)
    assert_same_state(run, resumed)
    assert (resumed[0].head.weight is resumed[0].embedding.weight) == tied


def test_loading_into_a_fresh_optimizer_gives_the_saved_hyperparameters_and_state(
    store: CheckpointStore,
) -> None:
    run = build("adamw amsgrad")
    train(*run, steps=2)
    run[1].param_groups[0]["lr"] = 0.123
    path = restore.save(store, 2, *run, {})
    fresh = build("adamw amsgrad")
    restore.load(path, *fresh)
    assert_same_state(run, fresh)
    assert fresh[1].param_groups[0]["lr"] == 0.123
    assert fresh[1].param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(("saved", "run"), [("plain", "amsgrad"), ("amsgrad", "plain")])
def test_a_flag_that_decides_which_state_there_is_must_be_the_run_s(
    store: CheckpointStore, saved: str, run: str
) -> None:
    """Taken over, it would have the next update look for state that is not there, or drop state that is."""
    path = restore.save(store, 1, *build(f"adamw {saved}"), {})
    fresh = build(f"adamw {run}")
    with pytest.raises(DataError, match=rf"amsgrad of the optimizer is {saved == 'amsgrad'}, this run has {run == 'amsgrad'}"):  # fmt: skip
        restore.load(path, *fresh)
    assert not fresh[1].state


def test_how_the_update_is_computed_stays_what_the_build_chose(store: CheckpointStore) -> None:
    run = build("adamw plain")
    train(*run, steps=2)
    path = restore.save(store, 2, *run, {})
    fused = build("adamw fused")
    restore.load(path, *fused)
    assert all(group["fused"] for group in fused[1].param_groups)
    train(*fused, steps=1)


def test_a_tied_tensor_is_in_the_file_once_and_comes_back_under_both_names(store: CheckpointStore) -> None:
    model, optimizer = build(tied=True)
    path = restore.save(store, 1, model, optimizer, {})
    file = load_file(path / restore.MODEL)
    assert ("head.weight" in file) != ("embedding.weight" in file)
    weights = restore.load_weights(path)
    assert weights["head.weight"] is weights["embedding.weight"]
    assert weights.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert same_bits(weights[name], tensor)


def test_a_tied_checkpoint_is_refused_by_an_untied_model_and_the_other_way_round(
    store: CheckpointStore,
) -> None:
    for step, tied in ((1, True), (2, False)):
        path = restore.save(store, step, *build(tied=tied), {})
        with pytest.raises(DataError, match="ties"):
            restore.load(path, *build(tied=not tied))


def test_the_files_are_plain_safetensors_for_the_reference_reader(store: CheckpointStore) -> None:
    model, optimizer = build(tied=False)
    train(model, optimizer, 2)
    path = restore.save(store, 2, model, optimizer, {})
    file = load_file(path / restore.MODEL)
    assert file.keys() == model.state_dict().keys()
    assert all(same_bits(file[name], tensor) for name, tensor in model.state_dict().items())
    moments = load_file(path / restore.OPTIMIZER)
    assert same_bits(moments["head.weight/exp_avg"], optimizer.state[model.head.weight]["exp_avg"])
    assert same_bits(moments["scale/step"], torch.tensor(2.0))
    assert not any(name.startswith("frozen") for name in moments)
    assert sorted(p.suffix for p in path.iterdir()) == [".json", ".json"] + [".safetensors"] * 3


def test_names_are_clean_when_the_model_was_compiled_whole_or_in_part(store: CheckpointStore) -> None:
    plain, optimizer = build()
    names = restore.load_weights(restore.save(store, 1, plain, optimizer, {})).keys()
    whole = torch.compile(plain)
    assert any("_orig_mod" in name for name in whole.state_dict())
    path = restore.save(store, 2, whole, optimizer, {})
    assert restore.load_weights(path).keys() == names
    part, part_optimizer = build()
    part.norm = torch.compile(part.norm)  # type: ignore[assignment]
    restore.load(path, part, part_optimizer)
    assert same_bits(part.norm.weight, plain.norm.weight)
    path = restore.save(store, 3, part, part_optimizer, {})
    restore.load(path, torch.compile(plain), optimizer)


def test_all_random_generators_go_on_where_they_were(store: CheckpointStore) -> None:
    def draw() -> list[Any]:
        return [torch.rand(3).tolist(), torch.randn(1).item(), np.random.rand(3).tolist(), np.random.randn(),
                random.random(), random.gauss(0, 1), random.sample(range(100), 5)]  # fmt: skip

    draw()
    np.random.randn()
    random.gauss(0, 1)  # both keep a second normal number in store, which must be saved too
    run = build()
    path = restore.save(store, 1, *run, {})
    expected = [draw() for _ in range(3)]
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    draw()
    restore.load(path, *run)
    assert [draw() for _ in range(3)] == expected


def test_loading_weights_alone_leaves_the_generators_alone(store: CheckpointStore) -> None:
    model, optimizer = build()
    path = restore.save(store, 1, model, optimizer, {})
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    restore.load(path, model)
    restore.load_weights(path)
    assert torch.equal(torch.rand(2), expected)


def forge(
    store: CheckpointStore, change: Callable[[dict[str, Tensor]], None], name: str = restore.MODEL
) -> Path:
    """A correctly sealed checkpoint with one file changed, as a bug or a stranger could make it."""
    run = build(tied=False)
    train(*run, steps=1)
    source = restore.save(store, 1, *run, {})
    folder = store.begin(2)
    for path in source.iterdir():
        if path.name not in ("manifest.json", name):
            (folder / path.name).write_bytes(path.read_bytes())
    with safe_open(source / name, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    change(tensors)
    save_tensors(folder / name, tensors, metadata)
    return store.commit(2, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "lacks norm.weight"),
        (lambda t: t.update(more=torch.zeros(1)), "unknown more"),
        (lambda t: t.update({"norm.gain": t.pop("norm.weight")}), "lacks norm.weight and has .* norm.gain"),
        (lambda t: t.update({"norm.weight": torch.zeros(7)}), r"float32\[7\], the model has float32\[6\]"),
        (lambda t: t.update({"norm.weight": torch.zeros(6, 1)}), r"norm.weight is float32\[6, 1\]"),
        (lambda t: t.update({"norm.weight": torch.zeros(6).half()}), r"norm.weight is float16\[6\]"),
        (lambda t: t.update(counts=torch.zeros(5)), r"counts is float32\[5\], the model has int64\[5\]"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused_by_name_and_nothing_is_changed(
    store: CheckpointStore, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    path = forge(store, change)
    run = build(tied=False)
    train(*run, steps=2)
    before = copy.deepcopy(run[0].state_dict()), copy.deepcopy(run[1].state_dict())
    with pytest.raises(DataError, match=message):
        restore.load(path, *run)
    assert_same_state(run, _restore(before))


def _restore(before: tuple[dict[str, Any], dict[str, Any]]) -> tuple[nn.Module, Optimizer]:
    other = build(tied=False)
    other[0].load_state_dict(before[0])
    other[1].load_state_dict(before[1])
    return other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight/exp_avg"), "lacks norm.weight/exp_avg"),
        (lambda t: t.update({"other/exp_avg": torch.zeros(1)}), "unknown other/exp_avg"),
        (lambda t: t.update({"norm.weight/exp_avg": torch.zeros(7)}), "norm.weight/exp_avg is float32"),
        (lambda t: t.update({"norm.weight/exp_avg_sq": torch.zeros(6).long()}), "exp_avg_sq is int64"),
        (lambda t: t.update({"norm.weight/step": torch.zeros(2)}), "norm.weight/step is float32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("steps", [0, 1])
def test_optimizer_state_that_does_not_fit_is_refused_by_name(
    store: CheckpointStore, change: Callable[[dict[str, Tensor]], None], message: str, steps: int
) -> None:
    path = forge(store, change, restore.OPTIMIZER)
    run = build(tied=False)
    train(*run, steps=steps)
    before = copy.deepcopy(run[0].state_dict()), copy.deepcopy(run[1].state_dict())
    with pytest.raises(DataError, match=message):
        restore.load(path, *run)
    assert_same_state(run, _restore(before))


def test_another_optimizer_or_another_grouping_is_refused(store: CheckpointStore) -> None:
    model, optimizer = build()
    path = restore.save(store, 1, model, optimizer, {})
    with pytest.raises(DataError, match="saved by AdamW, this run uses SGD"):
        restore.load(path, *build("sgd momentum"))
    flat = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(DataError, match="groups the parameters differently"):
        restore.load(path, model, flat)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".pkl", ".ckpt"])
def test_a_pickle_is_refused_in_one_sentence_and_not_opened(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    torch.save({"a": torch.zeros(1)}, path)
    path.chmod(0)
    for read in (lambda: restore.load(path, *build()), lambda: restore.load_weights(path)):
        with pytest.raises(DataError, match="pickle") as caught:
            read()
        assert str(path) in str(caught.value)


def test_a_damaged_checkpoint_is_refused_before_anything_is_read_from_it(store: CheckpointStore) -> None:
    run = build()
    path = restore.save(store, 1, *run, {})
    content = bytearray((path / restore.MODEL).read_bytes())
    content[-1] ^= 128
    (path / restore.MODEL).write_bytes(content)
    before = copy.deepcopy(run[0].state_dict())
    with pytest.raises(DataError, match=r"model\.safetensors has other content"):
        restore.load(path, *run)
    assert all(same_bits(before[name], tensor) for name, tensor in run[0].state_dict().items())


def test_changing_loaded_tensors_does_not_change_the_checkpoint(store: CheckpointStore) -> None:
    run = build()
    train(*run, steps=1)
    path = restore.save(store, 1, *run, {})
    for tensor in restore.load_weights(path).values():
        tensor.zero_()
    restore.load(path, *run)
    train(*run, steps=2)
    verify(path)


def test_a_save_that_fails_leaves_nothing_and_the_older_one_whole(store: CheckpointStore) -> None:
    run = build()
    restore.save(store, 1, *run, {})
    with pytest.raises(TypeError):
        restore.save(store, 2, *run, {"not json": object()})
    with pytest.raises(ValueError, match="not JSON compliant"):
        restore.save(store, 2, *run, {"best": float("inf")})
    assert [path.name for path in store.folder.iterdir()] == ["step-000001"]
    verify(store.path(1))


def test_metrics_are_in_the_manifest_and_rank_the_checkpoints(store: CheckpointStore) -> None:
    run = build()
    for step, loss in ((1, 2.0), (2, 1.0), (3, float("nan"))):
        restore.save(store, step, *run, {}, {"val_loss": loss})
    best = store.best_good(lambda path, problem: pytest.fail(problem))
    assert best is not None
    assert best.step == 2
    assert best.meta == {"metrics": {"val_loss": 1.0}}


def test_saving_and_loading_hold_no_second_copy_of_the_tensors(store: CheckpointStore) -> None:
    size = 64 * 2**20
    model = nn.ParameterList([nn.Parameter(torch.rand(size // 4)) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reset_peak_memory("cpu")
    before = process_memory().resident_bytes
    path = restore.save(store, 2, model, optimizer, {})
    assert process_memory().peak_resident_bytes - before < size / 2
    found = verify(path)
    reset_peak_memory("cpu")
    before = process_memory().resident_bytes
    restore.load(found, model, optimizer)
    # One tensor's pages of the mapped file may count as resident while it is copied.
    assert process_memory().peak_resident_bytes - before < 3.5 * size


DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_passes_through_a_file_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    noise = torch.randint(0, 2 if dtype == torch.bool else 256, (7, 24), dtype=torch.uint8)
    tensors = {
        "b": noise.view(dtype)[:, ::3],
        "a.x": torch.zeros(3, 0, dtype=dtype),
        "é": noise.view(dtype)[0, 0],
    }
    save_tensors(tmp_path / "x.safetensors", tensors, {"k": "v"})
    with TensorFile(tmp_path / "x.safetensors") as file:
        for name, tensor in tensors.items():
            assert file.header(name) == (tensor.shape, dtype)
            assert same_bits(file.tensor(name), tensor)


@pytest.mark.gpu
def test_on_cuda_the_resumed_run_has_the_bits_of_the_undisturbed_one(store: CheckpointStore) -> None:
    def cuda_build() -> tuple[Small, Optimizer]:
        model = Small().cuda()
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)

    def cuda_train(model: Small, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            tokens = torch.randint(0, 11, (4, 5), device="cuda")
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run = cuda_build()
    cuda_train(*run, steps=3)
    path = restore.save(store, 3, *run, {})
    cuda_train(*run, steps=3)
    resumed = cuda_build()
    restore.load(path, *resumed)
    assert all(s["step"].is_cuda and s["exp_avg"].is_cuda for s in resumed[1].state.values())
    cuda_train(*resumed, steps=3)
    for (name, a), b in zip(run[0].state_dict().items(), resumed[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
