"""What plans need of a shard: token counts and sizes of media, column by column.

Enters: the Parquet bytes of an index. Leaves: `ShardMedia`, which can be narrowed to some samples, added up, and joined
to the `MediaColumns` of many shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from vlm_stream.format.manifest import Totals
from vlm_stream.format.table import list_numbers, numbers_of, one_array, read_table, wrong_index
from vlm_stream.tokens import MediaColumns

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]
    Numbers = npt.NDArray[Any]

__all__ = [
    "COUNTS",
    "MEDIA",
    "ShardMedia",
    "decode_media",
    "entries_of",
    "is_entry",
    "join_media",
    "media_kinds",
    "media_of",
]

MEDIA: Final = {
    "images": ("height", "width"),
    "videos": ("frames", "height", "width", "fps", "seconds", "picked"),
    "audios": ("samples", "rate"),
}
"""Columns of media, and the fields of their items."""
COUNTS: Final = ("text_tokens", "label_tokens")

Lists: TypeAlias = "tuple[Numbers, dict[str, Numbers]]"
"""[n + 1] splits, and fields of the items: row r owns the items `splits[r]:splits[r + 1]`."""


class ShardMedia(NamedTuple):
    """What plans need of the n samples of a shard; numbers of any width."""

    text_tokens: Numbers
    label_tokens: Numbers
    images: Lists
    videos: Lists
    audios: Lists

    def __len__(self) -> int:  # type: ignore[override]
        """Return the number of samples."""
        return len(self.text_tokens)

    def select(self, chosen: npt.NDArray[np.bool_]) -> ShardMedia:
        """Return what is known of the chosen samples alone."""

        def lists(splits: Numbers, fields: dict[str, Numbers]) -> Lists:
            counts = np.diff(splits)
            items = np.repeat(chosen, counts)
            ends = np.concatenate([[0], np.cumsum(counts[chosen], dtype=np.int64)])
            return ends, {name: values[items] for name, values in fields.items()}

        return ShardMedia(self.text_tokens[chosen], self.label_tokens[chosen], *(lists(*each) for each in self[2:]))

    def totals(self, num_bytes: int) -> Totals:
        """Add the samples up; together they have `num_bytes`."""
        (image_splits, images), (video_splits, videos), (audio_splits, audios) = self[2:]
        splits = np.stack([image_splits, video_splits, audio_splits]).astype(np.int64)
        rates = audios["rate"].astype(np.int64)
        heard = rates > 0
        return Totals(
            samples=len(self),
            bytes=num_bytes,
            text_tokens=int(self.text_tokens.sum(dtype=np.int64)),
            label_tokens=int(np.maximum(self.label_tokens, 0).sum(dtype=np.int64)),
            text_only=int((np.diff(splits).sum(axis=0) == 0).sum()),
            images=len(images["height"]),
            image_pixels=int((images["height"].astype(np.int64) * images["width"]).sum()),
            videos=len(videos["frames"]),
            video_frames=int(videos["frames"].sum(dtype=np.int64)),
            video_seconds=round(float(videos["seconds"].sum()), 6),
            audios=len(rates),
            audio_seconds=round(float((audios["samples"][heard] / rates[heard]).sum()), 6),
        )


def join_media(parts: Sequence[ShardMedia]) -> MediaColumns:
    """Return the samples of some shards, one shard after the other."""

    def join(arrays: Iterable[Numbers], dtype: type = np.int64) -> Numbers:
        return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)

    def splits(kind: str) -> Ints:
        counts = join(np.diff(getattr(part, kind)[0]) for part in parts)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def field(kind: str, name: str, dtype: type = np.int64) -> Numbers:
        return join((getattr(part, kind)[1][name] for part in parts), dtype)

    def sizes(kind: str, *names: str) -> Ints:
        return np.stack([field(kind, name) for name in names], axis=1)

    return MediaColumns(
        text_tokens=join(part.text_tokens for part in parts),
        label_tokens=join(part.label_tokens for part in parts),
        image_splits=splits("images"),
        image_sizes=sizes("images", "height", "width"),
        video_splits=splits("videos"),
        video_sizes=sizes("videos", "frames", "height", "width"),
        video_fps=field("videos", "fps", np.float64),
        video_seconds=field("videos", "seconds", np.float64),
        video_picked=field("videos", "picked"),
        audio_splits=splits("audios"),
        audio_sizes=sizes("audios", "samples", "rate"),
    )


def is_entry(entry: str, names: Sequence[str], numbers: Numbers) -> npt.NDArray[np.bool_]:
    """Tell [n] which samples came from an entry, by their places in the entries' names."""
    place = names.index(entry) if entry in names else -1
    return np.asarray(numbers == place)


def media_kinds(totals: Totals) -> tuple[str, ...]:
    """Return the columns of media that a shard has items in."""
    return tuple(kind for kind in MEDIA if getattr(totals, kind))


def decode_media(data: bytes, where: str, kinds: Sequence[str], entry: str | None = None) -> ShardMedia:
    """Read what plans need of the Parquet bytes of an index.

    Args:
        data: The bytes.
        where: What messages call them.
        kinds: Columns of media that are read; the others are taken to be empty.
        entry: Only the samples of this entry of the meta file; None: all.
    """
    if entry is None:
        return media_of(read_table(data, where, (*COUNTS, *kinds)), where)
    table = read_table(data, where, ("entry", *COUNTS, *kinds))
    with wrong_index(where):
        return media_of(table, where).select(is_entry(entry, *entries_of(table)))


def media_of(table: pa.Table, where: str) -> ShardMedia:
    """Return the columns of a table that plans need; kinds of media that it lacks are empty."""
    with wrong_index(where):
        media = [
            list_numbers(one_array(table.column(kind)), names)
            if kind in table.column_names
            else (np.zeros(table.num_rows + 1, np.uint8), dict.fromkeys(names, np.zeros(0, np.uint8)))
            for kind, names in MEDIA.items()
        ]
        return ShardMedia(*(numbers_of(one_array(table.column(name))) for name in COUNTS), *media)


def entries_of(table: pa.Table) -> tuple[tuple[str, ...], Numbers]:
    """Return the names of entries, and [n] their places among them."""
    column = one_array(table.column("entry"))
    return tuple(column.dictionary.to_pylist()), numbers_of(column.indices)
