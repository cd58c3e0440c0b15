"""The index of a shard: Parquet bytes to compact numpy columns.

Enters: a store and a shard of the manifest, or bytes. Leaves: a `ShardIndex` with everything that is known of each
sample. No tar is opened here.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from vlm_stream.errors import DatasetError, NotFoundError
from vlm_stream.format.checks import check_places, check_range
from vlm_stream.format.manifest import ShardEntry, Totals, clips_name, index_name
from vlm_stream.format.media import COUNTS, MEDIA, ShardMedia, entries_of, is_entry, join_media, media_kinds, media_of
from vlm_stream.format.table import (
    CLIP_COLUMNS,
    KEYFRAMES,
    TEXT_COLUMN,
    empty_where_null,
    list_numbers,
    numbers_of,
    one_array,
    read_table,
    text_bytes,
    wrong_index,
)
from vlm_stream.storage import Member, Span, split_url
from vlm_stream.tokens import AudioSize, ImageSize, MediaColumns, MediaSizes, VideoSize, unpack_steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import pyarrow as pa

    from vlm_stream.format.media import Lists
    from vlm_stream.storage import Store

    Ints = npt.NDArray[np.int64]
    Numbers = npt.NDArray[Any]

_READS: Final = 2
_MAX_FILE: Final = 1 << 36
"""Bytes of a file of tables or texts beside an index."""
_MAX_PART: Final = 1 << 26
"""Bytes of what it has of a sample."""


class TablePlace(NamedTuple):
    """Where the tables of one sample's clips lie, in the file of tables beside its index."""

    path: str
    offset: int
    size: int
    crc32c: int
    gops: tuple[int, ...]
    """Groups of pictures of each video; 0: not known; below 0: of the part of a file that it shows."""


class PartPlaces(NamedTuple):
    """Where the parts of n samples lie in a file beside the index."""

    offset: Numbers
    size: Numbers
    """[n] 0: the sample has none."""
    crc32c: Numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardIndex:
    """The index of one shard with n samples. Numbers are as narrow as they can be: many indexes are kept."""

    columns: ShardMedia
    offset: Numbers
    """[n] First byte of the sample in the shard."""
    size: Numbers
    """[n] Length of its byte range."""
    key_bytes: bytes
    key_splits: Numbers
    id_bytes: bytes
    id_splits: Numbers
    """[n + 1] The record's own id; empty where it has none."""
    entry_names: tuple[str, ...]
    entry: Numbers
    """[n] Place in `entry_names` of the meta file's entry that the record came from."""
    crc32c: Numbers
    """[n] Checksum of each sample's range."""
    member_splits: Numbers
    """[n + 1] Row r owns the members `member_splits[r]:member_splits[r + 1]`."""
    member_names: tuple[str, ...]
    member_name: Numbers
    """[members] Place in `member_names`."""
    member_offset: Numbers
    """[members] First content byte, counted from the first byte of the sample; below 0 in a sample before it."""
    member_size: Numbers
    clips: PartPlaces | None = None
    """None: no sample has tables of clips."""
    texts: PartPlaces | None = None
    """None: the tokens of no text are kept beside the index."""
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
        arrays = [
            value for value in (getattr(self, each.name) for each in fields(self)) if isinstance(value, np.ndarray)
        ]
        arrays += [*self.columns[:2], *(self.clips or ()), *(self.texts or ())]
        for splits, items in self.columns[2:]:
            arrays += [splits, *items.values(), *items.get(KEYFRAMES, ())]
        return sum(array.nbytes for array in arrays) + len(self.key_bytes) + len(self.id_bytes)

    @property
    def keys(self) -> list[str]:
        """Return [n] what the samples are called."""
        return list(map(self.key, range(len(self))))

    @property
    def media(self) -> MediaColumns:
        """Return text counts and media sizes of all samples."""
        return join_media([self.columns])

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self.crc32c):  # not by `len(self)`: this is asked several times for each sample
            raise IndexError(f"{self.path} has {len(self)} samples, and none at {row}")

    def _text(self, row: int, data: bytes, splits: Numbers) -> str:
        self._check(row)
        return str(data[splits.item(row) : splits.item(row + 1)], "utf-8")

    def key(self, row: int) -> str:
        """Return one sample's key."""
        return self._text(row, self.key_bytes, self.key_splits)

    def own_id(self, row: int) -> str | None:
        """Return the id of the record that one sample was made of; None: it had none."""
        return self._text(row, self.id_bytes, self.id_splits) or None

    def entry_of(self, row: int) -> str:
        """Return the name of the meta file's entry, or of the file, that one sample came from."""
        number: int = self.entry.item(row)
        return self.entry_names[number]

    def is_of(self, entry: str) -> npt.NDArray[np.bool_]:
        """Tell [n] which samples came from an entry."""
        return is_entry(entry, self.entry_names, self.entry)

    def entries(self) -> dict[str, Totals]:
        """Return what the samples of each entry add up to, in bytes without what lies between samples."""
        found = {}
        for name in sorted(self.entry_names):
            chosen = self.is_of(name)
            if chosen.any():
                found[name] = self.columns.select(chosen).totals(int(self.size[chosen].sum(dtype=np.int64)))
        return found

    def find(self, name: str) -> list[int]:
        """Return the rows of the samples with that key or own id."""
        text = name.encode()
        if text not in self.key_bytes and text not in self.id_bytes:
            return []
        return [row for row in range(len(self)) if name in (self.key(row), self.own_id(row))]

    def members(self, row: int) -> tuple[Member, ...]:
        """Return one sample's files: its own, and those that lie in other samples of the shard."""
        self._check(row)
        at = slice(self.member_splits.item(row), self.member_splits.item(row + 1))
        begin = self.offset.item(row)
        places = zip(
            self.member_name[at].tolist(), self.member_offset[at].tolist(), self.member_size[at].tolist(), strict=True
        )
        return tuple([Member(self.member_names[name], begin + offset, size) for name, offset, size in places])

    def span(self, row: int) -> Span:
        """Return where one sample's bytes lie, with the members that lie among them."""
        return self.spans(row)[0]

    def shared(self, row: int) -> tuple[Span, ...]:
        """Return where members lie that the sample shares with others: in whole samples, which have checksums.

        A member before the first byte of the shard is a file outside of it; its name is its URL.
        """
        return self.spans(row)[1]

    def spans(self, row: int) -> tuple[Span, tuple[Span, ...]]:
        """Return both, at the cost of one."""
        members = self.members(row)
        begin, size = self.offset.item(row), self.size.item(row)
        own = [member for member in members if 0 <= member[1] - begin < size]
        others = () if len(own) == len(members) else [member for member in members if member not in own]
        return self._span(row, tuple(own)), tuple(map(self._holder, others))

    def outside(self) -> tuple[str, ...]:
        """Return the URLs of members that are files outside of the shard."""
        begins = self.member_offset + np.repeat(self.offset.astype(np.int64), np.diff(self.member_splits))
        return tuple(self.member_names[number] for number in np.unique(self.member_name[begins < 0]).tolist())

    def _holder(self, member: Member) -> Span:
        if member.offset < 0:
            folder, name = split_url(member.name)
            return Span(folder, name, 0, member.size, None, (Member(member.name, 0, member.size),), member.size)
        owner = max(int(np.searchsorted(self.offset, member.offset, side="right")) - 1, 0)
        return self._span(owner, (member,))

    def _span(self, row: int, members: tuple[Member, ...]) -> Span:
        offset, size, crc = self.offset.item(row), self.size.item(row), self.crc32c.item(row)
        return Span(self.root, self.path, offset, size, crc, members, self.shard_size, self.etag)

    def sizes(self, row: int) -> MediaSizes:
        """Return the sizes of one sample's media; which frames it names itself is in its JSON alone."""
        self._check(row)
        images, videos, audios = (self._items(kind, row) for kind in MEDIA)
        return MediaSizes(
            images=tuple(ImageSize(height=h, width=w) for h, w in images),
            videos=tuple(
                VideoSize(
                    **dict(zip(MEDIA["videos"][:5], video, strict=False)),
                    picked=tuple(range(video[5])),
                    keyframes=tuple(unpack_steps(video[7], video[0])) if len(video) > 7 else (),
                )
                for video in videos
            ),
            audios=tuple(AudioSize(samples=n, rate=rate) for n, rate in audios),
        )

    def table(self, row: int) -> TablePlace | None:
        """Return where the tables of one sample's clips lie; None: it has none."""
        self._check(row)
        if self.clips is None or not self.clips.size[row]:
            return None
        offset, size, crc32c = (column.item(row) for column in self.clips)
        gops = tuple(video[len(MEDIA["videos"])] for video in self._items("videos", row))
        return TablePlace(clips_name(self.path), offset, size, crc32c, gops)

    def text(self, row: int) -> tuple[int, int, int] | None:
        """Return offset, size and crc32c of the tokens of one sample's text; None: they are not kept there."""
        self._check(row)
        if self.texts is None or not self.texts.size[row]:
            return None
        return self.texts.offset.item(row), self.texts.size.item(row), self.texts.crc32c.item(row)

    def _items(self, kind: str, row: int) -> list[tuple[Any, ...]]:
        splits, columns = getattr(self.columns, kind)
        begin, end = splits.item(row), splits.item(row + 1)
        if begin == end:  # of most kinds a sample has none
            return []
        return list(zip(*(values[begin:end].tolist() for values in columns.values()), strict=True))


def decode_index(
    data: bytes,
    *,
    where: str = "index",
    kinds: Sequence[str] = tuple(MEDIA),
    shard: ShardEntry | None = None,
    keyframes: bool = False,
) -> ShardIndex:
    """Read the Parquet bytes of an index, of media only `kinds`, and where it is asked which frames are keyframes.

    Raises:
        DatasetError: They are damaged, no index, or that of another shard.
    """
    names = ("key", "id", "entry", "offset", "size", "crc32c", *COUNTS, *kinds, "members", *CLIP_COLUMNS, TEXT_COLUMN)
    names += (KEYFRAMES,) if keyframes else ()
    table = read_table(data, where, names, num_rows=None if shard is None else shard.totals.samples)
    media = media_of(table, where, keyframes=keyframes)
    with wrong_index(where):
        key_splits, key_bytes = text_bytes(one_array(table.column("key")))
        id_splits, id_bytes = text_bytes(empty_where_null(one_array(table.column("id"))))
        entry_names, entry = entries_of(table)
        offset, size, crc32c = (numbers_of(one_array(table.column(name))) for name in ("offset", "size", "crc32c"))
        members = one_array(table.column("members"))
        member_splits, places = list_numbers(members, ("offset", "size"))
        member_names = members.values.field("name")
        begins = places["offset"] - np.repeat(offset, np.diff(member_splits))
        found = (member_splits, places["offset"], places["size"])
        check_places(offset, size, found, None if shard is None else shard.totals.bytes)
        return ShardIndex(
            columns=ShardMedia(_narrow(media[0]), _narrow(media[1]), *map(_narrow_lists, media[2:])),
            offset=_narrow(offset),
            size=_narrow(size),
            key_bytes=key_bytes,
            key_splits=_narrow(key_splits),
            id_bytes=id_bytes,
            id_splits=_narrow(id_splits),
            entry_names=tuple(map(sys.intern, entry_names)),
            entry=_narrow(entry),
            crc32c=crc32c.copy(),
            member_splits=_narrow(member_splits),
            member_names=tuple(map(sys.intern, member_names.dictionary.to_pylist())),
            member_name=_narrow(numbers_of(member_names.indices)),
            member_offset=_narrow(begins),
            member_size=_narrow(places["size"]),
            clips=_places_of(table, "clips"),
            texts=_places_of(table, TEXT_COLUMN),
        )


def _places_of(table: pa.Table, name: str) -> PartPlaces | None:
    if name not in table.column_names:
        return None
    places = one_array(table.column(name))
    offset, size, crc32c = (_narrow(numbers_of(places.field(each))) for each in ("offset", "size", "crc32c"))
    check_range(f"offset in the file of {name}", offset, 0, _MAX_FILE)
    check_range(f"size in the file of {name}", size, 0, _MAX_PART)
    return PartPlaces(offset, size, crc32c)


def clip_bytes(data: bytes, where: str) -> int:
    """Return the size of the file of tables that belongs to the Parquet bytes of an index; 0: there is none."""
    places = _places_of(read_table(data, where, ("size", *CLIP_COLUMNS)), "clips")
    return 0 if places is None else int(np.max(places.offset.astype(np.int64) + places.size, initial=0))


def _narrow(values: Numbers) -> Numbers:
    """Return a copy of the smallest type of integers that holds all of them."""
    if values.dtype.kind in "fO":
        return values.copy()
    low, high = (values.min(), values.max()) if len(values) else (0, 0)
    return values.astype(np.result_type(np.min_scalar_type(low), np.min_scalar_type(high)))


def _narrow_lists(lists: Lists) -> Lists:
    splits, columns = lists
    return _narrow(splits), {name: _narrow(values) for name, values in columns.items()}


def describe_shard(name: str, index: bytes, *, num_bytes: int, crc32c: int, etag: str | None = None) -> ShardEntry:
    """Return what the manifest says of a tar of `num_bytes` and of the bytes of its index."""
    decoded = decode_index(index)
    return ShardEntry(
        name=name,
        totals=decoded.columns.totals(num_bytes),
        entries={entry: totals.samples for entry, totals in decoded.entries().items()},
        crc32c=crc32c,
        index_sha256=hashlib.sha256(index).hexdigest(),
        etag=etag,
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
        DatasetError: The index is missing, or not the one that the manifest describes, also when it is read again:
            bytes may be flipped on their way.
    """
    name = index_name(shard.name)
    try:
        for _ in range(_READS):
            data = bytes(store.get(name))
            if hashlib.sha256(data).hexdigest() == shard.index_sha256:
                return data
    except NotFoundError as error:
        raise DatasetError(
            f"{store.root}/{name} is missing, so {shard.name} cannot be read. Copy it here, or write it with: "
            f"vlm-stream index"
        ) from error
    raise DatasetError(
        f"{store.root}/{name} is not the index that the manifest describes: it was replaced, or a recount was "
        f"interrupted. Run the recount again, or: vlm-stream index"
    )


def open_index(data: bytes, store: Store, shard: ShardEntry, *, tars: str = "", keyframes: bool = False) -> ShardIndex:
    """Decode the bytes of a shard's index: the part of `read_index` that computes.

    Raises:
        DatasetError: The index is damaged, or has other samples than the manifest says.
    """
    where = f"{store.root}/{index_name(shard.name)}"
    index = decode_index(data, where=where, kinds=media_kinds(shard.totals), shard=shard, keyframes=keyframes)
    return replace(index, root=tars or store.root, path=shard.name, shard_size=shard.totals.bytes, etag=shard.etag)
