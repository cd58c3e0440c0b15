"""The values that enter and leave the plan.

Enters: `SourceSpec` (shard sizes of a manifest) and `SampleColumns` (costs of samples, read on demand by a
`ColumnReader`). Leaves: `Ref`, and `Dropped` for what is left out. Nothing here knows files or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from vlm_stream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    import numpy.typing as npt

__all__ = ["ColumnReader", "Dropped", "Ref", "SampleColumns", "SourceSpec"]


class Ref(NamedTuple):
    """How a plan names a sample."""

    source: int
    shard: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleColumns:
    """What the plan must know of n samples, of one shard or of several one after the other."""

    tokens: npt.NDArray[np.int64]
    """[n] Length in tokens, media included."""
    vision_tokens: npt.NDArray[np.int64]
    """[n] How many of the tokens stand for images and videos."""
    vision_patches: npt.NDArray[np.int64]
    """[n] Patches that enter the vision tower."""
    vision_squares: npt.NDArray[np.float64]
    """[n] Sum over images of patches squared."""
    labels: npt.NDArray[np.int64]
    """[n] Tokens that are learned; -1: unknown."""


ColumnReader: TypeAlias = "Callable[[int, Sequence[int]], SampleColumns]"
"""`read(source, shards)` returns the columns of these shards, one after the other; called only for shards in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """One source of a mixture, as its manifest describes it."""

    name: str
    samples_per_shard: tuple[int, ...]
    digest: str
    """Changes when any shard or index of the source changes."""
    weight: float = 1.0
    sample_ratio: float = 1.0
    """Share of the source that one of its epochs delivers. Below 1, each epoch chooses which samples it leaves out;
    above 1, some or all samples come more than once."""
    tokens_per_sample: float = 1.0
    """Mean length: what turns a weight in tokens into a weight in samples."""
    num_samples: int = field(init=False)

    def __post_init__(self) -> None:
        """Add the shards up; refuse numbers that no order can have."""
        if not (0 <= self.sample_ratio < float("inf") and 0 < self.tokens_per_sample < float("inf")):
            raise ConfigError(
                f"Source '{self.name}' has sample_ratio={self.sample_ratio} and "
                f"tokens_per_sample={self.tokens_per_sample}. Give a finite ratio of 0 or more, and a mean above 0."
            )
        object.__setattr__(self, "num_samples", sum(self.samples_per_shard))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A sample that the plan left out or shortened, and why."""

    ref: Ref
    reason: str
    """`too_long`, `too_much_vision` or `truncated`: the last one is delivered, cut to the limit."""
    tokens: int
    vision_tokens: int
