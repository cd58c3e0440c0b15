"""What samples cost: index columns, and the geometry of this run, become the lengths that a plan is made of.

Enters: opened datasets, and numbers of shards. Leaves: `SampleColumns`, for the samples that the plan asks for. What
was guessed is corrected; what this run shows of videos beside what was counted is added.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from vlm_stream.plan import SampleColumns, SourceSpec
from vlm_stream.tokens import count_decoded, count_keyframes, count_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vlm_stream.convert import GuessFit
    from vlm_stream.datasets import Datasets
    from vlm_stream.tokens import FrameText, Geometry, MediaColumns

    Ints = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counter:
    """Reads columns for the plan: index columns, counted by the geometry of this run."""

    datasets: Datasets
    geometry: Geometry
    fake_tokens: int
    """What the image costs that text-only samples get; 0: they get none."""
    text: str
    """Digest of template and tokenizer: labels are known where they were counted for it."""
    fits: tuple[GuessFit | None, ...] = ()
    """How to correct guessed text, for each source."""
    capacity: int = 0
    """Of a row."""
    decodes: bool = True
    """Videos are decoded, which costs."""
    texts: tuple[FrameText | None, ...] = ()
    """What the text around frames costs more than was counted, for each source."""
    told: list[str] = field(default_factory=list)
    """The first source with videos whose keyframes are not known."""

    def __call__(self, source: int, shards: Sequence[int]) -> _Uncounted:
        """Return the samples of some shards, to be counted when they are asked for."""
        with self.datasets.lock:
            return _Uncounted(self, source, self.datasets.opened[source].media(shards).narrowed())

    def count(self, source: int, media: MediaColumns) -> SampleColumns:
        """Count samples of one source."""
        if self.geometry.frames.keyframes:
            media = self._of_keyframes(source, media)
        counted = count_tokens(media, self.geometry)
        if self.fits and (fit := self.fits[source]) is not None:
            safe = fit.correct(counted.tokens, media.text_tokens, self.capacity)
            counted = replace(counted, tokens=safe)
        fake = np.where(_num_media(media) == 0, self.fake_tokens, 0)  # [n]
        is_ours = self.text and self.datasets.opened[source].manifest.tokens.template_sha256 == self.text
        return SampleColumns(
            tokens=counted.tokens + fake,
            vision_tokens=counted.vision_tokens + fake,
            vision_patches=counted.vision_patches,
            vision_squares=counted.vision_squares,
            labels=media.label_tokens if is_ours else np.full(len(fake), -1, dtype=np.int64),
            decode=count_decoded(media, self.geometry.frames) if self.decodes else None,
        )

    def _of_keyframes(self, source: int, media: MediaColumns) -> MediaColumns:
        """Return the samples with the text that is written around their keyframes."""
        unknown = int(((count_keyframes(media) == 0) & (media.video_picked == 0)).sum())
        if unknown and not self.told:
            self.told.append(self.datasets.sources[source].name)
            logger.warning(
                "the keyframes of some videos are not known (of '%s', %d of %d that were looked at), so "
                "frames='keyframes' shows frames of them as without it; see docs/video.md",
                *(self.told[0], unknown, len(media.video_sizes)),
            )
        text = self.texts[source] if self.texts else None
        return media if text is None else replace(media, text_tokens=media.text_tokens + text.change(media))

    def specs(self, *, weigh_by: str) -> list[SourceSpec]:
        """Return what the plan must know of the sources."""
        return [
            SourceSpec(
                name=source.name,
                samples_per_shard=tuple(dataset.samples_per_shard),
                digest=f"{dataset.digest}{self._correction(number)}",
                weight=source.weight,
                sample_ratio=source.sample_ratio,
                tokens_per_sample=self._mean_tokens(number) if weigh_by == "tokens" else 1.0,
            )
            for number, (source, dataset) in enumerate(zip(self.datasets.sources, self.datasets.opened, strict=True))
        ]

    def _correction(self, source: int) -> str:
        """Return what lengths depend on beside the index: a state made with others would cut other packs."""
        fit = self.fits[source] if self.fits else None
        return f"+{fit.slope},{fit.offset},{fit.margin}" if fit else ""

    def _mean_tokens(self, source: int) -> float:
        """Return the mean of the largest shard: to read every index would take as long as an epoch of planning."""
        sizes = self.datasets.opened[source].samples_per_shard
        largest = sizes.index(max(sizes))
        return max(float(self(source, [largest]).pick(np.arange(sizes[largest])).tokens.mean()), 1.0)


@dataclass(frozen=True, slots=True)
class _Uncounted:
    """Samples as their indexes describe them."""

    counter: Counter
    source: int
    media: MediaColumns

    def __len__(self) -> int:
        return len(self.media)

    def pick(self, rows: Ints) -> SampleColumns:
        """Count some of them."""
        return self.counter.count(self.source, self.media.pick(rows))


def _num_media(columns: MediaColumns) -> Ints:
    """Return [n] how many media each sample has."""
    splits = (columns.image_splits, columns.video_splits, columns.audio_splits)
    counts: Ints = np.sum([np.diff(split) for split in splits], axis=0)
    return counts
