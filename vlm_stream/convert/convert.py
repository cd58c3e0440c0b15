"""The conversion: records in, a dataset out.

Enters: an input, a target, options. Leaves: shards with their indexes, the ledger, and last of all the manifest; and a
report. The order and the borders of the shards are fixed first, then every shard is an independent task for an engine.
Nothing here touches a medium or a tar.

Where more records are bad than the budget allows, or not one can be used, there is no manifest and so no dataset: the
finished shards, their notes and the ledger stay, and the same conversion with a higher budget goes on from them.
"""

import itertools
import json
import logging
import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from vlm_stream.convert.alone import alone
from vlm_stream.convert.counting import open_counter
from vlm_stream.convert.engines import Engine, LocalEngine, RayEngine, choose_workers
from vlm_stream.convert.job import (
    JOB_FOLDER,
    LEDGER,
    Ints,
    Job,
    ShardPart,
    count_reasons,
    cut_by_bytes,
    cut_by_count,
    find_parts,
    is_local,
    job_parameters,
    load_job,
    media_places,
    open_target,
    record_order,
    remove_job,
    save_job,
    save_ledger,
    shards_together,
)
from vlm_stream.convert.options import ShardOptions
from vlm_stream.convert.shard_task import (
    RecordSizer,
    ShardContext,
    ShardTask,
    flush_in_background,
    seconds_per_record,
)
from vlm_stream.errors import BadBudgetError, ConfigError, SourceError, StorageError, nearest_name
from vlm_stream.format import Manifest, ShardList, TokenCounting, Totals, save_manifest
from vlm_stream.sources import RecordSource, SourceGroup, open_source
from vlm_stream.storage import Store, open_store
from vlm_stream.world import num_cores

_LOG = logging.getLogger(__name__)
_CHUNK: Final = 2000  # records that are measured by one task
_LOCK: Final = ".convert.lock"  # in a local target while it is written
_NUM_TOLD: Final = 3
_KEPT: Final = "kept: "


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
    whole: dict[str, int] = field(default_factory=dict)
    """Clips of which no table could be made, by reason."""
    ledger: str = ""
    """Where each of them is named."""
    tokens: str = "estimated"
    seconds: float = 0.0

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"num_dropped": self.num_dropped}


def make_shards(
    input: str | os.PathLike[str] | RecordSource,  # noqa: A002 (the word users look for)
    out: str | os.PathLike[str],
    *,
    options: ShardOptions | None = None,
    on_form: Callable[[str], object] | None = None,
    on_part: Callable[[ShardPart, int], None] | None = None,
    **settings: Any,
) -> ShardReport:
    """Turn a meta file, a JSON array, JSON lines or a source of records into a dataset of shards.

    What an interrupted call has finished is kept, and the same call goes on from there. Where the same call has
    finished already, its dataset is left as it is.

    Args:
        input: Path or URL of the data, or anything with `name`, `len()` and `read(i)`.
        out: Path or object-store URL of the dataset.
        options: What to do; or give its fields as keywords.
        on_form: Called with a line for each data file that says its form; None: it goes to the log or standard error.
        on_part: Called with every finished shard and the number of shards to be written, for progress.
        settings: Fields of `ShardOptions`, such as `workers=8`.

    Raises:
        ConfigError: The target holds another dataset or job, or an option makes no sense.
        SourceError: The input cannot be read at all.
        BadBudgetError: More records were bad than the budget allows, or all of them.
    """
    begin = time.perf_counter()
    for name in settings:
        if name not in (known := [each.name for each in fields(ShardOptions)]):
            raise ConfigError(f"make_shards has no option '{name}'; {nearest_name(name, known)}")
    options = replace(options or ShardOptions(), **settings)
    store = open_store(os.fspath(out), options.store)
    source = _open_input(input, options)
    if isinstance(input, (str, os.PathLike)):
        for name, line in source.lines.items():
            (on_form or _tell)(f"{name}: {line}")
    if not len(source):
        name = os.fspath(input) if isinstance(input, (str, os.PathLike)) else f"the source '{input.name}'"
        raise SourceError(f"{name} has no records, so there is nothing to convert and nothing was written.")
    counter = open_counter(options.processor, trust_remote_code=options.trust_remote_code)
    with alone(store, _LOCK, "converts into", store.root):
        report = _convert(source, store, options, counter.note, on_part)
    return replace(report, seconds=round(time.perf_counter() - begin, 3))


def _convert(
    source: SourceGroup,
    store: Store,
    options: ShardOptions,
    note: TokenCounting,
    on_part: Callable[[ShardPart, int], None] | None,
) -> ShardReport:
    parameters = job_parameters(source, options, note)
    manifest = open_target(store, options, parameters)
    if manifest is not None:
        _LOG.warning(
            "%s holds this dataset already, made from the same records with the same options: nothing was done "
            "(media files were not compared; %s converts again)",
            store.root,
            options.say("overwrite", True),
        )
        with suppress(StorageError):  # left by a kill after the manifest; the target may be read-only by now
            _clean_up(store)
        return _report(store, manifest, len(source), len(manifest.shards))
    context = ShardContext(source=source, out=store.root, options=options)
    engine = _open_engine(context)
    order = record_order(len(source), options.shuffle, source.block_ends)
    begun, media = load_job(store, options), media_places(source, options)
    borders = _cut(context, order, engine) if begun is None else begun.borders
    job = Job(parameters=parameters, borders=borders, media=media)
    save_job(store, job)
    parts = find_parts(store, job)
    num_records = int(job.borders[-1])
    most_bad, num_bad = options.most_bad(num_records), sum(map(_num_bad, parts.values()))
    is_refused = num_bad > min(most_bad, num_records - 1)
    if begun is not None and (begun.media != media or is_refused):  # what was not there may be by now
        parts, num_bad = {number: part for number, part in parts.items() if not _num_bad(part)}, 0
    num_kept = len(parts)
    tasks = _missing_tasks(source, job, order, parts, engine.workers)
    with closing(engine.run(context, tasks)) as running:  # its processes end before the lock is released
        coming = itertools.chain.from_iterable(running)
        for part in flush_in_background(store.root, coming, kept=tuple(parts)) if is_local(store) else coming:
            parts[part.number] = part
            if on_part is not None:
                on_part(part, job.num_shards - num_kept)
            num_bad += _num_bad(part)
            if num_bad > most_bad:  # long before the last shard, perhaps
                _refuse(store, options, job, parts)
    if num_bad == num_records:  # of no use, whatever the budget
        _refuse(store, options, job, parts)
    manifest = _finish(store, job, parts, note)
    report = _report(store, manifest, len(source), num_kept)
    _say(report)
    return report


def _open_input(given: str | os.PathLike[str] | RecordSource, options: ShardOptions) -> SourceGroup:
    if isinstance(given, SourceGroup):
        return given
    if not isinstance(given, (str, os.PathLike)):
        if not all(hasattr(given, name) for name in ("name", "__len__", "read")):
            raise ConfigError(
                f"the input is a {type(given).__name__}, which is neither a path or URL nor a source of records (an "
                f"object with name, len() and read(i)); nothing was written."
            )
        return SourceGroup([given], name=given.name)
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


def _tell(line: str) -> None:
    """Say what is no warning, and to be seen: in the log where that takes it, else on standard error."""
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info(line)
    else:
        sys.stderr.write(f"{line}\n")


def _open_engine(context: ShardContext) -> Engine:
    options = context.options
    if options.engine == "ray":
        return RayEngine(workers=options.workers or num_cores(), address=options.ray_address)
    if options.workers is not None:
        return LocalEngine(options.workers)
    num_records = len(context.source)
    num_tasks = -(-num_records // options.samples_per_shard)
    if options.max_shard_bytes is not None:
        num_tasks = num_records  # only the bytes tell; at least not fewer shards
    if num_tasks == 1 or num_cores() == 1:
        return LocalEngine()
    seconds = num_records * seconds_per_record(context)
    return LocalEngine(choose_workers(seconds, num_tasks, with_processor=options.processor is not None))


def _cut(context: ShardContext, order: Ints, engine: Engine) -> Ints:
    options = context.options
    if options.max_shard_bytes is None:
        return cut_by_count(len(order), options.samples_per_shard)
    sizes = np.zeros(len(order), dtype=np.int64)  # [records]
    for begin, chunk in engine.run(RecordSizer(context, _CHUNK), range(0, len(order), _CHUNK)):
        sizes[begin : begin + len(chunk)] = chunk
    return cut_by_bytes(sizes[order], options.samples_per_shard, options.max_shard_bytes)


def _missing_tasks(
    source: SourceGroup, job: Job, order: Ints, parts: dict[int, ShardPart], workers: int
) -> list[tuple[ShardTask, ...]]:
    """Return the shards to be written; together those that one of several processes writes after each other."""
    missing = [number for number in range(job.num_shards) if number not in parts]
    tasks = [ShardTask(number, order[job.borders[number] : job.borders[number + 1]]) for number in missing]
    ends = source.block_ends
    if ends is None or workers == 1:
        return [(task,) for task in tasks]
    blocks = np.searchsorted(ends, order[job.borders[missing]], side="right").tolist()
    return [tuple(tasks[run.start : run.stop]) for run in shards_together(blocks, workers)]


def _refuse(store: Store, options: ShardOptions, job: Job, parts: dict[int, ShardPart]) -> NoReturn:
    """Write the ledger and say what was bad, with an example of each of the first reasons."""
    save_ledger(store, [parts[number] for number in sorted(parts)])
    bads = [bad for number in sorted(parts) for bad in parts[number].bad if bad.stage != "kept"]
    num_records, num_bad = int(job.borders[-1]), len(bads)
    counts = Counter((bad.stage, bad.reason) for bad in bads)
    firsts = {(bad.stage, bad.reason): bad for bad in reversed(bads)}
    told = sorted(firsts.items(), key=lambda each: -counts[each[0]])
    examples = "".join(f"\n  {counts[reason]:,} x {bad.reason}, first {bad}" for reason, bad in told[:_NUM_TOLD])
    more = f"\n  and {len(told) - _NUM_TOLD} more reasons" if len(told) > _NUM_TOLD else ""
    num_seen = sum(int(np.diff(job.borders)[number]) for number in parts)
    seen = f"of the {num_seen:,} records looked at" if num_seen < num_records else f"of {num_seen:,} records"
    limit, way = "and a dataset without samples is of no use", ""
    if num_bad < num_records:
        limit = f"more than {options.say('bad_budget')} allows ({options.bad_budget:.2%} of {num_records:,})"
    if num_bad < num_seen:
        enough = min(math.ceil(100 * num_bad / num_seen + 1) / 100, 1)
        way = (
            f" If the others are enough, convert again with {options.say('bad_budget', enough)} (1: any number may "
            f"be bad): finished shards are kept, and not written twice."
        )
    raise BadBudgetError(
        f"{num_bad:,} {seen} cannot be used, {limit}, so no dataset was written:{examples}{more}\n"
        f"Each is named in {store.url(LEDGER)}. Mend the data or the options that describe it "
        f"({', '.join(map(options.say, ('columns', 'tags', 'media_dir')))}) and start again with "
        f"{options.say('overwrite', True)}.{way}"
    )


def _num_bad(part: ShardPart) -> int:
    return sum(bad.stage != "kept" for bad in part.bad)


def _finish(store: Store, job: Job, parts: dict[int, ShardPart], tokens: TokenCounting) -> Manifest:
    """Write ledger and manifest, and forget the job."""
    ordered = [parts[number] for number in range(job.num_shards)]
    save_ledger(store, ordered)
    manifest = Manifest(
        shards=ShardList.of(part.entry for part in ordered),
        tokens=tokens,
        **count_reasons(ordered),
        home="" if is_local(store) else store.root,
        job=json.dumps(job.parameters, sort_keys=True),
    )
    save_manifest(store, manifest)
    _clean_up(store)
    return manifest


def _clean_up(store: Store) -> None:
    """Forget the job of a finished dataset, and what killed writers have left: unfinished tars, writes of the store."""
    remove_job(store)
    if is_local(store):
        shutil.rmtree(Path(store.root, JOB_FOLDER), ignore_errors=True)
        for path in Path(store.root).glob(".vlm-stream-*"):
            path.unlink(missing_ok=True)


def _report(store: Store, manifest: Manifest, num_records: int, num_kept: int) -> ShardReport:
    return ShardReport(
        out=store.root,
        digest=manifest.digest,
        num_records=num_records,
        num_shards=len(manifest.shards),
        num_kept=num_kept,
        totals=manifest.totals,
        dropped={reason: n for reason, n in manifest.dropped.items() if not reason.startswith(_KEPT)},
        kept={reason.removeprefix(_KEPT): n for reason, n in manifest.dropped.items() if reason.startswith(_KEPT)},
        whole=manifest.whole,
        ledger=store.url(LEDGER),
        tokens=manifest.tokens.kind,
    )


def _say(report: ShardReport) -> None:
    """Say what a finished conversion means for those who use it."""
    if report.num_dropped:
        reasons = ", ".join(f"{n:,} x {reason}" for reason, n in Counter(report.dropped).most_common())
        _LOG.warning(
            "%s of %s records were dropped (%s); each is named in %s",
            f"{report.num_dropped:,}",
            f"{report.num_records:,}",
            reasons,
            report.ledger,
        )
    if report.tokens == "estimated":
        _LOG.warning(
            "text was counted by a guess, so packs will be filled less tightly, and the labels of a step are not known "
            "ahead; count it for your model with: vlm-stream recount --processor NAME %s",
            report.out,
        )
