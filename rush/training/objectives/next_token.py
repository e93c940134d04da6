"""Next-token prediction at every position with a label: pretraining and supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from rush.data import Batch


def model_inputs(batch: Batch) -> dict[str, Tensor]:
    """The model's arguments besides tokens and labels.

    Absent arguments are omitted, so that the plain call of pretraining stays unchanged.
    """
    given = {
        "positions_bt": batch.positions_bt,
        "documents_bt": batch.documents_bt,
        "starts_n": batch.starts_n,
    }
    return {name: tensor for name, tensor in given.items() if tensor is not None}


class NextToken:
    unit = "label"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch.tokens_bt, batch.labels_bt, **model_inputs(batch))
        return loss

    def units(self, batch: Batch) -> int:
        return batch.num_labels

    def figures(self, add: Callable[[Tensor], Tensor] = Tensor.detach) -> Mapping[str, float]:
        return {}
