"""Samples that cost builders: which of them are left out, and when.

A sample that ends its process would do so for ever. Losses are counted for the sample that was worked on; after the
second one (the third, if a signal came that may have been sent from outside, or may have stopped the process) the
sample is left out.
"""

from __future__ import annotations

import signal
from collections import Counter
from typing import TYPE_CHECKING, Final

from vlm_stream.lifetimes import say_exit

if TYPE_CHECKING:
    from vlm_stream.blueprint import Blueprint, SampleRef

_OWN_LOSSES: Final = 2
_FOREIGN_LOSSES: Final = 3
_FOREIGN_SIGNALS: Final = frozenset((signal.SIGKILL, signal.SIGTERM))
"""Sent by the system or by people, who do not mean the sample; but memory that a sample takes is a cause, too."""
_SUSPICIOUS: Final = 2
"""Builders elsewhere that were lost over one batch, before it is built where the sample will be known."""


class Losses:
    """How many builders each sample has cost, and which samples are left out from now on."""

    def __init__(self) -> None:
        """Start without losses."""
        self._counts: Counter[SampleRef] = Counter()
        self._by_batch: Counter[int] = Counter()
        self._skipped: dict[SampleRef, str] = {}
        """What the ledger says of each."""
        self.num_settled = 0
        """Losses that cannot come again, since their samples are left out."""

    def among(self, blueprint: Blueprint) -> dict[SampleRef, str]:
        """Return those of a blueprint's samples that are left out."""
        if not self._skipped:
            return {}
        refs = (piece.ref for row in blueprint.rows for piece in row)
        return {ref: self._skipped[ref] for ref in refs if ref in self._skipped}

    def add(self, ref: SampleRef, exit_code: int | None, *, is_doubted: bool = False) -> bool:
        """Count one; tell whether the sample is left out now.

        Without an exit code the builder had hung; that is doubted where nobody has said how long it may take.
        """
        if ref in self._skipped:  # it was given before; it counts as a restart, so that this has an end
            return True
        self._counts[ref] += 1
        num_losses = self._counts[ref]
        may_be_foreign = is_doubted if exit_code is None else -exit_code in _FOREIGN_SIGNALS
        if num_losses < (_FOREIGN_LOSSES if may_be_foreign else _OWN_LOSSES):
            return False
        how = "hung" if exit_code is None else f"died ({say_exit(exit_code)})"
        self._skipped[ref] = (
            f"{num_losses} workers were lost while they worked on it (the last one {how}), so it is left out. Decode "
            f"it by itself to see why, and leave it out of the data or write its media again."
        )
        self.num_settled += num_losses
        return True

    def add_batch(self, number: int) -> bool:
        """Count a builder elsewhere, of which nobody knows the sample; tell whether its batch is suspicious now."""
        self._by_batch[number] += 1
        return self._by_batch[number] >= _SUSPICIOUS
