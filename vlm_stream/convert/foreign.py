"""Tars made elsewhere become a dataset: one pass writes an index for each and a manifest. No tar is rewritten.

Enters: URLs, with braces, of tars in any WebDataset layout. Leaves: indexes, ledger and manifest, beside the tars or
in a folder of their own. A sample is a run of members with the same key, as WebDataset has it; what cannot be used is
left out of the index and named in the ledger.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from vlm_stream.convert.clip_tables import ClipTables, find_clips
from vlm_stream.convert.counting import SampleCounter, open_counter
from vlm_stream.convert.engines import LocalEngine, choose_workers
from vlm_stream.convert.job import ShardPart, bad_sample, count_reasons, is_local, save_ledger
from vlm_stream.convert.rows import NOWHERE, SampleCounts, ShardRows, TextFile, check_fits_index
from vlm_stream.convert.sample import measure_media
from vlm_stream.convert.tar import Group, iter_pieces
from vlm_stream.convert.tar_samples import SharedMembers, find_layout, iter_samples
from vlm_stream.errors import BadSampleError, ConfigError, blame_sample
from vlm_stream.format import (
    MANIFEST,
    FieldMap,
    Manifest,
    ShardList,
    is_text_member,
    load_manifest,
    own_names,
    read_sample,
    save_manifest,
)
from vlm_stream.storage import Member, ObjectReader, Store, StoreOptions, expand_urls, open_store
from vlm_stream.tokens import MediaSizes

BYTES: Final = FieldMap(layout="bytes")
_BYTES_PER_SECOND: Final = 2e8
"""About what one process indexes."""
_NUM_TOLD: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions:
    """How tars made elsewhere are indexed."""

    out: str | None = None
    """Folder or URL for indexes and manifest; None: beside the tars."""
    fields: FieldMap | None = None
    """How members become a conversation; None: as the first sample shows."""
    processor: str | None = None
    """Name or path of a transformers processor, for exact text tokens."""
    trust_remote_code: bool = False
    """Let the processor bring its own code."""
    workers: int | None = None
    """Tars at a time; None: as many as pay for their start."""
    threads: int = 0
    """Above 0: so many threads of this process do it, and no other processes are started."""
    overwrite: bool = False
    """Replace indexes and manifest that are there."""
    store: StoreOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tars:
    """Tars made elsewhere, or other files that are indexed as if they were some."""

    url: str = ""
    """What the user calls them."""
    root: str
    names: tuple[str, ...]
    fields: FieldMap | None = None
    """How members become a conversation; None: as the first samples show."""
    excluded: frozenset[str] = frozenset()
    """Samples that are left out, as `TAR/KEY`."""
    subflavors: dict[str, Any] = field(default_factory=dict)
    """What Energon says of all samples."""
    index: Callable[[IndexContext, IndexTask], ShardPart] | None = None
    """What indexes one of the files; None: they are tars. With it, tars are written for them."""


IndexTask: TypeAlias = tuple[int, str]
"""Number and name of a file to be indexed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexContext:
    """What all tasks share."""

    tars: Tars
    out: str
    fields: FieldMap
    options: IndexOptions

    def __call__(self, task: IndexTask) -> ShardPart:
        return (self.tars.index or _index_tar)(self, task)

    @property
    def counter(self) -> SampleCounter:
        return open_counter(self.options.processor, trust_remote_code=self.options.trust_remote_code)


def index_tars(
    urls: Sequence[str],
    options: IndexOptions | None = None,
    *,
    on_part: Callable[[ShardPart, int], None] | None = None,
) -> Manifest:
    """Write indexes and a manifest for tars made elsewhere.

    Args:
        urls: Paths or URLs of tars; `{000..127}` is expanded, a local `*` too, a folder means the tars in it.
        options: What to do.
        on_part: Called with every indexed tar and the number of tars, for progress.

    Raises:
        ConfigError: There are no tars, no known layout, or a dataset is there already.
    """
    options = options or IndexOptions()
    root, names = expand_urls(urls, options.store)
    store = open_store(root, options.store)
    out = open_store(options.out, options.store) if options.out else store
    if not options.overwrite and any(info.path == MANIFEST for info in out.list(MANIFEST)):
        raise ConfigError(
            f"{out.root} already holds a dataset ({load_manifest(out).totals.samples} samples); nothing was written. "
            f"Give another --out, or replace its indexes and manifest with --overwrite."
        )
    tars = Tars(root=store.root, names=tuple(names))
    return write_indexes(tars, out, find_layout(store, names, options.fields), options, on_part=on_part)


def write_indexes(
    tars: Tars,
    out: Store,
    fields: FieldMap,
    options: IndexOptions,
    *,
    on_part: Callable[[ShardPart, int], None] | None = None,
) -> Manifest:
    """Read tars once; write an index for each, the ledger, and last the manifest, whatever is there.

    Whoever does it and however many do it at the same time, they write the same.
    """
    store = open_store(tars.root, options.store)
    context = IndexContext(tars=tars, out=out.root, fields=fields, options=options)
    parts: dict[int, ShardPart] = {}
    tasks = list(enumerate(tars.names))
    if options.threads:
        done = _run_threads(context, tasks, options.threads)
    else:
        workers = options.workers
        if workers is None:
            seconds = len(tasks) * store.head(tars.names[0]).size / _BYTES_PER_SECOND
            workers = choose_workers(seconds, len(tasks), with_processor=options.processor is not None)
        done = LocalEngine(workers).run(context, tasks)
    for part in done:
        parts[part.number] = part
        if on_part is not None:
            on_part(part, len(tasks))
    ordered = [parts[number] for number in range(len(tasks))]
    if not any(part.entry.totals.samples for part in ordered):
        reasons = [f"{bad.sample}: {bad.reason}: {bad.detail}" for part in ordered for bad in part.bad]
        raise ConfigError(
            f"not one sample of the tars at {tars.root} can be used, so there is no dataset. The first reasons:\n  "
            + "\n  ".join(reasons[:_NUM_TOLD] or ["the tars are empty"])
        )
    save_ledger(out, ordered)
    manifest = Manifest(
        shards=ShardList.of(part.entry for part in ordered),
        tokens=context.counter.note,
        fields=fields,
        tars=tars.root if out.root != tars.root and tars.index is None else "",
        home="" if is_local(store) else out.root,
        **count_reasons(ordered),
    )
    save_manifest(out, manifest)
    return manifest


def _run_threads(context: IndexContext, tasks: Sequence[IndexTask], threads: int) -> Iterator[ShardPart]:
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(context, task) for task in tasks]
        try:
            for done in as_completed(running):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _index_tar(context: IndexContext, task: IndexTask) -> ShardPart:
    number, name = task
    store = context.options.store
    tars, out = open_store(context.tars.root, store), open_store(context.out, store)
    info = tars.head(name)
    scan = _Scan(context, tars, name)
    with ObjectReader(tars, name, info.size) as reader:
        for key, group in iter_samples(iter_pieces(reader.read), scan.note):
            scan.add(key, group)
        crc32c = reader.finish()
    scan.texts.write(out, name)
    facts = {"num_bytes": info.size, "crc32c": crc32c, "etag": None if is_local(tars) else info.etag}
    return scan.write(out.put, number, name, **facts)


class _Scan(ShardRows):
    """One pass over one tar."""

    def __init__(self, context: IndexContext, store: Store, name: str) -> None:
        super().__init__()
        self.name, self.tars, self.counter = name, context.tars, context.counter
        self.fields = context.fields
        self.folder = posixpath.basename(self.tars.root.rstrip("/")) or "data"
        """Stands for the meta file's entry: one for all tars."""
        self.shared = SharedMembers(store, name)
        self.texts = TextFile(fields=self.fields)
        self.keys: set[str] = set()

    def add(self, key: str, group: Group) -> None:
        """Append a row, or a line of the ledger."""
        try:
            if key in self.keys:
                raise BadSampleError("convert", "duplicate_key", f"the key '{key}' was in this tar before.")
            self.keys.add(key)
            if f"{self.name}/{key}" in self.tars.excluded:
                raise BadSampleError("convert", "excluded", "the dataset's own list of splits excludes it.")
            self._add(key, group)
        except Exception as error:  # tars made elsewhere hold anything
            bad = blame_sample(error, "convert", "bad_form", "the sample cannot be indexed")
            self.note(key, group[0][1].begin, bad)

    def note(self, key: str, offset: int, error: BadSampleError) -> None:
        self.bad.append(bad_sample(self.name, key or self.name, error, shard=self.name, offset=offset))

    def _add(self, key: str, group: Group) -> None:
        names = [name for name, _ in group]
        self.shared.add(key, group)
        if not _is_utf8(key, *names):
            raise BadSampleError(
                "convert", "bad_name", "names of its members are not UTF-8, so no index can hold them."
            )
        if len({name.lower() for name in names}) < len(names):
            raise BadSampleError("convert", "duplicate_member", f"the sample has two members of one name: {names}.")
        contents = {name: member.content for name, member in group}
        texts = {name: content for name, content in contents.items() if is_text_member(name)}
        shared: tuple[Member, ...] = ()
        sizes, counts, clips, place = MediaSizes(), SampleCounts(1), None, NOWHERE
        if self.fields.layout != "bytes":
            if self.fields.layout == "native":
                shared = self.shared.named_in(texts)
            contents |= {member.name: self.shared.read(member) for member in shared}
            conversation, own = read_sample(self.fields, list(contents), texts)
            tables = ClipTables()
            sizes = measure_media(conversation, contents, tables)
            counts, tokens = self.counter.count_and_keep(conversation, sizes)
            clips = find_clips(conversation, contents, sizes, tables)
            self.whole.update(tables.whole.values())
            place = self.texts.keep(conversation, tokens, own, texts)
        check_fits_index(counts.text_tokens, sizes)
        if any(member.end != after.begin for (_, member), (_, after) in itertools.pairwise(group)):
            raise BadSampleError(
                "convert", "split_sample", "other entries of the tar lie between the sample's members."
            )
        own_id, entry = own_names(self.fields, texts)
        self.add_row(
            group,
            clips,
            shared=shared,
            key=key,
            id=own_id,
            entry=entry or self.folder,
            sizes=sizes,
            texts=place,
            **counts._asdict(),
        )


def _is_utf8(*names: str) -> bool:
    try:
        return all(name.isascii() or name.encode() for name in names)
    except UnicodeEncodeError:  # bytes of a tar that are not
        return False
