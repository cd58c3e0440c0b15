"""What a builder returns: a finished batch, and what the loader must know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_stream.blueprint import BatchName
    from vlm_stream.ledger import BadSample
    from vlm_stream.storage import ReadTotals

__all__ = ["Delivery"]


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
    pid: int
    """The process that made it."""
