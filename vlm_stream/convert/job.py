"""The job: what an unfinished conversion remembers, so that a restart gives the same bytes.

Enters: a source, options, a store. Leaves: the borders of the shards, agreed on once and kept in `.job/job.json`; which
shards are whole already; a refusal when a restart is told something else than the first start.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.conversation import MEDIA_TYPES
from vlm_stream.convert.layout import JOB_FILE, JOB_FOLDER, LEDGER, part_name, shard_name
from vlm_stream.convert.shard_task import ShardPart
from vlm_stream.errors import ConfigError, NotFoundError, StorageError, blame_sample
from vlm_stream.format import MANIFEST, index_name

if TYPE_CHECKING:
    import numpy.typing as npt

    from vlm_stream.conversation import Message
    from vlm_stream.convert.options import ShardOptions
    from vlm_stream.format import TokenCounting
    from vlm_stream.sources import RecordSource
    from vlm_stream.storage import Store

__all__ = ["Job", "clear_target", "find_parts", "job_parameters", "load_job", "remove_job", "save_job"]

_NUM_PROBES: Final = 64
_SHARD_FORMAT: Final = 2
"""Of tars and their indexes; what a manifest looks like does not keep a conversion from going on."""
_NUM_THREADS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """One conversion: its parameters and the borders of its shards."""

    parameters: dict[str, Any]
    borders: npt.NDArray[np.int64]
    """[shards + 1] Shard i holds the positions `borders[i]:borders[i + 1]` of the order."""

    @property
    def fingerprint(self) -> str:
        """Return what identifies input and options."""
        return hashlib.sha256(json.dumps(self.parameters, sort_keys=True).encode()).hexdigest()

    @property
    def num_shards(self) -> int:
        """Return the number of shards."""
        return len(self.borders) - 1


def job_parameters(source: RecordSource, options: ShardOptions, tokens: TokenCounting) -> dict[str, Any]:
    """Return everything that the bytes of the shards depend on, as JSON values."""
    return {
        "format": _SHARD_FORMAT,
        "records": len(source),
        "input": _probe_digest(source),
        "processor": tokens.processor_class,
        "template": tokens.template_sha256,
        "library": tokens.library,
        "samples_per_shard": options.samples_per_shard,
        "max_shard_bytes": options.max_shard_bytes,
        "shuffle": options.shuffle,
        "on_mismatch": options.on_mismatch,
        "names": sorted(options.names) if options.names is not None else None,
        "confine_media": options.confine_media,
    }


def _probe_digest(source: RecordSource) -> str:
    """Return a digest of some records, spread evenly: cheap, and another input hardly ever has the same."""
    digest = hashlib.sha256()
    for number in np.linspace(0, max(len(source) - 1, 0), min(len(source), _NUM_PROBES)).astype(int).tolist():
        digest.update(_record_text(source, number).encode("utf-8", "replace"))
    return digest.hexdigest()


def _record_text(source: RecordSource, number: int) -> str:
    try:
        record = source.read(number)
        return repr((record.source, record.id, [_without_folders(message) for message in record.conversation]))
    except Exception as error:  # a record can hold anything in any place
        return blame_sample(error, "convert", "bad_record", "the record cannot be read").reason


def _without_folders(message: Message) -> Message:
    """Return a message whose media are named without their folders: the same input may be mounted elsewhere."""
    if isinstance(message["content"], str):
        return message
    items = []
    for item in message["content"]:
        where = item.get(item["type"]) if item.get("type") in MEDIA_TYPES else None
        name = posixpath.basename(where) if isinstance(where, str) else type(where).__name__
        items.append(item if where is None else {**item, item["type"]: name})
    return {**message, "content": items}


def load_job(store: Store) -> Job | None:
    """Return the unfinished job at the target, if there is one."""
    try:
        data = json.loads(store.get(JOB_FILE))
    except NotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(
            f"{store.root}/{JOB_FILE} is damaged ({error}), so the unfinished conversion cannot be continued. "
            f"Start again with --overwrite."
        ) from error
    return Job(parameters=data["parameters"], borders=np.array(data["borders"], dtype=np.int64))


def save_job(store: Store, job: Job) -> None:
    """Write the job down, before its first shard."""
    data = {"parameters": job.parameters, "borders": job.borders.tolist()}
    store.put(JOB_FILE, json.dumps(data).encode())


def check_same(found: dict[str, Any], wanted: dict[str, Any], root: str) -> None:
    """Refuse to continue a job with other parameters.

    Raises:
        ConfigError: They differ; the sentence says in what.
    """
    names = [name for name in wanted if found.get(name) != wanted[name]]
    if names:
        differences = ", ".join(f"{name} was {found.get(name)!r} and is {wanted[name]!r}" for name in names)
        raise ConfigError(
            f"{root} holds an unfinished conversion with other parameters ({differences}), and shards of both would "
            f"be mixed. Continue with the same parameters, or start again with --overwrite."
        )


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
            whole = (
                sizes.get(name) == part.entry.totals.bytes
                and hashlib.sha256(store.get(index_name(name))).hexdigest() == part.entry.index_sha256
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
        or (info.path.startswith("shard-") and info.path.endswith((".tar", ".index.parquet")))
    ]
    _delete(store, sorted(ours, key=lambda path: path != MANIFEST))


def remove_job(store: Store) -> None:
    """Forget the job: the manifest is written."""
    paths = [info.path for info in store.list(f"{JOB_FOLDER}/")]
    _delete(store, sorted(paths, key=lambda path: path == JOB_FILE))


def _delete(store: Store, paths: list[str]) -> None:
    for first in paths[:1]:
        _delete_one(store, first)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(lambda path: _delete_one(store, path), paths[1:]))


def _delete_one(store: Store, path: str) -> None:
    try:
        store.delete(path)
    except NotFoundError:
        return  # another run has removed it
