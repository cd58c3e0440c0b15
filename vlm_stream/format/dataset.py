"""An opened dataset: columns for plans, and everything a builder must know of the samples that a plan has drawn.

Enters: a dataset's URL, then numbers of shards and rows. Leaves: `MediaColumns` with byte ranges, and `Drawn` samples.

Nothing here grows with the dataset but the columns of its manifest. What is kept of indexes is bounded by bytes: the
Parquet bytes of an index after it was read for a plan, and its decoded columns once a sample was drawn from it.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from vlm_stream.format.index import (
    JoinedMedia,
    ShardIndex,
    check_index,
    decode_media,
    fetch_index,
    media_kinds,
    open_index,
)
from vlm_stream.format.manifest import ShardList, load_manifest
from vlm_stream.storage import Span, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    import numpy as np
    import numpy.typing as npt

    from vlm_stream.storage import StoreOptions
    from vlm_stream.tokens import MediaColumns, MediaSizes

    Ints = npt.NDArray[np.int64]
    R = TypeVar("R")

__all__ = ["Drawn", "IndexCache", "OpenDataset"]

_FETCHING: Final = 32
"""Indexes that are asked for at a time."""
_DECODING: Final = 4
"""Indexes that are decoded at a time."""
_TOGETHER: Final = 64
"""Indexes that are in memory at a time, whatever the cache keeps."""


class Drawn(NamedTuple):
    """Everything a builder must know of one sample."""

    key: str
    span: Span
    sizes: MediaSizes


class IndexCache:
    """What is kept of indexes, bounded by bytes; shared by all sources of a run and by threads."""

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        """Keep at most `max_bytes`; what was not used for longest goes first."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, int], bytes | ShardIndex] = OrderedDict()
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Return how many bytes are kept."""
        return self._num_bytes

    def get(self, root: str, shard: int) -> bytes | ShardIndex | None:
        """Return the index of a shard, as it is kept: decoded, or its Parquet bytes."""
        with self._lock:
            found = self._kept.get((root, shard))
            if found is not None:
                self._kept.move_to_end((root, shard))
            return found

    def put(self, root: str, shard: int, index: bytes | ShardIndex) -> None:
        """Keep an index in place of what was kept of it."""
        with self._lock:
            before = self._kept.pop((root, shard), None)
            self._num_bytes += _size_of(index) - (0 if before is None else _size_of(before))
            self._kept[root, shard] = index
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size_of(self._kept.popitem(last=False)[1])


def _size_of(index: bytes | ShardIndex) -> int:
    return len(index) if isinstance(index, bytes) else index.num_bytes


class OpenDataset:
    """One dataset, opened for planning and for looking up drawn samples."""

    def __init__(
        self,
        url: str,
        store_options: StoreOptions | None,
        cache: IndexCache,
        *,
        only: Sequence[str] | None = None,
    ) -> None:
        """Read the manifest; with `only`, leave out all shards but these.

        Raises:
            DatasetError: There is none, or it cannot be used.
        """
        self.store = open_store(url, store_options)
        self.manifest = load_manifest(self.store)
        self.root: str = self.store.root
        """URL of the dataset. Spans have that of its tars, which may be elsewhere."""
        if only is not None:
            by_name = {shard.name: shard for shard in self.manifest.shards}
            shards = ShardList.of(by_name[name] for name in only)
            self.manifest = replace(self.manifest, shards=shards)
        self._kept_as = self.root if only is None else f"{self.root}#{self.manifest.digest}"
        self._cache = cache

    def media(self, shards: Sequence[int]) -> tuple[MediaColumns, Ints, Ints]:
        """Return text counts and media sizes of all samples of some shards, one shard after the other.

        Returns:
            The columns, and for each sample its first byte in its shard and the length of its byte range.
        """
        entries = [self.manifest.shards[shard] for shard in shards]
        joined = JoinedMedia([entry.totals for entry in entries])

        def fill(number: int, index: bytes | ShardIndex) -> None:
            entry = entries[number]
            if isinstance(index, ShardIndex):
                joined.fill(number, index.columns, index.path)
            else:
                where = check_index(index, self.store, entry)
                joined.fill(number, decode_media(index, where, media_kinds(entry.totals)), where)

        for begin in range(0, len(shards), _TOGETHER):
            group = range(begin, min(begin + _TOGETHER, len(shards)))
            self._each(fill, group, [shards[number] for number in group])
        _trim_memory()
        return joined.columns, joined.offset, joined.size

    def draw(self, shard: int, rows: Sequence[int]) -> list[Drawn]:
        """Return what must be known of some samples of a shard, in the order of `rows`."""
        return self.draw_many([shard] * len(rows), rows)

    def draw_many(self, shards: Sequence[int], rows: Sequence[int]) -> list[Drawn]:
        """Return what must be known of samples: sample i is `rows[i]` of `shards[i]`."""
        wanted: defaultdict[int, list[int]] = defaultdict(list)
        for place, shard in enumerate(shards):
            wanted[shard].append(place)
        drawn: dict[int, Drawn] = {}
        missing = []
        for shard in wanted:
            kept = self._cache.get(self._kept_as, shard)
            if isinstance(kept, ShardIndex):
                drawn.update((place, _draw(kept, rows[place])) for place in wanted[shard])
            else:
                missing.append(shard)
        # In groups: an index that the cache has no room for goes as soon as its samples are drawn.
        for begin in range(0, len(missing), _TOGETHER):
            group = missing[begin : begin + _TOGETHER]
            for shard, index in zip(group, self._each(self._decode, group, group), strict=True):
                drawn.update((place, _draw(index, rows[place])) for place in wanted[shard])
        return [drawn[place] for place in range(len(shards))]

    def text_span(self, drawn: Drawn) -> Span:
        """Return where the text of a sample lies; where the whole sample lies if it has no such member.

        The index has checksums of whole samples alone, so these bytes cannot be checked.
        """
        name = self.manifest.fields.text_member
        member = next((member for member in drawn.span.members if member[0].lower() == name), None)
        if member is None:
            return drawn.span
        _, offset, size = member
        return drawn.span._replace(offset=offset, size=size, crc32c=None, members=(member,))

    def find_key(self, shard: int, key: str) -> int | None:
        """Return the row of the sample with that key in a shard, if it is there."""
        (index,) = self._each(self._decode, [shard], [shard])
        keys = index.keys
        return keys.index(key) if key in keys else None

    def _each(
        self, function: Callable[[int, bytes | ShardIndex], R], args: Sequence[int], shards: Sequence[int]
    ) -> list[R]:
        """Return `function(arg, index)` for each arg and the index of its shard; many wait for stores, few compute."""
        with (
            ThreadPoolExecutor(min(_FETCHING, len(shards))) as fetching,
            ThreadPoolExecutor(min(_DECODING, len(shards))) as decoding,
            _system_memory(),
        ):
            return list(decoding.map(function, args, fetching.map(self._fetch, shards)))

    def _fetch(self, shard: int) -> bytes | ShardIndex:
        """Return an index as it is kept, or its bytes, which are kept from then on."""
        index = self._cache.get(self._kept_as, shard)
        if index is None:
            index = fetch_index(self.store, self.manifest.shards[shard])
            self._cache.put(self._kept_as, shard, index)
        return index

    def _decode(self, shard: int, index: bytes | ShardIndex) -> ShardIndex:
        """Return a decoded index, which is kept from then on in place of its bytes."""
        if isinstance(index, bytes):
            index = open_index(index, self.store, self.manifest.shards[shard], tars=self.manifest.tars)
            self._cache.put(self._kept_as, shard, index)
        return index


def _draw(index: ShardIndex, row: int) -> Drawn:
    return Drawn(index.key(row), index.span(row), index.sizes(row))


@contextmanager
def _system_memory() -> Iterator[None]:
    """Let Arrow decode into memory of the C library: its own allocators keep what they have had, for each thread."""
    import pyarrow as pa

    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def _trim_memory() -> None:
    """Give free pages back to the system, where the C library can: what is kept lies between what was decoded."""
    with suppress(AttributeError, OSError, TypeError):  # musl, macOS, Windows
        ctypes.CDLL(None).malloc_trim(0)
