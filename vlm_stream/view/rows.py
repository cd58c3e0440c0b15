"""What one rank gets at one step: documents in rows, as planned or as built, and what all ranks carry.

Enters: a step of a walk. Leaves: `StepView`, plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.build import Builder
from vlm_stream.encode import IGNORE, media_token_ids
from vlm_stream.errors import ConfigError
from vlm_stream.plan import PackConfig
from vlm_stream.pp_media import microbatch_bounds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vlm_stream.ledger import BadSample
    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import Ref, Step
    from vlm_stream.tokens import MediaSizes
    from vlm_stream.view.catalog import Catalog, Name
    from vlm_stream.view.steps import Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One sample at its place in a row."""

    ref: Ref
    name: Name
    id: str | None
    tokens: int
    vision: int
    llm: float = 0.0
    """Cost in the language model, in tokens."""
    vit: float = 0.0
    decode: float = 0.0
    """Megapixels, of what `StepView.decode` is of."""
    hole: str = ""
    """Why there is a hole in its place; empty: there is none, or nobody has built the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a micro-batch."""

    documents: tuple[Document, ...]
    slots: int
    """Tokens that fit into it."""
    runs: tuple[tuple[str, int], ...] = ()
    """Kinds and lengths of what stands in it, once it was built: `text`, `vision`, `label`, `pad`."""
    pipeline: int | None = None
    """Number of the pipeline's micro-batch that it belongs to."""

    @property
    def tokens(self) -> int:
        """Return how many of its slots are taken."""
        return sum(document.tokens for document in self.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """What one rank gets at one step, and what all ranks carry."""

    number: int = 0
    rank: int = 0
    epoch: int = 0
    total: int | None = None
    micro_batches: tuple[tuple[Row, ...], ...]
    llm: tuple[float, ...] = ()
    """[ranks] Cost in the language model, in tokens; none of a batch of which nothing but its rows is known."""
    vit: tuple[float, ...] = ()
    decode: tuple[float, ...] = ()
    """[ranks] Megapixels that decoding clips goes through, as planned; in a step without clips, those of images."""
    is_decode_planned: bool = True
    """There are clips."""
    labels: int | None = None
    dropped: tuple[tuple[str, Document], ...] = ()
    by_micro: tuple[tuple[tuple[float, ...], ...], ...] = ()
    """[micro-batches] These three for each micro-batch, where ranks wait at each of them."""
    bad: tuple[BadSample, ...] | None
    """What was bad when it was built; None: it was not built."""
    run_begins: int | None = None
    """Where the state of a run stands, if this is not a step behind it but one of a plan from the start."""

    @property
    def fill(self) -> float:
        """Return the share of slots that hold tokens."""
        rows = [row for micro in self.micro_batches for row in micro]
        return sum(row.tokens for row in rows) / max(sum(row.slots for row in rows), 1)


class StepReader:
    """Reads what ranks get at steps of one walk."""

    def __init__(self, catalog: Catalog, walk: Walk, processor: Any) -> None:
        """Take a walk; without a processor nothing can be built."""
        self._catalog, self._walk, self._processor = catalog, walk, processor

    def read(self, step: Step, rank: int, *, is_built: bool) -> StepView:
        """Return what one rank gets."""
        grid, table = step.numbers(), step.table  # [micro, rank, row]
        real = grid >= 0
        balance = self._walk.plan.planner.config.balance
        costs = [np.where(real, each[grid], 0).sum(axis=2) / balance.costs.scale for each in (table.llm, table.vit)]
        is_planned = bool(table.decode.any())
        costs.append(np.where(real, table.decode[grid], 0).sum(axis=2) / 1000 if is_planned else self._pixels(step))
        llm, vit, decode = (each.sum(axis=0).tolist() for each in costs)
        by_micro = zip(*(map(tuple, each.tolist()) for each in costs), strict=True)
        micros = [self.rows(step, rank, micro) for micro in range(grid.shape[0])]
        bad: list[BadSample] | None = None
        if is_built:
            bad = []
            for micro in range(step.micro_begin, grid.shape[0]):
                micros[micro] = self._built(step, rank, micro, micros[micro], bad)
        return StepView(
            number=step.index,
            rank=rank,
            epoch=step.epoch,
            total=self._walk.total,
            micro_batches=tuple(map(tuple, micros)),
            llm=tuple(llm),
            vit=tuple(vit),
            by_micro=tuple(by_micro) if balance.barrier == "micro" and len(grid) > 1 else (),
            decode=tuple(decode),
            is_decode_planned=is_planned,
            labels=step.total_labels,
            dropped=tuple(self._dropped(step)),
            bad=None if bad is None else tuple(bad),
        )

    def _documents(self, refs: Sequence[Ref], tokens: Sequence[int], vision: Sequence[int]) -> list[Document]:
        drawn = self._catalog.draw(refs)
        return [
            Document(
                ref=ref,
                name=self._catalog.name_of(ref, each),
                id=each.id,
                tokens=length,
                vision=seen,
                decode=_megapixels(each.sizes),
            )
            for ref, each, length, seen in zip(refs, drawn, tokens, vision, strict=True)
        ]

    def rows(self, step: Step, rank: int, micro: int) -> list[Row]:
        """Return the rows of a micro-batch, as planned."""
        table = step.table
        mode, costs = self._walk.plan.planner.config.mode, self._walk.plan.planner.config.balance.costs
        rows: list[list[Document]] = []
        for number, refs in zip(step.numbers()[micro, rank].tolist(), step.refs(rank, micro), strict=True):
            if number < 0:
                rows.append([])
                continue
            window, unit = table.windows[int(table.window[number])], int(table.unit[number])
            at = slice(window.splits[unit], window.splits[unit + 1])
            samples = window.samples
            lengths, vit = samples.tokens[at].tolist(), (samples.vit[at] / costs.scale).tolist()
            documents = self._documents(refs, lengths, samples.vision[at].tolist())
            decode = [each.decode for each in documents]
            if table.decode.any():
                decode = (samples.decode[at] / 1000).tolist()
            documents = [
                replace(each, llm=costs.llm_linear * length + costs.llm_square * length**2, vit=seen, decode=cost)
                for each, length, seen, cost in zip(documents, lengths, vit, decode, strict=True)
            ]
            rows += [documents] if isinstance(mode, PackConfig) else [[each] for each in documents]
        longest = max((sum(each.tokens for each in row) for row in rows), default=0)
        slots = mode.pack_size if isinstance(mode, PackConfig) else longest
        chunks = self._walk.plan.build.options.pp_microbatches
        bounds = microbatch_bounds(len(rows), chunks) if chunks else []
        owner = {place: number for number, (begin, end) in enumerate(bounds) for place in range(begin, end)}
        return [
            Row(documents=tuple(row), slots=max(slots, 1), pipeline=owner.get(place)) for place, row in enumerate(rows)
        ]

    def _pixels(self, step: Step) -> npt.NDArray[np.float64]:
        """Return [micro, rank] the megapixels of images and of all frames of clips."""
        grid = step.numbers()
        places = [(micro, rank) for micro in range(grid.shape[0]) for rank in range(grid.shape[1])]
        refs = [[ref for row in step.refs(rank, micro) for ref in row] for micro, rank in places]
        drawn = iter(self._catalog.draw([ref for own in refs for ref in own]))
        found = np.zeros(grid.shape[:2])
        for place, own in zip(places, refs, strict=True):
            found[place] = sum(_megapixels(next(drawn).sizes) for _ in own)
        return found

    def _dropped(self, step: Step) -> Iterator[tuple[str, Document]]:
        refs = [note.ref for note in step.dropped]
        sizes = [[note.tokens for note in step.dropped], [note.vision_tokens for note in step.dropped]]
        for note, document in zip(step.dropped, self._documents(refs, *sizes), strict=True):
            yield note.reason, document

    def _built(self, step: Step, rank: int, micro: int, rows: list[Row], bad: list[BadSample]) -> list[Row]:
        """Return the rows with what stands in them, and note what is bad."""
        if self._processor is None:
            raise ConfigError("a batch cannot be built without a processor; name it with --processor or in the recipe")
        plan = self._walk.plan
        config = replace(plan.build, processor=self._processor, options=replace(plan.build.options, with_refs=True))
        with Builder(config) as builder:
            delivery = builder.build(plan.blueprint(step, rank, micro))
        bad += [line for line in delivery.bad if line.stage != "fit" or line.reason == "pack_overflow"]
        holes = {(line.source, line.shard, line.sample): f"{line.stage}: {line.reason}" for line in delivery.bad}
        ids, labels = delivery.batch.get("input_ids"), delivery.batch.get("labels")
        found = []
        for place, row in enumerate(rows):
            documents = tuple(replace(each, hole=holes.get(each.name, "")) for each in row.documents)
            runs: tuple[tuple[str, int], ...] = ()
            if ids is not None and labels is not None and ids.ndim == 2 and place < len(ids):
                length = sum(each.tokens for each in documents if not each.hole)
                own = labels_at(labels[place].tolist(), plan.build.options)
                runs = tuple(kinds_of(self._processor, ids[place].tolist()[:length], own[:length]))
            found.append(replace(row, documents=documents, runs=runs))
        return found


def _megapixels(sizes: MediaSizes) -> float:
    frames = sum(video.frames * video.height * video.width for video in sizes.videos)
    return (frames + sum(image.height * image.width for image in sizes.images)) / 1e6


def labels_at(labels: Sequence[int], options: StreamOptions) -> list[int]:
    """Return the labels of a row at the tokens that they name: some batches have them a place earlier."""
    return list(labels) if options.hf_labels else [IGNORE, *labels[:-1]]


def kinds_of(processor: Any, ids: Sequence[int], labels: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield the kinds and lengths of what stands in a row: `label`, `vision` or `text`."""
    media = media_token_ids(processor)
    kinds = [
        "label" if label != IGNORE else "vision" if token in media else "text"
        for token, label in zip(ids, labels, strict=True)
    ]
    begin = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[begin]:
            yield kinds[begin], place - begin
            begin = place
