"""Text that conversion has tokenised: ids of one sample and which of them are learned, kept in its JSON member.

What a recount or the indexing of tars made elsewhere has tokenised is kept as bytes, in a file beside the index.

Enters, at conversion: ids with one embedding token for each medium, and labels; leaves: a JSON value, or bytes. Enters,
in training: one of them and the decoded images; leaves: the token tensors that the encoder would make. Chat template,
tokenizer and the search for answers are then not needed: the processor's image part makes pixels, and the geometry
tells how many tokens each image takes.

Kept text is used for samples without media or with images only, of processors that write one token again and again
for an image (`repeats_one_token`). Before a kind of sample is trusted, a few of them are encoded both ways and compared
on every key; where one differs, that kind is encoded in full from then on.
"""

from __future__ import annotations

import base64
import json
import logging
import struct
import zlib
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import crc32c
import numpy as np

from vlm_stream.encode.control_tokens import placeholder_ids
from vlm_stream.keys import IGNORE
from vlm_stream.tokens import Geometry, count_image_tokens, repeats_one_token

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from vlm_stream.conversation import Conversation
    from vlm_stream.encode.load_media import LoadedMedia
    from vlm_stream.tokens import Processor

    Ints = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)

_LABEL_RULES: Final = 1
"""Raised when other tokens than before are learned of the same text: what was kept then is not used."""
_NUM_COMPARED: Final = 3
_TYPE_KEYS: Final = frozenset({"mm_token_type_ids", "token_type_ids"})
_MAX_TOKENS: Final = 1 << 24
"""A value that claims more is not read."""
_HEAD: Final = struct.Struct("<IIII")
"""crc32c of the conversation; how many ids, edges of what is learned, and numbers of the fake image."""
_MAX_RATIO: Final = 1032
"""More than that zlib does not compress anything."""


class KeptText(NamedTuple):
    """The text of one sample."""

    ids: Ints
    """[S]"""
    is_learned: npt.NDArray[np.bool_]
    """[S]"""
    fake: tuple[int, int, Ints] | None = None
    """What the image that stands for none changes: begin and end of a range, and the ids in its place."""

    def with_fake(self) -> KeptText | None:
        """Return the text as it is with that image; None where that was not kept."""
        if self.fake is None:
            return None
        begin, end, ids = self.fake
        not_learned = np.zeros(len(ids), dtype=bool)
        return KeptText(
            np.concatenate([self.ids[:begin], ids, self.ids[end:]]),
            np.concatenate([self.is_learned[:begin], not_learned, self.is_learned[end:]]),
        )


def kept_text_key(template_sha256: str, library: str | None = None) -> str:
    """Return what kept text depends on: chat template and tokenizer, the library around them, and our labels.

    The library is `transformers VERSION`, by default this one.
    """
    if library is None:
        import transformers

        library = transformers.__version__
    return f"{template_sha256[:16]}-{library.removeprefix('transformers ')}-{_LABEL_RULES}"


def pack_text(key: str, ids: Ints, labels: Ints, faked: tuple[Ints, Ints] | None = None) -> dict[str, Any]:
    """Return ids [S] and labels [S] as a JSON value; `faked`: those of the same text with a fake image."""
    is_learned = labels != IGNORE
    packed = zlib.compress(ids.astype("<u4").tobytes(), 6)
    value = {"key": key, "ids": base64.b64encode(packed).decode(), "learned": _edges(is_learned).tolist()}
    if faked is not None:
        begin, end, inserted = _difference(ids, faked[0])
        again = KeptText(ids, is_learned, (begin, end, inserted)).with_fake()
        if again is not None and np.array_equal(again.is_learned, faked[1] != IGNORE):
            value["fake"] = [begin, end, *inserted.tolist()]
    return value


def _edges(is_learned: npt.NDArray[np.bool_]) -> Ints:
    """Return where ranges of learned ids begin and end."""
    return np.flatnonzero(np.diff(is_learned, prepend=False, append=False))


def _difference(ids: Ints, other: Ints) -> tuple[int, int, Ints]:
    """Return the range of `ids` in which `other` has other ids, and these."""
    least = min(len(ids), len(other))
    begin = int(np.argmin(np.append(ids[:least] == other[:least], False)))
    least -= begin
    back = int(np.argmin(np.append(ids[::-1][:least] == other[::-1][:least], False)))
    return begin, len(ids) - back, other[begin : len(other) - back]


def unpack_text(value: Any, key: str) -> KeptText | None:
    """Return what `pack_text` was given; None for another tokenizer's, and for what it did not write."""
    if not isinstance(value, dict) or value.get("key") != key:
        return None
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(value["ids"]), _MAX_TOKENS * 4)
        ids = np.frombuffer(data, "<u4").astype(np.int64)
        if inflate.unconsumed_tail or not isinstance(value["learned"], list):
            return None
        return _assemble(ids, value["learned"], value.get("fake"))
    except (KeyError, TypeError, ValueError, OverflowError, zlib.error):
        return None


def _assemble(ids: Ints, edges: list[int], fake: Any) -> KeptText | None:
    """Return the text of its parts, or None where they do not fit each other."""
    if len(edges) % 2 or any(end < begin for begin, end in pairwise([0, *edges, len(ids)])):
        return None
    is_learned = np.zeros(len(ids), dtype=bool)
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        is_learned[begin:end] = True
    if fake is None:
        return KeptText(ids, is_learned)
    begin, end, *inserted = fake
    if not 0 <= begin <= end <= len(ids):
        return None
    return KeptText(ids, is_learned, (int(begin), int(end), np.array(inserted, dtype=np.uint32).astype(np.int64)))


def text_to_bytes(kept: KeptText, conversation: Conversation) -> bytes:
    """Return the text of a conversation as bytes, with a checksum of the conversation."""
    edges = _edges(kept.is_learned)
    fake = [] if kept.fake is None else [*kept.fake[:2], *kept.fake[2].tolist()]
    head = _HEAD.pack(_checksum(conversation), len(kept.ids), len(edges), len(fake))
    return head + zlib.compress(np.concatenate([kept.ids, edges, fake]).astype("<u4").tobytes(), 6)


def text_from_bytes(data: bytes | memoryview, conversation: Conversation) -> KeptText | None:
    """Return what `text_to_bytes` was given; None for another conversation's, and for what it did not write."""
    try:
        checksum, num_ids, num_edges, num_fake = _HEAD.unpack_from(data)
        num_bytes = 4 * (num_ids + num_edges + num_fake)
        if not num_ids or num_bytes > min(4 * _MAX_TOKENS, _MAX_RATIO * len(data)):
            return None
        if checksum != _checksum(conversation):
            return None
        inflate = zlib.decompressobj()
        numbers = np.frombuffer(inflate.decompress(data[_HEAD.size :], num_bytes), "<u4").astype(np.int64)
        if 4 * len(numbers) != num_bytes or inflate.unconsumed_tail:
            return None
        ids, edges, fake = np.split(numbers, [num_ids, num_ids + num_edges])
        return _assemble(ids, edges.tolist(), fake.tolist() if num_fake else None)
    except (struct.error, TypeError, ValueError, OverflowError, RecursionError, zlib.error):
        return None


def _checksum(conversation: Conversation) -> int:
    """Return a checksum of all that a text is made of, but the processor."""
    return crc32c.crc32c(json.dumps(conversation, default=repr).encode())


def kind_of_text(*, is_faked: bool) -> str:
    """Return the kind of samples without media of their own."""
    return "a fake image" if is_faked else "text"


class KeptTextReader:
    """Makes token tensors of kept text, for one processor."""

    def __init__(self, processor: Processor, make_pixels: Callable[[list[Any]], dict[str, Any]]) -> None:
        """Take the processor, and what makes pixels of images as its image part does."""
        self._make_pixels = make_pixels
        self._geometry = Geometry.from_processor(processor)
        placeholders = [token_id for token_id in placeholder_ids(processor) if token_id >= 0]
        self._is_placeholder = np.zeros(max(placeholders, default=0) + 2, dtype=bool)
        """By id; the last is for all higher ones."""
        self._is_placeholder[placeholders] = True
        self._keys: dict[str, tuple[str, ...]] = {}
        """Keys of a sample, for each kind."""
        self._image_type = 0
        """What the types of tokens are where an image is."""
        self._num_compared: dict[str, int] = {}

    def kind_of(self, loaded: LoadedMedia, *, is_faked: bool) -> str:
        """Return `text`, `images` or `a fake image`; nothing where the text is not kept, or was found to differ."""
        if loaded.videos or loaded.audios or (loaded.images and not repeats_one_token(self._geometry.image)):
            return ""
        kind = "images" if loaded.images and not is_faked else kind_of_text(is_faked=is_faked)
        return kind if self._num_compared.get(kind, 0) >= 0 else ""

    def is_trusted(self, kind: str) -> bool:
        """Tell whether enough samples of a kind were compared."""
        return self._num_compared.get(kind, 0) >= _NUM_COMPARED

    def learn(self, kind: str, sample: dict[str, Any], kept: KeptText, loaded: LoadedMedia) -> None:
        """Compare a sample that was encoded in full with what is read of its kept text."""
        if kind not in self._keys:
            self._keys[kind] = tuple(sample)
            is_image = self._is_placeholder.take(sample["input_ids"].numpy(), mode="clip")
            for key in _TYPE_KEYS & sample.keys() if is_image.any() else ():
                self._image_type = int(sample[key].numpy()[is_image][0])
        try:
            is_same = _is_same(self.read(kind, kept, loaded), sample)
        except Exception as error:  # a part may want more than images
            logger.debug("kept text of samples with %s cannot be used: %s", kind, error)
            is_same = False
        self._num_compared[kind] = self._num_compared.get(kind, 0) + 1 if is_same else -1
        if not is_same:
            logger.info("kept text of samples with %s is not what the processor gives: it is tokenised again", kind)

    def read(self, kind: str, kept: KeptText, loaded: LoadedMedia) -> dict[str, Any] | None:
        """Return the sample's tensors, labelled; None where text and images do not fit each other."""
        import torch

        ids, is_learned, _ = kept
        types = np.zeros(len(ids), dtype=np.int64)
        values: dict[str, Any] = {}
        is_placeholder = self._is_placeholder.take(ids, mode="clip")
        if np.count_nonzero(is_placeholder) != len(loaded.images):
            return None
        if loaded.images:
            repeats = np.ones(len(ids), dtype=np.int64)
            values = self._make_pixels(loaded.images)
            repeats[is_placeholder] = self._count_tokens(loaded.images, values)
            types[is_placeholder] = self._image_type
            ids, is_learned, types = np.repeat(ids, repeats), np.repeat(is_learned, repeats), np.repeat(types, repeats)
        columns = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "labels": np.where(is_learned, ids, IGNORE),
            **dict.fromkeys(_TYPE_KEYS, types),
        }
        return {key: torch.from_numpy(columns[key]) if key in columns else values[key] for key in self._keys[kind]}

    def _count_tokens(self, images: list[Any], values: dict[str, Any]) -> Any:
        """Return the tokens of each image: of its grid where there is one, else of its size."""
        grids, merge_size = values.get("image_grid_thw"), getattr(self._geometry.image, "merge_size", None)
        if grids is not None and merge_size is not None:
            return grids.numpy().prod(axis=1) // merge_size**2
        widths, heights = zip(*(image.size for image in images), strict=True)
        return count_image_tokens(heights, widths, self._geometry)


def _is_same(left: Any, right: Any) -> bool:
    """Compare two values in every part."""
    import torch

    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return bool(left == right)
