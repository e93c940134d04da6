"""The baseline of preference training: TRL's DPOTrainer, or its loss reimplemented over a plain transformers model.

A real DPOTrainer is built around the baseline's model, with all its patches, and its `compute_loss` is called with our pairs:
padded to the longest, chosen answers first, the reference's log-probabilities computed once before
(`precompute_ref_log_probs`), by its own method. Its bookkeeping for logs is included. Loop, loader and update are ours, as for
every baseline. Without TRL the same loss is implemented here; the workload's title states which of the two was measured.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rush.data import Batch
from rush.data.batch import IGNORED
from rush.data.row_tensors import PADDING_TOKEN
from rush.errors import RecipeError
from rush.recipe import Recipe
from rush.training.objectives import Preference

TRL_NEEDS = ("trl", "transformers", "accelerate", "datasets", "pyarrow", "pandas")
WRITTEN_OUT = "transformers, TRL's loss written out (TRL is not installed)"
KINDS = ("sigmoid", "ipo")
"""Losses of TRL's DPO trainer that recipes have too."""


class Losses(Protocol):
    def answers(self, batch: Batch) -> Tensor:
        """The summed log-probability of every row's labels, for the reference."""
        ...

    def loss(self, batch: Batch) -> Tensor:
        """The mean over the batch's pairs."""
        ...

    def rewards(self) -> dict[str, float]:
        """`reward_chosen` and `reward_rejected` of the last loss, means over its pairs."""
        ...


class LibraryPreference(Preference):
    """Our units and references, another library's loss."""

    def __init__(self, recipe: Recipe, losses: Losses) -> None:
        super().__init__(recipe)
        self.losses = losses

    def answers(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.losses.answers(batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.losses.loss(batch) * (batch.tokens_bt.shape[0] // 2)


def trl_missing() -> list[str]:
    """The missing packages because of which TRL's trainer cannot be the baseline here."""
    found = {name: find_spec(name) for name in TRL_NEEDS}
    # A folder of that name that happens to be on the path is found, too, but is no package.
    return [name for name, spec in found.items() if spec is None or spec.origin is None]


def library_preference(
    model: nn.Module, recipe: Recipe, how: str, *, bf16: bool = False, checkpointing: bool = False
) -> LibraryPreference:
    """The objective of a baseline: `how` is trl or written."""
    settings = recipe.objective
    if settings.kind != "dpo" or settings.loss not in KINDS or settings.label_smoothing:
        raise RecipeError(
            f"the baseline of preferences has the losses {' and '.join(KINDS)}, without label smoothing; the recipe's is "
            f"{settings.kind} with {settings.loss}."
        )
    losses: Losses = (
        TrlLosses(model, recipe, bf16=bf16, checkpointing=checkpointing)
        if how == "trl"
        else WrittenOut(model, recipe)
    )
    return LibraryPreference(recipe, losses)


def real_tokens(batch: Batch) -> Tensor:
    """The attention mask of rows filled up at their ends: 1 up to the last token that is none of the filling."""
    real_bt = (batch.tokens_bt != PADDING_TOKEN) | (batch.labels_bt != IGNORED)
    return real_bt.long().flip(1).cummax(1).values.flip(1)


def trl_inputs(batch: Batch) -> dict[str, Tensor]:
    """A batch as TRL's collator would make it. Our labels are shifted already, so each row gets its last token back."""
    labelled_bt = batch.labels_bt != IGNORED
    ids_bt = F.pad(batch.tokens_bt, (0, 1), value=PADDING_TOKEN)
    ids_bt[:, 1:] = torch.where(labelled_bt, batch.labels_bt, ids_bt[:, 1:])
    completion_bt = F.pad(labelled_bt, (1, 0)).long()
    return {
        "input_ids": ids_bt,
        "attention_mask": F.pad(real_tokens(batch), (0, 1)) | completion_bt,
        "completion_mask": completion_bt,
    }


def _with_reference(batch: Batch) -> dict[str, Tensor]:
    assert batch.reference_b is not None, "references are cached for baselines"
    chosen_n, rejected_n = batch.reference_b.chunk(2)
    return trl_inputs(batch) | {"ref_chosen_logps": chosen_n, "ref_rejected_logps": rejected_n}


class TrlLosses:
    """A complete DPOTrainer, used only for its loss."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, bf16: bool, checkpointing: bool) -> None:
        trl, datasets = import_module("trl"), import_module("datasets")
        datasets.disable_progress_bars()
        on_cpu = next(model.parameters()).device.type == "cpu"
        with tempfile.TemporaryDirectory(prefix="rush-trl-") as folder:
            settings = trl.DPOConfig(
                output_dir=folder,
                beta=recipe.objective.beta,
                loss_type=[recipe.objective.loss],
                precompute_ref_log_probs=True,
                gradient_checkpointing=checkpointing,
                bf16=bf16,
                use_cpu=on_cpu,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            )
            # It asks for a dataset and a tokenizer; its own are never read, our loader gives the pairs.
            rows = datasets.Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}])
            self.trainer = trl.DPOTrainer(
                model=model, args=settings, train_dataset=rows, processing_class=_tokenizer()
            )
        model.train()

    def answers(self, batch: Batch) -> Tensor:
        chosen_n, rejected_n = self.trainer.compute_ref_log_probs(self.trainer.model, trl_inputs(batch))
        return torch.cat((chosen_n, rejected_n))

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.trainer.compute_loss(self.trainer.model, _with_reference(batch))
        return loss

    def rewards(self) -> dict[str, float]:
        kept = self.trainer._metrics["train"]
        return {f"reward_{name}": float(kept[f"rewards/{name}"][-1]) for name in ("chosen", "rejected")}


def _tokenizer() -> Any:
    """The smallest that the trainer accepts."""
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    words = {word: index for index, word in enumerate(("a", "b", "c", "</s>", "<unk>"))}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )


class WrittenOut:
    """The same loss over the logits of a plain transformers model."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model, self.settings = model, recipe.objective
        self._last: tuple[Tensor, Tensor] | None = None

    def answers(self, batch: Batch) -> Tensor:
        return self._sums(trl_inputs(batch))

    def _sums(self, inputs: dict[str, Tensor]) -> Tensor:
        found = self.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False
        )
        mask_bt = inputs["completion_mask"][:, 1:].bool()
        labels_bt = inputs["input_ids"][:, 1:]
        logits_btv = found.logits[:, :-1].float()
        taken_bt = logits_btv.gather(2, labels_bt[..., None]).squeeze(2) - logits_btv.logsumexp(2)
        return torch.where(mask_bt, taken_bt, 0.0).sum(1)

    def loss(self, batch: Batch) -> Tensor:
        inputs = _with_reference(batch)
        chosen_n, rejected_n = self._sums(inputs).chunk(2)
        chosen_n = chosen_n - inputs["ref_chosen_logps"]
        rejected_n = rejected_n - inputs["ref_rejected_logps"]
        beta = self.settings.beta
        self._last = beta * chosen_n.detach(), beta * rejected_n.detach()
        if self.settings.loss == "ipo":
            chosen_tokens_n, rejected_tokens_n = inputs["completion_mask"].sum(1).clamp(min=1).chunk(2)
            apart_n = chosen_n / chosen_tokens_n - rejected_n / rejected_tokens_n
            return (apart_n - 1 / (2 * beta)).square().mean()
        return -F.logsigmoid(beta * (chosen_n - rejected_n)).mean()

    def rewards(self) -> dict[str, float]:
        assert self._last is not None
        chosen_n, rejected_n = self._last
        return {"reward_chosen": float(chosen_n.mean()), "reward_rejected": float(rejected_n.mean())}
