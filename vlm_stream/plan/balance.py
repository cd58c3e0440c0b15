"""Config of the deal: placeholder for the thin slice."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.plan.costs import CostConfig

__all__ = ["BalanceConfig"]

_BARRIERS = ("micro", "none", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """How units are dealt to ranks. It never changes the unit stream, only who gets what within a step."""

    barrier: str = "step"
    """Where ranks wait for each other: once a `step` (DDP with accumulation), at every `micro`-step (FSDP), or `none`:
    deal in the order of the stream."""
    horizon: int = 1
    """Steps that are dealt together: more of them even out ranks that have one micro-batch a step, and make steps
    differ from each other."""
    small_ends: bool = False
    """Order the micro-batches of a step so that the cheapest stand at both ends, for pipeline schedules."""
    costs: CostConfig = field(default_factory=CostConfig)

    def __post_init__(self) -> None:
        """Refuse unknown barriers."""
        if self.barrier not in _BARRIERS:
            raise ConfigError(f"balance.barrier={self.barrier!r} means nothing: {nearest_name(self.barrier, _BARRIERS)}")
        if self.horizon < 1:
            raise ConfigError(f"balance.horizon={self.horizon} deals nothing. Give 1 or more steps.")
