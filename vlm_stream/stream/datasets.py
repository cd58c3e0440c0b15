"""The opened datasets of a mixture: what the plan asks of their indexes, and where a ref's bytes lie.

Enters: source options and the geometry of the processor that trains. Leaves: `SourceSpec` values and columns for the
plan, spans for the reader. Indexes are read when the plan first needs a shard and kept while it is live.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.parquet  # noqa: F401 - every stream reads indexes; later, it would be imported while a batch is waited for

from vlm_stream.errors import DatasetError
from vlm_stream.plan import Ref, SampleColumns, SourceSpec
from vlm_stream.shards import fetch_index, load_manifest, open_index, read_joint_index, template_digest
from vlm_stream.storage import open_store
from vlm_stream.stream.counting import num_media
from vlm_stream.tokens import count_tokens, join_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vlm_stream.shards import JointIndex, Manifest, ShardIndex
    from vlm_stream.storage import Span, Store, StoreOptions
    from vlm_stream.stream.sources import SourceOptions
    from vlm_stream.tokens import Geometry, MediaSizes

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
        max_indexes: int = 1024,
    ) -> None:
        """Raise `DatasetError` where a dataset has no samples; nothing is read yet.

        Args:
            sources: The datasets.
            opened: What `open_manifests` returned for them.
            geometry: How media become tokens.
            fake_tokens: What the image costs that text-only samples get; 0: they get none.
            max_indexes: Indexes that are kept in memory.
        """
        self._sources = tuple(sources)
        self._geometry = geometry
        self._fake_tokens = fake_tokens
        self._max_indexes = max_indexes
        self._stores: list[Store] = [store for store, _ in opened]
        self.manifests: list[Manifest] = [manifest for _, manifest in opened]
        self._indexes: OrderedDict[tuple[int, int], ShardIndex] = OrderedDict()
        self._joint: dict[int, JointIndex | None] = {}
        self._counted: dict[tuple[int, int], SampleColumns] = {}
        for source, manifest in zip(self._sources, self.manifests, strict=True):
            if not any(shard.totals.samples for shard in manifest.shards):
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
                samples_per_shard=tuple(shard.totals.samples for shard in manifest.shards),
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
        expected = template_digest(processor)
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

    def __call__(self, source: int, shard: int) -> SampleColumns:
        """Return what the plan must know of one shard's samples (this makes it the plan's column reader)."""
        ready = self._counted.pop((source, shard), None)
        return ready or next(self._count([self._index(source, shard)]))

    def prefetch(self, shards: Sequence[tuple[int, int]]) -> None:
        """Read the indexes of shards that the plan is about to ask for, side by side, and count them all at once."""
        missing = [place for place in shards if place not in self._indexes]
        self._join(missing)
        missing = [place for place in missing if self._joint.get(place[0]) is None]
        if len(missing) > 1:
            # Threads wait, this one decodes what has come: small steps of many threads get in each other's way.
            with ThreadPoolExecutor(min(_INDEX_THREADS, len(missing))) as pool:
                for place, data in zip(missing, pool.map(self._fetch_index, missing), strict=True):
                    self._keep(place, self._open_index(place, data))
        wanted = list(dict.fromkeys(shards))
        counted = self._count([self._index(*place) for place in wanted]) if wanted else ()
        self._counted = dict(zip(wanted, counted, strict=False))

    def _count(self, indexes: Sequence[ShardIndex]) -> Iterator[SampleColumns]:
        media = join_columns([index.media for index in indexes])
        counted = count_tokens(media, self._geometry)
        fake = np.where(num_media(media) == 0, self._fake_tokens, 0)  # [n]
        begin = 0
        for index in indexes:
            end = begin + len(index)
            yield SampleColumns(
                tokens=counted.tokens[begin:end] + fake[begin:end],
                vision_tokens=counted.vision_tokens[begin:end] + fake[begin:end],
                vision_patches=counted.vision_patches[begin:end],
                vision_squares=counted.vision_squares[begin:end],
                offset=index.offset,
                num_bytes=index.size,
            )
            begin = end

    def span(self, ref: Ref) -> Span:
        """Return where the bytes of a sample lie."""
        return self._index(ref.source, ref.shard).span(ref.row)

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
        shard = self.manifests[ref.source].shards[ref.shard]
        return self._sources[ref.source].name, shard.name, self._index(ref.source, ref.shard).key(ref.row)

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
        else:
            self._indexes.move_to_end(place)
        return index

    def _join(self, places: Sequence[tuple[int, int]]) -> None:
        """Read the joint indexes of sources of which many shards are asked for."""
        for source, count in Counter(source for source, _ in places).items():
            manifest = self.manifests[source]
            num_samples = sum(shard.totals.samples for shard in manifest.shards)
            if source in self._joint or not manifest.joint_index_sha256 or count * _ROWS_PER_INDEX < num_samples:
                continue
            try:
                self._joint[source] = read_joint_index(self._stores[source], manifest)
            except DatasetError as error:
                self._joint[source] = None
                logger.warning(
                    "%s The indexes of its shards are read one by one instead, so the start takes longer; "
                    "write it again with: vlm-stream index",
                    error,
                )

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
        shards = self.manifests[source].shards
        largest = max(range(len(shards)), key=lambda shard: shards[shard].totals.samples)
        return max(float(self(source, largest).tokens.mean()), 1.0)
