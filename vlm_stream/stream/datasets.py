"""The opened datasets of a mixture: what the plan asks of their indexes, and where a ref's bytes lie.

Enters: source options and the geometry of the processor that trains. Leaves: `SourceSpec` values and columns for the
plan, spans for the reader. Indexes are read when the plan first needs a shard and kept while it is live.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import DatasetError
from vlm_stream.plan import Ref, SampleColumns, SourceSpec
from vlm_stream.shards import load_manifest, read_index
from vlm_stream.storage import open_store
from vlm_stream.tokens import count_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.shards import Manifest, ShardIndex
    from vlm_stream.storage import Span, Store, StoreOptions
    from vlm_stream.stream.sources import SourceOptions
    from vlm_stream.tokens import Geometry

__all__ = ["OpenDatasets"]

_INDEX_THREADS: Final = 16


class OpenDatasets:
    """Manifests at once, indexes on demand."""

    def __init__(
        self,
        sources: Sequence[SourceOptions],
        geometry: Geometry,
        *,
        store_options: StoreOptions | None = None,
        max_indexes: int = 1024,
    ) -> None:
        """Open every manifest; raise `DatasetError` where one has no samples."""
        self._sources = tuple(sources)
        self._geometry = geometry
        self._max_indexes = max_indexes
        self._stores: list[Store] = [open_store(source.url, store_options) for source in sources]
        self.manifests: list[Manifest] = [load_manifest(store) for store in self._stores]
        self._indexes: OrderedDict[tuple[int, int], ShardIndex] = OrderedDict()
        self.specs = [self._spec(*pair) for pair in zip(self._sources, self.manifests, strict=True)]

    def __call__(self, source: int, shard: int) -> SampleColumns:
        """Return what the plan must know of one shard's samples (this makes it the plan's column reader)."""
        index = self._index(source, shard)
        counted = count_tokens(index.media, self._geometry)
        return SampleColumns(
            tokens=counted.tokens,
            vision_tokens=counted.vision_tokens,
            vision_patches=counted.vision_patches,
            vision_squares=counted.vision_squares,
            offset=index.offset,
            num_bytes=index.size,
        )

    def prefetch(self, shards: Sequence[tuple[int, int]]) -> None:
        """Read the indexes of shards that the plan is about to ask for, side by side."""
        missing = [place for place in shards if place not in self._indexes]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(_INDEX_THREADS, len(missing))) as pool:
                for place, index in zip(missing, pool.map(self._read_index, missing), strict=True):
                    self._keep(place, index)

    def span(self, ref: Ref) -> Span:
        """Return where the bytes of a sample lie."""
        return self._index(ref.source, ref.shard).span(ref.row)

    def name(self, ref: Ref) -> tuple[str, str, str]:
        """Return source, shard and key: how people name a sample."""
        shard = self.manifests[ref.source].shards[ref.shard]
        return self._sources[ref.source].name, shard.name, self._index(ref.source, ref.shard).key(ref.row)

    def _index(self, source: int, shard: int) -> ShardIndex:
        place = (source, shard)
        if place not in self._indexes:
            self._keep(place, self._read_index(place))
        self._indexes.move_to_end(place)
        return self._indexes[place]

    def _read_index(self, place: tuple[int, int]) -> ShardIndex:
        source, shard = place
        manifest = self.manifests[source]
        return read_index(self._stores[source], manifest.shards[shard], tars=manifest.tars)

    def _keep(self, place: tuple[int, int], index: ShardIndex) -> None:
        self._indexes[place] = index
        if len(self._indexes) > self._max_indexes:
            self._indexes.popitem(last=False)

    @staticmethod
    def _spec(source: SourceOptions, manifest: Manifest) -> SourceSpec:
        if not manifest.totals.samples:
            raise DatasetError(
                f"the dataset at {source.url} has no samples, so there is nothing to stream; "
                f"look at the ledger of its conversion, or leave the source out"
            )
        return SourceSpec(
            name=source.name,
            samples_per_shard=tuple(shard.totals.samples for shard in manifest.shards),
            digest=manifest.digest,
            weight=source.weight,
            sample_ratio=source.sample_ratio,
        )
