"""What pages ask of the samples of a shard, as columns, and which of them match a query.

Enters: the index of a shard, and lengths by the plan's geometry. Leaves: `ShardFacts`, some bytes for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.format import ShardIndex, Totals

KINDS: Final = {"image": 1, "video": 2, "audio": 4}
"""Bits of `ShardFacts.kinds`; 0 is text alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which samples are asked for; what is empty does not matter."""

    source: str = ""
    entry: str = ""
    kind: str = ""
    """`text` alone, or a medium that the sample has."""
    tokens_from: int | None = None
    tokens_to: int | None = None
    text: str = ""

    @property
    def is_empty(self) -> bool:
        """Tell whether every sample matches."""
        return self == Query()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardFacts:
    """What pages ask of the n samples of a shard."""

    tokens: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.uint8]
    entry: npt.NDArray[np.uint16]
    entry_names: tuple[str, ...]
    decode: npt.NDArray[np.float32]
    """[n] Megapixels of images and of all frames of clips: what decoding goes through."""
    pixels: npt.NDArray[np.int64]
    """[images] Height times width."""
    pixel_rows: npt.NDArray[np.int32]
    """[images] Of which sample."""
    seconds: npt.NDArray[np.float32]
    """[clips and sounds]"""
    second_rows: npt.NDArray[np.int32]
    """[clips and sounds] Of which sample."""
    entries: dict[str, tuple[Totals, int]]
    """What each entry adds up to, and its tokens."""

    def match(self, query: Query) -> npt.NDArray[np.int64]:
        """Return the rows that match, as far as the index tells."""
        chosen = np.ones(len(self.tokens), dtype=bool)
        if query.entry:
            place = self.entry_names.index(query.entry) if query.entry in self.entry_names else -1
            chosen &= self.entry == place
        if query.kind == "text":
            chosen &= self.kinds == 0
        elif query.kind:
            chosen &= (self.kinds & KINDS[query.kind]) > 0
        if query.tokens_from is not None:
            chosen &= self.tokens >= query.tokens_from
        if query.tokens_to is not None:
            chosen &= self.tokens <= query.tokens_to
        return np.flatnonzero(chosen)


def facts_of(index: ShardIndex, rows: Sequence[int], tokens: npt.NDArray[np.int64]) -> ShardFacts:
    """Return the facts of the rows of an index that are shown."""
    shown = np.zeros(len(index), dtype=bool)
    shown[rows] = True
    media = index.columns.select(shown)
    (image_splits, images), (video_splits, videos), (audio_splits, audios) = media[2:]
    pixels = images["height"].astype(np.int64) * images["width"]
    frames = videos["frames"].astype(np.int64) * videos["height"] * videos["width"]
    rates = np.maximum(audios["rate"].astype(np.float64), 1.0)
    seconds = np.concatenate([videos["seconds"].astype(np.float32), (audios["samples"] / rates).astype(np.float32)])
    kinds = np.zeros(media.num_samples, dtype=np.uint8)
    for bit, splits in zip(KINDS.values(), (image_splits, video_splits, audio_splits), strict=True):
        kinds |= np.where(np.diff(splits.astype(np.int64)) > 0, bit, 0).astype(np.uint8)
    entry, totals = index.entry[shown].astype(np.uint16), index.entries()
    lengths = np.bincount(entry, weights=tokens, minlength=len(index.entry_names))
    named = {index.entry_names[number]: int(lengths[number]) for number in np.unique(entry).tolist()}
    return ShardFacts(
        tokens=np.minimum(tokens, 2**31 - 1).astype(np.int32),
        kinds=kinds,
        entry=entry,
        entry_names=index.entry_names,
        decode=((_sums(pixels, image_splits) + _sums(frames, video_splits)) / 1e6).astype(np.float32),
        pixels=pixels,
        pixel_rows=_rows(image_splits),
        seconds=seconds,
        second_rows=np.concatenate([_rows(video_splits), _rows(audio_splits)]),
        entries={name: (totals[name], length) for name, length in named.items()},
    )


def _rows(splits: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    counts: npt.NDArray[np.int64] = splits[1:].astype(np.int64) - splits[:-1].astype(np.int64)
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _sums(values: npt.NDArray[np.int64], splits: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    ends = np.concatenate([[0], np.cumsum(values)])
    sums: npt.NDArray[np.int64] = ends[splits[1:].astype(np.int64)] - ends[splits[:-1].astype(np.int64)]
    return sums
