"""What a builder returns: a finished batch, what the loader must know of it, and how many labels its step has.

`num_items_in_batch` is the number by which the losses of transformers are divided, the same for every micro-batch and
rank of a step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from vlm_stream.blueprint import BatchName
    from vlm_stream.ledger import BadSample
    from vlm_stream.storage import ReadTotals

logger = logging.getLogger(__name__)

ITEM_COUNT: Final = "num_items_in_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A finished micro-batch."""

    name: BatchName
    batch: dict[str, Any]
    bad: tuple[BadSample, ...]
    num_samples: int
    """Samples planned into it, bad ones included."""
    num_tokens: int
    """Tokens of the samples in it."""
    num_planned_tokens: int
    """Tokens that the index promised."""
    num_labels: int
    """Tokens of the batch that are learned."""
    num_planned_labels: int | None
    """Those that the index promised, bad samples included; None: it does not know, or a sample was cut."""
    num_step_labels: int | None
    """Those of the whole step, over all ranks and micro-batches: the batch's `num_items_in_batch`."""
    num_in_step: int
    """Micro-batches of the step, over all ranks."""
    num_rows: int
    """Rows of the batch, fillers included."""
    num_slots: int
    """Tokens of the batch, padding included."""
    num_bytes: int
    """Memory of the batch."""
    seconds: dict[str, float]
    """Time spent waiting for bytes (`fetch`), in `encode` and in `collate`."""
    reads: ReadTotals
    """What the builder's reader has done since it began."""
    reader: str
    """Tells that reader from all others, on whichever machine."""


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
