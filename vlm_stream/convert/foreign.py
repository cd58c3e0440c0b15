"""Tars made elsewhere become a dataset: one pass writes an index for each and a manifest. No tar is rewritten.

Enters: URLs, with braces, of tars in any WebDataset layout. Leaves: indexes, ledger and manifest, beside the tars or
in a folder of their own. A sample is a run of members with the same key, as WebDataset has it; what cannot be used is
left out of the index and named in the ledger.
"""

from __future__ import annotations

import itertools
import posixpath
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import crc32c

from vlm_stream.conversation import iter_media
from vlm_stream.convert.counting import open_counter
from vlm_stream.convert.engines import LocalEngine, choose_workers
from vlm_stream.convert.job import LEDGER
from vlm_stream.convert.rows import SampleCounts, SampleRow, check_fits_index, encode_index
from vlm_stream.convert.sample import measure_item
from vlm_stream.convert.shard_task import ShardPart, is_local
from vlm_stream.convert.tar import TarGap, TarMember, iter_pieces, split_member_name
from vlm_stream.errors import BadSampleError, ConfigError, blame_sample
from vlm_stream.format import (
    MANIFEST,
    FieldMap,
    Manifest,
    ShardList,
    describe_shard,
    guess_fields,
    index_name,
    is_text_member,
    load_manifest,
    own_names,
    save_manifest,
    to_conversation,
)
from vlm_stream.ledger import BadSample
from vlm_stream.storage import Member, ObjectReader, expand_urls, open_store
from vlm_stream.tokens import MediaSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from vlm_stream.conversation import Conversation
    from vlm_stream.convert.counting import SampleCounter
    from vlm_stream.storage import Store, StoreOptions

__all__ = ["IndexOptions", "guess_layout", "index_tars", "measure_media", "write_indexes"]


_BYTES_PER_SECOND: Final = 2e8
"""About what one process indexes."""
_NUM_TOLD: Final = 3
_NUM_GUESSED: Final = 100
"""Samples that are asked for the layout: the first may be a bad one."""
_LEFT_OUT: Final = "The bytes from {begin} to {end} are left out, and so is a sample that has lost a member there."


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


@dataclass(frozen=True, slots=True)
class _Task:
    number: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    tars: str
    out: str
    fields: FieldMap
    counting: dict[str, Any]
    """Arguments of `open_counter`."""
    excluded: frozenset[str]
    store: StoreOptions | None

    def __call__(self, task: _Task) -> ShardPart:
        return _index_tar(self, task)


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
) -> Manifest:
    """Read tars once; write an index for each, the ledger, and last the manifest, whatever is there.

    Whoever does it and however many do it at the same time, they write the same.
    """
    fields = options.fields or guess_layout(tars, names)
    counting: dict[str, Any] = {"processor": options.processor, "trust_remote_code": options.trust_remote_code}
    context = _Context(
        tars=tars.root,
        out=out.root,
        fields=fields,
        counting=counting,
        excluded=options.excluded,
        store=options.store,
    )
    parts: dict[int, ShardPart] = {}
    tasks = [_Task(number, name) for number, name in enumerate(names)]
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
    out.put(LEDGER, "".join(bad.to_json() + "\n" for part in ordered for bad in part.bad).encode())
    dropped = Counter(f"{bad.stage}: {bad.reason}" for part in ordered for bad in part.bad)
    manifest = Manifest(
        shards=ShardList.of(part.entry for part in ordered),
        tokens=open_counter(**counting).note,
        fields=fields,
        tars=tars.root if out.root != tars.root else "",
        home="" if is_local(tars) else out.root,
        dropped=dict(sorted(dropped.items())),
    )
    save_manifest(out, manifest)
    return manifest


def _run_threads(context: _Context, tasks: Sequence[_Task], threads: int) -> Iterator[ShardPart]:
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(context, task) for task in tasks]
        try:
            for done in as_completed(running):
                yield done.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def guess_layout(store: Store, names: Sequence[str]) -> FieldMap:
    """Return the layout that the first sample shows; where that shows none, one of those behind it."""
    refused: ConfigError | None = None
    faults: list[str] = []
    for group in itertools.islice(_first_samples(store, names, faults), _NUM_GUESSED):
        texts = {extension: m.content for extension, m in group if is_text_member(extension)}
        try:
            return guess_fields([extension for extension, _ in group], texts)
        except ConfigError as error:
            refused = refused or error
    fault = f" ({faults[0]})" if faults else ""
    raise refused or ConfigError(f"the tars at {store.root} hold no samples{fault}, so there is nothing to index.")


def _first_samples(store: Store, names: Sequence[str], faults: list[str]) -> Iterator[list[tuple[str, TarMember]]]:
    for name in names:
        with ObjectReader(store, name, store.head(name).size) as reader:
            for _, group in _iter_samples(iter_pieces(reader.read), partial(_keep_fault, faults, name)):
                yield group


def _keep_fault(faults: list[str], name: str, _key: str, _offset: int, error: BadSampleError) -> None:
    faults.append(f"{name}: {error}")


def _iter_samples(
    pieces: Iterable[TarMember | TarGap], note: Callable[[str, int, BadSampleError], None]
) -> Iterator[tuple[str, list[tuple[str, TarMember]]]]:
    """Yield key and `(extension, member)`s: neighbours with the same key are one sample.

    Gaps are noted, and so are samples beside them that are not whole: they have the key of the damaged member, or lack
    a kind of member that the last whole sample has.
    """
    key = ""
    group: list[tuple[str, TarMember]] = []
    gap: TarGap | None = None  # the last one, while it touches the group
    kinds: set[str] = set()

    def is_whole() -> bool:
        nonlocal kinds
        found = {extension.rpartition(".")[2] for extension, _ in group}
        if gap is not None and (split_member_name(gap.name)[0] == key or found < kinds):
            detail = f"a member of it was lost, because {gap.fault}"
            note(key, group[0][1].begin, BadSampleError("read", "damaged_tar", detail))
            return False
        kinds = found
        return True

    for piece in pieces:
        if isinstance(piece, TarGap):
            fault = f"{piece.fault} {_LEFT_OUT.format(begin=piece.begin, end=piece.end)}"
            note("", piece.begin, BadSampleError("read", "damaged_tar", fault))
            gap = piece
            continue
        new_key, extension = split_member_name(piece.name)
        if not extension or piece.name.rpartition("/")[2].startswith("."):
            continue  # READMEs and the dot files of archivers (`._x.jpg`) are no samples
        if new_key != key and group:
            if is_whole():
                yield key, group
            touches = gap is not None and gap.end > group[-1][1].end
            gap = gap if touches else None
            group = []
        key = new_key
        group.append((extension, piece))
    if group and is_whole():
        yield key, group


def _index_tar(context: _Context, task: _Task) -> ShardPart:
    """Index one tar; write its sidecar."""
    tars = open_store(context.tars, context.store)
    out = open_store(context.out, context.store)
    info = tars.head(task.name)
    folder = posixpath.basename(context.tars.rstrip("/")) or "data"
    scan = _Scan(task.name, folder, context.fields, open_counter(**context.counting), context.excluded)
    with ObjectReader(tars, task.name, info.size) as reader:
        for key, group in _iter_samples(iter_pieces(reader.read), scan.note):
            scan.add(key, group)
        crc32c = reader.finish()
    data = encode_index(scan.rows)
    out.put(index_name(task.name), data)
    etag = None if is_local(tars) else info.etag
    entry = describe_shard(task.name, data, num_bytes=info.size, crc32c=crc32c, etag=etag)
    return ShardPart(number=task.number, entry=entry, bad=tuple(scan.bad))


@dataclass(slots=True)
class _Scan:
    """What one pass over one tar has found so far."""

    name: str
    folder: str
    """Stands for the meta file's entry: one for all tars."""
    fields: FieldMap
    counter: SampleCounter
    excluded: frozenset[str] = frozenset()
    rows: list[SampleRow] = field(default_factory=list)
    bad: list[BadSample] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    def add(self, key: str, group: list[tuple[str, TarMember]]) -> None:
        """Append a row, or a line of the ledger."""
        begin = group[0][1].begin
        try:
            if key in self.keys:
                raise BadSampleError("convert", "duplicate_key", f"the key '{key}' was in this tar before.")
            self.keys.add(key)
            if f"{self.name}/{key}" in self.excluded:
                raise BadSampleError("convert", "excluded", "the dataset's own list of splits excludes it.")
            self.rows.append(_to_row(key, group, self.folder, self.fields, self.counter))
        except Exception as error:  # tars made elsewhere hold anything
            self.note(key, begin, blame_sample(error, "convert", "bad_form", "the sample cannot be indexed"))

    def note(self, key: str, offset: int, error: BadSampleError) -> None:
        """Append a line of the ledger."""
        self.bad.append(
            BadSample(
                source=self.name,
                sample=key or self.name,
                stage=error.stage,
                reason=error.reason,
                detail=str(error),
                shard=self.name,
                offset=offset,
            )
        )


def _to_row(
    key: str, group: list[tuple[str, TarMember]], folder: str, fields: FieldMap, counter: SampleCounter
) -> SampleRow:
    names = [extension for extension, _ in group]
    if not _is_utf8(key, *names):
        raise BadSampleError("convert", "bad_name", "names of its members are not UTF-8, so no index can hold them.")
    if len({name.lower() for name in names}) < len(names):
        raise BadSampleError("convert", "duplicate_member", f"the sample has two members of one name: {names}.")
    contents = {extension: member.content for extension, member in group}
    texts = {name: content for name, content in contents.items() if is_text_member(name)}
    if fields.layout == "bytes":
        sizes, counts = MediaSizes(), SampleCounts(1)
    else:
        conversation = to_conversation(fields, names, texts)
        sizes = measure_media(conversation, contents)
        counts = counter.count(conversation, sizes)
    crc = 0
    for _, member in group:
        for piece in (member.header, member.content, member.pad):
            crc = crc32c.crc32c(piece, crc)
    check_fits_index(counts.text_tokens, sizes)
    begin, end = group[0][1].begin, group[-1][1].end
    if sum(len(m.header) + len(m.content) + len(m.pad) for _, m in group) != end - begin:
        raise BadSampleError("convert", "split_sample", "other entries of the tar lie between the sample's members.")
    own_id, entry = own_names(fields, texts)
    return SampleRow(
        key=key,
        id=own_id,
        entry=entry or folder,
        offset=begin,
        size=end - begin,
        crc32c=crc,
        text_tokens=counts.text_tokens,
        label_tokens=counts.label_tokens,
        sizes=sizes,
        members=tuple(Member(name, member.offset, len(member.content)) for name, member in group),
    )


def _is_utf8(*names: str) -> bool:
    try:
        return all(name.isascii() or name.encode() for name in names)
    except UnicodeEncodeError:  # bytes of a tar that are not
        return False


def measure_media(conversation: Conversation, contents: dict[str, bytes]) -> MediaSizes:
    """Return the sizes of a conversation's media, whose bytes are given by member name."""
    sizes: dict[str, list[Any]] = {"image": [], "video": [], "audio": []}
    for item in iter_media(conversation):
        medium = item["type"]
        where = item[medium]
        names = where if isinstance(where, list) else [where]
        try:
            sizes[medium].append(measure_item(item, [contents[name] for name in names]))
        except BadSampleError as error:
            raise BadSampleError(error.stage, error.reason, f"member '{names[0]}': {error}") from error
    return MediaSizes(images=tuple(sizes["image"]), videos=tuple(sizes["video"]), audios=tuple(sizes["audio"]))
