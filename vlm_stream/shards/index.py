"""The index of a shard: rows to Parquet bytes, and back to numpy columns.

Enters: `SampleRow`s, or a store and a manifest's entry. Leaves: bytes, or a `ShardIndex`: the columns that token
counting and planning need, and the byte range of every sample. No tar is opened here.

Compression is zstd and only member names are dictionary-encoded: for 1,000 samples that is 28 KB, against 100 KB
without compression; a run reads hundreds of these, often from an object store.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import DatasetError, NotFoundError
from vlm_stream.shards.columns import to_array
from vlm_stream.shards.index_columns import (
    MEDIA,
    MEMBER_NAME,
    PLACE_NAMES,
    PlanColumns,
    SamplePlaces,
    plan_names,
    read_table,
)
from vlm_stream.shards.layout import index_name
from vlm_stream.shards.rows import SampleCounts
from vlm_stream.shards.schema import index_schema
from vlm_stream.shards.shard_list import ShardEntry, Totals
from vlm_stream.storage import Member, Span
from vlm_stream.tokens import AudioSize, ImageSize, MediaSizes, VideoSize

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from vlm_stream.shards.rows import SampleRow
    from vlm_stream.storage import Store
    from vlm_stream.tokens import MediaColumns

__all__ = [
    "ShardIndex",
    "check_index",
    "decode_index",
    "encode_index",
    "fetch_index",
    "open_index",
    "read_index",
    "recounted_index",
    "write_table",
]


@dataclass(frozen=True, kw_only=True, eq=False)  # no slots: columns are kept once they were asked for
class ShardIndex:
    """The index of one shard with n samples."""

    load_media: Callable[[], MediaColumns]
    """Returns the sizes of media and the counts of text."""
    offset: npt.NDArray[np.signedinteger[Any]]
    """[n] First byte of the sample in the shard; of 32 bits where it comes from a joint index of small shards."""
    size: npt.NDArray[np.signedinteger[Any]]
    """[n] Length of its byte range; likewise."""
    load_places: Callable[[], SamplePlaces]
    """Returns where samples and their members lie."""
    first: int = 0
    """The row of the first sample there."""
    root: str = ""
    """URL of the folder that the shard's path is relative to."""
    path: str = ""
    shard_size: int | None = None
    etag: str | None = None

    @cached_property
    def media(self) -> MediaColumns:
        """Return text counts and media sizes."""
        return self.load_media()

    @cached_property
    def places(self) -> SamplePlaces:
        """Return where samples and their members lie, maybe among those of other shards."""
        return self.load_places()

    @property
    def keys(self) -> list[str]:
        """Return [n] what the samples are called."""
        return list(map(self.key, range(len(self))))

    @property
    def crc32c(self) -> list[int]:
        """Return [n] the checksums of the samples' ranges."""
        sums: list[int] = self.places.crc32c[self.first : self.first + len(self)].tolist()
        return sums

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.offset)

    def key(self, row: int) -> str:
        """Return one sample's key."""
        return self.places.key(self._place(row))

    def _place(self, row: int) -> int:
        """Return a row among the places, which may go on with those of other shards."""
        if not 0 <= row < len(self.offset):
            raise IndexError(f"{self.path} has {len(self.offset)} samples, and none at {row}")
        return self.first + row

    def members(self, row: int) -> tuple[Member, ...]:
        """Return one sample's files, in tar order."""
        return tuple(map(Member._make, self.places.members(self._place(row))))

    def sizes(self, row: int) -> MediaSizes:
        """Return the sizes of one sample's media; which frames it names itself is in its JSON alone."""
        media = self.media
        image, video, audio = (
            slice(*splits[row : row + 2].tolist())
            for splits in (media.image_splits, media.video_splits, media.audio_splits)
        )
        videos = zip(
            media.video_sizes[video].tolist(),
            media.video_fps[video].tolist(),
            media.video_seconds[video].tolist(),
            media.video_picked[video].tolist(),
            strict=True,
        )
        return MediaSizes(
            images=tuple(ImageSize(height=h, width=w) for h, w in media.image_sizes[image].tolist()),
            videos=tuple(
                VideoSize(frames=n, height=h, width=w, fps=fps, seconds=seconds, picked=tuple(range(picked)))
                for (n, h, w), fps, seconds, picked in videos
            ),
            audios=tuple(AudioSize(samples=n, rate=rate) for n, rate in media.audio_sizes[audio].tolist()),
        )

    def span(self, row: int) -> Span:
        """Return where one sample's bytes lie."""
        places, place = self.places, self._place(row)
        offset, size, crc = self.offset.item(row), self.size.item(row), places.crc32c[place]
        return Span(self.root, self.path, offset, size, crc, places.members(place), self.shard_size, self.etag)

    def member_span(self, row: int, name: str) -> Span:
        """Return where one member of a sample lies; where the whole sample lies if it has no such member.

        The index has a checksum of whole samples alone, so the bytes of a single member cannot be checked.
        """
        whole = self.span(row)
        member = next((member for member in self.members(row) if member.name == name), None)
        if member is None:
            return whole
        return whole._replace(offset=member.offset, size=member.size, crc32c=None, members=(member,))

    def totals(self, num_bytes: int) -> Totals:
        """Add the samples up, for the manifest's entry of a tar of `num_bytes`."""
        media = self.media
        per_sample = np.diff(media.image_splits) + np.diff(media.video_splits) + np.diff(media.audio_splits)  # [n]
        rates = media.audio_sizes[:, 1]
        heard = rates > 0
        return Totals(
            samples=len(self),
            bytes=num_bytes,
            text_tokens=int(media.text_tokens.sum()),
            label_tokens=int(np.maximum(media.label_tokens, 0).sum()),
            text_only=int((per_sample == 0).sum()),
            images=len(media.image_sizes),
            image_pixels=int(media.image_sizes.prod(axis=1).sum()),
            videos=len(media.video_sizes),
            video_frames=int(media.video_sizes[:, 0].sum()),
            video_seconds=round(float(media.video_seconds.sum()), 6),
            audios=len(rates),
            audio_seconds=round(float((media.audio_sizes[heard, 0] / rates[heard]).sum()), 6),
        )


def encode_index(rows: Sequence[SampleRow]) -> bytes:
    """Return the Parquet bytes of rows; the same rows give the same bytes."""
    import pyarrow as pa

    schema = index_schema()
    columns = zip(*(row.to_tuple() for row in rows), strict=True) if rows else [[] for _ in schema.names]
    arrays = [to_array(list(values), field.type) for values, field in zip(columns, schema, strict=True)]
    return write_table(pa.table(arrays, schema=schema))


def write_table(table: pa.Table) -> bytes:
    """Return the Parquet bytes of a table of this schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=max(table.num_rows, 1),
        compression="zstd",
        use_dictionary=[MEMBER_NAME],
        write_statistics=False,
        store_schema=False,
    )
    return bytes(sink.getvalue())


def recounted_index(data: bytes, counts: Sequence[SampleCounts]) -> bytes:
    """Return an index with other counts and all else as it was."""
    import pyarrow as pa

    table = read_table(data, "index")
    for name in SampleCounts._fields:
        values = [getattr(sample, name) for sample in counts]
        table = table.set_column(table.schema.get_field_index(name), name, to_array(values, pa.int32()))
    return write_table(table)


def decode_index(data: bytes, *, where: str = "index", media: Collection[str] = MEDIA) -> ShardIndex:
    """Read the Parquet bytes of an index; `media` are the kinds that the shard has, where that is known."""
    columns = PlanColumns(read_table(data, where, plan_names(media)), where, media)
    taken = columns.take(slice(0, len(columns)))
    return ShardIndex(
        load_media=lambda: taken,
        offset=columns.offset,
        size=columns.size,
        load_places=lambda: SamplePlaces(read_table(data, where, PLACE_NAMES), where),
    )


def read_index(store: Store, shard: ShardEntry, *, tars: str = "") -> ShardIndex:
    """Read the index of one shard and check it against the manifest.

    Args:
        store: The dataset's store.
        shard: The shard's entry in the manifest.
        tars: `Manifest.tars`: the folder of the tars, where it is not the dataset's own.

    Raises:
        DatasetError: The index is missing, damaged, or not the one that the manifest describes.
    """
    return open_index(fetch_index(store, shard), store, shard, tars=tars)


def fetch_index(store: Store, shard: ShardEntry) -> bytes:
    """Return the bytes of a shard's index: the part of `read_index` that waits.

    Raises:
        DatasetError: The index is missing.
    """
    name = index_name(shard.name)
    try:
        return bytes(store.get(name))
    except NotFoundError as error:
        raise DatasetError(
            f"{store.root}/{name} is missing, so {shard.name} cannot be read. Copy it here, or write it with: "
            f"vlm-stream index"
        ) from error


def check_index(data: bytes, store: Store, shard: ShardEntry) -> str:
    """Return what messages call an index; raise `DatasetError` where it is not the one that the manifest describes."""
    where = f"{store.root}/{index_name(shard.name)}"
    if hashlib.sha256(data).hexdigest() != shard.index_sha256:
        raise DatasetError(
            f"{where} is not the index that the manifest describes: it was replaced, or a recount was interrupted. "
            f"Run the recount again, or: vlm-stream index"
        )
    return where


def open_index(data: bytes, store: Store, shard: ShardEntry, *, tars: str = "") -> ShardIndex:
    """Check the bytes of a shard's index against the manifest and decode them: the part of `read_index` that computes.

    Raises:
        DatasetError: The index is damaged, or not the one that the manifest describes.
    """
    where = check_index(data, store, shard)
    index = decode_index(data, where=where, media=[kind for kind in MEDIA if getattr(shard.totals, kind)])
    if len(index) != shard.totals.samples:
        raise DatasetError(f"{where} has {len(index)} samples, the manifest says {shard.totals.samples}.")
    return replace(index, root=tars or store.root, path=shard.name, shard_size=shard.totals.bytes, etag=shard.etag)
