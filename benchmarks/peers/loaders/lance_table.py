"""Lance: one table of rows, its elastic streaming dataset over fixed splits, a state that ranks merge."""

from __future__ import annotations

import json
import os
import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from benchmarks.peers.loaders.base import Loader, Opening, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from benchmarks.peers.data import Record

__all__ = ["LanceLoader"]

_SPLITS = 12
"""Of one rank, two and three, with two workers each; for more ranks, as many as they need."""
_AT_ONCE = 8
"""Rows of a request."""


class LanceLoader(Loader):
    """`lancedb.streaming.StreamingDataset` in its `StreamingDataLoader`; a sample is one column, a pickled dict."""

    name = "lance"
    package = "lancedb"
    cannot: ClassVar = {
        "links": "its data are one table with one manifest: ten million rows would have to be written",
        "header": "a file of a table has one footer and no header for each sample",
    }
    files = "*.lance"

    def write(self, records: Iterable[Record], out: Path, samples_per_shard: int) -> None:
        """Add rows to a table, a fragment for each part."""
        import lancedb
        import pyarrow as pa

        schema = pa.schema([("sample", pa.large_binary())])
        table = lancedb.connect(str(out)).create_table("samples", schema=schema)
        records = iter(records)
        while rows := [pickle.dumps({"__key__": r.key} | r.members()) for r in islice(records, samples_per_shard)]:
            table.add(pa.table({"sample": pa.array(rows, pa.large_binary())}, schema=schema))

    def open(self, opening: Opening, state: bytes | None = None) -> Run:
        """Open the table in the folder or under the prefix."""
        return _Run(opening, state)

    def merge(self, states: Sequence[bytes], rank: int) -> bytes:
        """Merge the states of all ranks into the one that every rank goes on from."""
        from lancedb.streaming import StreamingDataset

        return json.dumps(StreamingDataset.merge_state_dicts([json.loads(state) for state in states])).encode()


class _Run(Run):
    def __init__(self, opening: Opening, state: bytes | None) -> None:
        import lancedb
        from lancedb.streaming import StreamingDataLoader, StreamingDataset

        options: dict[str, Any] = {}
        if opening.where.startswith("s3://"):
            endpoint, region = os.environ["AWS_ENDPOINT_URL"], os.environ["AWS_REGION"]
            options = {"storage_options": {"endpoint": endpoint, "region": region, "allow_http": "true"}}
        table = lancedb.connect(opening.where, **options).open_table("samples")
        workers = max(1, opening.workers)
        parts = opening.world_size * workers
        num_splits = _SPLITS if _SPLITS % parts == 0 else parts
        self._dataset = StreamingDataset(
            table,
            num_splits=num_splits,
            shuffle=opening.shuffle > 0,
            shuffle_seed=opening.seed,
            rank=opening.rank,
            world_size=opening.world_size,
            read_batch_size=_AT_ONCE,
            shuffle_clump_size=_AT_ONCE,  # as it is advised for object stores
            transform=_Apply(opening.transform),
            transform_parallelism=1,  # workers take the cores
            transform_queue_depth=2,  # else it encodes ahead without a limit
        )
        if state is not None:
            self._dataset.load_state_dict(json.loads(state))
        self._together = workers
        self._loader = StreamingDataLoader(
            self._dataset,
            batch_size=num_splits // parts,
            num_workers=opening.workers,
            collate_fn=list,
            multiprocessing_context="spawn" if opening.workers else None,  # its runtime does not live through a fork
        )

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the batches of all workers together: only between these is there a state."""
        batches = iter(self._loader)
        while several := list(islice(batches, self._together)):
            yield [sample for batch in several for sample in batch]

    def state(self) -> bytes:
        return json.dumps(self._dataset.state_dict()).encode()

    def close(self) -> None:
        self._loader = None


class _Apply:
    def __init__(self, transform: Callable[[dict[str, bytes]], Any] | None) -> None:
        self._transform = transform

    def __call__(self, rows: Any) -> list[Any]:
        import torch

        torch.set_num_threads(1)  # a setting of a thread: this is not the one that `DataLoader` has set it in
        members = [pickle.loads(each.as_buffer()) for each in rows.column("sample")]
        return members if self._transform is None else [self._transform(each) for each in members]
