"""`PackedDatasetWrapper`: packs, made when they are asked for.

Enters: a dataset of encoded samples and bins of its indices. Leaves: packed samples of at most `pack_size` tokens. Bins
are made of estimates, so a pack may turn out too long: samples that do not fit are left out, counted and named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from vlm_stream.collate import (
    ModelPositions,
    PositionRule,
    align_up,
    as_documents,
    build_packed_vlm_sample,
    shift_sample,
)
from vlm_stream.errors import BadSampleError
from vlm_stream.mapstyle.replace import Replacer
from vlm_stream.mapstyle.robust_collate import make_robust_collate

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PackedDatasetWrapper"]


class PackedDatasetWrapper(Dataset[Any]):
    """Packs of an encoded dataset; a bad sample leaves room in its pack and is not replaced.

    Attributes:
        has_mrope: Whether packs carry multi-axis positions.
        visual_loads: Estimated visual tokens of each pack, or None where they are not known.
        ledger: What was left out in this process.
    """

    def __init__(
        self,
        inner_dataset: Any,
        bins: list[list[int]],
        pack_size: int,
        padding_idx: int = 0,
        get_rope_index: Callable[..., Any] | None = None,
        max_retries: int = 10,
        sequence_alignment: int = 1,
        *,
        seed: int = 0,
        ledger_path: str | None = None,
    ) -> None:
        """Keep the bins; samples are encoded when a pack is asked for.

        Args:
            inner_dataset: Encoded samples, such as a `PreTokenizedDatasetWrapper`.
            bins: Indices of each pack.
            pack_size: The most tokens of a pack, after the shift.
            padding_idx: Token that fills aligned documents.
            get_rope_index: A model's method, a `PositionRule`, or None for plain positions.
            max_retries: How many samples are tried for a pack of which nothing fits.
            sequence_alignment: Documents are padded to a multiple of it.
            seed: Chooses which samples stand in for others.
            ledger_path: File to which all workers append what was left out.
        """
        self.inner_dataset = inner_dataset
        self.bins = bins
        self.pack_size = pack_size
        self.padding_idx = padding_idx
        self.max_retries = max_retries
        self.sequence_alignment = sequence_alignment
        self.has_mrope = get_rope_index is not None
        self.visual_loads: list[int] | None = None
        is_rule = isinstance(get_rope_index, (PositionRule, ModelPositions))
        self._positions = get_rope_index if is_rule or get_rope_index is None else ModelPositions(get_rope_index)
        self._replacer = Replacer(
            source="PackedDatasetWrapper", max_retries=max_retries, seed=seed, ledger_path=ledger_path
        )
        self.ledger = self._replacer.ledger

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, pack_idx: int) -> dict[str, Any]:
        """Return one packed sample; it is never empty."""
        kept: list[dict[str, Any]] = []
        for index in self.bins[pack_idx]:
            self.ledger.saw()
            try:
                kept = self._fit(kept, self._load(index))
            except Exception as error:  # datasets raise anything; one sample less is all it may cost
                self._replacer.note(f"{index} in pack {pack_idx}", error)
        if not kept:
            # A pack without samples would not stack with others; the first index is as good a key as any.
            first = self.bins[pack_idx][0] if self.bins[pack_idx] else pack_idx
            kept = self._replacer.fetch(lambda i: self._fit([], self._load(i)), first, len(self.inner_dataset))
        return build_packed_vlm_sample(kept, self.pack_size, self.padding_idx, self.has_mrope, self.sequence_alignment)

    def _load(self, index: int) -> dict[str, Any]:
        # A dataset that replaces bad samples may give this pack one that another pack has; better one less.
        sample = getattr(self.inner_dataset, "encode", self.inner_dataset.__getitem__)(index)
        positions = self._positions(sample) if self._positions is not None else None
        return shift_sample(sample if positions is None else {**sample, "position_ids": positions}, self.has_mrope)

    def _fit(self, kept: list[dict[str, Any]], sample: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the samples with one more; raise `BadSampleError` if the pack would be too long."""
        together = [*kept, sample]
        slots = [align_up(len(d["input_ids"]), self.sequence_alignment) for d in as_documents(together)]
        if sum(slots) > self.pack_size:
            raise BadSampleError(
                "fit",
                "pack_overflow",
                f"{len(sample['input_ids'])} tokens do not fit into what is left of a pack of {self.pack_size}; its "
                f"estimate was too low. Lower packing_ratio to leave room.",
            )
        return together

    def robust_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a collate function so that a batch that fails is drawn again, from packs."""
        return make_robust_collate(self, collate_fn, self.max_retries)
