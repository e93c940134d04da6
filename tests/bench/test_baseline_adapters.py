"""Fine-tuning baselines, built from the real libraries at a tiny shape: they train what they should and lose what we lose."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rush.bench.baseline_adapters import (
    TARGETS,
    fill,
    put_4bit_layers,
    quantized_model,
    weights_in_words,
    with_adapters,
)
from rush.bench.baseline_preferences import real_tokens
from rush.bench.baseline_run import BaselineOptions, baseline_model, baseline_pass, build_baseline
from rush.data import Batch
from rush.data.batch import IGNORED
from rush.data.conversations import DocumentSet
from rush.data.row_tensors import PADDING_TOKEN
from rush.hardware import probe
from rush.hub.weight_names import exported_name
from rush.models import Shape
from rush.recipe_io import load_recipe
from rush.training.build import Run, build
from rush.training.corpus import open_corpus
from rush.training.step import train_step

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
    # Looked for, not imported: that takes seconds, and every worker collects every file.
    pytest.mark.skipif(
        not (find_spec("transformers") and find_spec("peft")), reason="needs transformers and peft"
    ),
]
SHAPE = ["model.shape.num_layers=2", "model.shape.hidden=64", "model.shape.num_heads=4", "model.shape.num_kv_heads=2",
         "model.shape.head_dim=16", "model.shape.intermediate=128", "model.shape.vocab_size=101", "model.shape.context=64",
         "batch.micro=2", "batch.sequence=24", "batch.total_tokens=48"]  # fmt: skip
LORA = BaselineOptions(rank=4, alpha=8)
QLORA = BaselineOptions(rank=4, alpha=8, quantized=True, checkpointing=True)
CPU = torch.device("cpu")


def recipe(*techniques: str, model: str = "llama-tiny") -> Any:
    return load_recipe("llama-tiny", [f"model.name={model}", *SHAPE, f"techniques=[{', '.join(techniques)}]"])


def padded() -> Batch:
    """Two rows, the second filled up, with labels on a part of each."""
    tokens_bt = torch.randint(1, 101, (2, 21), generator=torch.Generator().manual_seed(5))
    labels_bt = tokens_bt[:, 1:].clone()
    tokens_bt = tokens_bt[:, :-1].clone()
    labels_bt[0, :4] = IGNORED
    labels_bt[1, :2], labels_bt[1, 13:] = IGNORED, IGNORED
    tokens_bt[1, 13:] = PADDING_TOKEN
    return Batch(tokens_bt, labels_bt, ("a", "b"), padding=7)


def their_name(shape: Shape, name: str) -> str:
    """Our parameter's name in PEFT's model."""
    for part, end in ((".adapter.a", "lora_A.default"), (".adapter.b", "lora_B.default")):
        if name.endswith(part):
            layer = exported_name(shape, f"{name.removesuffix(part)}.weight").removesuffix(".weight")
            return f"base_model.model.{layer}.{end}.weight"
    found = exported_name(shape, name).removesuffix(".weight")
    inner = ".base_layer" if found.rpartition(".")[2] in TARGETS else ""
    return f"base_model.model.{found}{inner}.weight"


def copy_weights(ours: Run, theirs: Any, *, quantized: bool) -> dict[str, str]:
    """Give the baseline our weights, adapters included; the codes' values where they are quantized."""
    shape = ours.model.shape
    there = dict(theirs.named_parameters())
    names = {name: their_name(shape, name) for name, _ in ours.model.named_parameters()}
    with torch.no_grad():
        for name, parameter in ours.model.named_parameters():
            there[names[name]].copy_(parameter)
        if quantized:
            for entries in ours.model.linears().values():
                for name, layer in entries:
                    if hasattr(layer, "dense_weight"):
                        target = theirs.get_submodule(
                            their_name(shape, f"{name}.weight").removesuffix(".weight")
                        )
                        kind: Any = type(target.weight)
                        target.weight = kind(
                            layer.dense_weight(torch.float32), requires_grad=False, quant_type="nf4", compress_statistics=False
                        ).to("cpu")  # fmt: skip
    return names


@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_from_the_same_weights_both_sides_compute_the_same_loss_and_gradients(
    method: str, model: str
) -> None:
    """The one check that can be made of the baseline's loss: a padded batch, fp32, weights copied over, B not zero."""
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    ours = build(recipe(f"{{name='{method}', rank=4, alpha=8}}", model=model), probe("cpu"))
    with torch.no_grad():
        for name, parameter in ours.model.named_parameters():
            if name.endswith("adapter.b"):
                parameter.normal_(0, 0.05, generator=torch.Generator().manual_seed(3))
    run = build_baseline(ours.recipe, ours.machine, QLORA if method == "qlora" else LORA)
    names = copy_weights(ours, run.model, quantized=method == "qlora")
    batch, share = padded(), torch.tensor(1 / 27)
    expected = ours.forward_backward(batch, share)
    found = baseline_pass(run.model, padded=True)(batch, share)
    # Values that were NF4 once are quantized to themselves; only scales, not quantized again, are off by rounding.
    assert float(found) == pytest.approx(float(expected), rel=2e-3 if method == "qlora" else 1e-5)
    there = dict(run.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        if parameter.grad is not None:
            other = there[names[name]].grad
            assert other is not None, name
            error = float((parameter.grad - other).norm() / parameter.grad.norm())
            assert error < (2e-2 if method == "qlora" else 1e-4), (name, error)
    trained = {names[name] for name, p in ours.model.named_parameters() if p.requires_grad}
    assert {name for name, p in there.items() if p.requires_grad} == trained


@pytest.mark.parametrize("options", [LORA, QLORA], ids=["lora", "qlora"])
def test_the_baseline_s_steps_train_its_adapters_and_leave_its_base_alone(options: BaselineOptions) -> None:
    if options.quantized:
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)  # PEFT draws from the global generator
    run = build_baseline(recipe(), probe("cpu"), options)
    frozen = {name: p.detach().clone() for name, p in run.model.named_parameters() if not p.requires_grad}
    trained = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name for name in trained)
    losses = [train_step(run, step, 5e-3, [padded()]).loss for step in range(1, 13)]
    assert losses[-1] < losses[0] - 0.3, losses
    after = dict(run.model.named_parameters())
    for name, before in frozen.items():
        assert torch.equal(after[name], before), name
    assert all(not torch.equal(after[name], before) for name, before in trained.items() if "lora_B" in name)


def test_a_quantized_baseline_is_what_the_library_s_own_loader_makes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    import transformers

    shape = recipe().shape()
    plain = baseline_model(shape, CPU, torch.bfloat16)
    plain.save_pretrained(tmp_path)
    wanted = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=wanted, dtype=torch.bfloat16
    )
    ours = quantized_model(
        lambda: baseline_model(shape, torch.device("meta"), torch.bfloat16), CPU, torch.bfloat16
    )

    def described(model: Any) -> list[Any]:
        return [
            *((name, type(module).__name__) for name, module in model.named_modules()),
            *((name, type(p).__name__, p.dtype, tuple(p.shape)) for name, p in model.named_parameters()),
            *((name, b.dtype, tuple(b.shape)) for name, b in model.named_buffers()),
        ]

    assert described(ours) == described(loaded)
    for name, module in loaded.named_modules():
        if type(module).__name__ == "Linear4bit":
            here, there = ours.get_submodule(name), module
            assert here.compute_dtype == there.compute_dtype == torch.bfloat16
            for key in ("blocksize", "quant_type", "nested", "dtype", "shape"):
                assert getattr(here.weight.quant_state, key) == getattr(there.weight.quant_state, key), key
    # With the loaded model's weights it holds the same codes, to the bit.
    state = dict(plain.named_parameters())
    fresh = baseline_model(shape, torch.device("meta"), torch.bfloat16)
    put_4bit_layers(fresh, torch.bfloat16)
    values = iter([state[name] for name, _ in fresh.named_parameters()])
    fill(fresh, lambda like: next(values).detach().clone())
    for (name, mine), (_, theirs) in zip(fresh.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_quantized_baseline_never_holds_more_than_one_layer_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("bitsandbytes")
    shape = recipe().shape()
    asked: list[tuple[int, ...]] = []
    whole = torch.empty

    def watched(*args: Any, **rest: Any) -> Tensor:
        found: Tensor = whole(*args, **rest)
        if found.device.type == "cpu" and found.dtype in (torch.float32, torch.bfloat16) and found.dim() == 2:
            asked.append(tuple(found.shape))
        return found

    monkeypatch.setattr(torch, "empty", watched)
    model = quantized_model(
        lambda: baseline_model(shape, torch.device("meta"), torch.bfloat16), CPU, torch.bfloat16
    )
    assert max(dims[0] * dims[1] for dims in asked) == 128 * 64
    # Half a byte a weight: 73,728 of them in two blocks.
    assert weights_in_words(model).endswith("frozen: 36,864 uint8")


def test_adapters_have_the_dtype_the_library_gives_them_beside_a_bf16_base() -> None:
    model = with_adapters(baseline_model(recipe().shape(), CPU, torch.bfloat16), 4, 8, checkpointing=True)
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    assert dtypes == {torch.float32}
    assert model.base_model.model.is_gradient_checkpointing
    assert {type(m).__name__ for n, m in model.named_modules() if n.rpartition(".")[2] in TARGETS} == {
        "Linear"
    }


def test_the_mask_is_what_was_filled_up_and_filling_changes_no_loss() -> None:
    batch = padded()
    mask_bt = real_tokens(batch)
    assert mask_bt.sum(1).tolist() == [20, 13]
    assert bool((mask_bt[:, :-1] >= mask_bt[:, 1:]).all()), "ones, then zeros"
    model = baseline_model(recipe().shape(), CPU, torch.float32)
    share = torch.tensor(1.0)
    both = baseline_pass(model, padded=True)(batch, share)
    alone = [
        baseline_pass(model, padded=True)(Batch(batch.tokens_bt[:1], batch.labels_bt[:1]), share),
        baseline_pass(model, padded=True)(Batch(batch.tokens_bt[1:, :13], batch.labels_bt[1:, :13]), share),
    ]
    assert float(both) == pytest.approx(float(alone[0]) + float(alone[1]), rel=1e-5)


def test_conversations_come_in_our_order_filled_up_to_the_longest_of_their_batch(
    lab_cache: Path, tmp_path: Path
) -> None:
    """By the real loader: the same conversations as ours gets, in the same order, and no row longer than it must be."""
    lengths = [3, 17, 5, 9, 30, 2, 8, 8, 21, 4, 6, 12, 7]
    rows = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "fox " * length}]}
        for n, length in enumerate(lengths)
    ]
    (tmp_path / "talks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings = ["model.name=llama-tiny", *SHAPE[:6], "model.shape.vocab_size=260", "model.shape.context=256",
                "batch.micro=4", "batch.sequence=128", "batch.total_tokens=512", "data.source=files",
                f"data.files=['{tmp_path / 'talks.jsonl'}']", "data.shuffle=false", "data.validation=0.001"]  # fmt: skip
    theirs = load_recipe("sft-tiny", [*settings, "techniques=[]"])
    ours = build(load_recipe("sft-tiny", [*settings, "techniques=['flatten']"]), probe("cpu"))
    run = build_baseline(theirs, probe("cpu"), BaselineOptions())
    corpus = open_corpus(theirs, None, lambda text: None)
    with (
        corpus.loader(theirs, run.loader_options) as loader,
        corpus.loader(ours.recipe, ours.loader_options) as packed,
    ):
        batches = [next(iter(loader.next_step())) for _ in range(3)]
        packs = [next(iter(packed.next_step()))]
    names = [name for batch in batches for name in batch.samples]
    assert len(set(names)) == len(lengths) - 1  # one is held out
    assert list(packs[0].samples) == names[: len(packs[0].samples)]
    documents = DocumentSet(corpus.folder, "train")
    place = 0
    for batch in batches:
        sizes = [len(documents.tokens(place + row)) - 1 for row in range(4)]
        place += 4
        assert batch.tokens_bt.shape == (4, max(sizes))
        assert real_tokens(batch).sum(1).tolist() == sizes
        assert batch.padding == 4 * max(sizes) - sum(sizes)
    assert len({batch.tokens_bt.shape for batch in batches}) > 1
    loss = train_step(run, 1, 1e-3, batches[:1]).loss
    assert 0 < loss < 10
    assert "packing" not in build_baseline(recipe(), probe("cpu"), BaselineOptions()).loader_options


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        (BaselineOptions(), ["transformers"]),
        (BaselineOptions(with_liger=True, rank=4), ["transformers", "liger_kernel", "peft"]),
        (QLORA, ["transformers", "peft", "bitsandbytes"]),
    ],
)
def test_a_baseline_needs_what_its_options_say(options: BaselineOptions, needs: list[str]) -> None:
    assert options.needs == needs
