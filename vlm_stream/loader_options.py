"""Options of a loader beside those of its stream: who builds batches, and where they are delivered.

Like `options.py`, this is read by Python keywords, YAML recipes and the command line alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, Literal

from vlm_stream.errors import ConfigError
from vlm_stream.options import RUN_ARGUMENTS, StreamOptions
from vlm_stream.schema import check_fields, option
from vlm_stream.world import World, cores_of

_CONFINED_BYTES: Final = 16 << 30
_MOST_THREADS: Final = 8
"""Of one clip: each has a decoder, with its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayBuilders:
    """Builders on a Ray cluster: how many, where, and what they may take. See docs/service.md."""

    address: str | None = option(
        None, "Of the cluster: auto, or host:port; None: RAY_ADDRESS, one that runs on this machine, or a new one."
    )
    count: int = option(2, "Builders of this rank.", least=0)
    max_count: int | None = option(
        None,
        "Most builders: more are started while the trainer waits, idle ones let go; None: always `count`.",
        least=1,
    )
    min_count: int | None = option(None, "Fewest builders, where max_count is given; None: `count`.", least=0)
    num_cpus: float = option(1.0, "CPUs of each.", least=0)
    resources: dict[str, float] | None = option(None, "Other resources of each, by the names that the cluster uses.")
    local: int = option(
        1, "Processes here that build while the trainer waits, and alone if no builder is left.", least=0
    )
    pool: str | None = option(None, "Name of a pool that was started by 'vlm-stream builders up'; `count` is its own.")
    share: float = option(1.0, "In a pool that others use too: this run's share, against theirs.", least=0.001)
    runtime_env: dict[str, Any] | None = option(
        None, "Ray's: packages and variables that builders need; no secrets, for Ray shows it."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        least, most = self.limits or (self.count, self.count)
        if not least <= self.count <= most:
            raise ConfigError(
                f"builders.count is {self.count}, which is not between min_count ({least}) and max_count ({most}); "
                f"correct one of them"
            )
        if self.min_count is not None and self.max_count is None:
            raise ConfigError(
                f"builders.min_count is {self.min_count} and there is no max_count, so the number of builders would "
                f"not change; give max_count as well"
            )
        if self.pool is None and not (self.count or self.local or self.max_count):
            raise ConfigError("builders has count 0 and local 0, so nobody would build; give one of them")

    @property
    def limits(self) -> tuple[int, int] | None:
        """Return the fewest and the most builders, None where their number stays."""
        if self.max_count is None or self.pool is not None:
            return None
        return self.count if self.min_count is None else self.min_count, self.max_count


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """Who builds batches and where they are delivered; nothing of it changes them, or their order."""

    num_workers: int = option(0, "Processes that read and encode; 0: this one does.", least=0)
    worker_timeout: float | None = option(
        None,
        "Seconds after which a worker that finishes nothing is replaced; None: when another one has finished its "
        "batch, or after minutes if nobody else can help.",
        least=0.001,
    )
    max_restarts: int = option(
        10,
        "Workers that may be replaced before the run ends; those lost to a sample that is left out do not count.",
        least=0,
    )
    worker_memory: int | None = option(
        None,
        "A worker larger than this, in bytes, is replaced between batches; None: one that has grown far beyond its "
        "first batches.",
        least=1,
        in_bytes=True,
    )
    decode_threads: int | None = option(
        None,
        "Threads of a worker that decode one clip, where it is read by frames; None: the cores by the "
        "workers of this machine, at most 8.",
        least=1,
    )
    confine: bool = option(
        False,
        "Workers can make no connection and start no program, and may take no more memory beyond what they begin with "
        "than worker_memory says (16 GiB where it does not); for local data, on Linux (x86-64).",
    )
    start_method: Literal["fork", "forkserver", "spawn"] | None = option(
        None, "How workers start; None: by forkserver."
    )
    builders: Literal["ray"] | RayBuilders | None = option(
        None, "Builders on other machines: ray, or the fields of RayBuilders; None: num_workers processes of this one."
    )
    peers: int | None = option(
        None,
        "Processes with the same data-parallel rank, which build each batch once for all of them; None: as many as "
        "device_mesh says, else 1.",
        least=1,
    )
    device: Any = option(None, "Where batches are delivered, with finished pixels; None: they stay on the CPU.")
    """Workers then send compact pixels if the processor's family has a path for them. On CUDA the next batch is copied
    while the trainer works on this one."""
    dtype: Any = option(None, "Type of pixels that are delivered to a device, or its name; None: bfloat16.")
    ledger_path: str | os.PathLike[str] | None = option(
        None, "File to which a line of JSON is appended for each bad sample; several ranks have one each."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype is not None and self.device is None:
            raise ConfigError(
                f"dtype={self.dtype} is that of pixels on a device, but no device is given, so nothing would be "
                f"converted; give device= as well, or call finish_pixels(batch, dtype=...) yourself"
            )
        if self.ledger_path is not None and "://" in os.fspath(self.ledger_path):
            raise ConfigError(
                f"ledger_path is {os.fspath(self.ledger_path)}, and a ledger is appended to, which no object store can "
                f"do; give a path on a disk"
            )
        if self.builders is not None and self.num_workers:
            raise ConfigError(
                f"num_workers is {self.num_workers} and builders are given, so it is not known who shall build; leave "
                f"num_workers out, and give builders.local for processes of this machine that take over"
            )

        if self.confine and (not self.num_workers or self.start_method == "fork"):
            raise ConfigError(
                "confine takes rights away from worker processes, and there are none (num_workers=0), they are Ray's, "
                "or they inherit what the trainer has open (start_method='fork'); set num_workers, and leave builders "
                "and start_method out"
            )

    @property
    def confined_bytes(self) -> int | None:
        """Return what a worker may take beyond the memory that it begins with, None where it is not confined."""
        return (self.worker_memory or _CONFINED_BYTES) if self.confine else None

    @property
    def ray(self) -> RayBuilders | None:
        """Return the builders on Ray, None where there are none."""
        return RayBuilders() if self.builders == "ray" else self.builders

    def threads_of(self, world: World) -> int:
        """Return the threads by which a builder decodes a clip: of cores that nobody else has."""
        if self.decode_threads is not None:
            return self.decode_threads
        if self.ray is not None:
            return max(min(int(self.ray.num_cpus), _MOST_THREADS), 1)
        # A trainer takes a core as well, which it builds with where there is no worker.
        return max(min(cores_of(world) // (self.num_workers + 1), _MOST_THREADS), 1)

    @property
    def num_builders(self) -> int:
        """Return how many builders to begin with, beside those of a named pool and in reserve."""
        ray = self.ray
        return self.num_workers if ray is None else 0 if ray.pool is not None else ray.count

    def with_builders(self, number: int) -> LoaderOptions:
        ray = self.ray
        if ray is None:
            return replace(self, num_workers=number)
        if ray.pool is not None:
            raise ConfigError(
                f"the builders are those of the pool '{ray.pool}', which other runs may use, so this one cannot change "
                f"their number; use: vlm-stream builders up --name {ray.pool} --count {number}"
            )
        return replace(self, builders=replace(ray, count=number, min_count=None, max_count=None))

    @property
    def pixel_dtype(self) -> Any:
        """Return `dtype` as torch's own value, None where it is left to the default."""
        if not isinstance(self.dtype, str):
            return self.dtype
        import torch

        found = getattr(torch, self.dtype.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"dtype={self.dtype!r} is no type of torch; write float32, bfloat16 or float16")
        return found


def parse_keywords(options: StreamOptions | None, keywords: Mapping[str, Any]) -> tuple[StreamOptions, LoaderOptions]:
    """Return what the keywords of `StreamLoader` say; `options` stands for all fields of `StreamOptions`."""
    own = {each.name for each in fields(LoaderOptions)}
    loader = LoaderOptions(**{name: value for name, value in keywords.items() if name in own})
    stream = {name: value for name, value in keywords.items() if name not in own}
    if loader.device is not None and options is None:
        stream = {"pixels": "compact"} | stream
    return StreamOptions.of(options, stream, others=[*RUN_ARGUMENTS, *own]), loader
