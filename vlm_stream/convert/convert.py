"""The conversion: records in, a dataset out.

Enters: an input, a target, options. Leaves: shards with their indexes, the ledger, and last of all the manifest; and a
report. The order and the borders of the shards are fixed first, then every shard is an independent task for an engine.
Nothing here touches a medium or a tar.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.convert.counting import open_counter
from vlm_stream.convert.engines import open_engine
from vlm_stream.convert.job import (
    Job,
    check_same,
    clear_target,
    find_parts,
    job_parameters,
    load_job,
    remove_job,
    save_job,
)
from vlm_stream.convert.layout import JOB_FOLDER, LEDGER
from vlm_stream.convert.options import ShardOptions
from vlm_stream.convert.order import cut_by_bytes, cut_by_count, measure_records, record_order
from vlm_stream.convert.shard_task import ShardContext, ShardPart, ShardTask, flush_in_background, is_local
from vlm_stream.errors import BadBudgetError, ConfigError, NotFoundError
from vlm_stream.format import MANIFEST, Manifest, ShardList, load_manifest, save_manifest
from vlm_stream.sources import open_source
from vlm_stream.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlm_stream.convert.engines import Engine
    from vlm_stream.format import Totals
    from vlm_stream.sources import RecordSource
    from vlm_stream.storage import Store

__all__ = ["ShardReport", "make_shards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """What a conversion did."""

    out: str
    digest: str
    num_records: int
    """Records of the input, bad ones included."""
    num_shards: int
    num_kept: int
    """Shards that an earlier run had finished."""
    totals: Totals
    dropped: dict[str, int] = field(default_factory=dict)
    """Records that are not in the shards, by stage and reason."""
    kept: dict[str, int] = field(default_factory=dict)
    """What was left out of records that are in the shards, by reason (with `on_mismatch="keep"`)."""
    tokens: str = "estimated"
    seconds: float = 0.0

    @property
    def num_dropped(self) -> int:
        """Return how many records were bad."""
        return sum(self.dropped.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self) | {"num_dropped": self.num_dropped}


def make_shards(
    input: str | os.PathLike[str] | RecordSource,  # noqa: A002 (the word users look for)
    out: str | os.PathLike[str],
    *,
    options: ShardOptions | None = None,
    on_part: Callable[[ShardPart, int], None] | None = None,
    **settings: Any,
) -> ShardReport:
    """Turn a meta file, a JSON array, JSON lines or a source of records into a dataset of shards.

    Args:
        input: Path or URL of the data, or anything with `name`, `len()` and `read(i)`.
        out: Path or object-store URL of the dataset.
        options: What to do; or give its fields as keywords.
        on_part: Called with every finished shard and the number of shards to be written, for progress.
        settings: Fields of `ShardOptions`, such as `workers=8`.

    Raises:
        ConfigError: The target holds another dataset or job, or an option makes no sense.
        SourceError: The input cannot be read at all.
        BadBudgetError: More records were bad than the budget allows.
    """
    begin = time.perf_counter()
    if settings:
        options = replace(options or ShardOptions(), **settings)
    options = options or ShardOptions()
    store = open_store(os.fspath(out), options.store)
    source = _open_input(input, options)
    counter = open_counter(options.processor, trust_remote_code=options.trust_remote_code)
    parameters = job_parameters(source, options, counter.note)
    finished = _prepare_target(store, options, parameters)
    if finished is not None:
        return _report(store.root, finished, len(source), len(finished.shards), begin)
    engine = open_engine(options)
    order = record_order(len(source), options.shuffle, getattr(source, "block_ends", None))
    job = load_job(store) or Job(parameters=parameters, borders=_cut(source, order, options, engine))
    save_job(store, job)
    parts = find_parts(store, job)
    num_kept = len(parts)
    context = ShardContext(
        source=source,
        out=store.root,
        processor=options.processor,
        trust_remote_code=options.trust_remote_code,
        confine_media=options.confine_media,
        store=options.store,
    )
    coming = engine.run(context, _missing_tasks(job, order, parts))
    for part in flush_in_background(store.root, coming, kept=tuple(parts)) if is_local(store) else coming:
        parts[part.number] = part
        if on_part is not None:
            on_part(part, job.num_shards - num_kept)
    manifest = _finish(store, job, parts, replace(Manifest(shards=ShardList.of(())), tokens=counter.note), options)
    return _report(store.root, manifest, len(source), num_kept, begin)


def _open_input(given: str | os.PathLike[str] | RecordSource, options: ShardOptions) -> RecordSource:
    if not isinstance(given, (str, os.PathLike)):
        return given
    return open_source(
        os.fspath(given),
        names=options.names,
        on_mismatch=options.on_mismatch,  # type: ignore[arg-type]
        columns=options.columns or None,
        tags=options.tags or None,
        media_dir=options.media_dir,
        media_first=options.media_first or None,
        store=options.store,
    )


def _prepare_target(store: Store, options: ShardOptions, parameters: dict[str, Any]) -> Manifest | None:
    """Make the target ready for a start or a restart; return its manifest if nothing is left to do."""
    if options.overwrite:
        clear_target(store)
        return None
    if _exists(store, MANIFEST):
        manifest = load_manifest(store)
        if options.resume and manifest.job == Job(parameters=parameters, borders=np.zeros(1, np.int64)).fingerprint:
            return manifest
        raise ConfigError(
            f"{store.root} already holds a finished dataset"
            + (" that was made from other input or with other options" if options.resume else "")
            + "; nothing was written. Give another target, or replace it with --overwrite."
        )
    job = load_job(store)
    if job is None:
        return None
    if not options.resume:
        raise ConfigError(
            f"{store.root} holds an unfinished conversion; nothing was written. "
            f"Continue it with --resume, or start again with --overwrite."
        )
    check_same(job.parameters, parameters, store.root)
    return None


def _exists(store: Store, path: str) -> bool:
    try:
        store.head(path)
    except NotFoundError:
        return False
    return True


def _cut(
    source: RecordSource, order: np.ndarray[Any, np.dtype[np.int64]], options: ShardOptions, engine: Engine
) -> np.ndarray[Any, np.dtype[np.int64]]:
    if options.max_shard_bytes is None:
        return cut_by_count(len(order), options.samples_per_shard)
    sizes = measure_records(source, engine, options.store)  # [records]
    return cut_by_bytes(sizes[order], options.samples_per_shard, options.max_shard_bytes)


def _missing_tasks(
    job: Job, order: np.ndarray[Any, np.dtype[np.int64]], parts: dict[int, ShardPart]
) -> Iterator[ShardTask]:
    for number in range(job.num_shards):
        if number not in parts:
            yield ShardTask(number, order[job.borders[number] : job.borders[number + 1]])


def _finish(store: Store, job: Job, parts: dict[int, ShardPart], manifest: Manifest, options: ShardOptions) -> Manifest:
    """Write ledger and manifest, and forget the job."""
    ordered = [parts[number] for number in range(job.num_shards)]
    dropped: Counter[str] = Counter()
    for part in ordered:
        dropped.update(f"{bad.stage}: {bad.reason}" for bad in part.bad)
    num_records = int(job.borders[-1])
    num_bad = sum(count for reason, count in dropped.items() if not reason.startswith("kept: "))
    if options.bad_budget is not None and num_bad > options.bad_budget * num_records:
        raise BadBudgetError(
            f"{num_bad} of {num_records} records were bad, more than the budget of {options.bad_budget:.2%}, so no "
            f"manifest was written. By reason: {dict(dropped.most_common())}. Mend the data and start again with "
            f"--overwrite, or raise --bad-budget and go on with --resume."
        )
    lines = [bad.to_json() + "\n" for part in ordered for bad in part.bad]
    store.put(LEDGER, "".join(lines).encode())
    manifest = replace(
        manifest,
        shards=ShardList.of(part.entry for part in ordered),
        dropped=dict(sorted(dropped.items())),
        home="" if is_local(store) else store.root,
        job=job.fingerprint,
    )
    save_manifest(store, manifest)
    remove_job(store)
    if is_local(store):
        _sweep(Path(store.root))
    return manifest


def _sweep(folder: Path) -> None:
    """Remove what writers that were killed have left: unfinished tars of ours, unfinished writes of the local store."""
    shutil.rmtree(folder / JOB_FOLDER, ignore_errors=True)
    for path in folder.glob(".vlm-stream-*"):
        path.unlink(missing_ok=True)


def _report(root: str, manifest: Manifest, num_records: int, num_kept: int, begin: float) -> ShardReport:
    kept = {k.removeprefix("kept: "): n for k, n in manifest.dropped.items() if k.startswith("kept: ")}
    return ShardReport(
        out=root,
        digest=manifest.digest,
        num_records=num_records,
        num_shards=len(manifest.shards),
        num_kept=num_kept,
        totals=manifest.totals,
        dropped={reason: n for reason, n in manifest.dropped.items() if not reason.startswith("kept: ")},
        kept=kept,
        tokens=manifest.tokens.kind,
        seconds=round(time.perf_counter() - begin, 3),
    )
