"""Sources and options become a plan, and the plan blueprints: the last place that knows indexes.

Enters: what the user said, and the processor. Leaves: `Plan`: blueprints of one rank from any state on, counts, and the
settings by which builders make batches of blueprints. Index rows are kept by bytes; nothing here grows with the dataset
but the manifest's list of shards.
"""

from __future__ import annotations

import logging
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from vlm_stream.blueprint import BatchName, Blueprint, Piece, Planned, Work
from vlm_stream.build import BuildConfig, choose_family, encodes_samples
from vlm_stream.convert import user_cache
from vlm_stream.counting import Counter
from vlm_stream.cutting import Cutter
from vlm_stream.datasets import Datasets
from vlm_stream.encode import inject_fake_image, kept_text_key
from vlm_stream.errors import ConfigError, DatasetError
from vlm_stream.keys import FAKE_IMAGE_SIZE
from vlm_stream.ledger import BadSample
from vlm_stream.media import decodes_by_frames
from vlm_stream.plan import PackConfig, Planner, step_at
from vlm_stream.tokens import (
    Geometry,
    ImageSize,
    MediaSizes,
    TextCounter,
    choose_keyframes,
    fake_image_tokens,
    template_digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vlm_stream.collate import Family
    from vlm_stream.convert import GuessFit, Need
    from vlm_stream.format import Drawn
    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import Dropped, Ref, Step
    from vlm_stream.recipe import SourceOptions
    from vlm_stream.world import World

    Ints = npt.NDArray[np.int64]
    Tables = dict[int, Future[bytes | None]]

logger = logging.getLogger(__name__)

_MOST_TABLES: Final = 32
"""That are read ahead; those of one batch always are."""


class _Looked(NamedTuple):
    """A micro-batch whose samples were looked up, and the tables of its clips, which are being read."""

    step: Step
    rank: int
    micro: int
    refs: Sequence[Ref]
    drawn: Sequence[Drawn]
    tables: Tables

    @property
    def has_tables(self) -> bool:
        """Tell whether there is nothing to wait for."""
        return all(table.done() for table in self.tables.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What every rank of a run consumes."""

    planner: Planner
    datasets: Datasets
    build: BuildConfig
    geometry: Geometry
    """What counts media."""
    cutter: Cutter | None = None
    """None: clips are read whole."""
    reads_texts: bool = False
    """Whether tokens that are kept beside indexes are used."""

    def after(self, num_epochs: int) -> Plan:
        """Return the plan of an iteration before which so many epochs were delivered, with a planner of its own."""
        config = self.planner.config
        epochs = None if config.epochs is None else config.epochs + num_epochs
        return replace(self, planner=self.planner.with_config(replace(config, epochs=epochs)))

    def blueprints(self, world: World, state: dict[str, Any] | None = None) -> Iterator[Planned]:
        """Yield the micro-batches of one rank, from the start or from a state on."""
        step = None
        options = self.build.options
        looked: deque[_Looked] = deque()
        for step in self.planner.steps(options.shape(world.size), state):
            for micro in range(step.micro_begin, step.shape.micro_batches):
                looked.append(self._look(step, world.rank, micro))
                # Nobody waits for a table while those of later batches can be asked for.
                while looked and (looked[0].has_tables or sum(len(each.tables) for each in looked) >= _MOST_TABLES):
                    yield self._planned(looked.popleft())
        yield from map(self._planned, looked)
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
            yield Planned(self.blueprint(step, world.rank, micro), lambda: None)

    def blueprint(self, step: Step, rank: int, micro: int) -> Blueprint:
        """Return one micro-batch of a step, for one rank."""
        return self._planned(self._look(step, rank, micro)).blueprint

    def _look(self, step: Step, rank: int, micro: int) -> _Looked:
        refs = [ref for row in step.refs(rank, micro) for ref in row]
        return _Looked(step, rank, micro, refs, *self._draw(refs))

    def _planned(self, looked: _Looked) -> Planned:
        step, rank, micro = looked.step, looked.rank, looked.micro
        pieces = self._pieces(looked.refs, looked.drawn, looked.tables)
        dropped = step.dropped if micro == step.micro_begin else ()
        given = iter(pieces)
        blueprint = Blueprint(
            name=BatchName(self.planner.digest, step.index, rank, micro),
            rows=tuple(tuple(next(given) for _ in row) for row in step.refs(rank, micro)),
            dropped=tuple(self._entry(note) for note in dropped),
            work=work_of(pieces, step.tokens(rank, micro)),
            labels=step.labels(rank, micro),
            step_labels=step.total_labels,
            num_in_step=step.shape.world_size * step.shape.micro_batches,
        )
        return Planned(blueprint, partial(step.state_after, micro), step.positions)

    def pieces(self, refs: Sequence[Ref]) -> list[Piece]:
        """Return what builders must know of samples: of long clips only what holds the frames that are seen."""
        return self._pieces(refs, *self._draw(refs))

    def _draw(self, refs: Sequence[Ref]) -> tuple[list[Drawn], Tables]:
        """Look samples up, and begin to read the tables of their clips; these stand by the places of their samples."""
        rule = self.build.frames
        drawn = [
            each._replace(sizes=choose_keyframes(each.sizes, rule)) if each.sizes.videos else each
            for each in self.datasets.draw(refs)
        ]
        if self.cutter is None:
            return drawn, {}
        chosen = [place for place, sample in enumerate(drawn) if self.cutter.may_cut(sample)]
        tables = self.datasets.tables([refs[place] for place in chosen], [drawn[place] for place in chosen])
        return drawn, dict(zip(chosen, tables, strict=True))

    def _pieces(self, refs: Sequence[Ref], drawn: Sequence[Drawn], tables: Tables) -> list[Piece]:
        pieces = list(map(self._piece, refs, drawn))
        for place, table in tables.items():
            data = table.result()
            if self.cutter and data is not None and (found := self.cutter.cut(drawn[place], data)) is not None:
                pieces[place] = pieces[place]._replace(parts=found[0], clips=found[1])
        return pieces

    def table_sizes(self, refs: Sequence[Ref]) -> list[int]:
        """Return the bytes of each table that `pieces` reads for some samples."""
        drawn = [] if self.cutter is None else self.datasets.draw(refs)
        return [sample.table.size for sample in drawn if sample.table and self.cutter and self.cutter.may_cut(sample)]

    def _piece(self, ref: Ref, drawn: Drawn) -> Piece:
        whole = drawn.span
        is_whole = bool(self.build.options.pixels)
        span = whole if is_whole else self.datasets.opened[ref.source].text_span(drawn)
        return Piece(
            (ref.source, ref.shard, ref.row),
            drawn.key,
            whole.offset,
            span,
            drawn.sizes,
            tuple([member[0] for member in drawn.members]),
            drawn.entry,
            drawn.id,
            (whole, *drawn.shared) if is_whole and drawn.shared else (),
            text=self.datasets.text_part(ref.source, drawn, self.build.text_key) if self.reads_texts else (),
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
    opened: Datasets | None = None,
) -> Plan:
    """Open the datasets and plan over them.

    Args:
        sources: The datasets.
        options: How samples become batches.
        processor: Counts media; None: the geometry that the datasets were counted with.
        given: The processor as the user gave it (a name, say), for builders; by default the processor itself.
        need: What samples must make; by default conversations if there is a processor.
        opened: The datasets of another plan of the same sources, to be used again.
    """
    family = None if processor is None else choose_family(processor, options)
    need = need or ("members" if processor is None else "conversation")
    datasets = Datasets(sources, options, need) if opened is None else opened
    if processor is not None and not hasattr(processor, "tokenizer"):
        datasets.check_text_only(processor)
    geometry = datasets.geometry() if processor is None else Geometry.from_processor(processor)
    geometry = _with_frames(geometry, options)
    if geometry.frames.keyframes:
        for dataset in datasets.opened:
            dataset.read_keyframes()
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
    if processor is not None and family is not None:
        text = template_digest(processor)
        datasets.check_counted_for(text, geometry)
        fits = datasets.fit_guesses(processor, geometry, options, family)
    # Where lengths are guesses, nobody knows which samples will be cut.
    are_labels_known = geometry.is_exact or options.long_samples != "truncate"
    config = options.plan(
        f"{geometry.digest()}+{fake_tokens}",
        text=text,
        weights_given=any(source.has_weight for source in datasets.sources),
    )
    capacity = config.mode.capacity - fake_tokens if isinstance(config.mode, PackConfig) else 0
    read = Counter(
        datasets,
        geometry,
        fake_tokens,
        text if are_labels_known else "",
        fits,
        capacity,
        bool(options.pixels),
        datasets.frame_texts(processor, geometry, text),
    )
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
            text_key=kept_text_key(text) if text else "",
        ),
        geometry=geometry,
        cutter=_open_cutter(options, geometry, family),
        reads_texts=_uses_texts(processor, options, family),
    )


def _uses_texts(processor: Any, options: StreamOptions, family: Family | None) -> bool:
    """Tell whether samples can be encoded from the tokens of their text."""
    if family is None or not options.pixels or not encodes_samples(family, options):
        return False
    return not family.steps_for(processor).changes_text


def _open_cutter(options: StreamOptions, geometry: Geometry, family: Family | None) -> Cutter | None:
    """Return what cuts clips; None where bytes are handed out, or nothing is decoded, or by a library of its own."""
    by_frames = family is not None and options.pixels and encodes_samples(family, options)
    return Cutter(geometry.frames, options.read()) if by_frames and decodes_by_frames(options.video_backend) else None


def work_of(pieces: Sequence[Piece], tokens: int) -> Work:
    """Return what building a batch of some samples depends on."""
    return Work(
        samples=len(pieces),
        tokens=tokens,
        num_bytes=sum(span.size for piece in pieces for span in (*piece.reads, *piece.text)),
        image_pixels=sum(image.height * image.width for piece in pieces for image in piece.sizes.images),
        video_pixels=sum(map(_decoded_pixels, pieces)),
    )


def _decoded_pixels(piece: Piece) -> int:
    """Return the pixels of the frames that are decoded: those of cut clips, and of other files all, for most are."""
    if not piece.sizes.videos:
        return 0
    cut = {video for clip in piece.clips for video in clip.videos}
    whole = [video for number, video in enumerate(piece.sizes.videos) if number not in cut]
    of_cuts = sum(clip.cut.num_packets * clip.facts[1] * clip.facts[2] for clip in piece.clips)
    return of_cuts + sum(video.frames * video.height * video.width for video in whole)


def _with_frames(geometry: Geometry, options: StreamOptions) -> Geometry:
    """Return the geometry with the frames that this run reads of videos."""
    changes = {name: getattr(options, name) for name in ("fps", "max_frames") if getattr(options, name) is not None}
    changes |= {"keyframes": True} if options.frames == "keyframes" else {}
    return replace(geometry, frames=replace(geometry.frames, **changes)) if changes else geometry


def _count_fake_image(processor: Any, geometry: Geometry) -> int:
    """Return by how many tokens the invisible image lengthens a text-only sample, the text around it included."""
    plain = [{"role": "user", "content": [{"type": "text", "text": "-"}]}]
    height, width = FAKE_IMAGE_SIZE
    counter = TextCounter(processor)
    without = counter.count(plain, MediaSizes())
    faked = counter.count(inject_fake_image(plain), MediaSizes(images=(ImageSize(height=height, width=width),)))
    return faked - 1 + fake_image_tokens(geometry) - without
