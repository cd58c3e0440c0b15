"""What the node cache knows of the future: when each job of the node will read which shard next.

    <cache_dir>/vlm-stream-cache-1/<job>.plan    shards and their uses; its writer holds an exclusive flock

A loader writes what its plan says (`Forecast`) and moves along in it; the cache, in any process of the node, reads all
of them (`Foresight`) and evicts what is needed last. The lock ends with its process; a table without one is removed.
Draws are made seconds by the rate of each job, so that of a shard which several need the earliest use counts. What a
table says changes only which bytes come from the cache, never which are delivered.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vlm_stream.storage.spans import ShardKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Floats: TypeAlias = npt.NDArray[np.float64]

_HEADER: Final = struct.Struct("<16sddQQ")
"""Magic, where the job stands, draws a second, bytes of JSON, uses."""
_MAGIC: Final = b"vlm-stream-plan1"
_USE: Final = np.dtype([("shard", "<i8"), ("begin", "<f8"), ("end", "<f8")])
_MOST_BYTES: Final = 1 << 28
_SLOWEST: Final = 1e-3
"""Draws a second of a job of which no more is known: what comes sooner is needed sooner."""


class Uses(NamedTuple):
    """n uses of shards."""

    shards: npt.NDArray[np.int64]
    """[n] Numbers of shards."""
    begins: Floats
    """[n] Draws since the table was made, before which the use has not begun."""
    ends: Floats


class Forecast:
    """One job's table."""

    def __init__(self, folder: Path, shards: Sequence[ShardKey], uses: Uses, rate: float = 0.0) -> None:
        """Write it; `rate` is draws a second, 0 where it is not known yet."""
        table = np.zeros(len(uses.shards), dtype=_USE)
        table["shard"], table["begin"], table["end"] = uses
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{secrets.token_hex(8)}.plan"  # jobs in containers have the same process numbers
        text = json.dumps([list(shard) for shard in shards]).encode()
        self._sizes = len(text), len(table)
        unfinished = self._path.with_suffix(".new")
        self._file = unfinished.open("wb", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(self._header(0.0, rate) + text + table.tobytes())
            unfinished.rename(self._path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            self._file.close()
            raise

    def move(self, draws: float, rate: float) -> None:
        """Note how many samples were drawn since the table was made, and how many are drawn a second."""
        with contextlib.suppress(OSError, ValueError):  # the disk is full; or the table was closed
            os.pwrite(self._file.fileno(), self._header(draws, rate), 0)

    def close(self) -> None:
        """Remove the table."""
        with contextlib.suppress(OSError):  # the folder may be gone
            self._path.unlink()
        self._file.close()

    def _header(self, draws: float, rate: float) -> bytes:
        return _HEADER.pack(_MAGIC, draws, rate, *self._sizes)


class _Table(NamedTuple):
    """A job's table as it was read."""

    identity: tuple[int, int]
    shards: list[ShardKey]
    names: dict[str, int]
    """Number of each shard by its name in the cache."""
    uses: npt.NDArray[Any]

    def seconds(self, header: tuple[Any, ...]) -> Floats:
        """Return [shards] seconds until each is used; 0: it is in use; infinite: not any more."""
        _, draw, rate, _, _ = header
        found = np.full(len(self.shards), np.inf)
        coming = self.uses[self.uses["end"] > draw]
        np.minimum.at(found, coming["shard"], np.maximum(coming["begin"] - draw, 0.0) / max(rate, _SLOWEST))
        return found


class Foresight:
    """All tables of a node."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self._folder = folder
        self._tables: dict[Path, _Table] = {}

    def due(self) -> Due:
        """Return what is known now."""
        found: dict[Path, tuple[_Table, Floats]] = {}
        for path in sorted(self._folder.glob("*.plan")):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, struct.error):
                with path.open("rb") as file:
                    if _is_dead(file):
                        path.unlink(missing_ok=True)
                        continue
                    table, header = self._read(path, file)
                found[path] = table, table.seconds(header)
        self._tables = {path: table for path, (table, _) in found.items()}
        return Due(list(found.values()))

    def _read(self, path: Path, file: Any) -> tuple[_Table, tuple[Any, ...]]:
        status = os.fstat(file.fileno())
        header = _HEADER.unpack(file.read(_HEADER.size))
        magic, _, _, num_text, num_uses = header
        if magic != _MAGIC or status.st_size > _MOST_BYTES:
            raise ValueError
        if status.st_size != _HEADER.size + num_text + num_uses * _USE.itemsize:
            raise ValueError
        known, identity = self._tables.get(path), (status.st_ino, status.st_size)
        if known is None or known.identity != identity:
            shards = [ShardKey(*each) for each in json.loads(file.read(num_text))]
            uses = np.frombuffer(file.read(num_uses * _USE.itemsize), _USE)
            if len(uses) and not 0 <= int(uses["shard"].min()) <= int(uses["shard"].max()) < len(shards):
                raise ValueError
            names = {shard.digest.hex(): number for number, shard in enumerate(shards)}
            known = _Table(identity, shards, names, uses)
        return known, header


@dataclass(frozen=True, slots=True)
class Due:
    """When shards are needed, as it is known at one moment."""

    tables: list[tuple[_Table, Floats]]

    def seconds(self, name: str) -> float | None:
        """Return in how many seconds a shard is needed, by its name in the cache; None: no job speaks of it."""
        found = [seconds[table.names[name]] for table, seconds in self.tables if name in table.names]
        return float(min(found)) if found else None

    def coming(self, within_s: float) -> Iterator[ShardKey]:
        """Yield shards that will be needed soon, the next ones first."""
        soon: dict[ShardKey, float] = {}
        for table, seconds in self.tables:
            for number in np.flatnonzero(seconds <= within_s).tolist():
                shard = table.shards[number]
                soon[shard] = min(float(seconds[number]), soon.get(shard, np.inf))
        yield from sorted(soon, key=soon.__getitem__)


def _is_dead(file: Any) -> bool:
    """Tell whether the process that wrote a file is gone."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
