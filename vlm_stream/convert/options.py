"""What a conversion can be told. Frozen values; nothing is opened here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vlm_stream.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from vlm_stream.storage import StoreOptions

__all__ = ["ENGINES", "ShardOptions"]

ENGINES: Final = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """How records become shards. Only the first group of fields changes bytes."""

    processor: str | None = None
    """Name or path of a transformers processor: text tokens are then exact. None: a third of the characters."""
    trust_remote_code: bool = False
    """Let the processor bring code of its own from the hub."""
    samples_per_shard: int = 1000
    """Most records in one shard."""
    max_shard_bytes: int | None = None
    """Most bytes in one tar; a larger single sample gets a shard of its own. Costs a pass over all records."""
    shuffle: int | None = None
    """Seed of a permutation of the whole input; None keeps its order."""
    on_mismatch: str = "drop"
    """What happens to a record that does not map whole: `drop`, `keep` or `raise`."""
    names: tuple[str, ...] | None = None
    """Which entries of a meta file; all if None."""
    columns: dict[str, str] = field(default_factory=dict)
    """For a bare data file: names of its columns."""
    tags: dict[str, str] = field(default_factory=dict)
    """For a bare data file: names of its role keys and roles."""
    media_dir: str | None = None
    """For a bare data file: what relative media paths are joined to."""
    media_first: bool = False
    """For a bare data file: media that no placeholder shows go before the first user text; else such records are bad,
    unless the form of the file has this rule."""
    confine_media: bool = False
    """Refuse media outside of their source's media_dir."""

    workers: int = 1
    engine: str = "local"
    """`local`: processes of this machine. `ray`: a Ray cluster."""
    ray_address: str | None = None
    """Address of a running cluster; None starts one on this machine."""
    resume: bool = False
    """Continue what an earlier run left unfinished."""
    overwrite: bool = False
    """Remove the dataset at the target first."""
    bad_budget: float | None = None
    """Share of bad records above which the conversion fails; None: any number of them."""
    store: StoreOptions | None = None
    """How to reach object stores."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("samples_per_shard", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.max_shard_bytes is not None and self.max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes is {self.max_shard_bytes}, but must be at least 1; None is no limit.")
        if self.engine not in ENGINES:
            raise ConfigError(f"'{self.engine}' is no engine; {nearest_name(self.engine, ENGINES)}")
        if self.resume and self.overwrite:
            raise ConfigError("resume keeps what is there and overwrite removes it: choose one of them.")
        if self.bad_budget is not None and not 0 <= self.bad_budget <= 1:
            raise ConfigError(f"bad_budget is {self.bad_budget}, but is a share of the records: between 0 and 1.")
        if self.shuffle is not None and not 0 <= self.shuffle < 2**64:
            raise ConfigError(f"shuffle is {self.shuffle}, but a seed lies between 0 and 2**64 - 1.")
