"""Shards on disk: what the manifest promises must survive a power cut, and the waiting for it costs no time.

Enters: finished shards as they come, in a local folder. Leaves: the same shards, and the end only when all of them are
on disk. Writers do not wait for the disk themselves: while a shard is flushed here, the next one is written.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_stream.convert.layout import part_name, shard_name
from vlm_stream.errors import StorageError
from vlm_stream.format import index_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vlm_stream.convert.shard_task import ShardPart

__all__ = ["flush_behind"]


def flush_behind(folder: str, parts: Iterable[ShardPart], *, kept: Iterable[int] = ()) -> Iterator[ShardPart]:
    """Pass finished shards on, and flush each of them behind the back of the writers.

    Args:
        folder: Where the shards are.
        parts: Shards that are being finished.
        kept: Numbers of shards that an earlier run has finished, but perhaps not flushed.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="flush")
    try:
        waiting = [pool.submit(_flush, folder, number) for number in kept]
        for part in parts:
            waiting.append(pool.submit(_flush, folder, part.number))
            yield part
        for flushed in waiting:
            flushed.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _flush(folder: str, number: int) -> None:
    tar = shard_name(number)
    try:
        for name in (tar, index_name(tar)):
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        # The system says so once and may forget the bytes: the shard must not count as finished.
        Path(folder, part_name(number)).unlink(missing_ok=True)
        raise StorageError(
            f"{tar} could not be brought to disk ({error.strerror or error}), so it will be written again. "
            f"Check the disk and its free space, and go on with --resume."
        ) from error
