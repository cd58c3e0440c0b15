"""The index of a shard: Parquet bytes to compact numpy columns.

Enters: a store and a manifest's entry, or bytes. Leaves: a `ShardIndex` with everything that is known of each sample;
or, for plans, only the `ShardMedia`: counts, sizes and byte ranges. No tar is opened here.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from vlm_stream.errors import DatasetError, NotFoundError
from vlm_stream.format.manifest import Totals, index_name
from vlm_stream.format.table import list_numbers, numbers_of, one_array, read_table, text_bytes, wrong_index
from vlm_stream.storage import Member, Span
from vlm_stream.tokens import AudioSize, ImageSize, MediaColumns, MediaSizes, VideoSize

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from vlm_stream.format.manifest import ShardEntry
    from vlm_stream.storage import Store

    Ints = npt.NDArray[np.int64]
    Numbers = npt.NDArray[Any]

__all__ = [
    "JoinedMedia",
    "ShardIndex",
    "ShardMedia",
    "check_index",
    "decode_index",
    "decode_media",
    "fetch_index",
    "media_kinds",
    "open_index",
    "read_index",
]

_MEDIA: Final = {
    "images": ("height", "width"),
    "videos": ("frames", "height", "width", "fps", "seconds", "picked"),
    "audios": ("samples", "rate"),
}
"""Columns of media, and the fields of their entries."""
_COUNTS: Final = ("offset", "size", "text_tokens", "label_tokens")


class ShardMedia(NamedTuple):
    """What plans need of the n samples of a shard; numbers of any width."""

    offset: Numbers
    """[n] First byte of the sample in the shard."""
    size: Numbers
    """[n] Length of its byte range."""
    text_tokens: Numbers
    label_tokens: Numbers
    images: tuple[Numbers, dict[str, Numbers]]
    """[n + 1] splits, and fields of the entries: row r owns the entries `splits[r]:splits[r + 1]`."""
    videos: tuple[Numbers, dict[str, Numbers]]
    audios: tuple[Numbers, dict[str, Numbers]]


class JoinedMedia:
    """`MediaColumns` of some shards, one after the other: allocated once, filled shard by shard, also by threads."""

    def __init__(self, totals: Sequence[Totals]) -> None:
        """Take what the manifest says of the shards."""

        def begins(counts: list[int]) -> list[int]:
            return [0, *np.cumsum(counts, dtype=np.int64).tolist()]

        self._rows = begins([shard.samples for shard in totals])
        self._entries = {kind: begins([getattr(shard, kind) for shard in totals]) for kind in _MEDIA}
        samples, images, videos, audios = (ends[-1] for ends in (self._rows, *self._entries.values()))
        self.offset: Ints = np.empty(samples, np.int64)
        """[n] First byte of each sample in its shard."""
        self.size: Ints = np.empty(samples, np.int64)
        """[n] Length of its byte range."""
        self.columns = MediaColumns(
            text_tokens=np.empty(samples, np.int64),
            label_tokens=np.empty(samples, np.int64),
            image_splits=np.zeros(samples + 1, np.int64),
            image_sizes=np.empty((images, 2), np.int64),
            video_splits=np.zeros(samples + 1, np.int64),
            video_sizes=np.empty((videos, 3), np.int64),
            video_fps=np.empty(videos, np.float64),
            video_seconds=np.empty(videos, np.float64),
            video_picked=np.empty(videos, np.int64),
            audio_splits=np.zeros(samples + 1, np.int64),
            audio_sizes=np.empty((audios, 2), np.int64),
        )

    def fill(self, number: int, media: ShardMedia, where: str) -> None:
        """Copy what the index of shard `number` says.

        Raises:
            DatasetError: It has other numbers of samples or media than the manifest says.
        """
        columns = self.columns
        rows = slice(*self._rows[number : number + 2])
        _check_count(where, "samples", len(media.offset), rows)
        self.offset[rows], self.size[rows] = media.offset, media.size
        columns.text_tokens[rows], columns.label_tokens[rows] = media.text_tokens, media.label_tokens
        splits_of = {"images": columns.image_splits, "videos": columns.video_splits, "audios": columns.audio_splits}
        at = {}
        for kind, begins in self._entries.items():
            splits, fields = getattr(media, kind)
            entries = at[kind] = slice(*begins[number : number + 2])
            _check_count(where, kind, len(next(iter(fields.values()))), entries)
            splits_of[kind][rows.start + 1 : rows.stop + 1] = splits[1:]
            splits_of[kind][rows.start + 1 : rows.stop + 1] += entries.start
        for kind, sizes in (("images", columns.image_sizes), ("videos", columns.video_sizes)):
            _fill_columns(sizes[at[kind]], getattr(media, kind)[1])
        _fill_columns(columns.audio_sizes[at["audios"]], media.audios[1])
        videos = media.videos[1]
        columns.video_fps[at["videos"]] = videos["fps"]
        columns.video_seconds[at["videos"]] = videos["seconds"]
        columns.video_picked[at["videos"]] = videos["picked"]


def _fill_columns(out: Ints, fields: dict[str, Numbers]) -> None:
    """Copy as many fields as `out` has columns."""
    for column, values in zip(range(out.shape[1]), fields.values(), strict=False):
        out[:, column] = values


def _check_count(where: str, what: str, found: int, listed: slice) -> None:
    if found != listed.stop - listed.start:
        raise DatasetError(f"{where} has {found} {what}, the manifest says {listed.stop - listed.start}.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardIndex:
    """The index of one shard with n samples. Numbers are as narrow as they can be: many indexes are kept."""

    columns: ShardMedia
    key_bytes: bytes
    key_splits: Numbers
    crc32c: Numbers
    """[n] Checksum of each sample's range."""
    member_splits: Numbers
    """[n + 1] Row r owns the members `member_splits[r]:member_splits[r + 1]`."""
    member_names: tuple[str, ...]
    member_name: Numbers
    """[members] Place in `member_names`."""
    member_offset: Numbers
    """[members] First content byte, counted from the first byte of the sample."""
    member_size: Numbers
    root: str = ""
    """URL of the folder that the shard's path is relative to."""
    path: str = ""
    shard_size: int | None = None
    etag: str | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.crc32c)

    @property
    def num_bytes(self) -> int:
        """Return how much memory the columns take."""
        media = self.columns
        arrays = [*media[:4], self.key_splits, self.crc32c, self.member_splits, self.member_name, self.member_offset]
        for splits, fields in (media.images, media.videos, media.audios):
            arrays += [splits, *fields.values()]
        return sum(array.nbytes for array in (*arrays, self.member_size)) + len(self.key_bytes)

    @property
    def offset(self) -> Ints:
        """Return [n] the first byte of each sample in the shard."""
        return self.columns.offset.astype(np.int64)

    @property
    def size(self) -> Ints:
        """Return [n] the length of each sample's byte range."""
        return self.columns.size.astype(np.int64)

    @property
    def keys(self) -> list[str]:
        """Return [n] what the samples are called."""
        return list(map(self.key, range(len(self))))

    @property
    def media(self) -> MediaColumns:
        """Return text counts and media sizes of all samples."""
        joined = JoinedMedia([self.totals(0)])
        joined.fill(0, self.columns, self.path)
        return joined.columns

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples, and none at {row}")

    def key(self, row: int) -> str:
        """Return one sample's key."""
        self._check(row)
        return str(self.key_bytes[self.key_splits.item(row) : self.key_splits.item(row + 1)], "utf-8")

    def members(self, row: int) -> tuple[Member, ...]:
        """Return one sample's files, in tar order."""
        self._check(row)
        at = slice(self.member_splits.item(row), self.member_splits.item(row + 1))
        begin = self.columns.offset.item(row)
        places = zip(
            self.member_name[at].tolist(), self.member_offset[at].tolist(), self.member_size[at].tolist(), strict=True
        )
        return tuple([Member(self.member_names[name], begin + offset, size) for name, offset, size in places])

    def span(self, row: int) -> Span:
        """Return where one sample's bytes lie."""
        members = self.members(row)
        offset, size, crc = self.columns.offset.item(row), self.columns.size.item(row), self.crc32c.item(row)
        return Span(self.root, self.path, offset, size, crc, members, self.shard_size, self.etag)

    def sizes(self, row: int) -> MediaSizes:
        """Return the sizes of one sample's media; which frames it names itself is in its JSON alone."""
        self._check(row)
        images, videos, audios = (self._entries(kind, row) for kind in _MEDIA)
        return MediaSizes(
            images=tuple(ImageSize(height=h, width=w) for h, w in images),
            videos=tuple(
                VideoSize(frames=n, height=h, width=w, fps=fps, seconds=seconds, picked=tuple(range(picked)))
                for n, h, w, fps, seconds, picked in videos
            ),
            audios=tuple(AudioSize(samples=n, rate=rate) for n, rate in audios),
        )

    def _entries(self, kind: str, row: int) -> list[tuple[Any, ...]]:
        splits, fields = getattr(self.columns, kind)
        begin, end = splits.item(row), splits.item(row + 1)
        return list(zip(*(values[begin:end].tolist() for values in fields.values()), strict=True))

    def totals(self, num_bytes: int) -> Totals:
        """Add the samples up, for the manifest's entry of a tar of `num_bytes`."""
        media = self.columns
        (image_splits, images), (video_splits, videos), (audio_splits, audios) = media[4:]
        splits = np.stack([image_splits, video_splits, audio_splits]).astype(np.int64)
        per_sample = np.diff(splits).sum(axis=0)
        rates = audios["rate"].astype(np.int64)
        heard = rates > 0
        return Totals(
            samples=len(self),
            bytes=num_bytes,
            text_tokens=int(media.text_tokens.sum(dtype=np.int64)),
            label_tokens=int(np.maximum(media.label_tokens, 0).sum(dtype=np.int64)),
            text_only=int((per_sample == 0).sum()),
            images=len(images["height"]),
            image_pixels=int((images["height"].astype(np.int64) * images["width"]).sum()),
            videos=len(videos["frames"]),
            video_frames=int(videos["frames"].sum(dtype=np.int64)),
            video_seconds=round(float(videos["seconds"].sum()), 6),
            audios=len(rates),
            audio_seconds=round(float((audios["samples"][heard] / rates[heard]).sum()), 6),
        )


def media_kinds(totals: Totals) -> tuple[str, ...]:
    """Return the columns of media that a shard has entries in."""
    return tuple(kind for kind in _MEDIA if getattr(totals, kind))


def decode_media(data: bytes, where: str, kinds: Sequence[str]) -> ShardMedia:
    """Read what plans need of the Parquet bytes of an index, and of media only `kinds`: the others are empty."""
    return _media_of(read_table(data, where, (*_COUNTS, *kinds)), where)


def _media_of(table: pa.Table, where: str) -> ShardMedia:
    with wrong_index(where):
        media = [
            list_numbers(one_array(table.column(kind)), fields)
            if kind in table.column_names
            else (np.zeros(table.num_rows + 1, np.uint8), dict.fromkeys(fields, np.zeros(0, np.uint8)))
            for kind, fields in _MEDIA.items()
        ]
        offset, size, text, labels = (numbers_of(one_array(table.column(name))) for name in _COUNTS)
        return ShardMedia(offset, size, text, labels, *media)


def decode_index(data: bytes, *, where: str = "index", kinds: Sequence[str] = tuple(_MEDIA)) -> ShardIndex:
    """Read the Parquet bytes of an index, and of media only `kinds`.

    Raises:
        DatasetError: They are damaged, or no index.
    """
    table = read_table(data, where, ("key", "crc32c", *_COUNTS, *kinds, "members"))
    media = _media_of(table, where)
    with wrong_index(where):
        key_splits, key_bytes = text_bytes(one_array(table.column("key")))
        members = one_array(table.column("members"))
        member_splits, places = list_numbers(members, ("offset", "size"))
        names = members.values.field("name")
        begins = np.repeat(media.offset, np.diff(member_splits))
        return ShardIndex(
            columns=ShardMedia(
                _narrow(media.offset),
                _narrow(media.size),
                _narrow(media.text_tokens),
                _narrow(media.label_tokens),
                *map(_narrow_lists, media[4:]),
            ),
            key_bytes=key_bytes,
            key_splits=_narrow(key_splits),
            crc32c=numbers_of(one_array(table.column("crc32c"))).copy(),
            member_splits=_narrow(member_splits),
            member_names=tuple(map(sys.intern, names.dictionary.to_pylist())),
            member_name=_narrow(numbers_of(names.indices)),
            member_offset=_narrow(places["offset"] - begins),
            member_size=_narrow(places["size"]),
        )


def _narrow(values: Numbers) -> Numbers:
    """Return a copy of the smallest type of integers that holds all of them."""
    if values.dtype.kind == "f":
        return values.copy()
    low, high = (values.min(), values.max()) if len(values) else (0, 0)
    return values.astype(np.result_type(np.min_scalar_type(low), np.min_scalar_type(high)))


def _narrow_lists(media: tuple[Numbers, dict[str, Numbers]]) -> tuple[Numbers, dict[str, Numbers]]:
    splits, fields = media
    return _narrow(splits), {name: _narrow(values) for name, values in fields.items()}


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
    index = decode_index(data, where=where, kinds=media_kinds(shard.totals))
    if len(index) != shard.totals.samples:
        raise DatasetError(f"{where} has {len(index)} samples, the manifest says {shard.totals.samples}.")
    return replace(index, root=tars or store.root, path=shard.name, shard_size=shard.totals.bytes, etag=shard.etag)
