"""Batches in the form that NeMo Automodel's VLM trainer takes: labels shifted, documents numbered, pixels in bfloat16.

Enters: rows of encoded samples and the processor, as `collate_fn` of a stream is given them. Leaves: the names, shapes
and types of the recipe's own packed and padded collation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.nn.functional import pad

from vlm_stream.collate import (
    PackingContract,
    PositionRule,
    build_packed_vlm_sample,
    neat_packed_vlm_collater,
    packed_sequence_thd_vlm_collater,
    pad_collate_fn,
    pad_id_of,
    shift_sample,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.collate import Positions

__all__ = ["PackedAs", "PackedRows", "PaddedRows"]

PackedAs: TypeAlias = Literal["block_causal", "document_ids", "flash_varlen", "thd"]


class _Family:
    """The position rule of a family, read when its processor is known."""

    def __init__(self, model_config: Any = None) -> None:
        self._model_config = model_config
        self._rules: list[Positions | None] = []

    def rule(self, processor: Any) -> Positions | None:
        if not self._rules:
            config = self._model_config
            rule = PositionRule.from_processor(processor) if config is None else PositionRule.from_config(config)
            self._rules.append(rule)
        return self._rules[0]


class PaddedRows:
    """One sample a row in the form of the recipe's collation: padded, labels shifted, pixels in bfloat16.

    With fake images the rows have positions too: a model would skip the hidden tokens of such an image and give its
    grid to the next row.
    """

    def __init__(self, *, with_positions: bool = False, model_config: Any = None) -> None:
        """Keep the settings."""
        self._family = _Family(model_config) if with_positions else None

    def __call__(self, samples: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
        """Return the batch."""
        batch = pad_collate_fn(samples, processor)
        rule = None if self._family is None else self._family.rule(processor)
        if rule is not None:
            length = batch["input_ids"].shape[1]
            axes = [_with_positions(sample, rule)["position_ids"][:, :length] for sample in samples]
            batch["position_ids"] = torch.stack([pad(one, (0, length - one.shape[1])) for one in axes], dim=1)
        return batch


class PackedRows:
    """Packed rows in the form of the recipe's own packed collation: called with rows of samples and the processor.

    Labels are shifted within each document; `_packed_seq_ids` numbers the documents of a row; positions restart with
    each of them and have three axes where the family has; pixels are bfloat16.
    """

    def __init__(
        self,
        *,
        packed_as: PackedAs,
        pack_size: int | None,
        alignment: int = 1,
        pad_rows: bool = False,
        model_config: Any = None,
        sequence_metadata: bool = False,
    ) -> None:
        """Keep the settings."""
        self._form = packed_as
        self._pack_size = pack_size or 0
        self._alignment = alignment
        self._pad_to = pack_size if pad_rows else None
        self._family = _Family(model_config)
        self._sequence_metadata = sequence_metadata

    def __call__(self, rows: Sequence[Sequence[Mapping[str, Any]]], processor: Any) -> dict[str, Any]:
        """Return the batch."""
        pad_id, rule = pad_id_of(processor), self._family.rule(processor)
        packs = [self._pack(row, pad_id, rule) for row in rows]
        if self._form == "thd":
            return packed_sequence_thd_vlm_collater(packs, pad_id, self._pad_to)
        contract = PackingContract(self._form, self._sequence_metadata)
        return neat_packed_vlm_collater(packs, pad_id, self._pad_to, packing=contract)

    def _pack(self, row: Sequence[Mapping[str, Any]], pad_id: int, rule: Positions | None) -> dict[str, Any]:
        samples = [shift_sample(_with_positions(sample, rule), has_mrope=rule is not None) for sample in row]
        return build_packed_vlm_sample(
            samples, self._pack_size, pad_id, has_mrope=rule is not None, sequence_alignment=self._alignment
        )


def _with_positions(sample: Mapping[str, Any], rule: Positions | None) -> Mapping[str, Any]:
    return sample if rule is None else {**sample, "position_ids": rule(sample)}
