"""MosaicML Streaming: MDS shards with an offset table, an order planned for the whole epoch, elastic resumption.

A sample's members are one pickled dict in one `bytes` column: columns are fixed for a dataset, and a column for each
medium a sample may have was measured to cost more, since the sizes of all of them are unpacked for every sample.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.loaders.base import Loader, Opening, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from benchmarks.peers.data import Record

__all__ = ["MosaicLoader"]


class MosaicLoader(Loader):
    """`streaming.MDSWriter`, `streaming.StreamingDataset` in `streaming.StreamingDataLoader`.

    Checksums (`hashes`, `validate_hash`) are left off as they are by default; they are looked at only when a shard is
    downloaded, never when it is read from a local folder.
    """

    name = "mosaic"
    package = "mosaicml-streaming"
    files = "*.mds"

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Write with `MDSWriter`, whose shards end at a size: that of so many mean samples."""
        _let_it_be_imported()
        from streaming import MDSWriter

        kept = list(records)
        total = sum(len(record.text) + sum(path.stat().st_size for _, path in record.media) for record in kept)
        size_limit = total * samples_per_shard // max(1, len(kept))
        with MDSWriter(out=str(out), columns={"sample": "bytes"}, size_limit=size_limit) as writer:
            for record in kept:
                writer.write({"sample": pickle.dumps({"__key__": record.key} | record.members())})

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open the folder in place, or the prefix with its shards downloaded to the scratch folder."""
        return _Run(opening, state)


class _Run(Run):
    def __init__(self, opening: Opening, state: bytes | None) -> None:
        _enter_world(opening.rank, opening.world_size)
        _let_it_be_imported()
        from filelock import FileLock
        from streaming import StreamingDataLoader, StreamingDataset

        class Samples(StreamingDataset):  # type: ignore[misc]
            """Transforms in `__getitem__`, as its documentation shows."""

            def __getitem__(self, at: Any) -> Any:
                members = pickle.loads(super().__getitem__(at)["sample"])
                return members if transform is None else transform(members)

        transform: Callable[[dict[str, Any]], Any] | None = opening.transform
        source: dict[str, Any] = {"local": opening.where}
        if opening.where.startswith("s3://"):
            os.environ.setdefault("S3_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
            # A folder of each rank's own: every rank is a node here, and nodes do not share a disk.
            source = {"remote": opening.where, "local": str(Path(opening.scratch) / f"rank-{opening.rank}")}
        # It looks for unused names in shared memory and only then takes them: processes that open at once would clash.
        with FileLock(str(Path(tempfile.gettempdir()) / "mosaic-open.lock")):
            dataset = Samples(
                **source,
                batch_size=opening.batch_size,
                shuffle=opening.shuffle > 0,
                shuffle_algo="py1e",
                shuffle_seed=opening.seed,
                shuffle_block_size=opening.shuffle or None,
            )
        for stream in dataset.streams:
            # Forked workers would share the connection that fetched the index, and mix up each other's shards.
            stream._downloader.clean_up()
        self._loader: Any = StreamingDataLoader(
            dataset, batch_size=opening.batch_size, num_workers=opening.workers, collate_fn=_one_column
        )
        if state is not None:
            self._loader.load_state_dict(json.loads(state))

    def __iter__(self) -> Iterator[list[Any]]:
        for (samples,) in self._loader:
            yield samples

    def state(self) -> bytes:
        """Return its state dict, which it describes as JSON."""
        return json.dumps(self._loader.state_dict()).encode()

    def close(self) -> None:
        """Drop the loader: it stops its workers, and its dataset gives its folder back, when they are collected."""
        self._loader = None


def _one_column(samples: list[Any]) -> tuple[list[Any]]:
    # Its position is counted by the length of a batch's first element, so a batch must be columns, not samples.
    return (samples,)


def _enter_world(rank: int, world_size: int) -> None:
    """Set the variables by which it knows its rank: every rank is a node with one process.

    It would connect all ranks to pass barriers while a dataset is set up. Ranks that are nodes share nothing to wait
    for, so a group of this process alone stands in, and ranks can be measured one by one.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if world_size > 1:
        import torch.distributed

        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _let_it_be_imported() -> None:
    """Prepare for its import of torchvision, which it makes whatever it is asked for."""
    from vlm_stream.testing import torchvision_shim

    torchvision_shim.install()
