"""What can be set about stores and about reading. Frozen values; nothing here opens anything.

Secrets have no field here on purpose: they come from the environment, the profile or the instance role, so neither a
config file nor a log line can hold one.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_stream.errors import ConfigError

KB = 1024
MB = 1024 * KB


def _check(owner: object, **least: float) -> None:
    """Raise when a number is below the least that means anything."""
    for name, low in least.items():
        value = getattr(owner, name)
        if not value >= low:
            raise ConfigError(f"{type(owner).__name__}.{name} is {value}, but must be at least {low:g}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryOptions:
    """When to try again, how long to wait, when to give up."""

    max_retries: int = 10
    """Further attempts after the first, per request. A store that throttles, or has answered before, is asked until the
    deadline."""
    backoff_s: float = 0.1
    """Wait before the first retry; about doubles with each further one, with jitter."""
    max_backoff_s: float = 10.0
    """The doubling stops here."""
    deadline_s: float = 300.0
    """A read that is not whole after this long fails, whatever retries are left."""

    def __post_init__(self) -> None:
        _check(self, max_retries=0, backoff_s=0, max_backoff_s=self.backoff_s, deadline_s=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How to reach a store. Credentials are found in the standard places, never given here."""

    endpoint: str | None = None
    """URL of an S3-compatible server (or of an emulator of GCS or Azure); the provider's own when None."""
    region: str | None = None
    """S3 region; from the environment or the profile when None."""
    anonymous: bool = False
    """Send unsigned requests: public buckets."""
    path_style: bool | None = None
    """`endpoint/bucket/key` (True) or `bucket.endpoint/key` (False); path style when None."""
    allow_http: bool = False
    """Accept endpoints without TLS."""
    ca_file: str | None = None
    """PEM file with further certificate authorities: servers under a private one."""
    profile: str | None = None
    """Profile of the shared AWS credentials file; `AWS_PROFILE`, then `default`, when None."""
    connect_timeout_s: float = 5.0
    """Give up connecting after this long, and try again."""
    read_timeout_s: float = 10.0
    """A body that brings no byte for this long is broken, and resumed."""
    tars: tuple[str, ...] = ()
    """Folders or buckets, as URLs, that a dataset's manifest may name as the place of its tars; by default only the
    host or bucket that the dataset lies on, and its own folder where that is local."""
    retry: RetryOptions = RetryOptions()

    def __post_init__(self) -> None:
        _check(self, connect_timeout_s=0.001, read_timeout_s=0.001)
        if self.endpoint is None:
            return
        if not self.endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"StoreOptions.endpoint is '{self.endpoint}'; it must begin with http:// or https://.")
        if "@" in self.endpoint:
            raise ConfigError(
                "StoreOptions.endpoint holds a user or password; credentials come from the environment, "
                "the profile or the instance role. Remove the part before '@'."
            )
        if self.endpoint.startswith("http://") and not self.allow_http:
            raise ConfigError(
                f"StoreOptions.endpoint is '{self.endpoint}', which is not encrypted. "
                f"Use https://, or set allow_http where the network is trusted."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to merge, how many requests at a time. What users may set of it is checked by `StreamOptions`."""

    max_inflight: int = 32
    """Requests to remote stores at a time."""
    max_gap_bytes: int = 256 * KB
    """Ranges of one remote shard this close are read by one request; the gap is thrown away."""
    max_amplification: float = 1.5
    """A merged request reads no more bytes than this per byte wanted: small samples far apart are read one by one."""
    max_request_bytes: int = 16 * MB
    """No request is larger; a larger sample is read in parts."""
    whole_shard_fraction: float = 0.9
    """When this much of a remote shard is wanted at once, all of it is read, in parts, whatever the gaps."""
    requests_per_s: float | None = None
    """Budget of this process. None: none."""
    bytes_per_s: float | None = None
    """Budget of this process. None: none."""
    cache_dir: str | None = None
    """Folder on a local disk for whole shards of remote stores, shared by all processes of a node. None: no cache."""
    cache_bytes: int | None = None
    """Most bytes that the cache may hold; needed with cache_dir. It should hold the shards of one shuffle group."""

    def __post_init__(self) -> None:
        if (self.cache_dir is None) != (self.cache_bytes is None):
            raise ConfigError("ReadOptions.cache_dir and cache_bytes belong together: set both or neither.")
