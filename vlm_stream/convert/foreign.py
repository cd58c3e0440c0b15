"""Tars made elsewhere become a dataset: one pass writes an index for each and a manifest. No tar is rewritten.

Enters: URLs, with braces, of tars in any WebDataset layout. Leaves: indexes, ledger and manifest, beside the tars or
in a folder of their own. A sample is a run of members with the same key, as WebDataset has it; what cannot be used is
left out of the index and named in the ledger.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, TypeAlias

import crc32c

from vlm_stream.convert.clip_tables import NO_TABLE, ClipTables, TableFile, find_clips, rest_checksums
from vlm_stream.convert.counting import SampleCounter, open_counter
from vlm_stream.convert.engines import LocalEngine, choose_workers
from vlm_stream.convert.job import ShardPart, bad_sample, count_reasons, is_local, save_ledger
from vlm_stream.convert.rows import NO_TEXT, SampleCounts, SampleRow, TextFile, check_fits_index, write_index
from vlm_stream.convert.sample import measure_media
from vlm_stream.convert.tar import TarMember, iter_pieces
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
from vlm_stream.ledger import BadSample
from vlm_stream.storage import Member, ObjectReader, Store, StoreOptions, expand_urls, open_store
from vlm_stream.tokens import MediaSizes

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
    excluded: frozenset[str] = frozenset()
    """Samples that are left out, as `TAR/KEY`."""
    store: StoreOptions | None = None


IndexTask: TypeAlias = tuple[int, str]
"""Number and name of a file to be indexed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexContext:
    """What all tasks share."""

    tars: str
    out: str
    fields: FieldMap
    options: IndexOptions
    index: Callable[[IndexContext, IndexTask], ShardPart]

    def __call__(self, task: IndexTask) -> ShardPart:
        return self.index(self, task)

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
    tars = open_store(root, options.store)
    out = open_store(options.out, options.store) if options.out else tars
    if not options.overwrite and any(info.path == MANIFEST for info in out.list(MANIFEST)):
        raise ConfigError(
            f"{out.root} already holds a dataset ({load_manifest(out).totals.samples} samples); nothing was written. "
            f"Give another --out, or replace its indexes and manifest with --overwrite."
        )
    return write_indexes(tars, names, out, options, on_part=on_part)


def write_indexes(
    tars: Store,
    names: Sequence[str],
    out: Store,
    options: IndexOptions,
    *,
    on_part: Callable[[ShardPart, int], None] | None = None,
    index: Callable[[IndexContext, IndexTask], ShardPart] | None = None,
) -> Manifest:
    """Read tars once; write an index for each, the ledger, and last the manifest, whatever is there.

    Whoever does it and however many do it at the same time, they write the same. With `index`, which then is called for
    each name, these are other files, and tars are written for them.
    """
    fields = find_layout(tars, names, options.fields)
    context = IndexContext(tars=tars.root, out=out.root, fields=fields, options=options, index=index or _index_tar)
    parts: dict[int, ShardPart] = {}
    tasks = list(enumerate(names))
    if options.threads:
        done = _run_threads(context, tasks, options.threads)
    else:
        workers = options.workers
        if workers is None:
            seconds = len(names) * tars.head(names[0]).size / _BYTES_PER_SECOND
            workers = choose_workers(seconds, len(names), with_processor=options.processor is not None)
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
        tars=tars.root if out.root != tars.root and index is None else "",
        home="" if is_local(tars) else out.root,
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
    store, excluded = context.options.store, context.options.excluded
    tars, out = open_store(context.tars, store), open_store(context.out, store)
    info = tars.head(name)
    folder = posixpath.basename(context.tars.rstrip("/")) or "data"
    shared = SharedMembers(tars, name)
    scan = _Scan(name, folder, context.fields, context.counter, shared, excluded)
    with ObjectReader(tars, name, info.size) as reader:
        for key, group in iter_samples(iter_pieces(reader.read), scan.note):
            scan.add(key, group)
        crc32c = reader.finish()
    scan.texts.write(out, name)
    facts = {"num_bytes": info.size, "crc32c": crc32c, "etag": None if is_local(tars) else info.etag}
    entry = write_index(out.put, name, scan.rows, scan.tables, **facts)
    return ShardPart(number=number, entry=entry, bad=tuple(scan.bad), whole=dict(scan.tables.whole))


@dataclass(slots=True)
class _Scan:
    """What one pass over one tar has found so far."""

    name: str
    folder: str
    """Stands for the meta file's entry: one for all tars."""
    fields: FieldMap
    counter: SampleCounter
    shared: SharedMembers
    excluded: frozenset[str] = frozenset()
    rows: list[SampleRow] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    tables: TableFile = field(default_factory=TableFile)
    texts: TextFile = field(init=False)

    def __post_init__(self) -> None:
        self.texts = TextFile(self.fields)

    def add(self, key: str, group: list[tuple[str, TarMember]]) -> None:
        """Append a row, or a line of the ledger."""
        begin = group[0][1].begin
        try:
            if key in self.keys:
                raise BadSampleError("convert", "duplicate_key", f"the key '{key}' was in this tar before.")
            self.keys.add(key)
            if f"{self.name}/{key}" in self.excluded:
                raise BadSampleError("convert", "excluded", "the dataset's own list of splits excludes it.")
            self.rows.append(_to_row(key, group, self))
        except Exception as error:  # tars made elsewhere hold anything
            self.note(key, begin, blame_sample(error, "convert", "bad_form", "the sample cannot be indexed"))

    def note(self, key: str, offset: int, error: BadSampleError) -> None:
        self.bad.append(bad_sample(self.name, key or self.name, error, shard=self.name, offset=offset))


def _to_row(key: str, group: list[tuple[str, TarMember]], scan: _Scan) -> SampleRow:
    fields = scan.fields
    names = [extension for extension, _ in group]
    scan.shared.add(key, group)
    if not _is_utf8(key, *names):
        raise BadSampleError("convert", "bad_name", "names of its members are not UTF-8, so no index can hold them.")
    if len({name.lower() for name in names}) < len(names):
        raise BadSampleError("convert", "duplicate_member", f"the sample has two members of one name: {names}.")
    contents = {extension: member.content for extension, member in group}
    texts = {name: content for name, content in contents.items() if is_text_member(name)}
    shared: tuple[Member, ...] = ()
    if fields.layout == "bytes":
        sizes, counts, clips, place = MediaSizes(), SampleCounts(1), None, NO_TEXT
    else:
        if fields.layout == "native":
            shared = scan.shared.named_in(texts)
        everything = contents | {member.name: scan.shared.read(member) for member in shared}
        conversation, own = read_sample(fields, list(everything), texts)
        tables = ClipTables()
        sizes = measure_media(conversation, everything, tables)
        counts, tokens = scan.counter.count_and_keep(conversation, sizes)
        clips = find_clips(conversation, everything, sizes, tables)
        scan.tables.whole.update(tables.whole.values())
        place = scan.texts.add(conversation, tokens, own, texts)
    cut = () if clips is None else clips.clips
    pieces = []
    for name, member in group:
        pieces += [(member.header, False), (member.content, name in cut), (member.pad, False)]
    crc = reduce(lambda crc, piece: crc32c.crc32c(piece[0], crc), pieces, 0)
    check_fits_index(counts.text_tokens, sizes)
    begin, end = group[0][1].begin, group[-1][1].end
    if sum(len(piece) for piece, _ in pieces) != end - begin:
        raise BadSampleError("convert", "split_sample", "other entries of the tar lie between the sample's members.")
    own_id, entry = own_names(fields, texts)
    return SampleRow(
        key=key,
        id=own_id,
        entry=entry or scan.folder,
        offset=begin,
        size=end - begin,
        crc32c=crc,
        text_tokens=counts.text_tokens,
        label_tokens=counts.label_tokens,
        sizes=sizes,
        members=(*(Member(name, member.offset, len(member.content)) for name, member in group), *shared),
        clips=NO_TABLE if clips is None else scan.tables.add(clips, rest_checksums(pieces)),
        gops=() if clips is None else clips.gops,
        texts=place,
    )


def _is_utf8(*names: str) -> bool:
    try:
        return all(name.isascii() or name.encode() for name in names)
    except UnicodeEncodeError:  # bytes of a tar that are not
        return False
