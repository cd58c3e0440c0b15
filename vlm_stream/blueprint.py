"""Blueprints: everything that a builder must know of one micro-batch, as plain values.

Enters: nothing; these are the values that `planning.py` makes and `build/` reads. A blueprint is small (some
kilobytes), may be pickled, and names its batch: building it twice, anywhere, gives the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from vlm_stream.clips import ClipCut
    from vlm_stream.ledger import BadSample
    from vlm_stream.storage import Span
    from vlm_stream.tokens import MediaSizes

SampleRef: TypeAlias = tuple[int, int, int]
"""Source, shard and row."""


class BatchName(NamedTuple):
    """What a batch is called. The same name is the same batch, whoever builds it."""

    plan: str
    """Digest of sources, plan, geometry and text."""
    step: int
    rank: int
    micro: int


class Piece(NamedTuple):
    """One sample of a batch."""

    ref: SampleRef
    key: str
    offset: int
    """First byte of the sample in its shard."""
    span: Span
    """The bytes to read: the whole sample, or its text alone."""
    sizes: MediaSizes
    members: tuple[str, ...]
    """Names of all its members, also of those that the span leaves out."""
    entry: str = ""
    """Of the meta file, or the file that it came from."""
    id: str | None = None
    """Its own; None: it has none."""
    parts: tuple[Span, ...] = ()
    """What is read in place of the span: the rest of the sample, samples whose members it shares, then the GOPs of
    `clips` in order; empty: the span."""
    clips: tuple[CutMember, ...] = ()
    """Clips of which only some frames are read."""
    text: tuple[Span, ...] = ()
    """Where the tokens of its text are kept beside the index, for this processor; empty: nowhere. It can be built
    without them."""

    @property
    def reads(self) -> tuple[Span, ...]:
        """Return what is read."""
        return self.parts or (self.span,)


class CutMember(NamedTuple):
    """A clip of which only some frames are read."""

    name: str
    """Of the member."""
    cut: ClipCut
    facts: tuple[int, int, int, float, float]
    """Frames, height, width, frames per second and seconds of the clip, or of the GOPs of which its parts are cut."""
    videos: tuple[int, ...]
    """Which of the sample's videos show it."""
    spans: tuple[tuple[float, float | None, int, int], ...] = ()
    """Parts of it that are shown: start and end in seconds, first frame, frames."""


class Work(NamedTuple):
    """What the cost of building depends on."""

    samples: int
    tokens: int
    num_bytes: int
    """Bytes to fetch."""
    image_pixels: int
    video_pixels: int
    """Pixels of the frames that are decoded: of those that a cut has, or of a whole file, of which decoders go through
    most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """One micro-batch before any of its bytes are read."""

    name: BatchName
    rows: tuple[tuple[Piece, ...], ...]
    """A row without pieces is a filler of the last step."""
    dropped: tuple[BadSample, ...]
    """Samples that the plan left out here."""
    work: Work
    labels: int | None
    """Tokens that the index says are learned; None: unknown."""
    step_labels: int | None
    """The same over the whole step, all ranks and micro-batches."""
    num_in_step: int
    """Micro-batches of the step, over all ranks."""


class Planned(NamedTuple):
    """A blueprint in the process that plans."""

    blueprint: Blueprint
    state: Callable[[], dict[str, Any] | None]
    """Writes the state of the plan after this batch; None: it has none."""
    positions: tuple[float, ...] = ()
    """About how many samples of each source were drawn before it, over all epochs."""
