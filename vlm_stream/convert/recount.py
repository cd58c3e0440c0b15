"""Text tokens and labels counted again, for another processor. Indexes and manifest are rewritten; no tar is.

Enters: a dataset's URL and a processor. Leaves: the dataset with other counts; and the tokens in files beside the
indexes, where tars do not keep them. Only the JSON and text members are read, by range. The manifest is written last;
after an interruption the recount is run again.

Whoever trains on a dataset whose text was only guessed can learn how far the guess is off (`fit_guess`), from a few
samples and without changing anything.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from vlm_stream.conversation import Conversation, iter_media
from vlm_stream.convert.counting import ExactCounter, open_counter
from vlm_stream.convert.engines import LocalEngine, choose_workers
from vlm_stream.convert.in_place import open_dataset
from vlm_stream.convert.job import Ints, bad_sample
from vlm_stream.convert.rows import NOWHERE, SampleCounts, TextFile, check_fits_index, recounted_index
from vlm_stream.convert.sample import picked_frames
from vlm_stream.encode import Steps, kept_text_key
from vlm_stream.errors import StorageError, blame_sample
from vlm_stream.format import (
    FieldMap,
    OpenDataset,
    ShardEntry,
    ShardIndex,
    ShardList,
    decode_index,
    describe_shard,
    index_name,
    is_text_member,
    load_manifest,
    read_index,
    read_sample,
    save_manifest,
    texts_name,
    to_conversation,
)
from vlm_stream.ledger import BadSample
from vlm_stream.storage import Store, StoreOptions, open_store
from vlm_stream.tokens import Geometry, MediaSizes, TextCounter

_NUM_THREADS: Final = 16
_SECONDS_PER_SAMPLE: Final = 1.5e-3  # about what one process counts
_FIT_SHARDS: Final = 8
_FIT_SAMPLES: Final = 256  # counted of these shards together
_FIT_SHARE: Final = 0.98  # samples whose text is no longer than planned


@dataclass(frozen=True, slots=True, kw_only=True)
class RecountReport:
    """What a recount changed."""

    url: str
    digest: str
    processor: str
    tokens_before: int
    tokens_after: int
    num_changed: int
    """Samples with other counts than before."""
    labels_after: int
    """Of the samples for which they are known."""
    refused: tuple[BadSample, ...] = ()
    """Samples that the processor cannot count; they keep their old count, and bring no labels."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recounter:
    """Counts one shard again, in any process."""

    root: str
    tars: str
    fields: FieldMap
    processor: Any
    trust_remote_code: bool
    store: StoreOptions | None
    text_key: str
    """Of the texts that are kept beside the indexes so far."""

    def __call__(self, shard: ShardEntry) -> tuple[ShardEntry, int, list[BadSample], str]:
        """Rewrite the shard's index; return its new entry, how many counts changed, and what was refused.

        The last is the name of a file of texts that nothing refers to any more, if there is one.
        """
        dataset = open_store(self.root, self.store)
        tars = open_store(self.tars or self.root, self.store)
        counter = open_counter(self.processor, trust_remote_code=self.trust_remote_code)
        data = bytes(dataset.get(index_name(shard.name)))
        index = decode_index(data, where=index_name(shard.name))
        counter.remember_in(self.root)  # what other processes have measured
        before = list(map(SampleCounts, index.columns.text_tokens.tolist(), index.columns.label_tokens.tolist()))
        none = -1 if self.processor is None else 0
        counts = [SampleCounts(text, none) for text, _ in before]
        refused = []
        kept, places = TextFile(fields=self.fields), [NOWHERE] * len(index)
        for row, texts in _iter_texts(tars, shard.name, index, range(len(index))):
            names = [member.name for member in index.members(row)]
            try:
                conversation, own = read_sample(self.fields, names, texts)
                counts[row], tokens = counter.count_and_keep(conversation, _sizes(index, row, conversation))
                check_fits_index(counts[row].text_tokens, MediaSizes())
                places[row] = kept.keep(conversation, tokens, own, texts)
            except Exception as error:  # tars made elsewhere hold anything
                counts[row] = SampleCounts(before[row].text_tokens, none)
                bad = blame_sample(error, "convert", "bad_form", "the sample cannot be counted")
                place = {"shard": shard.name, "offset": int(index.offset[row])}
                refused.append(bad_sample(shard.name, index.key(row), bad, **place))
        counter.remember_in(self.root)
        written = kept.write(dataset, shard.name)
        rewritten = recounted_index(data, counts, places)
        dataset.put(index_name(shard.name), rewritten)
        entry = describe_shard(
            shard.name, rewritten, num_bytes=shard.totals.bytes, crc32c=shard.crc32c, etag=shard.etag
        )
        past = "" if index.texts is None else texts_name(shard.name, self.text_key)
        changed = sum(a != b for a, b in zip(before, counts, strict=True))
        return entry, changed, refused, past if past != written else ""


def _iter_texts(
    store: Store, path: str, index: ShardIndex, rows: Sequence[int]
) -> Iterator[tuple[int, dict[str, bytes]]]:
    """Yield row and contents of its text members; many are asked for at a time, because each is a small request."""

    def read(row: int) -> dict[str, bytes]:
        wanted = [member for member in index.members(row) if is_text_member(member.name)]
        found = store.get_ranges(path, [(member.offset, member.size) for member in wanted])
        return {member.name: bytes(content) for member, content in zip(wanted, found, strict=True)}

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        yield from zip(rows, pool.map(read, rows), strict=True)


def _sizes(index: ShardIndex, row: int, conversation: Conversation) -> MediaSizes:
    """Return the sizes of a sample's media, with the frames that its conversation names."""
    sizes = index.sizes(row)
    items = [item for item in iter_media(conversation) if item["type"] == "video"]
    videos = zip(sizes.videos, items, strict=True)
    return replace(sizes, videos=tuple(replace(v, picked=picked_frames(item, v.frames)) for v, item in videos))


def recount(
    url: str,
    processor: Any,
    *,
    trust_remote_code: bool = False,
    workers: int | None = None,
    store: StoreOptions | None = None,
    on_shard: Callable[[ShardEntry, int], None] | None = None,
) -> RecountReport:
    """Count the text tokens and labels of a dataset again; without a processor by estimates, and without labels.

    `on_shard` is called with every recounted shard and the number of shards.
    """
    begin = time.perf_counter()
    dataset = open_dataset(url, store).store
    manifest = load_manifest(dataset)
    task = _Recounter(
        root=dataset.root,
        tars=manifest.tars,
        fields=manifest.fields,
        processor=processor,
        trust_remote_code=trust_remote_code,
        store=store,
        text_key=kept_text_key(manifest.tokens.template_sha256, manifest.tokens.library),
    )
    entries: dict[str, ShardEntry] = {}
    refused: dict[str, list[BadSample]] = {}
    num_changed = 0
    unused = []
    counter = open_counter(processor, trust_remote_code=trust_remote_code)
    if workers is None:
        seconds = manifest.totals.samples * _SECONDS_PER_SAMPLE
        workers = choose_workers(seconds, len(manifest.shards), with_processor=processor is not None)
    for entry, changed, bad, past in LocalEngine(workers).run(task, manifest.shards):
        unused += [past] * bool(past)
        entries[entry.name], refused[entry.name] = entry, bad
        num_changed += changed
        if on_shard is not None:
            on_shard(entry, len(manifest.shards))
    counted = replace(
        manifest, shards=ShardList.of(entries[shard.name] for shard in manifest.shards), tokens=counter.note
    )
    save_manifest(dataset, counted)
    for name in unused:
        with suppress(StorageError):  # nobody reads it: it may stay where nothing may be deleted
            dataset.delete(name)
    return RecountReport(
        url=dataset.root,
        digest=counted.digest,
        processor=counter.note.processor,
        tokens_before=manifest.totals.text_tokens,
        tokens_after=counted.totals.text_tokens,
        labels_after=counted.totals.label_tokens,
        num_changed=num_changed,
        refused=tuple(bad for shard in manifest.shards for bad in refused[shard.name]),
        seconds=round(time.perf_counter() - begin, 3),
    )


class GuessFit(NamedTuple):
    """How guessed text tokens become likely ones, and such that nearly no sample has more."""

    slope: float
    offset: float
    margin: float
    num_samples: int

    def correct(self, tokens: Ints, text: Ints, capacity: int) -> Ints:
        """Return [n] safe lengths of samples, from their lengths by the guess and the text [n] that is a part of them.

        What is likely to fit a row of that capacity alone is not made longer than a row.
        """
        likely = self.slope * text + self.offset
        safe = tokens - text + np.ceil(self.margin * likely).astype(np.int64)
        most: Ints = np.maximum(tokens - text + np.ceil(likely).astype(np.int64), capacity)
        corrected: Ints = np.minimum(safe, most)
        return corrected


def _text_count(processor: Any, geometry: Geometry, steps: Steps | None) -> Callable[[Conversation, MediaSizes], int]:
    if steps is None or not steps.changes_text:
        return TextCounter(processor, geometry).count
    counter = ExactCounter("", processor, steps)
    return lambda conversation, sizes: counter.count(conversation, sizes).text_tokens


def fit_guess(
    dataset: OpenDataset, processor: Any, geometry: Geometry, options: StoreOptions | None, steps: Steps | None = None
) -> GuessFit | None:
    """Count a few samples, spread evenly over a dataset, and compare with the counts of its index.

    Returns the line through guesses and counts, the same in every process; None where not one sample could be counted.
    `steps` say how samples are encoded, if not as the processor's chat template and call have it.
    """
    count_text = _text_count(processor, geometry, steps)
    manifest = dataset.manifest
    tars = open_store(manifest.tars, options) if manifest.tars else dataset.store
    shards = [number for number, samples in enumerate(manifest.shards.column("samples")) if samples]
    pairs: list[tuple[int, int]] = []
    places = np.unique(np.linspace(0, len(shards) - 1, _FIT_SHARDS).astype(int)).tolist()
    for shard in (manifest.shards[shards[place]] for place in places):
        index = read_index(dataset.store, shard, tars=manifest.tars)
        rows = np.unique(np.linspace(0, len(index) - 1, _FIT_SAMPLES // len(places)).astype(int)).tolist()
        for row, texts in _iter_texts(tars, shard.name, index, rows):
            try:
                names = [member.name for member in index.members(row)]
                conversation = to_conversation(manifest.fields, names, texts)
                count = count_text(conversation, _sizes(index, row, conversation))
            except Exception as error:  # a bad sample, of which training will say more
                blame_sample(error, "convert", "bad_form", "the sample cannot be counted")
                continue
            pairs.append((int(index.columns.text_tokens[row]), count))
    if not pairs:
        return None
    guessed, counted = np.array(pairs, dtype=np.float64).T
    slope = 1.0
    if np.ptp(guessed):
        slope = max(float(np.polyfit(guessed, counted, 1)[0]), 0.1)
    offset = max(float(np.mean(counted - slope * guessed)), 0.0)
    margin = max(float(np.quantile(counted / np.maximum(slope * guessed + offset, 1.0), _FIT_SHARE)), 1.0)
    return GuessFit(round(slope, 3), round(offset, 1), round(margin + 0.0005, 3), len(pairs))
