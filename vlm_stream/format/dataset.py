"""An opened dataset: columns for plans, and everything a builder must know of the samples that a plan has drawn.

Enters: a dataset's URL, then numbers of shards and rows. Leaves: `MediaColumns`, and `Drawn` samples. A view shows the
samples of one entry of the meta file as if there were no others: shards without any are not listed, and rows count
those samples alone.

Nothing here grows with the dataset but the columns of its manifest. What is kept of indexes is bounded by bytes: the
Parquet bytes of an index after it was read for a plan, and its decoded columns once a sample was drawn from it.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
from collections import OrderedDict, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from vlm_stream.errors import AccessError, ConfigError, DatasetError, NotFoundError
from vlm_stream.format.index import ShardIndex, fetch_index, open_index
from vlm_stream.format.manifest import ShardList, index_name, load_manifest
from vlm_stream.format.media import ShardMedia, decode_media, join_media, media_kinds
from vlm_stream.storage import ShardKey, Span, crc32c_of, host_of, is_under, local_path, open_store, scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeVar

    from vlm_stream.format.index import TablePlace
    from vlm_stream.storage import StoreOptions
    from vlm_stream.tokens import MediaColumns, MediaSizes

    R = TypeVar("R")

logger = logging.getLogger(__name__)

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
    entry: str
    """Name of the meta file's entry, or of the file, that it came from."""
    id: str | None
    """Its own id; None: it has none."""
    table: TablePlace | None = None
    """Where the tables of its clips lie; None: it has none."""
    shared: tuple[Span, ...] = ()
    """Whole samples or files, each for the one member that this sample shares with others."""
    text: tuple[int, int, int] | None = None
    """Offset, size and crc32c of the tokens of its text in the file beside the index; None: they are not there."""

    def holder(self, name: str) -> Span:
        """Return what holds a member."""
        return next(span for span in (self.span, *self.shared) if any(own == name for own, *_ in span.members))

    @property
    def members(self) -> tuple[tuple[str, int, int], ...]:
        """Return its members, those that it shares included."""
        return (*self.span.members, *(member for span in self.shared for member in span.members))

    @property
    def num_bytes(self) -> int:
        """Return how many bytes all of it takes to read."""
        return self.span.size + sum(span.size for span in self.shared)


class IndexCache:
    """What is kept of indexes, bounded by bytes; shared by all sources of a run and by threads."""

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        """Keep at most `max_bytes`; what was not used for longest goes first."""
        self.is_decoded = False  # set: all are kept decoded, for many plans over them; larger, each is decoded once
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
        tars: str = "",
    ) -> None:
        """Read the manifest; with `only`, leave out all shards but these.

        Args:
            url: The dataset's URL.
            store_options: How to reach stores, and from where tars may come.
            cache: Keeps indexes.
            only: Names of shards.
            tars: URL of a place that the user has named as that of the tars.

        Raises:
            DatasetError: There is none, or it cannot be used.
        """
        self.store = open_store(url, store_options)
        self.manifest = load_manifest(self.store)
        self.root: str = self.store.root
        """URL of the dataset. Spans have that of its tars, which may be elsewhere."""
        named = (tars, *(store_options.tars if store_options else ()))
        self.named: tuple[str, ...] = tuple(each for each in named if each)
        """Places of tars that the user has named."""
        if self.manifest.tars:
            check_place(self.manifest.tars, self.root, self.named)
        if only is not None:
            by_name = {shard.name: shard for shard in self.manifest.shards}
            shards = ShardList.of(by_name[name] for name in only)
            self.manifest = replace(self.manifest, shards=shards)
        self._kept_as = self.root if only is None else f"{self.root}#{self.manifest.digest}"
        self._cache = cache
        self._keyframes, self._warned = False, set[str]()
        self._entry: str | None = None
        self._numbers: Sequence[int] = range(len(self.manifest.shards))
        self.samples_per_shard: list[int] = self.manifest.shards.column("samples")
        """[shards]"""
        self.digest: str = self.manifest.digest
        """Changes when any tar or index does."""

    def view(self, entry: str) -> OpenDataset:
        """Return the dataset as if it had the samples of one entry alone; indexes are kept once for all views."""
        counts = self.manifest.shards.entries[entry]
        view = copy(self)
        view._entry = entry
        view._numbers = [number for number, count in enumerate(counts) if count]
        view.samples_per_shard = [counts[number] for number in view._numbers]
        view.digest = hashlib.sha256(f"{self.digest}:{entry}".encode()).hexdigest()
        return view

    def read_keyframes(self) -> None:
        """Read of indexes from now on also which frames of videos are keyframes."""
        self._kept_as += "" if self._keyframes else "#keyframes"
        self._keyframes = True

    @property
    def tars(self) -> str:
        """Return the URL of the folder of the tars."""
        return self.manifest.tars or self.root

    def shard_keys(self) -> list[ShardKey]:
        """Return the tars of all shards as the node cache knows them."""
        names, sizes, etags = (self.manifest.shards.column(name) for name in ("name", "bytes", "etag"))
        return [ShardKey(self.tars, names[number], sizes[number], etags[number]) for number in self._numbers]

    def media(self, shards: Sequence[int]) -> MediaColumns:
        """Return text counts and media sizes of all samples of some shards, one shard after the other."""
        parts: list[ShardMedia] = []
        for begin in range(0, len(shards), _TOGETHER):
            parts += self._each(self._media, shards[begin : begin + _TOGETHER])
        joined = join_media(parts)
        del parts
        with suppress(AttributeError, OSError, TypeError):  # musl, macOS, Windows
            ctypes.CDLL(None).malloc_trim(0)  # what is kept lies between what was decoded
        return joined

    def _media(self, shard: int, index: bytes | ShardIndex) -> ShardMedia:
        listed = self.manifest.shards[self._numbers[shard]]
        index = self._decode(shard, index) if self._cache.is_decoded else index
        if isinstance(index, ShardIndex):
            where = index.path
            media = index.columns if self._entry is None else index.columns.select(index.is_of(self._entry))
        else:
            where = self.store.url(index_name(listed.name))
            kinds, num_rows = media_kinds(listed.totals), listed.totals.samples
            media = decode_media(index, where, kinds, self._entry, num_rows=num_rows, keyframes=self._keyframes)
        self._check_count(shard, media.num_samples, where)
        return media

    def _check_count(self, shard: int, found: int, where: str) -> None:
        if found != self.samples_per_shard[shard]:
            what = "samples" if self._entry is None else f"samples of '{self._entry}'"
            raise DatasetError(f"{where} has {found} {what}, the manifest says {self.samples_per_shard[shard]}.")

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

        def draw(shard: int, index: ShardIndex) -> None:
            shown = None if self._entry is None else self._rows(shard, index)
            for place in wanted[shard]:
                drawn[place] = _draw(index, rows[place] if shown is None else shown[rows[place]])

        for shard in wanted:
            kept = self._cache.get(self._kept_as, self._numbers[shard])
            if isinstance(kept, ShardIndex):
                draw(shard, kept)
            else:
                missing.append(shard)
        # In groups: an index that the cache has no room for goes as soon as its samples are drawn.
        for begin in range(0, len(missing), _TOGETHER):
            group = missing[begin : begin + _TOGETHER]
            for shard, index in zip(group, self._each(self._decode, group), strict=True):
                draw(shard, index)
        return [drawn[place] for place in range(len(shards))]

    def _rows(self, shard: int, index: ShardIndex) -> Sequence[int]:
        """Return the rows of an index that are shown, in order."""
        if self._entry is None:
            return range(len(index))
        rows: list[int] = np.flatnonzero(index.is_of(self._entry)).tolist()
        self._check_count(shard, len(rows), index.path)
        return rows

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

    def tables(self, places: Sequence[TablePlace]) -> list[Future[bytes | None]]:
        """Begin to read the tables of some samples' clips: None where they are not there, or not as the index says."""
        pool = ThreadPoolExecutor(_FETCHING)  # its threads end with the last table: nobody else has it
        return [pool.submit(self._table, place) for place in places]

    def _table(self, place: TablePlace) -> bytes | None:
        try:
            data = bytes(self.store.fetch(place.path, place.offset, place.size).data)
        except (NotFoundError, AccessError):  # stores that let nobody list say of what is missing that it is forbidden
            data = b""
        if len(data) == place.size and crc32c_of(data) == place.crc32c:
            return data
        if place.path not in self._warned:
            self._warned.add(place.path)
            logger.warning(
                "%s is missing or not the one that its index describes, so clips of its shard are read whole; copy it "
                "here, or write it again with: vlm-stream index",
                self.store.url(place.path),
            )
        return None

    def indexes(self) -> Iterator[ShardIndex]:
        """Yield the index of each shard, with all of its samples."""
        for begin in range(0, len(self._numbers), _TOGETHER):
            yield from self._each(self._decode, range(begin, min(begin + _TOGETHER, len(self._numbers))))

    def look(self, shards: Sequence[int]) -> list[tuple[ShardIndex, Sequence[int]]]:
        """Return the indexes of some shards, each with the rows of it that are shown."""
        indexes = self._each(self._decode, shards)
        return [(index, self._rows(shard, index)) for shard, index in zip(shards, indexes, strict=True)]

    def find_shard(self, name: str) -> int | None:
        """Return the number of the shard whose tar has that name; None: there is none, or it shows no sample."""
        names: list[str] = self.manifest.shards.column("name")
        number = names.index(name) if name in names else -1
        return self._numbers.index(number) if number in self._numbers else None

    def find(self, name: str) -> list[tuple[int, int]]:
        """Return shard and row of the samples with that key, or with that id of their own."""
        found = []
        for shard, index in enumerate(self.indexes()):
            if named := index.find(name):
                found += [(shard, place) for place, row in enumerate(self._rows(shard, index)) if row in named]
        return found

    def _each(self, function: Callable[[int, bytes | ShardIndex], R], shards: Sequence[int]) -> list[R]:
        """Return `function(shard, index)` for each shard and its index; many wait for stores, few compute."""
        found = (self._cache.get(self._kept_as, self._numbers[shard]) for shard in shards)
        kept = [index for index in found if isinstance(index, ShardIndex)]
        if len(kept) == len(shards):  # nothing to wait for
            return list(map(function, shards, kept))
        with (
            ThreadPoolExecutor(min(_FETCHING, len(shards))) as fetching,
            ThreadPoolExecutor(min(_DECODING, len(shards))) as decoding,
            _system_memory(),
        ):
            return list(decoding.map(function, shards, fetching.map(self._fetch, shards)))

    def _fetch(self, shard: int) -> bytes | ShardIndex:
        """Return an index as it is kept, or its bytes, which are kept from then on."""
        number = self._numbers[shard]
        index = self._cache.get(self._kept_as, number)
        if index is None:
            index = fetch_index(self.store, self.manifest.shards[number])
            self._cache.put(self._kept_as, number, index)
        return index

    def _decode(self, shard: int, index: bytes | ShardIndex) -> ShardIndex:
        """Return a decoded index, which is kept from then on in place of its bytes."""
        if isinstance(index, bytes):
            number = self._numbers[shard]
            entry, tars = self.manifest.shards[number], self.manifest.tars
            index = open_index(index, self.store, entry, tars=tars, keyframes=self._keyframes)
            for url in index.outside():
                check_place(url, self.root, self.named)
            self._cache.put(self._kept_as, number, index)
        return index


def check_place(url: str, root: str, named: Sequence[str]) -> None:
    """Refuse tars and files that lie elsewhere than their dataset, unless the user has named the place.

    Elsewhere is another host or bucket; on a disk it is whatever lies outside of the dataset's folder.

    Raises:
        DatasetError: They do.
    """
    if host_of(url) == host_of(root) and (scheme_of(url) != "file" or _is_inside(url, root)):
        return
    if any(
        is_under(url, each) or (scheme_of(url) == scheme_of(each) == "file" and _is_inside(url, each)) for each in named
    ):
        return
    raise DatasetError(
        f"the dataset {root} says that its tars are at {url!r:.500}, which is not where the dataset lies; whoever "
        f"wrote it could have any file of this machine read, or send you to any host with your credentials, so nothing "
        f"is read there. If you know that place, name it with --tars URL (tars of the store's options)"
    )


def _is_inside(url: str, folder: str) -> bool:
    """Tell whether a local file lies in a folder, wherever links lead."""
    if not url.startswith(("/", "file:")):
        return False
    try:
        place, root = (os.path.realpath(local_path(each)) for each in (url, folder))
    except (ValueError, ConfigError):  # no path
        return False
    return os.path.commonpath((place, root)) == root


def _draw(index: ShardIndex, row: int) -> Drawn:
    (span, shared), sizes, table = index.spans(row), index.sizes(row), index.table(row)
    return Drawn(index.key(row), span, sizes, index.entry_of(row), index.own_id(row), table, shared, index.text(row))


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
