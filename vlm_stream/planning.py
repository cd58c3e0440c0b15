"""Sources and options become a plan, and the plan blueprints: the last place that knows indexes.

Enters: what the user said, and the processor. Leaves: `Plan`: blueprints of one rank from any state on, counts, and the
settings by which builders make batches of blueprints. Index rows are kept by bytes; nothing here grows with the dataset
but the manifest's list of shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.blueprint import BatchName, Blueprint, Piece, Planned, Work
from vlm_stream.build import BuildConfig, choose_family
from vlm_stream.convert import user_cache
from vlm_stream.datasets import Datasets
from vlm_stream.encode import inject_fake_image
from vlm_stream.errors import ConfigError, DatasetError
from vlm_stream.keys import FAKE_IMAGE_SIZE
from vlm_stream.ledger import BadSample
from vlm_stream.plan import PackConfig, Planner, SampleColumns, SourceSpec, step_at
from vlm_stream.tokens import (
    Geometry,
    ImageSize,
    MediaSizes,
    TextCounter,
    count_tokens,
    fake_image_tokens,
    template_digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vlm_stream.convert import GuessFit, Need
    from vlm_stream.format import Drawn
    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import Dropped, Ref, Step
    from vlm_stream.recipe import SourceOptions
    from vlm_stream.tokens import MediaColumns
    from vlm_stream.world import World

    Ints = npt.NDArray[np.int64]

__all__ = ["Datasets", "Plan", "open_plan"]


@dataclass(frozen=True, slots=True)
class _Counter:
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

    def __call__(self, source: int, shards: Sequence[int]) -> SampleColumns:
        with self.datasets.lock:
            media = self.datasets.opened[source].media(shards)
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
        )

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
        return max(float(self(source, [sizes.index(max(sizes))]).tokens.mean()), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank of a run consumes."""

    planner: Planner
    datasets: Datasets
    build: BuildConfig

    def after(self, num_epochs: int) -> Plan:
        """Return the plan of an iteration before which so many epochs were delivered, with a planner of its own."""
        config = self.planner.config
        epochs = None if config.epochs is None else config.epochs + num_epochs
        return replace(self, planner=self.planner.with_config(replace(config, epochs=epochs)))

    def blueprints(self, world: World, state: dict[str, Any] | None = None) -> Iterator[Planned]:
        """Yield the micro-batches of one rank, from the start or from a state on."""
        step = None
        options = self.build.options
        for step in self.planner.steps(options.shape(world.size), state):
            for micro in range(step.micro_begin, step.shape.micro_batches):
                yield Planned(self._blueprint(step, world.rank, micro), partial(step.state_after, micro))
        if step is None and state is None:
            limits = {name: getattr(options, name) for name in ("pack_size", "max_length", "token_budget")}
            raise DatasetError(
                f"not one of the samples in {', '.join({each.url: None for each in self.datasets.sources})} fits the "
                f"limits ({', '.join(f'{name}={value}' for name, value in limits.items() if value is not None)}), so "
                f"there is nothing to deliver; raise them, or look at the lengths with: vlm-stream stats"
            )

    def replay(self, world: World, number: int, state: dict[str, Any] | None = None) -> Iterator[Planned]:
        """Yield the micro-batches of one step, found without building those before it; they have no state."""
        step = step_at(self.planner, self.build.options.shape(world.size), number, state=state)
        for micro in range(step.micro_begin, step.shape.micro_batches):
            yield Planned(self._blueprint(step, world.rank, micro), lambda: None)

    def _blueprint(self, step: Step, rank: int, micro: int) -> Blueprint:
        rows = step.refs(rank, micro)
        refs = [ref for row in rows for ref in row]
        pieces = list(map(self._piece, refs, self.datasets.draw(refs)))
        dropped = step.dropped if micro == step.micro_begin else ()
        given = iter(pieces)
        return Blueprint(
            name=BatchName(self.planner.digest, step.index, rank, micro),
            rows=tuple(tuple(next(given) for _ in row) for row in rows),
            dropped=tuple(self._entry(note) for note in dropped),
            work=_work(pieces, step.tokens(rank, micro)),
            labels=step.labels(rank, micro),
            step_labels=step.total_labels,
            num_in_step=step.shape.world_size * step.shape.micro_batches,
        )

    def _piece(self, ref: Ref, drawn: Drawn) -> Piece:
        whole = drawn.span
        span = whole if self.build.options.pixels else self.datasets.opened[ref.source].text_span(drawn)
        return Piece(
            (ref.source, ref.shard, ref.row),
            drawn.key,
            whole.offset,
            span,
            drawn.sizes,
            tuple(name for name, *_ in whole.members),
            drawn.entry,
            drawn.id,
        )

    def _entry(self, note: Dropped) -> BadSample:
        (drawn,) = self.datasets.draw([note.ref])
        return BadSample(
            source=self.datasets.sources[note.ref.source].name,
            sample=drawn.key,
            stage="fit",
            reason=note.reason,
            detail=(
                f"it has {note.tokens} tokens, {note.vision_tokens} of them for images and videos: more than a row may "
                f"hold, so it is left out. Raise pack_size or max_length to train on it"
            ),
            shard=drawn.span.path,
            offset=drawn.span.offset,
            entry=drawn.entry,
            id=drawn.id or "",
        )


def open_plan(
    sources: Sequence[SourceOptions],
    options: StreamOptions,
    processor: Any = None,
    *,
    given: Any = None,
    need: Need | None = None,
) -> Plan:
    """Open the datasets and plan over them.

    Args:
        sources: The datasets.
        options: How samples become batches.
        processor: Counts media; None: the geometry that the datasets were counted with.
        given: The processor as the user gave it (a name, say), for builders; by default the processor itself.
        need: What samples must make; by default conversations if there is a processor.
    """
    family = None if processor is None else choose_family(processor, options)
    datasets = Datasets(sources, options, need or ("members" if processor is None else "conversation"))
    if processor is not None and not hasattr(processor, "tokenizer"):
        datasets.check_text_only(processor)
    geometry = datasets.geometry() if processor is None else Geometry.from_processor(processor)
    geometry = _with_frames(geometry, options)
    beside = [path for found in datasets.opened if (path := Path(found.root)).is_absolute()]  # not those of stores
    geometry.remember_in([*beside, user_cache()])
    fake_tokens = 0
    if options.fake_image:
        if processor is None:
            raise ConfigError(
                "fake_image lengthens text-only samples by what the processor writes for an image, and no processor "
                "was given; name one with --processor"
            )
        fake_tokens = _count_fake_image(processor, geometry)
    text = ""
    fits: tuple[GuessFit | None, ...] = (None,) * len(datasets.opened)
    if processor is not None:
        text = template_digest(processor)
        datasets.check_counted_for(text)
        fits = datasets.fit_guesses(processor, geometry, options)
    # Where lengths are guesses, nobody knows which samples will be cut.
    are_labels_known = geometry.is_exact or options.long_samples != "truncate"
    config = options.plan(
        f"{geometry.digest()}+{fake_tokens}",
        text=text,
        weights_given=any(source.has_weight for source in datasets.sources),
    )
    capacity = config.mode.capacity - fake_tokens if isinstance(config.mode, PackConfig) else 0
    read = _Counter(datasets, geometry, fake_tokens, text if are_labels_known else "", fits, capacity)
    named = tuple(
        (source.name, dataset.manifest.fields)
        for source, dataset in zip(datasets.sources, datasets.opened, strict=True)
    )
    return Plan(
        planner=Planner(read.specs(weigh_by=config.mixture.weigh_by), read, config, allow=options.allow),
        datasets=datasets,
        build=BuildConfig(
            processor=processor if given is None else given,
            options=options,
            frames=geometry.frames,
            sources=named,
            family=family,
        ),
    )


def _work(pieces: Sequence[Piece], tokens: int) -> Work:
    return Work(
        samples=len(pieces),
        tokens=tokens,
        num_bytes=sum(piece.span.size for piece in pieces),
        image_pixels=sum(image.height * image.width for piece in pieces for image in piece.sizes.images),
        video_pixels=sum(clip.frames * clip.height * clip.width for piece in pieces for clip in piece.sizes.videos),
    )


def _with_frames(geometry: Geometry, options: StreamOptions) -> Geometry:
    """Return the geometry with the frames that this run reads of videos."""
    changes = {name: getattr(options, name) for name in ("fps", "max_frames") if getattr(options, name) is not None}
    return replace(geometry, frames=replace(geometry.frames, **changes)) if changes else geometry


def _count_fake_image(processor: Any, geometry: Geometry) -> int:
    """Return by how many tokens the invisible image lengthens a text-only sample, the text around it included."""
    plain = [{"role": "user", "content": [{"type": "text", "text": "-"}]}]
    height, width = FAKE_IMAGE_SIZE
    counter = TextCounter(processor)
    without = counter.count(plain, MediaSizes())
    faked = counter.count(inject_fake_image(plain), MediaSizes(images=(ImageSize(height=height, width=width),)))
    return faked - 1 + fake_image_tokens(geometry) - without


def _num_media(columns: MediaColumns) -> Ints:
    """Return [n] how many media each sample has."""
    splits = (columns.image_splits, columns.video_splits, columns.audio_splits)
    counts: Ints = np.sum([np.diff(split) for split in splits], axis=0)
    return counts
