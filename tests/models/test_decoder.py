from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rush.errors import DataError
from rush.models import SIZES, Decoder, Shape, build_model, check_tokens

Lively = Callable[[Shape], Decoder]
Rows = Callable[[int, int], torch.Tensor]


def test_the_loss_is_the_sum_that_the_logits_give(
    small_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model, rows = lively(small_shape), text_tokens(2, 30)
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    labels[1, 5:] = -100
    with torch.no_grad():
        log_probabilities = torch.log_softmax(model(tokens).double(), -1)
        counted = labels >= 0
        expected = -log_probabilities[counted].gather(1, labels[counted][:, None]).sum()
        assert abs(float(model(tokens, labels) / expected) - 1) < 1e-6


def test_a_token_never_changes_what_comes_before_it(
    small_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model, tokens = lively(small_shape), text_tokens(1, 20)
    changed = tokens.clone()
    changed[0, 12] = (changed[0, 12] + 1) % small_shape.vocab_size
    with torch.no_grad():
        first, second = model(tokens)[0], model(changed)[0]
    assert torch.equal(first[:12], second[:12])
    assert all(not torch.equal(first[t], second[t]) for t in range(12, 20))


# --- documents -------------------------------------------------------------------------------------------


def packed_row(rows: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.cat([rows[i, :length] for i, length in enumerate(lengths)])[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), 5 - i) for i, length in enumerate(lengths)])[None]
    return tokens, positions, documents


def test_one_document_has_exactly_zero_influence_on_another(
    small_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model = lively(small_shape)
    tokens, positions, documents = packed_row(text_tokens(3, 20), [11, 7, 13])
    changed = tokens.clone()
    changed[0, 11:18] = torch.arange(100, 107)  # the middle document becomes another one

    def run(row: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(row, positions_bt=positions, documents_bt=documents)[0]

    first, second = run(tokens), run(changed)
    assert torch.equal(first[:11], second[:11])
    assert torch.equal(first[18:], second[18:])
    assert not torch.equal(first[11:18], second[11:18])


def test_one_document_has_exactly_zero_gradient_in_another(
    small_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model = lively(small_shape)
    tokens, positions, documents = packed_row(text_tokens(3, 20), [11, 7, 13])
    seen: list[torch.Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        seen.append(output)

    model.embedding.register_forward_hook(keep)
    labels = torch.full_like(tokens, -100)
    labels[0, 11:17] = tokens[0, 12:18]  # only the middle document is trained
    model(tokens, labels, positions_bt=positions, documents_bt=documents).backward()
    gradient = seen[0].grad
    assert gradient is not None
    assert torch.count_nonzero(gradient[0, :11]) == 0
    assert torch.count_nonzero(gradient[0, 18:]) == 0
    assert torch.count_nonzero(gradient[0, 11:17]) > 0


def test_a_packed_document_gives_what_it_gives_alone(
    small_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model, rows, lengths = lively(small_shape), text_tokens(3, 20), [11, 7, 13]
    tokens, positions, documents = packed_row(rows, lengths)
    with torch.no_grad():
        packed = model(tokens, positions_bt=positions, documents_bt=documents)[0]
        alone = torch.cat([model(rows[i : i + 1, :length])[0] for i, length in enumerate(lengths)])
    assert (packed - alone).abs().max() < 1e-5 * alone.abs().max()


def test_a_flattened_row_may_be_longer_than_the_context(
    lively: Lively, family_shape: Shape, text_tokens: Rows
) -> None:
    tokens, positions, documents = packed_row(text_tokens(3, 60), [60, 60, 60])
    with torch.no_grad():
        logits = lively(family_shape)(tokens, positions_bt=positions, documents_bt=documents)
    assert logits.shape[1] == 180 > family_shape.context


# --- cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[29], [1] * 29, [13, 9, 1, 1, 5], [28, 1]])
def test_cached_logits_equal_uncached(
    small_shape: Shape, pieces: list[int], lively: Lively, text_tokens: Rows
) -> None:
    model, tokens = lively(small_shape), text_tokens(2, 29)
    cache = model.new_cache(batch=2, capacity=40)
    cache.row_tokens = 29
    with torch.no_grad():
        expected = model(tokens)
        found, start = [], 0
        for length in pieces:
            found.append(model(tokens[:, start : start + length], cache=cache))
            start += length
            assert cache.length == start
    assert (torch.cat(found, 1) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_full_cache_is_refused(family_shape: Shape, text_tokens: Rows) -> None:
    model, tokens = build_model(family_shape), text_tokens(1, 12)
    cache = model.new_cache(batch=1, capacity=10)
    with torch.no_grad():
        model(tokens[:, :8], cache=cache)
        with pytest.raises(DataError, match=r"12 tokens.*at most 10"):
            model(tokens[:, 8:], cache=cache)
    assert cache.length == 8


# --- dtypes, compile, copies -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_autocast_keeps_loss_logits_and_gradients_fp32_and_close(
    family_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model, rows = lively(family_shape), text_tokens(1, 20)
    tokens, labels = rows[:, :-1], rows[:, 1:]
    exact = model(tokens, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, logits = model(tokens, labels), model(tokens)
    loss.backward()
    assert loss.dtype == logits.dtype == torch.float32
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32
        for parameter in model.parameters()
    )
    assert 0 < abs(float(loss.detach() / exact.detach()) - 1) < 0.02


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_pure_bf16_model_trains_with_an_fp32_loss(
    family_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model, rows = lively(family_shape), text_tokens(1, 12)
    exact = float(model(rows[:, :-1], rows[:, 1:]).detach())
    model.to(torch.bfloat16)
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
        for parameter in model.parameters()
    )
    assert abs(float(loss.detach()) / exact - 1) < 0.05


def test_a_compiled_model_is_one_graph_and_equal(
    family_shape: Shape, lively: Lively, text_tokens: Rows
) -> None:
    model, rows = lively(family_shape), text_tokens(2, 18)
    tokens, labels = rows[:, :-1], rows[:, 1:]
    loss = model(tokens, labels)
    loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    again = compiled(tokens, labels)
    again.backward()
    assert abs(float(again.detach() / loss.detach()) - 1) < 1e-6
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_a_deep_copy_is_tied_and_independent(family_shape: Shape) -> None:
    model = build_model(family_shape)
    copied = copy.deepcopy(model)
    assert copied.head.weight is copied.embedding.weight
    with torch.no_grad():
        copied.embedding.weight.add_(1)
    assert not torch.equal(model.embedding.weight, copied.embedding.weight)


# --- the tied head and the state -------------------------------------------------------------------------


def test_a_tied_head_stays_one_tensor_on_every_way(family_shape: Shape) -> None:
    with torch.device("meta"):
        model = build_model(family_shape)
    assert model.head.weight is model.embedding.weight
    model.to_empty(device="cpu")
    assert model.head.weight is model.embedding.weight
    model.to(torch.float64)
    assert model.head.weight is model.embedding.weight


def test_the_state_holds_each_tensor_once_and_loads_strictly(small_shape: Shape, lively: Lively) -> None:
    model = lively(small_shape)
    state = model.state_dict()
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert ("head.weight" in state) == (not small_shape.tied_head)
    tokens = torch.arange(9)[None]

    copied = build_model(small_shape)
    copied.load_state_dict(state)
    assert torch.equal(copied(tokens), model(tokens))

    with torch.device("meta"):
        assigned = build_model(small_shape)
    assigned.load_state_dict(state, assign=True)
    assigned.init_buffers()
    assert (assigned.head.weight is assigned.embedding.weight) == small_shape.tied_head
    assert assigned.embedding.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert torch.equal(assigned(tokens), model(tokens))

    del state["final_norm.weight"]
    with pytest.raises(RuntimeError, match=r"final_norm\.weight"):
        copied.load_state_dict(state)


# --- seams -----------------------------------------------------------------------------------------------


def test_linear_layers_are_listed_by_role_under_their_names(small_shape: Shape) -> None:
    model = build_model(small_shape)
    roles = model.linears()
    expected = {"attention_out", "mlp_up", "mlp_down", "head"}
    expected |= {"qkv"} if small_shape.family == "gpt2" else {"q", "k", "v", "mlp_gate"}
    assert set(roles) == expected
    modules = dict(model.named_modules())
    for role, members in roles.items():
        assert len(members) == (1 if role == "head" else small_shape.num_layers)
        assert all(modules[name] is linear for name, linear in members)
    listed = {name for members in roles.values() for name, _ in members}
    assert listed == {name for name, module in modules.items() if isinstance(module, nn.Linear)}


def test_every_slot_is_used_and_belongs_to_its_instance(family_shape: Shape, text_tokens: Rows) -> None:
    model, other, rows = build_model(family_shape), build_model(family_shape), text_tokens(1, 8)
    calls: list[str] = []

    class Spy(nn.Module):
        def __init__(self, name: str, plain: nn.Module) -> None:
            super().__init__()
            self.name, self.plain = name, plain

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(self.name)
            return self.plain(*args, **kwargs)

    block: Any = model.blocks[1]
    block.attention.core = Spy("core", block.attention.core)
    block.attention_norm = Spy("attention_norm", block.attention_norm)
    block.mlp_norm = Spy("mlp_norm", block.mlp_norm)
    block.mlp.activation = Spy("activation", block.mlp.activation)
    block.mlp = Spy("mlp", block.mlp)
    model.final_norm = Spy("final_norm", model.final_norm)
    model.loss_head = Spy("loss_head", model.loss_head)
    loss = model(rows[:, :-1], rows[:, 1:])
    assert calls == ["attention_norm", "core", "mlp_norm", "mlp", "activation", "final_norm", "loss_head"]
    assert torch.equal(loss, other(rows[:, :-1], rows[:, 1:]))
    assert len(calls) == 7, "another instance must not have changed"


# --- bad input -------------------------------------------------------------------------------------------


def test_a_row_longer_than_the_context_is_refused(family_shape: Shape) -> None:
    with pytest.raises(DataError, match=r"65 tokens.*at most 64"):
        build_model(family_shape)(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[0, 5], [7, 2048]], ("2048", "row 1, position 1", "0 to 2047")),
        ([3, -1], ("-1", "position 1")),
        ([[0] * 257], ("257", "256")),
        (torch.tensor([0.5]), ("whole numbers", "float32")),
        (torch.tensor([True]), ("whole numbers", "bool")),
    ],
)
def test_bad_tokens_are_refused_with_their_position(tokens: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        check_tokens(SIZES["tiny"], tokens)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_good_tokens_pass() -> None:
    check_tokens(SIZES["tiny"], [0, 2047])
    check_tokens(SIZES["tiny"], torch.zeros(3, 256, dtype=torch.int32))
    check_tokens(SIZES["tiny"], [])
    check_tokens(SIZES["tiny"], torch.zeros(3, dtype=torch.uint16))


def test_ids_in_the_types_of_token_files_are_checked_too() -> None:
    with pytest.raises(DataError, match="65535"):
        check_tokens(SIZES["tiny"], torch.tensor([1, 65535], dtype=torch.uint16))
