"""How many labels a step has: what batches say of it, and what is said where nobody knows.

Enters: finished batches and the plan's counts. Leaves: `num_items_in_batch`, by which transformers' losses are divided,
and so the same for every micro-batch and rank of a step; or one warning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from vlm_stream.build.delivery import Delivery

__all__ = ["ITEM_COUNT", "UnknownLabels", "add_item_count"]

logger = logging.getLogger(__name__)

ITEM_COUNT: Final = "num_items_in_batch"


def add_item_count(batch: dict[str, Any], step_labels: int | None, num_labels: int) -> None:
    """Say in a batch how many labels its whole step has, if that is known and the batch has labels at all.

    At least 1: the loss of a step without labels is 0, not 0 / 0. A collate_fn that counts by itself is believed.
    """
    counts_itself = ITEM_COUNT in batch and num_labels > 0
    if step_labels is not None and "labels" in batch and not counts_itself:
        batch[ITEM_COUNT] = torch.tensor(max(step_labels, 1))


class UnknownLabels:
    """Warns once of steps whose labels are not known."""

    def __init__(self) -> None:
        """Begin without having warned."""
        self._told = False

    def saw(self, delivery: Delivery) -> None:
        """Look at a delivery; a step of one micro-batch on one rank needs no count."""
        known = delivery.num_step_labels is not None or not delivery.num_labels
        if self._told or known or delivery.num_in_step == 1:
            return
        self._told = True
        logger.warning(
            "how many labels step %d has over its %d micro-batches is not known (the index was not counted for this "
            "processor, or a sample was cut, or an answer holds media), so batches have no %s, and a loss that is "
            "averaged over each batch weighs the tokens of small batches more. Count with: vlm-stream recount "
            "--processor ... (the dataset); or add labels up with vlm_stream.integrations.torch.count_items(batches)",
            delivery.name.step,
            delivery.num_in_step,
            ITEM_COUNT,
        )
