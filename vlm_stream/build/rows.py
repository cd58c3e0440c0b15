"""Samples become rows, and rows a batch: encode each sample, then pack or pad; or hand out the bytes as they are.

A row without a usable sample (a filler of the last step, or a hole left by bad samples) is built from a fixed tiny
conversation whose labels are all ignored, so every row has tokens and every rank runs the same layers.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vlm_stream.build.collators import CustomCollator
from vlm_stream.conversation import map_media
from vlm_stream.encode import IGNORE, inject_fake_image, make_fake_image, name_frames, text_from_bytes, unpack_text
from vlm_stream.errors import BadSampleError, ConfigError, blame_sample, shorten
from vlm_stream.format import FieldMap, is_text_member, read_sample, read_tokens, to_conversation
from vlm_stream.tokens import MediaSizes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.blueprint import Piece
    from vlm_stream.build.collators import Collator
    from vlm_stream.conversation import Conversation
    from vlm_stream.encode import Encoder, KeptText
    from vlm_stream.options import StreamOptions
    from vlm_stream.storage import SpanResult

logger = logging.getLogger(__name__)

_FILLER = [
    {"role": "user", "content": [{"type": "text", "text": "-"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "-"}]},
]
_TEXT_ALONE = ("json",)
_NOT_COLLATED = ("encode", "not_collated", "its tensors cannot be put into a batch")


class RowBuilder:
    """Encodes samples and joins them into batches."""

    def __init__(self, encoder: Encoder, collator: Collator, *, pixels: bool = True, text_key: str = "") -> None:
        """Take the encoder of the family and the way in which rows are joined; without pixels, refuse some families.

        `text_key` is that of the kept text which may be used.
        """
        self._encoder = encoder
        self._collator = collator
        self._pixels = pixels
        self._text_key = text_key
        self._has_said_other = self._has_said_unread = False
        if not pixels:
            _ = encoder.grid_processor

    def encode(
        self,
        members: Mapping[str, memoryview],
        fields: FieldMap,
        piece: Piece,
        _source: str,
        text: SpanResult | None = None,
    ) -> dict[str, Any]:
        """Turn the members of one sample into tensors; raise `BadSampleError` when that cannot be done.

        Without pixels only the text is there; the names of the other members and the sizes of the media stand in.
        `text` is what was read of the tokens that are kept beside the index.
        """
        is_text_alone = self._pixels and fields.layout == "native" and piece.members == _TEXT_ALONE
        if is_text_alone and text is None and self._encoder.trusts_texts:
            tokens = read_tokens(bytes(members["json"]))
            sample = self._encoder.encode_text(unpack_text(tokens, self._text_key))
            if sample is not None:
                return sample
        conversation, tokens = read_sample(fields, piece.members, _texts(members))
        kept = self._kept(conversation, tokens, piece, text) if self._pixels else None
        return self._encode(name_frames(conversation, piece.sizes), members, piece.sizes, kept)

    def _kept(self, conversation: Conversation, tokens: Any, piece: Piece, text: SpanResult | None) -> KeptText | None:
        """Return the tokens of a text as they were kept, beside the index or in the sample itself."""
        kept = None
        if text is not None:
            reason = "they are not of this sample as it is now"
            if isinstance(text, BadSampleError):
                reason = "they are missing, or not those that the index describes"
            kept = None if isinstance(text, BadSampleError) else text_from_bytes(text[""], conversation)
            if kept is None and not self._has_said_unread:
                self._has_said_unread = True
                logger.warning(
                    "the tokens of %s in %s cannot be used (%s), so such samples are tokenised in training, to the "
                    "same result; write them again with: vlm-stream recount",
                    piece.key,
                    piece.text[0].path,
                    reason,
                )
        if kept is None and tokens is not None:
            kept = unpack_text(tokens, self._text_key)
        if tokens is not None and kept is None and not self._has_said_other:
            self._has_said_other = True
            logger.info(
                "the text that conversion has tokenised is of another tokenizer, template or release (%s, not %s), "
                "so samples are tokenised in training, to the same result",
                shorten(str(tokens.get("key"))),
                self._text_key,
            )
        return kept

    def _encode(
        self, conversation: Conversation, members: Mapping[str, Any], sizes: MediaSizes, kept: KeptText | None = None
    ) -> dict[str, Any]:
        if not self._pixels:
            return self._encoder.encode_from_sizes(conversation, sizes)
        return self._encoder.encode(conversation, members, kept)

    def count_tokens(self, rows: Sequence[Sequence[dict[str, Any]]], _planned: int) -> int:
        """Return the tokens of encoded samples."""
        return sum(len(sample["input_ids"]) for row in rows for sample in row)

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
                length = len(sample["input_ids"]) if self._collator.capacity is not None else 0
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
        """Return one short turn of plain text without labels, with a white image where the family refuses text."""
        errors = []
        for conversation in (_FILLER, inject_fake_image(_FILLER)):
            try:
                sample = self._encode(conversation, {}, MediaSizes())
            except BadSampleError as error:
                errors.append(error)
            else:
                sample["labels"] = sample["labels"].new_full(sample["labels"].shape, IGNORE)
                return sample
        raise ConfigError(
            f"the processor cannot encode one short turn of plain text, which fills rows without a sample, so it can "
            f"hardly encode any: {errors[0]} Look at its chat template, and at max_length or pack_size."
        ) from errors[0]

    def _overflow(self, num_tokens: int, length: int) -> BadSampleError:
        return BadSampleError(
            "fit",
            "pack_overflow",
            f"it has {length} tokens, but its pack already holds {num_tokens} of {self._collator.capacity}: the index "
            f"counted fewer. Count again with 'vlm-stream recount --processor ...' or lower packing_ratio",
        )


class ExampleRows(RowBuilder):
    """Rows of conversations, media as bytes, for a registered function that encodes and joins them itself."""

    def encode(
        self,
        members: Mapping[str, memoryview],
        fields: FieldMap,
        piece: Piece,
        _source: str,
        _text: SpanResult | None = None,
    ) -> dict[str, Any]:
        """Return `{"conversation": ...}`."""
        conversation = name_frames(to_conversation(fields, piece.members, _texts(members)), piece.sizes)
        return {"conversation": _with_bytes(conversation, members)}

    def count_tokens(self, _rows: Sequence[Sequence[dict[str, Any]]], planned: int) -> int:
        """Return the tokens that the index promised: nothing was encoded."""
        return planned

    def _join(self, rows: Sequence[Sequence[dict[str, Any]]], places: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Collate; what is learned of a filler is taken out afterwards."""
        batch = super()._join(rows, places)
        fillers = [number for number, row in enumerate(places) if not row]
        labels = batch.get("labels")
        if fillers and isinstance(labels, Tensor) and len(labels) == len(places):
            labels[fillers] = IGNORE
        return batch

    @cached_property
    def _filler(self) -> dict[str, Any]:
        """Return a short turn with a white image, which every vision-language family takes."""
        return {"conversation": inject_fake_image(_FILLER, make_fake_image())}


def _with_bytes(conversation: Conversation, members: Mapping[str, Any]) -> Conversation:
    """Return a conversation whose media items hold the bytes that they named."""

    def fill(where: Any) -> Any:
        if isinstance(where, list | tuple):
            return [fill(each) for each in where]
        return bytes(members[where]) if isinstance(where, str) and where in members else where

    return map_media(conversation, lambda item: {**item, item["type"]: fill(item[item["type"]])})


@dataclass(slots=True)  # not a tuple, which torch would take apart
class RawSample:
    """One sample as it lies in its shard, its checksum verified."""

    source: str
    shard: str
    key: str
    members: Mapping[str, bytes | memoryview]
    """Names (`json`, `0.jpg`) with their bytes; views of what was fetched, until the sample leaves its process."""
    fields: FieldMap
    entry: str = ""
    """Of the meta file, or the file that it came from."""
    id: str | None = None
    """Its own; None: it has none."""

    def conversation(self, *, names: bool = False) -> list[dict[str, Any]]:
        """Return its messages; media items hold the media's bytes, or with `names` the names of their members."""
        messages = to_conversation(self.fields, list(self.members), _texts(self.members))
        return messages if names else _with_bytes(messages, self.members)

    def __reduce__(self) -> tuple[Any, ...]:
        members = {name: bytes(content) for name, content in self.members.items()}
        return RawSample, (self.source, self.shard, self.key, members, self.fields, self.entry, self.id)


class RawRows:
    """Rows without a processor: `{"samples": rows}`, or what the user's `collate` makes of the rows.

    A packed row is a list of samples, any other row a sample; what is bad is left out.
    """

    def __init__(self, options: StreamOptions) -> None:
        """Refuse options that only an encoded batch can have."""
        needs = [name for name in ("fake_image", "pp_microbatches") if getattr(options, name)]
        needs += ["pixels"] * (options.pixels not in ("full", True))
        if needs:
            raise ConfigError(
                f"without a processor batches are bytes, so {' and '.join(needs)} cannot be honoured; "
                f"name a processor, or leave {'it' if len(needs) == 1 else 'them'} out"
            )
        if isinstance(options.collate, str) and options.collate != "auto":
            raise ConfigError(
                f"without a processor batches are bytes, so collate={options.collate!r} has nothing to join; name a "
                f"processor, or give a function"
            )
        function = options.collate if callable(options.collate) else _as_they_are
        self._collator = CustomCollator(function, None, options)

    def encode(
        self,
        members: Mapping[str, memoryview],
        fields: FieldMap,
        piece: Piece,
        source: str,
        _text: SpanResult | None = None,
    ) -> RawSample:
        """Return the sample as it is."""
        return RawSample(source, piece.span.path, piece.key, members, fields, piece.entry, piece.id)

    def collate(
        self, rows: Sequence[Sequence[RawSample]]
    ) -> tuple[dict[str, Any], list[tuple[int, int, BadSampleError]]]:
        """Join rows into a batch; all of them fit."""
        return self._collator(rows), []

    def count_tokens(self, _rows: Sequence[Sequence[RawSample]], planned: int) -> int:
        """Return the tokens that the index promised: nothing was encoded."""
        return planned


def _as_they_are(rows: Sequence[Any], _processor: Any) -> dict[str, Any]:
    return {"samples": list(rows)}


def _texts(members: Mapping[str, bytes | memoryview]) -> dict[str, bytes]:
    return {name: bytes(content) for name, content in members.items() if is_text_member(name)}
