"""What a conversion can be told. Frozen values; nothing is opened here."""

import math
from dataclasses import dataclass, field
from typing import Any, Final

from vlm_stream.convert.media_bytes import MediaRules
from vlm_stream.convert.web import PUBLIC
from vlm_stream.errors import ConfigError, nearest_name
from vlm_stream.media import DEFAULT_LIMITS, MediaLimits
from vlm_stream.storage import StoreOptions

ENGINES: Final = ("local", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """How records become shards. Only the first group of fields changes bytes."""

    processor: Any = None
    """A transformers processor, or the name or path of one: text tokens are then exact. None: a third of the
    characters."""
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
    media_hosts: tuple[str, ...] = (PUBLIC,)
    """Hosts that records may name in web addresses, also as patterns (`*.example.com`); `public`: any that has public
    addresses alone. Others are refused, also after redirects."""
    media_limits: MediaLimits | None = None
    """The largest media that are taken."""
    exif_rotate: bool = False
    """Turn images as their EXIF orientation says: the index holds the turned sizes, and training turns them too."""

    workers: int | None = None
    """Processes, or Ray tasks at a time. None: as many as pay for their start."""
    engine: str = "local"
    """`local`: processes of this machine. `ray`: a Ray cluster."""
    ray_address: str | None = None
    """Address of a running cluster; None starts one on this machine."""
    resume: bool = True
    """Go on with what the same conversion left here: unfinished, or finished. False: refuse it."""
    overwrite: bool = False
    """Remove the dataset at the target first."""
    bad_budget: float | None = 0.03
    """Share of bad records above which the conversion fails; None or 1: never."""
    store: StoreOptions | None = None
    """How to reach object stores."""
    flags: bool = False
    """Whether messages name options as the command line does."""

    def __post_init__(self) -> None:
        if isinstance(self.media_hosts, str):
            object.__setattr__(self, "media_hosts", (self.media_hosts,))
        if self.shuffle is False:  # a seed of 0 to Python, and none to whoever writes it
            object.__setattr__(self, "shuffle", None)
        for name, least in (("samples_per_shard", 1), ("workers", 1), ("max_shard_bytes", 1), ("shuffle", 0)):
            value = getattr(self, name)
            if value is None and name != "samples_per_shard":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{self.say(name)} is {value!r}, but must be a whole number of at least {least}.")
        if self.engine not in ENGINES:
            raise ConfigError(f"'{self.engine}' is no engine; {nearest_name(self.engine, ENGINES)}")
        budget = self.bad_budget
        if budget is not None and not (isinstance(budget, (int, float)) and 0 <= budget <= 1):
            raise ConfigError(f"{self.say('bad_budget')} is {budget}, but is a share of the records: between 0 and 1.")
        if self.shuffle is not None and self.shuffle >= 2**64:
            raise ConfigError(f"{self.say('shuffle')} is {self.shuffle}, but a seed lies between 0 and 2**64 - 1.")

    @property
    def media_rules(self) -> MediaRules:
        return MediaRules(
            confine=self.confine_media, hosts=self.media_hosts, limits=self.media_limits or DEFAULT_LIMITS
        )

    def say(self, name: str, value: Any = None) -> str:
        """Return an option, with a value if there is one, as the caller writes it.

        >>> ShardOptions().say("bad_budget", 0.1), ShardOptions(flags=True).say("overwrite", True)
        ('bad_budget=0.1', '--overwrite')
        """
        if not self.flags:
            return name if value is None else f"{name}={value!r}"
        flag = f"--{name.replace('_', '-')}"
        return flag if value is None or value is True else f"{flag} {value}"

    def most_bad(self, num_records: int) -> float:
        return math.inf if self.bad_budget is None else self.bad_budget * num_records
