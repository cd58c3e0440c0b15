"""The index of a shard: Parquet bytes to compact numpy columns.

Enters: a store and a shard of the manifest, or bytes. Leaves: a `ShardIndex` with everything that is known of each
sample. No tar is opened here.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import DatasetError, NotFoundError
from vlm_stream.format.manifest import ShardEntry, Totals, index_name
from vlm_stream.format.media import COUNTS, MEDIA, ShardMedia, entries_of, is_entry, join_media, media_kinds, media_of
from vlm_stream.format.table import list_numbers, numbers_of, one_array, read_table, text_bytes, wrong_index
from vlm_stream.storage import Member, Span
from vlm_stream.tokens import AudioSize, ImageSize, MediaColumns, MediaSizes, VideoSize

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.format.media import Lists
    from vlm_stream.storage import Store

    Ints = npt.NDArray[np.int64]
    Numbers = npt.NDArray[Any]

__all__ = ["ShardIndex", "check_index", "decode_index", "describe_shard", "fetch_index", "open_index", "read_index"]


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
        arrays = [
            value for value in (getattr(self, each.name) for each in fields(self)) if isinstance(value, np.ndarray)
        ]
        arrays += self.columns[:2]
        for splits, items in self.columns[2:]:
            arrays += [splits, *items.values()]
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
        if not 0 <= row < len(self):
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
        return self.entry_names[self.entry.item(row)]

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
        """Return one sample's files, in tar order."""
        self._check(row)
        at = slice(self.member_splits.item(row), self.member_splits.item(row + 1))
        begin = self.offset.item(row)
        places = zip(
            self.member_name[at].tolist(), self.member_offset[at].tolist(), self.member_size[at].tolist(), strict=True
        )
        return tuple([Member(self.member_names[name], begin + offset, size) for name, offset, size in places])

    def span(self, row: int) -> Span:
        """Return where one sample's bytes lie."""
        members = self.members(row)
        offset, size, crc = self.offset.item(row), self.size.item(row), self.crc32c.item(row)
        return Span(self.root, self.path, offset, size, crc, members, self.shard_size, self.etag)

    def sizes(self, row: int) -> MediaSizes:
        """Return the sizes of one sample's media; which frames it names itself is in its JSON alone."""
        self._check(row)
        images, videos, audios = (self._items(kind, row) for kind in MEDIA)
        return MediaSizes(
            images=tuple(ImageSize(height=h, width=w) for h, w in images),
            videos=tuple(
                VideoSize(frames=n, height=h, width=w, fps=fps, seconds=seconds, picked=tuple(range(picked)))
                for n, h, w, fps, seconds, picked in videos
            ),
            audios=tuple(AudioSize(samples=n, rate=rate) for n, rate in audios),
        )

    def _items(self, kind: str, row: int) -> list[tuple[Any, ...]]:
        splits, columns = getattr(self.columns, kind)
        begin, end = splits.item(row), splits.item(row + 1)
        return list(zip(*(values[begin:end].tolist() for values in columns.values()), strict=True))


def decode_index(data: bytes, *, where: str = "index", kinds: Sequence[str] = tuple(MEDIA)) -> ShardIndex:
    """Read the Parquet bytes of an index, and of media only `kinds`.

    Raises:
        DatasetError: They are damaged, or no index.
    """
    names = ("key", "id", "entry", "offset", "size", "crc32c", *COUNTS, *kinds, "members")
    table = read_table(data, where, names)
    media = media_of(table, where)
    with wrong_index(where):
        key_splits, key_bytes = text_bytes(one_array(table.column("key")))
        id_splits, id_bytes = text_bytes(one_array(table.column("id")).fill_null(""))
        entry_names, entry = entries_of(table)
        offset, size, crc32c = (numbers_of(one_array(table.column(name))) for name in ("offset", "size", "crc32c"))
        members = one_array(table.column("members"))
        member_splits, places = list_numbers(members, ("offset", "size"))
        member_names = members.values.field("name")
        begins = np.repeat(offset, np.diff(member_splits))
        return ShardIndex(
            columns=ShardMedia(*map(_narrow, media[:2]), *map(_narrow_lists, media[2:])),
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
            member_offset=_narrow(places["offset"] - begins),
            member_size=_narrow(places["size"]),
        )


def _narrow(values: Numbers) -> Numbers:
    """Return a copy of the smallest type of integers that holds all of them."""
    if values.dtype.kind == "f":
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
