"""The job: what a conversion agrees on before its first byte, and what an unfinished one remembers.

Enters: a source, options, a store. Leaves: which record goes into which shard, agreed on once and kept in
`.job/job.json`; which shards are whole already; a refusal when the target holds something else. Names of all files of a
dataset are here.

With a limit of samples alone a border is a multiplication. A limit of bytes needs the sizes of all samples, and a shard
must stay a function of its own records, so sizes come from a pass over all records before anything is written. A record
that proves bad later leaves its shard smaller and no border moves.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import posixpath
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vlm_stream.conversation import Item, map_media
from vlm_stream.convert.options import ShardOptions
from vlm_stream.errors import BadSampleError, ConfigError, DatasetError, NotFoundError, StorageError, blame_sample
from vlm_stream.format import (
    MANIFEST,
    Manifest,
    ShardEntry,
    TokenCounting,
    Totals,
    clip_bytes,
    clips_name,
    index_name,
)
from vlm_stream.ledger import BadSample
from vlm_stream.plan import mix64
from vlm_stream.sources import RecordSource, SourceGroup
from vlm_stream.storage import Store, scheme_of

Ints = npt.NDArray[np.int64]

LEDGER: Final = "ledger.jsonl"
JOB_FOLDER: Final = ".job"  # what an unfinished conversion remembers; gone once the manifest is written
_JOB_FILE: Final = f"{JOB_FOLDER}/job.json"
_NUM_PROBES: Final = 64
_SHARD_FORMAT: Final = 3
"""Of tars and their indexes; what a manifest looks like does not keep a conversion from going on."""
_NUM_THREADS: Final = 16
_WORDS: Final = {
    "format": "the shard format",
    "records": "the number of records",
    "input": "the input or its form",
    "processor": "the class of the processor",
    "template": "the processor's template or vocabulary",
    "library": "the library",
}
"""Parameters that are no options of their own."""


def shard_name(number: int) -> str:
    """Return the tar's name.

    >>> shard_name(7)
    'shard-000007.tar'
    """
    return f"shard-{number:06d}.tar"


def part_name(number: int) -> str:
    """Return the name of the note that shard `number` is finished."""
    return f"{JOB_FOLDER}/shard-{number:06d}.json"


def sample_key(record: int) -> str:
    """Return a sample's key: its record's number in the input, whatever the shuffle; no dot, sortable.

    >>> sample_key(41)
    '000000041'
    """
    return f"{record:09d}"


def is_local(store: Store) -> bool:
    """Tell whether the store is a folder of this machine."""
    return scheme_of(store.root) == "file"


def bad_sample(source: str, sample: str, error: BadSampleError, **place: Any) -> BadSample:
    """Return the line of the ledger for an error; `place` are further fields of it."""
    return BadSample(source=source, sample=sample, stage=error.stage, reason=error.reason, detail=str(error), **place)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """One finished shard: its manifest entry and what was bad in it."""

    number: int
    entry: ShardEntry
    bad: tuple[BadSample, ...] = field(default=())
    whole: dict[str, int] = field(default_factory=dict)
    """Clips without a table, by reason."""

    def to_json(self) -> str:
        """Return the note that is kept beside the shard until the job ends."""
        data = {"entry": asdict(self.entry), "number": self.number, "bad": [bad.to_json() for bad in self.bad]}
        return json.dumps(data | {"whole": self.whole}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> ShardPart:
        data: dict[str, Any] = json.loads(text)
        entry = ShardEntry(**(data["entry"] | {"totals": Totals(**data["entry"]["totals"])}))
        bad = tuple(map(BadSample.from_json, data["bad"]))
        return cls(number=data["number"], entry=entry, bad=bad, whole=data["whole"])


def save_ledger(store: Store, parts: Iterable[ShardPart]) -> None:
    store.put(LEDGER, "".join(f"{bad.to_json()}\n" for part in parts for bad in part.bad).encode())


def count_reasons(parts: Iterable[ShardPart]) -> dict[str, Any]:
    """Return what a manifest counts: records that were bad, and clips without a table."""
    counts: dict[str, Counter[str]] = {"dropped": Counter(), "whole": Counter()}
    for part in parts:
        counts["dropped"].update(f"{bad.stage}: {bad.reason}" for bad in part.bad)
        counts["whole"].update(part.whole)
    return {name: dict(sorted(each.items())) for name, each in counts.items()}


def record_order(num_records: int, seed: int | None, block_ends: Ints | None = None) -> Ints:
    """Return the record numbers in the order of the shards: sorted by a hash of (seed, number).

    Where records are cheap only in blocks, blocks are sorted so, and the records of each: every block is read once.

    A hash and a stable sort, because the permutations of random generators may change with their library's version.
    """
    if seed is None:
        return np.arange(num_records, dtype=np.int64)
    with np.errstate(over="ignore"):
        hashes = mix64(np.arange(num_records, dtype=np.uint64) + mix64(np.array([seed], dtype=np.uint64)))
    if block_ends is not None:
        blocks = np.searchsorted(block_ends, np.arange(num_records), side="right")
        return np.lexsort((hashes, hashes[blocks])).astype(np.int64)
    return np.argsort(hashes, kind="stable")


def shards_together(blocks: Sequence[int], num_runs: int) -> list[range]:
    """Return runs of shards, each for one process: those that begin in the same block, so that it is read once.

    Where blocks are fewer than `num_runs`, the longest runs are cut in two; each cut reads a block once more.

    >>> shards_together([0, 0, 0, 1, 2, 2], 2), shards_together([0, 0, 0, 0], 2)
    ([range(0, 3), range(3, 4), range(4, 6)], [range(0, 2), range(2, 4)])
    """
    begins = [number for number, block in enumerate(blocks) if number == 0 or block != blocks[number - 1]]
    runs = [range(*ends) for ends in itertools.pairwise([*begins, len(blocks)])]
    while runs and len(runs) < min(num_runs, len(blocks)):
        longest = max(range(len(runs)), key=lambda number: len(runs[number]))
        run = runs[longest]
        middle = run.start + len(run) // 2
        runs[longest : longest + 1] = [range(run.start, middle), range(middle, run.stop)]
    return runs


def cut_by_count(num_records: int, samples_per_shard: int) -> Ints:
    """Return the borders: shard i holds the positions `borders[i]:borders[i + 1]` of the order.

    >>> cut_by_count(5, 2).tolist()
    [0, 2, 4, 5]
    """
    begins = np.arange(0, num_records, samples_per_shard, dtype=np.int64)
    return np.append(begins, num_records).astype(np.int64)


def cut_by_bytes(sizes: Ints, samples_per_shard: int, max_shard_bytes: int) -> Ints:
    """Return the borders under both limits; a sample beyond the limit is alone in its shard.

    Args:
        sizes: [positions] Most bytes that each sample takes in a tar, in the order of the shards.
        samples_per_shard: Most samples in a shard.
        max_shard_bytes: Most bytes in a shard.

    >>> cut_by_bytes(np.array([4, 4, 9, 1, 1]), 2, 8).tolist()
    [0, 2, 3, 5]
    """
    ends = np.cumsum(sizes)  # [positions]
    borders = [0]
    while (begin := borders[-1]) < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        fits = int(np.searchsorted(ends, before + max_shard_bytes, side="right"))
        borders.append(max(begin + 1, min(fits, begin + samples_per_shard)))
    return np.array(borders, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One conversion: its parameters and the borders of its shards."""

    parameters: dict[str, Any]
    borders: Ints  # [shards + 1] Shard i holds the positions `borders[i]:borders[i + 1]` of the order
    media: list[Any]
    """Where media were looked for; the bytes of good samples do not depend on it."""

    @property
    def num_shards(self) -> int:
        return len(self.borders) - 1


def job_parameters(source: SourceGroup, options: ShardOptions, tokens: TokenCounting) -> dict[str, Any]:
    """Return everything that the bytes of the shards depend on but the media files, as JSON values."""
    same = ("samples_per_shard", "max_shard_bytes", "shuffle", "on_mismatch", "confine_media", "exif_rotate")
    return {
        "format": _SHARD_FORMAT,
        "records": len(source),
        "input": _input_digest(source),
        "processor": tokens.processor_class,
        "template": tokens.template_sha256,
        "library": tokens.library,
        "names": sorted(options.names) if options.names is not None else None,
        **{name: getattr(options, name) for name in same},
        **({"media_limits": asdict(options.media_limits)} if options.media_limits else {}),
    }


def media_places(source: SourceGroup, options: ShardOptions) -> list[Any]:
    """Return where media are looked for, as JSON values."""
    forms = [getattr(member, "form", None) for member in source.members]
    return [[form and form.media_dir for form in forms], list(options.media_hosts)]


def _input_digest(source: SourceGroup) -> str:
    """Return a digest of the data files and of the forms by which they are read.

    Of tables, which are not read whole, some records are looked at as well; of a source that is no file, records alone,
    spread evenly: cheap, and another input hardly ever has the same.
    """
    digest = hashlib.sha256()
    for member in source.members:
        num_read = len(member)
        if hasattr(member, "digest"):
            digest.update(member.digest().encode())
            ends = getattr(member, "block_ends", None)
            num_read = 0 if ends is None else int(ends[:1].sum())
        for number in np.linspace(0, max(num_read - 1, 0), min(num_read, _NUM_PROBES)).astype(int).tolist():
            digest.update(_record_text(member, number).encode("utf-8", "replace"))
    return digest.hexdigest()


def _record_text(source: RecordSource, number: int) -> str:
    try:
        record = source.read(number)
        return repr((record.source, record.id, map_media(record.conversation, _without_folders)))
    except Exception as error:  # a record can hold anything in any place
        return blame_sample(error, "convert", "bad_record", "the record cannot be read").reason


def _without_folders(item: Item) -> Item:
    """Return a medium named without its folders: the same input may be mounted elsewhere."""
    where = item.get(item["type"])
    name = posixpath.basename(where) if isinstance(where, str) else type(where).__name__
    return item if where is None else {**item, item["type"]: name}


def open_target(store: Store, options: ShardOptions, parameters: dict[str, Any]) -> Manifest | None:
    """Make the target ready for a start or a restart; return its manifest if nothing is left to do."""
    fresh = f"Give another target, or replace what is there with {options.say('overwrite', True)}."
    if is_local(store) and Path(store.root).is_file():
        raise ConfigError(f"{store.root} is a file, so it cannot be a dataset's folder. Give another target.")
    try:
        text = store.get(MANIFEST)
    except NotFoundError:
        text = None
    except StorageError as error:
        raise ConfigError(f"{store.root} cannot be a dataset's folder ({error}) Give another target.") from error
    if text is not None and b'"vlm_stream"' not in bytes(text)[:100]:
        raise ConfigError(
            f"{store.root} holds a {MANIFEST} that is none of ours, and nothing was written. Give another target."
        )
    if options.overwrite:
        clear_target(store)
        return None
    if text is not None:
        try:
            manifest = Manifest.from_json(text, where=store.url(MANIFEST))
            found = json.loads(manifest.job or "{}")
        except (DatasetError, ValueError) as error:
            raise ConfigError(f"{store.root} holds a dataset that cannot be read ({error}) {fresh}") from error
        other = _differences(found, parameters, options) if found else "it was not made by a conversion"
        if other or not options.resume:
            raise ConfigError(
                f"{store.root} holds a finished dataset{f' of another conversion ({other})' if other else ''}; "
                f"nothing was written. {fresh}"
            )
        return manifest
    job = load_job(store, options)
    if job is not None and (other := _differences(job.parameters, parameters, options)):
        raise ConfigError(
            f"{store.root} holds an unfinished conversion with other parameters ({other}), and shards of both would be "
            f"mixed; nothing was written. Convert the same again to go on with it. {fresh}"
        )
    if job is not None and not options.resume:
        raise ConfigError(f"{store.root} holds an unfinished conversion; nothing was written. {fresh}")
    return None


def _differences(found: dict[str, Any], wanted: dict[str, Any], options: ShardOptions) -> str:
    """Return in what two conversions differ, in words; nothing where they do not."""
    said = []
    for name in (name for name in wanted if found.get(name) != wanted[name]):
        if name in ("input", "template"):  # digests, which say nothing to people
            said.append(f"{_WORDS[name]} is another")
        else:
            word = _WORDS.get(name) or options.say(name)
            said.append(f"{word} was {found.get(name)!r} and is {wanted[name]!r}")
    return ", ".join(said)


def load_job(store: Store, options: ShardOptions) -> Job | None:
    try:
        data = json.loads(store.get(_JOB_FILE))
        borders = np.array(data["borders"], dtype=np.int64)
        return Job(parameters=data["parameters"], borders=borders, media=data.get("media", []))
    except NotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{store.url(_JOB_FILE)} is damaged ({error}), so the unfinished conversion cannot be continued. "
            f"Start again with {options.say('overwrite', True)}."
        ) from error


def save_job(store: Store, job: Job) -> None:
    """Write the job down, before its first shard."""
    data = {"parameters": job.parameters, "borders": job.borders.tolist(), "media": job.media}
    store.put(_JOB_FILE, json.dumps(data).encode())


def find_parts(store: Store, job: Job) -> dict[int, ShardPart]:
    """Return the shards that are whole: noted as finished, the tar is there with its size and the index with its bytes.

    Nobody waited for the disk when they were written, so a note may have outlived a power cut that its shard did not.
    """
    sizes = {info.path: info.size for info in store.list()}
    numbers = [number for number in range(job.num_shards) if part_name(number) in sizes]

    def read(number: int) -> ShardPart | None:
        name = shard_name(number)
        try:
            part = ShardPart.from_json(store.get(part_name(number)))
            index = store.get(index_name(name))
            whole = (
                sizes.get(name) == part.entry.totals.bytes
                and hashlib.sha256(index).hexdigest() == part.entry.index_sha256
                and sizes.get(clips_name(name), 0) == clip_bytes(index, name)
            )
        except (StorageError, ValueError, KeyError, TypeError):
            return None
        return part if whole else None

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        parts = list(pool.map(read, numbers))
    return {part.number: part for part in parts if part is not None}


def clear_target(store: Store) -> None:
    """Remove the dataset at the target, manifest first: from then on it is not one. Other files stay."""
    ours = [
        info.path
        for info in store.list()
        if info.path in (MANIFEST, LEDGER)
        or info.path.startswith(f"{JOB_FOLDER}/")
        or (info.path.startswith("shard-") and info.path.endswith((".tar", ".index.parquet", ".bin")))
    ]
    _delete(store, sorted(ours, key=lambda path: path != MANIFEST))


def remove_job(store: Store) -> None:
    """Forget the job: the manifest is written."""
    paths = [info.path for info in store.list(f"{JOB_FOLDER}/")]
    _delete(store, sorted(paths, key=lambda path: path == _JOB_FILE))


def _delete(store: Store, paths: list[str]) -> None:
    """Remove the first, then the others."""

    def delete(path: str) -> None:
        with contextlib.suppress(NotFoundError):  # another run has removed it
            store.delete(path)

    for first in paths[:1]:
        delete(first)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(delete, paths[1:]))
