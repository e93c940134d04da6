"""Both families against the reference library: the same weights give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rush.hub.weights import load_hf_folder, save_hf_folder
from rush.models import Decoder, Shape, build_model

Rows = Callable[[int, int], torch.Tensor]
Reference = Callable[[Shape], Any]
Imported = Callable[[Any], Decoder]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("length", [1, 7, 64])
def test_logits_equal_the_reference(
    small_shape: Shape, length: int, reference: Reference, imported: Imported, text_tokens: Rows
) -> None:
    theirs = reference(small_shape)
    ours = imported(theirs)
    tokens = text_tokens(2, length)
    with torch.no_grad():
        found, expected = ours(tokens), theirs(tokens).logits
    assert found.dtype == torch.float32
    assert found.shape == (2, length, small_shape.vocab_size)
    assert relative_error(found, expected) < 1e-5


def test_the_imported_shape_is_the_reference_configuration(
    small_shape: Shape, reference: Reference, imported: Imported
) -> None:
    assert imported(reference(small_shape)).shape == small_shape


def test_the_loss_and_every_gradient_equal_the_reference(
    small_shape: Shape, reference: Reference, imported: Imported, text_tokens: Rows
) -> None:
    theirs = reference(small_shape)
    ours = imported(theirs)
    rows = text_tokens(3, 50)
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    labels[0, :20] = -100
    labels[2] = -100

    logits = theirs(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    expected.backward()
    loss = ours(tokens, labels)
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach() / expected.detach()) - 1) < 1e-5

    # The reference's gradients travel to our names through the same folder as its weights.
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad)
    gradients = dict(imported(theirs).named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert error < 1e-4, name


def test_an_exported_folder_loads_in_transformers_with_equal_logits(
    small_shape: Shape, lively: Callable[[Shape], Decoder], tmp_path: Path, text_tokens: Rows
) -> None:
    import transformers

    ours = lively(small_shape)
    save_hf_folder(tmp_path / "hf", ours, small_shape, max_shard_bytes=30_000)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    theirs, notes = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", attn_implementation="eager", output_loading_info=True
    )
    assert not any(notes[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), notes
    tokens = text_tokens(2, 33)
    with torch.no_grad():
        assert relative_error(ours(tokens), theirs.eval()(tokens).logits) < 1e-5


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_bf16_model_stays_as_close_to_fp32_as_the_reference_does(
    family_shape: Shape, reference: Reference, imported: Imported, text_tokens: Rows, tmp_path: Path
) -> None:
    theirs = reference(family_shape)
    ours = imported(theirs)
    tokens = text_tokens(1, 24)
    with torch.no_grad():
        exact = ours(tokens)
        found = ours.to(torch.bfloat16)(tokens)
        reference = theirs.to(torch.bfloat16)(tokens).logits.float()
    assert found.dtype == torch.float32
    assert relative_error(found, exact) < 1.5 * relative_error(reference, exact)


def test_transformers_reads_what_we_read(family_shape: Shape, reference: Reference, tmp_path: Path) -> None:
    """A folder goes through us unchanged: imported and exported, every tensor has the same bits."""
    theirs = reference(family_shape)
    theirs.save_pretrained(tmp_path / "in")
    shape, state = load_hf_folder(tmp_path / "in")
    model = build_model(shape)
    model.load_state_dict(state)
    save_hf_folder(tmp_path / "out", model, shape)

    import transformers

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, first), (_, second) in zip(theirs.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(first, second), name
