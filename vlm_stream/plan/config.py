"""The whole config of a plan: everything but the data and the world."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.plan.balance import BalanceConfig
from vlm_stream.plan.group import GroupConfig, PlainConfig
from vlm_stream.plan.mixture import MixtureConfig
from vlm_stream.plan.order import OrderConfig
from vlm_stream.plan.pack import PackConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PlanConfig"]

_MODES = {PackConfig: "pack", GroupConfig: "group", PlainConfig: "plain"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """What decides the unit stream and its deal to ranks."""

    seed: int = 0
    window: int = 4096
    """Samples that are drawn together and cut into units together."""
    shuffle: bool = True
    """Permute shards, samples and units; without it they come as they lie in the tars, units by their first sample."""
    epochs: int | None = 1
    """Epochs after which the stream ends; None streams on. Epochs follow each other without a seam: a window may hold
    the end of one and the beginning of the next, and only the very last step is filled up."""
    flush_epochs: bool = False
    """Close every epoch by itself: its last window carries nothing on and its last step is filled up."""
    mode: PackConfig | GroupConfig | PlainConfig = field(default_factory=PlainConfig)
    order: OrderConfig = field(default_factory=OrderConfig)
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    geometry: str = ""
    """Fingerprint of whatever turned media into tokens; a state with another one is refused."""
    text: str = ""
    """Fingerprint of tokenizer and chat template; a state with another one is refused. Empty: not known."""

    def __post_init__(self) -> None:
        """Refuse windows and epochs that hold nothing."""
        if self.window < 1:
            raise ConfigError(f"window={self.window} draws nothing. Give 1 or more; 4096 packs well.")
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs={self.epochs} delivers nothing. Give 1 or more, or None to stream on.")

    @property
    def rows(self) -> str:
        """Return how units may share a micro-batch: `free`, `sorted` or in the order of the `stream`."""
        if isinstance(self.mode, PlainConfig):
            return "stream"
        return "sorted" if isinstance(self.mode, GroupConfig) and self.mode.token_budget is None else "free"

    def with_settings(self, settings: Mapping[str, Any]) -> PlanConfig:
        """Return this config with some settings changed, named like `window` or `mode.pack_size`: for sweeps."""
        config = self
        for name, value in settings.items():
            room, _, leaf = name.rpartition(".")
            owner = getattr(config, room, None) if room else config
            allowed = [f.name for f in fields(owner)] if is_dataclass(owner) else []
            if leaf not in allowed or is_dataclass(getattr(owner, leaf)):
                rooms = ("mode", "order", "mixture", "balance")
                known = [f.name for f in fields(config) if f.name not in rooms]
                known += [f"{r}.{f.name}" for r in rooms for f in fields(getattr(config, r)) if f.name != "costs"]
                raise ConfigError(f"The plan has no setting '{name}': {nearest_name(name, known)}")
            changed = replace(owner, **{leaf: value})  # type: ignore[type-var]
            config = replace(config, **{room: changed}) if room else changed  # type: ignore[assignment, arg-type]
        return config

    def stream_fields(self) -> dict[str, Any]:
        """Return what the unit stream depends on, besides the data, the mixture and the geometry, as flat JSON."""
        fields: dict[str, Any] = {
            "seed": self.seed,
            "window": self.window,
            "shuffle": self.shuffle,
            "flush_epochs": self.flush_epochs,
            "mode": _MODES[type(self.mode)],
        }
        for room in ("mode", "order"):
            fields.update({f"{room}.{name}": value for name, value in asdict(getattr(self, room)).items()})
        return fields
