"""What plans need of a shard: token counts and sizes of media, column by column.

Enters: the Parquet bytes of an index. Leaves: `ShardMedia`, which can be narrowed to some samples, added up, and joined
to the `MediaColumns` of many shards.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from vlm_stream.errors import DatasetError
from vlm_stream.format.checks import check_media
from vlm_stream.format.manifest import Totals
from vlm_stream.format.table import KEYFRAMES, list_numbers, numbers_of, one_array, read_table, wrong_index
from vlm_stream.tokens import MediaColumns, as_objects

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]
    Numbers = npt.NDArray[Any]

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

    @property
    def num_samples(self) -> int:
        """Return n."""
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
            samples=self.num_samples,
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
        return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)

    def splits(kind: str) -> Ints:
        counts = join(np.diff(getattr(part, kind)[0]) for part in parts)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    def field(kind: str, name: str, dtype: type = np.int64) -> Numbers:
        return join((getattr(part, kind)[1][name] for part in parts), dtype)

    def sizes(kind: str, *names: str) -> Ints:
        return np.stack([field(kind, name) for name in names], axis=1)

    has_keyframes = bool(parts) and all(KEYFRAMES in part.videos[1] for part in parts)
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
        video_gops=field("videos", "gops"),
        video_keyframes=field("videos", KEYFRAMES, object) if has_keyframes else None,
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


def decode_media(
    data: bytes,
    where: str,
    kinds: Sequence[str],
    entry: str | None = None,
    *,
    num_rows: int | None = None,
    keyframes: bool = False,
) -> ShardMedia:
    """Read what plans need of the Parquet bytes of an index.

    Args:
        data: The bytes.
        where: What messages call them.
        kinds: Columns of media that are read; the others are taken to be empty.
        entry: Only the samples of this entry of the meta file; None: all.
        num_rows: How many samples the manifest says, of all entries; None: any number.
        keyframes: Also which frames are keyframes; an index that does not tell is then an error.
    """
    names = (*COUNTS, *kinds, "gops", *((KEYFRAMES,) if keyframes else ()))
    table = read_table(data, where, names if entry is None else ("entry", *names), num_rows=num_rows)
    media = media_of(table, where, keyframes=keyframes)
    if entry is None:
        return media
    with wrong_index(where):
        return media.select(is_entry(entry, *entries_of(table)))


def media_of(table: pa.Table, where: str, *, keyframes: bool = False) -> ShardMedia:
    """Return the columns of a table that plans need; kinds of media that it lacks are empty."""
    with wrong_index(where):
        media = [
            list_numbers(one_array(table.column(kind)), names)
            if kind in table.column_names
            else (np.zeros(table.num_rows + 1, np.uint8), dict.fromkeys(names, np.zeros(0, np.uint8)))
            for kind, names in MEDIA.items()
        ]
        videos = media[1][1]
        known = "gops" in table.column_names
        videos["gops"] = (
            numbers_of(one_array(table.column("gops")).values) if known else np.zeros(len(videos["frames"]), np.uint8)
        )
        text, labels = (numbers_of(one_array(table.column(name))) for name in COUNTS)
        check_media((text, labels), {kind: values for kind, (_, values) in zip(MEDIA, media, strict=True)})
        if keyframes:
            videos[KEYFRAMES] = _keyframes_of(table, where, len(videos["frames"]))
        return ShardMedia(text, labels, *media)


def _keyframes_of(table: pa.Table, where: str, num_videos: int) -> Numbers:
    if KEYFRAMES not in table.column_names:
        if not num_videos:
            return np.empty(0, object)
        raise DatasetError(
            f"{where} does not tell which frames are keyframes, because it was written by an older release, so "
            f"frames='keyframes' cannot be planned; write it again, also that of a converted dataset, with: "
            f"vlm-stream index --overwrite"
        )
    lists = one_array(table.column(KEYFRAMES)).flatten()
    if len(lists) != num_videos or lists.null_count:
        raise ValueError(f"{len(lists)} lists of keyframes for {num_videos} videos")
    ends, numbers = numbers_of(lists.offsets), numbers_of(lists.values)
    # Copies: views would keep the whole column.
    return as_objects([numbers[begin:end].copy() for begin, end in pairwise(ends.tolist())])


def entries_of(table: pa.Table) -> tuple[tuple[str, ...], Numbers]:
    """Return the names of entries, and [n] their places among them."""
    column = one_array(table.column("entry"))
    return tuple(column.dictionary.to_pylist()), numbers_of(column.indices)
