"""The settings of a stream, checked once, and what they mean for the rooms below."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.plan import GroupConfig, PackConfig, PlainConfig, PlanConfig, StepShape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vlm_stream.storage import StoreOptions

__all__ = ["Mode", "StreamOptions"]

Mode = Literal["packed", "grouped", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How samples become batches."""

    mode: Mode = "packed"
    """`packed`: samples share a row of `pack_size` tokens; `grouped`: rows of similar length; `plain`: in order."""
    pack_size: int | None = None
    """Tokens in a packed row."""
    packing_ratio: float = 1.0
    """Share of `pack_size` that the plan fills: head-room where token counts are estimates."""
    max_length: int | None = None
    """Longest sample; a longer one is bad. Packed rows have `pack_size` as their limit in any case."""
    batch_size: int = 1
    """Rows in a batch: packs, or samples."""
    micro_batches: int = 1
    """Batches that a rank consumes in one optimizer step."""
    window: int = 4096
    """Samples that are packed or grouped at a time."""
    seed: int = 0
    epochs: int | None = 1
    """None streams for ever."""
    shuffle: bool = True
    bad_budget: float | None = 0.01
    """Share of bad samples above which the run stops; None never stops it."""
    with_refs: bool = False
    """Add `batch["refs"]`: source, shard and key of each sample in each row."""
    fake_image: bool = False
    """Give text-only rows an invisible image, so that every rank runs its vision tower."""
    prefetch_bytes: int = 64 << 20
    """Bytes that each worker reads ahead."""
    store: StoreOptions | None = None
    """Endpoint, region and the like, for stores that need them."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode is {self.mode!r}; {nearest_name(str(self.mode), get_args(Mode))}")
        if self.mode == "packed" and self.pack_size is None:
            raise ConfigError(
                "mode='packed' without pack_size: the capacity of a row is not known; set pack_size to the sequence "
                "length that you train with, or choose mode='grouped' or 'plain'"
            )
        for name in ("pack_size", "max_length", "batch_size", "micro_batches", "window", "epochs", "prefetch_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}, but it counts something: give a whole number of at least 1")
        if not 0 < self.packing_ratio <= 1:
            raise ConfigError(f"packing_ratio is {self.packing_ratio}, but a row can be filled by more than 0 up to 1")
        if self.bad_budget is not None and not 0 <= self.bad_budget <= 1:
            raise ConfigError(f"bad_budget is {self.bad_budget}, but it is a share of all samples: 0 to 1, or None")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> StreamOptions:
        """Return the options that a caller spelled as keywords; an unknown one names the nearest known."""
        allowed = [field.name for field in fields(cls)]
        for name in options:
            if name not in allowed:
                raise ConfigError(f"there is no option '{name}'; {nearest_name(name, allowed)}")
        return cls(**options)

    def plan(self, geometry: str) -> PlanConfig:
        """Return what the plan must know; `geometry` identifies how media were counted."""
        mode: PackConfig | GroupConfig | PlainConfig
        if self.mode == "packed":
            mode = PackConfig(pack_size=self.pack_size or 0, packing_ratio=self.packing_ratio)
        elif self.mode == "grouped":
            mode = GroupConfig(max_tokens=self.max_length)
        else:
            mode = PlainConfig(max_tokens=self.max_length)
        return PlanConfig(
            seed=self.seed,
            window=self.window,
            shuffle=self.shuffle,
            epochs=self.epochs,
            mode=mode,
            geometry=geometry,
        )

    def shape(self, world_size: int) -> StepShape:
        """Return how steps are cut for that many ranks."""
        return StepShape(world_size=world_size, micro_batches=self.micro_batches, batch_size=self.batch_size)
