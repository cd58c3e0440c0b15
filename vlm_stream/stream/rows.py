"""From the bytes of samples to the tensors of one micro-batch: encode each sample, then pack or pad rows.

A row without a usable sample (a filler of the last step, or a hole left by bad samples) is built from a fixed tiny
conversation whose labels are all ignored, so every row has tokens and every rank runs the same layers.
"""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vlm_stream.encode import IGNORE
from vlm_stream.errors import BadSampleError, ConfigError, blame_sample
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
_NOT_COLLATED = ("encode", "not_collated", "its tensors cannot be put into a batch")


class RowBuilder:
    """Encodes samples and joins them into batches."""

    def __init__(self, encoder: Encoder, collator: Collator, *, with_refs: bool = False, pixels: bool = True) -> None:
        """Take the encoder of the family and the way in which rows are joined; without pixels, refuse some families."""
        self._encoder = encoder
        self._collator = collator
        self.with_refs = with_refs
        self.pixels = pixels
        if not pixels:
            _ = encoder.grid_processor

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
        """Join rows into a batch; also name (row, position) of each sample that did not fit its row after all.

        Where our own collation fails, those that fail alone as well are named and left out, too.
        """
        places: list[list[int]] = []
        bad: list[tuple[int, int, BadSampleError]] = []
        for number, samples in enumerate(rows):
            row: list[int] = []
            num_tokens = 0
            for position, sample in enumerate(samples):
                length = len(sample["input_ids"])
                if self._collator.capacity is not None and num_tokens + length > self._collator.capacity:
                    bad.append((number, position, self._overflow(num_tokens, length)))
                    continue
                row.append(position)
                num_tokens += length
            places.append(row)
        try:
            return self._join(rows, places), bad
        except Exception as error:
            if not self._collator.is_ours:
                raise
            blame_sample(error, *_NOT_COLLATED)  # raises again what no sample can be blamed for
            culprits = self._find_culprits(rows, places)
            if not culprits:
                raise
        left_out = {(number, position) for number, position, _ in culprits}
        places = [[at for at in row if (number, at) not in left_out] for number, row in enumerate(places)]
        return self._join(rows, places), bad + culprits

    def _join(self, rows: Sequence[Sequence[dict[str, Any]]], places: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Collate the samples at these places of the rows; a row without any gets the filler."""
        # A copy: what leaves may be changed by whoever gets it.
        chosen = ([rows[number][at] for at in row] for number, row in enumerate(places))
        return self._collator([row or [copy.deepcopy(self._filler)] for row in chosen])

    def _find_culprits(
        self, rows: Sequence[Sequence[dict[str, Any]]], places: Sequence[Sequence[int]]
    ) -> list[tuple[int, int, BadSampleError]]:
        """Return the samples that cannot be collated even alone, among fillers; none where fillers cannot either."""
        none: list[list[int]] = [[] for _ in rows]
        try:
            self._join(rows, none)
        except Exception:
            return []
        found = []
        for number, row in enumerate(places):
            for position in row:
                try:
                    self._join(rows, [*none[:number], [position], *none[number + 1 :]])
                except Exception as error:
                    found.append((number, position, blame_sample(error, *_NOT_COLLATED).bare()))
        return found

    @cached_property
    def _filler(self) -> dict[str, Any]:
        encoder = self._encoder
        try:
            sample = encoder.encode(_FILLER, {}) if self.pixels else encoder.encode_from_sizes(_FILLER, MediaSizes())
        except BadSampleError as error:
            raise ConfigError(
                f"the processor cannot encode one short turn of plain text, which fills rows without a sample, so it "
                f"can hardly encode any: {error} Look at its chat template, and at max_length or pack_size."
            ) from error
        sample["labels"] = sample["labels"].new_full(sample["labels"].shape, IGNORE)
        return sample

    def _overflow(self, num_tokens: int, length: int) -> BadSampleError:
        return BadSampleError(
            "fit",
            "pack_overflow",
            f"it has {length} tokens, but its pack already holds {num_tokens} of {self._collator.capacity}: the index "
            f"counted fewer. Count again with 'vlm-stream recount --processor ...' or lower packing_ratio",
        )
