"""The opened datasets of a mixture: what the plan asks of their indexes, and where a ref's bytes lie.

Enters: source options and the geometry of the processor that trains. Leaves: `SourceSpec` values and columns for the
plan, spans for the reader. Indexes are read when the plan first needs a shard and kept while it is live.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet  # noqa: F401 - every stream reads indexes; later, it would be imported while a batch is waited for

from vlm_stream.errors import DatasetError
from vlm_stream.format import IndexCache, OpenDataset
from vlm_stream.plan import Ref, SampleColumns, SourceSpec
from vlm_stream.processors import template_digest
from vlm_stream.stream.counting import num_media
from vlm_stream.tokens import count_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.format import Drawn, Manifest
    from vlm_stream.storage import Span, Store, StoreOptions
    from vlm_stream.stream.sources import SourceOptions
    from vlm_stream.tokens import Geometry, MediaColumns, MediaSizes, TokenColumns

    Ints = npt.NDArray[np.int64]

__all__ = ["OpenDatasets", "open_manifests"]

logger = logging.getLogger(__name__)


def open_manifests(sources: Sequence[SourceOptions], store_options: StoreOptions | None) -> list[OpenDataset]:
    """Open the dataset of each source: its manifest is read."""
    cache = IndexCache()
    return [OpenDataset(source.url, store_options, cache) for source in sources]


class OpenDatasets:
    """Indexes of opened datasets, on demand."""

    def __init__(
        self,
        sources: Sequence[SourceOptions],
        opened: Sequence[OpenDataset],
        geometry: Geometry,
        *,
        fake_tokens: int = 0,
        text: str = "",
    ) -> None:
        """Raise `DatasetError` where a dataset has no samples; nothing is read yet.

        Args:
            sources: The datasets.
            opened: What `open_manifests` returned for them.
            geometry: How media become tokens.
            fake_tokens: What the image costs that text-only samples get; 0: they get none.
            text: `template_digest` of the processor that trains: labels are known where they were counted for it.
        """
        self._sources = tuple(sources)
        self._geometry = geometry
        self.geometry_digest = geometry.digest()
        self._fake_tokens = fake_tokens
        self._text = text
        self._opened = tuple(opened)
        self.manifests: list[Manifest] = [dataset.manifest for dataset in opened]
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
        return {dataset.root: dataset.store for dataset in self._opened}

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

    def __call__(self, source: int, shard: int) -> SampleColumns:
        """Return what the plan must know of one shard's samples (this makes it the plan's column reader)."""
        return self.read_many(source, [shard])

    def read_many(self, source: int, shards: Sequence[int]) -> SampleColumns:
        """Return what the plan must know of the samples of some shards, one behind the other."""
        media, offset, size = self._opened[source].media(shards)
        return _columns(self._count(media), self._labels(source, media.label_tokens), offset, size)

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

    def _drawn(self, ref: Ref) -> Drawn:
        (drawn,) = self._opened[ref.source].draw(ref.shard, [ref.row])
        return drawn

    def span(self, ref: Ref) -> Span:
        """Return where the bytes of a sample lie."""
        return self._drawn(ref).span

    def spans(self, refs: Sequence[Ref]) -> list[Span]:
        """Return where the bytes of samples lie."""
        return list(map(self.span, refs))

    def text_span(self, ref: Ref) -> Span:
        """Return where the text of a sample lies."""
        return self._opened[ref.source].text_span(self._drawn(ref))

    def contents(self, ref: Ref) -> tuple[list[str], MediaSizes]:
        """Return the names of a sample's members and the sizes of its media, as the index has them."""
        drawn = self._drawn(ref)
        return [name for name, _, _ in drawn.span.members], drawn.sizes

    def name(self, ref: Ref) -> tuple[str, str, str]:
        """Return source, shard and key: how people name a sample."""
        drawn = self._drawn(ref)
        return self._sources[ref.source].name, drawn.span.path, drawn.key

    def names(self, refs: Sequence[Ref]) -> list[tuple[str, str, str]]:
        """Return how people name samples."""
        return list(map(self.name, refs))

    def find_key(self, source: int, shard: int, key: str) -> int | None:
        """Return the row of the sample with that key in a shard, if it is there."""
        return self._opened[source].find_key(shard, key)

    def _mean_tokens(self, source: int) -> float:
        sizes = self.manifests[source].shards.column("samples")
        largest = sizes.index(max(sizes))
        return max(float(self(source, largest).tokens.mean()), 1.0)


def _columns(counted: TokenColumns, labels: Ints, offset: Ints, size: Ints) -> SampleColumns:
    return SampleColumns(
        tokens=counted.tokens,
        vision_tokens=counted.vision_tokens,
        vision_patches=counted.vision_patches,
        vision_squares=counted.vision_squares,
        labels=labels,
        offset=offset,
        num_bytes=size,
    )
