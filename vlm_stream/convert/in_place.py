"""A URL becomes an opened dataset: ours, tars of others, or Energon's, each where it is.

Enters: what a user calls a dataset: a folder, `x.tar`, `{00..31}.tar`, `a.tar::b.tar`, an Energon folder with `#split`,
a LeRobot folder.
Leaves: an `OpenDataset`. Tars without an index get one on first use, in `.vlm_stream/` beside them, or in the user's
cache folder where that cannot be written. The place is named after the tars' names, sizes and etags (locally: times of
change), so tars that change get a new one. One process of a machine indexes, the others wait.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from vlm_stream.convert.alone import alone, user_cache
from vlm_stream.convert.energon import is_energon, read_energon, split_fragment
from vlm_stream.convert.foreign import BYTES, IndexOptions, Tars, index_tars, write_indexes
from vlm_stream.convert.job import LEDGER, ShardPart, is_local
from vlm_stream.convert.lerobot import is_lerobot, lerobot_videos
from vlm_stream.convert.tar_samples import find_layout
from vlm_stream.errors import ConfigError, DatasetError, NotFoundError, VlmStreamError
from vlm_stream.format import FORMAT_VERSION, MANIFEST, FieldMap, IndexCache, Manifest, OpenDataset, load_manifest
from vlm_stream.schema import human_bytes
from vlm_stream.storage import ObjectInfo, Store, StoreOptions, expand_urls, join_url, names_tars, open_store

logger = logging.getLogger(__name__)

Need: TypeAlias = Literal["conversation", "members", "bytes"]

_FOLDER: Final = ".vlm_stream"
_THREADS: Final = 8
_VIDEO_THREADS: Final = 2
"""Each has a file in memory."""
_ASKING: Final = 32
_LINE_SECONDS: Final = 10.0


def open_dataset(
    url: str, store: StoreOptions | None = None, cache: IndexCache | None = None, *, need: Need = "conversation"
) -> OpenDataset:
    """Open a dataset, whatever kind it is; index it first where that was never done.

    Args:
        url: A folder or URL with `dataset.json`, tars, a folder of tars, or an Energon dataset.
        store: How to reach object stores.
        cache: Keeps indexes.
        need: What samples are used for: each must make a `conversation`; their `members` are enough where they make
            none; or just `bytes` are wanted, and every sample counts, whatever it holds.
    """
    cache = IndexCache(0) if cache is None else cache
    missing: DatasetError | None = None
    if not names_tars(url) and "#" not in url:
        try:
            return _checked(OpenDataset(url, store, cache), url, need)
        except DatasetError as error:
            if not isinstance(error.__cause__, NotFoundError):
                raise
            missing = error
    tars = _find_tars(url, store, need, missing)
    options = IndexOptions(threads=_THREADS if tars.index is None else _VIDEO_THREADS, store=store)
    found, only = _find_place(tars, store) or (index_in_place(tars, options, need=need), None)
    dataset = OpenDataset(found, store, cache, only=only, tars=tars.root)
    if tars.subflavors:
        fields = dataset.manifest.fields
        tags = fields.tags | {"subflavors": json.dumps(tars.subflavors, sort_keys=True)}
        dataset.manifest = replace(dataset.manifest, fields=replace(fields, tags=tags))
    return _checked(dataset, url, need)


def _checked(dataset: OpenDataset, url: str, need: Need) -> OpenDataset:
    if need == "conversation" and dataset.manifest.fields.layout == "bytes":
        raise ConfigError(
            f"the samples of {url} were indexed as bytes, because their members have no known layout, so they have no "
            f"conversation to encode; use them without a processor, or index them with: vlm-stream index '{url}' "
            f"--layout caption --overwrite (or sharegpt, native)"
        )
    return dataset


def index_urls(
    urls: Sequence[str], options: IndexOptions, *, on_part: Callable[[ShardPart, int], None] | None = None
) -> tuple[Manifest, str]:
    """Index tars into `options.out`, or beside them; where that is impossible, and for Energon, where loaders look.

    Returns:
        The manifest, and where it is.
    """
    if len(urls) == 1 and options.out is None:
        is_known = not names_tars(urls[0]) and _is_known(open_store(split_fragment(urls[0])[0], options.store))
        if is_known or not _can_write(urls, options):
            if options.fields is not None:
                raise ConfigError(
                    f"a layout was named, and the index of {urls[0]} goes where loaders look for the layout that the "
                    f"tars show themselves, so it would not be found; name a folder by --out, and give that to loaders"
                )
            tars = _find_tars(urls[0], options.store)
            place = index_in_place(tars, options, on_part=on_part)
            return load_manifest(open_store(place, options.store)), place
    manifest = index_tars(urls, options, on_part=on_part)
    return manifest, open_store(options.out or expand_urls(urls, options.store)[0], options.store).root


def _is_known(store: Store) -> bool:
    return is_energon(store) or is_lerobot(store)


def _can_write(urls: Sequence[str], options: IndexOptions) -> bool:
    """Tell whether an index can be written beside the tars; a dataset that is there is left alone."""
    root, _ = expand_urls(urls, options.store)
    if not options.overwrite and _manifest_at(root, options.store) is not None:
        return True
    store, ledger = open_store(root, options.store), b""
    try:
        with suppress(NotFoundError):
            ledger = bytes(store.get(LEDGER))
        store.put(LEDGER, ledger)
    except (VlmStreamError, OSError):
        return False
    return True


def _find_tars(
    url: str, options: StoreOptions | None, need: Need = "conversation", missing: DatasetError | None = None
) -> Tars:
    fields = BYTES if need == "bytes" else None
    if names_tars(url):
        root, names = expand_urls([url], options)
        return Tars(url=url, root=root, names=tuple(names), fields=fields)
    base, split, settings = split_fragment(url)
    store = open_store(base, options)
    if is_energon(store):
        return replace(
            read_energon(store, split, settings, as_bytes=need == "bytes"), url=url.partition(";subflavors=")[0]
        )
    if split:
        raise ConfigError(
            f"'{url}' names the split '{split}', and {base} is no Energon dataset (it has no .nv-meta/.info.json), so "
            f"it has no splits; leave '#{split}' out, or run: energon prepare"
        )
    if is_lerobot(store):
        return replace(lerobot_videos(store, options), url=url)
    try:
        names = [info.path for info in store.list() if info.path.endswith(".tar")]
    except VlmStreamError:
        names = []  # web servers list nothing
    if not names:
        raise missing or DatasetError(f"{url} holds no tar, so there is nothing to stream.")
    return Tars(url=url, root=store.root, names=tuple(names), fields=fields)


def _find_place(tars: Tars, options: StoreOptions | None) -> tuple[str, tuple[str, ...] | None] | None:
    """Return where the index of these tars is, and which of its tars are meant if it has others; None: nowhere."""
    store = open_store(tars.root, options)
    infos = _look(store, tars.names)
    if tars.fields in (None, BYTES) and not tars.excluded:
        manifest = _manifest_at(tars.root, options)
        is_ours = manifest is not None and not manifest.tars and set(tars.names) <= set(manifest.shards.column("name"))
        # Whoever wants every sample as it lies cannot use an index that leaves some out.
        if manifest is not None and is_ours and (tars.fields is None or manifest.job or not manifest.dropped):
            _check_unchanged(tars, manifest, infos)
            return tars.root, None if list(tars.names) == manifest.shards.column("name") else tars.names
    key = _key(tars, store, infos)
    for place in _places(tars.root, key):
        if _manifest_at(place, options) is not None:
            return place, None
    return None


def index_in_place(
    tars: Tars,
    options: IndexOptions,
    *,
    need: Need = "conversation",
    on_part: Callable[[ShardPart, int], None] | None = None,
) -> str:
    """Index tars into the place where they are looked for, unless another process has done it; return that place.

    `on_part` is called with every indexed tar and the number of tars; without it, progress goes to the log.
    """
    store = open_store(tars.root, options.store)
    infos = _look(store, tars.names)
    key = _key(tars, store, infos)
    with alone(store, f"{_FOLDER}/{key}.lock", "indexes", tars.url):
        for place in _places(tars.root, key):
            if not options.overwrite and _manifest_at(place, options.store) is not None:
                return place
        fields = tars.fields or _guess(store, tars, need)
        place = _writable_place(tars, key, options.store)
        num_bytes = sum(info.size for info in infos)
        if on_part is None:
            logger.warning(
                "indexing %d tars (%s) of %s into %s: once, and again only if they change; to do it beforehand "
                "with several processes run: vlm-stream index '%s' --workers N",
                len(infos), human_bytes(num_bytes), tars.url, place, tars.url,
            )  # fmt: skip
        out = open_store(place, options.store)
        manifest = write_indexes(tars, out, fields, options, on_part=on_part or _Lines(num_bytes))
        if on_part is None:
            dropped = ", ".join(f"{count} {reason}" for reason, count in manifest.dropped.items()) or "none"
            logger.warning(
                "indexed %s: %d samples, layout '%s'; left out, and named in the ledger there: %s",
                tars.url, manifest.totals.samples, fields.layout, dropped,
            )  # fmt: skip
    return place


class _Lines:
    """Progress as lines of the log, some seconds apart."""

    def __init__(self, num_bytes: int) -> None:
        self._total, self._done, self._num_tars = num_bytes, 0, 0
        self._last = time.monotonic()

    def __call__(self, part: ShardPart, num_tars: int) -> None:
        self._done += part.entry.totals.bytes
        self._num_tars += 1
        if time.monotonic() - self._last >= _LINE_SECONDS:
            self._last = time.monotonic()
            logger.warning(
                "indexed %d of %d tars, %s of %s",
                self._num_tars, num_tars, human_bytes(self._done), human_bytes(self._total),
            )  # fmt: skip


def _guess(store: Store, tars: Tars, need: Need) -> FieldMap:
    try:
        return find_layout(store, tars.names)
    except ConfigError as error:
        if need == "conversation":
            raise ConfigError(f"{error} Do that with: vlm-stream index '{tars.url}' --layout ...") from error
        return BYTES


def _look(store: Store, names: tuple[str, ...]) -> list[ObjectInfo]:
    """Return size and etag of each tar; a local file's time of change stands for its etag."""
    if is_local(store):
        infos = [store.head(name) for name in names]
        return [replace(info, etag=str(Path(store.root, info.path).stat().st_mtime_ns)) for info in infos]
    try:
        prefix = os.path.commonprefix(names)  # noqa: RUF071 (of names, not of folders)
        listed = {info.path: info for info in store.list(prefix)}
    except VlmStreamError:  # web servers list nothing
        listed = {}
    with ThreadPoolExecutor(_ASKING) as pool:
        return list(pool.map(lambda name: listed.get(name) or store.head(name), names))


def _key(tars: Tars, store: Store, infos: list[ObjectInfo]) -> str:
    """Return the name of the place: the same for the same tars, used in the same way."""
    seen = [[name, info.size, info.etag] for name, info in zip(tars.names, infos, strict=True)]
    how = [None if tars.fields is None else tars.fields.to_json(), sorted(tars.excluded)]
    text = json.dumps([FORMAT_VERSION, store.root, seen, how], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


def _places(root: str, key: str) -> tuple[str, str]:
    return join_url(root, f"{_FOLDER}/{key}"), str(user_cache() / "indexes" / key)


def _manifest_at(place: str, options: StoreOptions | None) -> Manifest | None:
    try:
        return load_manifest(open_store(place, options))
    except DatasetError as error:
        if isinstance(error.__cause__, NotFoundError):
            return None
        raise


def _check_unchanged(tars: Tars, manifest: Manifest, infos: list[ObjectInfo]) -> None:
    """Refuse an index that was made for other tars: it may have a layout that only its maker knows."""
    shards = manifest.shards
    columns = map(shards.column, ("name", "bytes", "etag"))
    listed = {name: (size, etag) for name, size, etag in zip(*columns, strict=True)}
    for name, info in zip(tars.names, infos, strict=True):
        size, etag = listed[name]
        if size != info.size or (etag is not None and info.etag is not None and etag != info.etag):
            raise DatasetError(
                f"{join_url(tars.root, name)} has changed since {join_url(tars.root, MANIFEST)} was written, so its "
                f"samples are not where that says; index the tars again with: vlm-stream index '{tars.url}' --overwrite"
            )


def _writable_place(tars: Tars, key: str, options: StoreOptions | None) -> str:
    beside, cached = _places(tars.root, key)
    note = json.dumps({"tars": tars.url, "made by": "vlm-stream: an index of tars that are used in place"}) + "\n"
    try:
        open_store(beside, options).put("about.json", note.encode())
    except (VlmStreamError, OSError):  # read-only buckets, web servers, the folders of others
        open_store(cached).put("about.json", note.encode())
        return cached
    return beside
