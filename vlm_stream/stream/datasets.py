"""The opened datasets of a mixture: what the plan asks of their indexes, and where a ref's bytes lie.

Enters: source options and the geometry of the processor that trains. Leaves: `SourceSpec` values and columns for the
plan, spans for the reader. Indexes are read when the plan first needs a shard and kept while it is live.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.parquet  # noqa: F401 - every stream reads indexes; later, it would be imported while a batch is waited for

from vlm_stream.errors import DatasetError
from vlm_stream.plan import Ref, SampleColumns, SourceSpec
from vlm_stream.ragged import take_rows
from vlm_stream.shards import fetch_index, load_manifest, open_index, read_joint_index, template_digest
from vlm_stream.storage import open_store
from vlm_stream.stream.counting import num_media
from vlm_stream.tokens import count_tokens, counted_as, join_columns

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.shards import JointIndex, Manifest, ShardIndex
    from vlm_stream.storage import Span, Store, StoreOptions
    from vlm_stream.stream.sources import SourceOptions
    from vlm_stream.tokens import Geometry, MediaColumns, MediaSizes, TokenColumns

    Ints = npt.NDArray[np.int64]

__all__ = ["OpenDatasets", "open_manifests"]

logger = logging.getLogger(__name__)

_INDEX_THREADS: Final = 32
_ROWS_PER_INDEX: Final = 1000
"""To ask for one index more takes as long as so many rows more in one that is there."""


def open_manifests(
    sources: Sequence[SourceOptions], store_options: StoreOptions | None
) -> list[tuple[Store, Manifest]]:
    """Return the store of each source, and what its manifest says."""
    stores = [open_store(source.url, store_options) for source in sources]
    return [(store, load_manifest(store)) for store in stores]


class OpenDatasets:
    """Indexes of opened datasets, on demand."""

    def __init__(
        self,
        sources: Sequence[SourceOptions],
        opened: Sequence[tuple[Store, Manifest]],
        geometry: Geometry,
        *,
        fake_tokens: int = 0,
        text: str = "",
        max_indexes: int = 1024,
    ) -> None:
        """Raise `DatasetError` where a dataset has no samples; nothing is read yet.

        Args:
            sources: The datasets.
            opened: What `open_manifests` returned for them.
            geometry: How media become tokens.
            fake_tokens: What the image costs that text-only samples get; 0: they get none.
            text: `template_digest` of the processor that trains: labels are known where they were counted for it.
            max_indexes: Indexes that are kept in memory.
        """
        self._sources = tuple(sources)
        self._geometry = geometry
        self.geometry_digest = geometry.digest()
        self._fake_tokens = fake_tokens
        self._text = text
        self._max_indexes = max_indexes
        self._stores: list[Store] = [store for store, _ in opened]
        self.manifests: list[Manifest] = [manifest for _, manifest in opened]
        self._indexes: OrderedDict[tuple[int, int], ShardIndex] = OrderedDict()
        self._joint: dict[int, JointIndex | None] = {}
        self._num_samples = [sum(manifest.shards.column("samples")) for manifest in self.manifests]
        for source, num_samples in zip(self._sources, self._num_samples, strict=True):
            if not num_samples:
                raise DatasetError(
                    f"the dataset at {source.url} has no samples, so there is nothing to stream; "
                    f"look at the ledger of its conversion, or leave the source out"
                )

    @property
    def stores(self) -> dict[str, Store]:
        """Return the datasets' stores by URL, with the connections that they have open."""
        return {store.root: store for store in self._stores}

    def specs(self, *, weigh_by: str = "samples") -> list[SourceSpec]:
        """Return what the plan must know of the sources."""
        return [
            SourceSpec(
                name=source.name,
                samples_per_shard=tuple(manifest.shards.column("samples")),
                digest=manifest.digest,
                weight=source.weight,
                sample_ratio=source.sample_ratio,
                # One shard stands for its source: reading every index would take as long as an epoch of planning.
                tokens_per_sample=self._mean_tokens(number) if weigh_by == "tokens" else 1.0,
            )
            for number, (source, manifest) in enumerate(zip(self._sources, self.manifests, strict=True))
        ]

    def check_counted_for(self, processor: Any) -> None:
        """Warn where the index was counted for another processor, or not counted at all: plans are then estimates."""
        expected = self._text or template_digest(processor)
        for source, manifest in zip(self._sources, self.manifests, strict=True):
            counted = manifest.tokens
            if counted.kind == "exact" and counted.template_sha256 == expected:
                continue
            how = f"for {counted.processor_class}" if counted.kind == "exact" else "by a guess"
            logger.warning(
                "the text tokens of %s were counted %s, so packs may come out too long or too short; "
                "count them for this processor with: vlm-stream recount --processor ... %s",
                source.url,
                how,
                source.url,
            )

    def __call__(self, source: int, shards: Sequence[int]) -> SampleColumns:
        """Return what the plan must know of the samples of some shards, one after the other: its column reader."""
        joint = self._join(source, len(shards))
        if joint is not None:
            rows, _ = take_rows(joint.splits, np.asarray(shards))
            if joint.counted_as == counted_as(self.geometry_digest) and not self._fake_tokens:
                return _columns(joint.counts(rows), self._labels(source, joint.label_tokens(rows)))
            media = joint.media(rows)
        else:
            indexes = self._open_indexes(source, shards)
            media = join_columns([index.media for index in indexes])
        return _columns(self._count(media), self._labels(source, media.label_tokens))

    def _open_indexes(self, source: int, shards: Sequence[int]) -> list[ShardIndex]:
        """Read indexes side by side."""
        found = {shard: self._indexes[source, shard] for shard in shards if (source, shard) in self._indexes}
        missing = [(source, shard) for shard in shards if shard not in found]
        if missing:
            # Threads wait, this one decodes what has come: small steps of many threads get in each other's way.
            with ThreadPoolExecutor(min(_INDEX_THREADS, len(missing))) as pool:
                for place, data in zip(missing, pool.map(self._fetch_index, missing), strict=True):
                    found[place[1]] = self._open_index(place, data)
                    self._keep(place, found[place[1]])
        return [found[shard] for shard in shards]

    def _labels(self, source: int, counted: Ints) -> Ints:
        """Return [n] labels; unknown where they were counted for another template or tokenizer, or not at all."""
        is_ours = self._text and self.manifests[source].tokens.template_sha256 == self._text
        return counted if is_ours else np.full(len(counted), -1, dtype=np.int64)

    def _count(self, media: MediaColumns) -> TokenColumns:
        counted = count_tokens(media, self._geometry)
        if self._fake_tokens:
            fake = np.where(num_media(media) == 0, self._fake_tokens, 0)  # [n]
            counted = replace(counted, tokens=counted.tokens + fake, vision_tokens=counted.vision_tokens + fake)
        return counted

    def span(self, ref: Ref) -> Span:
        """Return where the bytes of a sample lie."""
        return self._index(ref.source, ref.shard).span(ref.row)

    def spans(self, refs: Sequence[Ref]) -> list[Span]:
        """Return where the bytes of samples lie."""
        joint = self._joint_of(refs)
        return list(map(self.span, refs)) if joint is None else joint.spans(*_shards_and_rows(refs))

    def text_span(self, ref: Ref) -> Span:
        """Return where the text of a sample lies."""
        member = self.manifests[ref.source].fields.text_member
        return self._index(ref.source, ref.shard).member_span(ref.row, member)

    def contents(self, ref: Ref) -> tuple[list[str], MediaSizes]:
        """Return the names of a sample's members and the sizes of its media, as the index has them."""
        index = self._index(ref.source, ref.shard)
        return [member.name for member in index.members(ref.row)], index.sizes(ref.row)

    def name(self, ref: Ref) -> tuple[str, str, str]:
        """Return source, shard and key: how people name a sample."""
        index = self._index(ref.source, ref.shard)
        return self._sources[ref.source].name, index.path, index.key(ref.row)

    def names(self, refs: Sequence[Ref]) -> list[tuple[str, str, str]]:
        """Return how people name samples."""
        joint = self._joint_of(refs)
        if joint is None:
            return list(map(self.name, refs))
        source = self._sources[refs[0].source].name
        return [(source, *name) for name in joint.names(*_shards_and_rows(refs))]

    def find_key(self, source: int, shard: int, key: str) -> int | None:
        """Return the row of the sample with that key in a shard, if it is there."""
        keys = self._index(source, shard).keys
        return keys.index(key) if key in keys else None

    def _index(self, source: int, shard: int) -> ShardIndex:
        place = (source, shard)
        index = self._indexes.get(place)
        if index is None:
            joint = self._joint.get(source)
            index = joint.shard(shard) if joint else self._open_index(place, self._fetch_index(place))
            self._keep(place, index)
        elif len(self._indexes) == self._max_indexes:  # the next one drives out the one that was not used for longest
            self._indexes.move_to_end(place)
        return index

    def _join(self, source: int, num_shards: int) -> JointIndex | None:
        """Return the joint index of a source of which many shards are asked for, or have been."""
        manifest = self.manifests[source]
        is_written = manifest.joint_index_crc32c is not None
        if source not in self._joint and is_written and num_shards * _ROWS_PER_INDEX >= self._num_samples[source]:
            try:
                self._joint[source] = read_joint_index(self._stores[source], manifest)
            except DatasetError as error:
                self._joint[source] = None
                logger.warning(
                    "%s The indexes of its shards are read one by one instead, so the start takes longer; "
                    "write it again with: vlm-stream recount --processor ... %s",
                    error,
                    self._sources[source].url,
                )
        return self._joint.get(source)

    def _joint_of(self, refs: Sequence[Ref]) -> JointIndex | None:
        """Return the joint index in which all of these samples are, if there is one."""
        sources = {ref.source for ref in refs}
        return self._joint.get(sources.pop()) if len(sources) == 1 else None

    def _fetch_index(self, place: tuple[int, int]) -> bytes:
        source, shard = place
        return fetch_index(self._stores[source], self.manifests[source].shards[shard])

    def _open_index(self, place: tuple[int, int], data: bytes) -> ShardIndex:
        source, shard = place
        manifest = self.manifests[source]
        return open_index(data, self._stores[source], manifest.shards[shard], tars=manifest.tars)

    def _keep(self, place: tuple[int, int], index: ShardIndex) -> None:
        self._indexes[place] = index
        if len(self._indexes) > self._max_indexes:
            self._indexes.popitem(last=False)

    def _mean_tokens(self, source: int) -> float:
        sizes = self.manifests[source].shards.column("samples")
        largest = sizes.index(max(sizes))
        return max(float(self(source, [largest]).tokens.mean()), 1.0)


def _columns(counted: TokenColumns, labels: Ints) -> SampleColumns:
    return SampleColumns(
        tokens=counted.tokens,
        vision_tokens=counted.vision_tokens,
        vision_patches=counted.vision_patches,
        vision_squares=counted.vision_squares,
        labels=labels,
    )


def _shards_and_rows(refs: Sequence[Ref]) -> tuple[Ints, Ints]:
    table = np.fromiter(itertools.chain.from_iterable(refs), dtype=np.int64, count=3 * len(refs)).reshape(-1, 3)
    return table[:, 1], table[:, 2]
