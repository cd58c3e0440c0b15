"""Verification: every checksum, range and count of a dataset against its tars.

Enters: a dataset's URL. Leaves: problems, each with shard, key and offset; nothing is changed, and of media only the
first picture of clips with tables is decoded. Shards are checked side by side, each in one pass.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from vlm_stream.conversation import iter_media
from vlm_stream.convert.clip_tables import check_table, read_tables
from vlm_stream.convert.engines import LocalEngine, choose_workers
from vlm_stream.convert.in_place import open_dataset
from vlm_stream.convert.rows import check_texts
from vlm_stream.convert.tar import iter_members
from vlm_stream.encode import kept_text_key
from vlm_stream.errors import BadSampleError, DatasetError, NotFoundError
from vlm_stream.format import (
    FieldMap,
    ShardEntry,
    ShardIndex,
    check_place,
    clips_name,
    decode_index,
    index_name,
    is_text_member,
    load_manifest,
    texts_name,
    to_conversation,
)
from vlm_stream.storage import ObjectReader, Store, StoreOptions, crc32c_of, open_store, scheme_of

_BYTES_PER_SECOND: Final = 4e8
"""About what one process checks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is not as the manifest or the index says."""

    kind: str
    """Short stable code to count by."""
    shard: str
    detail: str
    key: str = ""
    offset: int = -1
    """Byte in the shard, where there is one."""

    def __str__(self) -> str:
        key = f" {self.key}" if self.key else ""
        place = f" at byte {self.offset}" if self.offset >= 0 else ""
        return f"{self.shard}{key}{place}: {self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What verification found."""

    url: str
    num_shards: int
    num_samples: int
    num_bytes: int
    problems: tuple[Problem, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checker:
    """Checks one shard, in any process."""

    root: str
    tars: str
    fields: FieldMap
    store: StoreOptions | None
    named: tuple[str, ...]
    text_key: str
    """Of the tokens that are kept beside the indexes."""

    def __call__(self, shard: ShardEntry) -> tuple[ShardEntry, list[Problem]]:
        check = _ShardCheck(shard=shard, fields=self.fields, store=self.store)
        dataset = open_store(self.root, self.store)
        index = check.read_index(dataset)
        if index is not None:
            for url in index.outside():
                check_place(url, self.root, self.named)
            check.tables, fault = read_tables(dataset, index, clips_name(shard.name))
            if fault:
                check.note("wrong_tables", fault)
            for row, detail in check_texts(dataset, index, texts_name(shard.name, self.text_key)):
                check.note("wrong_tokens", detail, key=index.key(row), offset=int(index.offset[row]))
        check.read_tar(open_store(self.tars or self.root, self.store), index)
        return shard, check.problems


def verify_dataset(
    url: str,
    *,
    workers: int | None = None,
    store: StoreOptions | None = None,
    on_shard: Callable[[ShardEntry, int, int], None] | None = None,
) -> VerifyReport:
    """Check a dataset against its tars.

    Args:
        url: The dataset's folder or URL.
        workers: Shards checked at a time; None: as many as pay for their start.
        store: How to reach object stores.
        on_shard: Called with every checked shard, the number of shards and its number of problems, for progress.

    Raises:
        DatasetError: There is no manifest that could be checked, or it names files that you have not allowed.
    """
    begin = time.perf_counter()
    opened = open_dataset(url, store, need="members")
    dataset = opened.store
    manifest = load_manifest(dataset)
    checker = _Checker(
        root=dataset.root,
        tars=manifest.tars,
        fields=manifest.fields,
        store=store,
        named=opened.named,
        text_key=kept_text_key(manifest.tokens.template_sha256, manifest.tokens.library),
    )
    found: dict[str, list[Problem]] = {}
    if workers is None:
        workers = choose_workers(manifest.totals.bytes / _BYTES_PER_SECOND, len(manifest.shards))
    for shard, problems in LocalEngine(workers).run(checker, manifest.shards):
        found[shard.name] = problems
        if on_shard is not None:
            on_shard(shard, len(manifest.shards), len(problems))
    problems = [problem for shard in manifest.shards for problem in found[shard.name]]
    totals = manifest.totals
    return VerifyReport(
        url=dataset.root,
        num_shards=len(manifest.shards),
        num_samples=totals.samples,
        num_bytes=totals.bytes,
        problems=(*problems, *_unlisted(open_store(manifest.tars or dataset.root, store), set(found))),
        seconds=round(time.perf_counter() - begin, 3),
    )


def _unlisted(store: Store, listed: set[str]) -> list[Problem]:
    """Return the shards of our naming that no manifest lists: leftovers, or a manifest of another run."""
    if scheme_of(store.root) in ("http", "https"):
        return []  # web servers list nothing
    return [
        Problem(kind="unlisted_shard", shard=info.path, detail="the manifest does not list it, so nothing reads it.")
        for info in store.list("shard-")
        if info.path.endswith(".tar") and info.path not in listed
    ]


@dataclass(slots=True, kw_only=True)
class _ShardCheck:
    """The check of one shard under way."""

    shard: ShardEntry
    fields: FieldMap
    problems: list[Problem] = field(default_factory=list)
    tables: bytes = b""
    """The file of tables of clips."""
    store: StoreOptions | None = None
    checked: dict[int | str, bytes] = field(default_factory=dict)
    """Places of clips -> their tables, which were found to be right."""

    def note(self, kind: str, detail: str, *, key: str = "", offset: int = -1) -> None:
        self.problems.append(Problem(kind=kind, shard=self.shard.name, key=key, offset=offset, detail=detail))

    def read_index(self, store: Store) -> ShardIndex | None:
        """Return the index, or what can be said of it."""
        name = index_name(self.shard.name)
        try:
            data = bytes(store.get(name))
        except NotFoundError:
            self.note("missing_index", f"there is no {name}.")
            return None
        if hashlib.sha256(data).hexdigest() != self.shard.index_sha256:
            self.note("changed_index", f"{name} is not the one that the manifest describes.")
        try:
            index = decode_index(data, where=name)
        except DatasetError as error:
            self.note("damaged_index", str(error))
            return None
        self._check_totals(index)
        return index

    def _check_totals(self, index: ShardIndex) -> None:
        counted = asdict(index.columns.totals(self.shard.totals.bytes))
        listed = asdict(self.shard.totals)
        counted["entries"] = {name: totals.samples for name, totals in index.entries().items()}
        listed["entries"] = self.shard.entries
        wrong = [name for name in listed if listed[name] != counted[name]]
        if wrong:
            facts = ", ".join(
                f"{name} {counted[name]} in the index and {listed[name]} in the manifest" for name in wrong
            )
            self.note("wrong_count", f"{facts}.")
        text, labels, offset = index.columns.text_tokens, index.columns.label_tokens, index.offset.astype(np.int64)
        for row in np.flatnonzero((labels < -1) | (labels > text)).tolist():
            detail = f"the index has {labels[row]} labels among {text[row]} text tokens."
            self.note("wrong_labels", detail, key=index.key(row), offset=int(offset[row]))
        ends = offset + index.size.astype(np.int64)
        for row in np.flatnonzero(offset[1:] < ends[:-1]).tolist():
            self.note("wrong_range", "it begins inside its predecessor.", key=index.key(row + 1), offset=int(ends[row]))

    def read_tar(self, store: Store, index: ShardIndex | None) -> None:
        """Check every sample of the tar, then the tar as a whole."""
        name = self.shard.name
        try:
            size = store.head(name).size
        except NotFoundError:
            self.note("missing_shard", "the tar is not there.")
            return
        if size != self.shard.totals.bytes:
            self.note("wrong_size", f"the tar has {size} bytes, the manifest says {self.shard.totals.bytes}.")
        with ObjectReader(store, name, size) as reader:
            num_before = len(self.problems)
            if index is not None:
                self._check_samples(reader, index)
            crc32c = reader.finish()
        if crc32c != self.shard.crc32c and len(self.problems) == num_before and size == self.shard.totals.bytes:
            self.note("changed_tar", "the tar's crc32c is not the manifest's, though each indexed sample is whole.")

    def _check_samples(self, reader: ObjectReader, index: ShardIndex) -> None:
        seen: set[str] = set()
        offsets, sizes, crc32c = index.offset, index.size, index.crc32c.tolist()
        for row in np.argsort(offsets, kind="stable").tolist():
            key, offset, size = index.key(row), int(offsets[row]), int(sizes[row])
            if key in seen:
                self.note("duplicate_key", "the key occurs twice in this shard.", key=key, offset=offset)
            seen.add(key)
            if offset < reader.position:
                continue  # it overlaps its predecessor, which was noted
            reader.skip_to(offset)
            data = reader.read(size)
            if len(data) < size:
                left = len(index) - row - 1
                detail = f"{len(data)} of {size} bytes are there; {left} later samples too."
                self.note("truncated", detail, key=key, offset=offset)
                return
            crc = crc32c_of(data)
            if crc != crc32c[row]:
                detail = f"crc32c is {crc:08x}, the index says {crc32c[row]:08x}"
                self.note("crc_mismatch", f"{detail}; the sample has {size} bytes.", key=key, offset=offset)
                continue
            self._check_members(key, offset, data, index, row)

    def _check_members(self, key: str, offset: int, data: bytes, index: ShardIndex, row: int) -> None:
        try:
            found = list(iter_members(io.BytesIO(data).read, begin=offset))
        except DatasetError as error:
            self.note("damaged_header", str(error), key=key, offset=offset)
            return
        places = [(member.name, member.offset, len(member.content)) for member in found]
        members = index.span(row).members
        if places != [(f"{key}.{name}", begin, size) for name, begin, size in members]:
            self.note("wrong_members", "the tar's members are not the index's.", key=key, offset=offset)
            return
        for detail in check_table(index, row, self.tables, data, self.checked, self.store):
            self.note("wrong_tables", detail, key=key, offset=offset)
        if self.fields.layout == "bytes":
            return
        texts = {name: each.content for (name, *_), each in zip(members, found, strict=True) if is_text_member(name)}
        try:
            conversation = to_conversation(self.fields, [member.name for member in index.members(row)], texts)
        except BadSampleError as error:
            self.note(error.reason, str(error), key=key, offset=offset)
            return
        shown = [item["type"] for item in iter_media(conversation)]
        sizes = index.sizes(row)
        for medium, media in (("image", sizes.images), ("video", sizes.videos), ("audio", sizes.audios)):
            if (count := len(media)) != shown.count(medium):
                detail = f"the conversation shows {shown.count(medium)} {medium} items, the index has {count}."
                self.note("wrong_media", detail, key=key, offset=offset)
