"""From the bytes of samples to the tensors of one micro-batch: encode each sample, then pack or pad rows.

A row without a usable sample (a filler of the last step, or a hole left by bad samples) is built from a fixed tiny
conversation whose labels are all ignored, so every row has tokens and every rank runs the same layers.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vlm_stream.encode import IGNORE
from vlm_stream.errors import BadSampleError
from vlm_stream.shards import is_text_member, to_conversation
from vlm_stream.tokens import MediaSizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.encode import Encoder
    from vlm_stream.shards import FieldMap
    from vlm_stream.stream.collators import Collator

__all__ = ["RowBuilder"]

_FILLER = [
    {"role": "user", "content": [{"type": "text", "text": "-"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "-"}]},
]


class RowBuilder:
    """Encodes samples and joins them into batches."""

    def __init__(self, encoder: Encoder, collator: Collator, *, with_refs: bool = False, pixels: bool = True) -> None:
        """Take the encoder of the family and the way in which rows are joined; without pixels, refuse some families."""
        self._encoder = encoder
        self._collator = collator
        self.with_refs = with_refs
        self.pixels = pixels
        if not pixels:
            _ = encoder.blind

    def encode(self, members: Mapping[str, memoryview], fields: FieldMap) -> dict[str, Any]:
        """Turn the members of one sample into tensors; raise `BadSampleError` when that cannot be done."""
        texts = {name: bytes(content) for name, content in members.items() if is_text_member(name)}
        return self._encoder.encode(to_conversation(fields, list(members), texts), members)

    def encode_text(
        self, members: Mapping[str, memoryview], fields: FieldMap, names: Sequence[str], sizes: MediaSizes
    ) -> dict[str, Any]:
        """Do the same without media: from the text member, the names of all members and the sizes of the media."""
        texts = {name: bytes(content) for name, content in members.items() if is_text_member(name)}
        return self._encoder.encode_from_sizes(to_conversation(fields, names, texts), sizes)

    def collate(
        self, rows: Sequence[Sequence[dict[str, Any]]]
    ) -> tuple[dict[str, Any], list[tuple[int, int, BadSampleError]]]:
        """Join rows into a batch; also name (row, position) of each sample that did not fit its row after all."""
        fitting: list[list[dict[str, Any]]] = []
        overflowed: list[tuple[int, int, BadSampleError]] = []
        for number, samples in enumerate(rows):
            row: list[dict[str, Any]] = []
            num_tokens = 0
            for position, sample in enumerate(samples):
                length = len(sample["input_ids"])
                if self._collator.capacity is not None and num_tokens + length > self._collator.capacity:
                    overflowed.append((number, position, self._overflow(num_tokens, length)))
                    continue
                row.append(sample)
                num_tokens += length
            # A copy: what leaves may be changed by whoever gets it.
            fitting.append(row or [copy.deepcopy(self._filler)])
        return self._collator(fitting), overflowed

    @cached_property
    def _filler(self) -> dict[str, Any]:
        encoder = self._encoder
        sample = encoder.encode(_FILLER, {}) if self.pixels else encoder.encode_from_sizes(_FILLER, MediaSizes())
        sample["labels"] = sample["labels"].new_full(sample["labels"].shape, IGNORE)
        return sample

    def _overflow(self, num_tokens: int, length: int) -> BadSampleError:
        return BadSampleError(
            "fit",
            "pack_overflow",
            f"it has {length} tokens, but its pack already holds {num_tokens} of {self._collator.capacity}: the index "
            f"counted fewer. Count again with 'vlm-stream recount --processor ...' or lower packing_ratio",
        )
